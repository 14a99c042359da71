"""Memcheck and racecheck of compute-sanitizer over small layers of every schedule, on the GPU at hand.

    python tests/sanitize.py [--output checks.txt] [--jobs 8] [--only persistent]

Modules are compiled first; each check is a process of its own that loads one, runs it once and compares it with
float64. Exits with 1 where anything is reported, wrong or missing."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import rooms  # noqa: F401  makes the modules below importable
from sanitize_cases import CASES

TOOLS = {"memcheck": ["--tool", "memcheck"], "racecheck": ["--tool", "racecheck", "--racecheck-report", "all"]}
CLEAN = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "RACECHECK SUMMARY: 0 hazards displayed"}
SECONDS = 300


def cell_of(name: str) -> Any:
    import exact
    import other_cells
    import smaller_matrices
    import test_backward_emulated

    from ecornn.cells import get

    more = (other_cells.Peaks(), smaller_matrices.BlockRNN(4), smaller_matrices.BlockRNN(2),
            *test_backward_emulated.BARE.values())
    exact.ALL_CELLS.update((c.name, c) for c in more)
    return exact.ALL_CELLS.get(name) or get(name)


def build(name: str, folder: str) -> None:
    from msgspec.structs import replace

    import ecornn
    from ecornn.targets import resolve

    of, device = CASES[name], resolve("cuda")
    T, B, I, H = of["sizes"]
    target = replace(device, shared=of["shared"] << 10) if "shared" in of else device
    target = replace(target, cores=of["cores"]) if "cores" in of else target
    ecornn.compile(cell_of(of["cell"]), hidden=H, input=I, batch=B, seq=T, dtype=of["dtype"], target=target,
                   schedule=of["schedule"], config=of["config"] or None, **of["stack"]).save(file_of(name, folder))


def file_of(name: str, folder: str) -> str:
    return str(Path(folder, name.replace(" ", "_") + ".so"))


def once(name: str, folder: str) -> tuple[float, float]:
    import torch
    from exact import relative

    import ecornn

    of, rng = CASES[name], np.random.default_rng(0)
    (T, B, I, _), stack, kind = of["sizes"], of["stack"], getattr(torch, of["dtype"])
    weights = {k: torch.tensor(v).to(kind).float().numpy() for k, v in weights_of(of, rng).items()}
    layer = ecornn.load(file_of(name, folder)).bind(weights)
    if stack.get("sequences") and stack.get("training"):
        from column_gradients import errors_of

        return max(errors_of(layer, of["cell"], weights, rng).values()), GRADIENTS[of["dtype"]]
    if stack.get("sequences"):
        return laid(layer, rng, kind, weights)
    if stack.get("training"):
        return trained(layer, of, rng, kind, weights)
    x = torch.tensor(rng.standard_normal((T, B, I))).to(kind)
    call: dict[str, Any] = {}
    if stack.get("lengths"):
        call["lengths"] = rng.integers(1, T + 1, B).astype(np.int32)
    if stack.get("resets"):
        call["resets"] = rng.random((T, B)) < 0.2
    y, _ = layer(x.cuda(), **{k: torch.tensor(v).cuda() for k, v in call.items()})
    wanted = wanted_of(layer, x, weights, call)
    return relative(y.double().cpu().numpy(), wanted.y), wanted.limit


def wanted_of(layer: Any, x: Any, weights: dict[str, Any], masks: dict[str, Any]) -> Any:
    from exact import Wanted, of_stack

    work, stack = layer.manifest.workload, layer.manifest.stack
    name = work.cell.partition("@")[0]  # of a cell that only tests have
    size = (x.shape[1], work.hidden) if stack.count == 1 else (stack.count, x.shape[1], work.hidden)
    states = [np.zeros(size)] * len(cell_of(name).states)
    return Wanted(work.arithmetic, lambda forward: of_stack(
        name, stack, x.double().numpy(), states, weights, masks, forward))


def weights_of(of: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    from ecornn.numpy_reference import NORMALIZED, STEPS, random_weights

    (_, _, I, H), stack = of["sizes"], of["stack"]
    if of["cell"] in STEPS or of["cell"] in NORMALIZED:
        return random_weights(of["cell"], I, H, 1, stack.get("layers", 1), 1 + stack.get("bidirectional", False))
    return {f"{n}_l0": rng.uniform(-1, 1, (s[0] * s[1], *s[2:])) * H ** -0.5
            for n, s in cell_of(of["cell"]).parameters(I, H).items()}


def laid(layer: Any, rng: np.random.Generator, kind: Any, weights: Any) -> tuple[float, float]:
    import torch
    from exact import relative

    import ecornn

    w = layer.manifest.workload
    rows = torch.tensor(rng.standard_normal((w.seq, 2 * w.batch + 1, w.input))).to(kind)
    lengths = rng.integers(w.seq // 2, w.seq + 1, 2 * w.batch + 1)
    columns = ecornn.Columns.of(lengths, w.batch, layer.together)
    assert columns.wrapped.size
    y = layer(rows[columns.inside, columns.table].cuda(), sequences=columns)[0].double().cpu().numpy()
    wanted = wanted_of(layer, rows, weights, {"lengths": lengths})
    found = np.zeros_like(wanted.y)
    for s, n in enumerate(lengths):
        found[:n, s] = y.reshape(-1, y.shape[2])[columns.of_sequence(s)]
    return relative(found, wanted.y), wanted.limit


GRADIENTS = {"float32": 2e-5, "float16": 8 * 2.0 ** -11, "bfloat16": 8 * 2.0 ** -8}


def trained(layer: Any, of: dict[str, Any], rng: np.random.Generator, kind: Any, weights: Any) -> tuple[float, float]:
    import torch
    from exact import relative

    (T, B, I, H), stack = of["sizes"], layer.manifest.stack
    def drawn(*shape: int) -> Any:
        return torch.tensor(rng.standard_normal(shape)).to(kind)
    x, dy = drawn(T, B, I), drawn(T, B, H * stack.directions)
    shape = (B, H) if stack.count == 1 else (stack.count, B, H)
    states, dstates = ([drawn(*shape) for _ in layer.manifest.states] for _ in range(2))
    masks: dict[str, Any] = {}
    if stack.lengths:
        masks["lengths"] = rng.integers(0, T + 1, B).astype(np.int32)
    if stack.resets:
        masks["resets"] = rng.random((T, B)) < 0.2
    _, _, kept = layer.forward(x.cuda(), [s.cuda() for s in states],
                               **{k: torch.tensor(v).cuda() for k, v in masks.items()})
    found = layer.backward(kept, dy.cuda(), [s.cuda() for s in dstates])
    dx, dweights, before = gradients_of(
        of["cell"], x.double().numpy(), weights, [s.double().numpy() for s in states], dy.double().numpy(),
        [s.double().numpy() for s in dstates], masks)
    pairs = [(found.x, dx), *((found.weights[n], g) for n, g in dweights.items())]
    pairs += [(a, b.reshape(a.shape)) for a, b in zip(found.state, before, strict=True)]
    return max(relative(a.double().cpu().numpy(), b) for a, b in pairs), GRADIENTS[of["dtype"]]


def gradients_of(name: str, x: Any, weights: dict[str, Any], states: list[Any], dy: Any, dstates: list[Any],
                 masks: dict[str, Any]) -> tuple[Any, dict[str, Any], Any]:
    """Gradients of x, weights and first states, in float64; by the adjoint for cells without a NumPy formula."""
    import ecornn
    from ecornn.analysis import analyse
    from ecornn.analysis.adjoint import adjoint
    from ecornn.analysis.backpropagation import backpropagate
    from ecornn.numpy_reference import NORMALIZED, STEPS

    if name in STEPS or name in NORMALIZED:
        return ecornn.reference_gradients(name, x, weights, states, dy=dy, dstate=dstates, **masks)
    cell, I, H = cell_of(name), x.shape[2], dy.shape[2]
    parameters = {n: weights[f"{n}_l0"].reshape(s) for n, s in cell.parameters(I, H).items()}
    dx, found, before = backpropagate(adjoint(analyse(cell, I, H), H), x, parameters, states, dy, dstates)
    return dx, {f"{n}_l0": g.reshape(weights[f"{n}_l0"].shape) for n, g in found.items()}, before


def checked(name: str, tool: str, folder: str) -> tuple[bool, str]:
    command = ["compute-sanitizer", *TOOLS[tool], sys.executable, __file__, "--once", name, "--folder", folder]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return False, f"no end within {SECONDS} s"
    text = (done.stdout + done.stderr).splitlines()
    lines = [line for line in text if line.startswith(("error ", "=========", "Trace"))]
    good = done.returncode == 0 and any(CLEAN[tool] in line for line in lines)
    said = [line.removeprefix("========= ") for line in lines if "SUMMARY" in line or line.startswith("error ")]
    return good, "; ".join(said) if good else "\n".join([*lines[:20], done.stderr[-1500:]])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="also write the report there")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=cores, help="processes at once [%(default)s]")
    parser.add_argument("--only", default="", help="cases whose name or schedule has this in it")
    parser.add_argument("--once", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        error, limit = once(args.once, args.folder)
        print(f"error {error:.1e}, limit {limit:.1e}", flush=True)
        return int(not error <= limit)
    names = [n for n, of in CASES.items() if args.only in n or args.only in of["schedule"]]
    report, failed = [], 0
    with tempfile.TemporaryDirectory(prefix="ecornn-sanitize-") as folder:
        with ProcessPoolExecutor(args.jobs, get_context("spawn")) as builders:
            for name, built in [(n, builders.submit(build, n, folder)) for n in names]:
                if (error := built.exception()) is not None:
                    print(f"FAILED to build {name}: {error}", flush=True)
        with ThreadPoolExecutor(args.jobs) as threads:
            runs = [(n, t, threads.submit(checked, n, t, folder)) for n in names for t in TOOLS]
            for name, tool, run in runs:
                good, said = run.result()
                failed += not good
                what = {k: v for k, v in CASES[name].items() if v}
                report.append(f"{'clean' if good else 'FAILED'} {tool} {name}: {said}\n    {json.dumps(what)}")
                print(report[-1], flush=True)
    report.append(f"{len(runs)} runs, {failed} not clean")
    print(report[-1])
    if args.output:
        args.output.write_text("\n".join(report) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Recurrences of adjoints alone, by each schedule that serves them: checked against float64, then timed in turns.

    python benchmarks/compare_adjoints.py --output benchmarks/results/h100_adjoints.jsonl
    python benchmarks/compare_adjoints.py --only "lstm 64x2048"

Of `persistent_wide` the cuts that its estimate likes best, of the others the default. Hoisted values are random, and so
small that gradients do not grow. The first steps are held against float64: a cut may be twice as far from it as a
float64 recurrence that rounds what it multiplies, and what it leaves, to the layer's type. Times are medians of CUDA
graphs, microseconds a step, beside what the estimate said.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

    from ecornn.schedules.base import Schedule, Task

DEVICE = "cuda"
STEPS, CHECKED = 256, 12  # of a timed and of a checked call
OTHERS = ("persistent", "layout_transform")


@dataclass(frozen=True)
class Case:
    """The adjoint of a layer with I = H."""

    cell: str
    B: int
    H: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.cell} {self.B}x{self.H} {self.dtype}"


CASES = [Case(cell, B, H, "bfloat16") for cell in ("lstm", "gru")
         for B, H in ((64, 512), (64, 1024), (64, 2048), (128, 512), (256, 1024), (512, 256))]


@dataclass(frozen=True)
class Cut:
    """A configuration of a schedule."""

    case: Case
    schedule: str
    config: tuple[tuple[str, Any], ...]
    expected: float


def task_of(case: Case) -> Task:
    """The recurrence of the case's adjoint, on the GPU that is here, or on an H100."""
    from ecornn.analysis.adjoint import adjoint
    from ecornn.cells import get
    from ecornn.schedules.backward.assemble import recurrence_task
    from ecornn.targets import KNOWN
    from ecornn.task import make_task
    from ecornn.workload import Workload

    layer = make_task(get(case.cell), Workload(case.cell, case.H, case.H, case.B, STEPS, case.dtype), KNOWN["sm_90a"])
    return recurrence_task(layer, adjoint(layer.graph, case.H))


def cuts(case: Case, count: int) -> Iterator[Cut]:
    """Of the wide schedule one of each way to share the work, the best of the estimate first, then the best of all
    with fewer weights in registers; and the defaults of the others."""
    from ecornn.schedules import all_schedules

    task, schedules = task_of(case), all_schedules()
    for name in OTHERS:
        if schedules[name].serves(task) is None:
            yield cut(case, task, schedules[name], schedules[name].default(task))
            break
    wide = schedules["persistent_wide"]
    if wide.serves(task) is not None:
        return
    knobs, default = {k.name: k.values for k in wide.knobs(task)}, wide.default(task)
    best: dict[tuple[Any, ...], Cut] = {}
    for one in sorted(wide.candidates(task), key=lambda c: wide.features(task, wide.plan(task, c))["estimate"]):
        kind = tuple(one[k] for k in ("groups", "parts", "row_teams"))
        best.setdefault(kind, cut(case, task, wide, {**one, "hoisted": default["hoisted"]}))
    fewer = [{**default, "registers": r} for r in knobs["registers"] if r < int(default["registers"])]
    found = [cut(case, task, wide, config) for config in fewer if wide.check(task, config) is None]
    yield from list(best.values())[:count - min(3, len(found))]
    yield from found[:3]


def cut(case: Case, task: Task, schedule: Schedule, config: Any) -> Cut:
    features = schedule.features(task, schedule.plan(task, config))
    return Cut(case, schedule.name, tuple(config.items()), features["estimate"] / 1e3)


def build(one: Cut, path: str) -> str:
    """Builds the module of a cut; empty, or why there is none."""
    from ecornn.build.module import build_module
    from ecornn.cells import get
    from ecornn.errors import EcornnError
    from ecornn.schedules import all_schedules
    from ecornn.task import make_manifest

    task, schedule = task_of(one.case), all_schedules()[one.schedule]
    try:
        program = schedule.program(task, schedule.plan(task, dict(one.config)))
        manifest = make_manifest(get(one.case.cell), task, schedule, dict(one.config), program, "compare_adjoints")
        build_module(program, manifest, Path(path))
    except EcornnError as error:
        return str(error)[:300]
    return ""


class Sample:
    """Random arguments of a case's recurrence, and what comes of the first steps in float64."""

    def __init__(self, case: Case) -> None:
        self.case, self.task = case, task_of(case)
        graph, rng, shape = self.task.graph, np.random.default_rng(case.H + case.B), (case.B, case.H)
        read = {t.parameter for p in graph.phases[0].products for t in p.terms} | {v.parameter for v in graph.vectors}
        self.weights = {n: self.rounded(rng.uniform(-1, 1, s) * case.H**-0.5)
                        for n, s in graph.parameters.items() if n in read}
        count = len(graph.hoisted_outputs)
        self.hoisted = self.rounded(rng.uniform(-0.5, 0.5, (CHECKED, case.B, count, case.H)))
        self.first = {n: self.rounded(rng.normal(size=shape) * n.startswith("rest")) for n in graph.states}
        self.exact, rounding = self.recur(False), self.recur(True)
        self.allowed = [2 * difference(a, b) for a, b in zip(rounding, self.exact, strict=True)]

    def rounded(self, values: np.ndarray) -> np.ndarray:
        """In float64 still, as the layer's type has them."""
        import torch

        return torch.tensor(values).to(getattr(torch, self.case.dtype)).double().numpy()

    def recur(self, rounding: bool) -> list[np.ndarray]:
        """Each output of all checked steps, (T, B, H)."""
        from ecornn.analysis.evaluate import start, step

        graph, shape = self.task.graph, (self.case.B, self.case.H)
        made = np.zeros((len(graph.outputs), CHECKED, *shape))
        known, now, exchanged = start(graph, self.weights), dict(self.first), set(graph.phases[0].operands)
        for t in reversed(range(CHECKED)) if self.task.traversal.reverse else range(CHECKED):
            values = known | {v: self.hoisted[t, :, q] for q, v in enumerate(graph.hoisted_outputs)}
            for name, var in graph.states.items():
                values[var] = self.rounded(now[name]) if rounding and var in exchanged else now[name]
            step(graph, self.weights, values, shape)
            for o, var in enumerate(graph.outputs):
                made[o, t] = values[var]
            now = {n: np.broadcast_to(values[v], shape) for n, v in graph.results.items()}
        return [self.rounded(m) if rounding else m for m in made]


def difference(found: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


class Side:
    """A cut's module with its buffers on the GPU, T = ``steps``."""

    def __init__(self, one: Cut, path: str, sample: Sample, steps: int) -> None:
        import torch

        from ecornn.runtime.library import open_library
        from ecornn.schedules import all_schedules
        from ecornn.schedules.hoisted import hoisted_of

        case, task, config = one.case, sample.task, dict(one.config)
        self.case, self.steps, self.run = case, steps, open_library(Path(path)).run
        program = all_schedules()[one.schedule].program(task, all_schedules()[one.schedule].plan(task, config))
        self.memory: dict[str, torch.Tensor] = {}
        for b in program.buffers:
            kind = getattr(torch, b.dtype)
            if b.tensor in ("state_in", "state_out"):
                self.memory[b.name] = torch.from_numpy(sample.first[b.state]).to(DEVICE, kind)
            elif b.packing is not None:
                self.memory[b.name] = packed(b.packing, sample.weights).to(kind)
            else:
                words = torch.full((b.extent.at(steps) * kind.itemsize,), 0xFF, dtype=torch.uint8, device=DEVICE)
                self.memory[b.name] = words.view(kind)
        layout = hoisted_of(task, str(config.get("hoisted", "float32")))
        memory, first, q = self.memory["hoisted"].view(steps, case.B, layout.row), 0, 0
        rows = torch.from_numpy(sample.hoisted).to(DEVICE, memory.dtype)
        for count in layout.planes:
            for n in range(count):
                memory[:CHECKED, :, first + n:first + count * case.H:count] = rows[:, :, q + n]
            first, q = first + count * layout.units, q + count
        for t in range(CHECKED, steps):
            memory[t] = memory[t - CHECKED]
        self.pointers = [self.memory[name].data_ptr() for name in program.entries["run"].takes]

    def __call__(self) -> None:
        self.run(self.steps, self.case.B, 0, queue(), *self.pointers)

    def outputs(self) -> np.ndarray:
        """(T, B, O, H)"""
        made = self.memory["outputs"].double().cpu().numpy()
        return made.reshape(self.steps, self.case.B, -1, self.case.H)


def queue() -> int:
    """The stream that is captured."""
    import torch

    return torch.cuda.current_stream().cuda_stream


def packed(packing: Any, weights: dict[str, np.ndarray]) -> torch.Tensor:
    """Weights as kernels read them, float32."""
    import torch

    full = torch.zeros(packing.pad, device=DEVICE)
    for i, (name, gate) in enumerate(packing.sources):
        if name:
            source = torch.from_numpy(weights[name][gate]).to(DEVICE, torch.float32)
            full[(i, *(slice(n) for n in source.shape))] = source
    return full.reshape(packing.split).permute(packing.order).contiguous()


def fault_of(one: Cut, path: str, sample: Sample) -> tuple[str, float]:
    """Empty, or what is wrong with the results of a cut; and its largest error."""
    side = Side(one, path, sample, CHECKED)
    side()
    found = side.outputs()
    errors = [difference(found[:, :, o], exact) for o, exact in enumerate(sample.exact)]
    side.memory["outputs"].fill_(float("nan"))
    side()
    if not np.array_equal(found, side.outputs()):
        return "two runs differ", max(errors)
    wrong = [f"{e:.1e}, allowed {most:.1e}" for e, most in zip(errors, sample.allowed, strict=True) if not e <= most]
    return "; ".join(wrong), max(errors)


def measure(case: Case, made: list[tuple[Cut, str, str]], seconds: float) -> list[dict[str, Any]]:
    """The cuts of a case; ``made``: each with its module, and why there is none. In a process of its own: an error of
    the GPU is then this case's alone, and what was last begun is on the screen."""
    import torch
    from side_by_side import graph_of, summary, take_turns

    sample, found = Sample(case), []
    sides: dict[str, Side] = {}  # which graphs need, too
    for n, (one, path, fault) in enumerate(made):
        row = {**asdict(case), "schedule": one.schedule, "config": dict(one.config), "expected_us": one.expected}
        if not fault:
            print(f"  checking {one.schedule} {dict(one.config)}", file=sys.stderr, flush=True)
            fault, row["error"] = fault_of(one, path, sample)
        if fault:
            row["fault"] = fault
        else:
            sides[str(n)] = Side(one, path, sample, STEPS)
        found.append(row)
    graphs = {}
    for n, side in sides.items():
        print(f"  capturing {made[int(n)][0].schedule} {n}", file=sys.stderr, flush=True)
        graphs[n] = graph_of(side)
        graphs[n].replay()
        torch.cuda.synchronize()
    times = take_turns({n: graph.replay for n, graph in graphs.items()}, lambda: None, 20, seconds)
    for n, values in times.items():
        found[int(n)] |= {k[1:]: v for k, v in summary("", values, STEPS).items()}
    return [{**row, "gpu": torch.cuda.get_device_name()} for row in found]


def line(row: dict[str, Any]) -> str:
    """One cut for people."""
    knobs = " ".join(f"{k}={v}" for k, v in row["config"].items() if k not in ("math", "ahead", "interleave", "chains"))
    if "fault" in row:
        return f"  {row['schedule']:16} {row['fault']}  {knobs}"
    return (f"  {row['schedule']:16} {row['us']:6.2f} [{row['p20']:.2f}, {row['p80']:.2f}] us  "
            f"expected {row['expected_us']:6.2f}  error {row['error']:.1e}  {knobs}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON lines to write")
    parser.add_argument("--only", action="append", default=[], help="cases whose name has this; may repeat")
    parser.add_argument("--cuts", type=int, default=9, help="of the wide schedule, a case")
    parser.add_argument("--seconds", type=float, default=1.0, help="of timing a case")
    parser.add_argument("--processes", type=int, default=16, help="that compile")
    parser.add_argument("--build-only", action="store_true", help="without a GPU: says which cuts are built")
    arguments = parser.parse_args()
    cases = [c for c in CASES if not arguments.only or any(part in str(c) for part in arguments.only)]
    faults = 0
    with tempfile.TemporaryDirectory(prefix="ecornn-") as folder, \
            ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
        every = [one for found in pool.map(listed, cases, [arguments.cuts] * len(cases)) for one in found]
        paths = [str(Path(folder, f"{n}.so")) for n in range(len(every))]
        built = list(zip(every, paths, pool.map(build, every, paths), strict=True))
        print(f"{len(built)} modules", flush=True)
        for case in cases:
            print(case, flush=True)
            own = [b for b in built if b[0].case == case]
            if arguments.build_only:
                for one, _, why in own:
                    print(f"  {one.schedule} {one.expected:.2f} {dict(one.config)} {why}")
                continue
            try:
                with ProcessPoolExecutor(1, get_context("spawn")) as alone:
                    rows = alone.submit(measure, case, own, arguments.seconds).result()
            except Exception as error:  # the case's process has ended, or cannot go on
                why = f"{type(error).__name__}: {error}"[:300]
                rows = [{**asdict(case), "schedule": "all", "config": {}, "fault": why}]
            faults += sum("fault" in r for r in rows)
            print("\n".join(map(line, sorted(rows, key=lambda r: r.get("us", 0.0)))), flush=True)
            if arguments.output:
                arguments.output.parent.mkdir(parents=True, exist_ok=True)
                with arguments.output.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in rows)
    sys.exit(faults > 0)


def listed(case: Case, count: int) -> list[Cut]:
    return list(cuts(case, count))


if __name__ == "__main__":
    main()

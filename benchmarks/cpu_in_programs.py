"""The drop-in on a CPU where it is not alone, and calls that `ecornn bench` does not make; both sides in turns.

    python benchmarks/cpu_in_programs.py turns --output benchmarks/results/cpu_in_programs.json
    python benchmarks/cpu_in_programs.py busy --busy 2 --busy 4 --output ...
    python benchmarks/cpu_in_programs.py service --output ...
    python benchmarks/cpu_in_programs.py cells --output benchmarks/results/cpu_cells.json            # --gpu: of a GPU
    python benchmarks/cpu_in_programs.py weights                                                     # or lengths
    python benchmarks/cpu_in_programs.py host --output benchmarks/results/host_time_h100.json        # of a GPU
    python benchmarks/cpu_in_programs.py host --cpu --output benchmarks/results/host_time_cpu.json

turns: each call comes after an operation of PyTorch's, a product and a relu of as many values as the layer reads, as in
any model. busy: the same while other processes compute, so many for each core. service: threads of one process, each
with requests of its own, call the same layer at the same time; each request has such an operation, too.

Nothing is set in the environment. Sides take turns in blocks of some calls, of which the first is not counted, after
the threads of the other side have stopped spinning. A call's time is from its begin to its end, as is the operation's,
which may wait for what a call leaves behind. Milliseconds: 50th and 99th percentile of all calls. The layers are those
of grids/cpu.toml (--suite: its groups). Outputs of both sides are compared first.

cells: replaced cells and torch.nn's, called in a loop, as policies and decoders call them. A row is the median of
microseconds a step with the 20th and 80th percentile, of forward alone ("inference"), also in a CUDA graph, or of a
training step with SGD.
weights: an LSTM whose weights are new at each call, as weight norm, hypernetworks and ``functional_call`` make them,
with and without gradients; beside that, the same weights each time.
lengths: an LSTM's rows of lengths uniform in 1..T, against all rows at full length and PyTorch's packed sequences. The
share of valid steps is what a layer would need that spent nothing on rows that have ended.
host: how long Python and the driver take from ``layer(x)`` until it returns. Layers of 16 units, so that what is
computed takes next to nothing, without and with states. On a CPU one thread runs a call to its end: NumPy arrays, torch
tensors, and the drop-in beside torch.nn; `entry` is the module's own function with the same arguments. On a GPU calls
return before they have run: tensors of the GPU, the drop-in and torch.nn, blocks of calls between which the GPU is
waited for, outside the time. `training`: forward and backward. Microseconds a call: p20, median and p80 of blocks
of 50 calls, all sides in turns. Aims: `layer(x)` 25 at most, the drop-in 40.

In all but host inputs are new in each round, but for the x of new weights. Outputs and gradients are compared with
float64 first; with new weights ours are compared with PyTorch's in each round.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, count, product
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measured_rows import mean
from side_by_side import busy, environment, host_clock, options, relative, replaced, summary, timed, told, write
from torch.func import functional_call
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import ecornn.torch
from ecornn.bench import turns
from ecornn.bench.grid import read_grid
from ecornn.host_cpu import detect
from ecornn.numpy_reference import random_weights, reference
from ecornn.tune.timing import wall_clock

FILE = Path(__file__).parent / "grids" / "cpu.toml"
SINGLE = ("layers", "latency", "grid")  # the suites of single layers
BLOCKS = 8  # turns of each side
REQUESTS = 8  # threads of a service
UNITS, CALLS = 16, 50  # of layers whose host time is measured, and calls of a block
LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
CELLS = ("LSTMCell", "GRUCell", "RNNCell")
SIZES = [(1, 64), (1, 256), (1, 512), (8, 128), (32, 256), (64, 512)]  # B, H of cells; I is H
GPU_SIZES = [*product((1, 16, 256), (256, 512, 1024))]
LIMITS = {"inference": 1e-5, "training": 2e-5, "graph": 1e-5}
PROGRAMS = ("turns", "busy", "service")
Times = list[tuple[float, float]]  # seconds of the operation and of the call
Row = dict[str, Any]


class Program:
    """An operation, then the layer."""

    def __init__(self, layer: torch.nn.Module, shape: tuple[int, int, int, int]) -> None:
        T, B, I, _ = shape
        self.layer, self.x, self.weight = layer, torch.randn(T, B, I), torch.randn(I, I) / I ** 0.5

    def once(self) -> tuple[float, float, torch.Tensor]:
        """Seconds of the operation and of the call, and the layer's output."""
        begin = time.perf_counter()
        h = torch.relu(self.x @ self.weight)
        between = time.perf_counter()
        y = self.layer(h)[0]
        return between - begin, time.perf_counter() - between, y

    def block(self, seconds: float, start: Callable[[], object] = lambda: None) -> Times:
        """Times of calls for so long, three at least, after one that is not counted and ``start``."""
        self.once()
        start()
        found, end = list[tuple[float, float]](), time.perf_counter() + seconds
        while len(found) < 3 or time.perf_counter() < end:
            found.append(self.once()[:2])
        return found


def in_threads(program: Program, seconds: float) -> Times:
    """Times of calls in the threads of a service, all at the same time."""
    start = threading.Barrier(REQUESTS)
    with ThreadPoolExecutor(REQUESTS) as threads:
        return [*chain(*threads.map(lambda _: torch.no_grad()(program.block)(seconds, start.wait), range(REQUESTS)))]


def suite_of(name: str) -> list[tuple[str, tuple[int, ...]]]:
    """Cells and T, B, I, H of a group of the CPU's grid."""
    return [(str(c.cell), (c.seq or 0, c.batch or 0, c.input or 0, c.hidden or 0))
            for c in (layer.case for layer in read_grid(FILE).members(name))]


def compare(cell: str, shape: tuple[int, int, int, int], budget: float, loads: list[int],
            run: Callable[[Program, float], Times]) -> Iterator[Row]:
    """A row for each load: busy processes for each core."""
    kind, _, nonlinearity = cell.partition("_")
    library = getattr(torch.nn, kind.upper())(*shape[2:], **({"nonlinearity": nonlinearity} if nonlinearity else {}))
    torch.manual_seed(0)
    theirs_program, program = Program(library.eval(), shape), Program(replaced(library), shape)
    program.x, program.weight = theirs_program.x, theirs_program.weight
    error = relative(program.once()[2], theirs_program.once()[2])
    if not error <= 1e-5:
        sys.exit(f"{cell} {shape}: differs from torch.nn by {error:.2e}")
    for load in loads:
        times: dict[str, Times] = {"ecornn": [], "torch": []}
        with busy(load * detect().cores):
            for _ in range(BLOCKS):
                for name, side in (("ecornn", program), ("torch", theirs_program)):
                    if not load:
                        turns.settle()
                    times[name] += run(side, budget / BLOCKS)
        row = {"cell": cell, **dict(zip("TBIH", shape, strict=True)), "busy": load}
        for name, values in times.items():
            row[f"{name}_calls"] = len(values)
            operation, call = np.array(values).T * 1e3
            for what, of in (("ms", call), ("operation_ms", operation), ("both_ms", call + operation)):
                row[f"{name}_{what}"], row[f"{name}_p99_{what}"] = map(float, np.percentile(of, [50, 99]))
        for what in ("ms", "p99_ms", "both_ms", "p99_both_ms"):
            row[f"ratio_{what}"] = row[f"torch_{what}"] / row[f"ecornn_{what}"]
        yield row


def add(path: Path, row: Row) -> None:
    """Adds the row to the file, in place of an older one of the same program."""
    key = itemgetter("mode", "cell", "T", "B", "I", "H", "busy", "threads")
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    where = {"numpy": np.__version__, "kernel": os.uname().release,
             "command": "python benchmarks/cpu_in_programs.py MODE"}
    write(path, environment(cpu=True) | where, [r for r in old if key(r) != key(row)] + [row])


def loop(cell: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The output states of all steps."""
    hx, found = None, []
    for row in x:
        hx = cell(row, hx)
        found.append(hx[0] if isinstance(hx, tuple) else hx)
    return torch.stack(found)


def train(cell: torch.nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer | None = None) -> list[torch.Tensor]:
    """A training step; the gradients."""
    cell.zero_grad()
    loop(cell, x).square().mean().backward()
    if optimizer is not None:
        optimizer.step()
    return [p.grad for p in cell.parameters()]


def compare_cells(name: str, size: tuple[int, int], kind: str, arguments: argparse.Namespace) -> Row:
    """One row: loops of calls, each from the states of the one before."""
    torch.manual_seed(0)
    batch, hidden = size
    device, dtype = "cuda" if arguments.gpu else "cpu", getattr(torch, arguments.dtype)
    library = getattr(torch.nn, name)(hidden, hidden, device=device, dtype=dtype)
    sides = {"ecornn": replaced(library), "torch": library}
    x = torch.randn(arguments.steps, batch, hidden, device=device, dtype=dtype)
    row: Row = {"cell": name, "B": batch, "H": hidden, "kind": kind, "steps": arguments.steps, "device": device,
                "dtype": arguments.dtype, "threads": torch.get_num_threads()}
    call = train if kind == "training" else lambda *given: [loop(*given)]
    with torch.set_grad_enabled(kind == "training"):
        wanted = call(copy.deepcopy(library).double(), x.double())
        errors = {side: max(map(relative, call(cell, x), wanted)) for side, cell in sides.items()}
        row |= {f"{side}_error": error for side, error in errors.items()}
        if not errors["ecornn"] <= (LIMITS[kind] if dtype == torch.float32 else 2 * errors["torch"]):
            sys.exit(f"{name} B={batch} H={hidden} {kind}: errors {errors}")
        runs: dict[str, Callable[[], object]] = {
            side: partial(train, cell, x, torch.optim.SGD(cell.parameters(), 1e-6)) if kind == "training" else
            captured(partial(loop, cell, x)) if kind == "graph" else partial(loop, cell, x)
            for side, cell in sides.items()}
        taken = turns.take_turns if arguments.gpu else turns.host_turns
        found: Any = taken(runs, lambda: x.copy_(torch.randn_like(x)), arguments.repeats, float("inf"), wall_us)
    for side, times in (found if arguments.gpu else found[0]).items():
        row |= summary(side, times if arguments.gpu else [*chain(*times)], arguments.steps)
    return row | {"ratio": row["torch_us"] / row["ecornn_us"]}


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """The replay of a run as a CUDA graph."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph.replay


def wall_us(run: Callable[[], object]) -> float:
    """Microseconds of a run, until the GPU has done it, if there is one."""
    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None

    def whole() -> None:
        run()
        wait()

    wait()
    return wall_clock(whole) * 1e6


def compare_weights(hidden: int, training: bool, new: bool, arguments: argparse.Namespace) -> Row:
    """One row: both sides get the same tensors; y, or the gradients of all weights."""
    T, B, numbers = arguments.seq or 32, arguments.batch or 4, count()
    theirs = torch.nn.LSTM(hidden, hidden)
    base, x = {k: v.detach() for k, v in theirs.named_parameters()}, torch.randn(T, B, hidden)
    weights, found = dict(base), dict[str, list[torch.Tensor]]()

    def fresh() -> None:
        """New weights, once the last round's results have been compared."""
        if not max(map(relative, found.get("ecornn", []), found.get("torch", [])), default=0.0) < LIMITS["inference"]:
            sys.exit(f"H={hidden}: the two sides differ")
        number = next(numbers)
        weights.update({k: (v.detach() * (1 + 0.01 * number) if new else v).requires_grad_(training)
                        for k, v in base.items()})

    def run(side: str, layer: torch.nn.Module) -> None:
        with torch.set_grad_enabled(training):
            y = functional_call(layer, weights, (x,))[0]
            found[side] = [*torch.autograd.grad(y.square().mean(), [*weights.values()])] if training else [y]

    row = timed({"ecornn": partial(run, "ecornn", replaced(theirs)), "torch": partial(run, "torch", theirs)}, fresh,
                arguments.repeats, 1, clock=host_clock)
    fresh()
    return {"H": hidden, "T": T, "B": B, "training": training, "new": new, **row,
            "ratio": row["torch_us"] / row["ecornn_us"]}


def compare_lengths(hidden: int, arguments: argparse.Namespace) -> Row:
    """One row: a module with lengths, another one without, and PyTorch's packed sequences."""
    T, B, rng = arguments.seq or 100, arguments.batch or 32, np.random.default_rng(0)
    weights = random_weights("lstm", hidden, hidden, 0)
    with_lengths, without = (ecornn.compile("lstm", hidden=hidden, batch=B, seq=T, target="cpu", lengths=given).bind(
        weights, threads=arguments.threads) for given in (True, False))
    theirs = torch.nn.LSTM(hidden, hidden)
    theirs.load_state_dict({n: torch.from_numpy(w) for n, w in weights.items()})
    x, lengths, shares = np.empty((T, B, hidden), np.float32), np.empty(B, np.int64), list[float]()

    def fresh() -> None:
        x[:], lengths[:] = rng.standard_normal(x.shape), rng.integers(1, T + 1, B)
        shares.append(lengths.sum() / (T * B))

    def packed() -> Any:
        with torch.inference_mode():
            rows = pack_padded_sequence(torch.from_numpy(x), torch.from_numpy(lengths), enforce_sorted=False)
            return pad_packed_sequence(theirs(rows)[0], total_length=T)[0].numpy()

    sides: dict[str, Callable[[], Any]] = {
        "full": lambda: without(x)[0], "full_by_lengths": lambda: with_lengths(x)[0],
        "lengths": lambda: with_lengths(x, lengths=lengths)[0],
        "sorted": lambda: with_lengths(x, lengths=np.sort(lengths))[0], "torch": packed}
    fresh()
    expected, _ = reference("lstm", x, weights, lengths=lengths)
    for side in ("lengths", "torch"):
        error = np.linalg.norm(sides[side]() - expected) / np.linalg.norm(expected)
        if not error < LIMITS["inference"]:
            sys.exit(f"{side}: relative error {error:.2g}")
    row = timed(sides, fresh, arguments.repeats, 1, clock=host_clock)
    return {"H": hidden, "T": T, "B": B, "valid": float(np.mean(shares)), **row}


def sides_of(cell: str, steps: int, device: str) -> dict[str, Callable[[], Any]]:
    """Calls of one layer by name."""
    made = ecornn.compile(cell, hidden=UNITS, input=UNITS, batch=1, seq=steps, target=device)
    theirs = getattr(torch.nn, cell.upper())(UNITS, UNITS, device=device)
    ours = getattr(ecornn.torch, cell.upper())(UNITS, UNITS, device=device)
    ours.wait = True  # a first call is not PyTorch's
    layer = made.bind({name: value.detach() for name, value in theirs.named_parameters()},
                      threads=1 if device == "cpu" else None)
    x = torch.randn(steps, 1, UNITS, device=device)
    _, state = layer(x)
    _, whole = theirs(x)
    found: dict[str, Callable[[], Any]] = {
        "tensor": lambda: layer(x), "tensor, states": lambda: layer(x, state),
        "drop-in": lambda: ours(x), "drop-in, states": lambda: ours(x, whole),
        "torch.nn": lambda: theirs(x), "torch.nn, states": lambda: theirs(x, whole),
        "drop-in, training": partial(train_layer, ours, x), "torch.nn, training": partial(train_layer, theirs, x)}
    if device == "cpu":
        rows, before = x.numpy(), tuple(s.numpy() for s in state)
        found |= {"NumPy": lambda: layer(rows), "NumPy, states": lambda: layer(rows, before)}
    return found | {"entry": entry_of(layer, x)}


def train_layer(layer: torch.nn.Module, x: torch.Tensor) -> None:
    """Forward and backward."""
    with torch.enable_grad():
        layer(x)[0].sum().backward()
    layer.zero_grad()


def entry_of(layer: Any, x: torch.Tensor) -> Callable[[], Any]:
    """The module's function alone, with the arguments of a call."""
    run, given = layer._run, []
    layer._run = lambda *arguments: given.append(arguments)
    kept = layer(x)  # whose memory the arguments point to
    layer._run = run
    return lambda: run(*given[0]) or kept


def host_time(arguments: argparse.Namespace) -> None:
    """The rows of ``host``, of a GPU if there is one and --cpu is not given."""
    device = "cuda" if torch.cuda.is_available() and not arguments.cpu else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)
    where, rows = environment(cpu=device == "cpu"), list[Row]()
    head = {"device": where.get("gpu", where.get("cpu"))} | {name: where[name] for name in ("torch", "ecornn", "time")}

    def clock(run: Callable[[], Any]) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            run()
        return (time.perf_counter() - begin) / CALLS * 1e6

    for cell, steps in product(("lstm", "gru"), (1, 8, 100)):
        calls = sides_of(cell, steps, device)
        with torch.no_grad():
            found = turns.take_turns(calls, lambda: None, arguments.repeats, float("inf"), clock)
        sides = {name: dict(zip(("p20", "median", "p80"), np.percentile(times, [20, 50, 80]).tolist(), strict=True))
                 for name, times in found.items()}
        rows.append({"cell": cell, "T": steps, "B": 1, "H": UNITS, "us": sides})
        print(f"{cell} T={steps}: " + ", ".join(f"{name} {one['median']:.1f} ({one['p20']:.1f} to {one['p80']:.1f})"
                                                for name, one in sides.items()), flush=True)
        if arguments.output:
            arguments.output.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")


def in_programs(arguments: argparse.Namespace) -> None:
    """A row of each layer and load, in the file at once."""
    loads = arguments.busy or [2, 4] if arguments.mode == "busy" else [0]
    run = in_threads if arguments.mode == "service" else Program.block
    if arguments.shape:
        layers = [(cell, tuple(map(int, shape.split("x")))) for shape, cell in product(arguments.shape, LAYERS)]
    else:
        layers = [layer for suite in arguments.suite or SINGLE for layer in suite_of(suite)]
    rows: list[Row] = []
    for cell, shape in layers:
        size = "x".join(map(str, shape))
        if cell not in (arguments.cell or [cell]) or size not in (arguments.only or [size]):
            continue
        with torch.no_grad():
            for row in compare(cell, shape, arguments.budget, loads, run):
                rows.append({"mode": arguments.mode, "threads": arguments.threads, **row})
                if arguments.output:
                    add(arguments.output, rows[-1])
                print(told(rows[-1]), flush=True)
    for load, what in product(loads, ("ms", "p99_ms", "both_ms")):
        ratios = [row[f"ratio_{what}"] for row in rows if row["busy"] == load]
        print(f"busy {load}, {what}: geometric mean {mean(ratios):.2f}x, least {min(ratios):.2f}x, {len(ratios)} rows")


def main() -> None:
    parser = options(__doc__, threads=(detect().cores, "of both sides"), repeats=(0, "timed rounds; 0: 15, of host 40"),
                     budget=(3.0, "seconds of each side and row of a program"),
                     steps=(32, "calls of a cell's loop"), seq=(0, "T of a layer; 0: 32, of lengths 100"),
                     batch=(0, "B of a layer; 0: 4, of lengths 32"))
    parser.add_argument("mode", choices=(*PROGRAMS, "cells", "weights", "lengths", "host"))
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 512], help="H of layers [%(default)s]")
    for name, choices, about in (("suite", SINGLE, "of layers of programs [all]"), ("kind", LIMITS, "only this kind"),
                                 ("cell", None, "only this layer or cell")):
        parser.add_argument(f"--{name}", choices=choices, action="append", help=f"{about}; may repeat")
    parser.add_argument("--only", metavar="SIZE", action="append", help="only TxBxIxH, or BxH of cells; may repeat")
    parser.add_argument("--shape", metavar="TxBxIxH", action="append", help="these instead of a suite's; may repeat")
    parser.add_argument("--busy", type=int, action="append", help="busy processes for each core; may repeat [2, 4]")
    parser.add_argument("--cpu", action="store_true", help="host: of the CPU, though there is a GPU")
    parser.add_argument("--gpu", action="store_true", help="cells: on the GPU")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32", help="of cells")
    arguments = parser.parse_args()
    known = CELLS if arguments.mode == "cells" else LAYERS
    if unknown := {*(arguments.cell or ())} - {*known}:
        parser.error(f"--cell: {', '.join(unknown)}; expected some of {', '.join(known)}")
    arguments.repeats = arguments.repeats or (40 if arguments.mode == "host" else 15)
    if arguments.mode == "host":
        host_time(arguments)
        return
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    if arguments.mode in PROGRAMS:
        in_programs(arguments)
        return
    wanted, one = {
        "cells": (product(arguments.cell or CELLS, GPU_SIZES if arguments.gpu else SIZES,
                          arguments.kind or [*LIMITS][:2 + arguments.gpu]), compare_cells),
        "weights": (product(arguments.hidden, (False, True), (False, True)), compare_weights),
        "lengths": (product(arguments.hidden), compare_lengths)}[arguments.mode]
    rows = []
    for each in wanted:
        if arguments.mode != "cells" or not arguments.only or "x".join(map(str, each[1])) in arguments.only:
            rows.append(one(*each, arguments))
            print(told(rows[-1]), flush=True)
    write(arguments.output, environment(cpu=not arguments.gpu), rows)
    if ratios := [row["ratio"] for row in rows if "ratio" in row]:
        print(f"geometric mean {mean(ratios):.2f}x, least {min(ratios):.2f}x, {len(ratios)} rows")


if __name__ == "__main__":
    main()

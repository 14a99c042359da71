"""The drop-in on a CPU where it is not alone: a replaced layer against torch.nn's, as parts of programs.

    python benchmarks/cpu_in_programs.py turns --output benchmarks/results/cpu_in_programs.json
    python benchmarks/cpu_in_programs.py busy --busy 2 --busy 4 --output ...
    python benchmarks/cpu_in_programs.py service --output ...

turns: each call comes after an operation of PyTorch's, a product and a relu of as many values as the layer reads, as in
any model. busy: the same while other processes compute, so many for each core. service: threads of one process, each
with requests of its own, call the same layer at the same time; each request has such an operation, too.

Nothing is set in the environment. Sides take turns in blocks of some calls, of which the first is not counted, after
the threads of the other side have stopped spinning. A call's time is from its begin to its end, as is the operation's,
which may wait for what a call leaves behind. Milliseconds: 50th and 99th percentile of all calls. The layers are those
of grids/cpu.toml (--suite: its groups). Outputs of both sides are compared first.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from measured_rows import mean
from side_by_side import environment, options, relative, write

import ecornn.torch
from ecornn.bench.grid import read_grid
from ecornn.bench.turns import settle
from ecornn.host_cpu import detect

CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
FILE = Path(__file__).parent / "grids" / "cpu.toml"
SINGLE = ("layers", "latency", "grid")  # the suites of single layers
BLOCKS = 8  # turns of each side
BUDGET = 3.0  # seconds of each side, about
REQUESTS = 8  # threads of a service
Times = list[tuple[float, float]]  # seconds of the operation and of the call


@contextmanager
def busy(count: int) -> Iterator[None]:
    """While ``count`` processes compute."""
    code = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    processes = [subprocess.Popen([sys.executable, "-S", "-c", code]) for _ in range(count)]
    try:
        time.sleep(1.0 if processes else 0.0)
        yield
    finally:
        for p in processes:
            p.kill()
            p.wait()


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

    def block(self, seconds: float) -> Times:
        """Times of calls for so long, after one that is not counted."""
        self.once()
        return self.calls(seconds)

    def calls(self, seconds: float) -> Times:
        """Times of calls for so long, three at least."""
        found, end = list[tuple[float, float]](), time.perf_counter() + seconds
        while len(found) < 3 or time.perf_counter() < end:
            found.append(self.once()[:2])
        return found


def in_threads(program: Program, seconds: float) -> Times:
    """Times of calls in the threads of a service, all at the same time."""
    start, found = threading.Barrier(REQUESTS), list[tuple[float, float]]()

    def serve() -> None:
        with torch.no_grad():
            program.once()
            start.wait()
            mine = program.calls(seconds)
        found.extend(mine)

    threads = [threading.Thread(target=serve) for _ in range(REQUESTS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return found


def suite_of(name: str) -> list[tuple[str, tuple[int, ...]]]:
    """Cells and T, B, I, H of a group of the CPU's grid."""
    return [(str(c.cell), (c.seq or 0, c.batch or 0, c.input or 0, c.hidden or 0))
            for c in (layer.case for layer in read_grid(FILE).members(name))]


def library_of(cell: str, input: int, hidden: int) -> torch.nn.RNNBase:
    """The layer of torch.nn."""
    if cell.startswith("rnn"):
        return torch.nn.RNN(input, hidden, nonlinearity=cell[4:])
    return {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[cell](input, hidden)


def compare(cell: str, shape: tuple[int, int, int, int], budget: float, loads: list[int],
            run: Callable[[Program, float], Times]) -> Iterator[dict]:
    """A row for each load: busy processes for each core."""
    library = library_of(cell, shape[2], shape[3]).eval()
    ours = copy.deepcopy(library)
    holder = torch.nn.Sequential(ours)
    ecornn.torch.replace(holder, wait=True)
    torch.manual_seed(0)
    theirs_program, program = Program(library, shape), Program(holder[0], shape)
    program.x, program.weight = theirs_program.x, theirs_program.weight
    expected, found = theirs_program.once()[2], program.once()[2]
    error = relative(found, expected)
    if not error <= 1e-5:
        sys.exit(f"{cell} {shape}: differs from torch.nn by {error:.2e}")
    for load in loads:
        times: dict[str, Times] = {"ecornn": [], "torch": []}
        with busy(load * detect().cores):
            for _ in range(BLOCKS):
                for name, side in (("ecornn", program), ("torch", theirs_program)):
                    if not load:
                        settle()
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


def line(row: dict) -> str:
    """A row in words."""
    sides = [f"{side} {row[f'{side}_ms']:.3f} p99 {row[f'{side}_p99_ms']:.3f} (operation "
             f"{row[f'{side}_operation_ms']:.3f})" for side in ("ecornn", "torch")]
    shape = "x".join(str(row[name]) for name in "TBIH")
    return (f"{row['cell']:8} {shape:15} busy {row['busy']} {'  '.join(sides)} ms  {row['ratio_ms']:.2f}x "
            f"p99 {row['ratio_p99_ms']:.2f}x, with the operation {row['ratio_both_ms']:.2f}x "
            f"p99 {row['ratio_p99_both_ms']:.2f}x, {row['ecornn_calls']} and {row['torch_calls']} calls")


def key(row: dict) -> tuple:
    return tuple(row[name] for name in ("mode", "cell", "T", "B", "I", "H", "busy", "threads"))


def add(path: Path, row: dict) -> None:
    """Adds the row to the file."""
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    where = {"numpy": np.__version__, "kernel": os.uname().release,
             "command": "python benchmarks/cpu_in_programs.py MODE"}
    write(path, environment(cpu=True) | where, [r for r in old if key(r) != key(row)] + [row])


def main() -> None:
    parser = options(__doc__, threads=(detect().cores, "of both sides"),
                     budget=(BUDGET, "seconds of each side and row"))
    parser.add_argument("mode", choices=("turns", "busy", "service"))
    parser.add_argument("--suite", choices=SINGLE, action="append", help="of layers; may repeat [all]")
    parser.add_argument("--cell", choices=CELLS, action="append", help="only this cell; may repeat")
    parser.add_argument("--only", metavar="TxBxIxH", action="append", help="only this shape; may repeat")
    parser.add_argument("--shape", metavar="TxBxIxH", action="append", help="these instead of a suite's; may repeat")
    parser.add_argument("--busy", type=int, action="append", help="busy processes for each core; may repeat [2, 4]")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    loads = arguments.busy or [2, 4] if arguments.mode == "busy" else [0]
    rows = []
    if arguments.shape:
        layers = [(c, tuple(map(int, s.split("x")))) for s in arguments.shape for c in arguments.cell or CELLS]
    else:
        layers = [layer for suite in arguments.suite or SINGLE for layer in suite_of(suite)]
    for cell, shape in layers:
        if cell not in (arguments.cell or CELLS) or "x".join(map(str, shape)) not in (
                arguments.only or ["x".join(map(str, shape))]):
            continue
        with torch.no_grad():
            for row in compare(cell, shape, arguments.budget, loads,
                               in_threads if arguments.mode == "service" else Program.block):
                row = {"mode": arguments.mode, "threads": arguments.threads, **row}
                rows.append(row)
                if arguments.output:
                    add(arguments.output, row)
                print(line(row), flush=True)
    for load in loads:
        for what in ("ms", "p99_ms", "both_ms"):
            ratios = [row[f"ratio_{what}"] for row in rows if row["busy"] == load]
            print(f"busy {load}, {what}: geometric mean {mean(ratios):.2f}x, "
                  f"least {min(ratios):.2f}x, {len(ratios)} rows")


if __name__ == "__main__":
    main()

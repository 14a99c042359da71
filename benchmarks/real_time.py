"""Steps of one row on one CPU thread, called from C (real_time.c), against what real-time audio has: RTNeural's class.

    python benchmarks/real_time.py --output benchmarks/results/real_time.json

A step is a call with T = 1 of a module for B = 1, float32, x copied in and y out, states in place, a loop of --steps
of them a repetition; cells and sizes take turns. y of all steps is compared with float64, within 1e-5. A row is the
median of nanoseconds a step over repetitions with their 20th and 80th percentile, the longest single step, and the aim
where there is one: 200, 600 and 1000 ns for H = 16, 40 and 64.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from side_by_side import environment, options, told, write

import ecornn
from ecornn.build.link import find_compiler
from ecornn.numpy_reference import random_weights

AIMS = {16: 200, 40: 600, 64: 1000}


def prepared(cell: str, hidden: int, inputs: int, steps: int, folder: Path) -> dict:
    """A module with its arrays in a folder, and what y must be."""
    folder.mkdir()
    ecornn.compile(cell, hidden=hidden, input=inputs, batch=1, seq=1, target="cpu", out=folder / "module.so")
    weights = random_weights(cell, inputs, hidden)
    x = np.random.default_rng(0).standard_normal((steps, 1, inputs), np.float32)
    for name, value in {**weights, "x": x}.items():
        value.tofile(folder / name)
    y, _ = ecornn.reference(cell, x, weights)
    return {"row": {"cell": cell, "H": hidden, "I": inputs}, "folder": folder, "wanted": y, "times": [], "longest": []}


def main() -> None:
    arguments = options(
        __doc__, steps=(2000, "of a repetition"), repeats=(15, "of each turn"), turns=(3, ""), hidden=("16,40,64", ""),
        priority=(0, "of the program among real-time threads (SCHED_FIFO), as audio has it; 0: a usual one"),
        cells=("lstm,gru", "")).parse_args()
    before = ["chrt", "--fifo", str(arguments.priority)] if arguments.priority else []
    flags = subprocess.run([sys.executable, "-m", "ecornn", "config", "--cflags", "--libs"], capture_output=True,
                           text=True, check=True).stdout
    with tempfile.TemporaryDirectory(prefix="ecornn-") as name:
        folder, program = Path(name), Path(name, "real_time")
        subprocess.run(["cc", "-O2", "-std=c11", "-D_GNU_SOURCE", Path(__file__).with_suffix(".c"),
                        *shlex.split(flags), "-o", program], check=True)
        cases = [prepared(cell, hidden, inputs, arguments.steps, folder / f"{cell}{hidden}-{inputs}")
                 for cell in arguments.cells.split(",") for hidden in map(int, arguments.hidden.split(","))
                 for inputs in sorted({1, hidden})]
        for case in cases * arguments.turns:
            said = subprocess.run([*before, program, case["folder"] / "module.so", case["folder"],
                                   str(arguments.steps), str(arguments.repeats)], capture_output=True, text=True,
                                  check=True).stdout
            *each, longest = map(float, said.split())
            case["times"] += each
            case["longest"].append(longest)
        rows = [finished(**case) for case in cases]
    write(arguments.output, environment(cpu=True) | {"compiler": " ".join(find_compiler())}, rows)


def finished(row: dict, folder: Path, wanted: np.ndarray, times: list[float], longest: list[float]) -> dict:
    """The row, printed."""
    y = np.fromfile(folder / "y", np.float32).reshape(wanted.shape)
    row["error"] = float(np.abs(y - wanted).max())
    if not row["error"] <= 1e-5:
        sys.exit(f"{row}: y differs by {row['error']:.2e}")
    row |= dict(zip(("p20_ns", "step_ns", "p80_ns"), np.percentile(times, [20, 50, 80]).round(1).tolist(), strict=True))
    row |= {"longest_ns": max(longest), "aim_ns": AIMS.get(row["H"])}
    print(told(row))
    return row


if __name__ == "__main__":
    main()

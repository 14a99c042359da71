"""Two versions of ecornn on the same layers, in turns: a change that moves code and does not change it keeps times.

    git worktree add ../before COMMIT
    python benchmarks/compare_versions.py ../before --output benchmarks/results/h100_versions.jsonl

Forward: the rows of the README's plot. Training: twelve rows of grids/training.toml. The other version compiles them
in a process that imports its own tree; its modules are loaded by this version, which must read them. Both are checked
against float64 and timed in turns as `ecornn bench` does it; `old` is a side of ours. Where errors are equal the
outputs are the same bits, as good as always. The same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import geometric_mean

from measured_rows import FILE, single_modules
from msgspec import structs, to_builtins

from ecornn.bench.grid import Layer, Own, read_grid
from ecornn.bench.measure import Plan, measure_into
from ecornn.bench.results import RowLog

TRAINED = [f"{name} training" for name in (
    "lstm 1024x16x768x768 bfloat16", "lstm 300x20x800x800 float16", "lstm 300x20x800x800 float32",
    "gru 1024x16x768x768 float16", "rnn_tanh 300x20x800x800 tf32-both", "lstm 256x64x256x256 float16",
    "lstm 256x64x1024x1024 bfloat16", "gru 256x32x2048x2048 float16", "rnn_tanh 256x32x2560x2560 float16",
    "lstm 365x256x30x256 bfloat16", "lstm 128x512x256x256 tf32-both", "lstm 35x32x650x650 bfloat16 2 layers")]
# The other version runs this. It writes a module for each layer of a list, by number, and none where that cannot be.
BUILD = """
import json, sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
def one(job):
    import ecornn
    number, cell, properties = job
    try:
        ecornn.compile(cell, **properties, target="cuda", out=f"{sys.argv[1]}/{number}.so")
    except ecornn.errors.EcornnError as error:
        print(number, error, file=sys.stderr)
if __name__ == "__main__":
    with ProcessPoolExecutor(int(sys.argv[2]), get_context("fork")) as pool:
        list(pool.map(one, json.load(sys.stdin)))
"""
LONGEST = 600.0  # seconds that a row may take
OF_COMPILE = ("hidden", "input", "batch", "seq", "dtype", "precision", "layers", "bidirectional", "training", "keep")


def layers() -> list[Layer]:
    """Training first, as it takes longest to compile."""
    training = FILE.with_name("training.toml")
    return [one for one in read_grid(training).expanded(training.name) if one.name in TRAINED] + single_modules()


def with_old(tree: Path, folder: Path, wanted: list[Layer], processes: int) -> list[Layer]:
    """The layers with a side ``old``, a module in the folder by the version of a tree."""
    jobs = [(number, one.case.cell, {k: v for k, v in to_builtins(one.case).items() if k in OF_COMPILE})
            for number, one in enumerate(wanted)]
    path = os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "-c", BUILD, str(folder), str(processes)], input=json.dumps(jobs), text=True,
                   check=True, env=os.environ | {"PYTHONPATH": path, "ECORNN_CACHE": str(folder / "cache")})
    return [structs.replace(one, against=(), own={"old": Own(module=str(folder / f"{number}.so"))})
            for number, one in enumerate(wanted)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other version's tree")
    parser.add_argument("--output", type=Path, required=True, help="JSON lines to append to")
    parser.add_argument("--seconds", type=float, default=0.6, help="of timing each side [%(default)s]")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that compile")
    arguments = parser.parse_args()
    log = RowLog(arguments.output)
    with tempfile.TemporaryDirectory(prefix="ecornn-") as name:
        wanted = with_old(arguments.before.resolve(), Path(name), layers(), arguments.processes)
        good = measure_into(log, wanted, Plan((), arguments.seconds), Path(name), arguments.processes, LONGEST)
    ratios = [1 / row["ratios"]["old"] for row in log.rows if "old" in row["ratios"]]
    if ratios:
        print(f"{len(ratios)} of {len(wanted)} rows, new / old: geometric mean {geometric_mean(ratios):.3f}, "
              f"{min(ratios):.3f} to {max(ratios):.3f}")
    sys.exit(not good or len(ratios) < len(wanted))


if __name__ == "__main__":
    main()

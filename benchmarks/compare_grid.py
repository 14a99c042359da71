"""The whole grid of single layers against cuDNN, each row with its floor; on the GPU at hand.

    python benchmarks/compare_grid.py --output benchmarks/results/h100_grid.jsonl
    python benchmarks/compare_grid.py --output build/some.jsonl --only "lstm float16" --limit 5
    python benchmarks/compare_grid.py --target sm_90a --compile-only     # no GPU needed: do all rows compile?

Rows (grid.py): cells, sizes and data types of the grid, vanilla H=1152 at B = 1..64 (Persistent RNNs), and sizes
off every tile beside the next tile up. Modules are compiled in processes of their own, by the best tuning record or
the heuristic, while others are measured. A row: whole forward passes in CUDA graphs, interleaved, checked against
float64 over all steps (side_by_side.py); median, 20th and 80th percentile, at most --seconds of them and at most
--repeats. Rows "tf32" let cuDNN round to TF32 while ecornn computes float32; in rows "tf32-both" both round. A
row that hangs or breaks the GPU's context is recorded as failed and costs the others nothing but a new process.

Every row is appended to --output as soon as it is measured, so that an interrupted run goes on where it stopped; rows
that failed are tried again, --again measures all. grid_report.py makes tables, CSV and plots of the file. On a
machine where something else uses the GPU at times, --lock FILE holds an exclusive lock on FILE for each measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Future
from dataclasses import asdict
from pathlib import Path

from compile_rows import as_ready, compiling, file_of
from grid import Row, select
from grid_log import GridLog
from measuring_process import Limits, MeasuringProcess

from ecornn.device import Device
from ecornn.errors import EcornnError
from ecornn.floor import H100, floor, measured
from ecornn.targets import resolve


@contextlib.contextmanager
def holding(lock: Path | None) -> Iterator[None]:
    """The exclusive lock on a file, if one is named."""
    if lock is None:
        yield
        return
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def measure(row: Row, compiled: Future, folder: Path, process: MeasuringProcess, lock: Path | None) -> dict:
    """What is known of a row afterwards; ``failed`` says why nothing more is."""
    try:
        seconds = compiled.result()
    except (EcornnError, BrokenExecutor) as error:
        return {"failed": f"{type(error).__name__}: {error}"}
    with holding(lock):
        found = process.measure(row, file_of(row, folder))
    gpu = measured(process.gpu)
    found |= {"compile_seconds": seconds, "module_bytes": file_of(row, folder).stat().st_size}
    if gpu is not None and "failed" not in found:
        least = floor(gpu, row.cell, row.B, row.I, row.H, row.arithmetic)
        found |= {"floor_us": least.total, "floor": asdict(least), "over_floor": found["ecornn_us"] / least.total}
    return found


def line_of(name: str, row: dict) -> str:
    """A row in at most 110 characters."""
    if "failed" in row:
        return f"{name:32} FAILED {row['failed']}"[:110]
    floor_text = f"{row['over_floor']:.2f} x floor {row['floor_us']:.2f}" if "floor_us" in row else ""
    return (f"{name:32} {row['ecornn_us']:6.2f} [{row['ecornn_p20']:.2f}, {row['ecornn_p80']:.2f}] cuDNN "
            f"{row['cudnn_us']:6.2f} {row['ratio']:5.2f}x {floor_text} {row['schedule'][:10]}")[:110]


def compile_all(rows: list[Row], device: Device, folder: Path, jobs: int | None) -> bool:
    """Compiles only, and says how long each row took; whether all did."""
    good = True
    with compiling(rows, device, folder, jobs) as futures:
        for row, future in as_ready(futures):
            try:
                text = f"{future.result():.1f} s"
            except EcornnError as error:
                good, text = False, f"FAILED {type(error).__name__}: {error}"
            print(f"{row!s:32} {text}", flush=True)
    return good


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON lines to append to")
    parser.add_argument("--only", metavar="WORDS", action="append", default=[],
                        help='rows with all of these words, such as "gru 256x32x2816x2816 float16"; may repeat')
    parser.add_argument("--limit", type=int, metavar="N", help="the first N of them")
    parser.add_argument("--seconds", type=float, default=0.5, help="of measuring a row (default: 0.5)")
    parser.add_argument("--repeats", type=int, default=30, help="timed repetitions a row, at most (default: 30)")
    parser.add_argument("--longest", type=float, default=30, metavar="SECONDS",
                        help="a row that takes longer in all has failed (default: 30)")
    parser.add_argument("--jobs", type=int, help="compilers at a time (default: all processors but one)")
    parser.add_argument("--modules", type=Path, metavar="FOLDER", help="where to keep the modules")
    parser.add_argument("--again", action="store_true", help="measure rows that the file has")
    parser.add_argument("--lock", type=Path, metavar="FILE", help="locked while the GPU is in use")
    parser.add_argument("--target", default="cuda", help="what --compile-only compiles for (default: the GPU at hand)")
    parser.add_argument("--compile-only", action="store_true", help="measure nothing")
    parser.add_argument("--list", action="store_true", help="print the rows and what their floor is on an H100")
    arguments = parser.parse_args(argv)
    arguments.rows = select(arguments.only, arguments.limit)
    if not arguments.rows:
        parser.error(f"argument --only: no row has {' or '.join(map(repr, arguments.only))}; see --list")
    if not (arguments.output or arguments.compile_only or arguments.list):
        parser.error("argument --output is needed")
    return arguments


def main() -> None:
    arguments = parse()
    try:
        run(arguments)
    except KeyboardInterrupt:
        sys.exit(f"stopped; the same command goes on from {arguments.output}" if arguments.output else 130)
    except (RuntimeError, ValueError) as error:  # no GPU for PyTorch; a file that is no results
        sys.exit(str(error))


def run(arguments: argparse.Namespace) -> None:
    if arguments.list:
        for row in arguments.rows:
            print(f"{row!s:32} {floor(H100, row.cell, row.B, row.I, row.H, row.arithmetic).total:.2f}")
        return
    with contextlib.ExitStack() as stack:
        folder = arguments.modules or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ecornn-")))
        folder.mkdir(parents=True, exist_ok=True)
        try:
            device = resolve(arguments.target)
        except EcornnError as error:
            sys.exit(f"{error}\ncompare_cpu.py compares on a CPU")
        if arguments.compile_only:
            sys.exit(not compile_all(arguments.rows, device, folder, arguments.jobs))
        log = GridLog(arguments.output)
        rows = [row for row in arguments.rows if arguments.again or log.of(row) is None]
        if len(rows) < len(arguments.rows):
            print(f"{len(arguments.rows) - len(rows)} rows are in {arguments.output} already", flush=True)
        futures = stack.enter_context(compiling(rows, device, folder, arguments.jobs))
        process = MeasuringProcess(Limits(arguments.repeats, arguments.seconds, arguments.longest))
        stack.callback(process.close)
        log.begin(process.environment() | {"command": " ".join(["python", *sys.argv])})
        begin, failed = time.monotonic(), 0
        for row, compiled in as_ready(futures):
            result = log.add(row, measure(row, compiled, folder, process, arguments.lock))
            failed += "failed" in result
            print(line_of(str(row), result), flush=True)
        print(f"{len(rows) - failed} rows measured, {failed} failed, {time.monotonic() - begin:.0f} s", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()

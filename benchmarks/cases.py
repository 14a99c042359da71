"""Comparisons of several modules of ours, one case after the other: compiled ahead, measured, appended to a file.

What `compare_ablation.py`, `compare_variants.py` and `why_above_floor.py` have in common. A case is a frozen
dataclass whose text names it; ``sides()`` says which modules it needs. One that cannot be compiled is not left out in
silence: the case is measured without it, and says why.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from compare_grid import holding
from compile_rows import compiling, file_of
from compiled_case import Made
from grid_log import GridLog
from measuring_process import Limits, MeasuringProcess, serve_gpu

from ecornn.errors import EcornnError
from ecornn.targets import resolve

Files = dict[str, Path | str]  # side -> its module's file, or why there is none
Report = Callable[[Path, GridLog], Sequence[str]]  # the lines of a file's table


class Case(Protocol):
    """What is compared."""

    dtype: str

    def sides(self) -> dict[str, Made]:
        """The modules that it needs, by name."""


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """The options that these programs share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON lines to append to; a Markdown table is written beside it")
    parser.add_argument("--only", metavar="WORDS", action="append", default=[],
                        help="cases with all of these words in their name; may repeat")
    parser.add_argument("--limit", type=int, metavar="N", help="the first N of them")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so many")
    parser.add_argument("--timing", type=float, default=0.3, metavar="SECONDS", help="of timing a case (default: 0.3)")
    parser.add_argument("--repeats", type=int, default=20, help="timed repetitions a case, at most (default: 20)")
    parser.add_argument("--longest", type=float, default=60, metavar="SECONDS",
                        help="a case that takes longer in all has failed (default: 60)")
    parser.add_argument("--jobs", type=int, help="compilers at a time (default: all processors but one)")
    parser.add_argument("--modules", type=Path, metavar="FOLDER", help="where to keep the modules")
    parser.add_argument("--again", action="store_true", help="measure cases that the file has")
    parser.add_argument("--lock", type=Path, metavar="FILE", help="locked while the GPU is in use")
    parser.add_argument("--target", default="cuda", help="what --compile-only compiles for (default: the GPU at hand)")
    parser.add_argument("--compile-only", action="store_true", help="measure nothing; says what cannot be compiled")
    parser.add_argument("--report", action="store_true", help="only write the table of what --output has")
    parser.add_argument("--list", action="store_true", help="print the cases")
    return parser


def select(cases: Sequence[Any], only: Sequence[str], limit: int | None) -> list[Any]:
    """The cases of which one of ``only`` is a part of the name (all without any), the first ``limit`` of them."""
    found = [c for c in cases if not only or any(all(word in str(c) for word in text.split()) for text in only)]
    return found[:limit]


def run(arguments: argparse.Namespace, cases: Sequence[Any], one: Callable[..., dict], report: Report) -> None:
    """Measures with ``one(case, files, limits)``, and ends the program; ``report`` makes the lines of the table.

    ``one`` returns a row of `many_sides.py`, or why it ``failed``; with ``served`` False that is no fault.
    """
    begin = time.monotonic()
    cases = select(cases, arguments.only, arguments.limit)
    if not cases:
        sys.exit(f"no case has {' or '.join(map(repr, arguments.only)) or 'anything to compare'}; see --list")
    if not (arguments.output or arguments.compile_only or arguments.list):
        sys.exit("argument --output is needed")
    if arguments.list:
        print("\n".join(map(str, cases)))
        return
    try:
        if arguments.report:
            return write_table(arguments.output, GridLog(arguments.output), report)
        with contextlib.ExitStack() as stack:
            sys.exit(_run(stack, arguments, cases, one, report, begin + arguments.seconds))
    except KeyboardInterrupt:
        sys.exit(f"stopped; the same command goes on from {arguments.output}")
    except (RuntimeError, ValueError) as error:  # no GPU for PyTorch; a file that is no results
        sys.exit(str(error))


def _run(stack: contextlib.ExitStack, arguments: argparse.Namespace, cases: Sequence[Any],
         one: Callable[..., dict], report: Report, end: float) -> int:
    folder = arguments.modules or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ecornn-")))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        device = resolve(arguments.target)
    except EcornnError as error:
        sys.exit(f"{error}\ncompare_cpu.py compares on a CPU")
    log = None if arguments.compile_only else GridLog(arguments.output)
    left = [c for c in cases if log is None or arguments.again or log.of(c) is None]
    if len(left) < len(cases):
        print(f"{len(cases) - len(left)} cases are in {arguments.output} already", flush=True)
    sides = {case: case.sides() for case in left}
    every = dict.fromkeys(made for of in sides.values() for made in of.values())
    futures = stack.enter_context(compiling(every, device, folder, arguments.jobs))
    if log is None:
        return _say_files(sides, futures, folder)
    limits = Limits(arguments.repeats, arguments.timing, arguments.longest)
    process = MeasuringProcess(limits, partial(serve_gpu, one=one))
    stack.callback(process.close)
    log.begin(process.environment() | {"command": " ".join(["python", *sys.argv])})
    begin, measured, failed = time.monotonic(), 0, 0
    for case, files in _in_turn(sides, futures, folder, end):
        measured += 1
        with holding(arguments.lock):
            result = log.add(case, process.measure(case, files))
        failed += result.get("served", True) and ("failed" in result or bool(result["wrong"]))
        print(line_of(str(case), result), flush=True)
    write_table(arguments.output, log, report)
    print(f"{measured - failed} cases measured, {failed} failed, {time.monotonic() - begin:.0f} s", flush=True)
    if measured < len(left):
        print(f"{len(left) - measured} were not begun within --seconds; the same command goes on with them", flush=True)
    return int(failed > 0)


def write_table(path: Path, log: GridLog, report: Report) -> None:
    """The Markdown beside the file."""
    if not log.environment:
        raise ValueError(f"{path} has no results")
    path.with_suffix(".md").write_text("\n".join(report(path, log)) + "\n")


def _in_turn(sides: dict[Any, dict[str, Made]], futures: dict[Made, Future], folder: Path,
             end: float = float("inf")) -> Iterator[tuple[Any, Files]]:
    """Cases with their files, of those that are there always the first one, until ``end``."""
    left = dict(sides)
    while left and time.monotonic() < end:
        ready = next((c for c, of in left.items() if all(futures[made].done() for made in of.values())), None)
        if ready is None:
            time.sleep(0.02)
        else:
            yield ready, {name: _outcome(futures[made], made, folder) for name, made in left.pop(ready).items()}


def _outcome(future: Future, made: Made, folder: Path) -> Path | str:
    try:
        future.result()
    except Exception as error:  # whatever one module does, the others are measured
        return f"{type(error).__name__}: {error}"
    return file_of(made, folder)


def _say_files(sides: dict[Any, dict[str, Made]], futures: dict[Made, Future], folder: Path) -> int:
    """Compiles only; whether a case has no module at all."""
    bad = 0
    for case, files in _in_turn(sides, futures, folder):
        missing = {name: why for name, why in files.items() if isinstance(why, str)}
        bad += len(missing) == len(files)
        print(f"{case!s:40} {len(files) - len(missing)} of {len(files)} modules", flush=True)
        for name, why in missing.items():
            print(f"    {name}: {why}"[:300], flush=True)
    return int(bad > 0)


def line_of(name: str, result: dict) -> str:
    """A case on one line: the time of each side in microseconds a step."""
    if "failed" in result:
        return f"{name:36} {'FAILED' if result.get('served', True) else 'not served:'} {result['failed']}"
    parts = [f"{side} {result[f'{side}_us']:.2f}" for side in result["sides"]]
    return " ".join([f"{name:36}", *parts, *(f"{side} WRONG" for side in result["wrong"])])

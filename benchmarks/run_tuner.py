"""Measures the claims about the tuner, on the GPU at hand or else on this CPU, and whether they hold.

    python benchmarks/run_tuner.py                     # all of it: eleven minutes on an H100 with 16 cores
    python benchmarks/run_tuner.py rate tune compile   # parts of it

    live      twelve layers searched with the records of others and 32 trials, then with none and 128 (search_rate.py),
              and what the records were worth (search_live.py); needs a GPU
    rate      trials a second of one layer from an empty build cache, twice (search_rate.py); on a GPU at least 8
    tune      `ecornn tune --cell lstm --hidden 800` into an empty folder, at most 5 minutes; and the same again, which
              returns at once
    compile   `ecornn compile` of a layer whose record ships, from an empty cache: at most 10 seconds
    verify    40 of the records that ship, measured again
    servers   trials a second with several servers on this device (rpc_servers.py)
    tests     the tuner's tests in real processes: faults, kills, servers

Each part has an empty build cache and an empty folder of its own for logs. Written is `--output` (.json): of each
command how long it took, how it ended and the end of what it printed; and beside it what the benchmarks write,
NAME_live_others.json and so on. Exit code 1 where something fails or does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ecornn.tune.choose import default_target

HERE = Path(__file__).resolve().parent
FASTEST = HERE / "results" / "search_fastest_h100.jsonl.xz"  # of the tables, measured again
OUTPUT = Path("build/tuner/report.json")
KEPT = 4000  # characters of what a command prints
LAYER = ("--cell", "lstm", "--hidden", "800")
COMMAND = ("-c", "from ecornn.cli import main; main()")  # `ecornn`, of this interpreter


@dataclass(frozen=True)
class Step:
    """A command of Python, with the seconds that it may take and what its report, a JSON file, must say."""

    name: str
    arguments: tuple[str, ...]
    seconds: float = float("inf")
    report: Path | None = None
    holds: Callable[[dict], bool] = lambda _: True


def steps(target: str, output: Path) -> dict[str, list[Step]]:
    """The commands of each part."""
    def beside(name: str) -> Path:
        return output.with_name(f"{output.stem}_{name}.json")

    def script(name: str, *arguments: object) -> tuple[str, ...]:
        return str(HERE / name), *map(str, arguments)

    gpu = target == "cuda"
    known, none = beside("live_others"), beside("live_none")
    suite = ("--suite", "--at-once", 3, "--records")
    rates, layer = [beside(f"rate_{n}") for n in (1, 2)], () if gpu else ("--layers", "lstm:128:4:50:float32")
    return {
        "live": [Step("with records", script("search_rate.py", *suite, "others", "--trials", 32, "--output", known)),
                 Step("with none", script("search_rate.py", *suite, "none", "--trials", 128, "--output", none)),
                 Step("both", script("search_live.py", "--on", FASTEST, known, none))] if gpu else [],
        "rate": [Step("rate", script("search_rate.py", "--target", target, *layer, "--output", rate), report=rate,
                      holds=lambda found: not gpu or found["rows"][0]["per_second"] >= 8) for rate in rates],
        "tune": [Step("tune", (*COMMAND, "tune", *LAYER, "--target", target), 300),
                 Step("again", (*COMMAND, "tune", *LAYER, "--target", target), 15)],
        "compile": [Step("compile", (*COMMAND, "compile", *LAYER, "--target", target, "--output",
                                     str(output.with_suffix(".so"))), 10)],
        "verify": [Step("verify", (*COMMAND, "log", "verify", "--sample", "40"))],
        "servers": [Step("servers", script("rpc_servers.py", "--target", target, "--hidden", 256 if gpu else 32,
                                           "--trials", 96 if gpu else 24, "--output", beside("servers")))],
        "tests": [Step("tests", ("-m", "pytest", "-q", "-m", "gpu" if gpu else "not gpu", *(
            str(HERE.parent / "tests" / "tune" / f"test_tune_{name}.py") for name in ("planted", "kill", "remote"))))],
    }


def ran(step: Step, environment: dict[str, str]) -> dict[str, object]:
    """Runs a step, showing what it prints; its part of the report."""
    print(f"\n$ python {' '.join(step.arguments)}", flush=True)
    began, printed = time.monotonic(), ""
    with subprocess.Popen([sys.executable, *step.arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, errors="replace", env=environment) as process:
        assert process.stdout
        for text in process.stdout:
            print(text, end="", flush=True)
            printed = (printed + text)[-KEPT:]
    seconds = time.monotonic() - began
    good = process.returncode == 0 and seconds <= step.seconds
    if good and step.report:
        good = step.holds(json.loads(step.report.read_text()))
    print(f"{step.name}: {'holds' if good else 'DOES NOT HOLD'}, {seconds:.1f} s", flush=True)
    return {"name": step.name, "arguments": step.arguments, "seconds": round(seconds, 1), "code": process.returncode,
            "holds": good, "printed": printed}


def main() -> None:
    target = default_target()
    parts = tuple(steps(target, OUTPUT))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(parts)} [all]")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="[%(default)s]")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.parts) - set(parts)):
        parser.error(f"PART: {', '.join(unknown)}; expected some of {', '.join(parts)}")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, object]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, each in steps(target, arguments.output).items():
            if name not in (arguments.parts or parts):
                continue
            environment = {**os.environ, "ECORNN_CACHE": f"{folder}/{name}/cache",
                           "ECORNN_TUNING_LOGS": f"{folder}/{name}/logs"}
            found[name] = []
            for step in each:
                found[name].append(ran(step, environment))
                arguments.output.write_text(json.dumps({"target": target, "parts": found}, indent=1) + "\n")
    sys.exit(not all(row["holds"] for rows in found.values() for row in rows))


if __name__ == "__main__":
    main()

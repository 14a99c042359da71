"""Tunes a layer on one machine for another one: the records go to a repository of logs, and the other pulls them.

    python examples/11_sharing_logs.py [--trials 4]

Two folders stand for the two machines, each with its own `ECORNN_TUNING_LOGS`, and two for the repository before and
after the change. The shared file has a few kilobytes; ecornn parses it and never executes it. The program exits with 1
if the second machine does not compile the configuration that the first one found. On a CPU it takes two minutes at
most.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from stages import stage

LAYER = ["--cell", "gru", "--hidden", "104", "--input", "40", "--batch", "3", "--seq", "50", "--target", "cpu"]


def ecornn(machine: Path, *arguments: str) -> str:
    """The output of a command on that machine; its progress, on standard error, is shown."""
    print(f"{machine.name}$ ecornn {' '.join(arguments)}", flush=True)
    environment = os.environ | {"ECORNN_TUNING_LOGS": str(machine / "logs")}
    with stage(f"ecornn {arguments[0]}", beats=arguments[0] != "tune"):
        done = subprocess.run([sys.executable, "-m", "ecornn", *arguments], cwd=machine, stdout=subprocess.PIPE,
                              text=True, check=True, env=environment)
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=4, help="trials of the search [4]")
    trials = str(parser.parse_args().trials)
    with tempfile.TemporaryDirectory() as folder:
        first, second, before, after = places = [Path(folder, name) for name in ("first", "second", "before", "after")]
        for place in places:
            place.mkdir()
        found = json.loads(ecornn(first, "tune", *LAYER, "--trials", trials, "--no-torch", "--json"))[0]["finish"]
        print(ecornn(first, "log", "push", str(after)))
        print(ecornn(first, "log", "check", str(after), "--base", str(before)))
        print(ecornn(second, "log", "pull", str(after), "--dry-run"))
        print(ecornn(second, "log", "pull", str(after)))
        print(ecornn(second, "compile", *LAYER, "-o", "gru.so"))
        there = json.loads(ecornn(second, "explain", *LAYER, "--json"))["parts"][0]
    record, best = there["record"], found["best"]
    print(f"the second machine uses {there['schedule']} {there['config']}\nby {record and record['file']}")
    return int(not (record and record["file"] == "imported.jsonl" and there["schedule"] == best["schedule"]
                    and there["config"] == best["config"]))


if __name__ == "__main__":
    sys.exit(main())

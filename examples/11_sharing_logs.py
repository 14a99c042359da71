"""Tuning on one machine for another: what a search found is added to a repository of logs, checked, and used there.

    python examples/11_sharing_logs.py [--trials 4]

Two folders play the two machines, each with its own `ECORNN_TUNING_LOGS`, and two the repository before and after; what
travels is one file of a few kilobytes that is parsed, never executed. Exits with 1 where the second machine does not
compile what the first one found.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

LAYER = ["--cell", "gru", "--hidden", "104", "--input", "40", "--batch", "3", "--seq", "50", "--target", "cpu"]


def ecornn(machine: Path, *arguments: str) -> str:
    """What a command prints on that machine; its progress goes past."""
    print(f"{machine.name}$ ecornn {' '.join(arguments)}", flush=True)
    done = subprocess.run([sys.executable, "-m", "ecornn", *arguments], cwd=machine, stdout=subprocess.PIPE, text=True,
                          check=True, env=os.environ | {"ECORNN_TUNING_LOGS": str(machine / "logs")})
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=4, help="of the search [4]")
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

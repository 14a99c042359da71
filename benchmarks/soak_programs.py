"""Programs that start, compile in the background, switch, end, are interrupted and killed, for as long as one says.

    python benchmarks/soak_programs.py 1800 --output build/soak_programs.json

Each program is a process that trains and evaluates small replaced models, of sizes drawn from few, on the CPU or the
GPU, and compares every result with that of a copy that was not replaced. ``--programs`` of them run at a time, with one
build cache, and each has its fate: it ends by itself, or gets SIGINT, SIGTERM or SIGKILL at any time. A cache is thrown
away now and then. Exits with 0 if no result was wrong, nothing that a program started was left a while after its end,
none ended by anything but its fate, and every entry of the cache is whole.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

MARK = "SOAK_PROGRAM"  # in the environment of a program and of all that it starts
FATES = ("end", "end", "SIGINT", "SIGTERM", "SIGKILL")
GRACE = 20.0  # seconds after a program's end until nothing of it may be left
WRONG = 3
TOLERANCE = 2e-3  # relative to the largest value, of states and gradients


def program(seed: int) -> None:
    """Trains and evaluates a model; ends with :data:`WRONG` if a result differs from that of torch.nn."""
    import copy

    import torch

    import ecornn.torch

    draw = random.Random(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.allow_tf32 = False
    kind, hidden = draw.choice((torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN)), draw.choice((16, 24, 40))
    theirs = kind(8, hidden, draw.choice((1, 2)), bidirectional=draw.random() < 0.3).to(device)
    ours = copy.deepcopy(theirs)
    ecornn.torch.replace(ours, tf32=False)
    optimizers = [torch.optim.SGD(net.parameters(), 1e-2) for net in (theirs, ours)]
    end, switched, calls = time.monotonic() + draw.uniform(3, 50), False, 0
    while time.monotonic() < end:
        x, trains = torch.randn(draw.randint(1, 40), draw.choice((1, 3, 8)), 8, device=device), draw.random() < 0.5
        results = []
        for net, optimizer in zip((theirs, ours), optimizers, strict=True):
            with torch.set_grad_enabled(trains):
                results.append([y := net(x)[0]])
            if trains:
                optimizer.zero_grad()
                y.square().mean().backward()
                results[-1] += [p.grad.clone() for p in net.parameters()]
                optimizer.step()
        for wanted, found in zip(*results, strict=True):
            most = max(float(wanted.detach().abs().max()), 1e-3)
            if not float((found - wanted).detach().abs().max()) <= TOLERANCE * most:
                print(f"seed {seed}, call {calls}: {kind.__name__} {hidden} is wrong", file=sys.stderr)
                sys.exit(WRONG)
        calls += 1
        time.sleep(draw.uniform(0, 0.03))  # programs wait for data; compilers would get nothing of a busy core
        for parameter, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            parameter.data.copy_(other.data)  # what rounds differently must not add up
        ecornn.torch.rebind(ours)
        switched = switched or bound(ours)
    print(json.dumps({"calls": calls, "switched": switched}))


def bound(net: Any) -> bool:
    """Tells whether a compiled layer has taken over."""
    from ecornn.torch.engine import engine_of

    return any(one for layers in (engine_of(net).inference, engine_of(net).trained) for one in layers._bound.values())


def left(mark: str) -> list[int]:
    """The processes that have this mark in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if f"{MARK}={mark}\0".encode() in (folder / "environ").read_bytes() + b"\0":
                    found.append(int(folder.name))
            except OSError:
                continue
    return found


class Running:
    """A program, and what is to become of it."""

    def __init__(self, seed: int, cache: Path) -> None:
        draw = random.Random(-seed)
        self.seed, self.fate, self.mark = seed, draw.choice(FATES), f"{os.getpid()}-{seed}"
        self.at = time.monotonic() + draw.uniform(0.3, 20)
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (until the program has ended)
        self.process = subprocess.Popen(  # a shell that runs this in the background ignores SIGINT, and so would they
            [sys.executable, __file__, "--program", str(seed)], stdout=subprocess.PIPE, stderr=self.errors,
            env={**os.environ, "ECORNN_CACHE": str(cache), MARK: self.mark},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))

    def ended(self) -> bool:
        if self.fate != "end" and time.monotonic() > self.at and self.process.poll() is None:
            self.process.send_signal(getattr(signal, self.fate))
            self.at = float("inf")
        return self.process.poll() is not None

    def outcome(self) -> tuple[str, str]:
        """A word for what happened, and what the program said if that is a fault."""
        code, allowed = self.process.returncode, {0}
        if self.fate != "end":
            allowed |= {-getattr(signal, self.fate), 130}
        limit = time.monotonic() + GRACE
        while (orphans := left(self.mark)) and time.monotonic() < limit:
            time.sleep(0.1)
        self.errors.seek(0)
        said = self.errors.read().decode(errors="replace")[-2000:]
        if orphans:
            return "left processes behind", f"{orphans} of seed {self.seed}\n{said}"
        if code not in allowed:
            return "wrong" if code == WRONG else "failed", f"seed {self.seed}, {self.fate}, code {code}\n{said}"
        if code == 0:
            switched = json.loads(self.process.stdout.read() if self.process.stdout else b"{}")["switched"]
            return "ended, switched" if switched else "ended", ""
        return self.fate, ""


def damaged(cache: Path) -> list[Path]:
    from ecornn.build.cache import read

    files = (path for path in cache.glob("??/*") if not path.name.startswith("."))
    return [path for path in files if read(path) is None and path.exists()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", type=float, nargs="?", default=1800)
    parser.add_argument("--programs", type=int, default=3, help="at a time [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="of the first program [%(default)s]")
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--program", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.program is not None:
        program(given.program)
        return 0
    begin, seed, counts, faults = time.monotonic(), given.seed, Counter[str](), list[str]()
    said, running = begin, list[Running]()
    cache = Path(tempfile.mkdtemp(prefix="soak-"))
    while running or time.monotonic() < begin + given.seconds:
        while len(running) < given.programs and time.monotonic() < begin + given.seconds:
            running.append(Running(seed, cache))
            seed += 1
            if seed % 40 == 0:
                shutil.rmtree(cache, ignore_errors=True)  # under programs that use it
        for one in [one for one in running if one.ended()]:
            running.remove(one)
            word, fault = one.outcome()
            counts[word] += 1
            faults += [fault] if fault else []
        if time.monotonic() > said + 30:
            said = time.monotonic()
            print(f"{said - begin:.0f} s: {dict(counts)}", flush=True)
        time.sleep(0.05)
    broken = damaged(cache)
    shutil.rmtree(cache, ignore_errors=True)
    found = {"seconds": round(time.monotonic() - begin), "programs": seed - given.seed, "outcomes": dict(counts),
             "faults": faults, "damaged entries": len(broken)}
    print(json.dumps({**found, "faults": len(faults)}), *faults, *broken, sep="\n")
    if given.output:
        given.output.write_text(json.dumps(found, indent=1) + "\n")
    return int(bool(faults or broken))


if __name__ == "__main__":
    sys.exit(main())

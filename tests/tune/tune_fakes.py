"""A schedule and worker functions that need no compiler, for tests of the tuner.

The worker functions run in real worker processes; the configuration's ``behaviour`` says what they
do: ``ok``, ``wrong``, ``fickle`` (wrong from the second run on), ``raise``, ``crash`` and ``hang`` (when run),
``slow_build`` and ``bad_build``."""

import ctypes
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ecornn.device import Device
from ecornn.errors import BuildError, ScheduleError
from ecornn.schedules.base import Config, Knob, Schedule, Task
from ecornn.task import make_task
from ecornn.tune.building import Build
from ecornn.tune.pool import Entries
from ecornn.tune.record import Outcome, Times
from ecornn.tune.timing import Measure
from ecornn.workload import Workload

DEVICE = Device("llvm", "znver4", "Test CPU", 4)
ENTRIES = Entries("tune_fakes:ready", "tune_fakes:build", "tune_fakes:ready", "tune_fakes:measure")


class Fake(Schedule):
    """Knobs with a known best: ``a`` = 5 and ``b`` = 2."""

    name, revision, kind = "fake", 3, "llvm"

    def __init__(self, behaviours: tuple[str, ...] = ("ok",), knobs: str = "ab", name: str = "fake") -> None:
        self.behaviours, self.letters, self.name = behaviours, knobs, name

    def refuses(self, task: Task) -> str | None:
        return None

    def knobs(self, task: Task) -> tuple[Knob, ...]:
        return (*(Knob(n, tuple(range(8)), "nothing") for n in self.letters),
                Knob("behaviour", self.behaviours, "nothing"))

    def check(self, task: Task, config: Config) -> str | None:
        return "too many" if int(config["a"]) + int(config["b"]) > 9 else None

    def default(self, task: Task) -> Config:
        return {**dict.fromkeys(self.letters, 0), "behaviour": self.behaviours[0]}

    def plan(self, task: Task, config: Config) -> Config:
        return config

    def features(self, task: Task, plan: Config) -> dict[str, float]:
        return {"sum": float(plan["a"]) + float(plan["b"])}

    def program(self, task: Task, plan: Config):
        raise AssertionError("the worker functions below build without a program")


def cost(config: Config) -> float:
    numbers = {k: int(v) for k, v in config.items() if k != "behaviour"}
    rest = sum(v for k, v in numbers.items() if k not in "ab")
    return 1.0 + (numbers["a"] - 5) ** 2 + (numbers["b"] - 2) ** 2 + 0.5 * rest


def make(hidden: int = 8, batch: int = 4, device: Device = DEVICE) -> Task:
    from ecornn.cells import get

    return make_task(get("lstm"), Workload("lstm", hidden, hidden, batch, 10), device)


def ready(_: None) -> bool:
    return True


def litter(_: None) -> bool:
    """Acts as a build that is stopped while a compiler writes: the process that writes, and this one, do not end."""
    folder = tempfile.mkdtemp(prefix="ecornn-")
    subprocess.run([sys.executable, "-c", f"import pathlib, time; pathlib.Path({folder!r}, 'x').write_text('x'); "
                    "time.sleep(1e6)"], check=True)
    return True


def sleep_on(begun: str) -> bool:
    """For good, once there is a file of that name."""
    Path(begun).touch()
    return nap(1e6)


def nap(seconds: float) -> bool:
    time.sleep(seconds)
    return True


def build(request: Build) -> str:
    behaviour = request.config["behaviour"]
    if behaviour == "slow_build":
        nap(1e6)
    if behaviour == "bad_build":
        raise BuildError("ptxas is not amused")
    Path(request.out).write_text(json.dumps(request.config))
    if behaviour == "hang":
        Path(request.out).with_suffix(".endless").touch()  # see short_if_endless of conftest.py
    return json.dumps(request.config, sort_keys=True)


def measure(request: Measure) -> list[Outcome]:
    found = []
    for path in request.paths:
        config = json.loads(Path(path).read_text())
        measured = Path(request.answers).with_name("measured")
        earlier = measured.read_text().split() if measured.exists() else []
        with measured.open("a") as file:
            file.write(config["behaviour"] + "\n")
        if config["behaviour"] == "crash":
            ctypes.string_at(0)  # a real segmentation fault
        if config["behaviour"] == "hang":
            ctypes.PyDLL(None).pause()  # in native code that holds the interpreter lock
        if config["behaviour"] == "wrong" or (config["behaviour"] == "fickle" and "fickle" in earlier):
            raise ScheduleError("wrong output: relative error 0.5")
        if config["behaviour"] == "raise":
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
        found.append(Outcome(Times.of([cost(config)]), 1e-7))
    return found

"""Tools of programs that time by themselves: options, a layer in float64, sides that take turns, files of results.

The turns and the GPU's clock are those of ``ecornn bench`` (ecornn/bench/): a kernel that waits goes first each time,
so that a graph is queued before it starts and the time between its events is the GPU's alone.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ecornn
from ecornn.bench import turns
from ecornn.bench.step_loop import StepLoop
from ecornn.bench.turns import WAIT, settle
from ecornn.cells import get
from ecornn.host_cpu import detect
from ecornn.workload import Stack, Workload

CELLS = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn_tanh": torch.nn.RNN}
DEVICE = "cuda"


class WrongResultError(Exception):
    """A side computes something else than the layer."""


def options(doc: str | None, **numbers: tuple[Any, str]) -> argparse.ArgumentParser:
    """A program's options: ``--output``, and others by default and help."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    for name, (default, said) in numbers.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{said} [%(default)s]".strip())
    return parser


def float64_forward(cell: str, x: torch.Tensor, p: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The layer in float64 on x's device, as ``ecornn bench`` has it; x (T, B, I) to y (T, B, H), initial state zero.
    Autograd has the gradients."""
    (steps, batch, inputs), found, width = x.shape, get(cell), len(p["bias_ih_l0"])
    hidden = width // found.parameters(inputs, width)["weight_ih"][0]
    loop = StepLoop(found, Workload(cell, hidden, inputs, batch, steps, "float64"), Stack(), batch, x.device.type,
                    "float64")
    return loop(x.double(), {name: value.double() for name, value in p.items()})


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative error in the Frobenius norm; NaN where value has one."""
    return ((value.double() - reference).norm() / reference.norm()).item()


def clock(run: Callable[[], object]) -> float:
    """Microseconds of a run on an idle GPU."""
    return turns.gpu_clock(run, WAIT) * 1e6


def host_clock(run: Callable[[], object]) -> float:
    """Microseconds of a call on the host, after threads of the one before have stopped spinning."""
    settle()
    begin = time.perf_counter()
    run()
    return (time.perf_counter() - begin) * 1e6


def timed(sides: Mapping[str, Callable[[], object]], fresh: Callable[[], object], repeats: int, steps: int,
          seconds: float = float("inf"), clock: Callable[[Callable[[], object]], float] = clock) -> dict[str, float]:
    """Microseconds a step of sides that take turns, as a row has them; ``repeats`` of each, or as many as ``seconds``
    allow."""
    row: dict[str, float] = {}
    for name, times in turns.take_turns(sides, fresh, repeats, seconds, clock).items():
        row |= summary(name, times, steps)
    return row


def summary(name: str, times: list[float], steps: int) -> dict[str, float]:
    """Median, 20th and 80th percentile in microseconds a step, as a row has them."""
    p20, median, p80 = np.percentile(times, [20, 50, 80]) / steps
    return {f"{name}_us": float(median), f"{name}_p20": float(p20), f"{name}_p80": float(p80)}


def told(row: Mapping[str, Any]) -> str:
    """A row for people: all of it that is short, by name; of times the median and [20th, 80th percentile]."""
    spread = {name: [value, row[f"{name[:-3]}_p20"], row[f"{name[:-3]}_p80"]] for name, value in row.items()
              if name.endswith(("_us", "_ms")) and f"{name[:-3]}_p20" in row}
    named = {name: spread.get(name, value) for name, value in row.items() if not name.endswith(("_p20", "_p80"))}
    return " ".join(f"{name}={words}" for name, value in named.items() if (words := _shown(value)))


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return "{:.4g} [{:.4g}, {:.4g}]".format(*value) if len(value) == 3 and isinstance(value[0], float) else ""
    return str(value)


def replaced(library: torch.nn.Module) -> torch.nn.Module:
    """A copy of a layer or model of torch.nn whose layers are ours, of the same weights, compiled."""
    import ecornn.torch

    ours = copy.deepcopy(library)
    ecornn.torch.replace(ours, wait=True)
    return ours


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


def kernels(function: Callable[[], object]) -> list[tuple[str, float, float]]:
    """Names, begins and ends, in microseconds, of the kernels that a call launches, in order; by CUPTI."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        function()
        torch.cuda.synchronize()
    events = [e for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sorted(((e.name, e.time_range.start, e.time_range.end) for e in events), key=lambda e: e[1])


def environment(cpu: bool = False) -> dict[str, Any]:
    """What a file of results says of where they come from: a GPU, or this CPU."""
    device = detect()
    where = {"cpu": device.name, "arch": device.arch, "cores": device.cores} if cpu else {
        "gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return where | {"torch": str(torch.__version__), "ecornn": ecornn.__version__,
                    "tvm": importlib.metadata.version("apache-tvm"),
                    "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                    "command": " ".join(["python", *sys.argv])}


def write(path: Path | None, environment: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """A file of results; without a path nothing."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")

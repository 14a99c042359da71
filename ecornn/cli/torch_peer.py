"""PyTorch's layer of the same sizes as a mark in the display of `ecornn tune`."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import TYPE_CHECKING

from ecornn.bench.torch_layers import TORCH, layer_of
from ecornn.workload import SINGLE, Workload

if TYPE_CHECKING:
    from ecornn.device import Device

SECONDS = 1.0  # of runs
PATIENCE = 20.0  # seconds, with the import of PyTorch


def torch_us(work: Workload, device: Device) -> float | None:
    """µs a step of PyTorch's layer, timed in a process of its own, which this one need not import PyTorch for; None
    where there is no such layer, no PyTorch for the device, or no time within ``PATIENCE``."""
    if importlib.util.find_spec("torch") is None or work.cell not in TORCH or work.weights or work.backward:
        return None
    asked = json.dumps([device.kind, work.cell, work.hidden, work.input, work.batch, work.seq, work.dtype,
                        work.precision])
    try:
        done = subprocess.run([sys.executable, "-m", __name__, asked], capture_output=True, text=True, timeout=PATIENCE)
        return float(done.stdout) if done.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def _main(asked: str) -> None:
    """Prints the median of a few runs."""
    import statistics

    import torch

    from ecornn.tune.timing import Contestant, event_clock, race, wall_clock

    kind, cell, hidden, width, batch, seq, dtype, precision = json.loads(asked)
    work = Workload(cell, hidden, width, batch, seq, dtype)
    if kind == "cuda":
        torch.backends.cudnn.allow_tf32 = precision == "tf32"  # exact float32 against exact float32
    layer = layer_of(work, SINGLE, kind)
    x = torch.rand(seq, batch, width).to(device="cuda" if kind == "cuda" else "cpu", dtype=getattr(torch, dtype))
    with torch.inference_mode():
        (times,) = race([Contestant(lambda: layer(x), event_clock if kind == "cuda" else wall_clock)], seconds=SECONDS)
    print(statistics.median(times) / seq * 1e6)


if __name__ == "__main__":
    _main(sys.argv[1])

"""The time of PyTorch's own layer, which a search shows beside its best."""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec

from ecornn.bench.peers import TORCH, layer_of
from ecornn.workload import SINGLE, Workload

if TYPE_CHECKING:
    from ecornn.device import Device

SECONDS = 1.0  # of runs
PATIENCE = 20.0  # seconds, with the import of PyTorch


def torch_us(work: Workload, device: Device) -> float | None:
    """µs a step of PyTorch's layer, timed in another process; None if there is no such layer or PyTorch, or no time."""
    if importlib.util.find_spec("torch") is None or work.cell not in TORCH or work.weights or work.backward:
        return None
    asked = msgspec.json.encode((device.kind, work)).decode()
    try:
        done = subprocess.run([sys.executable, "-m", __name__, asked], capture_output=True, text=True, timeout=PATIENCE)
        return float(done.stdout) if done.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def _main(asked: str) -> None:
    """Prints the median of a few runs."""
    import torch

    from ecornn.tune.timing import Contestant, event_clock, race, wall_clock

    kind, work = msgspec.json.decode(asked, type=tuple[str, Workload])
    place, clock = ("cuda", event_clock) if kind == "cuda" else ("cpu", wall_clock)
    if kind == "cuda":
        torch.backends.cudnn.allow_tf32 = work.precision == "tf32"  # exact float32 against exact float32
    layer = layer_of(work, SINGLE, kind)
    x = torch.rand(work.seq, work.batch, work.input).to(device=place, dtype=getattr(torch, work.dtype))
    with torch.inference_mode():
        (times,) = race([Contestant(lambda: layer(x), clock)], seconds=SECONDS)
    print(statistics.median(times) / work.seq * 1e6)


if __name__ == "__main__":
    _main(sys.argv[1])

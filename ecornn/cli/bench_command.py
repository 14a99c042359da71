"""``ecornn bench``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ecornn.cli.common import JSON, SIZE, as_json, plain_errors
from ecornn.cli.torch_peer import layer_of
from ecornn.workload import SERIAL

if TYPE_CHECKING:
    from ecornn.manifest import Manifest



@click.command(epilog="\b\nExample:\n  ecornn bench lstm800.so --seq 300 --batch 20",
               context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("module", type=click.Path(path_type=Path))
@click.option("--seq", type=SIZE, help="T.  [default: the module's]")
@click.option("--batch", type=SIZE, help="B.  [default: the module's]")
@click.option("--seconds", type=click.FloatRange(min=0.01), default=2.0, show_default=True,
              help="About so long at most for each contestant: 3 to 20 samples, up to 80 where they do not settle.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the data.")
@JSON
@plain_errors
def bench(module: Path, seq: int | None, batch: int | None, seconds: float, seed: int, json: bool) -> None:
    """Times a module, against PyTorch on the same device if it is installed.

    Contestants take turns; x and weights are random; the times are of whole layers, weights bound.
    """
    import numpy as np

    from ecornn.errors import ArgumentError
    from ecornn.runtime.host_check import check_host
    from ecornn.runtime.loader import load
    from ecornn.tune.arrays import arrays_for
    from ecornn.tune.timing import Contestant, race

    loaded = load(module)
    check_host(loaded.manifest.device, 0)
    manifest, work = loaded.manifest, loaded.manifest.workload
    steps, rows = seq or work.seq, batch or work.batch
    if rows > work.batch:
        raise ArgumentError("--batch", rows, f"at most {work.batch}, what the module was compiled for")
    memory, rng = arrays_for(loaded), np.random.default_rng(seed)
    bound = work.hidden ** -0.5
    weights = {p.name: rng.uniform(-bound, bound, p.shape).astype(np.float32) for p in manifest.parameters}
    x = memory.put(rng.uniform(-1, 1, (steps, rows, work.input)))
    layer = loaded.bind(weights)
    contestants = {"ecornn": Contestant(lambda: layer(x), memory.clock)}
    other = torch_layer(manifest, weights, x)
    if other is not None:
        contestants["PyTorch"] = Contestant(other, memory.clock)
    of = f", {manifest.stack}" if str(manifest.stack) else ""
    of += f", {manifest.overlap}" if manifest.overlap != SERIAL else ""
    if not json:  # before some seconds of silence
        click.echo(f"{work.cell} T={steps} B={rows} I={work.input} H={work.hidden} {work.dtype}{of} "
                   f"on {manifest.device.name}, {manifest.schedule}")
    times = race(list(contestants.values()), span=seconds)
    if json:
        as_json(measured(manifest, steps, rows, dict(zip(contestants, times, strict=True))))
        return
    medians = {}
    for name, runs in zip(contestants, times, strict=True):
        low, middle, high = (float(v) for v in np.percentile(runs, (20, 50, 80)) * 1e6 / steps)
        medians[name] = middle
        click.echo(f"{name:8} {middle:10.4g} µs/step   p20 {low:.4g}  p80 {high:.4g}   "
                   f"{middle * steps / 1e3:.4g} ms a sequence, {len(runs)} runs")
    if "PyTorch" in medians:
        click.echo(f"ecornn takes {medians['ecornn'] / medians['PyTorch']:.3f} of PyTorch's time")


def measured(manifest: Manifest, steps: int, rows: int, times: dict[str, list[float]]) -> dict[str, Any]:
    """What was timed and each contestant's µs a step, for programs."""
    import numpy as np

    sides = {}
    for name, runs in times.items():
        low, middle, high = (float(v) for v in np.percentile(runs, (20, 50, 80)) * 1e6 / steps)
        sides[name] = {"p20": low, "median": middle, "p80": high, "runs": len(runs)}
    return {"workload": manifest.workload, "stack": manifest.stack, "device": manifest.device.name,
            "schedule": manifest.schedule, "seq": steps, "batch": rows, "us_per_step": sides}


def torch_layer(manifest: Manifest, weights: dict[str, Any], x: Any) -> Callable[[], Any] | None:
    """PyTorch's layer with the same weights on ``x``; None (and why, printed) where it has none."""
    import importlib.util

    from ecornn.tune.arrays import torch_sees_gpu

    work, on_gpu = manifest.workload, manifest.device.kind == "cuda"
    if importlib.util.find_spec("torch") is None or (on_gpu and not torch_sees_gpu()):
        click.echo("PyTorch is not installed for this device: nothing to compare with", err=True)
        return None
    layer = layer_of(work, manifest.stack, manifest.device.kind)
    if layer is None:
        what = f"layer that goes in reverse only: {work.cell}" if manifest.stack.reverse else f"cell {work.cell}"
        click.echo(f"PyTorch has no {what}: nothing to compare with", err=True)
        return None
    import torch

    layer.load_state_dict({n: torch.from_numpy(w) for n, w in weights.items()})
    data = x if isinstance(x, torch.Tensor) else torch.from_numpy(x)

    def run() -> Any:
        with torch.inference_mode():
            return layer(data)

    return run

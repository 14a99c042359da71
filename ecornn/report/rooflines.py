"""Operations a second of all layers of a device against what its memories and tensor cores can do."""

from __future__ import annotations

from ecornn.floor import SLOWER, measured
from ecornn.report import svg
from ecornn.report.layers import Layer, step_of, task_of, teraflops
from ecornn.schedules.rates import gpu_rates

LEAST = 3  # different operations a byte that make a picture


def rooflines(found: list[Layer]) -> list[tuple[str, str]]:
    """A picture for each device and arithmetic that has a few layers, and whose rates are known.

    Operations a byte are those of a step for each byte of recurrent weights: a kernel that reads these in every step
    cannot be above the line of the memory that they come from.
    """
    groups: dict[tuple[str, str], list[tuple[float, float, str]]] = {}
    for one in found:
        trial, work = one.trial, one.trial.workload
        arithmetic = "tf32" if work.precision == "tf32" else work.dtype
        if measured(trial.device.name) is None or arithmetic not in SLOWER:
            continue
        step = step_of(task_of(trial))
        rate = teraflops(trial, step)
        if step is not None and rate is not None and step.weight_bytes:
            assert trial.times is not None
            groups.setdefault((trial.device.name, arithmetic), []).append((
                2 * step.multiplications / step.weight_bytes, rate,
                f"{work}: {rate:.3g} TFLOP/s, {trial.times.median:.4g} µs"))
    pictures = []
    for (device, arithmetic), points in sorted(groups.items()):
        gpu = measured(device)
        if gpu is not None and len({x for x, _, _ in points}) >= LEAST:
            bounds = gpu_rates(gpu).bounds
            slopes = [("L2", bounds.l2 / 1e3), ("memory", bounds.memory / 1e3)]
            pictures.append((f"{arithmetic} on {device}",
                             svg.roofline(points, slopes, bounds.tensor * gpu.cores / SLOWER[arithmetic] / 1e3)))
    return pictures

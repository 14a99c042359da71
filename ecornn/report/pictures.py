"""Pictures of what the log and the schedules say: layers on a chip, times of a step, lines by size, rooflines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ecornn.device import Device
from ecornn.explain import FloorTerms
from ecornn.floor import SLOWER, measured
from ecornn.report import svg
from ecornn.report.layers import Layer, step_of, task_of, teraflops
from ecornn.report.measured import NOTHING, Measured
from ecornn.schedules.base import Cut
from ecornn.schedules.rates import gpu_rates

COLOURS = 6  # of groups; a seventh has that of the first
LEAST = 3  # different operations a byte that make a roofline
TERMS = {"exchange": "fill0", "products": "fill1", "product of x": "fill2", "bytes": "fill3", "gates": "fill4",
         "recurrence": "fill5", "memory": "fill3"}  # memory is to a step what bytes are to the floor
SERIES, LINES = 3, 4  # sizes that make a line, and lines of a picture, those of most sizes


def chip_map(cut: Cut, device: Device) -> str:
    """A square for each multiprocessor, in the order of blocks, which the GPU places as it likes."""
    return svg.squares(list(_squares(cut, device.cores)))


def _squares(cut: Cut, cores: int) -> Iterator[tuple[str, str]]:
    for group in range(cut.groups):
        for block in range(cut.blocks):
            first = block // cut.parts * cut.units
            part = f", part {block % cut.parts + 1} of {cut.parts} of K" if cut.parts > 1 else ""
            units = f"units {first} to {first + cut.units - 1}"
            yield f"fill{group % COLOURS}", f"group {group}, block {block}: {units}{part}"
    for worker in range(cut.workers):
        yield "worker", f"worker {worker}: products of x"
    for _ in range(cores - cut.groups * cut.blocks - cut.workers):
        yield "idle", "idle"


def chip_words(cut: Cut, device: Device) -> str:
    """The caption of :func:`chip_map`."""
    idle = device.cores - cut.groups * cut.blocks - cut.workers
    heads = f", for one of {cut.heads} heads" if cut.heads > 1 else ""
    rows = f"{cut.rows} row{'s' * (cut.rows != 1)}"
    several = f"{cut.groups} groups (a colour each)" if cut.groups > 1 else "One group"
    owner = "a block" if cut.parts == 1 else f"a set of {cut.parts} blocks, each with its part of K,"
    waits = (f"In every step a block waits for the state of the {cut.blocks - 1} others of its group, through "
             f"{'L2' if cut.by == 'L2' else 'the shared memory of their cluster'}" if cut.blocks > 1 else
             "No block waits for another one")
    places = ", ".join(f"{size / 1024:,.0f} KiB in {where}" for where, size in cut.held.items() if size)
    others = [f"{cut.workers} blocks multiply x (outlined)" if cut.workers else "",
              f"{idle} idle (grey)" if idle else ""]
    beside = "".join(f"; {one}" for one in others if one)
    return (f"{several} of {cut.blocks} blocks, each group with all recurrent weights{heads} and {rows} "
            f"of the batch; {owner} owns {cut.units} hidden units{beside}. {waits}. Weights of a block: {places}.")


def time_picture(floor: FloorTerms | None, stages: dict[str, float], left_out: dict[str, float],
                 whole: float) -> str:
    """The floor, the estimate by its stages, these as measured, and the whole, µs, on one scale; nothing where the
    whole is all there is."""
    rows: list[Any] = []
    if floor is not None:
        rows.append(("floor", [
            (TERMS["exchange"], "exchange", floor.exchange_us), (TERMS["products"], "products", floor.products_us),
            (TERMS["product of x"], "product of x", floor.hoisted_us), (TERMS["bytes"], "bytes", floor.bytes_us)]))
    if stages:
        rows.append(("estimate", terms(stages)))
    if left_out:
        rows.append(("stages", terms(left_out)))
    return svg.stacked([*rows, ("measured", [("measured", "measured", whole)])], "µs") if rows else ""


def terms(stages: dict[str, float]) -> list[tuple[str, str, float]]:
    """The terms of a row of :func:`time_picture`, in the order of :data:`TERMS`."""
    return [(TERMS[name], name, stages[name]) for name in TERMS if name in stages]


def plots(layers: list[Layer], results: Measured = NOTHING) -> list[tuple[str, str]]:
    """µs a step against H, a line for each B, beside the floor and the fastest other library; one picture for each
    device, cell and type that has lines."""
    groups: dict[str, dict[int, dict[int, Layer]]] = {}
    for one in layers:
        work = one.trial.workload
        if work.input == work.hidden and not work.backward and one.trial.times:
            of = " ".join(filter(None, (work.cell, work.dtype, work.precision, work.weights)))
            sizes = groups.setdefault(f"{of} on {one.trial.device.name}", {}).setdefault(work.batch, {})
            other = sizes.get(work.hidden)  # of several T the longest is nearest to a step of many
            if other is None or other.trial.workload.seq < work.seq:
                sizes[work.hidden] = one
    pictures = []
    for name, batches in groups.items():
        series: list[Any] = []
        for batch, sizes in sorted(batches.items()):
            points = [(float(h), one.trial.times.median) for h, one in sorted(sizes.items()) if one.trial.times]
            floors = [(float(h), one.floor.total_us) for h, one in sorted(sizes.items()) if one.floor]
            others = [(float(h), min(peers.values())) for h, one in sorted(sizes.items())
                      if (peers := results.peers(one.trial))]
            if len(points) >= SERIES:
                series.append((f"B={batch}", points, floors, others))
        if series:
            most = sorted(series, key=lambda one: -len(one[1]))[:LINES]
            pictures.append((name, svg.lines([one for one in series if one in most])))
    return pictures


def rooflines(layers: list[Layer]) -> list[tuple[str, str]]:
    """A picture for each device and arithmetic that has a few layers, and whose rates are known.

    Operations a byte are those of a step for each byte of recurrent weights: a kernel that reads these in every step
    cannot be above the line of the memory that they come from.
    """
    groups: dict[tuple[str, str], list[tuple[float, float, str]]] = {}
    for one in layers:
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

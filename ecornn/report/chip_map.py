"""Which multiprocessor has which weights, and which waits for which."""

from __future__ import annotations

from collections.abc import Iterator

from ecornn.device import Device
from ecornn.report import svg
from ecornn.schedules.base import Cut

COLOURS = 6  # of groups; a seventh has that of the first


def picture(cut: Cut, device: Device) -> str:
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


def words(cut: Cut, device: Device) -> str:
    """What the picture shows."""
    idle = device.cores - cut.groups * cut.blocks - cut.workers
    heads = f", for one of {cut.heads} heads" if cut.heads > 1 else ""
    rows = f"{cut.rows} row{'s' * (cut.rows != 1)}"
    several = f"{cut.groups} groups (a colour each)" if cut.groups > 1 else "One group"
    owner = "a block" if cut.parts == 1 else f"a set of {cut.parts} blocks, each with its part of K,"
    waits = (f"In every step a block waits for the state of the {cut.blocks - 1} others of its group, through "
             f"{'L2' if cut.by == 'L2' else 'the shared memory of their cluster'}" if cut.blocks > 1 else
             "No block waits for another one")
    held = ", ".join(f"{size / 1024:,.0f} KiB in {where}" for where, size in cut.held.items() if size)
    more = [f"{cut.workers} blocks multiply x (outlined)" if cut.workers else "", f"{idle} idle (grey)" if idle else ""]
    beside = "".join(f"; {one}" for one in more if one)
    return (f"{several} of {cut.blocks} blocks, each group with all recurrent weights{heads} and {rows} "
            f"of the batch; {owner} owns {cut.units} hidden units{beside}. {waits}. Weights of a block: {held}.")

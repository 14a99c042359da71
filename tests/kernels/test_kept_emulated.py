"""Forward that keeps states for backward, emulated on the CPU: y, last states and kept ones against float64."""

from __future__ import annotations

from typing import Any

import pytest
from emulated import TINY, check_numbers, task_of
from exact import ALL_CELLS
from msgspec.structs import replace
from test_persistent_wide import SMALL, config_for
from tvm_ffi import structural_equal

from ecornn.device import Device
from ecornn.program import ENTRIES, FORWARD, KEPT, RUN, Program
from ecornn.schedules import all_schedules
from ecornn.workload import Traversal

Sizes = tuple[int, int, int, int]


def trains(reverse: bool = False, directions: int = 1, lengths: bool = False, resets: bool = False) -> Traversal:
    return Traversal(reverse, directions, lengths, resets, keep="states")


# (cell, sizes, dtype, knobs, traversal, the call's B if it is not the compiled one)
PERSISTENT: list[Any] = [
    ("lstm", (5, 3, 24, 41), "bfloat16", {}, trains(), None),
    ("lstm", (6, 9, 7, 33), "float32", {"groups": 2, "units": 24}, trains(True, 2, True, True), None),
    ("lstm", (9, 5, 24, 40), "float16", {"ahead": 50}, trains(lengths=True), 2),  # the projection beside
    ("lstm", (6, 9, 9, 40), "float16", {"units": 8, "carrier": "cluster", "fences": "rare"},
     trains(False, 2, True, True), 4),
    ("slstm", (5, 5, 9, 40), "tf32", {}, trains(True, resets=True), None),  # three states besides y
    ("pair", (1, 1, 24, 9), "bfloat16", {"units": 8, "warps": 1}, trains(), None),  # y is the second state
]
WIDE: list[tuple[str, Sizes, str, dict[str, Any], Traversal, int | None]] = [
    ("lstm", (5, 9, 7, 41), "bfloat16", {"units": 16}, trains(True, 2, True, True), None),
    ("lstm", (5, 11, 7, 96), "float16", {"units": 48, "row_teams": 2, "registers": 50}, trains(lengths=True), 3),
]
STEPS: list[tuple[str, str, Sizes, str, dict[str, Any], Traversal, int | None]] = [
    ("layout_transform", "lstm", (4, 5, 7, 17), "bfloat16", {}, trains(True, 2, True, True), 3),
    ("layout_transform", "pair", (4, 3, 5, 9), "float32", {}, trains(resets=True), None),
    ("fused_step", "lstm", (4, 3, 5, 7), "float16", {}, trains(lengths=True), None),
    ("fused_step", "blend", (4, 5, 5, 9), "float32", {}, trains(True, 2, True, True), 3),  # rows have statistics
]
ELEMENTWISE: list[tuple[str, Sizes, str, dict[str, Any], Traversal, int | None]] = [
    ("highway", (21, 3, 5, 12), "float16", {"units": 4, "group": 4}, trains(False, 2, True, True), None),
    ("highway", (9, 5, 5, 7), "float32", {"group": 4, "prefetch": 8}, trains(True, 1, True, True), 2),
    ("highway", (5, 2, 9, 8), "bfloat16", {"units": 2, "group": 4, "prefetch": 8}, trains(), None),
]


@pytest.mark.parametrize(("schedule", "cell", "sizes", "dtype", "change", "traversal", "batch"), [
    *(("persistent", *case) for case in PERSISTENT), *(("persistent_wide", *case) for case in WIDE), *STEPS,
    *(("elementwise", *case) for case in ELEMENTWISE),
    pytest.param("persistent", "lstm(layer_norm)", (5, 3, 24, 40), "bfloat16", {}, trains(resets=True), None,
                 marks=pytest.mark.exhaustive)], ids=str)
def test_matches_float64(tmp_path, schedule, cell, sizes, dtype, change, traversal, batch):
    device = {"persistent": replace(SMALL, cores=9), "persistent_wide": SMALL}.get(schedule, TINY)
    task, found = task_of(cell, sizes, dtype, device, traversal), all_schedules()[schedule]
    check_numbers(tmp_path, found, task, config_for(found, task, **change), batch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["persistent", "persistent_wide", "layout_transform", "fused_step", "elementwise"])
@pytest.mark.parametrize("cell", [*ALL_CELLS, "lstm(peepholes,clip=0.75,zoneout_h=0.25)", "gru(layer_norm)"])
def test_every_cell_that_is_served(tmp_path, schedule, cell):
    """With the default's configuration."""
    found = all_schedules()[schedule]
    exact = "tf32" if cell == "slstm" else "float32"  # it divides by states that are drawn near zero
    for dtype, traversal in ((exact, trains(True, 2, True, True)), ("bfloat16", trains(lengths=True, resets=True))):
        task = task_of(cell, (6, 5, 12, 12), dtype, replace(SMALL, cores=15), traversal)
        if found.refuses(task) is None:
            (tmp_path / dtype).mkdir()
            check_numbers(tmp_path / dtype, found, task, found.default(task), 4)


def both(schedule: str, cell: str, device: Device) -> tuple[Program, Program]:
    """The program of a layer that trains, and of one that does not."""
    task, plain = (task_of(cell, (5, 16, 24, 64), "bfloat16", device, t) for t in (trains(resets=True),
                                                                                   Traversal(resets=True)))
    found = all_schedules()[schedule]
    config = found.default(plain)
    return found.program(task, found.plan(task, config)), found.program(plain, found.plan(plain, config))


@pytest.mark.parametrize(("schedule", "cell", "kept"), [
    ("persistent", "lstm", ["c"]), ("persistent_wide", "lstm", ["c"]), ("layout_transform", "lstm", ["c"]),
    ("fused_step", "slstm", ["c", "n", "m"]), ("elementwise", "highway", ["c"]), ("persistent", "gru", []),
    ("layout_transform", "gru_reset_before", []), ("elementwise", "indrnn", [])])
def test_what_is_added_to_a_program(schedule, cell, kept):
    """An entry, a kernel, and buffers; ``run`` stays as it is, and is what ``forward`` does where y is all there is."""
    made, plain = both(schedule, cell, replace(SMALL, cores=40))
    assert made.entries[RUN] == plain.entries[RUN] and set(plain.entries) == {RUN}
    assert all(structural_equal(made.functions[name], f) for name, f in plain.functions.items())
    added = [b for b in made.buffers if b not in plain.buffers]
    assert [(b.tensor, b.state, b.role, b.extent.at(5)) for b in added] == [
        ("state_kept", name, KEPT, 5 * 16 * 64) for name in kept]
    assert made.entries[FORWARD].takes == (*plain.entries[RUN].takes, *(b.name for b in added))
    assert {b.tensor for b in made.buffers if b.tensor} <= {*ENTRIES[FORWARD]}
    new = set(made.functions) - set(plain.functions)
    assert len(new) == bool(kept) and all(name.endswith("_keeping") for name in new)
    assert kept or made.entries[FORWARD].calls == made.entries[RUN].calls

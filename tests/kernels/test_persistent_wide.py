"""The wide persistent kernel, emulated, against float64: every way in which a layer, or its adjoint, can be cut."""

from functools import partial
from typing import Any

import pytest
from emulated import check_numbers, task_of
from msgspec.structs import replace
from sanitize import CASES as SANITIZED
from sanitize import cell_of
from test_backward_recurrence_emulated import check_recurrence, recurrence_of
from test_persistent_emulated import cut

from ecornn.compiler import plan
from ecornn.schedules.base import Schedule, Task
from ecornn.schedules.persistent_wide import PersistentWide
from ecornn.targets import KNOWN
from ecornn.tune.choose import serving_or_raise
from ecornn.workload import ALONE, Traversal

HOPPER = KNOWN["sm_90a"]
SMALL = replace(HOPPER, cores=6)
FOUR_PARTS = {"units": 96, "row_teams": 2, "parts": 4}
Sizes = tuple[int, int, int, int]

# (cell, (T, B, I, H), dtype, config)
CASES: list[tuple[str, Sizes, str, dict[str, Any]]] = [
    ("lstm", (5, 3, 24, 40), "bfloat16", {}),  # less than a chunk; a block of half its units
    ("rnn_relu", (1, 1, 1, 1), "float16", {"units": 8, "hoisted": "same"}),  # the smallest of everything
    ("lstm", (6, 8, 64, 64), "float16", {"registers": 0}),  # whole tiles; a warpgroup with padding only
    ("lstm", (4, 9, 7, 130), "bfloat16", {"units": 26}),  # odd rows of x, three chunks, blocks across chunks
    ("lstm", (4, 9, 7, 129), "float16", {"units": 26, "registers": 50, "hoisted": "same"}),  # weights in both places
    ("gru", (5, 20, 16, 200), "float16", {"units": 40, "registers": 50}),  # padding rows of the second tile
    ("gru", (5, 20, 16, 135), "bfloat16", {"units": 24, "registers": 0, "hoisted": "same"}),  # 72 rows of shared memory
    ("gru", (4, 11, 31, 90), "float16", {"units": 48, "groups": 2}),  # six rows and five
    ("rnn_tanh", (6, 33, 5, 300), "bfloat16", {"units": 56, "registers": 50}),  # one more than a tile in B
    ("rnn_tanh", (6, 15, 5, 500), "float16", {"units": 128, "registers": 50}),  # two tiles, four chunks
    ("echo", (4, 3, 0, 150), "bfloat16", {"units": 48, "registers": 0}),  # no hoisted product
    ("slstm", (5, 9, 7, 130), "float16", {"units": 26}),  # states that nobody waits for
]


def config_of(**change: Any) -> dict[str, Any]:
    return {"groups": 1, "units": 16, "parts": 1, "row_teams": 1, "registers": 100, "hoisted": "float32",
            "math": "fast", **change}


def backward_config(**change: Any) -> dict[str, Any]:
    return config_of(math="exact", **{"units": 64, **change})


def config_for(schedule: Schedule, task: Task, **change: Any) -> dict[str, Any]:
    if schedule.name == "persistent":
        return cut(task, **change)
    return config_of(**change) if schedule.name == "persistent_wide" else {**schedule.default(task), **change}


# 2 or 3 warpgroups with rows of their own, and blocks that share K
SHARED: list[tuple[str, Sizes, str, dict[str, Any]]] = [
    ("lstm", (5, 9, 7, 130), "float16", {"units": 32, "row_teams": 2, "registers": 50}),  # a tile each
    ("gru", (5, 20, 16, 136), "bfloat16", {"units": 48, "row_teams": 2, "registers": 0}),  # two tiles and a quarter
    ("rnn_tanh", (9, 9, 5, 300), "float16", {"units": 128, "row_teams": 2}),  # one tile each, K of five chunks
    ("lstm", (6, 11, 7, 96), "bfloat16", {"units": 48, "row_teams": 3, "registers": 50}),
    ("gru", (7, 9, 5, 128), "float16", {"units": 64, "row_teams": 3, "registers": 50, "parts": 3}),  # 22, 22, 20 units
    pytest.param(*("gru", (9, 20, 16, 200), "bfloat16", {"units": 72, "row_teams": 2, "parts": 2, "registers": 50}),
                 marks=pytest.mark.exhaustive),  # 4 chunks
    ("gru", (7, 7, 9, 330), "float16", {"units": 112, "row_teams": 2, "parts": 2, "registers": 0}),  # three chunks each
    ("lstm", (7, 23, 6, 90), "bfloat16", {  # 16, 16, 14
        "units": 46, "row_teams": 3, "parts": 3, "registers": 0, "hoisted": "same"}),
    ("lstm", (8, 8, 64, 70), "bfloat16", {"units": 70, "row_teams": 2, "parts": 4}),  # a part of padding only
    ("rnn_relu", (6, 5, 3, 250), "bfloat16", {"units": 128, "row_teams": 2, "parts": 2, "groups": 1}),
    ("echo", (9, 3, 0, 150), "float16", {"units": 128, "row_teams": 2, "parts": 3, "registers": 0}),
    ("gru", (6, 21, 8, 72), "bfloat16", {"units": 72, "row_teams": 3, "parts": 3, "groups": 2}),
]
TRAVERSALS: list[tuple[str, Sizes, str, dict[str, Any], Traversal]] = [
    ("gru", (6, 10, 9, 80), "bfloat16", {"units": 16}, Traversal(True, 2, True, True)),
    ("rnn_tanh", (6, 23, 31, 139), "float16", {"groups": 2, "units": 64, "hoisted": "same"},
     Traversal(False, 2, True, True)),
    ("lstm", (9, 10, 9, 80), "float16", {"units": 40, "row_teams": 2, "parts": 3}, Traversal(True, 2, True, True)),
    ("gru", (9, 7, 9, 79), "bfloat16", {"units": 48, "row_teams": 2, "parts": 2, "hoisted": "same"},
     Traversal(False, 1, True, True)),
    # sequences end to end in columns
    ("lstm", (9, 10, 24, 80), "float16", {}, Traversal(sequences=True)),
    ("gru", (12, 23, 9, 80), "bfloat16", {"units": 40, "groups": 2}, Traversal(True, 2, sequences=True)),
    ("lstm", (9, 10, 9, 80), "float16", {"units": 40, "row_teams": 2, "parts": 3}, Traversal(True, 2, sequences=True)),
    ("gru", (1, 7, 9, 80), "bfloat16", {"units": 48, "row_teams": 2, "parts": 2}, Traversal(sequences=True)),
]


# of adjoints
BACKWARD: list[tuple[str, Sizes, str, dict[str, Any], Traversal]] = [
    ("lstm", (5, 3, 24, 40), "bfloat16", {}, ALONE),
    ("lstm", (7, 5, 24, 41), "float16", {"units": 24, "hoisted": "same"}, Traversal(False, 2, True, True)),
    ("gru", (6, 9, 24, 130), "bfloat16", {"units": 48, "groups": 2}, Traversal(True, 1, True, True)),
    ("rnn_tanh", (6, 9, 5, 70), "float16", {"units": 16}, Traversal(resets=True)),
    ("rnn_tanh", (1, 1, 1, 1), "bfloat16", {"units": 8}, ALONE),
    # 2 or 3 warpgroups with rows of their own, and blocks that share K
    ("lstm", (6, 11, 7, 90), "bfloat16", {"units": 96, "row_teams": 2, "parts": 4}, ALONE),  # an operand each
    ("lstm", (5, 5, 7, 70), "float16", {"units": 72, "row_teams": 2, "parts": 3, "registers": 50},
     Traversal(True, 2, True, True)),  # three chunks each of eight, the last of which only pads K
    ("gru", (7, 9, 5, 128), "float16", {"units": 128, "row_teams": 2, "parts": 6, "hoisted": "same"},
     Traversal(False, 1, True, True)),  # blocks of 22 units, and the last one of 18
    ("gru", (6, 21, 8, 136), "bfloat16", {"units": 136, "row_teams": 3, "groups": 2, "parts": 3, "registers": 0},
     ALONE),
    ("rnn_tanh", (6, 5, 3, 250), "bfloat16", {"units": 128, "row_teams": 2, "parts": 2}, Traversal(resets=True)),
    ("pair", (6, 5, 24, 70), "bfloat16", {"units": 36, "row_teams": 2, "parts": 3}, Traversal(True, 2, True, True)),
]


@pytest.mark.parametrize(("cell", "sizes", "dtype", "change", "traversal"),
                         [*((*case, ALONE) for case in CASES), *TRAVERSALS], ids=str)
def test_matches_float64(tmp_path, cell, sizes, dtype, change, traversal):
    check_numbers(tmp_path, PersistentWide(), task_of(cell, sizes, dtype, SMALL, traversal), config_of(**change))


@pytest.mark.parametrize(("cell", "sizes", "dtype", "change", "traversal", "lazy"), [
    *((*case, True) for case in BACKWARD),  # and copies that come early
    *(("lstm", (7, 5, 7, 70), "float16", change, ALONE, False) for change in ({"units": 24}, FOUR_PARTS))], ids=str)
def test_an_adjoint_matches_float64(tmp_path, cell, sizes, dtype, change, traversal, lazy):
    layer = task_of(cell, sizes, dtype, SMALL, traversal)
    check_recurrence(tmp_path, PersistentWide(), layer, backward_config(**change), lazy=lazy)


@pytest.mark.parametrize(("backward", "registers", "lazy"), [
    (False, 0, True), (True, 50, True), *(pytest.param(False, *how, marks=pytest.mark.exhaustive)
                                          for how in ((50, True), (0, False), (50, False)))])
def test_more_chunks_than_stages_over_many_steps(tmp_path, backward, registers, lazy):
    """Stages are given back and used again within a step, an odd number of times in one step for some."""
    cell, sizes = ("lstm", (7, 9, 8, 130)) if backward else ("rnn_tanh", (9, 9, 8, 600))
    config = backward_config(units=136, row_teams=2, parts=2, registers=50) if backward else config_of(
        units=104, registers=registers)
    def layer_and_plan(device):
        layer = task_of(cell, sizes, "float16", device)
        return layer, PersistentWide().plan(recurrence_of(layer) if backward else layer, config)
    plan = layer_and_plan(SMALL)[1]
    room = plan.shared - (3 if backward else 4) * (plan.stage_bytes + 16)
    layer, plan = layer_and_plan(replace(SMALL, shared=room))
    assert (plan.chunks, plan.stages) == (6 if backward else 5, 3)
    check = check_recurrence if backward else check_numbers
    check(tmp_path, PersistentWide(), layer, config, lazy=lazy)


# weights read in every step: slots that are filled again, and chunks among those that stay
PAST: list[tuple[str, Sizes, str, dict[str, Any]]] = [
    ("rnn_tanh", (5, 9, 8, 600), "float16", {"units": 104, "registers": 20, "streamed": 60, "lasting": 50,
                                                "ahead": 0}),
    pytest.param(*("gru", (6, 16, 16, 500), "bfloat16", {"units": 88, "registers": 0, "streamed": 100}),
                 marks=pytest.mark.exhaustive),
    pytest.param(*("lstm", (5, 9, 7, 300), "float16", {"units": 52, "registers": 0, "streamed": 65}),
                 marks=pytest.mark.exhaustive),
    pytest.param(*("rnn_tanh", (6, 9, 5, 600), "bfloat16", {"units": 128, "row_teams": 2, "streamed": 70,
                                                            "registers": 20}), marks=pytest.mark.exhaustive),
    ("gru", (5, 7, 9, 330), "float16", {"units": 112, "row_teams": 2, "parts": 2, "registers": 0, "streamed": 60}),
    pytest.param(*("rnn_tanh", (3, 9, 5, 2112), "float16", {"units": 128, "row_teams": 2, "registers": 20,  # 33 chunks
                                                            "streamed": 60}), marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize("lazy", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("cell", "sizes", "dtype", "change"), SHARED + PAST, ids=str)
def test_rows_and_k_are_shared_and_weights_past_the_chip(tmp_path, cell, sizes, dtype, change, lazy):
    device = replace(SMALL, cores=17) if sizes[3] > 2000 else SMALL
    check_numbers(tmp_path, PersistentWide(), task_of(cell, sizes, dtype, device), config_of(**change), lazy=lazy)


def test_weights_are_streamed_where_they_fit_no_other_way():
    schedule = PersistentWide()
    for cell, batch, hidden in (("gru", 64, 3072), ("lstm", 8, 4096), ("rnn_tanh", 8, 6144)):
        task = task_of(cell, (4, batch, 64, hidden), "float16", HOPPER)
        config = schedule.default(task)
        plan = PersistentWide().plan(task, config)
        assert schedule.check(task, config) is None and plan.streamed and plan.stages >= min(4, plan.chunks)
        streamed = [n for n in map(plan.stream, range(plan.chunks)) if n is not None]
        assert streamed == [*range(plan.streamed)] and plan.kept + plan.resident + plan.streamed == plan.chunks
        assert schedule.check(task, {**config, "streamed": 0}), "all of them fit"
    assert schedule.default(task_of("gru", (4, 32, 64, 2816), "float16", HOPPER))["streamed"] == 0
    fits = task_of("lstm", (4, 64, 64, 2048), "float16", HOPPER)
    assert "streamed" not in {knob.name for knob in schedule.knobs(fits)}


@pytest.mark.parametrize(("check", "cores", "config"), [
    (check_numbers, 6, config_of(groups=2)), (check_recurrence, 12, backward_config(groups=2, units=40))])
def test_fewer_rows_than_compiled(tmp_path, check, cores, config):
    layer = task_of("lstm", (5, 9, 16, 34), "float16", replace(SMALL, cores=cores), Traversal(True, 2, True, True))
    check(tmp_path, PersistentWide(), layer, config, batch=2)


@pytest.mark.parametrize(("check", "task_for"), [(check_numbers, lambda layer: layer),
                                                 (check_recurrence, recurrence_of)], ids=["layer", "adjoint"])
def test_the_default_of_small_layers(tmp_path, check, task_for):
    layer, schedule = task_of("gru", (3, 33, 31, 129), "bfloat16", SMALL), PersistentWide()
    check(tmp_path, schedule, layer, schedule.default(task_for(layer)))


def test_what_does_not_fit_is_refused():
    schedule, task = PersistentWide(), task_of("lstm", (4, 64, 64, 2048), "float16", HOPPER)
    def reason(**change: Any) -> str:
        return schedule.check(task, config_of(**{"registers": 50, **change})) or ""
    assert not reason() and "multiprocessors" in reason(groups=2) and "multiple" in reason(units=17)
    assert "registers" in (schedule.check(task, config_of(registers=100)) or "")
    assert "shared memory" in (schedule.check(task, config_of(registers=0)) or "")
    assert "items" in (schedule.check(task_of("lstm", (4, 250, 64, 64), "float16", HOPPER), config_of()) or "")
    assert "columns" in (schedule.check(task_of("rnn_tanh", (4, 257, 64, 64), "float16", HOPPER),
                                        config_of(units=8)) or "")
    assert "parts=1" in reason(units=32, parts=2) and "1 tiles" in reason(row_teams=2)
    assert "too few" in (schedule.check(task_of("lstm", (4, 8, 64, 160), "float16", HOPPER),
                                        config_of(units=18, row_teams=2, parts=4)) or "")
    assert "chunks" in (schedule.check(task_of("lstm", (4, 8, 64, 2112), "float16", HOPPER),
                                       config_of(units=32, row_teams=2)) or "")


def test_what_it_does_not_serve():
    def reason(cell="lstm", sizes=(4, 64, 64, 1024), dtype="float16", device=HOPPER, of=lambda layer: layer) -> str:
        return PersistentWide().serves(of(task_of(cell, sizes, dtype, device))) or ""
    assert not reason() and not reason(dtype="bfloat16") and not reason(sizes=(1, 1, 1, 1))
    assert "16-bit" in reason(dtype="float32") and "sm_90a" in reason(device=KNOWN["sm_80"])
    assert "one recurrent product" in reason("gru_reset_before") and "one recurrent product" in reason("pair")
    assert not reason("gru", (4, 32, 64, 2816)) and not reason("gru", (4, 64, 64, 2816))
    assert "do not fit" in reason("rnn_tanh", (4, 64, 64, 5120)) and "hidden" in reason(sizes=(4, 64, 64, 9000))
    adjoint = partial(reason, of=recurrence_of)
    assert not adjoint() and not adjoint("gru", dtype="bfloat16") and not adjoint("pair", (4, 64, 64, 64))
    assert not adjoint(sizes=(4, 64, 64, 2048)) and not adjoint(sizes=(4, 256, 64, 1024))
    assert "16-bit" in adjoint(dtype="float32") and "one recurrent product" in adjoint("gru_reset_before")
    assert "do not fit" in adjoint(sizes=(4, 64, 64, 2816))
    columns = task_of("lstm", (4, 64, 64, 1024), "float16", HOPPER, Traversal(sequences=True))
    assert PersistentWide().serves(recurrence_of(columns)) is None
    layer = task_of("lstm", (4, 64, 64, 1024), "float16", HOPPER)
    own, knobs = ({k.name: k.values for k in PersistentWide().knobs(task)} for task in (layer, recurrence_of(layer)))
    assert max(knobs["parts"]) == 16 and max(knobs["units"]) == 256 and own["parts"] == (1, 2, 3, 4)


def test_it_is_chosen_where_it_is_expected_to_be_faster():
    """Without a record: small batches stay with ``persistent``."""
    def first(batch: int, hidden: int) -> str:
        return serving_or_raise(task_of("lstm", (100, batch, 64, hidden), "float16", HOPPER))[0].name
    assert first(16, 768) == "persistent" and first(64, 2048) == "persistent_wide"


@pytest.mark.parametrize("name", [n for n, of in SANITIZED.items() if "cores" in of or "shared" in of])
def test_what_the_sanitizer_runs_as_on_a_smaller_gpu_fits_there(name):
    of = SANITIZED[name]
    _, B, I, H = of["sizes"]
    target = replace(HOPPER, shared=of["shared"] << 10) if "shared" in of else HOPPER
    target = replace(target, cores=of.get("cores", target.cores))
    found = plan(cell_of(of["cell"]), hidden=H, input=I, batch=B, dtype=of["dtype"], target=target,
                 schedule=of["schedule"], config=of["config"])
    assert found.found.schedule.name == of["schedule"]

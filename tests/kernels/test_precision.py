"""Recurrent weights in 8 bits, emulated, against float64 with weights that are rounded alike; TF32 products."""

import copy
import re
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from cuda_on_cpu import Emulated, inputs
from emulated import check_numbers, in_integers, rounded_weights, task_of
from exact import in_float64, relative
from msgspec.structs import replace
from refusals import refused
from test_persistent_emulated import SMALL, cut

import ecornn
from ecornn.build.cuda import lower
from ecornn.cli import main
from ecornn.cli.step_text import step_text
from ecornn.compiler import plan
from ecornn.errors import ArgumentError, DTypeError, EcornnError, ScheduleError
from ecornn.explain import floor_terms
from ecornn.numpy_reference import random_weights
from ecornn.schedules.base import Task
from ecornn.schedules.persistent import Persistent
from ecornn.schedules.persistent import plan as persistent_plan
from ecornn.schedules.step.layout_transform import LayoutTransform
from ecornn.targets import KNOWN
from ecornn.tune.choose import serving
from ecornn.workload import ALONE, BATCH, SEQ, SINGLE, Traversal, Workload

MASKED = Traversal(True, 2, True, True)

CASES: list[tuple[str, tuple[int, int, int, int], str, dict[str, Any], Traversal]] = [
    ("lstm", (5, 3, 24, 40), "float16", {}, ALONE),
    ("lstm", (5, 9, 24, 40), "bfloat16", {"registers": 0, "chains": 2}, ALONE),  # shared memory; two tiles of rows
    ("lstm", (6, 8, 64, 64), "bfloat16", {"registers": 50}, MASKED),  # registers and shared memory
    ("gru", (3, 7, 20, 40), "float16", {"interleave": 4, "units": 8}, ALONE),  # a gate of padding
    ("gru", (7, 20, 17, 40), "bfloat16", {"ahead": 0, "units": 24}, ALONE),  # units of padding; an odd octet
    ("gru_reset_before", (4, 5, 9, 40), "float16", {"units": 8}, ALONE),  # two exchanges a step
    ("rnn_relu", (1, 1, 1, 1), "bfloat16", {"units": 8, "warps": 1}, ALONE),
    ("slstm", (9, 5, 24, 40), "float16", {"math": "fast"}, Traversal(sequences=True)),
    ("slstm(heads=2)", (6, 5, 24, 64), "bfloat16", {"warps": 1}, ALONE),
    ("lstm(layer_norm)", (4, 3, 24, 40), "float16", {}, ALONE),  # lanes without a unit
    ("lstm", (6, 5, 24, 33), "bfloat16", {"units": 8, "carrier": "cluster", "fences": "rare"}, ALONE),
]


@pytest.mark.parametrize(("cell", "sizes", "dtype", "change", "traversal"), CASES, ids=str)
def test_matches_float64_with_weights_rounded_alike(tmp_path, cell, sizes, dtype, change, traversal):
    task = task_of(cell, sizes, f"{dtype}, int8", replace(SMALL, cores=15), traversal)
    check_numbers(tmp_path, Persistent(), task, cut(task, **change))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_reads_weights_from_l2_where_they_do_not_fit(tmp_path, monkeypatch, arch):
    monkeypatch.setattr(persistent_plan, "AHEAD_BYTES", 1)
    device = replace(KNOWN[arch], cores=6, shared=5 << 10)
    task, whole = (task_of("echo", (5, 3, 0, 150), kind, device) for kind in ("float16, int8", "float16"))
    config = cut(task, units=32, registers=0, warps=1)
    ours, wide = (Persistent().plan(of, config) for of in (task, whole))
    assert (ours.phases[0].slots > 0) == (arch == "sm_90a") and 0 < ours.streamed < wide.streamed
    check_numbers(tmp_path, Persistent(), task, config)


def test_products_that_are_too_much_code_are_loops(tmp_path, monkeypatch):
    monkeypatch.setattr(persistent_plan, "FLIGHT", 2)
    task = task_of("rnn_tanh", (4, 3, 7, 200), "float16, int8", replace(SMALL, cores=8))
    config = cut(task, units=64, registers=25, warps=1)
    first = Persistent().plan(task, config)
    monkeypatch.setattr(persistent_plan, "UNROLLED", first.code(first.phases[0], 3))
    (phase,) = (made := Persistent().plan(task, config)).phases
    assert [rolled for *_, rolled in made.stretches(phase)] == [False, True] and made.written(phase) < phase.pairs
    check_numbers(tmp_path, Persistent(), task, config)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_integer_is_what_it_stands_for(tmp_path, dtype):
    task = task_of("echo", (1, 1, 0, 256), f"{dtype}, int8", replace(SMALL, cores=32))
    x, states, parameters = inputs("echo", (1, 1, task.workload.input, 256), dtype, task.graph.parameters,
                                   tuple(task.graph.states))
    ((name, value),), (first,) = parameters.items(), states.values()
    numbers = np.arange(256, dtype=np.float32) - 128
    numbers[0] = 127
    value[0] = np.stack([np.roll(numbers, k) for k in range(256)]).astype(value.dtype)
    first[:] = 0
    first[0, 7] = 1
    program = Persistent().program(task, Persistent().plan(task, cut(task, units=8)))
    y, _ = Emulated(program, tmp_path).run(x, states, parameters)
    wanted, _ = in_float64("echo", x, states, {name: value.astype(np.float64)})
    assert np.array_equal(y.astype(np.float64), wanted.astype(y.dtype).astype(np.float64))


def test_rows_of_zeros_are_zeros(tmp_path):
    task = task_of("lstm", (3, 2, 8, 40), "float16, int8", SMALL)
    graph, config = task.graph, cut(task)
    x, states, parameters = inputs("lstm", (3, 2, 8, 40), "float16", graph.parameters, tuple(graph.states))
    (name,) = {t.source[0] for q in graph.product_phases[0].products for t in q.terms}
    parameters[name][:, ::3] = 0
    y, _ = Emulated(Persistent().program(task, Persistent().plan(task, config)), tmp_path).run(x, states, parameters)
    wanted, _ = in_float64("lstm", x.astype(np.float64), states, rounded_weights(task, parameters))
    assert relative(y, wanted) < 1e-3


@pytest.mark.parametrize(("cell", "normal", "least", "most"), [
    ("lstm", False, 5e-4, 1e-3), ("gru", False, 5e-4, 1e-3), ("rnn_tanh", False, 1e-3, 3e-3),
    ("lstm", True, 3e-3, 7e-3)])
def test_error_beside_weights_that_are_not_rounded(cell, normal, least, most):
    """What docs/GETTING_STARTED.md says: of PyTorch's initial weights, and of normal ones that are thrice as large."""
    rng, name = np.random.default_rng(0), "weight_hh_l0"
    weights = {n: w.astype(np.float64) for n, w in random_weights(cell, 96, 192).items()}
    if normal:
        weights[name] = rng.normal(0, 3 / np.sqrt(3 * 192), weights[name].shape)
    x = rng.standard_normal((30, 4, 96))
    exact, _ = ecornn.reference(cell, x, weights)
    found, _ = ecornn.reference(cell, x, weights | {name: in_integers(weights[name])})
    assert least < relative(found, exact) < most


@pytest.mark.parametrize(("arguments", "words"), [
    ({"dtype": "float16", "weights": "int16"}, "weights='int16': expected None or int8 on a GPU"),
    ({"dtype": "float16", "weights": "bfloat16"}, "expected None or int8 on a GPU"),
    ({"dtype": "float32", "weights": "int8"}, "None with dtype float32 on a GPU; int8 is for float16 and bfloat16"),
    ({"dtype": "bfloat16", "weights": "int8", "training": True}, "None in a layer that trains")])
def test_what_gpus_do_not_have_is_named(arguments, words):
    with pytest.raises(DTypeError, match=words) as found:
        plan("lstm", hidden=64, batch=4, target="sm_90a", **arguments)
    assert found.value.argument == "weights"


def test_who_is_refused():
    for schedule in ("persistent_wide", "persistent_block", "fused_step", "layout_transform", "whole_step"):
        with pytest.raises(ScheduleError, match=f"{schedule}: does not round weights to int8"):
            plan("lstm", hidden=128, target="sm_90a", dtype="float16", weights="int8", schedule=schedule)
    with pytest.raises(EcornnError, match="int8 weights only in products of one operand"):
        serving(task_of("pair", (4, 3, 24, 40), "float16, int8"))
    with pytest.raises(ScheduleError, match="no recurrent product"):
        plan("indrnn", hidden=128, target="sm_90a", dtype="float16", weights="int8")


def both(hidden: int) -> list[Task]:
    return [task_of("lstm", (300, 8, hidden, hidden), kind, KNOWN["sm_90a"]) for kind in ("float16, int8", "float16")]


def test_a_layer_whose_weights_are_past_the_chip_stays_on_it():
    """An LSTM of 2560 units: 52 MB in 16 bits, 26 MB in 8."""
    task, whole = both(2560)
    schedule = Persistent()
    assert not schedule.plan(task, schedule.default(task)).streamed
    assert schedule.serves(whole) or schedule.plan(whole, schedule.default(whole)).streamed


def test_what_is_said_of_them():
    task, whole = both(4096)
    ours, wide = floor_terms(task), floor_terms(whole)
    assert ours is not None and wide is not None
    assert ours.total_us < wide.total_us and ours.products_us == wide.products_us
    lines = step_text(task.graph, task.workload, SINGLE)
    assert re.search(r"recurrent +67,108,864 ", lines) and re.search(r"of x +134,217,728 ", lines)


@pytest.mark.gpu
@pytest.mark.parametrize(("cell", "hidden", "batch", "dtype"), [
    ("lstm", 512, 8, "float16"), ("gru", 768, 20, "bfloat16"), ("rnn_tanh", 1024, 3, "float16"),
    ("gru_reset_before", 256, 9, "bfloat16"), ("lstm", 3072, 8, "float16")])
def test_on_a_gpu(cell, hidden, batch, dtype):
    import torch

    steps, kind = 12, getattr(torch, dtype)
    module = ecornn.compile(cell, hidden=hidden, input=64, batch=batch, seq=steps, dtype=dtype, weights="int8",
                            target="cuda")
    given = {n: torch.from_numpy(w).to(kind) for n, w in random_weights(cell, 64, hidden).items()}
    x = torch.randn(steps, batch, 64, generator=torch.Generator().manual_seed(1)).to(kind)
    y, _ = module.bind(given)(x.cuda())
    there, _ = module.bind({n: w.cuda() for n, w in given.items()})(x.cuda())
    assert torch.equal(y, there)
    exact, name = {n: w.double().numpy() for n, w in given.items()}, "weight_hh_l0"
    unrounded, wanted = (ecornn.reference(cell, x.double().numpy(), weights)[0]
                         for weights in (exact, exact | {name: in_integers(exact[name])}))
    found = y.double().cpu().numpy()
    assert relative(found, wanted) < {"float16": 6e-4, "bfloat16": 5e-3}[dtype] and relative(found, unrounded) < 1e-2


def test_only_float32_on_a_gpu_has_a_choice_and_exact_is_the_default():
    for wrong in ({"precision": "fp8"}, {"precision": "tf32", "dtype": "float16"},
                  {"precision": "tf32", "weights": "int8"}):
        refused(ArgumentError, "precision", Workload, "lstm", 8, 8, **wrong)
    refused(EcornnError, "no tf32 products", ecornn.compile, "lstm", hidden=8, precision="tf32", target="cpu")
    exact, tf32 = (plan("lstm", hidden=8, precision=kind, target="sm_90a").workload for kind in ("exact", "tf32"))
    assert exact == Workload("lstm", 8, 8, BATCH, SEQ) and tf32.precision == "tf32" and "tf32" in str(tf32)


@pytest.mark.parametrize("schedule", [Persistent(), LayoutTransform()], ids=lambda s: s.name)
def test_a_third_of_the_products(schedule):
    counts = []
    for kind in ("float32", "tf32"):
        task = task_of("lstm", (5, 9, 40, 64), kind, KNOWN["sm_90a"])
        config = schedule.default(task_of("lstm", (5, 9, 40, 64), "float32", KNOWN["sm_90a"]))
        source = lower(schedule.program(task, schedule.plan(task, config)), "sm_90a")[1]
        # the projection's tiles differ
        kernels = [text for text in source.split('extern "C"')[1:] if "project" not in text.partition("{")[0]]
        counts.append(sum(text.count("ptx_mma") or text.count("mma_sync") for text in kernels))
    assert counts[0] == 3 * counts[1] > 0


def test_the_command_line_means_float32():
    run = CliRunner().invoke(main, ["compile", "--cell", "lstm", "--hidden", "8", "--precision", "tf32",
                                    "--target", "sm_90a", "--schedule", "fused_step", "--emit", "cuda"])
    assert run.exit_code == 0, run.output
    assert "float32, tf32 products" in run.output


@pytest.mark.gpu
@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh"])
@pytest.mark.parametrize("schedule", ["persistent", "layout_transform"])
def test_no_worse_than_twice_the_library(cell, schedule):
    import torch
    torch.manual_seed(0)
    T, B, I, H = 30, 9, 200, 256
    library = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn_tanh": torch.nn.RNN}[cell](I, H).cuda()
    x = torch.randn(T, B, I, device="cuda")
    layer = ecornn.compile(cell, hidden=H, input=I, batch=B, seq=T, precision="tf32", target="cuda",
                           schedule=schedule).bind({k: v.detach() for k, v in library.named_parameters()})
    allowed, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, True
    try:
        with torch.no_grad():
            theirs, exact = library(x)[0].double(), copy.deepcopy(library).double()(x.double())[0]
    finally:
        torch.backends.cudnn.allow_tf32 = allowed
    error, limit = ((y - exact).norm() / exact.norm() for y in (layer(x)[0].double(), theirs))
    assert limit > 1e-5 and error <= 2 * limit

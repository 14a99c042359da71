"""TF32 products: who may ask for them, what is generated, and how far off they are."""

from __future__ import annotations

import copy

import pytest
from click.testing import CliRunner
from emulated import task_of

import ecornn
from ecornn.build.cuda import lower
from ecornn.cli import main
from ecornn.compiler import plan
from ecornn.errors import ArgumentError, EcornnError
from ecornn.schedules.persistent import Persistent
from ecornn.schedules.step.layout_transform import LayoutTransform
from ecornn.targets import KNOWN
from ecornn.workload import BATCH, SEQ, Workload


@pytest.mark.parametrize("wrong", [{"precision": "fp8"}, {"precision": "tf32", "dtype": "float16"},
                                   {"precision": "tf32", "weights": "int8"}], ids=str)
def test_only_float32_has_a_choice(wrong):
    with pytest.raises(ArgumentError, match="precision"):
        Workload("lstm", 8, 8, **wrong)


def test_exact_is_the_default_and_tf32_a_workload_of_its_own():
    planned = plan("lstm", hidden=8, precision="exact", target="sm_90a")
    assert planned.workload == Workload("lstm", 8, 8, BATCH, SEQ)
    planned = plan("lstm", hidden=8, precision="tf32", target="sm_90a")
    assert planned.workload.precision == "tf32" and "tf32" in str(planned.workload)


def test_a_cpu_has_no_tf32():
    with pytest.raises(EcornnError, match="no tf32 products"):
        ecornn.compile("lstm", hidden=8, precision="tf32", target="cpu")


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
            theirs = library(x)[0].double()
            exact = copy.deepcopy(library).double()(x.double())[0]
    finally:
        torch.backends.cudnn.allow_tf32 = allowed
    ours = layer(x)[0].double()
    error, limit = ((y - exact).norm() / exact.norm() for y in (ours, theirs))
    assert limit > 1e-5 and error <= 2 * limit

"""A CUDA module called from C: its host code as it is built, with a driver that carries out emulated kernels."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from c_abi_sample import HERE, close, compiled, read, run_both, weights_of, write
from cuda_on_cpu import Emulated
from test_stacks_cuda import SCHEDULES, TINY, B, H, I, T

import ecornn
from ecornn.analysis import analyse
from ecornn.build import build_module
from ecornn.cells import get
from ecornn.host_gpu import detect
from ecornn.schedules.base import Task
from ecornn.task import make_manifest
from ecornn.workload import Workload

pytestmark = pytest.mark.skipif(detect() is not None, reason="the driver without a GPU serves modules for sm_90a")


def test_a_layer_on_a_gpu_from_c(tmp_path: Path, fake: Path):
    """With weights from the host and from the GPU, on the caller's stream."""
    task = Task(Workload("gru", H, I, B, T), analyse(get("gru"), I, H), TINY)
    schedule, folder = SCHEDULES["layout_transform"], tmp_path / "arrays"
    program = schedule.program(task, config := schedule.default(task))
    Emulated(program, tmp_path)
    build_module(program, make_manifest(get("gru"), task, schedule, config, program, "by a test"), tmp_path / "gru.so")
    weights = weights_of(ecornn.load(tmp_path / "gru.so"))
    rng = np.random.default_rng(4)
    x, h = (rng.standard_normal(shape).astype(np.float32) for shape in ((T, B, I), (B, H)))
    write(folder, weights | {"x": x, "h_in": h})
    program_file = compiled(HERE / "c_program.c", tmp_path / "c_program")
    _, notes = run_both(program_file, tmp_path / "gru.so", folder, T, B, 0, FAKE_KERNELS=str(tmp_path / "kernels.so"),
                        LD_LIBRARY_PATH=str(fake))
    y, (state,) = ecornn.reference("gru", x, weights, (h,))
    close(read(folder, "y", T, B, H), y)
    close(read(folder, "h_out", B, H), state)
    close(read(folder, "y_from_zeros", T, B, H), ecornn.reference("gru", x, weights)[0])
    assert {*re.findall(r"Launch.* stream=(\d+)", notes)} == {"7"}
    assert notes.count("cuMemAlloc ") == notes.count("cuMemFree ") > 3

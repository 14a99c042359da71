"""A CUDA module called from C: its host code as it is built, with a driver that carries out emulated kernels."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import cuda_on_cpu
import numpy as np
import pytest
from c_abi_sample import HERE, close, compiled, read, run_both, weights_of, write
from cuda_as_cpp import translate
from test_stacks_cuda import SCHEDULES, TINY, B, H, I, T

import ecornn
from ecornn.analysis import analyse
from ecornn.build import build_module, c_tables, cuda
from ecornn.cells import get
from ecornn.host_gpu import detect
from ecornn.schedules.base import Task
from ecornn.task import make_manifest
from ecornn.workload import Workload

pytestmark = pytest.mark.skipif(detect() is not None, reason="the driver without a GPU serves modules for sm_90a")


@pytest.mark.parametrize("packs", [False, True])
def test_a_layer_on_a_gpu_from_c(tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch, packs: bool):
    """With weights from the host and from the GPU, on the caller's stream; these packed there by a module that has the
    kernel for it."""
    if not packs:
        for builder in (cuda, c_tables):
            monkeypatch.setattr(builder, "packs", lambda program: False)
    task = Task(Workload("gru", H, I, B, T), analyse(get("gru"), I, H), TINY)
    schedule, folder = SCHEDULES["layout_transform"], tmp_path / "arrays"
    program = schedule.program(task, schedule.plan(task, config := schedule.default(task)))
    kernels, source = cuda.lower(program, "sm_90a")
    texts, names = [source], [kernel.symbol for kernel in kernels.values()]
    if packs:
        texts.append(resources.files("ecornn.build").joinpath("pack_weights.cu").read_text())
        names.append(cuda.PACK_SYMBOL)
    cuda_on_cpu.compiled(translate("\n".join(texts)), names, tmp_path)
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
    for name, sign in (("y_from_zeros", 1), ("y_of_there", 1), ("y_of_negated", -1)):
        signed = {parameter: sign * value for parameter, value in weights.items()}
        close(read(folder, name, T, B, H), ecornn.reference("gru", x, signed)[0])
    assert {*re.findall(r"Launch.* stream=(\d+)", notes)} == {"7"}
    assert notes.count("cuMemAlloc ") == notes.count("cuMemFree ") > 3
    _, bound, *again = notes.partition("repacked")[0].split(" there\n")
    for asked in (bound, *again):
        assert asked.count(f"cuLaunchKernelEx {cuda.PACK_SYMBOL} ") == packs
    for asked in again if packs else []:  # nothing is allocated, copied or waited for
        assert not re.search("cuMem|Synchronize", asked)

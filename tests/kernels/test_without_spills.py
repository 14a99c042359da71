"""What ptxas makes of kernels for Hopper: none spills, and what it says is read, as of wgmma that it serializes."""

import re
import subprocess
import tempfile
from pathlib import Path

import pytest
from emulated import task_of
from test_backward_assembled import memory_of
from test_backward_recurrence_emulated import check_asked, recurrence_of

from ecornn.build.cuda import lower
from ecornn.build.nvcc import find_nvcc, parse_resources
from ecornn.program import WORKSPACE, Buffer, Extent, Program
from ecornn.schedules.assemble import shared_buffers
from ecornn.schedules.backward.weights import weight_gradients
from ecornn.schedules.gemm.projection import project
from ecornn.schedules.gemm.wgmma_mainloop import THREADS
from ecornn.schedules.hoisted import hoisted_of
from ecornn.schedules.persistent_wide import PersistentWide
from ecornn.targets import KNOWN

HOPPER = KNOWN["sm_90a"]
NVCC = find_nvcc()
pytestmark = pytest.mark.skipif(NVCC is None, reason="nvcc is optional, and this reads what its ptxas says")


def resources_without_spills(source: str, kernel: str = "") -> dict[str, dict[str, int]]:
    """Of that kernel or all: no spills, wgmma serialized or setmaxnreg ignored, which cost most of the speed."""
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder, "kernels.cu"), Path(folder, "kernels.cubin")
        given.write_text(source)
        command = [str(NVCC), "-gencode=arch=compute_90a,code=sm_90a", "-O3", "-std=c++17", "-cubin", "-Xptxas=-v",
                   "-diag-suppress=177", str(given), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert made.read_bytes()[:4] == b"\x7fELF"
    log = done.stdout + done.stderr
    assert not re.findall(r"C75\d\d|wgmma|setmaxnreg", log), log
    found = {name: used for name, used in parse_resources(log).items() if kernel in ("", name)}
    assert found and all(used["spill_stores"] == used["stack"] == 0 for used in found.values()), found
    return found


@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 800), ("bfloat16", 803), ("float32", 800)])
def test_gradients_of_weights(dtype, width):
    memory = memory_of("lstm", (300, 20, width, width), dtype, device=HOPPER)
    part = weight_gradients(memory, memory.leaves() | memory.outputs(), add=True)
    names = ("x", "before_h", "outputs", "d_weight_ih", "d_weight_hh")
    others = tuple(Buffer(n, WORKSPACE, dtype if n[:2] != "d_" else "float32", Extent(1)) for n in names)
    source = lower(Program.running(dict(part.functions), (*part.buffers, *others), part.calls), "sm_90a")[1]
    assert ("wgmma" in source) == (width % 2 == 0 and dtype == "bfloat16") and resources_without_spills(source)


@pytest.mark.parametrize(("cell", "hidden", "input", "dtype", "wide"), [
    ("lstm", 768, 768, "bfloat16", True), ("gru", 800, 800, "bfloat16", True),
    ("rnn_tanh", 2048, 2048, "bfloat16", True), ("lstm", 767, 3000, "bfloat16", True),
    ("lstm", 33, 64, "bfloat16", True), ("rnn_tanh", 100, 16, "bfloat16", False), ("gru", 7, 8, "bfloat16", False),
    ("lstm", 768, 768, "tf32", True), ("gru", 800, 803, "tf32", True)])
def test_the_projection(cell, hidden, input, dtype, wide):
    made = task_of(cell, (64, 16, input, hidden), dtype, HOPPER)
    part = project(made)
    assert part.calls[-1].threads == THREADS  # x may be copied before
    buffers = (*shared_buffers(made, hoisted_of(made)), *part.buffers)
    source = lower(Program.running(dict(part.functions), buffers, part.calls), "sm_90a")[1]
    found = resources_without_spills(source, "project_kernel")["project_kernel"]
    if wide:  # what setmaxnreg starts from is what a block of 384 threads gets; from less it would wait forever
        assert found["registers"] == 168 and "setmaxnreg" in source


@pytest.mark.parametrize(("cell", "batch", "hidden", "backward"), [
    ("lstm", 64, 1024, False), ("lstm", 64, 1536, False), ("lstm", 64, 2048, False), ("gru", 32, 2048, False),
    ("gru", 32, 2816, False), ("lstm", 64, 1024, True), ("lstm", 512, 256, True), ("gru", 64, 2048, True),
    *(pytest.param("lstm", *sizes, True, marks=pytest.mark.exhaustive) for sizes in ((64, 2048), (256, 1024)))])
def test_the_wide_kernel(cell, batch, hidden, backward):
    task, schedule = task_of(cell, (100, batch, hidden, hidden), "float16", HOPPER), PersistentWide()
    task = recurrence_of(task) if backward else task
    plan = schedule.plan(task, check_asked(schedule, task) if backward else schedule.default(task))
    source = lower(schedule.program(task, plan), "sm_90a")[1]
    found = resources_without_spills(source, "persistent_wide_kernel")["persistent_wide_kernel"]
    assert backward or found["registers"] == 65536 // plan.threads // 8 * 8

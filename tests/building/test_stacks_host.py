"""Whole modules on a CPU: the host code as it is built, with a driver that carries out emulated kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu import Emulated, Memory
from driver_notes import child
from test_stacks_cuda import SIDES, H, I, check_results, program_of

from ecornn.build import build_module
from ecornn.host_gpu import detect
from ecornn.manifest import Manifest
from ecornn.program import Program
from ecornn.targets import KNOWN
from ecornn.workload import Overlap, Stack, Workload

pytestmark = pytest.mark.skipif(detect() is not None, reason="the driver without a GPU serves modules for sm_90a")
RUN = """
import numpy as np
T, B, file = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
buffers = dict(np.load(file))
m["run"](T, B, 0, 7, *(value.ctypes.data for value in buffers.values()))
np.savez(file, **buffers)
"""


class Hosted(Emulated):
    """An emulated program whose calls are made by its module."""

    def __init__(self, program: Program, folder: Path, driver: Path) -> None:
        super().__init__(program, folder)
        self.folder, self.driver = folder, driver
        self.notes: list[str] = []
        manifest = Manifest(Workload("test", H, I), KNOWN["sm_90a"], "test", {}, "made by a test", ("h",), "h", (),
                            program.buffers, {"run": program.entries["run"].takes}, {"ecornn": "test"})
        build_module(program, manifest, folder / "module.so")

    def carry_out(self, memory: Memory, steps: int, batch: int, entry: str = "run") -> None:
        assert entry == "run", "the only entry of these modules"
        file = self.folder / "buffers.npz"
        np.savez(file, **{b.name: memory[b.name].view(np.uint8) for b in self.program.buffers})
        self.notes = child(RUN, self.folder / "module.so", self.driver, steps, batch, file,
                           FAKE_KERNELS=str(self.folder / "kernels.so")).calls
        for name, value in np.load(file).items():
            memory[name].view(np.uint8)[:] = value


CASES: list[Any] = [
    ("persistent", "lstm", Stack(3, False, True, True), "bfloat16", Overlap("wavefront", 3, 3, 5), {}),
    pytest.param("persistent", "gru", Stack(3), "float32", Overlap("wavefront", 2, 3, 5), {"cores": 7, "ahead": 0},
                 marks=pytest.mark.exhaustive),
    pytest.param("layout_transform", "lstm", Stack(2, True, True, True), "float16", SIDES, {},
                 marks=pytest.mark.exhaustive)]


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "cell", "stack", "dtype", "overlap", "change"), CASES, ids=str)
def test_modules_compute_what_they_should(tmp_path: Path, fake: Path, schedule: str, cell: str, stack: Stack,
                                          dtype: str, overlap: Overlap, change: dict[str, Any]):
    module = Hosted(program_of(schedule, cell, stack, dtype, overlap=overlap, **change), tmp_path, fake)
    for steps in (1, 27):
        check_results(module, cell, stack, dtype, steps)
        streams = {note.split("stream=")[1].split()[0] for note in module.notes if "Launch" in note}
        assert len(streams) == (overlap.width if overlap == SIDES or steps > 8 else 1)

"""What stands for the process with the GPU in tests of the benchmarks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import measuring_process
import pytest
from cases import Files
from events import LIMIT
from measuring_process import Limits, MeasuringProcess
from why_above_floor import Case

GPU = "NVIDIA H100 80GB HBM3"


def patient(monkeypatch: pytest.MonkeyPatch, hangs: str = "") -> None:
    """Processes may take long to start, and rows to be measured, but for those of a cell that ``hangs``."""
    measure = MeasuringProcess.measure

    def measured(self: MeasuringProcess, *asked: Any) -> dict:
        given = self.limits
        if asked[0].cell != hangs:
            self.limits = replace(given, longest=LIMIT)
        try:
            return measure(self, *asked)
        finally:
            self.limits = given

    monkeypatch.setattr(measuring_process, "STARTING", LIMIT)
    monkeypatch.setattr(MeasuringProcess, "measure", measured)


def serve(pipe: Connection, limits: Limits) -> None:
    """Two microseconds for every LSTM; a GRU hangs, a vanilla layer kills the process."""
    pipe.send(({"gpu": GPU, "process": os.getpid()}, True))
    while True:
        try:
            row, file = pipe.recv()
        except EOFError:
            return
        if row.cell == "gru":
            time.sleep(1e6)
        elif row.cell == "rnn_tanh":
            os._exit(7)
        assert file.exists()
        pipe.send(({"ecornn_us": 2.0, "ecornn_p20": 1.9, "ecornn_p80": 2.1, "cudnn_us": 4.0, "cudnn_p20": 4.0,
                    "cudnn_p80": 4.0, "ratio": 2.0, "schedule": "cpu_sequence", "config": {}, "provenance": "default",
                    "process": os.getpid()}, True))


def serve_cpu(pipe: Connection, limits: Limits, one: Callable[..., dict]) -> None:
    """The real process with the CPU in the GPU's place: no graphs, wall-clock times."""
    import side_by_side
    import torch

    def clock(run: Callable[[], object]) -> float:
        begin = time.perf_counter()
        run()
        return (time.perf_counter() - begin) * 1e6

    def graph(function: Callable[[], object]) -> SimpleNamespace:
        function()
        return SimpleNamespace(replay=function)

    side_by_side.DEVICE, side_by_side.graph_of, side_by_side.clock = "cpu", graph, clock
    side_by_side.environment = lambda: {"gpu": GPU, "cuda": "13.0", "cudnn": 91900, "torch": torch.__version__}
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda: None
    measuring_process.serve_gpu(pipe, limits, one)


def serve_nothing(pipe: Connection, limits: Limits) -> None:
    """A machine whose PyTorch sees no GPU."""
    pipe.send(({"failed": "RuntimeError: no GPU"}, False))


def breaks(case: Case, files: Files, limits: Limits) -> dict:
    """`why_above_floor.compare`; a GRU kills the process, a vanilla layer hangs."""
    import why_above_floor

    if case.cell == "gru":
        os._exit(9)
    if case.cell == "rnn_tanh":
        time.sleep(1e6)
    return why_above_floor.compare(case, files, limits)

"""First calls of ecornn.torch's layers: they say that they compile, once; ahead; and the next process does not."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import ecornn.compiler
import ecornn.torch
from ecornn import module_cache
from ecornn.errors import ArgumentError
from ecornn.torch import replacing
from ecornn.torch.compiling import outcomes
from ecornn.worker import Worker

PROGRAM = """
import sys, torch, ecornn.torch
layer, x = ecornn.torch.GRU(5, 6), torch.ones(3, 2, 5)
for _ in range(2):
    with torch.no_grad():
        layer(x)
print("tvm" in sys.modules)
"""


def test_a_process_says_that_it_compiles_and_the_next_one_need_not(tmp_path: Path):
    environment = {**os.environ, "ECORNN_CACHE": str(tmp_path), "ECORNN_TUNING_LOGS": str(tmp_path / "logs")}

    def run() -> tuple[str, str]:
        done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip(), done.stderr.strip()

    used, said = run()
    assert used == "True" and said.count("compiling gru T=4 B=2 I=5 H=6 float32, as the first call") == 1
    assert "ecornn.torch.prepare(model, *example) does it ahead" in said and len(said.splitlines()) == 1
    assert run() == ("False", "")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "new.jsonl").write_text("")  # a record might be there
    assert run()[0] == "True"


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.GRU(5, 7, batch_first=True)
        self.second, self.third = torch.nn.RNN(7, 4), torch.nn.RNN(7, 4)

    def forward(self, x: Any) -> Any:
        y = self.first(x)[0].transpose(0, 1)
        return self.second(y)[0] + self.third(input=y)[0]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is compiled in this process."""
    found: list[str] = []
    plain = ecornn.compiler.compile_layer
    monkeypatch.setattr(ecornn.compiler, "compile_layer", lambda layer, **k: (found.append(str(layer.workload)),
                                                                              plain(layer, **k))[1])
    outcomes.clear()
    return found


def test_what_is_prepared_is_what_first_calls_need(asked: list[str], capsys: Any, caplog: Any,
                                                   monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module_cache, "_told", [])
    model, x = Model().eval(), torch.randn(2, 3, 5)
    ecornn.torch.replace(model)
    kinds, before = [type(m) for m in model.modules()], torch.random.get_rng_state()
    with torch.no_grad(), caplog.at_level(logging.WARNING, "ecornn"):
        assert ecornn.torch.prepare(model, x, processes=1) == 2
    assert asked == ["gru T=4 B=2 I=5 H=7 float32", "rnn_tanh T=4 B=2 I=7 H=4 float32"]
    said = [line.partition(" layers")[0] for line in capsys.readouterr().err.splitlines()]
    assert [line for line in said if line.startswith("ecornn")] == ["ecornn: 1 of 2", "ecornn: 2 of 2"]
    assert [type(m) for m in model.modules()] == kinds and torch.equal(torch.random.get_rng_state(), before)
    assert len(caplog.messages) == 1
    asked.clear()
    with torch.no_grad():
        model(x)
    assert not asked


def test_several_are_compiled_by_other_processes(asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ECORNN_CACHE", str(tmp_path))
    model, x = Model().eval(), torch.randn(2, 3, 5)
    ecornn.torch.replace(model)
    with torch.no_grad():
        assert ecornn.torch.prepare(model, x, processes=2) == 2
        model(x)
    assert not asked


def test_a_model_without_compiled_layers():
    with pytest.raises(ArgumentError, match=r"ecornn\.torch\.replace\(model\) makes them"):
        ecornn.torch.prepare(Model(), torch.randn(2, 3, 5))


def test_a_forward_of_ones_own_is_left_to_its_first_call():
    class Own(torch.nn.GRU):
        def forward(self, x: torch.Tensor, more: int = 1) -> Any:
            return super().forward(more * x)

    layer = Own(5, 7)
    assert ecornn.torch.replace(layer).swapped == ("Own",)
    assert ecornn.torch.prepare(layer, x=torch.randn(3, 2, 5), more=2) == 0
    assert isinstance(layer, ecornn.torch.GRU)



def test_a_first_call_leaves_nothing_of_its_step_behind(monkeypatch: pytest.MonkeyPatch):
    """Frames of the compiler may be in cycles, and hold those that called them. A CUDA graph of a later step finds the
    gradients' nodes of this one then, which belong to another stream, and cannot be captured."""
    compiling = module_cache.compiled_layer

    def leaving(*args: Any) -> Any:
        cycle: list[Any] = [sys._getframe()]
        cycle.append(cycle)
        return compiling(*args)

    def step() -> weakref.ref[torch.Tensor]:
        x = torch.randn(3, 2, 5, requires_grad=True)
        layer(x)[0].sum().backward()
        return weakref.ref(x)

    layer = ecornn.torch.GRU(5, 9)
    monkeypatch.setattr(module_cache, "compiled_layer", leaving)
    gc.disable()
    try:
        assert step()() is None
    finally:
        gc.enable()


def test_a_process_that_stops_while_it_compiles_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ECORNN_CACHE", str(tmp_path))
    monkeypatch.setattr(Worker, "call", lambda worker, *_: (worker.wake(), os.kill(worker.process.pid, signal.SIGSTOP),
                                                            threading.Event().wait()))
    monkeypatch.setattr(replacing, "WORK", 0.2)
    here: list[str] = []
    monkeypatch.setattr(replacing, "compiled", lambda spec, target: here.append(target))
    layer = ecornn.torch.GRU(5, 6)
    calls = [replacing.call_of(layer, torch.ones(3, batch, 5), None) for batch in (2, 3)]
    specs = [spec for call in calls if call for spec in replacing.specs(layer, call)]
    replacing.compile_all([(spec, "cpu") for spec in specs], 2)
    assert here == ["cpu", "cpu"]

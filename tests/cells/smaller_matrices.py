"""Cells whose matrices are smaller than H x H: random arguments, and what such a cell is held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from cpu_training_sample import Call
from cuda_on_cpu import Emulated
from emulated import TINY
from msgspec.structs import replace
from test_backward_emulated import LIMITS, Step

import ecornn
from ecornn.analysis import analyse
from ecornn.analysis.adjoint import adjoint
from ecornn.analysis.backpropagation import backpropagate
from ecornn.cells import Cell
from ecornn.schedules import Task, all_schedules
from ecornn.tune.oracle import relative_error
from ecornn.workload import Workload

T, B, I = 5, 3, 4
Parameters = dict[str, Any]


def drawn(cell: Cell, hidden: int, batch: int = B) -> tuple[Any, Parameters, list[Any]]:
    """x, parameters in te shape and first states: values of float16 in float32; states behind the first are zero."""
    rng = np.random.default_rng(0)

    def values(shape: tuple[int, ...], scale: float = 1.0) -> Any:
        return (rng.uniform(-1, 1, shape) * scale).astype(np.float16).astype(np.float32)

    parameters = {n: values(s, 2 * s[-1] ** -0.5) for n, s in cell.parameters(I, hidden).items()}
    zeros = [np.zeros((batch, hidden), np.float32)] * (len(cell.states) - 1)
    return values((T, batch, I)), parameters, [values((batch, hidden)), *zeros]


def flat(parameters: Parameters) -> Parameters:
    return {f"{n}_l0": v.reshape(-1, *v.shape[2:]) for n, v in parameters.items()}


def near(found: Mapping[str, Any], wanted: Mapping[str, Any], limit: float) -> None:
    for name, value in wanted.items():
        assert relative_error(found[name].reshape(value.shape), value) <= limit, name


def gradients(cell: Cell, hidden: int, larger: Cell, filled: Callable[[Parameters], Parameters],
              cut: Callable[[Parameters], Parameters]) -> tuple[Call, dict[str, Any]]:
    """A call with gradients, and what must come of it, by the names of buffers: by the adjoint of a ``larger`` cell, on
    parameters that are ``filled`` with zeros; its gradients are ``cut`` to those of the cell."""
    x, parameters, (h,) = drawn(cell, hidden)
    rng = np.random.default_rng(1)
    dy, dh = (rng.normal(size=s).astype(np.float16).astype(np.float32) for s in ((T, B, hidden), (B, hidden)))
    whole = adjoint(analyse(larger, I, hidden), hidden)
    dx, found, (first,) = backpropagate(whole, x, filled(parameters), [h], dy, [dh])
    return Call(x, [h], dy, [dh], parameters), {
        "dx": dx, "dh_in": first, **{f"gradient_{n}": v for n, v in cut(found).items()}}


def check_adjoint(cell: Cell, hidden: int, call: Call, wanted: Mapping[str, Any]) -> None:
    own = adjoint(analyse(cell, I, hidden), hidden)
    dx, weights, (first,) = backpropagate(own, call.x, call.parameters, call.states, call.dy, call.dstates)
    found = {"dx": dx, "dh_in": first, **{f"gradient_{n}": v for n, v in weights.items()}}
    for name, value in wanted.items():
        # both are float64, with sums in another order: some thousand roundings of 1e-16
        np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-12, err_msg=name)


def check_training_on_a_cpu(cell: Cell, hidden: int, call: Call, wanted: Mapping[str, Any]) -> None:
    """``wanted`` has y and the last state, too."""
    module = ecornn.compile(cell, hidden=hidden, input=I, batch=B, seq=T, target="cpu", training=True)
    layer = module.bind(flat(call.parameters), threads=2)
    y, (last,), kept = layer.forward(call.x, call.states)
    assert np.array_equal(layer(call.x, call.states)[0], y)
    near({"y": y, "h_out": last}, {n: wanted[n] for n in ("y", "h_out")}, 2e-6)
    made = layer.backward(kept, call.dy, call.dstates)
    near({"dx": made.x, "dh_in": made.state[0], **{f"gradient_{n}": made.weights[f"{n}_l0"] for n in call.parameters}},
         {n: v for n, v in wanted.items() if n not in ("y", "h_out")}, 1e-5)


def check_training_on_a_gpu(folder: Path, schedule: str, cell: Cell, hidden: int, dtype: str, call: Call,
                            wanted: Mapping[str, Any]) -> None:
    near(Step(folder, schedule, cell, (T, B, I, hidden), dtype).run(call), wanted, LIMITS[dtype])


def check_on_a_gpu(folder: Path, schedule: str, cell: Cell, hidden: int, dtype: str, batch: int, knobs: dict[str, Any],
                   formula: Callable[..., tuple[Any, Any]]) -> None:
    """Emulated; ``formula`` makes y and the last first state of x, the first state and parameters."""
    x, parameters, states = drawn(cell, hidden, batch)
    y, last = formula(x, states[0], parameters)
    work = Workload(cell.name, hidden, I, batch, T, dtype)
    task = Task(work, analyse(cell, I, hidden), replace(TINY, cores=24) if knobs else TINY)
    found = all_schedules()[schedule]
    assert found.serves(task) is None
    config = {**found.default(task), **knobs}
    assert found.check(task, config) is None
    emulated = Emulated(found.program(task, found.plan(task, config)), folder)
    given = {n: s.astype(dtype) for n, s in zip(cell.states, states, strict=True)}
    got, after = emulated.run(x.astype(dtype), given, parameters)
    near({"y": got, "last": after[cell.states[0]]}, {"y": y, "last": last}, 2e-5 if dtype == "float32" else 2e-3)

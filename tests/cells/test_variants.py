"""Options of the built-in cells, against their formulas written once more in NumPy float64."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu import Emulated, inputs
from exact import relative as error
from msgspec.structs import replace
from step_cells import normal, run_analysed, sigmoid

import ecornn
from ecornn.analysis import analyse
from ecornn.cells import get
from ecornn.cells.naming import load_cell, spec_of
from ecornn.errors import ArgumentError, CellError
from ecornn.interpreter import interpret
from ecornn.schedules import all_schedules
from ecornn.schedules.base import Task
from ecornn.targets import KNOWN
from ecornn.workload import Workload

T, B, I, H = 5, 3, 6, 18


ACTIVATIONS: dict[str, Callable[[Any], Any]] = {  # from ONNX's operator specification
    "sigmoid": sigmoid, "tanh": np.tanh, "relu": lambda z: np.where(z > 0, z, 0.0),
    "softsign": lambda z: z / (1 + np.abs(z)), "softplus": lambda z: np.log(1 + np.exp(z)),
    "affine:0.5:0.2": lambda z: 0.5 * z + 0.2, "leaky_relu": lambda z: np.where(z >= 0, z, 0.01 * z),
    "leaky_relu:0.3": lambda z: np.where(z >= 0, z, 0.3 * z),
    "thresholded_relu:0.2": lambda z: np.where(z >= 0.2, z, 0.0),
    "scaled_tanh:1.5:0.7": lambda z: 1.5 * np.tanh(0.7 * z),
    "hard_sigmoid": lambda z: np.clip(0.2 * z + 0.5, 0, 1),
    "elu:0.8": lambda z: np.where(z >= 0, z, 0.8 * (np.exp(z) - 1))}


def lstm(x: Any, states: list[Any], p: dict[str, Any], o: dict[str, Any]) -> list[Any]:
    h, c = states
    peephole, bound = p.get("weight_peephole", np.zeros((3, 1))), o.get("clip") or np.inf
    wx, rh = ([v @ w.T for w in p[n]] for v, n in ((x, "weight_ih"), (h, "weight_hh")))
    if o.get("layer_norm"):
        wx, rh = ([v * k for v, k in zip(normal(*values), p[n], strict=True)]
                  for values, n in ((wx, "weight_ln_ih"), (rh, "weight_ln_hh")))
    i, f, g, out = (a + b + r + d for a, b, r, d in zip(wx, p["bias_ih"], rh, p["bias_hh"], strict=True))
    act = {n: ACTIVATIONS[o.get(n, d)] for n, d in (("gate", "sigmoid"), ("new", "tanh"), ("out", "tanh"))}
    i = act["gate"](np.clip(i + peephole[0] * c, -bound, bound))
    f = 1 - i if o.get("coupled") else act["gate"](np.clip(f + peephole[1] * c, -bound, bound))
    new, limit = f * c + i * act["new"](np.clip(g, -bound, bound)), o.get("clip_state") or np.inf
    new = np.clip(new, -limit, limit)
    shown = normal(new)[0] * p["weight_ln_c"][0] + p["bias_ln_c"][0] if o.get("layer_norm") else new
    y = act["gate"](np.clip(out + peephole[2] * new, -bound, bound)) * act["out"](shown)
    y = y @ p["weight_hr"][0].T if o.get("projection") else y
    zh, zc = o.get("zoneout_h", 0), o.get("zoneout_c", 0)
    return [zh * h + (1 - zh) * y, zc * c + (1 - zc) * new]


def gru(x: Any, states: list[Any], p: dict[str, Any], o: dict[str, Any], before: bool = False) -> list[Any]:
    (h,), bound = states, o.get("clip") or np.inf
    W, R, bx, bh = p["weight_ih"], p["weight_hh"], p["bias_ih"], p["bias_hh"]
    gate, fresh = ACTIVATIONS[o.get("gate", "sigmoid")], ACTIVATIONS[o.get("new", "tanh")]
    wx, rh = [x @ w.T for w in W], [h @ w.T for w in R[:2]]
    def tuned(values: list[Any], name: str, first: int) -> list[Any]:
        if not o.get("layer_norm"):
            return values
        return [v * k for v, k in zip(normal(*values), p[name][first:first + len(values)], strict=True)]
    wx = tuned(wx[:2], "weight_ln_ih", 0) + tuned(wx[2:], "weight_ln_ih", 2)
    r, z = (gate(np.clip(a + bx[n] + b + bh[n], -bound, bound))
            for n, (a, b) in enumerate(zip(wx, tuned(rh, "weight_ln_hh", 0), strict=False)))
    (last,) = tuned([(r * h if before else h) @ R[2].T], "weight_ln_hh", 2)
    n = fresh(np.clip(wx[2] + bx[2] + (last + bh[2] if before else r * (last + bh[2])), -bound, bound))
    share = o.get("zoneout", 0)
    return [share * h + (1 - share) * ((1 - z) * n + z * h)]


def rnn(x: Any, states: list[Any], p: dict[str, Any], o: dict[str, Any], default: str = "tanh") -> list[Any]:
    (h,), bound = states, o.get("clip") or np.inf
    recurrent = h * p["weight_hh"][0] if p["weight_hh"].ndim == 2 else h @ p["weight_hh"][0].T + p["bias_hh"][0]
    value = np.clip(x @ p["weight_ih"][0].T + p["bias_ih"][0] + recurrent, -bound, bound)
    share = o.get("zoneout", 0)
    return [share * h + (1 - share) * ACTIVATIONS[o.get("new", default)](value)]


def slstm(x: Any, states: list[Any], p: dict[str, Any], o: dict[str, Any]) -> list[Any]:
    _, c, n, m = states
    own = p["weight_hh"].shape[2]  # of a head
    i, f, z, out = (x @ w.T + b + np.concatenate([states[0][:, at:at + own] @ r[at:at + own].T
                                                  for at in range(0, len(r), own)], axis=1)
                    for w, b, r in zip(p["weight_ih"], p["bias_ih"], p["weight_hh"], strict=True))
    decayed = m + np.log(sigmoid(f))
    top = np.where(n == 0, i, np.maximum(i, decayed))
    c = np.exp(decayed - top) * c + np.exp(i - top) * np.tanh(z)
    n = np.exp(decayed - top) * n + np.exp(i - top)
    return [sigmoid(out) * c / n, c, n, top]


FORMULAS: dict[str, Callable[..., list[Any]]] = {
    "lstm": lstm, "gru": gru, "gru_reset_before": lambda *a: gru(*a, before=True), "rnn_tanh": rnn,
    "rnn_relu": lambda *a: rnn(*a, default="relu"), "slstm": slstm, "indrnn": lambda *a: rnn(*a, default="relu")}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("lstm", {"peepholes": True}), ("lstm", {"coupled": True}), ("lstm", {"clip": 0.5}),
    ("lstm", {"clip_state": 0.3, "zoneout_h": 0.1, "zoneout_c": 0.25}),
    ("lstm", {"peepholes": True, "coupled": True, "clip": 0.75, "gate": "hard_sigmoid", "new": "softsign",
              "out": "elu:0.8"}),
    ("gru", {"clip": 0.5, "zoneout": 0.2}), ("gru_reset_before", {"clip": 0.5, "gate": "hard_sigmoid"}),
    ("gru", {"gate": "affine:0.5:0.2", "new": "leaky_relu:0.3"}), ("rnn_tanh", {"clip": 0.3, "zoneout": 0.5}),
    ("indrnn", {}), ("indrnn", {"new": "tanh"}), ("lstm", {"projection": True}),
    ("lstm", {"projection": True, "peepholes": True, "zoneout_h": 0.25}), ("slstm", {}),
    ("lstm", {"layer_norm": True}), ("gru", {"layer_norm": True}),
    ("gru_reset_before", {"layer_norm": True, "zoneout": 0.1}),
    ("lstm", {"layer_norm": True, "projection": True, "peepholes": True, "clip": 0.75}), ("slstm", {"heads": 3})]


def problem(cell: Any, dtype: str = "float32") -> tuple[Any, dict[str, Any], dict[str, Any]]:
    x, states, parameters = inputs(cell.name, (T, B, I, H), dtype, cell.parameters(I, H), cell.states)
    if "n" in states:  # a sum of exponentials, and zero in one row, where a sequence starts
        states["n"] = abs(states["n"]) + np.float32(0.5)
        states["n"][0] = states["c"][0] = 0
    return x, states, parameters


def expected(name: str, options: dict[str, Any], x: Any, states: dict[str, Any], p: dict[str, Any]) -> Any:
    now, y = [s.astype(np.float64) for s in states.values()], []
    wide = {n: v.astype(np.float64) for n, v in p.items()}
    for row in x.astype(np.float64):
        now = FORMULAS[name](row, now, wide, options)
        y.append(now[0])
    return np.stack(y), now


@pytest.mark.parametrize(("name", "options"), [*CASES, *(("rnn_tanh", {"new": a}) for a in ACTIVATIONS)], ids=str)
def test_the_step_is_the_formula_as_written_and_as_analysed(name: str, options: dict[str, Any]):
    cell = type(get(name))(**options)
    x, states, p = problem(cell)
    wanted, after = expected(name, options, x, states, p)
    for y, last in (run_analysed(analyse(cell, I, H), x, p, list(states.values())),
                    interpret(cell, x, p, list(states.values()))):
        assert error(y, wanted) < 1e-7  # constants are float32
        assert all(error(one, other) < 1e-7 for one, other in zip(last, after, strict=True))


@pytest.mark.parametrize(("name", "options"), [CASES[3], CASES[4], CASES[7], CASES[9], CASES[12], CASES[13],
                                              CASES[14], CASES[15], CASES[17], CASES[18]], ids=str)
def test_modules_for_this_cpu(name: str, options: dict[str, Any]):
    cell = type(get(name))(**options)
    x, states, p = problem(cell)
    layer = ecornn.compile(cell, hidden=H, input=I, batch=B, seq=T, target="cpu").bind(
        {f"{n}_l0": v.reshape(-1, *v.shape[2:]) for n, v in p.items()})
    y, last = layer(x, tuple(states.values()))
    wanted, after = expected(name, options, x, states, p)
    assert error(y, wanted) < 1e-6 and all(error(a, b) < 1e-6 for a, b in zip(last, after, strict=True))
    assert layer.manifest.workload.cell == cell.identity()


@pytest.mark.parametrize(("schedule", "case"), [("fused_step", CASES[9]), ("layout_transform", CASES[4]),
                                                 ("fused_step", CASES[12]), ("layout_transform", CASES[11]),
                                                 ("layout_transform", CASES[13]), ("fused_step", CASES[14]),
                                                 ("fused_step", CASES[15]), ("layout_transform", CASES[16]),
                                                 ("layout_transform", CASES[17])], ids=str)
def test_cuda(tmp_path: Path, schedule: str, case: tuple[str, dict[str, Any]]):
    name, options = case
    cell = type(get(name))(**options)
    x, states, p = problem(cell)
    task = Task(Workload(cell.identity(), H, I, B, T), analyse(cell, I, H), replace(KNOWN["sm_90a"], cores=3))
    chosen = all_schedules()[schedule]
    y, last = Emulated(chosen.program(task, chosen.plan(task, chosen.default(task))), tmp_path).run(x, states, p)
    wanted, after = expected(name, options, x, states, p)
    assert error(y, wanted) < 1e-5 and all(error(last[n], v) < 1e-5 for n, v in zip(cell.states, after, strict=True))


def test_the_forget_gates_weights_are_not_read_where_gates_are_coupled():
    assert len(analyse(get("lstm(coupled)"), I, H).phases[0].products) == 3


def test_heads_divide_the_units():
    with pytest.raises(CellError, match=r"cell 'slstm\(heads=4\)': H = 18 must be a multiple of heads"):
        ecornn.compile("slstm(heads=4)", hidden=H, target="cpu")


@pytest.mark.parametrize("text", ["lstm", "lstm(peepholes)", "lstm(coupled,clip=3)", "gru(gate=hard_sigmoid:0.25:0.5)",
                                  "slstm(heads=8)"])
def test_names_of_cells_go_round(text: str):
    cell = load_cell(text)
    assert cell.identity() == text == spec_of(cell)
    assert get(cell.identity()).options == cell.options  # type: ignore[attr-defined]


@pytest.mark.parametrize(("text", "words"), [
    ("lstm(peephole)", "an option of lstm: peepholes"), ("lstm(clip=-1)", "a number >= 0"),
    ("lstm(clip", "NAME(OPTION"), ("lstm(clip=1,clip=2)", "each option once"),
    ("lstm(gate=tanhh)", "one of sigmoid, tanh"), ("lstm(gate=elu:1:2)", "elu:ALPHA"),
    ("lstm(gate=elu:nan)", "elu:ALPHA"), ("gru(zoneout=2)", "from 0 to 1"), ("lstm(peepholes=3)", "True or False"),
    ("slstm(heads=0)", "an integer, 1 at least"), ("slstm(heads=1.5)", "an integer, 1 at least"),
    ("slstm(heads)", "an integer, 1 at least"), ("lstm(__import__('os'))", "NAME(OPTION")])
def test_bad_options_are_named(text: str, words: str):
    with pytest.raises(ArgumentError) as caught:
        ecornn.compile(text, hidden=H, target="cpu")
    assert words in str(caught.value)

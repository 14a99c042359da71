"""What a layer is, is said in one place: every way in has the same properties, and passes each of them on."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any

import pytest

import ecornn.compiler
import ecornn.onnx
from ecornn.cells import get
from ecornn.cells.builtin import LSTM
from ecornn.cli.common import PROPERTIES
from ecornn.cli.compile_commands import compile as compile_command
from ecornn.cli.tune_command import tune as tune_command
from ecornn.errors import ArgumentError, DTypeError
from ecornn.layer_spec import LayerSpec
from ecornn.tune import Session, tune
from ecornn.workload import BATCH, SEQ, Stack, Workload

DEFAULTS = {f.name: inspect.Parameter.empty if f.default is MISSING else f.default for f in fields(LayerSpec)}
# what is tuned is one sequence, and the recurrence of its adjoint
SEQUENCE = {name: DEFAULTS[name] for name in (*Workload.__struct_fields__, "training") if name != "entry"}
OPEN = {"batch": BATCH, "seq": SEQ}  # where they are left open: the same everywhere, or what is tuned is not found
OTHER = {"cell": "gru", "hidden": 24, "input": 16, "batch": 3, "seq": 7, "dtype": "float32", "weights": "int16",
         "precision": "exact", "layers": 2, "bidirectional": True, "lengths": True, "resets": True, "reverse": False,
         "sequences": False, "training": True, "keep": "gates"}  # unlike the defaults where they may be so together


def signature(function: Callable[..., Any]) -> dict[str, Any]:
    return {n: p.default for n, p in inspect.signature(function).parameters.items() if n in DEFAULTS}


def test_a_property_is_of_a_sequence_or_of_how_they_are_put_together():
    assert {*DEFAULTS} - {"training"} == {*Workload.__struct_fields__, *Stack.__struct_fields__} - {"entry"}
    assert [LayerSpec("lstm", 8, training=t).stack.keep for t in (False, True)] == [None, "states"]
    made = LayerSpec("lstm", 8)
    assert made.stack == Stack() and made.workload == Workload("lstm", 8, 8, BATCH, SEQ)


def test_every_way_in_has_the_properties_and_their_defaults():
    assert signature(ecornn.compile) == DEFAULTS and DEFAULTS.items() >= OPEN.items()
    assert signature(ecornn.onnx.compile).items() >= OPEN.items()
    for function in (tune, Session.tune):
        assert signature(function) == SEQUENCE | {"dtype": None}, "the usual data type is the device's"
    assert {*PROPERTIES} == {*DEFAULTS} and {n: s["default"] for n, s in PROPERTIES.items() if "default" in s} == OPEN
    for command, names in ((compile_command, DEFAULTS), (tune_command, SEQUENCE)):
        assert {p.name for p in command.params} & {*DEFAULTS} == {*names}


@pytest.mark.parametrize("name", DEFAULTS)
def test_every_property_is_explained(name: str):
    assert any(name in line.split(" : ")[0].replace(",", " ").split()
               for line in str(ecornn.compile.__doc__).splitlines() if " : " in line)


@pytest.mark.parametrize("change", [{}, {"lengths": False, "resets": False, "sequences": True},
                                    {"bidirectional": False, "reverse": True}, {"weights": None, "precision": "tf32"}])
def test_compile_passes_every_property_on(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    got = []
    monkeypatch.setattr(ecornn.compiler, "compile_layer", lambda layer, **_: got.append(layer))
    ecornn.compile(**OTHER | change)
    assert got == [LayerSpec(**OTHER | change)]


@pytest.mark.parametrize("through", ["tune", "session"])
def test_the_tuner_passes_every_property_on(through: str, monkeypatch: pytest.MonkeyPatch):
    got, of = list[LayerSpec](), {name: OTHER[name] for name in SEQUENCE}
    monkeypatch.setattr(Session, "tune_layer", lambda _, layer, **__: got.append(layer))
    if through == "tune":
        tune(**of, target="cpu")
    else:
        with Session("cpu") as session:
            session.tune(**of)
    assert got == [LayerSpec(**of)]


def test_what_means_the_default_is_the_default():
    plain = LayerSpec("lstm", 8)
    for same in (LayerSpec("lstm", 8, 8), LayerSpec(get("lstm"), 8), LayerSpec("lstm", 8, weights="float32"),
                 LayerSpec("lstm", 8, precision="exact")):
        assert same.workload == plain.workload and same.stack == plain.stack


@pytest.mark.parametrize(("name", "value", "allowed"), [
    ("cell", 5, "a Cell"), ("cell", LSTM, r"an instance .*, such as LSTM\(\)"), ("cell", None, "a cell's name"),
    ("cell", "lstn", "one of lstm"),
    ("hidden", 0, "an integer from 1"), ("hidden", True, "an integer from 1"), ("input", 2.0, "an integer from 1"),
    ("batch", None, "an integer from 1"), ("seq", 1 << 21, "an integer from 1"), ("dtype", None, "one of float32"),
    ("weights", "int4", "None or one of"), ("precision", "fast", "exact, or tf32"), ("layers", 0, "an integer from 1"),
    ("lengths", 1, "True or False"), ("sequences", None, "True or False"), ("training", "yes", "True or False")])
def test_a_property_that_is_not_allowed_is_named(name: str, value: Any, allowed: str):
    with pytest.raises((ArgumentError, DTypeError), match=rf"(?s)^{name}=.*{allowed}"):
        LayerSpec(**{"cell": "lstm", "hidden": 8, name: value})

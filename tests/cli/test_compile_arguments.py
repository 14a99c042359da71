"""Arguments of compile() that are of another type are named."""

from __future__ import annotations

from typing import Any

import pytest

import ecornn
from ecornn.cells.lstm import LSTM
from ecornn.errors import ArgumentError, DTypeError


@pytest.mark.parametrize(("argument", "value", "allowed"), [
    ("cell", LSTM, r"an instance of the class, as LSTM\(\)"), ("cell", None, "a cell's name"), ("cell", 5, "a Cell"),
    ("target", 5, "an architecture"), ("schedule", 5, "a schedule's name"), ("config", "rows=3", "a dict"),
    ("config", ["rows=3"], "a dict")])
def test_an_argument_of_another_type_is_named(argument: str, value: Any, allowed: str):
    with pytest.raises(ArgumentError, match=rf"^{argument}=.*{allowed}"):
        ecornn.compile(**{"cell": "lstm", "hidden": 8, "schedule": "cpu_sequence", "target": "cpu", argument: value})


def test_a_data_type_that_a_device_does_not_have_is_named():
    for target, dtype, allowed in (("sm_90a", "float64", "float32, float16, bfloat16 on a GPU"),
                                   ("cpu", "bfloat16", "float32, float64 on a CPU")):
        with pytest.raises(DTypeError, match=f"^dtype='{dtype}' is not allowed; expected one of {allowed}$"):
            ecornn.compile("lstm", hidden=8, dtype=dtype, target=target)
    with pytest.raises(DTypeError, match=r"^weights='int16' is not allowed; expected None with dtype float64"):
        ecornn.compile("lstm", hidden=8, dtype="float64", weights="int16", target="cpu")

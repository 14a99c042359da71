"""Arguments of compile() that are of another type are named."""

from __future__ import annotations

from typing import Any

import pytest

import ecornn
from ecornn.cells.lstm import LSTM
from ecornn.errors import ArgumentError


@pytest.mark.parametrize(("argument", "value", "allowed"), [
    ("cell", LSTM, r"an instance of the class, as LSTM\(\)"), ("cell", None, "a cell's name"), ("cell", 5, "a Cell"),
    ("target", 5, "an architecture"), ("schedule", 5, "a schedule's name"), ("config", "rows=3", "a dict"),
    ("config", ["rows=3"], "a dict")])
def test_an_argument_of_another_type_is_named(argument: str, value: Any, allowed: str):
    with pytest.raises(ArgumentError, match=rf"^{argument}=.*{allowed}"):
        ecornn.compile(**{"cell": "lstm", "hidden": 8, "schedule": "cpu_sequence", "target": "cpu", argument: value})

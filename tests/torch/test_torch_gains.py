"""The report of replace() says what measured layers like a swapped one gained."""

import json

import pytest
import torch
from gains import BEGIN, END, OUT, PAGE, gains, tables

import ecornn.torch
from ecornn.torch import gains as table


def test_the_table_is_that_of_the_results():
    assert json.loads(OUT.read_text()) == gains()
    assert PAGE.read_text().split(BEGIN)[1].split(END)[0] == f"\n\n{tables()}\n"
    assert {row.which for row in table.rows()} == {*table.PASSES}


def test_a_report_says_what_layers_like_a_swapped_one_gained(monkeypatch: pytest.MonkeyPatch):
    rows = [("cpu", "LSTM", "float32", "inference", hidden, ratio) for hidden, ratio in
            ((64, 2.0), (100, 1.26), (160, 3.14), (1000, 9.0))]
    rows += [("cpu", "LSTM", "float32", "training", 100, 0.97), ("cuda", "LSTM", "float32", "training", 100, 5.0),
             ("cpu", "GRUCell", "float32", "training", 100, 1.5)]
    monkeypatch.setattr(table, "rows", lambda: tuple(table.Row(*row) for row in rows))
    model = torch.nn.ModuleDict({"lstm": torch.nn.LSTM(3, 100), "cell": torch.nn.GRUCell(3, 90),
                                 "large": torch.nn.LSTM(3, 300), "short": torch.nn.LSTM(3, 100).to(torch.float8_e5m2)})
    report = ecornn.torch.replace(model)
    assert report.expected == {
        "lstm": "measured layers like it gain 1.3 to 3.1x in inference (3), 1.0x in training (1)",
        "cell": "measured layers like it gain 1.5x in training (1)"}
    assert str(report).splitlines()[0] == f"lstm: compiled; {report.expected['lstm']}"
    assert "large: compiled" in str(report).splitlines() and "short" in report.kept

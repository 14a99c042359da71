"""pytorch-forecasting: layers of a class below torch.nn's, which pack sequences, some of them of no steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from replaced import check


@pytest.fixture
def data(package: Callable[[str], Any]) -> Any:
    """A data set of three waves, and a batch of it."""
    forecasting, pandas = package("pytorch_forecasting"), package("pandas")
    rows = [{"time": time, "series": name, "value": float(np.sin(time / 3 + number)) + 2, "day": float(time % 5)}
            for number, name in enumerate("abc") for time in range(30)]
    made = forecasting.TimeSeriesDataSet(
        pandas.DataFrame(rows), time_idx="time", target="value", group_ids=["series"], static_categoricals=["series"],
        max_encoder_length=8, min_encoder_length=3, max_prediction_length=4, time_varying_known_reals=["time", "day"],
        time_varying_unknown_reals=["value"])
    return made, next(iter(made.to_dataloader(train=True, batch_size=6, shuffle=False, num_workers=0)))[0]


@pytest.mark.parametrize(("name", "cell", "layers"), [
    ("RecurrentNetwork", "LSTM", ("rnn",)), ("RecurrentNetwork", "GRU", ("rnn",)),
    ("TemporalFusionTransformer", "LSTM", ("lstm_encoder", "lstm_decoder"))])
def test_a_model_of_a_data_set(name: str, cell: str, layers: tuple[str, ...], data: Any, package: Any):
    torch.manual_seed(0)
    options = {"cell_type": cell, "rnn_layers": 2} if name == "RecurrentNetwork" else {}
    made, x = data
    model = getattr(package("pytorch_forecasting"), name).from_dataset(made, hidden_size=12, **options).eval()
    x["encoder_lengths"][2:] = torch.tensor([5, 0 if name == "TemporalFusionTransformer" else 4, 8, 3])
    check(model, lambda model, cast: model(cast(x))["prediction"], layers)


def test_sequences_of_no_steps(package: Any):
    """Its layers take them, by what surrounds torch.nn's."""
    rnn = package("pytorch_forecasting.models.nn.rnn")
    torch.manual_seed(0)
    x, h = torch.randn(4, 6, 5), torch.randn(2, 1, 4, 9)
    model = torch.nn.ModuleDict({"layer": rnn.LSTM(5, 9, batch_first=True)})
    check(model, lambda model, cast: model["layer"](cast(x), tuple(cast(h)), lengths=torch.tensor([3, 0, 6, 1]),
                                                    enforce_sorted=False), ("layer",))

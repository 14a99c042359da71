"""What PyTorch sees of layers is tested here: whatever the tiles of their kernels, with the same numbers each time."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _small_tiles(small_tiles: None) -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["LSTM", "GRU", "RNN"])
def name(request: pytest.FixtureRequest) -> str:
    """Each of torch.nn's recurrent layers, in tests that have no names of their own."""
    return request.param

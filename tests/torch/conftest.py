"""What PyTorch sees of layers is tested here: whatever the tiles of their kernels, with the same numbers each time."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _small_tiles(small_tiles: None) -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["LSTM", "GRU", "RNN"])
def name(request: pytest.FixtureRequest) -> str:
    """Each of torch.nn's recurrent layers, in tests that have no names of their own."""
    return request.param


@pytest.fixture
def cudnn_settings() -> Iterator[None]:
    """PyTorch's default, and what was there before again afterwards."""
    places = (("generic", "all"), ("cuda", "all"), ("cuda", "rnn"), ("cuda", "conv"), ("cuda", "matmul"))
    before = [torch._C._get_fp32_precision_getter(*where) for where in places]
    older = torch.backends.cudnn.allow_tf32  # a setting of its own, with which newer ones must agree
    torch.backends.fp32_precision = torch.backends.cudnn.fp32_precision = "none"
    torch.backends.cudnn.allow_tf32 = True
    yield
    torch.backends.fp32_precision = torch.backends.cudnn.fp32_precision = "none"
    torch.backends.cudnn.allow_tf32 = older
    for where, value in zip(places, before, strict=True):
        torch._C._set_fp32_precision_setter(*where, value)

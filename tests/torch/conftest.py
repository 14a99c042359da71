"""What PyTorch sees of layers is tested here, whatever the tiles of their kernels."""

import pytest


@pytest.fixture(autouse=True)
def _small_tiles(small_tiles: None) -> None:
    pass

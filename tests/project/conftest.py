"""The wheel that tests of packaging and of deployment install."""

from pathlib import Path

import pytest
import wheels


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheels.build(tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel"))

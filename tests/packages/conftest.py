"""Models of other people's packages: ``make test-packages``, with ``--absent=skip`` without those that are absent."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--absent", choices=("fail", "skip"), default="fail", help="what to do where a package is absent")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore"))  # theirs


@pytest.fixture
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a module of a package; its layers may not fall back to PyTorch's after that."""
    def found(name: str) -> Any:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            if request.config.getoption("--absent") == "skip":
                pytest.skip(f"no package {name.partition('.')[0]}: {error}")
            raise
        monkeypatch.setenv("ECORNN_STRICT", "1")
        return module
    return found

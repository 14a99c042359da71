"""Files of what to tune: a layer a line, as options."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ecornn.cli.common import layer_options
from ecornn.errors import ArgumentError
from ecornn.workload import Workload

NAMES = tuple(name for name in Workload.__struct_fields__ if name != "entry")


def combinations(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The properties of each layer, of options that hold one value or more: every combination."""
    each = itertools.product(*(given[name] or (None,) for name in NAMES))
    return [dict(zip(NAMES, values, strict=True)) | {"training": given["training"]} for values in each]


def read(path: Path) -> list[dict[str, Any]]:
    """The layers of a file, without those that are there twice: a line has the options of one, or of several, such as
    ``--cell lstm --hidden 800 --training``; what is behind ``#`` is a comment.

    Raises :class:`ArgumentError`, which names the line, where it has something else, and where there is no layer.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            if words := shlex.split(line, comments=True):
                for layer in combinations(_line.main(words, standalone_mode=False)):
                    found.setdefault(tuple(layer.values()), layer)
        except (click.ClickException, ValueError) as error:
            why = error.format_message() if isinstance(error, click.ClickException) else str(error)
            raise ArgumentError("workloads", f"{path}:{number}: {line.strip()}",
                                f"options of a layer, such as --cell lstm --hidden 800 --training ({why})") from None
    if not found:
        raise ArgumentError("workloads", str(path), "a file with the options of a layer on each line")
    return [*found.values()]


@click.command(add_help_option=False)
@layer_options(many=True, target=False)
@click.option("--training", is_flag=True)
def _line(**properties: Any) -> dict[str, Any]:
    return properties

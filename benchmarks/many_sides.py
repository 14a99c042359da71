"""Several modules of ours on one input, and what else computes the same: CUDA graphs, checked and timed in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import side_by_side
import torch
from measuring_process import Limits
from side_by_side import WrongResultError, relative, summary

import ecornn

LONG = 4_000_000  # cycles, about 2 ms: longer than it takes to launch a graph of thousands of kernels


class Sides:
    """Sides that read one x (T, B, I) and write a y (T, B, H) of their own.

    Attributes
    ----------
    x : the input that all of them read
    row : what is known of the case: ``sides`` in order, times, errors, configurations, and why others are missing
    """

    def __init__(self, shape: tuple[int, int, int, int], dtype: str) -> None:
        self.T, self.B, self.I, self.H = shape
        self.kind = getattr(torch, dtype)
        self.x = self.random()
        self.row: dict[str, Any] = {"sides": [], "missing": {}, "errors": {}, "configs": {}}
        self._graphs: dict[str, Any] = {}
        self._outputs: dict[str, torch.Tensor] = {}
        self._kept: list[Any] = []  # what graphs read

    def random(self) -> torch.Tensor:
        return torch.randn(self.T, self.B, self.I, device=side_by_side.DEVICE).to(self.kind)

    def add(self, name: str, function: Callable[[torch.Tensor], object]) -> None:
        """A side: ``function`` writes y into the tensor that it gets, or returns another one with y."""
        y = torch.full((self.T, self.B, self.H), float("nan"), device=side_by_side.DEVICE, dtype=self.kind)
        self._outputs[name] = y

        def call() -> None:
            found = function(y)
            if isinstance(found, torch.Tensor):
                self._outputs[name] = found

        self._graphs[name] = side_by_side.graph_of(call)
        self.row["sides"].append(name)

    def add_module(self, name: str, file: Path | str, weights: Mapping[str, torch.Tensor]) -> bool:
        """A module of ours; whether there is one. In place of a file stands why there is none."""
        if isinstance(file, str):
            self.row["missing"][name] = file
            return False
        module = ecornn.load(file)
        layer = module.bind(weights)
        self._kept.append(layer)
        self.add(name, lambda y: layer(self.x, out=y)[0])
        found = module.manifest
        self.row["configs"][name] = {"schedule": found.schedule, **found.config}
        self.row.setdefault("provenance", {})[name] = found.provenance
        return True

    def check(self, references: Mapping[str, torch.Tensor], limits: Mapping[str, float]) -> None:
        """Runs every side on the fresh input that ``x`` has: all must be near the reference, two runs of ours equal.

        References may be of the first steps only. Raises :class:`WrongResultError`.
        """
        for name, graph in self._graphs.items():
            self._outputs[name].fill_(float("nan"))
            graph.replay()
            y = self._outputs[name]
            expected = references[name]
            self.row["errors"][name] = error = relative(y[:len(expected)], expected)
            if not (error <= limits[name] and torch.isfinite(y).all()):
                raise WrongResultError(f"{name}: error {error:.2e}, allowed {limits[name]:.2e}")
            if name not in self.row["configs"]:
                continue
            again = y.clone()
            y.fill_(float("nan"))
            graph.replay()
            if not torch.equal(again, y):
                raise WrongResultError(f"{name}: two runs differ")

    def time(self, limits: Limits) -> dict[str, Any]:
        """Times all sides in turns; the row."""
        before, side_by_side.WAIT = side_by_side.WAIT, LONG
        try:
            times = side_by_side.take_turns({name: graph.replay for name, graph in self._graphs.items()},
                                            lambda: self.x.copy_(self.random()), limits.repeats, limits.seconds)
        finally:
            side_by_side.WAIT = before
        for name, values in times.items():
            self.row |= summary(name, values, self.T)
        self.row["repetitions"] = len(next(iter(times.values())))
        return self.row

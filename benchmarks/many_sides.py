"""Several modules of ours on one input, and what else computes the same: CUDA graphs, checked and timed in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import side_by_side
import torch
from measuring_process import Limits
from side_by_side import CELLS, relative, summary

import ecornn

LONG = 4_000_000  # cycles, about 2 ms: longer than it takes to launch a graph of thousands of kernels


class Sides:
    """Sides that read one x (T, B, I) and write a y (T, B, H) of their own, in ``calls`` calls a graph.

    Attributes
    ----------
    x : the input that all of them read
    row : what is known of the case: ``sides`` in order, times, errors, configurations, why others are ``missing``, and
        which of these are ``wrong``
    """

    def __init__(self, shape: tuple[int, int, int, int], dtype: str, calls: int = 1) -> None:
        self.T, self.B, self.I, self.H = shape
        self.calls = calls
        self.kind = getattr(torch, dtype)
        self.x = self.random()
        self.row: dict[str, Any] = {"sides": [], "missing": {}, "wrong": [], "errors": {}, "configs": {}}
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

        def calls() -> None:
            for _ in range(self.calls):
                call()

        self._graphs[name] = side_by_side.graph_of(calls)
        self.row["sides"].append(name)

    def add_module(self, name: str, file: Path | str, weights: Mapping[str, torch.Tensor],
                   states: Sequence[torch.Tensor] | None = None) -> bool:
        """A module of ours, from ``states``, or zeros; whether there is one. In place of a file stands why there is
        none."""
        if isinstance(file, str):
            self.row["missing"][name] = file
            return False
        module = ecornn.load(file)
        layer = module.bind(weights)
        self._kept.append((layer, states))
        self.add(name, lambda y: layer(self.x, states, out=y)[0])
        found = module.manifest
        self.row["configs"][name] = {"schedule": found.schedule, **found.config}
        self.row.setdefault("provenance", {})[name] = found.provenance
        return True

    def check(self, references: Mapping[str, torch.Tensor], limits: Mapping[str, float]) -> None:
        """Runs every side on the fresh input that ``x`` has: all must be near the reference, two runs of ours equal.

        References may be of the first steps only. What is wrong is not timed: ``missing`` and ``wrong`` have it.
        """
        for name in list(self.row["sides"]):
            if reason := self._fault(name, references[name], limits[name]):
                self.row["sides"].remove(name)
                self.row["missing"][name] = reason
                self.row["wrong"].append(name)

    def _fault(self, name: str, expected: torch.Tensor, limit: float) -> str | None:
        graph = self._graphs[name]
        self._outputs[name].fill_(float("nan"))
        graph.replay()
        y = self._outputs[name]
        self.row["errors"][name] = error = relative(y[:len(expected)], expected)
        if not (error <= limit and torch.isfinite(y).all()):
            return f"wrong result: error {error:.2e}, allowed {limit:.2e}"
        if name not in self.row["configs"]:  # libraries need not be reproducible
            return None
        again = y.clone()
        y.fill_(float("nan"))
        graph.replay()
        return None if torch.equal(again, y) else "wrong result: two runs differ"

    def time(self, limits: Limits) -> dict[str, Any]:
        """Times all sides in turns; the row."""
        before, side_by_side.WAIT = side_by_side.WAIT, LONG
        try:
            times = side_by_side.take_turns({name: self._graphs[name].replay for name in self.row["sides"]},
                                            lambda: self.x.copy_(self.random()), limits.repeats, limits.seconds)
        finally:
            side_by_side.WAIT = before
        for name, values in times.items():
            self.row |= summary(name, values, self.T * self.calls)
        self.row["repetitions"] = len(next(iter(times.values())))
        return self.row


def beside_library(cell: str, shape: tuple[int, int, int, int], dtype: str,
                   ) -> tuple[Sides, torch.nn.Module, dict[str, torch.Tensor]]:
    """Sides of a layer of ``shape`` (T, B, I, H), none yet; the library's layer, its weights in one piece as cuDNN
    wants them; and these weights, which all sides are to have."""
    sides = Sides(shape, dtype)
    library = CELLS[cell](shape[2], shape[3], device=side_by_side.DEVICE).to(sides.kind)
    library.flatten_parameters()
    return sides, library, {name: value.detach() for name, value in library.named_parameters()}

"""Cells that leave stages of a step out, so that a difference of times says what a stage takes.

They are cells like any other: every schedule makes their kernels from their graph, as it makes those of an LSTM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ecornn.cells import Cell, pointwise, product


@dataclass(frozen=True)
class Bare(Cell):
    """A cell of so many gates without gate math: h' is the largest of its gates' sums.

    h' = max over g of (W_g x + b_g + R_g h); with a second state c, h' is at least c, and c' = h' / 2.

    Attributes
    ----------
    gates : recurrent products, and hoisted values, of a unit
    second : whether there is a state c, which never leaves its thread
    given : whether there is an input product; without it, x is not read
    """

    gates: int
    second: bool = False
    given: bool = True

    @property
    def name(self) -> str:
        return f"bare{self.gates}" + ("c" if self.second else "") + ("" if self.given else "_recurrence")

    @property
    def states(self) -> tuple[str, ...]:
        return ("h", "c") if self.second else ("h",)

    def parameters(self, input: int, hidden: int) -> Mapping[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {"weight_ih": (self.gates, hidden, input)} if self.given else {}
        return found | {"weight_hh": (self.gates, hidden, hidden), "bias_ih": (self.gates, hidden)}

    def step(self, x: Any, states: Any, parameters: Mapping[str, Any]) -> list[Any]:
        from tvm import tirx

        h, *rest = states
        gh, bias = product(h, parameters["weight_hh"]), parameters["bias_ih"]
        gx = product(x, parameters["weight_ih"]) if self.given else None

        def largest(b: Any, j: Any) -> Any:
            value = rest[0][b, j] if rest else None
            for g in range(self.gates):
                gate = (bias[g, j] if gx is None else gx[b, g, j] + bias[g, j]) + gh[b, g, j]
                value = gate if value is None else tirx.max(value, gate)
            return value

        new = pointwise(largest, h, "state")
        half = tirx.const(0.5, "float32")
        return [new, *(pointwise(lambda b, j: half * new[b, j], h, "kept") for _ in rest)]

    def random(self, input: int, hidden: int, generator: Any) -> dict[str, Any]:
        """Weights by PyTorch's names: small enough that the state stays near 1 over any number of steps."""
        bound = {"weight_ih": 0.25 * input ** -0.5, "weight_hh": 0.25 * hidden ** -0.5, "bias_ih": 1.0}
        return {self.parameter_name(name): bound[name] * generator.uniform(-1, 1, (shape[0] * shape[1], *shape[2:]))
                for name, shape in self.parameters(input, hidden).items()}


def bare_forward(cell: Bare, x: Any, p: Mapping[str, Any], multiplied: bool = True) -> Any:
    """The layer in PyTorch float64 on x's device; x (T, B, I) to y (T, B, H), initial state zero.

    Unless ``multiplied``, recurrent weights count as zero.
    """
    import torch

    p = {k: v.double() for k, v in p.items()}
    hidden = p["weight_hh_l0"].shape[1]
    h = torch.zeros(x.shape[1], hidden, dtype=torch.float64, device=x.device)
    c, out = torch.zeros_like(h), []
    for row in x.double():
        gates = h @ p["weight_hh_l0"].T * multiplied + p["bias_ih_l0"]
        if cell.given:
            gates = gates + row @ p["weight_ih_l0"].T
        h = gates.reshape(-1, cell.gates, hidden).amax(1)
        if cell.second:
            h = torch.maximum(h, c)
            c = h / 2
        out.append(h)
    return torch.stack(out)

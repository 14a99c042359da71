"""Vanilla (Elman) recurrent networks, and those of independent units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ecornn.cells.base import Shape, pointwise, product
from ecornn.cells.options import Optioned, activation, mixed

if TYPE_CHECKING:
    from tvm.te import Tensor


class VanillaTanh(Optioned):
    """h' = tanh(W x + b_ih + R h + b_hh), after Elman 1990.

    Options
    -------
    clip : bound of the activation's input
    zoneout : share of the old state that stays, at inference (Krueger et al. 2017)
    new : an activation instead of tanh
    """

    name = "rnn_tanh"
    states = ("h",)
    OPTIONS = {"clip": 0.0, "zoneout": 0.0, "new": "tanh"}  # noqa: RUF012

    def parameters(self, input: int, hidden: int) -> dict[str, Shape]:
        return {"weight_ih": (1, hidden, input), "weight_hh": (1, hidden, hidden),
                "bias_ih": (1, hidden), "bias_hh": (1, hidden)}

    def step(self, x: Tensor, states: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Sequence[Tensor]:
        (h,) = states
        gx, gh = product(x, parameters["weight_ih"], 0), product(h, parameters["weight_hh"], 0)
        bx, bh = parameters["bias_ih"], parameters["bias_hh"]
        new = activation(self.options["new"])
        return [pointwise(lambda b, j: mixed(self.options["zoneout"], h[b, j], new(
            self.clipped(gx[b, j] + bx[0, j] + gh[b, j] + bh[0, j]))), h, "state")]


class VanillaReLU(VanillaTanh):
    """h' = max(0, W x + b_ih + R h + b_hh)."""

    name = "rnn_relu"
    OPTIONS = VanillaTanh.OPTIONS | {"new": "relu"}


class IndRNN(VanillaTanh):
    """h' = max(0, W x + b_ih + u h), u a vector: every unit on its own (Li et al. 2018, arXiv 1803.04831).

    ``weight_hh`` is u, (H,). Options as of ``rnn_tanh``.
    """

    name = "indrnn"
    OPTIONS = VanillaReLU.OPTIONS

    def parameters(self, input: int, hidden: int) -> dict[str, Shape]:
        return {"weight_ih": (1, hidden, input), "weight_hh": (1, hidden), "bias_ih": (1, hidden)}

    def step(self, x: Tensor, states: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Sequence[Tensor]:
        (h,) = states
        gx, u, bias = product(x, parameters["weight_ih"], 0), parameters["weight_hh"], parameters["bias_ih"]
        new = activation(self.options["new"])
        return [pointwise(lambda b, j: mixed(self.options["zoneout"], h[b, j], new(
            self.clipped(gx[b, j] + bias[0, j] + u[0, j] * h[b, j]))), h, "state")]

"""Gated recurrent unit in both reset forms, gates in PyTorch's order: reset, update, new."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ecornn.cells.base import Shape, pointwise, product, scaled
from ecornn.cells.options import Optioned, activation, mixed

if TYPE_CHECKING:
    from tvm.te import Tensor


class GRU(Optioned):
    """GRU with the reset after the product, as cuDNN and PyTorch have it.

    r, z = sigmoid(W x + b_ih + R h + b_hh); n = tanh(W_n x + b_in + r (R_n h + b_hn));
    h' = (1 - z) n + z h.

    Options
    -------
    layer_norm : layer normalization inside the step, as Ba et al. 2016 (arXiv 1607.06450, supplement, "GRU") have it:
        W x becomes LN(W x) weight_ln_ih and R h becomes LN(R h) weight_ln_hh in the formula, the 2 H values of r and z
        normalized together and the H of n apart. LN subtracts the mean and divides by sqrt(variance + 1e-5).
        ``weight_ln_ih``, ``weight_ln_hh`` (3*H,). One more exchange a step, of sums
    clip : bound of the inputs of activations (ONNX's clip)
    zoneout : share of the old state that stays, at inference (Krueger et al. 2017)
    gate, new : activations instead of sigmoid (of r, z) and tanh (of n)
    """

    name = "gru"
    states = ("h",)
    OPTIONS = {"layer_norm": False, "clip": 0.0, "zoneout": 0.0, "gate": "sigmoid", "new": "tanh"}  # noqa: RUF012

    def parameters(self, input: int, hidden: int) -> dict[str, Shape]:
        shapes = {"weight_ih": (3, hidden, input), "weight_hh": (3, hidden, hidden),
                  "bias_ih": (3, hidden), "bias_hh": (3, hidden)}
        gains = {"weight_ln_ih": (3, hidden), "weight_ln_hh": (3, hidden)}
        return shapes | gains if self.options["layer_norm"] else shapes

    reset_before = False  # the reset gate scales h before R_n sees it, not R_n h

    def products(self, source, parameters, end, gates=(0, 1, 2)):
        """W x or R h, normalized where the option says so: a function of batch row, gate (a number) and unit."""
        by_gate: dict[int, tuple[Tensor, int]] = {}
        for some in ((0, 1), (2,)) if self.options["layer_norm"] else (gates,):
            if set(some) <= set(gates):
                product_ = product(source, parameters[f"weight_{end}"], some)
                if self.options["layer_norm"]:
                    product_ = scaled(product_, parameters[f"weight_ln_{end}"], some[0])
                by_gate |= {g: (product_, g - some[0]) for g in some}
        return lambda b, g, j: by_gate[g][0][b, by_gate[g][1], j]

    def step(self, x: Tensor, states: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Sequence[Tensor]:
        (h,), bx, bh = states, parameters["bias_ih"], parameters["bias_hh"]
        gx = self.products(x, parameters, "ih")
        gh = self.products(h, parameters, "hh", (0, 1) if self.reset_before else (0, 1, 2))
        squash, fresh = activation(self.options["gate"]), activation(self.options["new"])

        def gate(b, g, j):
            return squash(self.clipped(gx(b, g, j) + bx[g, j] + gh(b, g, j) + bh[g, j]))

        if self.reset_before:
            reset = pointwise(lambda b, j: gate(b, 0, j) * h[b, j], h, "reset")
            gn = self.products(reset, parameters, "hh", (2,))

        def seen(b, j):
            """The input of n."""
            from_x = gx(b, 2, j) + bx[2, j]
            if self.reset_before:
                return from_x + gn(b, 2, j) + bh[2, j]
            return from_x + gate(b, 0, j) * (gh(b, 2, j) + bh[2, j])

        new = pointwise(lambda b, j: fresh(self.clipped(seen(b, j))), h, "new")
        update = pointwise(lambda b, j: gate(b, 1, j), h, "update")
        return [pointwise(lambda b, j: mixed(self.options["zoneout"], h[b, j], new[b, j] + update[b, j]
                                             * (h[b, j] - new[b, j])), h, "state")]


class GRUResetBefore(GRU):
    """GRU with the reset before the product, as Cho et al. 2014 (arXiv 1406.1078) have it.

    r, z = sigmoid(W x + b_ih + R h + b_hh); n = tanh(W_n x + b_in + R_n (r h) + b_hn);
    h' = (1 - z) n + z h. The product waits for r: two exchanges of state a step. Options as of ``gru``;
    with ``layer_norm`` R_n (r h) is normalized, one more exchange.
    """

    name = "gru_reset_before"
    reset_before = True

"""Gated recurrent unit in both reset forms, gates in PyTorch's order: reset, update, new."""

from __future__ import annotations

from ecornn.cells.activations import activation
from ecornn.cells.base import pointwise, product
from ecornn.cells.options import Optioned, mixed


class GRU(Optioned):
    """GRU with the reset after the product, as cuDNN and PyTorch have it.

    r, z = sigmoid(W x + b_ih + R h + b_hh); n = tanh(W_n x + b_in + r (R_n h + b_hn));
    h' = (1 - z) n + z h.

    Options
    -------
    clip : bound of the inputs of activations (ONNX's clip)
    zoneout : share of the old state that stays, at inference (Krueger et al. 2017)
    gate, new : activations instead of sigmoid (of r, z) and tanh (of n)
    """

    name = "gru"
    states = ("h",)
    OPTIONS = {"clip": 0.0, "zoneout": 0.0, "gate": "sigmoid", "new": "tanh"}  # noqa: RUF012

    def parameters(self, input, hidden):
        return {"weight_ih": (3, hidden, input), "weight_hh": (3, hidden, hidden),
                "bias_ih": (3, hidden), "bias_hh": (3, hidden)}

    def step(self, x, states, parameters):
        (h,) = states
        gx, gh = product(x, parameters["weight_ih"]), product(h, parameters["weight_hh"])
        bx, bh = parameters["bias_ih"], parameters["bias_hh"]
        squash, fresh = activation(self.options["gate"]), activation(self.options["new"])

        def gate(b, g, j):
            return squash(self.clipped(gx[b, g, j] + bx[g, j] + gh[b, g, j] + bh[g, j]))

        new = pointwise(lambda b, j: fresh(self.clipped(
            gx[b, 2, j] + bx[2, j] + gate(b, 0, j) * (gh[b, 2, j] + bh[2, j]))), h, "new")
        update = pointwise(lambda b, j: gate(b, 1, j), h, "update")
        return [pointwise(lambda b, j: mixed(self.options["zoneout"], h[b, j], new[b, j] + update[b, j]
                                             * (h[b, j] - new[b, j])), h, "state")]


class GRUResetBefore(GRU):
    """GRU with the reset before the product, as Cho et al. 2014 (arXiv 1406.1078) have it.

    r, z = sigmoid(W x + b_ih + R h + b_hh); n = tanh(W_n x + b_in + R_n (r h) + b_hn);
    h' = (1 - z) n + z h. The product waits for r: two exchanges of state a step. Options as of ``gru``.
    """

    name = "gru_reset_before"

    def step(self, x, states, parameters):
        (h,) = states
        W, R = parameters["weight_ih"], parameters["weight_hh"]
        gx, gh = product(x, W), product(h, R, gates=(0, 1))
        bx, bh = parameters["bias_ih"], parameters["bias_hh"]
        squash, fresh = activation(self.options["gate"]), activation(self.options["new"])

        def gate(b, g, j):
            return squash(self.clipped(gx[b, g, j] + bx[g, j] + gh[b, g, j] + bh[g, j]))

        reset = pointwise(lambda b, j: gate(b, 0, j) * h[b, j], h, "reset")
        gn = product(reset, R, gates=2)
        new = pointwise(lambda b, j: fresh(self.clipped(gx[b, 2, j] + bx[2, j] + gn[b, j] + bh[2, j])), h, "new")
        update = pointwise(lambda b, j: gate(b, 1, j), h, "update")
        return [pointwise(lambda b, j: mixed(self.options["zoneout"], h[b, j], new[b, j] + update[b, j]
                                             * (h[b, j] - new[b, j])), h, "state")]

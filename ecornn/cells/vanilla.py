"""Vanilla (Elman) recurrent network with tanh or relu."""

from __future__ import annotations

from ecornn.cells.base import Cell, pointwise, product


class VanillaTanh(Cell):
    """h' = tanh(W x + b_ih + R h + b_hh), after Elman 1990."""

    name = "rnn_tanh"
    states = ("h",)

    def parameters(self, input, hidden):
        return {"weight_ih": (1, hidden, input), "weight_hh": (1, hidden, hidden),
                "bias_ih": (1, hidden), "bias_hh": (1, hidden)}

    def activation(self, value):
        """The nonlinearity, on one scalar expression."""
        from tvm import te

        return te.tanh(value)

    def step(self, x, states, parameters):
        (h,) = states
        gx, gh = product(x, parameters["weight_ih"], 0), product(h, parameters["weight_hh"], 0)
        bx, bh = parameters["bias_ih"], parameters["bias_hh"]
        return [pointwise(lambda b, j: self.activation(gx[b, j] + bx[0, j] + gh[b, j] + bh[0, j]),
                          h, "state")]


class VanillaReLU(VanillaTanh):
    """h' = max(0, W x + b_ih + R h + b_hh)."""

    name = "rnn_relu"

    def activation(self, value):
        from tvm import tirx

        return tirx.max(value, tirx.const(0.0, "float32"))

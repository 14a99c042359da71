"""Long short-term memory, gates in PyTorch's order: input, forget, cell, output."""

from __future__ import annotations

from ecornn.cells.base import Cell, pointwise, product


class LSTM(Cell):
    """Long short-term memory (Hochreiter and Schmidhuber 1997, with the forget gate of Gers 2000).

    i, f, o = sigmoid(W x + b_ih + R h + b_hh), g = tanh(...); c' = f c + i g; h' = o tanh(c').
    """

    name = "lstm"
    states = ("h", "c")

    def parameters(self, input, hidden):
        return {"weight_ih": (4, hidden, input), "weight_hh": (4, hidden, hidden),
                "bias_ih": (4, hidden), "bias_hh": (4, hidden)}

    def step(self, x, states, parameters):
        from tvm import te

        h, c = states
        gx, gh = product(x, parameters["weight_ih"]), product(h, parameters["weight_hh"])
        bx, bh = parameters["bias_ih"], parameters["bias_hh"]
        gate = te.compute(gx.shape, lambda b, g, j: gx[b, g, j] + bx[g, j] + gh[b, g, j] + bh[g, j],
                          name="gate")
        cell = pointwise(lambda b, j: te.sigmoid(gate[b, 1, j]) * c[b, j]
                         + te.sigmoid(gate[b, 0, j]) * te.tanh(gate[b, 2, j]), c, "cell")
        return pointwise(lambda b, j: (te.sigmoid(gate[b, 3, j]) * te.tanh(cell[b, j]), cell[b, j]),
                         c, "state")

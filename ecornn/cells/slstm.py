"""LSTM with exponential gates, stabilised: the sLSTM of xLSTM."""

from __future__ import annotations

from ecornn.cells.base import pointwise, product
from ecornn.cells.options import Optioned


class SLSTM(Optioned):
    """sLSTM (Beck et al. 2024, arXiv 2405.04517), stabilised as in FlashRNN (Poeppel et al. 2024, arXiv 2412.07752).

    i, f, z, o = W x + b + R h; m' = max(i, logsigmoid(f) + m), or i where n = 0;
    p = exp(i - m'), q = exp(logsigmoid(f) + m - m'); c' = q c + p tanh(z); n' = q n + p; h' = sigmoid(o) c' / n'.
    Gates in the order i, f, z, o. Heads are blocks on R's diagonal: the other values are passed as zeros.
    """

    name = "slstm"
    states = ("h", "c", "n", "m")

    def parameters(self, input, hidden):
        return {"weight_ih": (4, hidden, input), "weight_hh": (4, hidden, hidden), "bias_ih": (4, hidden)}

    def step(self, x, states, parameters):
        from tvm import te, tirx

        h, c, n, m = states
        gx, gh, bias = product(x, parameters["weight_ih"]), product(h, parameters["weight_hh"]), parameters["bias_ih"]
        zero, one = tirx.const(0.0, "float32"), tirx.const(1.0, "float32")
        gate = te.compute(gx.shape, lambda b, g, j: gx[b, g, j] + bias[g, j] + gh[b, g, j], name="gate")
        # logsigmoid(f) = min(f, 0) - log(1 + exp(-|f|)), which does not overflow
        decayed = pointwise(lambda b, j: tirx.min(gate[b, 1, j], zero) + m[b, j]
                            - te.log(one + te.exp(zero - te.abs(gate[b, 1, j]))), h, "decayed")
        top = pointwise(lambda b, j: tirx.Select(n[b, j] == zero, gate[b, 0, j],
                                                 tirx.max(gate[b, 0, j], decayed[b, j])), h, "top")
        p = pointwise(lambda b, j: te.exp(gate[b, 0, j] - top[b, j]), h, "p")
        q = pointwise(lambda b, j: te.exp(decayed[b, j] - top[b, j]), h, "q")
        cell = pointwise(lambda b, j: q[b, j] * c[b, j] + p[b, j] * te.tanh(gate[b, 2, j]), h, "cell")
        norm = pointwise(lambda b, j: q[b, j] * n[b, j] + p[b, j], h, "norm")
        new = pointwise(lambda b, j: te.sigmoid(gate[b, 3, j]) * cell[b, j] / norm[b, j], h, "state")
        return [new, cell, norm, top]

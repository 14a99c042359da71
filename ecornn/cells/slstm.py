"""LSTM with exponential gates, stabilised: the sLSTM of xLSTM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ecornn.cells.base import Shape, pointwise, product
from ecornn.cells.options import Optioned
from ecornn.errors import CellError

if TYPE_CHECKING:
    from tvm.te import Tensor


class SLSTM(Optioned):
    """sLSTM (Beck et al. 2024, arXiv 2405.04517), stabilised as in FlashRNN (Poeppel et al. 2024, arXiv 2412.07752).

    i, f, z, o = W x + b + R h; m' = max(i, logsigmoid(f) + m), or i where n = 0;
    p = exp(i - m'), q = exp(logsigmoid(f) + m - m'); c' = q c + p tanh(z); n' = q n + p; h' = sigmoid(o) c' / n'.
    Gates in the order i, f, z, o. With ``heads`` R has as many blocks on its diagonal, and ``weight_hh``,
    (4, H, H / heads), these alone: row j is what unit j multiplies the values of its own head by.

    h', which the next step waits for, is computed from r = p / q = exp(i - m) (1 + exp(-f)), without m':
    h' = sigmoid(o) (c + r tanh(z)) / (n + r).
    """

    name = "slstm"
    states = ("h", "c", "n", "m")
    nonnegative = ("n",)
    OPTIONS = {"heads": 1}  # noqa: RUF012

    @property
    def heads(self) -> int:
        """The number of blocks of R."""
        return int(self.options["heads"])

    def parameters(self, input: int, hidden: int) -> dict[str, Shape]:
        own, rest = divmod(hidden, self.heads)
        if rest:
            raise CellError(f"cell {self.spec()!r}: H = {hidden} must be a multiple of heads")
        return {"weight_ih": (4, hidden, input), "weight_hh": (4, hidden, own), "bias_ih": (4, hidden)}

    def step(self, x: Tensor, states: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Sequence[Tensor]:
        from tvm import te, tirx

        h, c, n, m = states
        gx, bias = product(x, parameters["weight_ih"]), parameters["bias_ih"]
        gh = product(h, parameters["weight_hh"], heads=self.heads)
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
        least, most = (tirx.const(bound, "float32") for bound in (-60.0, 60.0))  # beyond, c and n or r do not matter

        def bounded(exponent, b, j):
            floor = tirx.Select(n[b, j] == zero, tirx.max(exponent, least), exponent)  # r must not be 0 where n is
            return te.exp(tirx.min(floor, most))

        ratio = pointwise(lambda b, j: bounded(gate[b, 0, j] - m[b, j], b, j)
                          + bounded(gate[b, 0, j] - m[b, j] - gate[b, 1, j], b, j), h, "ratio")
        new = pointwise(lambda b, j: te.sigmoid(gate[b, 3, j]) * (c[b, j] + ratio[b, j] * te.tanh(gate[b, 2, j]))
                        / (n[b, j] + ratio[b, j]), h, "state")
        return [new, cell, norm, top]

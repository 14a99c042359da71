"""Cells whose recurrent matrices have heads, blocks on their diagonals."""

import numpy as np
from tvm import te, tirx

from ecornn import mean, pointwise, product
from published.base import Published, sig


def each_head(h, blocks):
    """Block-diagonal products of h (B, H) by ``blocks`` (G, H, H / heads): G arrays (B, H), head after head."""
    own = blocks.shape[2]
    return [np.concatenate([h[:, n:n + own] @ matrix[n:n + own].T for n in range(0, h.shape[1], own)], axis=1)
            for matrix in blocks]


class WithHeads(Published):
    hidden = 8
    heads = 2
    blocks: dict[str, int] = {}

    def parameters(self, input, hidden):
        own = hidden // self.heads
        return super().parameters(input, hidden) | {n: (g, hidden, own) for n, g in self.blocks.items()}


class SLSTMHeads(WithHeads):
    """sLSTM of xLSTM with heads, stabilised (Beck et al. 2024, arXiv 2405.04517): memory mixing within a head."""

    name, states, nonnegative = "slstm_heads", ("h", "c", "n", "m"), ("n",)
    shapes, blocks, heads = {"W": (4, "I"), "b": (4,)}, {"R": 4}, 4

    def step(self, x, states, p):
        (h, c, n, m), wx, v = states, product(x, p["W"]), p["b"]
        rh = product(h, p["R"], heads=self.heads)
        def a(b, g, j):
            return wx[b, g, j] + rh[b, g, j] + v[g, j]
        # the logarithm of the forget gate, without overflow
        kept = pointwise(lambda b, j: tirx.min(a(b, 1, j), tirx.const(0.0, "float32"))
                         - te.log(1.0 + te.exp(0.0 - te.abs(a(b, 1, j)))) + m[b, j], h)
        top = pointwise(lambda b, j: tirx.max(kept[b, j], a(b, 0, j)), h)
        i = pointwise(lambda b, j: te.exp(a(b, 0, j) - top[b, j]), h)
        f = pointwise(lambda b, j: te.exp(kept[b, j] - top[b, j]), h)
        cell = pointwise(lambda b, j: f[b, j] * c[b, j] + i[b, j] * te.tanh(a(b, 2, j)), h)
        norm = pointwise(lambda b, j: f[b, j] * n[b, j] + i[b, j], h)
        return [pointwise(lambda b, j: te.sigmoid(a(b, 3, j)) * cell[b, j] / norm[b, j], h), cell, norm, top]

    def numpy(self, x, h, c, n, m, W, b, R):
        i, f, z, o = (x @ w.T + r + b for w, r, b in zip(W, each_head(h, R), b, strict=True))
        log_f = -np.logaddexp(0.0 * f, -f)  # no number: where f lies
        top = np.maximum(log_f + m, i)
        i, f = np.exp(i - top), np.exp(log_f + m - top)
        c, n = f * c + i * np.tanh(z), f * n + i
        return sig(o) * c / n, c, n, top


class BlockGRU(WithHeads):
    """The block GRU of DreamerV3 (Hafner et al. 2023, arXiv 2301.04104): reset behind the product."""

    name, states, heads = "block_gru", ("h",), 4
    shapes, blocks = {"W": (3, "I"), "b": (3,)}, {"R": 3}

    def step(self, x, states, p):
        (h,), wx, v = states, product(x, p["W"]), p["b"]
        rh = product(h, p["R"], heads=self.heads)
        def a(b, g, j):
            return wx[b, g, j] + rh[b, g, j] + v[g, j]
        new = pointwise(lambda b, j: te.tanh(te.sigmoid(a(b, 0, j)) * a(b, 1, j)), h)
        z = pointwise(lambda b, j: te.sigmoid(a(b, 2, j) - 1.0), h)
        return [pointwise(lambda b, j: z[b, j] * new[b, j] + (1.0 - z[b, j]) * h[b, j], h)]

    def numpy(self, x, h, W, b, R):
        r, n, z = (x @ w.T + r + b for w, r, b in zip(W, each_head(h, R), b, strict=True))
        z = sig(z - 1.0)
        return (z * np.tanh(sig(r) * n) + (1.0 - z) * h,)


class DreamerCore(WithHeads):
    """DreamerV3's whole sequence model with one hidden layer of H units (Hafner et al. 2023, arXiv 2301.04104)."""

    name, states, heads = "dreamer_core", ("h",), 2
    shapes, blocks = {"W": (1, "I"), "Q": (1, "H"), "v": (5,)}, {"S": 1, "R": 3}
    square = True  # the input's features are of the hidden layer's width

    def step(self, x, states, p):
        (h,), v = states, p["v"]
        def normal(value, gain):
            square = mean(pointwise(lambda b, j: value[b, j] * value[b, j], h))
            scaled = pointwise(lambda b, j: value[b, j] * te.rsqrt(square[b] + 1e-4) * v[gain, j], h)
            return pointwise(lambda b, j: scaled[b, j] * te.sigmoid(scaled[b, j]), h)
        features = normal(pointwise(lambda b, j: product(h, p["Q"], 0)[b, j] + v[2, j], h), 0)
        own, given = product(h, p["S"], 0, heads=self.heads), product(x, p["W"], 0)
        deep = normal(pointwise(lambda b, j: own[b, j] + features[b, j] + given[b, j], h), 1)
        a = product(deep, p["R"], heads=self.heads)
        new = pointwise(lambda b, j: te.tanh(te.sigmoid(a[b, 0, j] + v[3, j]) * (a[b, 1, j] + v[4, j])), h)
        z = pointwise(lambda b, j: te.sigmoid(a[b, 2, j] - 1.0), h)
        return [pointwise(lambda b, j: z[b, j] * new[b, j] + (1.0 - z[b, j]) * h[b, j], h)]

    def numpy(self, x, h, W, Q, v, S, R):

        def normal(value, gain):
            value = value / np.sqrt(np.square(value).mean(axis=1, keepdims=True) + 1e-4) * gain
            return value * sig(value)
        features = normal(h @ Q[0].T + v[2], v[0])
        deep = normal(each_head(h, S)[0] + features + x @ W[0].T, v[1])
        r, n, z = each_head(deep, R)
        z = sig(z - 1.0)
        return (z * np.tanh(sig(r + v[3]) * (n + v[4])) + (1.0 - z) * h,)

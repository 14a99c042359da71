"""Neurons that fire."""

import numpy as np
from tvm import te, tirx

from ecornn import pointwise, product
from published.base import ONE, Published, affine, sig, sums


def fires(condition):
    return tirx.Select(condition, tirx.const(1.0, "float32"), tirx.const(0.0, "float32"))


class LIF(Published):
    """Leaky integrate and fire (Neftci et al. 2019, arXiv 1901.09948), decay 0.9, threshold 0.5; y are the spikes."""

    name, states, shapes = "lif", ("s", "v"), ONE

    def step(self, x, states, p):
        (s, v), a = states, sums(x, states[0], p)
        new = pointwise(lambda b, j: 0.9 * v[b, j] + a(b, 0, j) - 0.5 * s[b, j], v)
        return [pointwise(lambda b, j: fires(new[b, j] > 0.5), s), new]

    def numpy(self, x, s, v, W, R, b):
        v = 0.9 * v + affine(x, s, W, R, b)[0] - 0.5 * s
        return np.where(v > 0.5, 1.0, 0.0), v


class ALIF(Published):
    """With thresholds that adapt (Bellec et al. 2018, arXiv 1803.09574): decays 0.9 and 0.97, beta = 0.8."""

    name, states, shapes = "alif", ("s", "v", "a"), ONE

    def step(self, x, states, p):
        (s, v, a), c = states, sums(x, states[0], p)
        tired = pointwise(lambda b, j: 0.97 * a[b, j] + 0.03 * s[b, j], a)
        limit = pointwise(lambda b, j: 0.5 + 0.8 * tired[b, j], a)
        new = pointwise(lambda b, j: 0.9 * v[b, j] + 0.1 * c(b, 0, j) - limit[b, j] * s[b, j], v)
        return [pointwise(lambda b, j: fires(new[b, j] > limit[b, j]), s), new, tired]

    def numpy(self, x, s, v, a, W, R, b):
        a = 0.97 * a + 0.03 * s
        v = 0.9 * v + 0.1 * affine(x, s, W, R, b)[0] - (0.5 + 0.8 * a) * s
        return np.where(v > 0.5 + 0.8 * a, 1.0, 0.0), v, a


class EGRU(Published):
    """Event-based GRU (Subramoney et al. 2022, arXiv 2206.06178): units show c above ``v``, then lose as much."""

    name, states, shapes = "egru", ("y", "c"), {"W": (3, "I"), "R": (3, "H"), "b": (3,), "v": (1,)}

    def step(self, x, states, p):
        (y, c), wx, R, t, v = states, product(x, p["W"]), p["R"], p["b"], p["v"]
        ry = product(y, R, [0, 1])
        u = pointwise(lambda b, j: te.sigmoid(wx[b, 0, j] + ry[b, 0, j] + t[0, j]), c)
        r = pointwise(lambda b, j: te.sigmoid(wx[b, 1, j] + ry[b, 1, j] + t[1, j]), c)
        zy = product(pointwise(lambda b, j: r[b, j] * y[b, j], y, "kept"), R, 2)
        new = pointwise(lambda b, j: u[b, j] * te.tanh(wx[b, 2, j] + zy[b, j] + t[2, j])
                        + (1.0 - u[b, j]) * c[b, j] - y[b, j], c)
        return [pointwise(lambda b, j: new[b, j] * fires(new[b, j] > v[0, j]), y), new]

    def numpy(self, x, y, c, W, R, b, v):
        u, r, _ = affine(x, y, W, R, b)
        c = sig(u) * np.tanh(x @ W[2].T + (sig(r) * y) @ R[2].T + b[2]) + (1 - sig(u)) * c - y
        return c * (c > v[0]), c

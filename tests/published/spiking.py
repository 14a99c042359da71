"""Neurons that fire; their gradients are those of surrogates."""

import numpy as np
from tvm import te

from ecornn import custom_gradient, pointwise, product, spike
from ecornn.numpy_gradients import plain
from ecornn.numpy_gradients import spike as fires
from published.base import ONE, Published, affine, sig, sums


class LIF(Published):
    """Leaky integrate and fire (Neftci et al. 2019, arXiv 1901.09948), decay 0.9, threshold 0.5; y are the spikes."""

    name, states, shapes = "lif", ("s", "v"), ONE

    def step(self, x, states, p):
        (s, v), a = states, sums(x, states[0], p)
        new = pointwise(lambda b, j: 0.9 * v[b, j] + a(b, 0, j) - 0.5 * s[b, j], v)
        return [pointwise(lambda b, j: spike(new[b, j], 0.5, slope=10.0), s), new]

    def numpy(self, x, s, v, W, R, b):
        v = 0.9 * v + affine(x, s, W, R, b)[0] - 0.5 * s
        return fires(v, 0.5, "fast_sigmoid", 10.0), v


class LIFToZero(Published):
    """Whose reset is to zero, and has no gradient (Eshraghian et al. 2023, arXiv 2109.12894)."""

    name, states, shapes = "lif_to_zero", ("s", "v"), ONE

    def step(self, x, states, p):
        (s, v), a = states, sums(x, states[0], p)
        new = pointwise(lambda b, j: 0.9 * v[b, j] * (1.0 - custom_gradient(s[b, j])) + a(b, 0, j), v)
        return [pointwise(lambda b, j: spike(new[b, j], 0.5, surrogate="arctan"), s), new]

    def numpy(self, x, s, v, W, R, b):
        v = 0.9 * v * (1.0 - plain(s)) + affine(x, s, W, R, b)[0]
        return fires(v, 0.5, "arctan", 2.0), v


class LIFAlone(Published):
    """Neurons that see their own potential alone, as those of feed-forward layers, with a decay and a threshold that
    are learned; the reset is to zero (Fang et al. 2021, arXiv 2007.05785)."""

    name, states, shapes = "lif_alone", ("s", "v"), {"W": (1, "I"), "b": (3,)}

    def step(self, x, states, p):
        (s, v), wx, b = states, product(x, p["W"], 0), p["b"]
        new = pointwise(lambda i, j: te.sigmoid(b[1, j]) * v[i, j] * (1.0 - s[i, j]) + wx[i, j] + b[0, j], v)
        return [pointwise(lambda i, j: spike(new[i, j], b[2, j], surrogate="sigmoid", slope=4.0), s), new]

    def numpy(self, x, s, v, W, b):
        v = sig(b[1]) * v * (1.0 - s) + x @ W[0].T + b[0]
        return fires(v, b[2], "sigmoid", 4.0), v


class ALIF(Published):
    """With thresholds that adapt (Bellec et al. 2018, arXiv 1803.09574): decays 0.9 and 0.97, beta = 0.8."""

    name, states, shapes = "alif", ("s", "v", "a"), ONE

    def step(self, x, states, p):
        (s, v, a), c = states, sums(x, states[0], p)
        tired = pointwise(lambda b, j: 0.97 * a[b, j] + 0.03 * s[b, j], a)
        limit = pointwise(lambda b, j: 0.5 + 0.8 * tired[b, j], a)
        new = pointwise(lambda b, j: 0.9 * v[b, j] + 0.1 * c(b, 0, j) - limit[b, j] * s[b, j], v)
        return [pointwise(lambda b, j: spike(new[b, j], limit[b, j], surrogate="triangle"), s), new, tired]

    def numpy(self, x, s, v, a, W, R, b):
        a = 0.97 * a + 0.03 * s
        limit = 0.5 + 0.8 * a
        v = 0.9 * v + 0.1 * affine(x, s, W, R, b)[0] - limit * s
        return fires(v, limit, "triangle", 1.0), v, a


class Izhikevich(Published):
    """Regular spiking neurons (Izhikevich 2003, Simple model of spiking neurons): potentials v in mV and recovery u by
    Euler steps of 0.5 ms; v above 30 mV fires, and the next step begins with v = -65 and u + 8."""

    name, states, shapes = "izhikevich", ("s", "v", "u"), ONE

    def step(self, x, states, p):
        (s, v, u), a = states, sums(x, states[0], p)
        before = pointwise(lambda b, j: v[b, j] * (1.0 - s[b, j]) - 65.0 * s[b, j], v)
        tired = pointwise(lambda b, j: u[b, j] + 8.0 * s[b, j], u)
        new = pointwise(lambda b, j: before[b, j] + 0.5 * (
            (0.04 * before[b, j] + 5.0) * before[b, j] + 140.0 - tired[b, j] + 40.0 * a(b, 0, j)), v)
        recovery = pointwise(lambda b, j: tired[b, j] + 0.01 * (0.2 * before[b, j] - tired[b, j]), u)
        return [pointwise(lambda b, j: spike(new[b, j], 30.0, slope=0.1), s), new, recovery]

    def numpy(self, x, s, v, u, W, R, b):
        v, u = v * (1.0 - s) - 65.0 * s, u + 8.0 * s
        new = v + 0.5 * ((0.04 * v + 5.0) * v + 140.0 - u + 40.0 * affine(x, s, W, R, b)[0])
        return fires(new, 30.0, "fast_sigmoid", 0.1), new, u + 0.01 * (0.2 * v - u)


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
        return [pointwise(lambda b, j: new[b, j] * spike(new[b, j], v[0, j], surrogate="triangle"), y), new]

    def numpy(self, x, y, c, W, R, b, v):
        u, r, _ = affine(x, y, W, R, b)
        c = sig(u) * np.tanh(x @ W[2].T + (sig(r) * y) @ R[2].T + b[2]) + (1 - sig(u)) * c - y
        return c * fires(c, v[0], "triangle", 1.0), c

"""GRUs with less, more or other gates."""

import numpy as np
from tvm import te

from ecornn import pointwise, product
from published.base import FOUR, THREE, TWO, Published, affine, relu, sig, sums


def gated_by(h, R, gate, n):
    return product(pointwise(lambda b, j: gate[b, j] * h[b, j], h, "kept"), R, n)


class GRU1(Published):
    """Gates of the state and a bias (Dey and Salem 2017, arXiv 1701.05923)."""

    name, states, shapes = "gru1", ("h",), {"W": (1, "I"), "R": (3, "H"), "b": (3,)}

    def step(self, x, states, p):
        (h,), wx, R, v = states, product(x, p["W"], 0), p["R"], p["b"]
        gates = []
        for n in (0, 1):
            rh = product(h, R, n)
            gates.append(pointwise(lambda b, j, rh=rh, n=n: te.sigmoid(rh[b, j] + v[n, j]), h))
        z, r = gates
        rh = gated_by(h, R, r, 2)
        return [pointwise(lambda b, j: z[b, j] * h[b, j] + (1.0 - z[b, j]) * te.tanh(wx[b, j] + rh[b, j] + v[2, j]), h)]

    def numpy(self, x, h, W, R, b):
        z, r = (sig(h @ R[n].T + b[n]) for n in (0, 1))
        return (z * h + (1 - z) * np.tanh(x @ W[0].T + (r * h) @ R[2].T + b[2]),)


class GRU3(Published):
    """Gates that are biases alone (Dey and Salem 2017, arXiv 1701.05923)."""

    name, states, shapes = "gru3", ("h",), {"W": (1, "I"), "R": (1, "H"), "b": (3,)}

    def step(self, x, states, p):
        (h,), wx, v = states, product(x, p["W"], 0), p["b"]
        rh = product(pointwise(lambda b, j: te.sigmoid(v[1, j]) * h[b, j], h), p["R"], 0)
        return [pointwise(lambda b, j: te.sigmoid(v[0, j]) * h[b, j] + (1.0 - te.sigmoid(v[0, j])) * te.tanh(
            wx[b, j] + rh[b, j] + v[2, j]), h)]

    def numpy(self, x, h, W, R, b):
        z, r, b = sig(b[0]), sig(b[1]), b[2]
        return (z * h + (1 - z) * np.tanh(x @ W[0].T + (r * h) @ R[0].T + b),)


class MGU(Published):
    """One gate for both ends (Zhou et al. 2016, arXiv 1603.09420)."""

    name, states, shapes = "mgu", ("h",), TWO

    def step(self, x, states, p):
        (h,), wx, R, v = states, product(x, p["W"]), p["R"], p["b"]
        fh = product(h, R, 0)
        f = pointwise(lambda b, j: te.sigmoid(wx[b, 0, j] + fh[b, j] + v[0, j]), h)
        rh = gated_by(h, R, f, 1)
        return [pointwise(lambda b, j: (1.0 - f[b, j]) * h[b, j] + f[b, j] * te.tanh(
            wx[b, 1, j] + rh[b, j] + v[1, j]), h)]

    def numpy(self, x, h, W, R, b):
        f = sig(x @ W[0].T + h @ R[0].T + b[0])
        return ((1 - f) * h + f * np.tanh(x @ W[1].T + (f * h) @ R[1].T + b[1]),)


class MGU2(Published):
    """Its gate sees the state alone (Heck and Salem 2017, arXiv 1701.03452)."""

    name, states, shapes = "mgu2", ("h",), {"W": (1, "I"), "R": (2, "H"), "b": (1,)}

    def step(self, x, states, p):
        (h,), wx, R, v = states, product(x, p["W"], 0), p["R"], p["b"]
        fh = product(h, R, 0)
        f = pointwise(lambda b, j: te.sigmoid(fh[b, j]), h)
        rh = gated_by(h, R, f, 1)
        return [pointwise(lambda b, j: (1.0 - f[b, j]) * h[b, j] + f[b, j] * te.tanh(wx[b, j] + rh[b, j] + v[0, j]), h)]

    def numpy(self, x, h, W, R, b):
        f = sig(h @ R[0].T)
        return ((1 - f) * h + f * np.tanh(x @ W[0].T + (f * h) @ R[1].T + b[0]),)


class UGRNN(Published):
    """Update gate RNN (Collins et al. 2017, arXiv 1611.09913)."""

    name, states, shapes = "ugrnn", ("h",), TWO

    def step(self, x, states, p):
        (h,), a = states, sums(x, states[0], p)
        g = pointwise(lambda b, j: te.sigmoid(a(b, 1, j)), h)
        return [pointwise(lambda b, j: g[b, j] * h[b, j] + (1.0 - g[b, j]) * te.tanh(a(b, 0, j)), h)]

    def numpy(self, x, h, W, R, b):
        c, g = affine(x, h, W, R, b)
        return (sig(g) * h + (1 - sig(g)) * np.tanh(c),)


class IntersectionRNN(Published):
    """+RNN: a gate over time and one over depth (Collins et al. 2017, arXiv 1611.09913)."""

    name, states, output, square = "intersection", ("h", "y"), "y", True
    shapes = FOUR

    def step(self, x, states, p):
        (h, _), a = states, sums(x, states[0], p)
        gh = pointwise(lambda b, j: te.sigmoid(a(b, 2, j)), h)
        gy = pointwise(lambda b, j: te.sigmoid(a(b, 3, j)), h)
        return [pointwise(lambda b, j: gh[b, j] * h[b, j] + (1.0 - gh[b, j]) * te.tanh(a(b, 1, j)), h),
                pointwise(lambda b, j: gy[b, j] * x[b, j] + (1.0 - gy[b, j]) * relu(a(b, 0, j)), h)]

    def numpy(self, x, h, y, W, R, b):
        y, n, gh, gy = affine(x, h, W, R, b)
        return (sig(gh) * h + (1 - sig(gh)) * np.tanh(n), sig(gy) * x + (1 - sig(gy)) * np.maximum(y, 0))


class LightGRU(Published):
    """Without a reset gate, with max(0, .) (Ravanelli et al. 2018, arXiv 1803.10225)."""

    name, states, shapes = "ligru", ("h",), TWO

    def step(self, x, states, p):
        (h,), a = states, sums(x, states[0], p)
        z = pointwise(lambda b, j: te.sigmoid(a(b, 0, j)), h)
        return [pointwise(lambda b, j: z[b, j] * h[b, j] + (1.0 - z[b, j]) * relu(a(b, 1, j)), h)]

    def numpy(self, x, h, W, R, b):
        z, n = affine(x, h, W, R, b)
        return (sig(z) * h + (1 - sig(z)) * np.maximum(n, 0),)


class MUT1(Published):
    """The first of three that a search over ten thousand cells found (Jozefowicz et al. 2015); I = H."""

    name, states, square, shapes = "mut1", ("h",), True, {"W": (2, "I"), "R": (2, "H"), "b": (3,)}

    def step(self, x, states, p):
        (h,), wx, R, v = states, product(x, p["W"]), p["R"], p["b"]
        rh, z = product(h, R, 0), pointwise(lambda b, j: te.sigmoid(wx[b, 0, j] + v[0, j]), h)
        r = pointwise(lambda b, j: te.sigmoid(wx[b, 1, j] + rh[b, j] + v[1, j]), h)
        nh = gated_by(h, R, r, 1)
        return [pointwise(lambda b, j: te.tanh(nh[b, j] + te.tanh(x[b, j]) + v[2, j]) * z[b, j]
                          + h[b, j] * (1.0 - z[b, j]), h)]

    def numpy(self, x, h, W, R, b):
        z, r = sig(x @ W[0].T + b[0]), sig(x @ W[1].T + h @ R[0].T + b[1])
        return (np.tanh((r * h) @ R[1].T + np.tanh(x) + b[2]) * z + h * (1 - z),)


class MUT2(Published):
    """The second one; its reset gate reads x as it is, so I = H."""

    name, states, square, shapes = "mut2", ("h",), True, {"W": (2, "I"), "R": (3, "H"), "b": (3,)}

    def step(self, x, states, p):
        (h,), wx, R, v = states, product(x, p["W"]), p["R"], p["b"]
        zh, rh = product(h, R, 0), product(h, R, 1)
        z = pointwise(lambda b, j: te.sigmoid(wx[b, 0, j] + zh[b, j] + v[0, j]), h)
        r = pointwise(lambda b, j: te.sigmoid(x[b, j] + rh[b, j] + v[1, j]), h)
        nh = gated_by(h, R, r, 2)
        return [pointwise(lambda b, j: te.tanh(nh[b, j] + wx[b, 1, j] + v[2, j]) * z[b, j]
                          + h[b, j] * (1.0 - z[b, j]), h)]

    def numpy(self, x, h, W, R, b):
        z, r = sig(x @ W[0].T + h @ R[0].T + b[0]), sig(x + h @ R[1].T + b[1])
        return (np.tanh((r * h) @ R[2].T + x @ W[1].T + b[2]) * z + h * (1 - z),)


class MUT3(Published):
    """The third one: its update gate sees tanh(h)."""

    name, states, shapes = "mut3", ("h",), THREE

    def step(self, x, states, p):
        (h,), wx, R, v = states, product(x, p["W"]), p["R"], p["b"]
        zh, rh = product(pointwise(lambda b, j: te.tanh(h[b, j]), h, "bent"), R, 0), product(h, R, 1)
        z = pointwise(lambda b, j: te.sigmoid(wx[b, 0, j] + zh[b, j] + v[0, j]), h)
        r = pointwise(lambda b, j: te.sigmoid(wx[b, 1, j] + rh[b, j] + v[1, j]), h)
        nh = gated_by(h, R, r, 2)
        return [pointwise(lambda b, j: te.tanh(nh[b, j] + wx[b, 2, j] + v[2, j]) * z[b, j]
                          + h[b, j] * (1.0 - z[b, j]), h)]

    def numpy(self, x, h, W, R, b):
        z, r = sig(x @ W[0].T + np.tanh(h) @ R[0].T + b[0]), sig(x @ W[1].T + h @ R[1].T + b[1])
        return (np.tanh((r * h) @ R[2].T + x @ W[2].T + b[2]) * z + h * (1 - z),)


class CARU(Published):
    """The content of x weighs the update gate (Chan et al. 2020)."""

    name, states, shapes = "caru", ("h",), TWO

    def step(self, x, states, p):
        (h,), wx, rh, v = states, product(x, p["W"]), product(states[0], p["R"]), p["b"]
        n = pointwise(lambda b, j: te.tanh(wx[b, 0, j] + rh[b, 0, j] + v[0, j]), h)
        share = pointwise(lambda b, j: te.sigmoid(wx[b, 0, j]) * te.sigmoid(wx[b, 1, j] + rh[b, 1, j] + v[1, j]), h)
        return [pointwise(lambda b, j: (1.0 - share[b, j]) * h[b, j] + share[b, j] * n[b, j], h)]

    def numpy(self, x, h, W, R, b):
        n, z = affine(x, h, W, R, b)
        share = sig(x @ W[0].T) * sig(z)
        return ((1 - share) * h + share * np.tanh(n),)


class STAR(Published):
    """Stackable recurrent unit (Turkoglu et al. 2019, arXiv 1911.11033)."""

    name, states, shapes = "star", ("h",), {"W": (2, "I"), "R": (1, "H"), "b": (2,)}

    def step(self, x, states, p):
        (h,), wx, rh, v = states, product(x, p["W"]), product(states[0], p["R"], 0), p["b"]
        k = pointwise(lambda b, j: te.sigmoid(wx[b, 0, j] + rh[b, j] + v[0, j]), h)
        return [pointwise(lambda b, j: te.tanh((1.0 - k[b, j]) * h[b, j] + k[b, j] * te.tanh(
            wx[b, 1, j] + v[1, j])), h)]

    def numpy(self, x, h, W, R, b):
        k = sig(x @ W[0].T + h @ R[0].T + b[0])
        return (np.tanh((1 - k) * h + k * np.tanh(x @ W[1].T + b[1])),)


class NBRC(Published):
    """Neuromodulated bistable cell (Vecoven et al. 2021, arXiv 2006.05252)."""

    name, states, shapes = "nbrc", ("h",), {"W": (3, "I"), "R": (2, "H")}

    def step(self, x, states, p):
        (h,), wx, rh = states, product(x, p["W"]), product(states[0], p["R"])
        a = pointwise(lambda b, j: 1.0 + te.tanh(wx[b, 0, j] + rh[b, 0, j]), h)
        c = pointwise(lambda b, j: te.sigmoid(wx[b, 1, j] + rh[b, 1, j]), h)
        return [pointwise(lambda b, j: c[b, j] * h[b, j] + (1.0 - c[b, j]) * te.tanh(
            wx[b, 2, j] + a[b, j] * h[b, j]), h)]

    def numpy(self, x, h, W, R):
        a, c = 1 + np.tanh(x @ W[0].T + h @ R[0].T), sig(x @ W[1].T + h @ R[1].T)
        return (c * h + (1 - c) * np.tanh(x @ W[2].T + a * h),)

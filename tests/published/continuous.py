"""Cells that are steps of differential equations."""

import numpy as np
from tvm import te

from ecornn import pointwise, product
from published.base import FOUR, ONE, THREE, Published, affine, sig, sums


class CTRNN(Published):
    """Continuous-time RNN, Euler steps (Funahashi and Nakamura 1993); ``v`` is log tau."""

    name, states, shapes = "ct_rnn", ("h",), ONE | {"v": (1,)}

    def step(self, x, states, p):
        (h,), a, v = states, sums(x, states[0], p), p["v"]
        return [pointwise(lambda b, j: h[b, j] + 0.1 * te.exp(0.0 - v[0, j]) * (te.tanh(a(b, 0, j)) - h[b, j]), h)]

    def numpy(self, x, h, W, R, b, v):
        (a,) = affine(x, h, W, R, b)
        return (h + 0.1 / np.exp(v[0]) * (np.tanh(a) - h),)


class LTC(Published):
    """Liquid time constants, three fused steps (Hasani et al. 2021, arXiv 2006.04439); ``v`` are A and log tau."""

    name, states, shapes = "ltc", ("h",), ONE | {"v": (2,)}

    def step(self, x, states, p):
        (h,), wx, v, t = states, product(x, p["W"], 0), p["v"], p["b"]
        for _ in range(3):
            rh = product(h, p["R"], 0)
            f = pointwise(lambda b, j, rh=rh: te.sigmoid(wx[b, j] + rh[b, j] + t[0, j]), states[0])
            h = pointwise(lambda b, j, f=f, h=h: (h[b, j] + f[b, j] * v[0, j] / 6.0)
                          / (1.0 + (te.exp(0.0 - v[1, j]) + f[b, j]) / 6.0), states[0])
        return [h]

    def numpy(self, x, h, W, R, b, v):
        (A, log_tau), dt = v, 1 / 6
        for _ in range(3):
            f = sig(x @ W[0].T + h @ R[0].T + b[0])
            h = (h + dt * f * A) / (1 + dt * (1 / np.exp(log_tau) + f))
        return (h,)


class CfC(Published):
    """Closed-form continuous time (Hasani et al. 2022, arXiv 2106.13898): a backbone of H units and four heads."""

    name, states, shapes = "cfc", ("h",), ONE | {"Q": (4, "H"), "q": (4,)}

    def step(self, x, states, p):
        (h,), a, q = states, sums(x, states[0], p), p["q"]
        bone = pointwise(lambda b, j: 1.7159 * te.tanh(0.666 * a(b, 0, j)), h, "backbone")
        z = product(bone, p["Q"])
        t = pointwise(lambda b, j: te.sigmoid(z[b, 2, j] + q[2, j] + z[b, 3, j] + q[3, j]), h)
        return [pointwise(lambda b, j: te.tanh(z[b, 0, j] + q[0, j]) * (1.0 - t[b, j])
                          + t[b, j] * te.tanh(z[b, 1, j] + q[1, j]), h)]

    def numpy(self, x, h, W, R, b, Q, q):
        (a,) = affine(x, h, W, R, b)
        bone = 1.7159 * np.tanh(0.666 * a)
        f, g, ta, tb = (bone @ w.T + b for w, b in zip(Q, q, strict=True))
        t = sig(ta + tb)
        return (np.tanh(f) * (1 - t) + t * np.tanh(g),)


class CoRNN(Published):
    """Coupled oscillators (Rusch and Mishra 2021, arXiv 2010.00951), dt = 0.1, gamma = 1, epsilon = 2."""

    name, states, shapes = "cornn", ("y", "z"), ONE | {"R": (2, "H")}

    def step(self, x, states, p):
        (y, z), wx, v = states, product(x, p["W"], 0), p["b"]
        ry, rz = product(y, p["R"], 0), product(z, p["R"], 1)
        new = pointwise(lambda b, j: z[b, j] + 0.1 * (te.tanh(ry[b, j] + rz[b, j] + wx[b, j] + v[0, j])
                                                      - 1.0 * y[b, j] - 2.0 * z[b, j]), y)
        return [pointwise(lambda b, j: y[b, j] + 0.1 * new[b, j], y), new]

    def numpy(self, x, y, z, W, R, b):
        z = z + 0.1 * (np.tanh(y @ R[0].T + z @ R[1].T + x @ W[0].T + b[0]) - y - 2 * z)
        return y + 0.1 * z, z


class UnICORNN(Published):
    """Oscillators on their own (Rusch and Mishra 2021, arXiv 2103.05487), dt = 0.1, alpha = 1; ``v`` are w and c."""

    name, states, shapes = "unicornn", ("y", "z"), {"W": (1, "I"), "v": (2,), "b": (1,)}

    def step(self, x, states, p):
        (y, z), wx, v, t = states, product(x, p["W"], 0), p["v"], p["b"]
        dt = pointwise(lambda b, j: 0.1 * (0.5 + 0.5 * te.tanh(v[1, j] / 2.0)), y)
        new = pointwise(lambda b, j: z[b, j] - dt[b, j] * (
            te.tanh(v[0, j] * y[b, j] + wx[b, j] + t[0, j]) + y[b, j]), y)
        return [pointwise(lambda b, j: y[b, j] + dt[b, j] * new[b, j], y), new]

    def numpy(self, x, y, z, W, v, b):
        dt = 0.1 * sig(v[1])
        z = z - dt * (np.tanh(v[0] * y + x @ W[0].T + b[0]) + y)
        return y + dt * z, z


class LEM(Published):
    """Long expressive memory (Rusch et al. 2022, arXiv 2110.04744), dt = 1."""

    name, states, shapes = "lem", ("y", "z"), FOUR

    def step(self, x, states, p):
        (y, z), wx, R, v = states, product(x, p["W"]), p["R"], p["b"]
        ry = product(y, R, [0, 1, 2])
        def a(b, g, j):
            return wx[b, g, j] + ry[b, g, j] + v[g, j]
        dt = pointwise(lambda b, j: te.sigmoid(a(b, 0, j)), y)
        du = pointwise(lambda b, j: te.sigmoid(a(b, 1, j)), y)
        new = pointwise(lambda b, j: (1.0 - dt[b, j]) * z[b, j] + dt[b, j] * te.tanh(a(b, 2, j)), y)
        rz = product(new, R, 3)
        return [pointwise(lambda b, j: (1.0 - du[b, j]) * y[b, j] + du[b, j] * te.tanh(
            wx[b, 3, j] + rz[b, j] + v[3, j]), y), new]

    def numpy(self, x, y, z, W, R, b):
        dt, du, n, _ = affine(x, y, W, R, b)
        z = (1 - sig(dt)) * z + sig(dt) * np.tanh(n)
        return (1 - sig(du)) * y + sig(du) * np.tanh(x @ W[3].T + z @ R[3].T + b[3]), z


class GRUODE(Published):
    """An Euler step of a GRU as a differential equation (De Brouwer et al. 2019, arXiv 1905.12374), dt = 0.25."""

    name, states, shapes = "gru_ode", ("h",), THREE

    def step(self, x, states, p):
        (h,), wx, R, v = states, product(x, p["W"]), p["R"], p["b"]
        rh = product(h, R, [0, 1])
        r = pointwise(lambda b, j: te.sigmoid(wx[b, 0, j] + rh[b, 0, j] + v[0, j]), h)
        z = pointwise(lambda b, j: te.sigmoid(wx[b, 1, j] + rh[b, 1, j] + v[1, j]), h)
        gh = product(pointwise(lambda b, j: r[b, j] * h[b, j], h, "kept"), R, 2)
        g = pointwise(lambda b, j: te.tanh(wx[b, 2, j] + gh[b, j] + v[2, j]), h)
        return [pointwise(lambda b, j: h[b, j] + 0.25 * (1.0 - z[b, j]) * (g[b, j] - h[b, j]), h)]

    def numpy(self, x, h, W, R, b):
        r, z, _ = affine(x, h, W, R, b)
        return (h + 0.25 * (1 - sig(z)) * (np.tanh(x @ W[2].T + (sig(r) * h) @ R[2].T + b[2]) - h),)


class AntisymmetricRNN(Published):
    """Euler steps of a stable equation (Chang et al. 2019, arXiv 1902.09689): step 0.1, diffusion 0.2."""

    name, states, shapes = "antisymmetric", ("h",), ONE

    def learned(self, input, hidden):
        shapes = self.parameters(input, hidden)
        return {"W": shapes["W"], "A": shapes["R"], "b": shapes["b"]}

    def derived(self, p, xp):
        return {"R": p["A"] - p["A"].swapaxes(1, 2)}

    def step(self, x, states, p):
        (h,), a = states, sums(x, states[0], p)
        return [pointwise(lambda b, j: h[b, j] + 0.1 * te.tanh(a(b, 0, j) - 0.2 * h[b, j]), h)]

    def numpy(self, x, h, W, R, b):
        (a,) = affine(x, h, W, R, b)
        return (h + 0.1 * np.tanh(a - 0.2 * h),)

"""Cells whose units see no other unit's state: no product of a state, so that steps wait for nothing."""

import numpy as np
from tvm import te, tirx

from ecornn import pointwise, product
from published.base import Published, sig, soft, softplus


class QRNN(Published):
    """Quasi-recurrent, ifo-pooling, a window of one step (Bradbury et al. 2017, arXiv 1611.01576)."""

    name, states, shapes = "qrnn", ("h", "c"), {"W": (4, "I")}

    def step(self, x, states, p):
        (_, c), wx = states, product(x, p["W"])
        new = pointwise(lambda b, j: te.sigmoid(wx[b, 1, j]) * c[b, j]
                        + te.sigmoid(wx[b, 2, j]) * te.tanh(wx[b, 0, j]), c)
        return [pointwise(lambda b, j: te.sigmoid(wx[b, 3, j]) * new[b, j], c), new]

    def numpy(self, x, h, c, W):
        z, f, i, o = (x @ w.T for w in W)
        c = sig(f) * c + sig(i) * np.tanh(z)
        return sig(o) * c, c


class SRU(Published):
    """Simple recurrent unit (Lei et al. 2018, arXiv 1709.02755); its highway reads x, so I = H."""

    name, states, square, shapes = "sru", ("h", "c"), True, {"W": (3, "I"), "v": (2,), "b": (2,)}

    def step(self, x, states, p):
        (_, c), wx, v, t = states, product(x, p["W"]), p["v"], p["b"]
        f = pointwise(lambda b, j: te.sigmoid(wx[b, 1, j] + v[0, j] * c[b, j] + t[0, j]), c)
        r = pointwise(lambda b, j: te.sigmoid(wx[b, 2, j] + v[1, j] * c[b, j] + t[1, j]), c)
        new = pointwise(lambda b, j: f[b, j] * c[b, j] + (1.0 - f[b, j]) * wx[b, 0, j], c)
        return [pointwise(lambda b, j: r[b, j] * new[b, j] + (1.0 - r[b, j]) * x[b, j], c), new]

    def numpy(self, x, h, c, W, v, b):
        f, r = (sig(x @ W[n + 1].T + v[n] * c + b[n]) for n in (0, 1))
        c = f * c + (1 - f) * (x @ W[0].T)
        return r * c + (1 - r) * x, c


class StronglyTypedRNN(Published):
    """T-RNN (Balduzzi and Ghifary 2016, arXiv 1602.02218); with GILR (Martin and Cundy 2018, 1709.04057) alike."""

    name, states, shapes = "t_rnn", ("h",), {"W": (2, "I"), "b": (1,)}

    def step(self, x, states, p):
        (h,), wx, v = states, product(x, p["W"]), p["b"]
        f = pointwise(lambda b, j: te.sigmoid(wx[b, 1, j] + v[0, j]), h)
        return [pointwise(lambda b, j: f[b, j] * h[b, j] + (1.0 - f[b, j]) * wx[b, 0, j], h)]

    def numpy(self, x, h, W, b):
        f = sig(x @ W[1].T + b[0])
        return (f * h + (1 - f) * (x @ W[0].T),)


class MinGRU(Published):
    """minGRU, with g of its parallel form (Feng et al. 2024, arXiv 2410.01201)."""

    name, states, shapes = "min_gru", ("h",), {"W": (2, "I")}

    def step(self, x, states, p):
        (h,), wx = states, product(x, p["W"])
        z = pointwise(lambda b, j: te.sigmoid(wx[b, 0, j]), h)
        new = pointwise(lambda b, j: tirx.Select(wx[b, 1, j] >= 0.0, wx[b, 1, j] + 0.5, te.sigmoid(wx[b, 1, j])), h)
        return [pointwise(lambda b, j: (1.0 - z[b, j]) * h[b, j] + z[b, j] * new[b, j], h)]

    def numpy(self, x, h, W):
        z, n = (x @ w.T for w in W)
        return ((1 - sig(z)) * h + sig(z) * np.where(n >= 0, n + 0.5, sig(n)),)


class MinLSTM(Published):
    """minLSTM: gates that are normalized by their sum (Feng et al. 2024, arXiv 2410.01201)."""

    name, states, shapes = "min_lstm", ("h",), {"W": (3, "I")}

    def step(self, x, states, p):
        (h,), wx = states, product(x, p["W"])
        f = pointwise(lambda b, j: te.sigmoid(wx[b, 0, j]), h)
        i = pointwise(lambda b, j: te.sigmoid(wx[b, 1, j]), h)
        return [pointwise(lambda b, j: (f[b, j] * h[b, j] + i[b, j] * wx[b, 2, j]) / (f[b, j] + i[b, j]), h)]

    def numpy(self, x, h, W):
        f, i, n = (x @ w.T for w in W)
        share = sig(f) / (sig(f) + sig(i))
        return (share * h + (1 - share) * n,)


class HGRN(Published):
    """Forget gates with a lower bound, outputs gated (Qin et al. 2023, arXiv 2311.04823), real; ``v`` is the bound."""

    name, states, shapes = "hgrn", ("o", "h"), {"W": (3, "I"), "v": (1,)}

    def step(self, x, states, p):
        (_, h), wx, v = states, product(x, p["W"]), p["v"]
        least = pointwise(lambda b, j: te.sigmoid(v[0, j]), h)
        f = pointwise(lambda b, j: least[b, j] + (1.0 - least[b, j]) * te.sigmoid(wx[b, 0, j]), h)
        new = pointwise(lambda b, j: f[b, j] * h[b, j] + (1.0 - f[b, j]) * wx[b, 1, j] * te.sigmoid(wx[b, 1, j]), h)
        return [pointwise(lambda b, j: te.sigmoid(wx[b, 2, j]) * new[b, j], h), new]

    def numpy(self, x, o, h, W, v):
        f, c, g = (x @ w.T for w in W)
        least = sig(v[0])
        f = least + (1 - least) * sig(f)
        h = f * h + (1 - f) * c * sig(c)
        return sig(g) * h, h


class RGLRU(Published):
    """The recurrence of Griffin (De et al. 2024, arXiv 2402.19427), c = 8; I = H."""

    name, states, square, shapes = "rg_lru", ("h",), True, {"W": (2, "I"), "b": (2,), "v": (1,)}

    def step(self, x, states, p):
        (h,), wx, v, t = states, product(x, p["W"]), p["v"], p["b"]
        a = pointwise(lambda b, j: te.exp(-8.0 * softplus(v[0, j]) * te.sigmoid(wx[b, 0, j] + t[0, j])), h)
        i = pointwise(lambda b, j: te.sigmoid(wx[b, 1, j] + t[1, j]), h)
        return [pointwise(lambda b, j: a[b, j] * h[b, j] + te.sqrt(1.0 - a[b, j] * a[b, j]) * i[b, j] * x[b, j], h)]

    def numpy(self, x, h, W, b, v):
        r, i = (sig(x @ w.T + b) for w, b in zip(W, b, strict=True))
        log_a = -8 * soft(v[0]) * r
        return (np.exp(log_a) * h + np.sqrt(-np.expm1(2 * log_a)) * i * x,)


class LRU(Published):
    """Linear recurrent unit (Orvieto et al. 2023, arXiv 2303.06349): complex numbers as two states; y is the real part
    of h. ``v`` are log nu and log theta."""

    name, states, shapes = "lru", ("re", "im"), {"W": (2, "I"), "v": (2,)}

    def step(self, x, states, p):
        (re, im), wx, v = states, product(x, p["W"]), p["v"]
        size = pointwise(lambda b, j: te.exp(0.0 - te.exp(v[0, j])), re)
        gain = pointwise(lambda b, j: te.sqrt(1.0 - size[b, j] * size[b, j]), re)
        cos = pointwise(lambda b, j: size[b, j] * te.cos(te.exp(v[1, j])), re)
        sin = pointwise(lambda b, j: size[b, j] * te.sin(te.exp(v[1, j])), re)
        return [pointwise(lambda b, j: cos[b, j] * re[b, j] - sin[b, j] * im[b, j] + gain[b, j] * wx[b, 0, j], re),
                pointwise(lambda b, j: sin[b, j] * re[b, j] + cos[b, j] * im[b, j] + gain[b, j] * wx[b, 1, j], re)]

    def numpy(self, x, re, im, W, v):
        pole = np.exp(-np.exp(v[0]) + 1j * np.exp(v[1]))
        h = pole * (re + 1j * im)
        h = h + np.sqrt(1 - np.abs(pole) ** 2) * (x @ W[0].T + 1j * (x @ W[1].T))
        return h.real, h.imag


class SelectiveSSM(Published):
    """Mamba's recurrence with one state a channel (Gu and Dao 2023, arXiv 2312.00752): a step size, an input and an
    output weight that x chooses; I = H. ``v`` are log(-A), the step's bias and the skip D."""

    name, states, output, square = "selective_ssm", ("h", "y"), "y", True
    shapes = {"W": (3, "I"), "v": (3,)}

    def step(self, x, states, p):
        (h, _), wx, v = states, product(x, p["W"]), p["v"]
        dt = pointwise(lambda b, j: softplus(wx[b, 0, j] + v[1, j]), h)
        new = pointwise(lambda b, j: te.exp(0.0 - dt[b, j] * te.exp(v[0, j])) * h[b, j]
                        + dt[b, j] * wx[b, 1, j] * x[b, j], h)
        return [new, pointwise(lambda b, j: wx[b, 2, j] * new[b, j] + v[2, j] * x[b, j], h)]

    def numpy(self, x, h, y, W, v):
        dt, B, C = (x @ w.T for w in W)
        dt = soft(dt + v[1])
        h = np.exp(-dt * np.exp(v[0])) * h + dt * B * x
        return h, C * h + v[2] * x


class DampedEMA(Published):
    """The moving average of Mega (Ma et al. 2023, arXiv 2209.10655); ``v`` are alpha and delta before a sigmoid."""

    name, states, shapes = "mega_ema", ("h",), {"W": (1, "I"), "v": (2,)}

    def step(self, x, states, p):
        (h,), wx, v = states, product(x, p["W"], 0), p["v"]
        return [pointwise(lambda b, j: te.sigmoid(v[0, j]) * wx[b, j]
                          + (1.0 - te.sigmoid(v[0, j]) * te.sigmoid(v[1, j])) * h[b, j], h)]

    def numpy(self, x, h, W, v):
        alpha, delta = sig(v[0]), sig(v[1])
        return (alpha * (x @ W[0].T) + (1 - alpha * delta) * h,)


class RWKV4(Published):
    """Time mixing of RWKV-4 (Peng et al. 2023, arXiv 2305.13048); ``v`` are the bonus u and the log of the decay."""

    name, states, output, nonnegative = "rwkv4", ("a", "d", "m"), "y", ("d",)
    shapes = {"W": (3, "I"), "v": (2,)}

    def step(self, x, states, p):
        (a, d, m), wx, v = states, product(x, p["W"]), p["v"]
        top = pointwise(lambda b, j: tirx.max(m[b, j], v[0, j] + wx[b, 1, j]), a)
        old = pointwise(lambda b, j: te.exp(m[b, j] - top[b, j]), a)
        now = pointwise(lambda b, j: te.exp(v[0, j] + wx[b, 1, j] - top[b, j]), a)
        y = pointwise(lambda b, j: te.sigmoid(wx[b, 0, j]) * (old[b, j] * a[b, j] + now[b, j] * wx[b, 2, j])
                      / (old[b, j] * d[b, j] + now[b, j]), a)
        faded = pointwise(lambda b, j: m[b, j] - te.exp(v[1, j]), a)
        new = pointwise(lambda b, j: tirx.max(faded[b, j], wx[b, 1, j]), a)
        kept = pointwise(lambda b, j: te.exp(faded[b, j] - new[b, j]), a)
        added = pointwise(lambda b, j: te.exp(wx[b, 1, j] - new[b, j]), a)
        return [pointwise(lambda b, j: kept[b, j] * a[b, j] + added[b, j] * wx[b, 2, j], a),
                pointwise(lambda b, j: kept[b, j] * d[b, j] + added[b, j], a), new, y]

    def numpy(self, x, a, d, m, W, v):
        u, decay = v[0], np.exp(v[1])
        r, k, v = (x @ w.T for w in W)
        a, d = a * np.exp(m), d * np.exp(m)  # in float64 no exponent is too large here
        y = sig(r) * (a + np.exp(u + k) * v) / (d + np.exp(u + k))
        m = np.maximum(m - decay, k)
        a, d = (np.exp(-decay) * old + np.exp(k) * new for old, new in ((a, v), (d, 1.0)))
        return a / np.exp(m), d / np.exp(m), m, y


class BRC(Published):
    """Bistable recurrent cell (Vecoven et al. 2021, arXiv 2006.05252)."""

    name, states, shapes = "brc", ("h",), {"W": (3, "I"), "v": (2,)}

    def step(self, x, states, p):
        (h,), wx, v = states, product(x, p["W"]), p["v"]
        a = pointwise(lambda b, j: 1.0 + te.tanh(wx[b, 0, j] + v[0, j] * h[b, j]), h)
        c = pointwise(lambda b, j: te.sigmoid(wx[b, 1, j] + v[1, j] * h[b, j]), h)
        return [pointwise(lambda b, j: c[b, j] * h[b, j] + (1.0 - c[b, j]) * te.tanh(
            wx[b, 2, j] + a[b, j] * h[b, j]), h)]

    def numpy(self, x, h, W, v):
        a, c = 1 + np.tanh(x @ W[0].T + v[0] * h), sig(x @ W[1].T + v[1] * h)
        return (c * h + (1 - c) * np.tanh(x @ W[2].T + a * h),)

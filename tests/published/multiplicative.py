"""Cells that multiply products, add them in other ways, or take several in a row."""

import numpy as np
from tvm import te

from ecornn import mean, normalized, pointwise, product
from published.base import ONE, Published, affine, lstm, lstm_formula, relu, sig, sums


class MultiplicativeLSTM(Published):
    """Its gates see a product of x and h, unit by unit (Krause et al. 2016, arXiv 1609.07959)."""

    name, states = "mlstm", ("h", "c")
    shapes = {"Wm": (1, "I"), "Rm": (1, "H"), "W": (4, "I"), "R": (4, "H"), "b": (4,)}

    def step(self, x, states, p):
        (h, c), mx, mh = states, product(x, p["Wm"], 0), product(states[0], p["Rm"], 0)
        return lstm(sums(x, pointwise(lambda b, j: mx[b, j] * mh[b, j], h, "m"), p), c)

    def numpy(self, x, h, c, Wm, Rm, W, R, b):
        return lstm_formula(*affine(x, (x @ Wm[0].T) * (h @ Rm[0].T), W, R, b), c)


class MIRNN(Published):
    """Multiplicative integration (Wu et al. 2016, arXiv 1606.06630); ``b`` are alpha, beta 1, beta 2 and the bias."""

    name, states, shapes = "mi_rnn", ("h",), ONE | {"b": (4,)}

    def step(self, x, states, p):
        (h,), wx, rh, v = states, product(x, p["W"], 0), product(states[0], p["R"], 0), p["b"]
        return [pointwise(lambda b, j: te.tanh(v[0, j] * wx[b, j] * rh[b, j] + v[1, j] * rh[b, j]
                                               + v[2, j] * wx[b, j] + v[3, j]), h)]

    def numpy(self, x, h, W, R, b):
        wx, rh = x @ W[0].T, h @ R[0].T
        return (np.tanh(b[0] * wx * rh + b[1] * rh + b[2] * wx + b[3]),)


class DeltaRNN(Published):
    """Delta-RNN (Ororbia et al. 2017, arXiv 1703.08864)."""

    name, states, shapes = "delta_rnn", ("h",), ONE | {"b": (5,)}

    def step(self, x, states, p):
        (h,), wx, rh, v = states, product(x, p["W"], 0), product(states[0], p["R"], 0), p["b"]
        z = pointwise(lambda b, j: te.tanh(v[0, j] * wx[b, j] * rh[b, j] + v[1, j] * rh[b, j] + v[2, j] * wx[b, j]
                                           + v[3, j]), h)
        r = pointwise(lambda b, j: te.sigmoid(wx[b, j] + v[4, j]), h)
        return [pointwise(lambda b, j: te.tanh((1.0 - r[b, j]) * z[b, j] + r[b, j] * h[b, j]), h)]

    def numpy(self, x, h, W, R, b):
        wx, rh = x @ W[0].T, h @ R[0].T
        z, r = np.tanh(b[0] * wx * rh + b[1] * rh + b[2] * wx + b[3]), sig(wx + b[4])
        return (np.tanh((1 - r) * z + r * h),)


class Mogrifier(Published):
    """x and h gate each other before an LSTM sees them, two rounds (Melis et al. 2020, arXiv 1909.01792); I = H."""

    name, states, square = "mogrifier", ("h", "c"), True
    shapes = {"Q": (2, "H"), "W": (4, "H"), "R": (4, "H"), "b": (4,)}

    def step(self, x, states, p):
        (h, c), qh = states, product(states[0], p["Q"], 0)
        x1 = pointwise(lambda b, j: 2.0 * te.sigmoid(qh[b, j]) * x[b, j], h, "x1")
        qx = product(x1, p["Q"], 1)
        return lstm(sums(x1, pointwise(lambda b, j: 2.0 * te.sigmoid(qx[b, j]) * h[b, j], h, "h1"), p), c)

    def numpy(self, x, h, c, Q, W, R, b):
        x = 2 * sig(h @ Q[0].T) * x
        return lstm_formula(*affine(x, 2 * sig(x @ Q[1].T) * h, W, R, b), c)


class RHN(Published):
    """Recurrent highway network, three layers deep, coupled (Zilly et al. 2017, arXiv 1607.03474)."""

    name, states, shapes = "rhn", ("h",), {"W": (2, "I"), "R": (6, "H"), "b": (6,)}

    def step(self, x, states, p):
        (s,), wx, v = states, product(x, p["W"]), p["b"]
        for depth in range(3):
            rs = product(s, p["R"], [2 * depth, 2 * depth + 1])
            def a(b, g, j, rs=rs, depth=depth):
                found = rs[b, g, j] + v[2 * depth + g, j]
                return found + wx[b, g, j] if depth == 0 else found
            t = pointwise(lambda b, j, a=a: te.sigmoid(a(b, 1, j)), states[0])
            s = pointwise(lambda b, j, a=a, t=t, s=s: te.tanh(a(b, 0, j)) * t[b, j] + s[b, j] * (1.0 - t[b, j]), s)
        return [s]

    def numpy(self, x, h, W, R, b):
        for depth in range(3):
            n, t = (h @ R[n].T + b[n] + (x @ W[n].T if depth == 0 else 0) for n in (2 * depth, 2 * depth + 1))
            h = np.tanh(n) * sig(t) + h * (1 - sig(t))
        return (h,)


class ATR(Published):
    """Twin gates of a sum and a difference (Zhang et al. 2018, arXiv 1810.12546)."""

    name, states, shapes = "atr", ("h",), {"W": (1, "I"), "R": (1, "H")}

    def step(self, x, states, p):
        (h,), wx, rh = states, product(x, p["W"], 0), product(states[0], p["R"], 0)
        return [pointwise(lambda b, j: te.sigmoid(wx[b, j] + rh[b, j]) * wx[b, j]
                          + te.sigmoid(wx[b, j] - rh[b, j]) * h[b, j], h)]

    def numpy(self, x, h, W, R):
        wx, rh = x @ W[0].T, h @ R[0].T
        return (sig(wx + rh) * wx + sig(wx - rh) * h,)


class FastRNN(Published):
    """A weighted residual connection (Kusupati et al. 2018, arXiv 1901.02358); ``b`` are the bias and two weights."""

    name, states, shapes = "fast_rnn", ("h",), ONE | {"b": (3,)}

    def step(self, x, states, p):
        (h,), wx, rh, v = states, product(x, p["W"], 0), product(states[0], p["R"], 0), p["b"]
        return [pointwise(lambda b, j: te.sigmoid(v[1, j]) * te.tanh(wx[b, j] + rh[b, j] + v[0, j])
                          + te.sigmoid(v[2, j]) * h[b, j], h)]

    def numpy(self, x, h, W, R, b):
        return (sig(b[1]) * np.tanh(x @ W[0].T + h @ R[0].T + b[0]) + sig(b[2]) * h,)


class FastGRNN(Published):
    """A gate and a candidate of the same products (Kusupati et al. 2018); ``b`` are both biases, zeta and nu."""

    name, states, shapes = "fast_grnn", ("h",), ONE | {"b": (4,)}

    def step(self, x, states, p):
        (h,), wx, rh, v = states, product(x, p["W"], 0), product(states[0], p["R"], 0), p["b"]
        z = pointwise(lambda b, j: te.sigmoid(wx[b, j] + rh[b, j] + v[0, j]), h)
        new = pointwise(lambda b, j: te.tanh(wx[b, j] + rh[b, j] + v[1, j]), h)
        return [pointwise(lambda b, j: (te.sigmoid(v[2, j]) * (1.0 - z[b, j]) + te.sigmoid(v[3, j])) * new[b, j]
                          + z[b, j] * h[b, j], h)]

    def numpy(self, x, h, W, R, b):
        a = x @ W[0].T + h @ R[0].T
        z = sig(a + b[0])
        return ((sig(b[2]) * (1 - z) + sig(b[3])) * np.tanh(a + b[1]) + z * h,)


class NormalizedRNN(Published):
    """Layer normalization of the sum of both products (Ba et al. 2016, arXiv 1607.06450)."""

    name, states, shapes = "ln_rnn", ("h",), ONE | {"b": (2,)}

    def step(self, x, states, p):
        (h,), wx, rh, v = states, product(x, p["W"], 0), product(states[0], p["R"], 0), p["b"]
        n = normalized(pointwise(lambda b, j: wx[b, j] + rh[b, j], h))
        return [pointwise(lambda b, j: te.tanh(v[0, j] * n[b, j] + v[1, j]), h)]

    def numpy(self, x, h, W, R, b):
        a = x @ W[0].T + h @ R[0].T
        a = (a - a.mean(1, keepdims=True)) / np.sqrt(a.var(1, keepdims=True) + 1e-5)
        return (np.tanh(b[0] * a + b[1]),)


class RMSNormRNN(Published):
    """Normalized by the root of the mean square alone (Zhang and Sennrich 2019, arXiv 1910.07467)."""

    name, states, shapes = "rms_rnn", ("h",), ONE | {"b": (2,)}

    def step(self, x, states, p):
        (h,), wx, rh, v = states, product(x, p["W"], 0), product(states[0], p["R"], 0), p["b"]
        a = pointwise(lambda b, j: wx[b, j] + rh[b, j], h)
        square = mean(pointwise(lambda b, j: a[b, j] * a[b, j], h))
        return [pointwise(lambda b, j: te.tanh(v[0, j] * a[b, j] * te.rsqrt(square[b] + 1e-5) + v[1, j]), h)]

    def numpy(self, x, h, W, R, b):
        a = x @ W[0].T + h @ R[0].T
        return (np.tanh(b[0] * a / np.sqrt(np.square(a).mean(1, keepdims=True) + 1e-5) + b[1]),)


class HigherOrderRNN(Published):
    """Sees its last three states (Soltani and Jiang 2016, arXiv 1605.00064)."""

    name, states, shapes = "hornn", ("h", "h1", "h2"), ONE | {"R": (3, "H")}

    def step(self, x, states, p):
        h, h1, _ = states
        wx, v = product(x, p["W"], 0), p["b"]
        a, b1, c = (product(s, p["R"], n) for n, s in enumerate(states))
        return [pointwise(lambda b, j: relu(wx[b, j] + a[b, j] + b1[b, j] + c[b, j] + v[0, j]), h), h, h1]

    def numpy(self, x, h, h1, h2, W, R, b):
        a = x @ W[0].T + sum(state @ r.T for state, r in zip((h, h1, h2), R, strict=True)) + b[0]
        return np.maximum(a, 0), h, h1

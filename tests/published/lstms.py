"""LSTMs with less, more or other gates."""

import numpy as np
from tvm import te, tirx

from ecornn import pointwise, product
from published.base import FOUR, THREE, TWO, Published, affine, lstm, lstm_formula, sig, sums


class NoForgetLSTM(Published):
    """The first one, without a forget gate (Hochreiter and Schmidhuber 1997)."""

    name, states, shapes = "lstm_1997", ("h", "c"), THREE

    def step(self, x, states, p):
        (h, c), a = states, sums(x, states[0], p)
        new = pointwise(lambda b, j: c[b, j] + te.sigmoid(a(b, 0, j)) * te.tanh(a(b, 1, j)), c)
        return [pointwise(lambda b, j: te.sigmoid(a(b, 2, j)) * te.tanh(new[b, j]), h), new]

    def numpy(self, x, h, c, W, R, b):
        i, g, o = affine(x, h, W, R, b)
        c = c + sig(i) * np.tanh(g)
        return sig(o) * np.tanh(c), c


class PeepholeLSTM(Published):
    """Gates that see the cell (Gers and Schmidhuber 2000)."""

    name, states, shapes = "lstm_peephole", ("h", "c"), FOUR | {"v": (3,)}

    def step(self, x, states, p):
        (h, c), a, v = states, sums(x, states[0], p), p["v"]
        new = pointwise(lambda b, j: te.sigmoid(a(b, 1, j) + v[1, j] * c[b, j]) * c[b, j]
                        + te.sigmoid(a(b, 0, j) + v[0, j] * c[b, j]) * te.tanh(a(b, 2, j)), c)
        return [pointwise(lambda b, j: te.sigmoid(a(b, 3, j) + v[2, j] * new[b, j]) * te.tanh(new[b, j]), h), new]

    def numpy(self, x, h, c, W, R, b, v):
        i, f, g, o = affine(x, h, W, R, b)
        c = sig(f + v[1] * c) * c + sig(i + v[0] * c) * np.tanh(g)
        return sig(o + v[2] * c) * np.tanh(c), c


class CoupledLSTM(Published):
    """CIFG: the forget gate is what the input gate leaves (Greff et al. 2017, arXiv 1503.04069)."""

    name, states, shapes = "lstm_cifg", ("h", "c"), THREE

    def step(self, x, states, p):
        (h, c), a = states, sums(x, states[0], p)
        i = pointwise(lambda b, j: te.sigmoid(a(b, 0, j)), h)
        new = pointwise(lambda b, j: (1.0 - i[b, j]) * c[b, j] + i[b, j] * te.tanh(a(b, 1, j)), c)
        return [pointwise(lambda b, j: te.sigmoid(a(b, 2, j)) * te.tanh(new[b, j]), h), new]

    def numpy(self, x, h, c, W, R, b):
        i, g, o = affine(x, h, W, R, b)
        c = (1 - sig(i)) * c + sig(i) * np.tanh(g)
        return sig(o) * np.tanh(c), c


class FullGateLSTM(Published):
    """Full gate recurrence: the gates of the step before are inputs of the gates (Greff et al. 2017)."""

    name, states, shapes = "lstm_fgr", ("h", "c", "i", "f", "o"), FOUR | {"Q": (9, "H")}

    def step(self, x, states, p):
        (h, c, *old), a, Q = states, sums(x, states[0], p), p["Q"]
        gates = []
        for n, place in enumerate((0, 1, 3)):
            of_i, of_f, of_o = (product(gate, Q, 3 * n + m) for m, gate in enumerate(old))
            gates.append(pointwise(lambda b, j, place=place, q=(of_i, of_f, of_o): te.sigmoid(
                a(b, place, j) + q[0][b, j] + q[1][b, j] + q[2][b, j]), h))
        i, f, o = gates
        new = pointwise(lambda b, j: f[b, j] * c[b, j] + i[b, j] * te.tanh(a(b, 2, j)), c)
        return [pointwise(lambda b, j: o[b, j] * te.tanh(new[b, j]), h), new, *gates]

    def numpy(self, x, h, c, i, f, o, W, R, b, Q):
        a, old = affine(x, h, W, R, b), (i, f, o)
        i, f, o = (sig(a[place] + sum(gate @ q.T for gate, q in zip(old, Q[3 * n:3 * n + 3], strict=True)))
                   for n, place in enumerate((0, 1, 3)))
        c = f * c + i * np.tanh(a[2])
        return o * np.tanh(c), c, i, f, o


class JANET(Published):
    """The forget gate alone (van der Westhuizen and Lasenby 2018, arXiv 1804.04849), beta = 1."""

    name, states, shapes = "janet", ("c",), TWO

    def step(self, x, states, p):
        (c,), a = states, sums(x, states[0], p)
        return [pointwise(lambda b, j: te.sigmoid(a(b, 0, j)) * c[b, j]
                          + (1.0 - te.sigmoid(a(b, 0, j) - 1.0)) * te.tanh(a(b, 1, j)), c)]

    def numpy(self, x, c, W, R, b):
        f, g = affine(x, c, W, R, b)
        return (sig(f) * c + (1 - sig(f - 1)) * np.tanh(g),)


class SlimLSTM2(Published):
    """LSTM2: gates of the state alone (Salem 2018, arXiv 1812.11391)."""

    name, states, shapes = "lstm_slim2", ("h", "c"), {"W": (1, "I"), "R": (4, "H"), "b": (1,)}

    def step(self, x, states, p):
        (h, c), wx, rh, v = states, product(x, p["W"], 0), product(states[0], p["R"]), p["b"]
        new = pointwise(lambda b, j: te.sigmoid(rh[b, 1, j]) * c[b, j] + te.sigmoid(rh[b, 0, j])
                        * te.tanh(wx[b, j] + rh[b, 2, j] + v[0, j]), c)
        return [pointwise(lambda b, j: te.sigmoid(rh[b, 3, j]) * te.tanh(new[b, j]), h), new]

    def numpy(self, x, h, c, W, R, b):
        i, f, g, o = (h @ r.T for r in R)
        c = sig(f) * c + sig(i) * np.tanh(x @ W[0].T + g + b[0])
        return sig(o) * np.tanh(c), c


class SlimLSTM3(Published):
    """LSTM3: gates that are only biases (Salem 2018, arXiv 1812.11391)."""

    name, states, shapes = "lstm_slim3", ("h", "c"), {"W": (1, "I"), "R": (1, "H"), "b": (4,)}

    def step(self, x, states, p):
        (h, c), wx, rh, v = states, product(x, p["W"], 0), product(states[0], p["R"], 0), p["b"]
        new = pointwise(lambda b, j: te.sigmoid(v[1, j]) * c[b, j] + te.sigmoid(v[0, j])
                        * te.tanh(wx[b, j] + rh[b, j] + v[2, j]), c)
        return [pointwise(lambda b, j: te.sigmoid(v[3, j]) * te.tanh(new[b, j]), h), new]

    def numpy(self, x, h, c, W, R, b):
        i, f, g, o = b
        c = sig(f) * c + sig(i) * np.tanh(x @ W[0].T + h @ R[0].T + g)
        return sig(o) * np.tanh(c), c


class IndyLSTM(Published):
    """Each unit sees its own h alone (Gonnet and Deselaers 2019, arXiv 1903.08023)."""

    name, states, shapes = "indylstm", ("h", "c"), {"W": (4, "I"), "u": (4,), "b": (4,)}

    def step(self, x, states, p):
        (h, c), wx, u, v = states, product(x, p["W"]), p["u"], p["b"]
        return lstm(lambda b, g, j: wx[b, g, j] + u[g, j] * h[b, j] + v[g, j], c)

    def numpy(self, x, h, c, W, u, b):
        return lstm_formula(*(x @ w.T + u * h + b for w, u, b in zip(W, u, b, strict=True)), c)


class SubLSTM(Published):
    """Subtractive gates, as inhibition has them (Costa et al. 2017, arXiv 1711.02448)."""

    name, states, shapes = "sublstm", ("h", "c"), FOUR

    def step(self, x, states, p):
        (h, c), a = states, sums(x, states[0], p)
        new = pointwise(lambda b, j: te.sigmoid(a(b, 1, j)) * c[b, j] + te.sigmoid(a(b, 2, j))
                        - te.sigmoid(a(b, 0, j)), c)
        return [pointwise(lambda b, j: te.sigmoid(new[b, j]) - te.sigmoid(a(b, 3, j)), h), new]

    def numpy(self, x, h, c, W, R, b):
        i, f, z, o = (sig(v) for v in affine(x, h, W, R, b))
        c = f * c + z - i
        return sig(c) - o, c


class NestedLSTM(Published):
    """An LSTM for a cell (Moniz and Krueger 2018, arXiv 1801.10308)."""

    name, states, shapes = "lstm_nested", ("h", "c", "d"), FOUR | {"P": (4, "H"), "Q": (4, "H"), "e": (4,)}

    def step(self, x, states, p):
        (h, c, d), a, e = states, sums(x, states[0], p), p["e"]
        old = pointwise(lambda b, j: te.sigmoid(a(b, 1, j)) * c[b, j], h, "old")
        inner = pointwise(lambda b, j: te.sigmoid(a(b, 0, j)) * te.tanh(a(b, 2, j)), h, "inner")
        pi, qo = product(inner, p["P"]), product(old, p["Q"])
        new, deep = lstm(lambda b, g, j: pi[b, g, j] + qo[b, g, j] + e[g, j], d)
        return [pointwise(lambda b, j: te.sigmoid(a(b, 3, j)) * te.tanh(new[b, j]), h), new, deep]

    def numpy(self, x, h, c, d, W, R, b, P, Q, e):
        i, f, g, o = affine(x, h, W, R, b)
        c, d = lstm_formula(*affine(sig(i) * np.tanh(g), sig(f) * c, P, Q, e), d)
        return sig(o) * np.tanh(c), c, d


class PhasedLSTM(Published):
    """Units that open in turns (Neil et al. 2016, arXiv 1610.09513); ``v``: period, shift, share; time is a state."""

    name, states, shapes, ranges = "lstm_phased", ("h", "c", "t"), FOUR | {"v": (3,)}, {"v": (0.4, 5.0)}
    nonnegative = ("t",)

    def step(self, x, states, p):
        (h, c, t), a, v = states, sums(x, states[0], p), p["v"]
        turns = pointwise(lambda b, j: (t[b, j] - v[1, j]) / v[0, j], t)
        phase = pointwise(lambda b, j: turns[b, j] - te.floor(turns[b, j]), t)
        share = pointwise(lambda b, j: v[2, j] * 0.1, t)
        k = pointwise(lambda b, j: tirx.Select(
            phase[b, j] < share[b, j] * 0.5, 2.0 * phase[b, j] / share[b, j],
            tirx.Select(phase[b, j] < share[b, j], 2.0 - 2.0 * phase[b, j] / share[b, j], 0.1 * phase[b, j])), t)
        out, full = lstm(a, c)
        new = pointwise(lambda b, j: k[b, j] * full[b, j] + (1.0 - k[b, j]) * c[b, j], c)
        return [pointwise(lambda b, j: k[b, j] * out[b, j] + (1.0 - k[b, j]) * h[b, j], h), new,
                pointwise(lambda b, j: t[b, j] + 1.0, t)]

    def numpy(self, x, h, c, t, W, R, b, v):
        period, shift, share = v
        phase, share = np.mod((t - shift) / period, 1.0), share / 10
        k = np.where(phase < share / 2, 2 * phase / share, np.where(phase < share, 2 - 2 * phase / share, 0.1 * phase))
        out, full = lstm_formula(*affine(x, h, W, R, b), c)
        return k * out + (1 - k) * h, k * full + (1 - k) * c, t + 1

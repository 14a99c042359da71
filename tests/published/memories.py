"""Cells that keep long memories beside what they show, are updated in turns, or have fixed weights."""

import numpy as np
from tvm import te, tirx

from ecornn import pointwise, product
from published.base import ONE, Published, affine, relu, sig, sums


class RAN(Published):
    """Recurrent additive network (Lee et al. 2017, arXiv 1705.07393)."""

    name, states, shapes = "ran", ("h", "c"), {"W": (3, "I"), "R": (2, "H"), "b": (2,)}

    def step(self, x, states, p):
        (h, c), wx, rh, v = states, product(x, p["W"]), product(states[0], p["R"]), p["b"]
        new = pointwise(lambda b, j: te.sigmoid(wx[b, 0, j] + rh[b, 0, j] + v[0, j]) * wx[b, 2, j]
                        + te.sigmoid(wx[b, 1, j] + rh[b, 1, j] + v[1, j]) * c[b, j], c)
        return [pointwise(lambda b, j: te.tanh(new[b, j]), h), new]

    def numpy(self, x, h, c, W, R, b):
        i, f = (sig(x @ W[n].T + h @ R[n].T + b[n]) for n in (0, 1))
        c = i * (x @ W[2].T) + f * c
        return np.tanh(c), c


class CFN(Published):
    """Chaos-free network (Laurent and von Brecht 2017, arXiv 1612.06212)."""

    name, states, shapes = "cfn", ("h",), {"W": (3, "I"), "R": (2, "H"), "b": (2,)}

    def step(self, x, states, p):
        (h,), wx, rh, v = states, product(x, p["W"]), product(states[0], p["R"]), p["b"]
        return [pointwise(lambda b, j: te.sigmoid(wx[b, 0, j] + rh[b, 0, j] + v[0, j]) * te.tanh(h[b, j])
                          + te.sigmoid(wx[b, 1, j] + rh[b, 1, j] + v[1, j]) * te.tanh(wx[b, 2, j]), h)]

    def numpy(self, x, h, W, R, b):
        theta, eta = (sig(x @ W[n].T + h @ R[n].T + b[n]) for n in (0, 1))
        return (theta * np.tanh(h) + eta * np.tanh(x @ W[2].T),)


class SCRN(Published):
    """Structurally constrained: slow units beside fast ones (Mikolov et al. 2015, arXiv 1412.7753), alpha = 0.95."""

    name, states, shapes = "scrn", ("h", "s"), {"W": (2, "I"), "R": (2, "H")}

    def step(self, x, states, p):
        (h, s), wx, R = states, product(x, p["W"]), p["R"]
        slow = pointwise(lambda b, j: 0.05 * wx[b, 1, j] + 0.95 * s[b, j], s, "slow")
        ps, rh = product(slow, R, 1), product(h, R, 0)
        return [pointwise(lambda b, j: te.sigmoid(ps[b, j] + wx[b, 0, j] + rh[b, j]), h), slow]

    def numpy(self, x, h, s, W, R):
        slow = 0.05 * (x @ W[1].T) + 0.95 * s
        return sig(slow @ R[1].T + x @ W[0].T + h @ R[0].T), slow


class StatisticalUnit(Published):
    """SRU of averages at three scales (Oliva et al. 2017, arXiv 1703.00381): 0, 0.5 and 0.9."""

    name, states, output = "statistical_unit", ("o", "m0", "m1", "m2"), "o"
    shapes = {"W": (1, "I"), "R": (7, "H"), "b": (3,)}

    def step(self, x, states, p):
        (o, *old), wx, R, v = states, product(x, p["W"], 0), p["R"], p["b"]
        r0, r1, r2 = (product(m, R, n) for n, m in enumerate(old))
        r = pointwise(lambda b, j: relu(r0[b, j] + r1[b, j] + r2[b, j] + v[0, j]), o, "r")
        rr = product(r, R, 3)
        phi = pointwise(lambda b, j: relu(rr[b, j] + wx[b, j] + v[1, j]), o, "phi")
        new = [pointwise(lambda b, j, m=m, a=a: a * m[b, j] + (1.0 - a) * phi[b, j], o, "m")
               for m, a in zip(old, (0.0, 0.5, 0.9), strict=True)]
        o0, o1, o2 = (product(m, R, 4 + n) for n, m in enumerate(new))
        return [pointwise(lambda b, j: relu(o0[b, j] + o1[b, j] + o2[b, j] + v[2, j]), o), *new]

    def numpy(self, x, o, m0, m1, m2, W, R, b):
        old = m0, m1, m2
        r = np.maximum(sum(m @ w.T for m, w in zip(old, R[:3], strict=True)) + b[0], 0)
        phi = np.maximum(r @ R[3].T + x @ W[0].T + b[1], 0)
        new = [a * m + (1 - a) * phi for m, a in zip(old, (0.0, 0.5, 0.9), strict=True)]
        return np.maximum(sum(m @ w.T for m, w in zip(new, R[4:], strict=True)) + b[2], 0), *new


class EchoState(Published):
    """Leaky units of an echo state network (Jaeger et al. 2007), a = 0.3."""

    name, states, shapes = "echo_state", ("h",), ONE

    def step(self, x, states, p):
        (h,), a = states, sums(x, states[0], p)
        return [pointwise(lambda b, j: 0.7 * h[b, j] + 0.3 * te.tanh(a(b, 0, j)), h)]

    def numpy(self, x, h, W, R, b):
        return (0.7 * h + 0.3 * np.tanh(affine(x, h, W, R, b)[0]),)


class Clockwork(Published):
    """Units with periods of their own (Koutnik et al. 2014, arXiv 1402.3511): ``v`` is log2 of the period."""

    name, states, nonnegative = "clockwork", ("h", "t"), ("t",)
    shapes, ranges = ONE | {"v": (1,)}, {"v": (0.0, 3.0)}

    def step(self, x, states, p):
        (h, t), a, v = states, sums(x, states[0], p), p["v"]
        period = pointwise(lambda b, j: tirx.exp2(te.round(v[0, j])), t)
        rest = pointwise(lambda b, j: te.floor(t[b, j]) - period[b, j] * te.floor(te.floor(t[b, j]) / period[b, j]), t)
        return [pointwise(lambda b, j: tirx.Select(rest[b, j] < 0.5, te.tanh(a(b, 0, j)), h[b, j]), h),
                pointwise(lambda b, j: t[b, j] + 1.0, t)]

    def numpy(self, x, h, t, W, R, b, v):
        return np.where(np.mod(np.floor(t), 2 ** np.round(v[0])) == 0, np.tanh(affine(x, h, W, R, b)[0]), h), t + 1


class SkipRNN(Published):
    """Learns which steps to leave out (Campos et al. 2018, arXiv 1708.06834), of tanh units, by ``u``."""

    name, states, nonnegative, shapes = "skip_rnn", ("h", "u"), ("u",), ONE | {"v": (2,)}

    def step(self, x, states, p):
        (h, u), a, v = states, sums(x, states[0], p), p["v"]
        on = pointwise(lambda b, j: te.round(u[b, j]), u)
        new = pointwise(lambda b, j: on[b, j] * te.tanh(a(b, 0, j)) + (1.0 - on[b, j]) * h[b, j], h)
        weighted, k = pointwise(lambda b, j: v[0, j] * new[b, j], h), te.reduce_axis((0, h.shape[1]), "k")
        total = te.compute((h.shape[0],), lambda b: te.sum(weighted[b, k], axis=k), name="total")
        more = pointwise(lambda b, j: te.sigmoid(total[b] + v[1, j]), u)
        return [new, pointwise(lambda b, j: on[b, j] * more[b, j] + (1.0 - on[b, j]) * (
            u[b, j] + tirx.min(more[b, j], 1.0 - u[b, j])), u)]

    def numpy(self, x, h, u, W, R, b, v):
        on = np.round(u)
        h = np.where(on == 1, np.tanh(affine(x, h, W, R, b)[0]), h)
        more = sig((h @ v[0])[:, None] + v[1])
        return h, np.where(on == 1, more, u + np.minimum(more, 1 - u))


class LMU(Published):
    """Legendre memory (Voelker et al. 2019): ``A`` and ``v`` are its system; a value of each unit enters it."""

    name, states = "lmu", ("h", "m")
    shapes = {"W": (1, "I"), "E": (1, "I"), "Q": (2, "H"), "A": (1, "H"), "R": (2, "H"), "v": (1,)}

    def step(self, x, states, p):
        (h, m), wx, ex, v = states, product(x, p["W"], 0), product(x, p["E"], 0), p["v"]
        qh, qm, am, rh = product(h, p["Q"], 0), product(m, p["Q"], 1), product(m, p["A"], 0), product(h, p["R"], 0)
        new = pointwise(lambda b, j: am[b, j] + v[0, j] * (ex[b, j] + qh[b, j] + qm[b, j]), m, "memory")
        rm = product(new, p["R"], 1)
        return [pointwise(lambda b, j: te.tanh(wx[b, j] + rh[b, j] + rm[b, j]), h), new]

    def numpy(self, x, h, m, W, E, Q, A, R, v):
        m = m @ A[0].T + v[0] * (x @ E[0].T + h @ Q[0].T + m @ Q[1].T)
        return np.tanh(x @ W[0].T + h @ R[0].T + m @ R[1].T), m

"""Cells with a softmax over their units."""

from __future__ import annotations

import numpy as np

from ecornn import pointwise, product, softmax
from published.base import Published, affine, sig, sums


def soft(z):
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


class ONLSTM(Published):
    """Ordered neurons (Shen et al. 2019, arXiv 1810.09536), with chunks of one unit: master gates are cumulative
    softmaxes, products of a softmax with a triangle of ones, which is the parameter ``T``: gate 0 adds up what is
    before a unit and itself, gate 1 itself and what is behind."""

    name, states = "on_lstm", ("h", "c")
    shapes = {"W": (6, "I"), "R": (6, "H"), "b": (6,), "T": (2, "H")}
    fixed = {"T": lambda hidden: np.stack([np.tri(hidden), np.tri(hidden).T])}

    def step(self, x, states, p):
        from tvm import te

        (h, c), a = states, sums(x, states[0], p)
        forget = product(softmax(pointwise(lambda b, j: a(b, 4, j), h, "f_scores")), p["T"], 0)
        enter = product(softmax(pointwise(lambda b, j: a(b, 5, j), h, "i_scores")), p["T"], 1)

        def gate(g, name):
            return pointwise(lambda b, j: te.sigmoid(a(b, g, j)), h, name)

        f, i, o = gate(0, "f"), gate(1, "i"), gate(2, "o")
        both = pointwise(lambda b, j: forget[b, j] * enter[b, j], h, "overlap")
        new = pointwise(lambda b, j: (f[b, j] * both[b, j] + forget[b, j] - both[b, j]) * c[b, j]
                        + (i[b, j] * both[b, j] + enter[b, j] - both[b, j]) * te.tanh(a(b, 3, j)), c, "new")
        return [pointwise(lambda b, j: o[b, j] * te.tanh(new[b, j]), h), new]

    @staticmethod
    def numpy(x, s, p):
        f, i, o, new, forget, enter = affine(x, s["h"], p)
        forget = np.cumsum(soft(forget), axis=1)
        enter = 1 - np.cumsum(soft(enter), axis=1) + soft(enter)
        both = forget * enter
        c = (sig(f) * both + forget - both) * s["c"] + (sig(i) * both + enter - both) * np.tanh(new)
        return sig(o) * np.tanh(c), c


class StateRegularizedRNN(Published):
    """Attention over as many learnt states as there are units, whose mixture is the new state (Wang and Niepert 2019,
    arXiv 1901.08817): ``S`` has them in its rows (gate 0) and in its columns (gate 1)."""

    name, states, shapes = "sr_rnn", ("h",), {"W": (1, "I"), "R": (1, "H"), "b": (1,), "S": (2, "H")}

    def step(self, x, states, p):
        from tvm import te

        (h,), a = states, sums(x, states[0], p)
        u = pointwise(lambda b, j: te.tanh(a(b, 0, j)), h, "u")
        return [product(softmax(product(u, p["S"], 0), "weights"), p["S"], 1)]

    @staticmethod
    def numpy(x, s, p):
        (a,) = affine(x, s["h"], p)
        return (soft(np.tanh(a) @ p["S"][0].T) @ p["S"][1].T,)

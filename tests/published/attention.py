"""Cells with a softmax over their units, or over what is less, or that compare and normalize groups of them."""

import numpy as np
from tvm import te

from ecornn import pointwise, product, softmax
from published.base import Published, affine, relu, sig, sums
from published.heads import WithHeads, each_head


def soft(z):
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


class ONLSTM(Published):
    """Ordered neurons (Shen et al. 2019, arXiv 1810.09536), with chunks of one unit: master gates are cumulative
    softmaxes, products of a softmax with a triangle of ones, which is the parameter ``T``: gate 0 adds up what is
    before a unit and itself, gate 1 itself and what is behind."""

    name, states, shapes = "on_lstm", ("h", "c"), {"W": (6, "I"), "R": (6, "H"), "b": (6,), "T": (2, "H")}
    fixed = {"T": lambda hidden: np.stack([np.tri(hidden), np.tri(hidden).T])}

    def step(self, x, states, p):
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

    def numpy(self, x, h, c, W, R, b, T):
        f, i, o, new, forget, enter = affine(x, h, W, R, b)
        forget = np.cumsum(soft(forget), axis=1)
        enter = 1 - np.cumsum(soft(enter), axis=1) + soft(enter)
        both = forget * enter
        c = (sig(f) * both + forget - both) * c + (sig(i) * both + enter - both) * np.tanh(new)
        return sig(o) * np.tanh(c), c


class ONLSTMChunks(Published):
    """Ordered neurons, with chunks of four units that share master gates (Shen et al. 2019, arXiv 1810.09536): these
    are softmaxes of as many values as there are chunks, from matrices of as many rows, and the first values of biases 4
    and 5. The triangle ``T`` adds them up and gives each unit its chunk's."""

    name, states, hidden, chunk = "on_lstm_chunks", ("h", "c"), 12, 4
    shapes = {"W": (4, "I"), "R": (4, "H"), "b": (6,)}
    fixed = {"T": lambda hidden: np.stack([each.repeat(4, axis=0) for each in (
        np.tri(hidden // 4), np.tri(hidden // 4).T)])}

    def parameters(self, input, hidden):
        chunks = hidden // self.chunk
        return super().parameters(input, hidden) | {
            "M": (2, chunks, input), "N": (2, chunks, hidden), "T": (2, hidden, chunks)}

    def step(self, x, states, p):
        (h, c), wx, rh, b = states, product(x, p["W"]), product(states[0], p["R"]), p["b"]
        mx, mh = (product(v, p[n]) for v, n in ((x, "M"), (h, "N")))
        def master(g, name):
            scores = te.compute((mx.shape[0], mx.shape[2]), lambda i, j: mx[i, g, j] + mh[i, g, j] + b[4 + g, j],
                                name=name)
            return product(softmax(scores), p["T"], g)

        def gate(g, activation, name):
            return pointwise(lambda i, j: activation(wx[i, g, j] + rh[i, g, j] + b[g, j]), h, name)
        forget, enter = master(0, "f_scores"), master(1, "i_scores")
        f, i, o, z = (gate(g, te.tanh if g == 3 else te.sigmoid, "fioz"[g]) for g in range(4))
        both = pointwise(lambda i, j: forget[i, j] * enter[i, j], h, "overlap")
        new = pointwise(lambda b, j: (f[b, j] * both[b, j] + forget[b, j] - both[b, j]) * c[b, j]
                        + (i[b, j] * both[b, j] + enter[b, j] - both[b, j]) * z[b, j], c, "new")
        return [pointwise(lambda i, j: o[i, j] * te.tanh(new[i, j]), h), new]

    def numpy(self, x, h, c, W, R, b, M, N, T):
        f, i, o, z = (x @ W[g].T + h @ R[g].T + b[g] for g in range(4))
        forget, enter = (soft(x @ m.T + h @ n.T + v[:len(m)]) for m, n, v in zip(M, N, b[4:], strict=True))
        size = f.shape[1] // forget.shape[1]
        forget = np.repeat(np.cumsum(forget, axis=1), size, axis=1)
        enter = np.repeat(1 - np.cumsum(enter, axis=1) + enter, size, axis=1)
        both = forget * enter
        c = (sig(f) * both + forget - both) * c + (sig(i) * both + enter - both) * np.tanh(z)
        return sig(o) * np.tanh(c), c


class EntNet(WithHeads):
    """Recurrent entity network (Henaff et al. 2017, arXiv 1612.03969): slots that are compared with what was read, each
    by one gate of its own, changed, and scaled to length one. Of the vectors 0 has the keys, 1 their products, 2 the
    slopes of PReLU; the paper's matrices are the same for all slots."""

    name, states, heads = "ent_net", ("h",), 4
    shapes, blocks = {"W": (2, "I"), "v": (3,)}, {"U": 1}

    def step(self, x, states, p):
        (h,), read, v = states, product(x, p["W"]), p["v"]
        own, k, n = int(h.shape[1]) // self.heads, te.reduce_axis((0, int(h.shape[1]) // self.heads), "k"), self.heads
        near = te.compute((h.shape[0], n), lambda b, s: te.sum(
            read[b, 0, s * own + k] * (h[b, s * own + k] + v[0, s * own + k]), axis=k), name="near")
        uh = product(h, p["U"], 0, heads=n)
        seen = pointwise(lambda b, j: uh[b, j] + v[1, j] + read[b, 1, j], h, "seen")
        new = pointwise(lambda b, j: h[b, j] + te.sigmoid(near[b, j // own]) * (
            relu(seen[b, j]) - v[2, j] * relu(0.0 - seen[b, j])), h, "changed")
        square = te.compute(near.shape, lambda b, s: te.sum(
            new[b, s * own + k] * new[b, s * own + k], axis=k), name="square")
        return [pointwise(lambda b, j: new[b, j] / te.sqrt(square[b, j // own]), h)]

    def numpy(self, x, h, W, v, U):
        read, given = (x @ w.T for w in W)
        slots = (-1, self.heads, read.shape[1] // self.heads)
        near = (read * (h + v[0])).reshape(slots).sum(axis=2, keepdims=True)
        new = each_head(h, U)[0] + v[1] + given
        new = np.maximum(new, 0.0) + v[2] * np.minimum(new, 0.0)
        slot = h.reshape(slots) + sig(near) * new.reshape(slots)
        return ((slot / np.sqrt(np.square(slot).sum(axis=2, keepdims=True))).reshape(h.shape),)


class StateRegularizedRNN(Published):
    """Attention over learnt states, the rows and columns of S (Wang and Niepert 2019, arXiv 1901.08817)."""

    name, states, shapes = "sr_rnn", ("h",), {"W": (1, "I"), "R": (1, "H"), "b": (1,), "S": (2, "H")}

    def step(self, x, states, p):
        (h,), a = states, sums(x, states[0], p)
        u = pointwise(lambda b, j: te.tanh(a(b, 0, j)), h, "u")
        return [product(softmax(product(u, p["S"], 0), "weights"), p["S"], 1)]

    def numpy(self, x, h, W, R, b, S):
        (a,) = affine(x, h, W, R, b)
        return (soft(np.tanh(a) @ S[0].T) @ S[1].T,)

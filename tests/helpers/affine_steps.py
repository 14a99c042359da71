"""Random steps whose states depend on their past through affine maps; and the same steps with a nonlinear operator."""

from typing import Any

import numpy as np
from tvm import te, tirx

from ecornn.cells import Cell, pointwise, product

TWISTS = ("tanh", "square", "relu", "floor", "condition", "quotient")


class RandomAffine(Cell):
    """One to four states on one or two levels: the coefficients of those on the second level read states of the first.
    ``twist``: the operator, one of ``TWISTS``, that makes the first state's own past nonlinear."""

    def __init__(self, seed: int, twist: str = "") -> None:
        rng = np.random.default_rng([seed, 54])
        count, self.seed, self.twist = int(rng.integers(1, 5)), seed, twist
        self.name, self.states = f"affine_{seed}{twist}", tuple("abcd"[:count])
        self.second = int(rng.integers(1, count + 1))  # the number of states on the first level
        self.gates, self.vectors = int(rng.integers(1, 5)), int(rng.integers(1, 3))

    def __repr__(self) -> str:
        return f"RandomAffine({self.seed}, {self.twist!r})"

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"W": (self.gates, hidden, input), "v": (self.vectors, hidden)}

    def step(self, x: Any, states: Any, p: Any) -> list[Any]:
        rng, wx, like = np.random.default_rng([self.seed, 5454]), product(x, p["W"]), states[0]
        solved: list[Any] = []  # tensors that coefficients may read beside x and parameters
        one = tirx.const(1.0, "float32")

        def coefficient(b: Any, j: Any) -> Any:
            kind = rng.integers(5)
            if kind == 0 and solved:
                return te.tanh(solved[rng.integers(len(solved))][b, j])
            if kind == 1:
                return te.sigmoid(p["v"][int(rng.integers(self.vectors)), j])
            if kind == 2:
                return tirx.const(float(rng.integers(-64, 65)) / 64, "float32")
            gate = te.sigmoid(wx[b, int(rng.integers(self.gates)), j])
            return one - gate if kind == 3 else gate

        def term(b: Any, j: Any, of: Any) -> Any:
            """An affine expression of a state, with a factor of 1 at most."""
            kind, value = rng.integers(5), of[b, j]
            if kind == 0:
                return coefficient(b, j) * (value - coefficient(b, j))
            if kind == 1:
                return (value + coefficient(b, j) * value) / (one + te.exp(coefficient(b, j)))
            if kind == 2:
                return tirx.Select(coefficient(b, j) > 0.25, value * coefficient(b, j), coefficient(b, j))
            return value * coefficient(b, j) if kind == 3 else coefficient(b, j) * value

        new: list[Any] = []
        for level in (range(self.second), range(self.second, len(self.states))):
            first = len(new)
            for n in level:
                # every state reads itself, and others, before the step or after it
                reads = [states[n], *(states[o] for o in level if o != n and rng.random() < 0.6),
                         *(new[o] for o in range(first, len(new)) if rng.random() < 0.4)]
                share = tirx.const(0.25 if len(reads) > 2 else 0.5, "float32")  # no rounding where constants are folded
                def value(b: Any, j: Any, reads: Any = reads, share: Any = share, n: int = n) -> Any:
                    total = coefficient(b, j) * wx[b, 0, j] + p["v"][0, j]
                    for of in reads:
                        total = total + share * term(b, j, of)
                    return total + self.twisted(states[0][b, j], wx[b, 0, j]) if n == 0 else total
                new.append(pointwise(value, like, f"new{n}"))
            solved += [t for n in level for t in (states[n], new[n])]
        # a coefficient reads every gate and vector, so that none is left over
        whole = pointwise(lambda b, j: sum((0.125 * wx[b, g, j] for g in range(1, self.gates)), new[-1][b, j])
                          + sum(p["v"][k, j] for k in range(1, self.vectors)), like)
        return [*new[:-1], whole]

    def twisted(self, old: Any, gate: Any) -> Any:
        zero = tirx.const(0.0, "float32")
        return {"": zero, "tanh": te.tanh(old), "square": old * old * gate, "relu": tirx.max(old, zero),
                "floor": te.floor(old), "condition": tirx.Select(old > 0.0, gate, zero),
                "quotient": gate / (old + 3.0)}[self.twist]

"""The gradients of the NumPy reference: differences of the reference itself, with lengths and resets, and bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ecornn
from ecornn.errors import ShapeError
from ecornn.numpy_reference import NORMALIZED, STEPS, random_weights, reference

T, B, I, H = 5, 3, 4, 6


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(("layers", "directions"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("cell", [*STEPS, *NORMALIZED])
def test_gradients_are_differences(cell: str, layers: int, directions: int, ragged: bool):
    rng, parts, step = np.random.default_rng(0), layers * directions, 1e-6
    weights: dict[str, Any] = random_weights(cell, I, H, 1, layers, directions)
    count = (STEPS | NORMALIZED)[cell][1]
    shape = (parts, B, H) if parts > 1 else (B, H)
    x, dy = rng.normal(size=(T, B, I)), rng.normal(size=(T, B, directions * H))
    states, dstates = ([rng.normal(size=shape) for _ in range(count)] for _ in range(2))
    rows: dict[str, Any] = {"lengths": [5, 0, 3], "resets": rng.random((T, B)) < 0.3} if ragged else {}
    dx, dweights, firsts = ecornn.reference_gradients(cell, x, weights, states, dy=dy, dstate=dstates, **rows)
    assert dx.shape == x.shape and {n: g.shape for n, g in dweights.items()} == {n: w.shape for n, w in weights.items()}

    def loss(sign: float) -> float:
        moved = {n: w + sign * step * ways[1][n] for n, w in weights.items()}
        y, last = reference(cell, x + sign * step * ways[0], moved,
                            [s + sign * step * w for s, w in zip(states, ways[2], strict=True)], **rows)
        return float((y * dy).sum() + sum((s * d).sum() for s, d in zip(last, dstates, strict=True)))

    for _ in range(3):
        ways: Any = (rng.normal(size=x.shape), {n: rng.normal(size=w.shape) for n, w in weights.items()},
                     [rng.normal(size=shape) for _ in states])
        expected = (dx * ways[0]).sum() + sum((dweights[n] * w).sum() for n, w in ways[1].items())
        expected += sum((g * w).sum() for g, w in zip(firsts, ways[2], strict=True))
        got = (8 * (loss(1) - loss(-1)) - loss(2) + loss(-2)) / (12 * step)  # of fourth order
        assert abs(got - expected) <= 1e-6 * max(1.0, abs(expected))


def test_steps_beyond_a_length_have_no_gradient():
    weights, x = random_weights("gru", I, H), np.ones((T, B, I))
    dx, _, (first,) = ecornn.reference_gradients("gru", x, weights, dy=np.ones((T, B, H)), lengths=[2, 0, 5])
    assert not dx[2:, 0].any() and not dx[:, 1].any() and dx[:2, 0].all() and dx[:, 2].all()
    assert not first[1].any() and first[0].all()


def test_shapes_are_checked():
    weights, x = random_weights("lstm", I, H), np.ones((T, B, I))
    with pytest.raises(ShapeError, match=r"dy.shape.*\(5, 3, 6\)"):
        ecornn.reference_gradients("lstm", x, weights, dy=np.ones((T, B, H + 1)))
    with pytest.raises(ShapeError, match="len\\(dstate\\)"):
        ecornn.reference_gradients("lstm", x, weights, dy=np.ones((T, B, H)), dstate=[np.ones((B, H))])
    with pytest.raises(ShapeError, match=r"dstate\[1\].shape"):
        ecornn.reference_gradients("lstm", x, weights, dy=np.ones((T, B, H)), dstate=[np.ones((B, H)), np.ones((H,))])

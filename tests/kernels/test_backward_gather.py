"""The states before each step, against indexing in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from backward_passes import Passes
from cuda_on_cpu import DTYPES
from emulated import masks_of, task_of
from exact import unmarked

from ecornn.analysis.adjoint import adjoint
from ecornn.analysis.kept import kept
from ecornn.program import LATER
from ecornn.schedules.backward.memory import Memory, gathered
from ecornn.schedules.base import joined
from ecornn.workload import Traversal


def before(after, first, traversal, masks):
    """What each step begins with; zero where it takes no part."""
    found = np.zeros_like(after)
    for b in range(after.shape[1]):
        end = min(masks.get("lengths", [len(after)] * after.shape[1])[b], len(after))
        order = list(range(end))[::-1] if traversal.reverse else list(range(end))
        for number, t in enumerate(order):
            value = first[b] if number == 0 else after[order[number - 1], b]
            if traversal.resets and (masks["resets"][order[number - 1], b] if traversal.reverse and number else
                                     not traversal.reverse and masks["resets"][t, b]):
                value = np.zeros_like(value)
            found[t, b] = value
    return found


def before_in_columns(after, first, traversal, table):
    """The same of sequences, whose pieces lie in the order of their steps."""
    found = np.zeros_like(after)
    for number in range(len(first)):
        t, c = (at[::-1] if traversal.reverse else at for at in np.nonzero(unmarked(table) == number))
        found[t[0], c[0]] = first[number]
        found[t[1:], c[1:]] = after[t[:-1], c[:-1]]
    return found


@pytest.mark.parametrize(("sizes", "dtype", "traversal"), [
    ((1, 1, 1, 1), "float32", Traversal()), ((7, 5, 3, 17), "bfloat16", Traversal(lengths=True, resets=True)),
    ((6, 3, 3, 12), "float16", Traversal(reverse=True)),
    ((5, 9, 1, 6), "float32", Traversal(directions=2, resets=True)),
    ((7, 5, 3, 16), "bfloat16", Traversal(reverse=True, directions=2, lengths=True, resets=True)),
    ((1, 4, 1, 3), "float16", Traversal(reverse=True, lengths=True)),
    ((9, 5, 1, 6), "bfloat16", Traversal(sequences=True)), ((1, 2, 1, 1), "float32", Traversal(sequences=True)),
    ((11, 4, 1, 12), "float32", Traversal(reverse=True, sequences=True)),
], ids=str)
def test_gathers(tmp_path, sizes, dtype, traversal):
    task = task_of("lstm", sizes, dtype, traversal=traversal)
    steps, batch, _, H = sizes
    back = adjoint(task.graph, H)
    memory = Memory(task, back, kept(back, "states"))
    part = joined(*gathered(memory))
    generator, masks = np.random.default_rng(3), masks_of(traversal, steps, batch, 0)
    rows = int(unmarked(masks["sequences"]).max()) + 1 if traversal.sequences else batch
    assert steps < 9 or not traversal.sequences or (masks["sequences"] >= LATER).any()
    values = {n: generator.normal(size=s).astype(DTYPES[dtype]) for n, s in (
        ("y", (steps, batch, traversal.y_width(H))), ("c_kept", (steps, batch, H)), ("h_in", (rows, H)),
        ("c_in", (rows, H)))}
    given = {n: (v.shape, dtype) for n, v in values.items()}
    given |= {n: (v.shape, "uint8" if n == "resets" else "int32") for n, v in masks.items()}
    made = {f"before_{s}": (steps, batch, memory.before(s).stride) for s in "hc"}
    found = Passes(part, tmp_path, given).run(steps, batch, values | masks, made=made)
    own = values["y"][..., traversal.y_offset(H):][..., :H]
    for state, after in (("h", own), ("c", values["c_kept"])):
        first = values[f"{state}_in"]
        wanted = (before_in_columns(after, first, traversal, masks["sequences"]) if traversal.sequences else
                  before(after, first, traversal, masks))
        assert found[f"before_{state}"][..., :H].tobytes() == wanted.tobytes(), state

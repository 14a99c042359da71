"""The recurrence of an adjoint alone: a module that is nothing else, bound to weights and called.

Its ``run`` exchanges no x and y: it reads ``hoisted``, as its schedule lays it out, and writes ``outputs``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ecornn.program import RUN, WORKSPACE
from ecornn.runtime.binding import Bound
from ecornn.runtime.frameworks import arrays_of
from ecornn.runtime.memory import layout as laid_out
from ecornn.runtime.plan import SCALARS
from ecornn.schedules.hoisted import Hoisted

if TYPE_CHECKING:
    from ecornn.runtime.loader import Module


@dataclass(frozen=True)
class Ready:
    """A run whose arguments are known, and what they point into."""

    of: Recurrence
    arguments: list[int]
    kept: list[Any]

    def __call__(self) -> None:
        self.of.library.run(*self.arguments)


class Recurrence:
    """Called as a layer is, with what was hoisted in place of x, in :attr:`layout`, and outputs in place of y.

    Parameters
    ----------
    module : of the recurrence, for a GPU
    weights : the layer's, by PyTorch's names
    hoisted : Q, the values that it reads of each step, row and unit
    """

    def __init__(self, module: Module, weights: Mapping[str, Any], hoisted: int) -> None:
        manifest, self.library = module.manifest, module.library
        buffers = {b.name: b for b in manifest.buffers}
        self.taken = list(enumerate((buffers[name] for name in manifest.entries[RUN]), SCALARS))
        self.scratch = [(i, b) for i, b in self.taken if b.role == WORKSPACE]
        self.bound = Bound(manifest, weights, module.library, 0, None)
        self.states, self.hidden = manifest.states, manifest.workload.hidden
        self.raised = manifest.workload.arithmetic == "tf32"
        dtype = buffers["hoisted"].dtype if hoisted else "float32"
        self.layout = Hoisted(dtype, hoisted, self.hidden)
        self.memory: Any = None

    def __call__(self, hoisted: Any, first: Sequence[Any], *, out: Any) -> tuple[Any, list[Any]]:
        """``out`` (T, B, O, H) and the states after the last step, from those before the first, (B, H) each."""
        last = [self.like(out, state.shape) for state in first]
        self.ready(hoisted, first, out, last)()
        return out, last

    def values(self, outputs: np.ndarray) -> np.ndarray:
        """``outputs``, which with TF32 products are stored ``raised``, as they are meant."""
        words = outputs.astype(np.float32).view(np.uint32)
        return (words - np.uint32(0x1000)).view(np.float32) if self.raised else outputs

    def like(self, array: Any, shape: tuple[int, ...]) -> Any:
        """A new array of the type of another."""
        return arrays_of(array, "out").empty(shape, array, self.library)[0]

    def ready(self, hoisted: Any, first: Sequence[Any], out: Any, last: Sequence[Any] | None = None) -> Ready:
        """A run with these arrays."""
        arrays, (steps, batch) = arrays_of(out, "out"), out.shape[:2]
        last = [self.like(out, state.shape) for state in first] if last is None else last
        given = {"hoisted": hoisted, "outputs": out}
        given |= {f"{name}_in": state for name, state in zip(self.states, first, strict=True)}
        given |= {f"{name}_out": state for name, state in zip(self.states, last, strict=True)}
        places = {name: arrays_of(array, name).ready(array, name)[1] for name, array in given.items()}
        places |= self.bound.packed
        starts, total = laid_out([b.nbytes(steps) for _, b in self.scratch])
        if total and (self.memory is None or self.memory.nbytes < total):
            self.memory = arrays.workspace(total, out, self.library)
        arguments = [steps, batch, 0, arrays.queue(0)] + [0] * len(self.taken)
        for i, b in self.taken:
            if b.name in places:
                arguments[i] = places[b.name]
        for (i, _), start in zip(self.scratch, starts, strict=True):
            arguments[i] = self.memory.pointer + start
        return Ready(self, arguments, [*given.values(), self.memory])

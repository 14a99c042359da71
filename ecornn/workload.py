"""Workloads, which are compiled: a recurrent layer at one size; and how layers and directions are put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from ecornn.dtypes import DTYPES, ITEMSIZE
from ecornn.errors import ArgumentError, DTypeError

# B and T where a user leaves them open, in every command and function: so that the same is tuned and compiled
BATCH, SEQ = 20, 300
FEW = 8  # steps of a call on a GPU, up to which the time beside its steps may decide the best schedule
WEIGHTS = ("float32", "float16", "bfloat16", "int21", "int16", "int8")
ON_GPUS = ("int8",)  # the ones that recurrent weights of 16-bit layers may be rounded to there
PRECISIONS = ("exact", "tf32")
KEEPS = ("states", "gates")


def _check_count(name: str, value: object, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ArgumentError(name, value, f"an integer from 1 to {most}")


def summed(dtype: str) -> str:
    """The data type that a layer of ``dtype`` adds up in, and that of the gradients of its weights."""
    return "float64" if dtype == "float64" else "float32"


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One cell over one sequence, by which tuning records are kept. ``weights``: None, or the type that matrices are
    rounded to: on a CPU ``bfloat16``; ``int21`` or ``int16``, by each row's largest magnitude; or ``int8`` alike, with
    products of integers; on a GPU, of float16 and bfloat16, ``int8`` of recurrent matrices. ``precision``: None, or
    ``tf32``: factors of float32 products have 10 bits of mantissa, sums stay float32 (CUDA)."""

    cell: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]  # its name; of a user's cell name@digest
    hidden: int  # H; sizes are 1 at least
    input: int
    batch: int = 1  # the largest B the module must serve
    seq: int = 100  # the T to tune for; compiled modules serve any T >= 1
    dtype: str = "float32"  # of x, y, the states and, unless `weights` says otherwise, the weights
    weights: str | None = None
    precision: str | None = None
    # unset, which is not written: the sequence itself; or the recurrence of its adjoint
    entry: Literal["backward"] | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        for name in ("hidden", "input", "batch", "seq"):
            _check_count(name, getattr(self, name), 1 << 20)
        if self.dtype not in DTYPES:
            raise DTypeError("dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        if self.weights is not None and (self.weights not in WEIGHTS or self.weights == self.dtype):
            raise DTypeError("weights", self.weights, f"None or one of {', '.join(WEIGHTS)}, other than dtype")
        if self.weights is not None and self.dtype == "float64":
            raise DTypeError("weights", self.weights, "None with dtype float64, since weights are rounded for speed")
        if self.precision is not None and (self.precision != "tf32" or self.dtype != "float32" or self.weights):
            raise ArgumentError("precision", self.precision, "exact, or tf32 with dtype float32 and without weights")
        if self.entry is not msgspec.UNSET and self.entry != "backward":
            raise ArgumentError("entry", self.entry, "backward, or no value")

    @property
    def backward(self) -> bool:
        return self.entry == "backward"

    @property
    def adjoint(self) -> Workload:
        """The recurrence of its adjoint. That does not see x: I is H, whatever the layer's."""
        return msgspec.structs.replace(self, input=self.hidden, entry="backward")

    @property
    def arithmetic(self) -> str:
        """The type that the factors of products are rounded to: ``dtype``, or ``tf32``."""
        return self.precision or self.dtype

    @property
    def stored(self) -> str:
        """The type that matrices of weights are stored as."""
        return self.weights or self.dtype

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    def __str__(self) -> str:
        return (f"{self.cell} T={self.seq} B={self.batch} " + ("" if self.backward else f"I={self.input} ")
                + f"H={self.hidden} {self.dtype}" + (f", {self.weights} weights" if self.weights else "")
                + (f", {self.precision} products" if self.precision else "")
                + (", backward" if self.backward else ""))


class Traversal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The way of one sequence through time, and the place of its y. ``resets``: a new sequence starts from zeros
    wherever ``resets[t, b]`` is set; in reverse the state is therefore cleared after step t. ``sequences``:
    ``sequences[t, b]`` is the number of the sequence in column b at step t, or -1; states are by sequence.
    ``backward``: the recurrence of an adjoint, of a layer that goes the other way: it writes ``outputs`` in place of y,
    and its states are cleared wherever the layer's were, also behind its last step."""

    reverse: bool = False  # goes from the last step to the first, and writes y where it reads x
    directions: int = 1  # rows of y hold this many sequences side by side; a reverse one has the second place
    lengths: bool = False  # row b takes part in steps below `lengths[b]`; beyond, it keeps its state and y is 0
    resets: bool = False
    sequences: bool = False
    keep: str | None = None  # the values of each step that forward keeps for backward, one of KEEPS; None: no backward
    backward: bool = False

    def y_width(self, hidden: int) -> int:
        return self.directions * hidden

    def y_offset(self, hidden: int) -> int:
        """The first of this sequence's elements in a row of y."""
        return hidden if self.reverse and self.directions > 1 else 0


ALONE = Traversal()


class Part(msgspec.Struct, frozen=True):
    """One (layer, direction) of a stack; ``number`` counts them as PyTorch orders states."""

    number: int
    layer: int
    traversal: Traversal
    workload: Workload

    @property
    def label(self) -> str:
        """The suffix of its parameters in PyTorch: ``l0``, ``l0_reverse``, ..."""
        return f"l{self.layer}" + ("_reverse" if self.second else "")

    @property
    def second(self) -> bool:
        return self.traversal.reverse and self.traversal.directions > 1


class Stack(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sequences that a module is put together from. ``keep``: what forward keeps for backward: ``states``, from
    which the rest is computed again; or ``gates`` besides, from which that takes no products."""

    layers: int = 1  # L; y of one is x of the next
    bidirectional: bool = False  # every layer goes both ways; y is (T, B, 2 H)
    lengths: bool = False  # a call takes them, as resets and sequences, see Traversal
    resets: bool = False
    reverse: bool = False  # every layer goes from the end to the start only
    sequences: bool = False
    keep: str | None = None

    def __post_init__(self) -> None:
        if self.keep is not None and self.keep not in KEEPS:
            raise ArgumentError("keep", self.keep, f"None or one of {', '.join(KEEPS)}")
        _check_count("layers", self.layers, 1024)
        for name in ("bidirectional", "lengths", "resets", "reverse", "sequences"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(name, getattr(self, name), "True or False")
        if self.reverse and self.bidirectional:
            raise ArgumentError("reverse", True, "False with bidirectional=True, which runs in both directions")
        if self.sequences and (self.lengths or self.resets):
            raise ArgumentError("sequences", True, "False with lengths=True or resets=True, since the layout of "
                                "sequences replaces both")

    @property
    def directions(self) -> int:
        return 1 + self.bidirectional

    @property
    def count(self) -> int:
        return self.layers * self.directions

    def parts(self, whole: Workload) -> tuple[Part, ...]:
        """The sequences in the order in which they run; ``whole`` has the input size of the first layer."""
        parts: list[Part] = []
        for layer in range(self.layers):
            work = msgspec.structs.replace(whole, input=self.directions * whole.hidden) if layer else whole
            for reverse in (False, True) if self.bidirectional else (self.reverse,):
                traversal = Traversal(reverse, self.directions, self.lengths, self.resets, self.sequences, self.keep)
                parts.append(Part(len(parts), layer, traversal, work))
        return tuple(parts)

    def __str__(self) -> str:
        words = {f"{self.layers} layers": self.layers > 1, "bidirectional": self.bidirectional, "reverse": self.reverse,
                 "lengths": self.lengths, "resets": self.resets, "sequences": self.sequences, "training": self.keep}
        return ", ".join(word for word, holds in words.items() if holds)


SINGLE = Stack()
OVERLAPS = ("directions", "wavefront")


class Overlap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sequences of a stack that run at the same time; the default is none. ``kind``: ``none``; ``directions``: the
    two of a layer side by side; or ``wavefront``: ``width`` layers, each a chunk of time behind the one before it."""

    kind: str = "none"
    width: int = 1  # the most sequences at the same time; each has this part of the multiprocessors
    chunks: int = 1  # of time in a wavefront, the most
    least: int = 1  # steps of a chunk

    def __post_init__(self) -> None:
        if self.kind not in ("none", *OVERLAPS):
            raise ArgumentError("overlap.kind", self.kind, f"one of none, {', '.join(OVERLAPS)}")

    @property
    def depth(self) -> int:
        return self.width if self.kind == "wavefront" else 1

    def __str__(self) -> str:
        if self.kind == "wavefront":
            return f"a wavefront of {self.width} layers in {self.chunks} chunks"
        return {"none": "one after the other", "directions": "directions side by side"}[self.kind]


SERIAL = Overlap()


def by_output(rows: Any, names: Sequence[str], directions: int) -> dict[str, Any]:
    """Each output (..., D*H) of a cell that has several, by name, of ``rows`` of y (..., D*O*H), in which they lie one
    behind the other, first of one direction, then of the other: arrays of any framework, views unless D = 2."""
    outer, count = tuple(rows.shape[:-1]), len(names)
    hidden = rows.shape[-1] // (directions * count)
    if directions == 1:
        return {name: rows[..., n * hidden:(n + 1) * hidden] for n, name in enumerate(names)}
    parts = rows.reshape((*outer, directions, count, hidden))
    return {name: parts[..., n, :].reshape((*outer, directions * hidden)) for n, name in enumerate(names)}

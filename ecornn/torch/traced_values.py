"""What the values of a traced step are: rows of gates, vectors and numbers, as te tensors; and arithmetic on them.

Sizes of the module are in units of its H here, so that the step can be written for any H.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ecornn.cells import normalized, pointwise
from ecornn.errors import CellError


@dataclass(frozen=True)
class Row:
    """``count`` gates, (B, count*H), of a te tensor (B, H) or (B, G, H), from gate ``first`` on; or so many values that
    are ``narrow``, less than H."""

    tensor: Any
    first: int = 0
    count: int = 1
    narrow: int = 0

    def at(self, b: Any, g: Any, j: Any) -> Any:
        """The scalar of a gate."""
        return self.tensor[b, j] if len(self.tensor.shape) == 2 else self.tensor[b, self.first + g, j]


@dataclass(frozen=True)
class Vector:
    """``count`` gates of a parameter (G, H), the same for all batch rows; or the first ``narrow`` values of one."""

    tensor: Any
    first: int = 0
    count: int = 1
    narrow: int = 0

    def at(self, b: Any, g: Any, j: Any) -> Any:
        """The scalar of a gate."""
        return self.tensor[self.first + g, j]


@dataclass(frozen=True)
class Input:
    """x (B, I); where it is read at each unit I is H."""

    tensor: Any
    count: int = 1
    narrow: int = 0

    def at(self, b: Any, g: Any, j: Any) -> Any:
        """Its value at a unit."""
        return self.tensor[b, j]


@dataclass(frozen=True)
class Joined:
    """Several side by side, as torch.cat has them."""

    parts: tuple[Any, ...]

    @property
    def count(self) -> int:
        """Gates of all."""
        return sum(part.count for part in self.parts)


@dataclass(frozen=True)
class Matrix:
    """A parameter (R, K) of the module, or its transpose."""

    name: str
    shape: tuple[int, ...]
    transposed: bool = False


BATCHED = Row, Vector, Input


def combined(function: Callable[..., Any], operands: Sequence[Any], like: Any, name: str) -> Row:
    """``function`` of scalars, at every gate and unit; ``like``: a state.

    Raises :class:`CellError` where the operands have no common width, or are nothing that has one.
    """
    from tvm import te

    strange = next((o for o in operands if not isinstance(o, (*BATCHED, bool, int, float))), None)
    if strange is not None:
        raise CellError(f"arithmetic on {described(strange)}")
    widths = {(o.count, o.narrow) for o in operands if isinstance(o, BATCHED)}
    if len(widths) != 1:
        found = sorted({str(narrow) if narrow else f"{count} times H" for count, narrow in widths})
        raise CellError(f"arithmetic on values of {', '.join(found)}: one width is needed")
    ((count, narrow),) = widths

    def value(b: Any, g: Any, j: Any) -> Any:
        return function(*(o.at(b, g, j) if isinstance(o, BATCHED) else te.const(float(o), "float32") for o in operands))

    if narrow:
        return Row(te.compute((like.shape[0], narrow), lambda b, j: value(b, 0, j), name=name), narrow=narrow)
    if count == 1:
        return Row(pointwise(lambda b, j: value(b, 0, j), like, name))
    return Row(te.compute((like.shape[0], count, like.shape[1]), value, name=name), 0, count)


def cut(value: Any, first: int, count: int) -> Any:
    """Gates ``first`` to ``first + count`` of a value."""
    if not isinstance(value, (Row, Vector)) or value.narrow or first < 0 or count < 1 or first + count > value.count:
        raise CellError(f"no gates {first} to {first + count} of {described(value)}")
    return type(value)(value.tensor, value.first + first, count)


def whole(value: Any, like: Any, name: str) -> Any:
    """The te tensor (B, H) or (B, G, H) that a value is."""
    if isinstance(value, Row):
        shape = value.tensor.shape
        if len(shape) == 2 or (value.count > 1 and int(shape[1]) == value.count):
            return value.tensor
    return combined(lambda v: v, [value], like, name).tensor


def layer_norm(value: Any, epsilon: float, like: Any, name: str) -> Row:
    """Without gain and bias, over all of a value's gates."""
    if not isinstance(value, Row):
        raise CellError(f"layer normalization of {described(value)}")
    return Row(normalized(whole(value, like, name), epsilon, name), 0, value.count, value.narrow)


def described(value: Any) -> str:
    """For messages."""
    if isinstance(value, (Row, Vector)) and value.narrow:
        return f"{'a row' if isinstance(value, Row) else 'a vector'} of {value.narrow} values, less than H"
    kinds = {Row: "a row of {0.count} times H values", Vector: "a vector of {0.count} times H values", Input: "x",
             Joined: "values side by side, which only a matrix may multiply", Matrix: "the matrix {0.name}"}
    return kinds[type(value)].format(value) if type(value) in kinds else repr(value)

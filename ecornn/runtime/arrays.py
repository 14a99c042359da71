"""Arrays of any framework, as the runtime uses them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from ecornn.errors import ArgumentError
from ecornn.runtime.library import Library
from ecornn.runtime.memory import Memory

ALIGNMENT = 16  # bytes; of x, y and the states

Shape = tuple[int, ...]
Facts = tuple[Shape, str, str]  # shape, data type, place: "cpu" or "cuda:0"
Placed = tuple[Any, int]  # an array, and the address of its first element


class Arrays(ABC):
    """One framework's arrays. All are on the path of every call: a NumPy array takes 0.3 us to tell its address."""

    name: str  # for messages
    staged = False  # on CUDA modules: copied to the device and back

    @abstractmethod
    def take(self, value: Any, name: str) -> Any:
        """The array to work on; :class:`ArgumentError` where ``value`` is not of this framework."""

    @abstractmethod
    def facts(self, array: Any) -> Facts:
        """The facts about an array that are checked before anything runs."""

    @abstractmethod
    def ready(self, array: Any, name: str) -> Placed:
        """``array``, or a copy of it where it is not contiguous or not aligned."""

    @abstractmethod
    def in_place(self, array: Any) -> Placed | None:
        """``array`` for results, or None where it is strided, misaligned or read-only."""

    @abstractmethod
    def empty(self, shape: Shape, like: Any, library: Library) -> Placed:
        """A new array, contents undefined, of the data type and on the device of ``like``."""

    def zeros(self, shape: Shape, like: Any, dtype: str) -> Placed:
        raise ArgumentError("x", type(like), "a NumPy array or a torch.Tensor, for training")

    def several(self, shapes: Sequence[Shape], like: Any, dtype: str, zeros: bool) -> list[Placed]:
        """New arrays, of zeros if these are wanted; else their contents may be anything."""
        return [self.zeros(shape, like, dtype) for shape in shapes]

    @abstractmethod
    def to_host(self, value: Any, name: str, library: Library) -> np.ndarray[Any, Any]:
        """A weight as a NumPy array, bfloat16 widened to float32."""

    def packs(self, value: Any, place: str) -> bool:
        """Tells whether a weight lies at ``place``, such as ``cuda:0``, and can be packed there."""
        return False

    @abstractmethod
    def workspace(self, nbytes: int, like: Any, library: Library) -> Memory:
        """Scratch memory on the device of ``like``."""

    def over(self, memory: Memory, like: Any, shape: Shape) -> Placed | None:
        """An array of the type of ``like`` in the place of a workspace that is as large; None where that cannot be."""
        return None

    def swapped(self, array: Any) -> Any:
        """A view with the first two axes exchanged."""
        raise ArgumentError("batch_first", True, f"False for {self.name}: pass time first")

    def beside(self, x: Any, others: Sequence[Any], width: int) -> Any:
        """``others``, (T, B, 1) or (T, B, ``width``), behind x (T, B, I) in its rows, ``width`` values each."""
        raise ArgumentError("inputs", self.name, "NumPy arrays or tensors of torch; append other arrays to the rows "
                            "of x")

    @abstractmethod
    def clear(self, array: Any, steps: int) -> bool:
        """Sets ``array[steps:]`` to zero, or returns False where that cannot be done from here."""

    @abstractmethod
    def rows(self, value: Any, dtype: str, like: Any, library: Library) -> Placed:
        """Lengths or resets, contiguous and of that type beside ``like``, from a NumPy array or a tensor beside it."""

    def kept(self, copies: dict[Any, Placed], value: Any, dtype: str, like: Any, library: Library) -> Placed:
        """Does what :meth:`rows` does, for a value that later calls have, too: ``copies`` keeps the result."""
        return self.rows(value, dtype, like, library)

    def give(self, array: Any) -> Any:
        """A result as the caller's framework has it."""
        return array

    def queue(self, device: int) -> int:
        """The CUDA stream that work is put on."""
        return 0

    def keeps_workspace(self) -> bool:
        """Tells whether a later call may use the workspace of a CUDA call again."""
        return True

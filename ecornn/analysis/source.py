"""What the analysis asks of a cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tvm.te import Tensor


class Source(Protocol):
    """The part of a cell that is analysed; :class:`ecornn.cells.Cell` says what each means."""

    name: str
    states: tuple[str, ...]
    inputs: tuple[str, ...]
    unread: tuple[str, ...]
    output: str | tuple[str, ...]

    def parameters(self, input: int, hidden: int) -> Mapping[str, tuple[int, ...]]:
        """Shapes by name."""

    def step(self, x: Tensor, states: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Sequence[Tensor]:
        """One step on te tensors."""

    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs."""

    def returned_names(self) -> tuple[str, ...]:
        """Names of all that ``step`` returns, in order."""

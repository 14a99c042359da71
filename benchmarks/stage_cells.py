"""Cells that leave stages of a step out, so that a difference of times says what a stage takes.

They are cells like any other: every schedule makes their kernels from their graph, as it makes those of an LSTM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from ecornn.cells import Cell, pointwise, product

SERVED = ("persistent", "persistent_wide")


@dataclass(frozen=True)
class Bare(Cell):
    """A cell of so many gates without gate math: h' is the largest of its gates' sums.

    h' = max over g of (W_g x + b_g + R_g h); with a second state c, h' is at least c, and c' = h' / 2.

    Attributes
    ----------
    gates : recurrent products, and hoisted values, of a unit
    second : whether there is a state c, which never leaves its thread
    given : whether there is an input product; without it, x is not read
    multiplied : False: recurrent weights are sampled as zeros, as kernels without recurrent products compute
    """

    gates: int
    second: bool = False
    given: bool = True
    multiplied: bool = True

    @property
    def name(self) -> str:
        return f"bare{self.gates}" + "c" * self.second + "_recurrence" * (not self.given) + "_zero" * (
            not self.multiplied)

    @property
    def states(self) -> tuple[str, ...]:
        return ("h", "c") if self.second else ("h",)

    def parameters(self, input: int, hidden: int) -> Mapping[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {"weight_ih": (self.gates, hidden, input)} if self.given else {}
        return found | {"weight_hh": (self.gates, hidden, hidden), "bias_ih": (self.gates, hidden)}

    def step(self, x: Any, states: Any, parameters: Mapping[str, Any]) -> list[Any]:
        from tvm import tirx

        h, *rest = states
        gh, bias = product(h, parameters["weight_hh"]), parameters["bias_ih"]
        gx = product(x, parameters["weight_ih"]) if self.given else None

        def largest(b: Any, j: Any) -> Any:
            value = rest[0][b, j] if rest else None
            for g in range(self.gates):
                gate = (bias[g, j] if gx is None else gx[b, g, j] + bias[g, j]) + gh[b, g, j]
                value = gate if value is None else tirx.max(value, gate)
            return value

        new = pointwise(largest, h, "state")
        half = tirx.const(0.5, "float32")
        return [new, *(pointwise(lambda b, j: half * new[b, j], h, "kept") for _ in rest)]

    def sample(self, name: str, shape: tuple[int, ...], rng: Any) -> Any:
        """Weights so small that the state stays near 1 over any number of steps."""
        bound = 1.0 if name == "bias_ih" else 0.25 * shape[2] ** -0.5
        return bound * rng.uniform(-1, 1, shape) * (self.multiplied or name != "weight_hh")


# By the names that `spec` has for them
CELLS = {cell.name: cell for gates in (1, 3, 4) for second in (False, True) for cell in (
    Bare(gates, second), Bare(gates, second, False), Bare(gates, second, False, False))}
globals().update(CELLS)


def spec(cell: Bare) -> str:
    """The name under which other processes find one of ``CELLS``."""
    return f"stage_cells:{cell.name}"


@contextmanager
def without_products() -> Iterator[None]:
    """While schedules make kernels in this process, those that are ``SERVED`` leave their recurrent products out, so
    that these can be told from the wait for h.

    Everything else stays: every block polls or copies all of h and waits until it is there, partial sums (zeros) are
    stored, added and synchronised, h' is sent. Weights that are kept are read once, before the first step, and none
    later. What such a module computes is the layer with recurrent weights of zero, with which it is checked like any
    other.
    """
    from ecornn.schedules.persistent import products
    from ecornn.schedules.persistent_wide import warps

    def nothing(*_: Any, **__: Any) -> None: ...

    def keep_zero(acc: list[Any], a: Any, b: Any, keep: Any, dtype: str) -> None:
        """The first product of a step clears the sums."""
        from tvm.tirx.script.builder import ir as T

        for value in acc if int(keep) == 0 else ():
            T.buffer_store(value.source, T.float32(0), list(value.indices))

    # in the kernel's file alone: products of x, which other kernels make, stay
    instructions = SimpleNamespace(**{**vars(warps.isa), "wgmma": keep_zero, "wgmma_registers": keep_zero})
    with ExitStack() as stack:
        for owner, name, other in ((products, "multiply_pair", nothing), (products._Weights, "load", nothing),
                                   (products._Weights, "_from_l2", nothing), (products.Stream, "begin", nothing),
                                   (warps, "isa", instructions)):
            stack.enter_context(patch.object(owner, name, other))
        yield

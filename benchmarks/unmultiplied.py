"""The kernels of a persistent schedule without their recurrent products, so that these can be told from the wait for h.

Everything else stays: every block polls or copies all of h and waits until it is there, partial sums (zeros) are
stored, added and synchronised, h' is sent. Weights that are kept are read once, before the first step, and none later.
What such a module computes is the layer with recurrent weights of zero, with which it is checked like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

SERVED = ("persistent", "persistent_wide")


@contextmanager
def without_products() -> Iterator[None]:
    """While schedules make kernels in this process; of those that are ``SERVED``."""
    from ecornn.schedules.persistent import products
    from ecornn.schedules.persistent_wide import products as wide

    def nothing(*_: Any, **__: Any) -> None: ...

    def keep_zero(acc: list[Any], a: Any, b: Any, keep: Any, dtype: str) -> None:
        """The first product of a step clears the sums."""
        from tvm.tirx.script.builder import ir as T

        for value in acc if int(keep) == 0 else ():
            T.buffer_store(value.source, T.float32(0), list(value.indices))

    with ExitStack() as stack:
        for owner, name, other in ((products, "multiply_pair", nothing), (products._Stored, "load", nothing),
                                   (products._Stored, "_from_l2", nothing),
                                   (products.Stream, "begin", nothing), (wide, "wgmma", keep_zero),
                                   (wide, "wgmma_registers", keep_zero)):
            stack.enter_context(patch.object(owner, name, other))
        yield

"""Products of fragments in registers of a warp: rows of weights, operand A, times columns of state, operand B."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

from ecornn.schedules.builder import Expr, T, TirBuffer, ceil_div
from ecornn.schedules.cuda.isa.tensor_core import mma, split


def zeros(name: str, *shape: int) -> TirBuffer:
    """An array of float32 zeros in registers."""
    made = T.local(name, shape, "float32")
    for index in product(*map(range, shape)):
        T.buffer_store(made, T.float32(0), list(index))
    return made


def multiply_pair(acc: TirBuffer, number: int, rows: Sequence[Callable[[int], Expr]],
                  columns: Sequence[Sequence[Expr]], arithmetic: str) -> None:
    """Adds the products of pair ``number`` of k-tiles, for sums that are short. ``acc``: sums, (chain, m16 tile, n8
    tile, 4 of fragment C); k-tiles take chains in turn. ``rows``: of each octet of weight rows word 0 to 3, two of a
    k-tile; two octets make an m16 tile, the last may have one alone. ``columns``: of each n8 tile of state the same."""
    chains, nothing = int(acc.shape[0]), tuple(T.uint32(0) for _ in range(2))
    for tile in range(2):
        right = [[split(column[tile * 2 + half], arithmetic) for half in range(2)] for column in columns]
        for m in range(ceil_div(len(rows), 2)):  # a0, a1: word 0 of the lower and upper octet; a2, a3: word 1
            left = [split(rows[v](tile * 2 + half), arithmetic) if v < len(rows) else nothing
                    for half in range(2) for v in (2 * m, 2 * m + 1)]
            for n in range(len(columns)):
                sums = [acc[(2 * number + tile) % chains, m, n, i] for i in range(4)]
                mma(sums, left, right[n], arithmetic, apart=False)

"""The arguments of a module's function: where they belong is found once, and a call puts its addresses between what is
known. A call takes some microseconds, of which a list that is put together position by position would be two."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter

from ecornn.runtime.plan import SCALARS, CallPlan


class Order:
    """How addresses, in the order in which a call has them, become arguments of ``run``.

    Parameters
    ----------
    plan : of the module
    packed : name of a buffer -> the address of its packed weights
    with_states : whether a call has states to start from, or one address of zeros in their place
    """

    def __init__(self, plan: CallPlan, packed: Mapping[str, int], with_states: bool) -> None:
        self._before = (*plan.state_in,) if with_states else ()
        zeros = [] if with_states else [p for positions in plan.state_in for p in positions]
        self._packed = tuple(packed[b.name] for _, b in plan.packed)
        positions = [*range(SCALARS), *(p for p, _ in plan.packed), *zeros, *plan.workspace, plan.x,
                     *(p for positions in self._before for p in positions), *plan.masks, plan.y,
                     *(p for positions in plan.state_out for p in positions)]
        assert sorted(positions) == [*range(plan.count)]
        self._order: Callable[[tuple[int, ...]], tuple[int, ...]] = itemgetter(
            *sorted(range(plan.count), key=positions.__getitem__))
        self._zeros, self._parts, self._masks = len(zeros), len(plan.state_out[0]), len(plan.masks)

    def of(self, scalars: tuple[int, int, int, int], zeros: int, scratch: Sequence[int], given: Sequence[int],
           size: int) -> tuple[int, ...]:
        """The arguments: T, B, device and queue; the address of zeros; workspaces; ``given``: x, states, masks, y and
        states; ``size`` bytes from one sequence's part of a state to the next one's."""
        known = (*scalars, *self._packed, *(zeros,) * self._zeros, *scratch)
        return self._order(known + (tuple(given) if self._parts == 1 else self._spread(given, size)))

    def _spread(self, given: Sequence[int], size: int) -> tuple[int, ...]:
        """Of a stack, whose states have a part for each sequence."""
        before, masks, offsets = len(self._before), self._masks, [part * size for part in range(self._parts)]
        states, others, after = given[1:1 + before], given[1 + before:2 + before + masks], given[2 + before + masks:]
        return (given[0], *(start + o for start in states for o in offsets), *others,
                *(start + o for start in after for o in offsets))

"""Where the arguments of an entry come from: the buffers of a module, sorted by role and tensor. Where they belong is
found once, and a call puts its addresses between what is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from ecornn.errors import ModuleError
from ecornn.manifest import Manifest
from ecornn.program import BACKWARD, ENTRIES, FORWARD, KEPT, PACKED, RUN, TENSORS, WORKSPACE, Buffer
from ecornn.runtime.memory import layout

SCALARS = 4  # T, B, device, queue come before the pointers
MASKS = tuple(name for name, kind in TENSORS.items() if kind.optional)


_Key = tuple[str, str | None, int]  # tensor, state, part


@dataclass(frozen=True)
class EntryPlan:
    """Positions in the argument list of an entry.

    Attributes
    ----------
    count : arguments in all
    at : tensor -> its positions: one, none where it is optional or a switch that the entry has not, or one for each
        state and sequence, by state and then by sequence; of gradients one for each parameter, in the manifest's order
    packed, kept, scratch : (position, buffer) of packed weights, of what forward keeps, and of workspaces
    """

    count: int
    at: Mapping[str, tuple[int, ...]]
    packed: tuple[tuple[int, Buffer], ...]
    kept: tuple[tuple[int, Buffer], ...]
    scratch: tuple[tuple[int, Buffer], ...]

    def offsets(self, steps: int) -> tuple[tuple[int, ...], int]:
        """Where each workspace buffer starts at T = ``steps``, and the bytes of all."""
        return layout([buffer.nbytes(steps) for _, buffer in self.scratch])

    def order(self, positions: Sequence[int]) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
        """A function that makes arguments of values for these positions, which are all that there are. It takes less
        than a microsecond; to put a list together position by position would take two."""
        assert sorted(positions) == [*range(self.count)] and self.count > SCALARS
        return itemgetter(*sorted(range(self.count), key=positions.__getitem__))


class Order:
    """How addresses, in the order in which a call has them, become arguments of ``run``: T, B, device and queue; packed
    weights; an address of zeros for each state, unless there are states to start from; workspaces; x, states, those of
    :data:`MASKS` that the module takes, y and states.

    Parameters
    ----------
    plan : of ``run``
    packed : name of a buffer -> the address of its packed weights
    parts : the number of sequences of a stack, each of which has a part of a state
    with_states : whether a call has states to start from, or one address of zeros in their place
    """

    def __init__(self, plan: EntryPlan, packed: Mapping[str, int], parts: int, with_states: bool) -> None:
        at, masks = plan.at, [position for name in MASKS for position in plan.at[name]]
        self._packed = tuple(packed[b.name] for _, b in plan.packed)
        zeros, before = ((), at["state_in"]) if with_states else (at["state_in"], ())
        self._order = plan.order([*range(SCALARS), *(p for p, _ in plan.packed), *zeros, *(p for p, _ in plan.scratch),
                                  *at["x"], *before, *masks, *at["y"], *at["state_out"]])
        self._zeros, self._parts = len(zeros), parts
        self._states, self._others = 1 + len(before) // parts, len(masks) + 1  # where first states end; masks and y

    def of(self, scalars: tuple[int, int, int, int], zeros: int, scratch: Sequence[int], given: Sequence[int],
           size: int) -> tuple[int, ...]:
        """The arguments: T, B, device and queue; the address of zeros; workspaces; ``given``: x, states, masks, y and
        states; ``size`` bytes from one sequence's part of a state to the next one's."""
        known = (*scalars, *self._packed, *(zeros,) * self._zeros, *scratch)
        return self._order(known + (tuple(given) if self._parts == 1 else self._spread(given, size)))

    def _spread(self, given: Sequence[int], size: int) -> tuple[int, ...]:
        """Of a stack, whose states have a part for each sequence."""
        after, offsets = self._states + self._others, [part * size for part in range(self._parts)]
        return (given[0], *(start + o for start in given[1:self._states] for o in offsets), *given[self._states:after],
                *(start + o for start in given[after:] for o in offsets))


def entry_plan(manifest: Manifest, entry: str) -> EntryPlan:
    """Sorts the buffers that an entry takes; :class:`ModuleError` where one is missing, doubled or unknown."""
    taken = _taken(manifest, entry)
    places = {(b.tensor, b.state, b.part): i for i, b in taken if b.tensor is not None and b.role != KEPT}
    kept = tuple((i, b) for i, b in taken if b.role == KEPT)
    packed, scratch = (tuple((i, b) for i, b in taken if b.role == role and b.tensor is None)
                       for role in (PACKED, WORKSPACE))
    wanted = {name: _keys(manifest, name) for name in ENTRIES[entry] if TENSORS[name].role != KEPT}
    wanted |= {name: [key for key in wanted[name] if key in places] for name in wanted if TENSORS[name].switch}
    fits = (set(places) == {key for keys in wanted.values() for key in keys}
            and len(places) + len(packed) + len(scratch) + len(kept) == len(taken) and not (kept and entry == RUN)
            and all(b.tensor in TENSORS and TENSORS[b.tensor].role == b.role for _, b in taken if b.tensor is not None))
    if not fits:
        listed = ", ".join(f"{b.name} ({' '.join(filter(None, (b.role, b.tensor, b.state)))})" for _, b in taken)
        raise ModuleError(f"the module's buffers do not fit states {manifest.states}: {listed}")
    at = {name: tuple(places[key] for key in keys) for name, keys in wanted.items()}
    return EntryPlan(len(taken) + SCALARS, at, packed, kept, scratch)


def kept_layout(manifest: Manifest, steps: int, batch: int) -> tuple[dict[str, int], int]:
    """Where each buffer that forward keeps starts, by name, and the bytes of all, at this T and B, perhaps symbols.
    What the gradient of x may lie in is the last one.

    Rows of the batch that a call does not have are not kept.
    """
    taken = {name for entry in (FORWARD, BACKWARD) for name in manifest.entries.get(entry, ())}
    kept = sorted((b for b in manifest.buffers if b.role == KEPT and b.name in taken),
                  key=lambda b: b.name == manifest.dx_in)
    most = manifest.workload.batch
    sizes = [-(-b.extent.at(steps) * batch // most) * b.itemsize for b in kept]
    offsets, total = layout(sizes)
    return {b.name: start for b, start in zip(kept, offsets, strict=True)}, total


def _taken(manifest: Manifest, entry: str) -> list[tuple[int, Buffer]]:
    """(position, buffer) of the pointers of an entry."""
    buffers = {b.name: b for b in manifest.buffers}
    names = manifest.entries.get(entry)
    if names is None:
        raise ModuleError(f"the module has no entry {entry!r}; it has {', '.join(manifest.entries) or 'none'}")
    if strangers := [name for name in names if name not in buffers]:
        raise ModuleError(f"the module has no buffer {', '.join(strangers)} for its entry {entry!r}")
    return [(i, buffers[name]) for i, name in enumerate(names, SCALARS)]


def _keys(manifest: Manifest, tensor: str) -> list[_Key]:
    """What there must be of a tensor, by state and then by part."""
    kind, stack = TENSORS[tensor], manifest.stack
    if kind.optional and not getattr(stack, tensor):
        return []
    if kind.by_parameter:
        each = len(manifest.parameters) // stack.count  # they are listed by sequence, as many of each
        return [(tensor, p.key, n // each) for n, p in enumerate(manifest.parameters)]
    if not kind.by_state:
        return [(tensor, None, 0)]
    return [(tensor, state, part) for state in manifest.states for part in range(stack.count)]

"""Where the arguments of an entry come from: the buffers of a module, sorted by role and tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ecornn.errors import ModuleError
from ecornn.manifest import Manifest
from ecornn.program import ENTRIES, KEPT, PACKED, RUN, TENSORS, WORKSPACE, Buffer
from ecornn.runtime.memory import layout

SCALARS = 4  # T, B, device, queue come before the pointers
MASKS = tuple(name for name, kind in TENSORS.items() if kind.optional)


@dataclass(frozen=True)
class CallPlan:
    """Positions in the argument list of ``run``.

    Attributes
    ----------
    count : arguments in all
    x, y : of the input and the output
    state_in, state_out : for each state in the manifest's order, one for each (layer, direction)
    masks : of those of :data:`MASKS` that the module takes, in that order
    packed : (position, buffer) of the packed weights
    workspace : positions of the workspace buffers
    scratch : the workspace buffers themselves
    """

    count: int
    x: int
    y: int
    state_in: tuple[tuple[int, ...], ...]
    state_out: tuple[tuple[int, ...], ...]
    masks: tuple[int, ...]
    packed: tuple[tuple[int, Buffer], ...]
    workspace: tuple[int, ...]
    scratch: tuple[Buffer, ...]

    def offsets(self, steps: int) -> tuple[tuple[int, ...], int]:
        """Where each workspace buffer starts at T = ``steps``, and the bytes of all."""
        return layout([buffer.nbytes(steps) for buffer in self.scratch])


_Key = tuple[str, str | None, int]  # tensor, state, part


def make_plan(manifest: Manifest) -> CallPlan:
    """Sorts the buffers that ``run`` takes; :class:`ModuleError` where one is missing, doubled or unknown."""
    entry = entry_plan(manifest, RUN)
    at, count = entry.at, manifest.stack.count
    (x,), (y,) = at["x"], at["y"]
    state_in, state_out = (tuple(at[name][i * count:(i + 1) * count] for i in range(len(manifest.states)))
                           for name in ("state_in", "state_out"))
    return CallPlan(entry.count, x, y, state_in, state_out, tuple(i for name in MASKS for i in at[name]),
                    entry.packed, tuple(i for i, _ in entry.scratch), tuple(b for _, b in entry.scratch))


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
        return [(tensor, p.key, part) for p, part in zip(manifest.parameters, _parts_of(manifest), strict=True)]
    if not kind.by_state:
        return [(tensor, None, 0)]
    return [(tensor, state, part) for state in manifest.states for part in range(stack.count)]


def _parts_of(manifest: Manifest) -> list[int]:
    """The number of the sequence that each parameter belongs to: they are listed by sequence, as many of each."""
    each = len(manifest.parameters) // manifest.stack.count
    return [n // each for n in range(len(manifest.parameters))]

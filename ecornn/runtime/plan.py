"""Where the arguments of an entry come from: the buffers of a module, sorted by role and tensor."""

from __future__ import annotations

from dataclasses import dataclass

from ecornn.errors import ModuleError
from ecornn.manifest import Manifest
from ecornn.program import ENTRIES, PACKED, RUN, TENSORS, WORKSPACE, Buffer
from ecornn.runtime.memory import layout

SCALARS = 4  # T, B, device, queue come before the pointers
MASKS = tuple(name for name, kind in TENSORS.items() if kind.optional)
_INDEX_LIMIT = 2**31 - 1  # kernels count elements in int32


@dataclass(frozen=True)
class CallPlan:
    """Positions in the argument list of ``run``.

    Attributes
    ----------
    count : arguments in all
    x, y : of the input and the output
    state_in, state_out : for each state in the manifest's order, one for each (layer, direction)
    lengths, resets, sequences : one or none
    packed : (position, buffer) of the packed weights
    workspace : positions of the workspace buffers
    scratch : the workspace buffers themselves
    """

    count: int
    x: int
    y: int
    state_in: tuple[tuple[int, ...], ...]
    state_out: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    resets: tuple[int, ...]
    sequences: tuple[int, ...]
    packed: tuple[tuple[int, Buffer], ...]
    workspace: tuple[int, ...]
    scratch: tuple[Buffer, ...]

    def offsets(self, steps: int) -> tuple[tuple[int, ...], int]:
        """Where each workspace buffer starts at T = ``steps``, and the bytes of all."""
        return layout([buffer.nbytes(steps) for buffer in self.scratch])


_Key = tuple[str, str | None, int]  # tensor, state, part


def make_plan(manifest: Manifest) -> CallPlan:
    """Sorts the buffers that ``run`` takes; :class:`ModuleError` where one is missing, doubled or unknown."""
    taken = _taken(manifest, RUN)
    places = {(b.tensor, b.state, b.part): i for i, b in taken if b.tensor is not None}
    packed, scratch = (tuple((i, b) for i, b in taken if b.role == role and b.tensor is None)
                       for role in (PACKED, WORKSPACE))
    wanted = {name: _keys(manifest, name) for name in ENTRIES[RUN]}
    fits = (set(places) == {key for keys in wanted.values() for key in keys}
            and len(places) + len(packed) + len(scratch) == len(taken)
            and all(TENSORS[b.tensor].role == b.role for _, b in taken if b.tensor is not None))
    if not fits:
        listed = ", ".join(f"{b.name} ({' '.join(filter(None, (b.role, b.tensor, b.state)))})" for _, b in taken)
        raise ModuleError(f"the module's buffers do not fit states {manifest.states}: {listed}")
    at = {name: tuple(places[key] for key in keys) for name, keys in wanted.items()}
    count, (x,), (y,) = manifest.stack.count, at["x"], at["y"]
    state_in, state_out = (tuple(at[name][i * count:(i + 1) * count] for i in range(len(manifest.states)))
                           for name in ("state_in", "state_out"))
    return CallPlan(len(taken) + SCALARS, x, y, state_in, state_out, at["lengths"], at["resets"], at["sequences"],
                    packed, tuple(i for i, _ in scratch), tuple(b for _, b in scratch))


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
    if not kind.by_state:
        return [(tensor, None, 0)]
    return [(tensor, state, part) for state in manifest.states for part in range(stack.count)]


def longest(manifest: Manifest) -> int:
    """The largest T: no buffer may have more elements than an int32 counts."""
    work = manifest.workload
    widest = max(work.input, manifest.stack.directions * work.hidden)
    limits = [_INDEX_LIMIT // (work.batch * widest)]
    limits += [(_INDEX_LIMIT - b.extent.fixed) // b.extent.per_step for b in manifest.buffers
               if b.extent.per_step]
    return min(limits)

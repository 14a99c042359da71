"""Where the arguments of ``run`` come from: the buffers of a module, sorted by role."""

from __future__ import annotations

from dataclasses import dataclass

from ecornn.errors import ModuleError
from ecornn.manifest import Manifest
from ecornn.program import Buffer
from ecornn.runtime.memory import layout

SCALARS = 4  # T, B, device, queue come before the pointers
MASKS = ("lengths", "resets", "sequences")
_INDEX_LIMIT = 2**31 - 1  # kernels count elements in int32


@dataclass(frozen=True)
class Plan:
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


def make_plan(manifest: Manifest) -> Plan:
    """Sorts the buffers; :class:`ModuleError` where one is missing, doubled or of an unknown role."""
    stack, states = manifest.stack, manifest.states
    prefixes = [f"{p.label}_" for p in stack.parts(manifest.workload)] if stack.count > 1 else [""]
    places = {(b.role, b.name if b.role.startswith("state") else ""): i + SCALARS
              for i, b in enumerate(manifest.buffers) if b.role not in ("packed", "workspace")}
    masks = [role for role in MASKS if getattr(stack, role)]
    names = {way: [[(f"state_{way}", f"{prefix}{state}_{way}") for prefix in prefixes] for state in states]
             for way in ("in", "out")}
    wanted = [("x", ""), ("y", ""), *((role, "") for role in masks),
              *(name for way in names.values() for each in way for name in each)]
    packed = tuple((i + SCALARS, b) for i, b in enumerate(manifest.buffers) if b.role == "packed")
    scratch = tuple((i + SCALARS, b) for i, b in enumerate(manifest.buffers) if b.role == "workspace")
    if set(places) != set(wanted) or len(wanted) + len(packed) + len(scratch) != len(manifest.buffers):
        listed = ", ".join(f"{b.name} ({b.role})" for b in manifest.buffers)
        raise ModuleError(f"the module's buffers do not fit states {states}: {listed}")
    state_in, state_out = (tuple(tuple(places[name] for name in each) for each in names[way])
                           for way in ("in", "out"))
    lengths, resets, sequences = (tuple(places[role, ""] for role in masks if role == one) for one in MASKS)
    return Plan(len(manifest.buffers) + SCALARS, places["x", ""], places["y", ""], state_in, state_out,
                lengths, resets, sequences, packed, tuple(i for i, _ in scratch), tuple(b for _, b in scratch))


def longest(manifest: Manifest) -> int:
    """The largest T: no buffer may have more elements than an int32 counts."""
    work = manifest.workload
    widest = max(work.input, manifest.stack.directions * work.hidden)
    limits = [_INDEX_LIMIT // (work.batch * widest)]
    limits += [(_INDEX_LIMIT - b.extent.fixed) // b.extent.per_step for b in manifest.buffers
               if b.extent.per_step]
    return min(limits)

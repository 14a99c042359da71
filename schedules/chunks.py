"""Calls in chunks of time, so that what they hand to each other takes the memory of a chunk, not of a sequence.

Chunks have as many steps whatever T is, but for the last ones in time; the call's rows are read in place. And memory
that nobody uses any more, used again: workspaces lie where earlier ones were, and a result where something was kept."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from ecornn.program import TENSORS, WORKSPACE, Buffer, Call, Chunks, Extent, Fill, Launch, Leaf, Relay, every, mapped
from ecornn.schedules.base import Component, Task, renamed
from ecornn.schedules.builder import PrimFunc, ceil_div
from ecornn.schedules.keeping import stored
from ecornn.schedules.timeline import cleared_between, remaining_lengths

ROOM = 18 << 20  # bytes of the workspaces that grow with a chunk
# By what is kept: who keeps states alone wants less memory.
LEAST = {"gates": 256, "states": 128}  # steps of a chunk of forward, whose workspaces are few
# nanoseconds of a recurrence for which a chunk of backward starts its kernels, and loads weights
BACKWARD = {"gates": 120_000, "states": 88_000}
SHORTEST = 512  # steps of a sequence that is cut
# Who keeps gates has that much memory anyway, of which workspaces are then this part at most; but no chunks that are
# shorter than these take, whose launches would be a fifth of the time (of forward, of which a chunk has few: steps).
PART, LEAST_FOR_PART, BACKWARD_FOR_PART = 0.1, 96, 60_000


def chunk_for(task: Task, buffers: Iterable[Buffer], expected: float | None = None) -> int | None:
    """Steps of a chunk, whole pieces of 16 bytes of any type; None where a sequence is not cut. ``buffers``: of the
    calls without chunks; ``expected``: nanoseconds of a step of backward's recurrence, None: of forward."""
    seq, keep = task.workload.seq, task.traversal.keep or "gates"
    step = sum(b.extent.per_step * b.itemsize for b in _workspaces(buffers))
    if not may_be_cut(task) or step * seq <= ROOM:
        return None
    least = LEAST[keep] if expected is None else max(8, int(BACKWARD[keep] / expected))
    return _evenly(seq, max(least, ROOM // step // 8 * 8))


def shorter(task: Task, steps: int, workspaces: Iterable[Buffer], expected: float | None = None) -> int:
    """Steps of a chunk, of ``steps`` at most, for which the ``workspaces`` are a part of what is kept, PART, if that is
    gates; but no fewer than the launches of a chunk are worth. ``expected`` as of :func:`chunk_for`."""
    w, own = task.workload, _workspaces(workspaces)
    if task.traversal.keep == "states":
        return steps
    kept = sum(b.nbytes(w.seq) for b in stored(task).buffers(w.batch, w.hidden, w.dtype))
    left = PART * kept - sum(b.nbytes(0) for b in own)
    most = int(left / sum(b.extent.per_step * b.itemsize for b in own)) // 8 * 8
    least = LEAST_FOR_PART if expected is None else max(8, int(BACKWARD_FOR_PART / expected))
    return steps if steps <= most else min(steps, _evenly(w.seq, max(least, most)))


def _evenly(seq: int, most: int) -> int:
    return ceil_div(ceil_div(seq, ceil_div(seq, most)), 8) * 8


def _workspaces(buffers: Iterable[Buffer]) -> list[Buffer]:
    return list({b.name: b for b in buffers if b.role == WORKSPACE}.values())


def may_be_cut(task: Task) -> bool:
    """True if the sequence is long enough for chunks and its rows may be cut at any step."""
    return task.workload.seq >= SHORTEST and not task.traversal.sequences


def in_chunks(part: Component, around: Iterable[Buffer], task: Task, steps: int, states: Iterable[tuple[str, str]],
              reverse: bool, prefix: str = "") -> Component:
    """The calls of ``part`` in chunks of ``steps``; with ``reverse`` the last one in time comes first. ``around``: the
    call's tensors that it reads and writes; ``task``: the layer's, also of an adjoint's ``part``; ``states``: input and
    output of each state (:class:`~ecornn.program.Chunks`); ``prefix``: of names of a chunk's workspaces."""
    w, traversal = task.workload, task.traversal
    sizes = {"I": w.input, "H": w.hidden, "W": traversal.y_width(task.graph.written * w.hidden)}
    if traversal.keep is not None:
        sizes["V"] = stored(task).together * w.hidden
    rows = {b.name: size for b in around if b.tensor is not None if (size := TENSORS[b.tensor].row(sizes)) is not None}
    names = {b.name: prefix + b.name for b in part.buffers if b.role == WORKSPACE and b.extent.per_step}
    buffers = [structs.replace(b, name=names[b.name], extent=Extent(b.extent.at(steps))) if b.name in names else b
               for b in part.buffers]
    functions, first = dict(part.functions), tuple[Call, ...]()
    if traversal.lengths:  # a chunk has lengths of its own
        function, remaining, launch = remaining_lengths(w.batch)
        functions[launch.function], rows[remaining.name], first = function, 1, (launch,)
        names["lengths"] = remaining.name
        buffers.append(remaining)
    calls = tuple(renamed(call, names) for call in part.calls)
    if traversal.resets and traversal.reverse:  # one between two chunks of such a layer is neither's
        function, launch = cleared_between(traversal, w.hidden, w.dtype, behind=not reverse)
        functions[launch.function] = function
        calls += tuple(renamed(replace(launch, names={"state": out}), names) for _, out in states)
    return Component(functions, tuple(buffers), (*first, Chunks(calls, rows, tuple(states), steps, reverse)))


def overlaid(part: Component, steps: int, apart: Collection[str]) -> Component:
    """The calls of ``part``, whose workspaces take less memory: one may be that of others which no call uses any more
    when the first one uses it. That call writes all of it that is read later, which is not so, or not known, of
    workspaces ``apart`` and of those that calls of chunks share with others. ``steps``: for which they are matched."""
    chunks = [call for call in part.calls if isinstance(call, Chunks)]
    levels = [tuple(call for call in part.calls if call not in chunks), *(call.calls for call in chunks)]
    uses = Uses(part.functions)
    inside = [set().union(*map(uses.of, level)) for level in levels]
    apart = {*apart}.union(*(pair for call in chunks for pair in call.states))
    instead: dict[str, str] = {}
    sizes = {b.name: b for b in part.buffers}
    for calls, own in zip(levels, inside, strict=True):
        taken = {*apart}.union(*(names for names in inside if names is not own))
        taken |= {call.buffer for call in calls if isinstance(call, Fill)}
        free = [b for b in sizes.values() if b.role == WORKSPACE and b.name in own - taken]
        instead |= _matched(free, [uses.of(call) for call in calls], steps, sizes)
    def leaf(one: Leaf) -> Leaf:
        names = {p.name: one.names.get(p.name, p.name) for p in part.functions[one.function].params}
        return replace(one, names={p: instead.get(b, b) for p, b in names.items() if p in one.names or b in instead})
    buffers = tuple(b for name, b in sizes.items() if name not in instead)
    return Component(part.functions, buffers, tuple(mapped(call, leaf) for call in part.calls))


def free_for(result: str, uses: Uses, calls: Iterable[Call], names: Iterable[str]) -> list[str]:
    """The ``names`` that nothing uses from the first call on that uses ``result``, of one chunk of time where calls go
    by these. A chunk uses its own rows of what is kept, and the one before them in its order, of later results."""
    moments = [uses.of(one) for call in calls for one in (call.calls if isinstance(call, Chunks) else [call])]
    first = next((n for n, names in enumerate(moments) if result in names), len(moments))
    later = set().union(*moments[first:])
    return [name for name in names if name not in later]


@dataclass(frozen=True)
class Uses:
    """The buffers that calls use; ``functions``: what they launch, by name."""

    functions: Mapping[str, PrimFunc]

    def of(self, call: Call) -> set[str]:
        found: set[str] = set()
        for one in every([call]):
            match one:
                case Fill():
                    found.add(one.buffer)
                case Relay():
                    found |= {one.before, one.after, one.given, one.written}
                case Chunks():
                    found.update(*one.states)
                case Launch():
                    found |= {one.names.get(p.name, p.name) for p in self.functions[one.function].params}
        return found


def _matched(free: Sequence[Buffer], moments: Sequence[set[str]], steps: int,
             sizes: dict[str, Buffer]) -> dict[str, str]:
    """The workspaces that lie in another one's place: name -> place, which grows in ``sizes`` to hold both.
    ``moments``: the buffers that each call uses."""
    times = {b.name: [n for n, names in enumerate(moments) if b.name in names] for b in free}
    instead, last = dict[str, str](), dict[str, int]()  # last: of a place, the last use of what lies there
    for b in sorted(free, key=lambda b: (times[b.name][0], -b.nbytes(steps))):
        places = {name: sizes[name].nbytes(steps) + b.nbytes(steps) - _holding(sizes[name], b).nbytes(steps)
                  for name, end in last.items() if end < times[b.name][0]}
        place = max(places, key=places.__getitem__, default="")
        if place and places[place] > 0:
            instead[b.name], sizes[place] = place, _holding(sizes[place], b)
        last[instead.get(b.name, b.name)] = times[b.name][-1]
    return instead


def _holding(place: Buffer, other: Buffer) -> Buffer:
    """A workspace that is large enough for either."""
    def elements(own: int, others: int) -> int:
        return max(own, ceil_div(others * other.itemsize, place.itemsize))
    a, b = place.extent, other.extent
    return structs.replace(place, extent=Extent(elements(a.fixed, b.fixed), elements(a.per_step, b.per_step)))

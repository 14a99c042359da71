"""Memory that nobody uses any more, used again: workspaces lie where earlier ones were, and a result where something
was kept."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from ecornn.program import WORKSPACE, Buffer, Call, Chunks, Extent, Fill, Launch, Leaf, Relay, every, mapped
from ecornn.schedules.base import Component
from ecornn.schedules.builder import PrimFunc, ceil_div


def overlaid(part: Component, steps: int, apart: Collection[str]) -> Component:
    """The calls of ``part``, whose workspaces take less memory: one may be that of others which no call uses any more
    when the first one uses it. That call writes all of it that is read later; of workspaces ``apart`` that is not so,
    or nobody knows, and of those that calls of chunks of time and others use.

    Parameters
    ----------
    steps : for which workspaces are matched; they are large enough for any
    """
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
    buffers = tuple(b for name, b in sizes.items() if name not in instead)
    return Component(part.functions, buffers, tuple(_with(call, instead, part.functions) for call in part.calls))


def free_for(result: str, uses: Uses, calls: Iterable[Call], names: Iterable[str]) -> list[str]:
    """The ``names`` that nothing uses from the first call on that uses ``result``, of one chunk of time where calls go
    by these. A chunk uses its own rows of what is kept, and the one before them in its order, whose results come
    later."""
    moments = [uses.of(one) for call in calls for one in (call.calls if isinstance(call, Chunks) else [call])]
    first = next((n for n, names in enumerate(moments) if result in names), len(moments))
    later = set().union(*moments[first:])
    return [name for name in names if name not in later]


@dataclass(frozen=True)
class Uses:
    """The buffers that calls use; ``functions``: what they launch, by name."""

    functions: Mapping[str, PrimFunc]

    def of(self, call: Call) -> set[str]:
        """The buffers that one call uses."""
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

    size = Extent(elements(place.extent.fixed, other.extent.fixed),
                  elements(place.extent.per_step, other.extent.per_step))
    return structs.replace(place, extent=size)


def _with(call: Call, instead: Mapping[str, str], functions: Mapping[str, PrimFunc]) -> Call:
    def leaf(one: Leaf) -> Leaf:
        names = {p.name: one.names.get(p.name, p.name) for p in functions[one.function].params}
        return replace(one, names={p: instead.get(b, b) for p, b in names.items() if p in one.names or b in instead})

    return mapped(call, leaf)

"""A step of a persistent kernel by the roles of its warps, as :mod:`ecornn.report.roles` reads them: a lane for each,
two beside each other. Lanes meet at named barriers; what one sends, another one waits for in the next step."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise

from ecornn.report import svg
from ecornn.report.roles import Act, Kernel, Phase, Role

GAP, PAD, LINE = 20.0, 8.0, 16.0  # px between lanes, within a box, of a line of text
LETTER = 6.7  # px, in the mean, of a font of 12 px
VERBS = {"wait": "waits", "multiply": "multiplies", "copy": "copies", "send": "sends"}

Line = tuple[str, str, Act | None]  # words, class, and what they are of


@dataclass
class _Box:
    """A phase, or what a lane does beside the step; ``top`` and ``bottom`` in px."""

    kind: str
    lines: list[Line]
    phase: Phase | None = None
    top: float = 0.0
    more: float = 0.0

    @property
    def bottom(self) -> float:
        return self.top + len(self.lines) * LINE + 2 * PAD - 2 + self.more

    def middle(self, act: Act) -> float:
        """The height of the line of an act."""
        return self.top + PAD + LINE * (next(n for n, line in enumerate(self.lines) if line[2] == act) + 0.5)

    def meets(self, act: Act) -> float:
        """The height at which a barrier is met: that of the end where nothing follows it."""
        assert self.phase is not None
        last = [one for one in self.phase.acts if one.kind != "note"][-1]
        return self.bottom if self.phase.ends and last == act else self.top


@dataclass
class _Lane:
    """A role from its left edge on."""

    role: Role
    left: float
    width: float
    boxes: list[_Box]

    def acts(self, kind: str, words: str = "") -> list[tuple[_Box, Act]]:
        """Acts of that kind with a partner (``by``), whose words contain ``words``, in order, each with its box."""
        return [(box, act) for box in self.boxes if box.phase for act in box.phase.acts
                if act.kind == kind and act.by and words in act.words]


def picture(kernel: Kernel) -> str:
    """The picture for the report's page."""
    parts, height = drawn(kernel, svg.WIDTH)
    return svg.figure(parts, label(kernel), height)


def label(kernel: Kernel) -> str:
    """The picture in words."""
    return f"A step of {kernel.name}. " + " ".join(
        f"{role.name}: {'; then '.join(phase.note for phase in role.steps)}." for role in kernel.roles if role.steps)


def drawn(kernel: Kernel, width: float, letter: float = LETTER, title: Sequence[str] = ()) -> tuple[list[str], float]:
    """SVG elements for a picture of that width, with letters of that mean width, below a title; their height. Px."""
    parts, y = _text([(line, "chosen", None) for line in title], 0, 0.0)
    for note in kernel.notes:
        more, y = _text(_wrapped(note, "tick", width, letter), 0, y)
        parts += more
    for first in range(0, len(kernel.roles), 2):
        more, y = _beside(kernel, kernel.roles[first:first + 2], y + 8, width, letter)
        parts += more
    return parts, round(y + 4)


def _wrapped(words: str, kind: str, width: float, letter: float, act: Act | None = None) -> list[Line]:
    return [(line, kind, act) for line in textwrap.wrap(words, max(8, int(width / letter)))]


def _text(lines: Sequence[Line], x: float, y: float) -> tuple[list[str], float]:
    return [svg.text(x, y + LINE * (n + 0.75), words, kind, "start")
            for n, (words, kind, _) in enumerate(lines)], y + LINE * len(lines)


def _beside(kernel: Kernel, roles: Sequence[Role], y: float, width: float, letter: float) -> tuple[list[str], float]:
    """Two lanes, or one."""
    each = (width - GAP * (len(roles) - 1)) / len(roles)
    parts, lanes, heights = [], [], []
    for number, role in enumerate(roles):
        left = number * (each + GAP)
        head = _wrapped(role.name, "chosen", each, letter)
        head += _wrapped(_where(kernel, role), "tick", each, letter)
        first = role.phases.index(role.steps[0]) if role.steps else 0
        for note in dict.fromkeys(phase.note for phase in role.phases[:first]):
            head += _wrapped(f"first: {note}", "tick", each, letter)
        more, end = _text(head, left, y)
        parts += more
        heights.append(end)
        lanes.append(_Lane(role, left, each, [_box(piece, each - 2 * PAD, letter)
                                              for phase in (role.steps or role.phases) for piece in _pieces(phase)]))
    y = max(heights) + 6
    parts.append(f'<line class="grid" x1="0" x2="{width:g}" y1="{y}" y2="{y}"/>')
    when = "in every step t" if any(role.steps for role in roles) else "beside the steps"
    more, y = _text([(when, "chosen", None)], 0, y + 4)
    parts += more
    return _placed(parts, lanes, y + 6, letter)


def _where(kernel: Kernel, role: Role) -> str:
    warps = role.threads // 32
    return (f"{warps} warp{'s' * (warps != 1)} in "
            + (f"each of {kernel.blocks} CTAs" if role.blocks == kernel.blocks > 1 else
               f"{role.blocks} of {kernel.blocks} CTAs"))


def _pieces(phase: Phase) -> Iterator[Phase]:
    """A phase, up to each barrier but the first, so that each can be met at a height of its own."""
    later = [n for n, act in enumerate(phase.acts) if "named barrier" in act.words][1:]
    for first, end in pairwise([0, *later, len(phase.acts)]):
        yield replace(phase, note="" if first else phase.note, acts=phase.acts[first:end],
                      ends=phase.ends or end < len(phase.acts))


def _box(phase: Phase, width: float, letter: float) -> _Box:
    lines = _wrapped(phase.note, "", width, letter)
    for act in phase.acts:
        verb = f"{VERBS[act.kind]}: " if act.kind in VERBS else ""
        lines += _wrapped(f"{verb}{act.words}", act.kind, width, letter, act)
    return _Box("phase", lines, phase)


def _placed(parts: list[str], lanes: list[_Lane], y: float, letter: float) -> tuple[list[str], float]:
    """Boxes below each other, so that lanes meet at the same height."""
    meetings = []
    if len(lanes) == 2:
        one, other = (lane.acts("wait", "named barrier") for lane in lanes)
        for by in dict.fromkeys(act.by for _, act in one):
            meetings += [*zip([m for m in one if m[1].by == by], [m for m in other if m[1].by == by], strict=False)]
    for lane in lanes:
        _stack(lane.boxes, y)
    for _ in meetings:
        for (mine, act), (theirs, same) in meetings:
            down = theirs.meets(same) - mine.meets(act)
            boxes, box = (lanes[0].boxes, mine) if down > 0 else (lanes[1].boxes, theirs)
            for later in boxes[boxes.index(box):] if down else ():
                later.top += abs(down)
    _beyond(lanes, y, letter)
    for lane in lanes:
        for box in lane.boxes:
            parts.append(f'<rect class="{box.kind}" x="{lane.left + 0.5:g}" y="{box.top:g}" width="{lane.width - 1:g}" '
                         f'height="{box.bottom - box.top - 4:g}" rx="4"/>')
            parts += _text(box.lines, lane.left + PAD, box.top + PAD - 3)[0]
    for (mine, act), _ in meetings:
        height = mine.meets(act) - 2
        parts.append(f'<path class="meets" d="M{lanes[0].left:g} {height:g}H{lanes[1].left + lanes[1].width:g}"/>')
    parts += _arrows(lanes)
    return parts, max(lane.boxes[-1].bottom for lane in lanes)


def _stack(boxes: Sequence[_Box], y: float) -> None:
    for box in boxes:
        box.top, y = y, y + box.bottom - box.top


def _beyond(lanes: list[_Lane], y: float, letter: float) -> None:
    """Adds boxes for the steps before and after, where a lane is in one of those while others are in this one."""
    end = max(lane.boxes[-1].bottom for lane in lanes)
    for lane in lanes:
        room = lane.boxes[0].top - y
        if room > 2 * LINE:
            words = "the end of step t - 1, then the barrier"
            before = _Box("beyond", _wrapped(words, "tick", lane.width - 2 * PAD, letter), top=y)
            before.more = y + room - before.bottom
            lane.boxes.insert(0, before)
        for act in [act for _, act in lane.acts("wait")][:1]:
            sent = _sent(lanes, lane, act)
            if sent:
                lines = _wrapped(f"step t + 1: {act.words}", "tick", lane.width - 2 * PAD, letter)
                after = _Box("beyond", [(words, kind, act) for words, kind, _ in lines], top=lane.boxes[-1].bottom)
                after.more = max(0.0, end - after.bottom)
                lane.boxes.append(after)


def _sent(lanes: list[_Lane], lane: _Lane, act: Act) -> tuple[_Lane, _Box, Act] | None:
    """The lane, box and act that send what ``lane`` waits for in ``act``; None if no other lane does."""
    return next(((other, box, sends) for other in lanes if other is not lane
                 for box, sends in other.acts("send") if sends.by == act.by), None)


def _arrows(lanes: list[_Lane]) -> list[str]:
    """Arrows from roles that send to those that wait for it in the next step."""
    parts = []
    for lane in lanes:
        after = lane.boxes[-1]
        act = after.lines[0][2] if after.kind == "beyond" else None
        sent = act and _sent(lanes, lane, act)
        if act and sent:
            other, box, sends = sent
            start, end = box.middle(sends), max(box.middle(sends), after.top + LINE)
            from_right = other.left > lane.left
            x = other.left if from_right else other.left + other.width
            to = lane.left + lane.width if from_right else lane.left
            way = 1 if from_right else -1
            parts.append(f'<path class="sent" d="M{x:g} {start:g}L{to + way:g} {end:g}m{way * 7} -4l{way * -7} 4l'
                         f'{way * 7} 4"><title>{escape(sends.words)}</title></path>')
    return parts

"""How the warps of a persistent kernel share a step, read from its TIR, and a picture of it. Notes (``T.note``) name
roles and phases, branches around them say whose they are, instructions behind them how they wait, multiply and send.
Lanes of roles meet at named barriers; what one sends, another waits for in the next step."""

from __future__ import annotations

import operator
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from ecornn import svg
from ecornn.schedules.builder import NOTE

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

_STEP = re.compile(r"t(_\d+)?")  # the variable of a loop over steps
_ROLE = re.compile(r"([\w ]+?)(?:, \w+)?: (.*)")
_WITHIN = ("consumer", "producer", "one thread")  # begin notes on how the phase before is done, but in such a role
_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "FloorDiv": operator.floordiv,
    "FloorMod": operator.mod, "LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge,
    "EQ": operator.eq, "NE": operator.ne, "And": operator.and_, "Or": operator.or_}
_WARP = 32
_MARK = re.compile(r"_\d+\b")  # what tells variables of one name apart
GAP, PAD, LINE = 20.0, 8.0, 16.0  # px between lanes, within a box, of a line of text
LETTER = 6.7  # px, in the mean, of a font of 12 px
VERBS = {"wait": "waits", "multiply": "multiplies", "copy": "copies", "send": "sends"}


@dataclass(frozen=True)
class Act:
    """Instructions of one kind in words, or a note on how the phase is done."""

    kind: str  # `wait`, `multiply`, `copy`, `send` or `note`
    words: str
    by: str = ""  # the same for those that send and those that wait for it


@dataclass
class Phase:
    note: str  # without the role
    step: bool  # in the loop over steps
    acts: list[Act] = field(default_factory=list)
    ends: bool = False  # nothing follows the last act


@dataclass(frozen=True)
class Role:
    """``threads`` of each of ``blocks`` CTAs, and what they do, in order."""

    name: str
    threads: int
    blocks: int
    phases: list[Phase]

    @property
    def steps(self) -> list[Phase]:
        return [phase for phase in self.phases if phase.step]


@dataclass(frozen=True)
class Kernel:
    """``blocks`` CTAs of ``threads``; ``notes`` are on all of them, ``roles`` in the order of the code."""

    name: str
    blocks: int
    threads: int
    notes: list[str]
    roles: list[Role]


@dataclass
class _Arm:
    """Code for the threads for which all ``conditions`` are as said, and the arms within."""

    conditions: list[tuple[Any, bool]] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    within: list[_Arm] = field(default_factory=list)

    def leaves(self) -> Iterator[_Arm]:
        """The innermost arms that have notes."""
        inner = [leaf for arm in self.within for leaf in arm.leaves()]
        if inner or self.phases:
            yield from inner or [self]


def kernel_of(functions: Mapping[str, PrimFunc]) -> Kernel | None:
    """The kernel of a program that goes through all steps; None where each step is a launch."""
    kernels = (_kernel(name, function) for name, function in functions.items())
    return next((kernel for kernel in kernels if any(role.steps for role in kernel.roles)), None)


def _kernel(name: str, function: PrimFunc) -> Kernel:
    reader, top = _Reader(), _Arm()
    reader.read(function.body, top)
    leaves, roles = [*top.leaves()], []
    for arm in leaves:
        named = _role(phase.note for phase in arm.phases)
        for phase in arm.phases:
            if (match := _ROLE.fullmatch(phase.note)) and match[1] == named:
                phase.note = match[2]
        roles.append(Role(named, *reader.extents_of(arm), arm.phases))
    return Kernel(name, reader.extents.get("block", 1), reader.extents.get("thread", 1),
                  [phase.note for phase in reader.phases if not any(phase in arm.phases for arm in leaves)], roles)


class _Reader:
    def __init__(self) -> None:
        self.extents: dict[str, int] = {}
        self.indices: dict[Any, int] = {}  # those of block and thread, zero
        self.bound: dict[Any, Any] = {}  # variables, and what they are of these
        self.phases: list[Phase] = []  # of all arms

    def read(self, stmt: Any, arm: _Arm, step: bool = False, polls: bool = False) -> None:
        """``step``: within the loop over steps; ``polls``: within a loop that ends when something has come."""
        kind = type(stmt).__name__
        if kind == "SeqStmt":
            for one in stmt.seq:
                self.read(one, arm, step, polls)
        elif kind == "IfThenElse":
            split = not step and self._known(stmt.condition) and any(call.words[:1] == (NOTE,) for call in _calls(stmt))
            for branch, holds in ((stmt.then_case, True), (stmt.else_case, False)):
                inner = _Arm([*arm.conditions, (stmt.condition, holds)]) if split else arm
                if split:
                    arm.within.append(inner)
                if branch is not None:
                    self.read(branch, inner, step, polls)
        elif kind in ("For", "While", "AttrStmt"):
            before, steps = len(self.phases), kind == "For" and bool(_STEP.fullmatch(stmt.loop_var.name))
            self.read(stmt.body, arm, step or steps, polls or kind == "While")
            if steps and arm.phases and before == len(self.phases):  # the note is on the loop
                arm.phases[-1].step = True
        elif kind == "ScopeIdDefStmt":
            scope = getattr(stmt, "def")
            for var, extent in zip(scope.def_ids, scope.extents, strict=True):
                self.extents[var.name], self.indices[var] = int(extent), 0
        else:
            if kind == "Bind" and self._known(stmt.value):
                self.bound[stmt.var] = stmt.value
            self._leaf(stmt, arm, step, polls)

    def extents_of(self, arm: _Arm) -> tuple[int, int]:
        """The number of threads of a CTA, in whole warps, that come to an arm, and of CTAs in which they do."""
        warps = range(0, self.extents.get("thread", 1), _WARP)
        threads = [_WARP * sum(all(bool(self._value(of, at)) == holds for of, holds in arm.conditions)
                               for at in (self._at(block, first) for first in warps))
                   for block in range(self.extents.get("block", 1))]
        return max(threads), sum(map(bool, threads))

    def _at(self, block: int, thread: int) -> dict[Any, int]:
        return {var: {"block": block, "thread": thread}.get(var.name, 0) for var in self.indices}

    def _value(self, expr: Any, at: dict[Any, int]) -> int:
        """An expression of block and thread, as ``at`` has them; KeyError where it reads another variable."""
        kind = type(expr).__name__
        if kind == "IntImm":
            return int(expr.value)
        if kind != "Var":
            return int(_OPERATORS[kind](self._value(expr.a, at), self._value(expr.b, at)))
        if expr not in at:
            at[expr] = self._value(self.bound[expr], at)
        return at[expr]

    def _known(self, expr: Any) -> bool:
        try:
            self._value(expr, self._at(0, 0))
        except KeyError:
            return False
        return True

    def _leaf(self, stmt: Any, arm: _Arm, step: bool, polls: bool) -> None:
        calls = _calls(stmt)
        if any(call.words[:1] == (NOTE,) for call in calls):
            self._begin(calls[0].words[1], arm, step)
        elif arm.phases:
            phase = arm.phases[-1]
            acts = [act for call in calls if (act := _act(call, polls))]
            phase.acts += [act for act in acts if act not in phase.acts]
            if acts:
                phase.ends = True
            elif not any("fence" in call.name for call in calls) and (not phase.acts or phase.acts[-1].kind != "note"):
                phase.ends = False

    def _begin(self, text: str, arm: _Arm, step: bool) -> None:
        role = _role((*(phase.note for phase in arm.phases), text))
        if arm.phases and text.startswith(_WITHIN) and not text.startswith(role):
            arm.phases[-1].acts.append(Act("note", text))
        else:
            arm.phases.append(Phase(text, step))
            self.phases.append(arm.phases[-1])


class _Call(NamedTuple):
    """An instruction: its ``name``, the ``words`` that it has as text, its other arguments."""

    name: str
    words: tuple[str, ...]
    arguments: list[Any]


def _calls(stmt: Any) -> list[_Call]:
    import tvm_ffi
    from tvm import ir

    calls: list[_Call] = []

    def one(call: ir.Call) -> None:
        texts = [type(argument).__name__ == "StringImm" for argument in call.args]
        calls.append(_Call(str(getattr(call.op, "name", "")).removeprefix("tirx."),
                           tuple(str(a.value) for a, text in zip(call.args, texts, strict=True) if text and a.value),
                           [a for a, text in zip(call.args, texts, strict=True) if not text]))

    tvm_ffi.structural_walk(stmt, (ir.Call, one))
    return calls


def _act(call: _Call, polls: bool) -> Act | None:
    """The act that an instruction of ``schedules/cuda/isa`` is; None if it does not wait, multiply, copy or send."""
    name, words = call.name.removeprefix("ptx."), call.words
    function = words[0] if name == "cuda.func_call" else ""
    shape = next((word for word in words if word.startswith(("m16", "m64"))), "")
    if name.startswith("bar_"):
        number, threads = call.arguments
        return Act("wait" if "sync" in words else "send", f"named barrier of {int(threads.value)} threads",
                   _MARK.sub("", str(number)))
    if name in ("cuda.cta_sync", "barrier_cluster_wait"):
        return Act("wait", "barrier of the CTA" if name == "cuda.cta_sync" else "barrier of the cluster", name)
    if function.startswith("ecornn_mbarrier_wait") or (function == "ecornn_mbarrier_test" and polls):
        by = "cluster" if function.endswith("cluster") else ""
        return Act("wait", "mbarrier that CTAs of the cluster complete" if by else "mbarrier", by)
    if function.startswith("ecornn_send"):
        return Act("send", "to the shared memory of the cluster's CTAs", "cluster")
    reads = name.startswith("ld") and polls and {"relaxed", "acquire"} & {*words}
    if reads or (name.startswith(("st", "red")) and {"relaxed", "release"} & {*words}):
        buffer = str(next(a for a in call.arguments if type(a).__name__ == "Call").args[0]).partition("[")[0]
        does = "polls" if reads else "counts in" if name == "red" else "to"
        return Act("wait" if reads else "send", f"{does} {buffer} in L2", buffer)
    if name.startswith("cp_async_bulk"):
        return Act("copy", "bulk copies to shared memory")
    return Act("multiply", f"{name.split('_')[0]} {shape}") if shape and name.startswith(("mma", "wgmma")) else None


def _role(notes: Iterable[str]) -> str:
    """The role that the first note with one names; ``all threads`` if none does."""
    return next((match[1] for note in notes if (match := _ROLE.fullmatch(note))), "all threads")


Line = tuple[str, str, Act | None]  # words, class, and what they are of


@dataclass
class _Box:
    """A phase, or what a lane does beside the step; ``top`` and ``bottom`` in px."""

    lines: list[Line]
    phase: Phase | None = None
    top: float = 0.0
    more: float = 0.0

    @property
    def bottom(self) -> float:
        return self.top + len(self.lines) * LINE + 2 * PAD - 2 + self.more

    def middle(self, act: Act) -> float:
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
    parts, height = drawn(kernel, svg.WIDTH)
    return svg.figure(parts, label(kernel), height)


def label(kernel: Kernel) -> str:
    return f"A step of {kernel.name}. " + " ".join(
        f"{role.name}: {'; then '.join(phase.note for phase in role.steps)}." for role in kernel.roles if role.steps)


def drawn(kernel: Kernel, width: float, letter: float = LETTER, title: Sequence[str] = ()) -> tuple[list[str], float]:
    """SVG elements for a picture of that width, with letters of that mean width, below a title; their height. Px."""
    parts, y = _text([*((line, "chosen", None) for line in title),
                      *(line for note in kernel.notes for line in _wrapped(note, "tick", width, letter))], 0, 0.0)
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
    each = (width - GAP * (len(roles) - 1)) / len(roles)
    parts, lanes, below = list[str](), [], 0.0
    for number, role in enumerate(roles):
        left = number * (each + GAP)
        warps, some = role.threads // _WARP, "each" if role.blocks == kernel.blocks > 1 else role.blocks
        head = _wrapped(role.name, "chosen", each, letter)
        head += _wrapped(f"{warps} warp{'s' * (warps != 1)} in {some} of {kernel.blocks} CTAs", "tick", each, letter)
        first = role.phases.index(role.steps[0]) if role.steps else 0
        for note in dict.fromkeys(phase.note for phase in role.phases[:first]):
            head += _wrapped(f"first: {note}", "tick", each, letter)
        more, end = _text(head, left, y)
        parts, below = parts + more, max(below, end)
        lanes.append(_Lane(role, left, each, [_box(piece, each - 2 * PAD, letter)
                                              for phase in (role.steps or role.phases) for piece in _pieces(phase)]))
    y = below + 6
    when = "in every step t" if any(role.steps for role in roles) else "beside the steps"
    more, end = _text([(when, "chosen", None)], 0, y + 4)
    rule = f'<line class="grid" x1="0" x2="{width:g}" y1="{y}" y2="{y}"/>'
    return _placed([*parts, rule, *more], lanes, end + 6, letter)


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
    return _Box(lines, phase)


def _placed(parts: list[str], lanes: list[_Lane], y: float, letter: float) -> tuple[list[str], float]:
    """Boxes below each other, so that lanes meet at the same height."""
    meetings = []
    if len(lanes) == 2:
        one, other = (lane.acts("wait", "named barrier") for lane in lanes)
        for by in dict.fromkeys(act.by for _, act in one):
            meetings += [*zip([m for m in one if m[1].by == by], [m for m in other if m[1].by == by], strict=False)]
    for lane in lanes:
        top = y
        for box in lane.boxes:
            box.top, top = top, top + box.bottom - box.top
    for _ in meetings:
        for (mine, act), (theirs, same) in meetings:
            down = theirs.meets(same) - mine.meets(act)
            boxes, box = (lanes[0].boxes, mine) if down > 0 else (lanes[1].boxes, theirs)
            for later in boxes[boxes.index(box):] if down else ():
                later.top += abs(down)
    _beyond(lanes, y, letter)
    for lane in lanes:
        for box in lane.boxes:
            parts.append(f'<rect class="{"phase" if box.phase else "beyond"}" x="{lane.left + 0.5:g}" y="{box.top:g}" '
                         f'width="{lane.width - 1:g}" height="{box.bottom - box.top - 4:g}" rx="4"/>')
            parts += _text(box.lines, lane.left + PAD, box.top + PAD - 3)[0]
    for (mine, act), _ in meetings:
        height = mine.meets(act) - 2
        parts.append(f'<path class="meets" d="M{lanes[0].left:g} {height:g}H{lanes[1].left + lanes[1].width:g}"/>')
    parts += _arrows(lanes)
    return parts, max(lane.boxes[-1].bottom for lane in lanes)


def _beyond(lanes: list[_Lane], y: float, letter: float) -> None:
    """Adds boxes for the steps before and after, where a lane is in one of those while others are in this one."""
    end = max(lane.boxes[-1].bottom for lane in lanes)
    for lane in lanes:
        room = lane.boxes[0].top - y
        if room > 2 * LINE:
            words = "the end of step t - 1, then the barrier"
            before = _Box(_wrapped(words, "tick", lane.width - 2 * PAD, letter), top=y)
            before.more = y + room - before.bottom
            lane.boxes.insert(0, before)
        for act in [act for _, act in lane.acts("wait")][:1]:
            if _sent(lanes, lane, act):
                lines = _wrapped(f"step t + 1: {act.words}", "tick", lane.width - 2 * PAD, letter, act)
                after = _Box(lines, top=lane.boxes[-1].bottom)
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
        act = after.lines[0][2] if after.phase is None else None
        sent = act and _sent(lanes, lane, act)
        if act and sent:
            other, box, sends = sent
            start, end = box.middle(sends), max(box.middle(sends), after.top + LINE)
            way = 1 if other.left > lane.left else -1
            x, to = (other.left, lane.left + lane.width) if way > 0 else (other.left + other.width, lane.left)
            parts.append(f'<path class="sent" d="M{x:g} {start:g}L{to + way:g} {end:g}m{way * 7} -4l{way * -7} 4l'
                         f'{way * 7} 4"><title>{escape(sends.words)}</title></path>')
    return parts

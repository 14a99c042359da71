"""Reads from a kernel's TIR how its warps share a step: notes (``T.note``) name roles and phases, the branches around
them say which threads those are, and the instructions behind each note say how they wait, multiply and send."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ecornn.schedules.builder import NOTE

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc
else:
    PrimFunc = Any

_STEP = re.compile(r"t(_\d+)?")  # the variable of a loop over steps
_ROLE = re.compile(r"([\w ]+?)(?:, \w+)?: (.*)")
_WITHIN = ("consumer", "producer", "one thread")  # begin notes on how the phase before is done, but in such a role
_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "FloorDiv": operator.floordiv,
    "FloorMod": operator.mod, "LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge,
    "EQ": operator.eq, "NE": operator.ne, "And": operator.and_, "Or": operator.or_}
_WARP = 32
_MARK = re.compile(r"_\d+\b")  # what tells variables of one name apart


@dataclass(frozen=True)
class Act:
    """Instructions of one ``kind``, ``wait``, ``multiply``, ``copy`` or ``send``, in words; ``by`` is the same for
    those that send and those that wait for it. Kind ``note``: a note on how the phase is done."""

    kind: str
    words: str
    by: str = ""


@dataclass
class Phase:
    """The code behind one note. ``note``: its text without the role; ``step``: True in the loop over steps; ``ends``:
    True if nothing follows the last act."""

    note: str
    step: bool
    acts: list[Act] = field(default_factory=list)
    ends: bool = False


@dataclass(frozen=True)
class Role:
    """``threads`` of each of ``blocks`` CTAs, and what they do, in order."""

    name: str
    threads: int
    blocks: int
    phases: list[Phase]

    @property
    def steps(self) -> list[Phase]:
        """The phases in the loop over steps."""
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
        roles.append(Role(named, *reader.extents_of(arm), [*_told(named, arm.phases)]))
    return Kernel(name, reader.extents.get("block", 1), reader.extents.get("thread", 1),
                  [phase.note for phase in reader.phases if not any(phase in arm.phases for arm in leaves)], roles)


def _told(role: str, phases: list[Phase]) -> Iterator[Phase]:
    """The phases, without the role in their notes."""
    for phase in phases:
        match = _ROLE.fullmatch(phase.note)
        if match and match[1] == role:
            phase.note = match[2]
        yield phase


class _Reader:
    """Goes through a kernel once."""

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
        blocks = [self._threads(arm, block) for block in range(self.extents.get("block", 1))]
        return max(blocks), sum(map(bool, blocks))

    def _threads(self, arm: _Arm, block: int) -> int:
        places = (self._at(block, thread) for thread in range(0, self.extents.get("thread", 1), _WARP))
        return _WARP * sum(all(bool(_value(of, at)) == holds for of, holds in arm.conditions) for at in places)

    def _at(self, block: int, thread: int) -> _At:
        at = _At({var: {"block": block, "thread": thread}.get(var.name, 0) for var in self.indices})
        at.bound = self.bound
        return at

    def _known(self, expr: Any) -> bool:
        try:
            _value(expr, self._at(0, 0))
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


class _At(dict[Any, int]):
    """Values of the variables that follow from a thread's place; others raise KeyError."""

    bound: dict[Any, Any]

    def __missing__(self, var: Any) -> int:
        self[var] = _value(self.bound[var], self)
        return self[var]


@dataclass(frozen=True)
class _Call:
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
        if function.endswith("cluster"):
            return Act("wait", "mbarrier that CTAs of the cluster complete", "cluster")
        return Act("wait", "mbarrier")
    if function.startswith("ecornn_send"):
        return Act("send", "to the shared memory of the cluster's CTAs", "cluster")
    if name.startswith("ld") and polls and {"relaxed", "acquire"} & {*words}:
        return Act("wait", f"polls {_buffer(call)} in L2", _buffer(call))
    if name.startswith(("st", "red")) and {"relaxed", "release"} & {*words}:
        return Act("send", f"{'counts in' if name == 'red' else 'to'} {_buffer(call)} in L2", _buffer(call))
    if name.startswith("cp_async_bulk"):
        return Act("copy", "bulk copies to shared memory")
    return Act("multiply", f"{name.split('_')[0]} {shape}") if shape and name.startswith(("mma", "wgmma")) else None


def _buffer(call: _Call) -> str:
    """The memory that an instruction is on."""
    pointer = next(a for a in call.arguments if type(a).__name__ == "Call")
    return str(pointer.args[0]).partition("[")[0]


def _role(notes: Iterable[str]) -> str:
    """The role that the first note with one names; ``all threads`` if none does."""
    return next((match[1] for note in notes if (match := _ROLE.fullmatch(note))), "all threads")


def _value(expr: Any, at: Mapping[Any, int]) -> int:
    """The value of an expression of block and thread. Raises KeyError where it reads another variable."""
    kind = type(expr).__name__
    if kind == "IntImm":
        return int(expr.value)
    return at[expr] if kind == "Var" else int(_OPERATORS[kind](_value(expr.a, at), _value(expr.b, at)))

"""What the rest of the project knows about a cell: one step, sorted by when it can be computed.

Every scalar of the step has a level, the number of exchanges between hidden units that come before it:

    -3  parameters only            computed once                      ``invariants``
    -2  x_t and parameters         hoisted out of time                ``hoisted``
    -1  and statistics of these    hoisted as well                    ``normalized``
     0  states                     at the start of the step           ``prologue``
     p  after the p-th exchange    phase p of the step                ``phases[p - 1]``

All scalars are float32 tirx variables of one (batch row b, hidden unit j). What units exchange are products,
``var[b, j] = sum_k operand[b, k] * weight[gate, j, k]``, and statistics, which are one value a batch row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Var = Any  # tvm.tirx.Var; TVM is not imported by readers of this file
Expr = Any  # tvm.ir.PrimExpr


@dataclass(frozen=True)
class Assign:
    """``var = value``; the value reads leaves and earlier assignments only."""

    var: Var
    value: Expr


@dataclass(frozen=True)
class Row:
    """``var[b, j] = sum_k operand[b, k] * weight[gate, j, k]``; operand None is the input x."""

    var: Var
    operand: Var | None
    weight: str
    gate: int


@dataclass(frozen=True)
class Vector:
    """A leaf ``var[j] = parameter[gate, j]``."""

    var: Var
    parameter: str
    gate: int


@dataclass(frozen=True)
class Statistic:
    """Sums of a batch row over the hidden units, and over several ``operands``.

    ``total[b] = sum_o sum_k operand_o[b, k]``; with N terms in it, where the cell asks for it,
    ``squares[b] = sum_o sum_k (operand_o[b, k] - total[b] / N) ** 2``, which needs no exchange of its own.
    """

    total: Var
    squares: Var | None
    operands: tuple[Var, ...]

    @property
    def made(self) -> tuple[Var, ...]:
        """Its variables."""
        return (self.total,) if self.squares is None else (self.total, self.squares)


@dataclass(frozen=True)
class Phase:
    """One exchange: all blocks must see ``operands`` before ``rows``, and those of ``statistics`` before these, can be
    computed."""

    operands: tuple[Var, ...]
    rows: tuple[Row, ...]
    assigns: tuple[Assign, ...]
    statistics: tuple[Statistic, ...] = ()


@dataclass(frozen=True)
class StepGraph:
    """The analysed step of a cell.

    Attributes
    ----------
    parameters : name -> te shape, (G, H, K) or (G, H)
    states : name -> leaf, the value of the state before the step
    results : name -> variable or leaf that is the state after the step
    output : name of the state that is y
    x : leaf of x[b, j] used outside products (then I == H), or None
    vectors : parameter vectors that the step reads
    invariants : assignments of level -2
    hoisted_rows, hoisted : products with x, and assignments of level -2
    hoisted_statistics, normalized : statistics of these, and assignments of level -1
    projected : variables of level -2 that level -1 or the recurrence reads: what the hoisted product writes
    hoisted_outputs : variables of level -2 and -1 that the recurrence reads (the hoisted tensor's rows). As many as
        ``projected``, and the same ones where there are no hoisted statistics; else the last one of either may
        be repeated
    invariant_outputs : variables and vectors of level -3 that the recurrence reads
    row_inputs : variables of a batch row that the recurrence reads from memory, beside the hoisted tensor; none, but
        where a schedule has it (``normalization.py``)
    prologue : assignments of level 0
    phases : the recurrent products and statistics in order, each with the assignments that follow it
    """

    cell: str
    parameters: dict[str, tuple[int, ...]]
    states: dict[str, Var]
    results: dict[str, Var]
    output: str
    x: Var | None
    vectors: tuple[Vector, ...]
    invariants: tuple[Assign, ...]
    hoisted_rows: tuple[Row, ...]
    hoisted: tuple[Assign, ...]
    hoisted_outputs: tuple[Var, ...]
    invariant_outputs: tuple[Var, ...]
    prologue: tuple[Assign, ...]
    phases: tuple[Phase, ...]
    hoisted_statistics: tuple[Statistic, ...] = ()
    normalized: tuple[Assign, ...] = ()
    projected: tuple[Var, ...] = ()
    row_inputs: tuple[Var, ...] = ()

    @property
    def products(self) -> tuple[Phase, ...]:
        """The phases with a product."""
        return tuple(phase for phase in self.phases if phase.rows)

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """Those of the recurrence, in order."""
        return tuple(s for phase in self.phases for s in phase.statistics)

    def describe(self) -> str:
        """The step as text, one assignment a line; equal for equal cells."""
        lines = [f"cell {self.cell}({', '.join(self.states)}) -> {self.output}"]
        lines += [f"parameter {n}{s}" for n, s in self.parameters.items()]
        lines += [f"  {v.var.name} = {v.parameter}[{v.gate}, j]" for v in self.vectors]

        def block(title: str, rows: tuple[Row, ...], assigns: tuple[Assign, ...],
                  statistics: tuple[Statistic, ...] = ()) -> None:
            if rows or assigns or statistics:
                lines.append(title)
            for r in rows:
                source = "x" if r.operand is None else r.operand.name
                lines.append(f"  {r.var.name} = sum_k {source}[b, k] * {r.weight}[{r.gate}, j, k]")
            for s in statistics:
                names = ", ".join(v.name for v in s.operands)
                lines.append(f"  {s.total.name} = sum of {names} over all units")
                if s.squares is not None:
                    lines.append(f"  {s.squares.name} = sum of the squares of their deviations from its mean")
            lines.extend(f"  {a.var.name} = {text(a.value)}" for a in assigns)

        block("once:", (), self.invariants)
        block("hoisted out of time:", self.hoisted_rows, self.hoisted)
        block("hoisted, statistics:", (), self.normalized, self.hoisted_statistics)
        block("step:", (), self.prologue)
        for number, phase in enumerate(self.phases, 1):
            names = ", ".join(dict.fromkeys(v.name for v in (
                *phase.operands, *(o for s in phase.statistics for o in s.operands))))
            block(f"phase {number}, exchange of {names or 'nothing'}:", phase.rows, phase.assigns, phase.statistics)
        lines.append("states: " + ", ".join(f"{n} = {v.name}" for n, v in self.results.items()))
        return "\n".join(lines)


def text(value: Expr) -> str:
    """A scalar expression in TVM's notation, on one line."""
    return " ".join(value.script(show_meta=False).replace("T.", "").split())

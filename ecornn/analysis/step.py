"""What the rest of the project knows about a cell: one step, sorted by when it can be computed.

Every scalar of the step has a level, the number of recurrent products that come before it:

    -2  parameters only            computed once                      ``invariants``
    -1  x_t and parameters         hoisted out of time                ``hoisted``
     0  states                     at the start of the step           ``prologue``
     p  after the p-th product     phase p of the step                ``phases[p - 1]``

All scalars are float32 tirx variables of one (batch row b, hidden unit j); a product row is
``var[b, j] = sum_k operand[b, k] * weight[gate, j, k]``.
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
class Phase:
    """One exchange of state: all blocks must see ``operands`` before ``rows`` can be computed."""

    operands: tuple[Var, ...]
    rows: tuple[Row, ...]
    assigns: tuple[Assign, ...]


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
    hoisted_rows, hoisted : products with x, and assignments of level -1
    hoisted_outputs : variables of level -1 that the recurrence reads (the hoisted tensor's rows)
    invariant_outputs : variables and vectors of level -2 that the recurrence reads
    prologue : assignments of level 0
    phases : the recurrent products in order, each with the assignments that follow it
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

    def describe(self) -> str:
        """The step as text, one assignment a line; equal for equal cells."""
        lines = [f"cell {self.cell}({', '.join(self.states)}) -> {self.output}"]
        lines += [f"parameter {n}{s}" for n, s in self.parameters.items()]
        lines += [f"  {v.var.name} = {v.parameter}[{v.gate}, j]" for v in self.vectors]

        def block(title: str, rows: tuple[Row, ...], assigns: tuple[Assign, ...]) -> None:
            if rows or assigns:
                lines.append(title)
            for r in rows:
                source = "x" if r.operand is None else r.operand.name
                lines.append(f"  {r.var.name} = sum_k {source}[b, k] * {r.weight}[{r.gate}, j, k]")
            lines.extend(f"  {a.var.name} = {text(a.value)}" for a in assigns)

        block("once:", (), self.invariants)
        block("hoisted out of time:", self.hoisted_rows, self.hoisted)
        block("step:", (), self.prologue)
        for number, phase in enumerate(self.phases, 1):
            names = ", ".join(v.name for v in phase.operands)
            block(f"phase {number}, exchange of {names or 'nothing'}:", phase.rows, phase.assigns)
        lines.append("states: " + ", ".join(f"{n} = {v.name}" for n, v in self.results.items()))
        return "\n".join(lines)


def text(value: Expr) -> str:
    """A scalar expression in TVM's notation, on one line."""
    return " ".join(value.script(show_meta=False).replace("T.", "").split())

"""The step graph, by which the rest of the project knows a cell: one step, sorted by when it can be computed.

Every scalar of the step has a level, the number of exchanges between hidden units that come before it:

    -3  parameters only            computed once                      ``invariants``
    -2  x_t and parameters         hoisted out of time                ``hoisted``
    -1  and statistics of these    hoisted as well                    ``normalized``
     0  states                     at the start of the step           ``prologue``
     p  after the p-th exchange    phase p of the step                ``phases[p - 1]``

All scalars are float32 tirx variables of one (batch row b, hidden unit j). Units exchange the operands of products and
of statistics, which are one value a batch row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tvm.ir import Expr
    from tvm.tirx import Var


class Level:
    """The levels before the first exchange."""

    INVARIANT, INPUT, NORMALIZED, STATE = -3, -2, -1, 0


@dataclass(frozen=True)
class Assign:
    """``var = value``; the value reads leaves and earlier assignments only."""

    var: Var
    value: Expr


@dataclass(frozen=True)
class Term:
    """``sum_k operand[b, k] * parameter[gate, j, k]``, or ``parameter[gate, k, j]`` if ``transposed``; operand None is
    the input x. With ``heads`` the parameter is (G, H, H / heads), blocks on a diagonal (``heads.py``); transposed,
    each block is. A parameter that is narrower than H has ``rows`` of its own, less than H units, beyond which the
    product is 0, or ``columns``, the first of the operand's values; 0: all (``narrow.py``)."""

    operand: Var | None
    parameter: str
    gate: int
    transposed: bool = False
    heads: int = 1
    rows: int = 0
    columns: int = 0

    @property
    def source(self) -> tuple[str, int]:
        return self.parameter, self.gate

    @property
    def narrow(self) -> bool:
        return bool(self.rows or self.columns)


@dataclass(frozen=True)
class Product:
    """``var[b, j]`` = the sum of the ``terms``: one in a cell; in the adjoint one for each product of an operand."""

    var: Var
    terms: tuple[Term, ...]

    @property
    def term(self) -> Term:
        (term,) = self.terms
        return term

    def source(self, operand: Var) -> tuple[str, int]:
        """Parameter and gate that multiply ``operand``; ``("", 0)``, zeros in a packing, if none do."""
        return next((t.source for t in self.terms if operand.same_as(t.operand)), ("", 0))


@dataclass(frozen=True)
class Vector:
    """A leaf ``var[j] = parameter[gate, j]``. Without a name of a parameter it is ``var[j] = j``, of ``gate`` units: no
    memory has it, kernels know the number of a unit."""

    var: Var
    parameter: str
    gate: int

    @property
    def source(self) -> tuple[str, int]:
        """Parameter and gate; zeros in a packing, which nobody reads, where there is none."""
        return (self.parameter, self.gate) if self.parameter else ("", 0)

    @property
    def numbers(self) -> bool:
        return not self.parameter


@dataclass(frozen=True)
class Statistic:
    """Sums of a batch row over the hidden units, and over ``operands``: ``total[b] = sum_o sum_k operand_o[b, k]``;
    with N terms, where asked for, ``squares[b] = sum_o sum_k (operand_o[b, k] - total[b] / N) ** 2``, in the same
    exchange. Or ``largest``: ``total[b] = max_o max_k operand_o[b, k]``; a ``shift`` has no gradient, since in the end
    nothing depends on it. ``units``: (first, count) of the units that it goes over; None: all."""

    total: Var
    squares: Var | None
    operands: tuple[Var, ...]
    largest: bool = False
    shift: bool = False
    units: tuple[int, int] | None = None

    def count(self, hidden: int) -> int:
        """The number of its values, with H = ``hidden``."""
        return len(self.operands) * (hidden if self.units is None else self.units[1])

    @property
    def over(self) -> str:
        return "all units" if self.units is None else f"units {self.units[0]} to {sum(self.units) - 1}"

    @property
    def made(self) -> tuple[Var, ...]:
        return (self.total,) if self.squares is None else (self.total, self.squares)


@dataclass(frozen=True)
class Sum:
    """A value added up over all steps and batch rows: ``var[j] = sum_t sum_b value[t, b, j]``."""

    var: Var
    value: Var


@dataclass(frozen=True)
class OuterProduct:
    """Outer products added up over all steps and rows, one matrix product once the steps are done: ``parameter[gate, j,
    k]`` gets ``sum_t sum_b value[t, b, j] * operand[t, b, k]``; None is the input x. With ``heads`` k goes over j's own
    head; ``rows`` and ``columns`` as of :class:`Term`."""

    parameter: str
    gate: int
    value: Var | None
    operand: Var | None
    heads: int = 1
    rows: int = 0
    columns: int = 0


@dataclass(frozen=True)
class Phase:
    """One exchange: all blocks must see the operands before products and statistics of these can be computed."""

    operands: tuple[Var, ...]
    products: tuple[Product, ...]
    assigns: tuple[Assign, ...]
    statistics: tuple[Statistic, ...] = ()

    @property
    def made(self) -> tuple[Var, ...]:
        return (*(p.var for p in self.products), *(a.var for a in self.assigns))

    @classmethod
    def of(cls, products: Sequence[Product], assigns: tuple[Assign, ...] = (),
           statistics: tuple[Statistic, ...] = ()) -> Phase:
        """The phase of these products, whose operands are its own."""
        return cls(tuple(dict.fromkeys(t.operand for p in products for t in p.terms)), tuple(products), assigns,
                   statistics)


@dataclass(frozen=True)
class StepGraph:
    """The analysed step of a cell. A graph without states is a pass over all steps at once."""

    cell: str
    parameters: dict[str, tuple[int, ...]]  # name -> te shape, (G, H, K) or (G, H)
    states: dict[str, Var]  # name -> leaf, the value of the state before the step
    results: dict[str, Var]  # name -> variable or leaf that is the state after the step
    output: str  # name of the state that is y; empty where y is what `outputs` has
    x: Var | None  # leaf of x[b, j] used outside products (then I == H), or None
    vectors: tuple[Vector, ...]  # parameter vectors that the step reads
    invariants: tuple[Assign, ...]  # assignments of level -3
    hoisted_products: tuple[Product, ...]  # products with x
    hoisted: tuple[Assign, ...]  # assignments of level -2
    # variables of level -2 and -1 that the recurrence reads (rows of the hoisted tensor). As many as `projected`, and
    # the same ones where there are no hoisted statistics; else the last one of either may be repeated
    hoisted_outputs: tuple[Var, ...]
    invariant_outputs: tuple[Var, ...]  # variables and vectors of level -3 that the recurrence reads
    prologue: tuple[Assign, ...]  # assignments of level 0
    phases: tuple[Phase, ...]  # the recurrent products and statistics in order, with the assignments that follow each
    hoisted_statistics: tuple[Statistic, ...] = ()  # statistics of level -2
    normalized: tuple[Assign, ...] = ()  # assignments of level -1
    # variables of level -2 that level -1 or the recurrence reads: what the hoisted product writes
    projected: tuple[Var, ...] = ()
    # variables of a batch row that the recurrence reads from memory, beside the hoisted tensor; none, but where a
    # schedule has it (`schedules/scalars/row_sums.py`)
    row_inputs: tuple[Var, ...] = ()
    # name -> leaf of each sequence beside x, given for each step, row and unit: in memory behind x in its rows, in this
    # order
    inputs: dict[str, Var] = field(default_factory=dict)
    # leaves of level -2 that are inputs of each step as they are, not multiplied: gradients of y, what the forward pass
    # kept. Of a cell none
    given: tuple[Var, ...] = ()
    # values that each step writes in place of y, in their order: of a cell whose output is no state, or that has
    # several; and of adjoints
    outputs: tuple[Var, ...] = ()
    sums: tuple[Sum, ...] = ()  # what is accumulated over all steps
    outer_products: tuple[OuterProduct, ...] = ()

    def own_input(self, width: int, hidden: int) -> int:
        """The I of x itself, of rows of ``width`` values."""
        return width - len(self.inputs) * hidden

    def input_offsets(self, width: int, hidden: int) -> dict[Var, int]:
        """Leaf of each input -> where its H values begin in such a row."""
        first = self.own_input(width, hidden)
        return {var: first + n * hidden for n, var in enumerate(self.inputs.values())}

    @property
    def written(self) -> int:
        """Values that a step writes for each unit: those of ``outputs``, or one, y."""
        return max(1, len(self.outputs))

    @property
    def product_phases(self) -> tuple[Phase, ...]:
        return tuple(phase for phase in self.phases if phase.products)

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """The statistics of the recurrence, in order."""
        return tuple(s for phase in self.phases for s in phase.statistics)

    @property
    def every_product(self) -> tuple[Product, ...]:
        """All products, those of x first."""
        return (*self.hoisted_products, *(p for phase in self.phases for p in phase.products))

    @property
    def every_assign(self) -> tuple[Assign, ...]:
        return (*self.invariants, *self.hoisted, *self.normalized, *self.prologue,
                *(a for phase in self.phases for a in phase.assigns))

    @property
    def every_statistic(self) -> tuple[Statistic, ...]:
        """All statistics, those of x first."""
        return (*self.hoisted_statistics, *self.statistics)

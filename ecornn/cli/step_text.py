"""The analysed step of a cell in words and formulas: what ``ecornn compile --emit step`` prints."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from ecornn.analysis.heads import heads_of
from ecornn.analysis.liveness import carried
from ecornn.analysis.narrow import narrow_of
from ecornn.analysis.operators import key_of
from ecornn.analysis.scalar import children
from ecornn.analysis.step import Assign, Phase, Product, Statistic, StepGraph
from ecornn.workload import Stack, Workload

if TYPE_CHECKING:
    from tvm.ir import Expr
    from tvm.tirx import Var

WIDTH = 80
# Operator -> how it is written, and how tightly it binds.
INFIX = {"Or": ("or", 1), "And": ("and", 2), "LT": ("<", 4), "LE": ("<=", 4), "GT": (">", 4), "GE": (">=", 4),
         "EQ": ("==", 4), "NE": ("!=", 4), "Add": ("+", 5), "Sub": ("-", 5), "Mul": ("*", 6), "Div": ("/", 6)}
MATRIX = 5.5  # of @
CALLED = {"Max": "max", "Min": "min", "Select": "where", "if_then_else": "where", "fabs": "abs", "Not": "not"}
BITS: dict[str, int | Fraction] = {
    "float64": 64, "float32": 32, "float16": 16, "bfloat16": 16, "int21": Fraction(64, 3), "int16": 16, "int8": 8}


def step_text(graph: StepGraph, work: Workload, stack: Stack) -> str:
    """The step of a layer in words: values computed once, for all steps at once, and in each step between two exchanges
    of units; values that live from one exchange to a later one; and bytes."""
    names, own = Names(graph), graph.own_input(work.input, work.hidden)
    beside = f" beside {', '.join(graph.inputs)}" if graph.inputs else ""
    lines = [f"{work.cell.partition('@')[0]}: I = {own}{beside}, H = {work.hidden}, B = {work.batch}, {work.dtype}"]
    if stack.layers > 1:
        lines += [f"the first of {stack.layers} layers; the others have I = {work.hidden * (1 + stack.bidirectional)}"]
    lines += ["", *(f"{n} {s}: {what(s)}" for n, s in graph.parameters.items())]

    def block(title: str, *parts: Iterable[str]) -> None:
        if text := [line for part in parts for line in part]:
            lines.extend(["", title, *(line for one in text for line in wrapped(one))])

    block("Once, of parameters alone:", names.assigned(graph.invariants))
    block(f"For all steps at once, of x{' and inputs' if graph.inputs else ''}:",
          names.multiplied(graph.hoisted_products), names.assigned(graph.hoisted),
          names.summed(graph.hoisted_statistics), names.assigned(graph.normalized))
    lines += ["", "In each step:", *(line for one in names.assigned(graph.prologue) for line in wrapped(one))]
    alive = carried(graph)
    for p, phase in enumerate(graph.phases):
        live = [v for v, since in alive.items() if since == p - 1]
        lines += wrapped(f"exchange {p + 1}: {names.exchanged(phase)}", 1)
        lines += wrapped(f"carried from before it: {names.listed(live)}", 2) if live else []
        for one in (*names.multiplied(phase.products), *names.summed(phase.statistics), *names.assigned(phase.assigns)):
            lines += wrapped(one, 2)
    if not graph.phases:
        lines += wrapped("no exchange: each unit sees itself only, so that steps wait for nothing", 1)
    lines += wrapped(", ".join(f"{n}' = {names.text(v)}" for n, v in graph.results.items())
                     + f"; y is {names.output(graph)}", 1)
    return "\n".join([*lines, "", *sizes(graph, work, names)])


def what(shape: Sequence[int]) -> str:
    """A parameter of that shape in words, as ``4 matrices from 8 values to 8``."""
    if len(shape) == 3:
        return f"{shape[0]} {'matrix' if shape[0] == 1 else 'matrices'} from {shape[2]} values to {shape[1]}"
    return f"{shape[0]} vector{'s' * (shape[0] != 1)} of {shape[1]}"


def wrapped(text: str, depth: int = 1) -> list[str]:
    indent = "  " * depth
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "    ",
                         break_long_words=False, break_on_hyphens=False)


class Names:
    """The text of variables: products and vectors as they are computed, others by the user's names for tensors."""

    def __init__(self, graph: StepGraph) -> None:
        self.products: dict[Var, Product] = {p.var: p for p in graph.every_product}
        self.vectors = {v.var: "j" if v.numbers else f"{v.parameter}[{v.gate}]" for v in graph.vectors}
        self.names: dict[Var, str] = {v: n for n, v in graph.states.items()}
        taken = {*self.names.values(), *graph.parameters, "x", "y"}
        bases: dict[str, list[Var]] = {}
        for a in graph.every_assign:
            bases.setdefault(a.var.name.rpartition("__")[0], []).append(a.var)
        for base, variables in bases.items():
            alone = len(variables) == 1 and base not in taken
            self.names |= {v: base if alone else f"{base}.{n}" for n, v in enumerate(variables, 1)}
        for s in graph.every_statistic:
            base = s.total.name.rpartition("_")[0]
            self.names[s.total] = base if base not in bases and base not in taken else s.total.name
            taken.add(base)
            if s.squares is not None:
                self.names[s.squares] = f"{self.names[s.total]}.squares"

    def text(self, e: Expr, tight: float = 0) -> str:
        """An expression; in brackets where what is around it binds as tightly as ``tight``."""
        from tvm.tirx import FloatImm, IntImm, Var

        if isinstance(e, Var):
            if e in self.products:
                return bracketed(" + ".join(
                    f"{t.parameter}[{t.gate}]{'.T' if t.transposed else ''} @ {self.operand(t.operand)}"
                    + f" in {t.heads} heads" * (t.heads > 1) for t in self.products[e].terms), MATRIX, tight)
            return self.vectors.get(e) or self.names.get(e, e.name)
        if isinstance(e, (FloatImm, IntImm)):
            return bracketed(f"{e.value:.7g}", 9 if e.value >= 0 else MATRIX, tight)
        key, parts = key_of(e), children(e)
        if key == "Cast":
            return self.text(parts[0], tight)
        if key in INFIX:
            sign, own = INFIX[key]
            left, right = self.text(parts[0], own), self.text(parts[1], own + (key not in ("Add", "Mul")))
            return bracketed(f"{left} {sign} {right}", own, tight)
        return f"{CALLED.get(key, key)}({', '.join(self.text(c) for c in parts)})"

    def output(self, graph: StepGraph) -> str:
        return ", ".join(self.text(v) for v in graph.outputs) if graph.outputs else f"{graph.output}'"

    def listed(self, values: Iterable[Var]) -> str:
        """Several values, each once; products of one parameter and operand as one."""
        gates_of: dict[tuple[object, ...], list[int]] = {}
        for v in dict.fromkeys(values):
            terms = self.products[v].terms if v in self.products else ()
            plain = len(terms) == 1 and not terms[0].transposed and terms[0].heads == 1
            key = (terms[0].parameter, terms[0].operand) if plain else (v,)
            gates_of.setdefault(key, []).append(terms[0].gate if len(key) == 2 else 0)
        return ", ".join(f"{key[0]}[{', '.join(map(str, sorted(gates)))}] @ {self.operand(key[1])}" if len(key) == 2
                         else self.text(key[0]) for key, gates in gates_of.items())

    def operand(self, v: Var | None) -> str:
        """The name of what a product multiplies; x where it is None."""
        return "x" if v is None else self.text(v, MATRIX + 1)

    def exchanged(self, phase: Phase) -> str:
        """The exchange before a phase in words: what units must know of each other."""
        seen, heads = self.listed(phase.operands), heads_of(phase)
        sees = "every unit sees all of" if heads == 1 else f"every unit sees its own of {heads} heads of"
        summed, compared = (self.listed(o for s in phase.statistics if s.largest is kind for o in s.operands)
                            for kind in (False, True))
        return "; ".join(filter(None, (f"{sees} {seen}" if seen else "", f"units add up {summed}" if summed else "",
                                       f"units find the largest of {compared}" if compared else "")))

    def multiplied(self, products: Sequence[Product]) -> list[str]:
        return [f"products: {self.listed(p.var for p in products)}"] if products else []

    def assigned(self, assigns: Iterable[Assign]) -> Iterator[str]:
        return (f"{self.names[a.var]} = {self.text(a.value)}" for a in assigns)

    def summed(self, statistics: Iterable[Statistic]) -> Iterator[str]:
        """Sums and maxima over units, one a line."""
        for s in statistics:
            yield (f"{self.names[s.total]} = {'maximum' if s.largest else 'sum'} over {s.over} of "
                   f"{self.listed(s.operands)}")
            if s.squares is not None:
                yield f"{self.names[s.squares]} = sum of the squares of their distances from the mean"


def bracketed(text: str, own: float, tight: float) -> str:
    """``text``, in brackets where its operator binds less tightly (``own``) than the one around it (``tight``)."""
    return f"({text})" if own < tight else text


def sizes(graph: StepGraph, work: Workload, names: Names) -> list[str]:
    """Bytes of a step, and of weights."""
    row, item, wide = work.batch * work.hidden, work.itemsize, max(4, work.itemsize)
    seen = [v for phase in graph.phases for v in phase.operands]
    sent = sum(len(phase.operands) * (narrow_of(phase)[1] or work.hidden) for phase in graph.phases)
    sums = sum(len(s.made) for s in graph.statistics)
    hoisted = list(dict.fromkeys(graph.hoisted_outputs))
    table = [("Bytes a step", 0, ""), ("  x", work.batch * work.input * item, ""),
             ("  y", graph.written * row * item, ""),
             ("  hoisted", len(hoisted) * row * wide, names.listed(hoisted)),
             ("  exchanged", work.batch * (sent * item + sums * 4), "; ".join(filter(None, (
                 names.listed(seen), f"{sums} sums a row" if sums else ""))) or "nothing"),
             ("  states", len(graph.states) * row * item, ", ".join(graph.states))]
    recurrent = {t.source for phase in graph.phases for p in phase.products for t in p.terms}
    read = {t.source for p in graph.hoisted_products for t in p.terms}
    table.append(("Bytes of weights", 0, ""))
    for title, used, why in (("  recurrent", recurrent, "read in each step, or kept on the chip"),
                             ("  of x", read - recurrent, "read once for all steps")):
        one = {p: graph.parameters[p][1] * graph.parameters[p][2] for p, _ in used}
        # of a 16-bit layer recurrent weights alone may be rounded
        kind = work.dtype if used is not recurrent and work.itemsize == 2 else work.stored
        table.append((title, int(sum(one[p] for p, _ in used) * BITS[kind] // 8), why if used else "none"))
    vectors = {v.source for v in graph.vectors if not v.numbers}
    table.append(("  vectors", len(vectors) * work.hidden * wide, "once a layer" if vectors else "none"))
    return [line for title, size, note in table for line in
            ([title] if not size and not note else
             textwrap.wrap(f"{title:<14}{size:>13,}  {note}".rstrip(), WIDTH, subsequent_indent=" " * 29,
                           drop_whitespace=True, break_long_words=False, break_on_hyphens=False))]

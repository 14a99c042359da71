"""``ecornn explain``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from ecornn.cli.common import JSON, as_json, load_tvm, plain_errors
from ecornn.cli.planning import Asked, plan_options
from ecornn.interrupts import ENDING, safe_interrupts

if TYPE_CHECKING:
    from ecornn.explain import Explanation, Part

EPILOG = """\b
Examples:
  ecornn explain --cell lstm --hidden 800
  ecornn explain --cell gru --hidden 2816 --batch 32 --dtype float16 --target sm_90a
  ecornn explain --cell my_cell.py:MinimalGatedUnit --hidden 512 --target sm_90a --json
"""
CHIP = {"blocks": "{:.0f} blocks", "threads": "{:.0f} threads a block", "registers": "about {:.0f} registers a thread",
        "shared_bytes": "{:,.0f} bytes of shared memory a block", "threads_of_a_call": "{:.0f} threads",
        "weight_bytes_of_a_thread": "{:,.0f} bytes of weights a thread"}


@click.command(epilog=EPILOG)
@plan_options
@JSON
@plain_errors
@safe_interrupts(*ENDING)
def explain(asked: Asked, json: bool) -> None:
    """Says what a layer is compiled to, and why: takes what `ecornn compile` takes, and builds nothing.

    What the step is, which schedules serve it and which do not, what was chosen by which record, what it takes on the
    chip, and how long a step should take beside the least that it can. A GPU by its name needs none.
    """
    from ecornn.explain import explain as explained

    load_tvm()
    explanation = explained(asked.plan(asked.layer()))
    if json:
        as_json(explanation)
    else:
        click.echo("\n".join(text(explanation)))


def text(explanation: Explanation) -> Iterator[str]:
    """The lines for people."""
    of = ", ".join(filter(None, (explanation.layer, explanation.stack, explanation.overlap)))
    cores = f"{explanation.cores} {'SMs' if explanation.arch[:3] == 'sm_' else 'cores'}"
    yield f"{of} on {explanation.device} ({explanation.arch}, {cores})"
    for part in explanation.parts:
        yield ""
        if len(explanation.parts) > 1:
            yield f"{', '.join(part.labels) or 'layer'}{', backward' * (part.entry == 'backward')}: {part.workload}"
        yield from _step(part)
        yield from _choice(part)
        yield from _time(part, explanation.no_floor)


def _step(part: Part) -> Iterator[str]:
    step = part.step
    yield "step"
    if step.hoisted:
        yield f"  {_many(step.hoisted, 'product')} of x, for all steps at once, before the recurrence or beside it"
    if step.travels:
        each = "; then ".join(", ".join(names) or "nothing" for names in step.travels)
        yield (f"  {_many(step.products, 'product')} in {_many(len(step.travels), 'exchange')} between units a step, "
               f"of {each}")
    else:
        yield "  no product of a state: units need nothing of each other"
    if step.statistics:
        yield f"  {_many(step.statistics, 'statistic')} over the units of a row"
    if step.stays:
        yield f"  {', '.join(step.stays)}: with the unit that owns it, never travels"
    if step.weights:
        yield (f"  {step.weights:,} recurrent weights, {step.weight_bytes / 1e6:.3g} MB; "
               f"{step.multiplications / 1e6:.4g} million multiply-adds a step")


def _choice(part: Part) -> Iterator[str]:
    yield "schedules"
    for one in part.schedules:
        mark = "->" if one.chosen else "  "
        if one.refuses is not None:
            yield f"  {mark} {one.schedule:16} no: {one.refuses}"
        else:
            said = f"{one.expected_us:.3g} µs a step expected of its default" if one.expected_us else "serves"
            yield f"  {mark} {one.schedule:16} {said}"
    yield f"chosen: {part.schedule} {' '.join(f'{k}={v}' for k, v in part.config.items())}"
    yield f"why: {part.why}"
    chip = [form.format(part.chip[name]) for name, form in CHIP.items() if name in part.chip]
    if chip:
        yield f"on the chip: {', '.join(chip)}"
    if part.held_bytes:
        held = ", ".join(f"{size:,} bytes in {where}" for where, size in part.held_bytes.items())
        yield f"weights of a block: {held}"


def _time(part: Part, no_floor: str | None) -> Iterator[str]:
    words = []
    if part.record is not None:
        r = part.record
        words.append(f"{r.us:.4g} µs a step by the record [{r.p20_us:.4g}, {r.p80_us:.4g}] on {r.device} "
                     f"with B={r.batch} T={r.seq}")
    if part.expected_us is not None:
        words.append(f"{part.expected_us:.3g} by the schedule's estimate")
    yield f"expected: {'; '.join(words) or 'nobody can say before it is measured'}"
    if part.stages_us:
        yield f"the estimate: {', '.join(f'{name} {us:.2g}' for name, us in part.stages_us.items())}"
    if part.floor is not None:
        f = part.floor
        yield (f"floor: {f.total_us:.3g} µs a step: exchange {f.exchange_us:.2g}, products {f.products_us:.2g}, "
               f"hoisted product {f.hoisted_us:.2g}, bytes {f.bytes_us:.2g}; no kernel that hides none of them behind "
               "another is faster")
    elif no_floor is not None:
        yield f"floor: not known; {no_floor}"
    if part.sequence_us is not None:
        yield f"a sequence: {part.sequence_us / 1e3:.4g} ms"


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"

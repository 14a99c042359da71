"""Why rows of the grid take more than 1.5 times their floor: each is timed again with stages left out; on a GPU.

    python benchmarks/why_above_floor.py benchmarks/results/h100_grid.jsonl --output reasons.jsonl

Every row is timed by itself. Its sides have its schedule and knobs, and one stage less each time:

    whole         the row's cell
    bare          without gate math: h' is the largest of its gates' sums; a `Bare` cell
    recurrence    and without the input product: neither the projection nor its values are there
    unmultiplied  and without recurrent products (`without_products`): blocks still wait for all of h, and add zeros

So gate math = whole - bare, projection = bare - recurrence, products = recurrence - unmultiplied (with the weights that
are read in every step), and what is left is exchange and synchronisation: polling the state, barriers inside a block,
partial sums through shared memory, and a part of the launch and of the weights' first load. The four add up to the row.
Where a step without products takes longer, since blocks that poll sooner are in the writers' way, products are hidden
in the wait: they count as zero. Each stage is set against the row's floor (floor.py); the reason is the stage that
exceeds its own floor most. A step that does not wait for the exchange is not timed: its blocks would overlap steps
which otherwise follow each other.

The row furthest above its floor comes first. One that hangs or fails costs itself only; the same command goes on with
those that the file lacks. All sides are checked against float64 and timed in turns, in CUDA graphs. A schedule that
launches a kernel a step, and `persistent_block`, have no side `unmultiplied`: what it would tell apart stays together.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from measured_rows import HIGH, Results, Summary, arithmetic_of, floor_of, of_bench, read
from msgspec import to_builtins
from report import layer, table, times

from ecornn.bench.grid import Case, Layer, Own, selected
from ecornn.bench.measure import Plan, measure_into
from ecornn.bench.results import Row, RowLog
from ecornn.cells import Cell, get, pointwise, product
from ecornn.device import Device
from ecornn.floor import GATES, measured, polled

SERVED = ("persistent", "persistent_wide")  # by without_products()
STAGES = ("gate math", "projection", "products", "exchange", "recurrence")
ALSO = 0.5  # of the largest excess: what else is named
LONGEST = 60.0  # seconds that a row may take
MORE = 1.05  # times as long as with products: what is then said of a step without


@dataclass(frozen=True)
class Bare(Cell):
    """A cell of so many gates without gate math: h' is the largest of its gates' sums.

    h' = max over g of (W_g x + b_g + R_g h); with a second state c, h' is at least c, and c' = h' / 2.
    """

    gates: int  # recurrent products, and hoisted values, of a unit
    second: bool = False  # whether there is a state c, which never leaves its thread
    given: bool = True  # whether there is an input product; without it, x is not read
    multiplied: bool = True  # False: recurrent weights are sampled as zeros, as kernels without their products compute

    @property
    def name(self) -> str:
        return f"bare{self.gates}" + "c" * self.second + "_recurrence" * (not self.given) + "_zero" * (
            not self.multiplied)

    @property
    def states(self) -> tuple[str, ...]:
        return ("h", "c") if self.second else ("h",)

    def parameters(self, input: int, hidden: int) -> Mapping[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {"weight_ih": (self.gates, hidden, input)} if self.given else {}
        return found | {"weight_hh": (self.gates, hidden, hidden), "bias_ih": (self.gates, hidden)}

    def step(self, x: Any, states: Any, parameters: Mapping[str, Any]) -> list[Any]:
        from tvm import tirx

        h, *rest = states
        gh, bias = product(h, parameters["weight_hh"]), parameters["bias_ih"]
        gx = product(x, parameters["weight_ih"]) if self.given else None

        def largest(b: Any, j: Any) -> Any:
            hoisted = (gx[b, g, j] + bias[g, j] if self.given else bias[g, j] for g in range(self.gates))
            return reduce(tirx.max, (*(c[b, j] for c in rest), *(v + gh[b, g, j] for g, v in enumerate(hoisted))))

        new = pointwise(largest, h, "state")
        half = tirx.const(0.5, "float32")
        return [new, *(pointwise(lambda b, j: half * new[b, j], h, "kept") for _ in rest)]

    def sample(self, name: str, shape: tuple[int, ...], rng: Any) -> Any:
        """Weights so small that the state stays near 1 over any number of steps."""
        bound = 1.0 if name == "bias_ih" else 0.25 * shape[2] ** -0.5
        return bound * rng.uniform(-1, 1, shape) * (self.multiplied or name != "weight_hh")


# By the names that `spec` has for them
CELLS = {cell.name: cell for gates in (1, 3, 4) for second in (False, True) for cell in (
    Bare(gates, second), Bare(gates, second, False), Bare(gates, second, False, False))}
globals().update(CELLS)


def spec(cell: Bare) -> str:
    """The name under which other processes find one of ``CELLS``."""
    return f"why_above_floor:{cell.name}"


@contextmanager
def without_products() -> Iterator[None]:
    """While schedules make kernels in this process, those that are ``SERVED`` leave their recurrent products out, so
    that these can be told from the wait for h.

    Everything else stays: every block polls or copies all of h and waits until it is there, partial sums (zeros) are
    stored, added and synchronised, h' is sent. Weights that are kept are read once, before the first step, and none
    later. What such a module computes is the layer with recurrent weights of zero, with which it is checked like any
    other.
    """
    from ecornn.schedules.persistent import products
    from ecornn.schedules.persistent_wide import warps

    def nothing(*_: Any, **__: Any) -> None: ...

    def keep_zero(acc: list[Any], a: Any, b: Any, keep: Any, dtype: str) -> None:
        """The first product of a step clears the sums."""
        from tvm.tirx.script.builder import ir as T

        for value in acc if int(keep) == 0 else ():
            T.buffer_store(value.source, T.float32(0), list(value.indices))

    # in the kernel's file alone: products of x, which other kernels make, stay
    instructions = SimpleNamespace(**{**vars(warps.isa), "wgmma": keep_zero})
    with ExitStack() as stack:
        for owner, name, other in ((products, "multiply_pair", nothing), (products._Weights, "load", nothing),
                                   (products._Weights, "_from_l2", nothing), (products.Stream, "begin", nothing),
                                   (warps, "isa", instructions)):
            stack.enter_context(patch.object(owner, name, other))
        yield


def layers_of(path: Path) -> list[Layer]:
    """The rows of a grid that exceed 1.5 times their floor, the furthest first, as they were measured there."""
    results = read(path)
    return [layer_of(row) for row in Summary(results.rows, results.environment["gpu"]).high()]


def layer_of(row: dict[str, Any]) -> Layer:
    """A row with its sides: its module, and those with stages left out. Nothing can run beside a recurrence that has no
    projection, and there are no values of it to round."""
    gates, second = GATES[row["cell"]], row["cell"] == "lstm"
    config = dict(row["config"])
    alone = config | {name: value for name, value in {"ahead": 100, "hoisted": "float32"}.items() if name in config}
    own = {"whole": Own(schedule=row["schedule"], config=config),
           "bare": Own(cell=spec(Bare(gates, second)), schedule=row["schedule"], config=config),
           "recurrence": Own(cell=spec(Bare(gates, second, False)), schedule=row["schedule"], config=alone)}
    if row["schedule"] in SERVED:
        own["unmultiplied"] = Own(cell=spec(Bare(gates, second, False, False)), schedule=row["schedule"], config=alone,
                                  within="why_above_floor:without_products")
    return Layer(name=row["name"], case=case_of(row), against=(), own=own)


def case_of(row: dict[str, Any]) -> Case:
    """The case of a row."""
    dtype, precision = {"tf32": ("float32", "tf32")}.get(arithmetic_of(row), (arithmetic_of(row), None))
    return Case(cell=row["cell"], seq=row["T"], batch=row["B"], input=row["I"], hidden=row["H"], target="cuda",
                dtype=dtype, precision=precision)


def described(layer: Layer, row: Row) -> dict[str, Any]:
    """The stages of a row, with the configuration that they are of, as `ecornn report` reads them."""
    whole = {"schedule": layer.own["whole"].schedule, "config": layer.own["whole"].config}
    found = of_bench(to_builtins(row)) | whole
    return {"stages": stages_of(found), "waits": waits(found), **whole}


def waits(row: dict[str, Any]) -> int:
    """How often in a step a warp of `persistent` waits for a part of h: what it multiplies at a time is limited by its
    registers. The parts come one after the other, each a trip."""
    config = knobs_of(row)
    if config.pop("schedule") != "persistent":
        return 1
    from ecornn.schedules import all_schedules
    from ecornn.targets import KNOWN
    from ecornn.task import make_task

    task = make_task(get(row["cell"]), case_of(row).layer().workload, KNOWN["sm_90a"])
    plan = all_schedules()["persistent"].plan(task, config)
    return sum(-(-phase.pairs // phase.polled_pairs) for phase in plan.phases)


def knobs_of(row: dict[str, Any]) -> dict[str, Any]:
    """The schedule and the knobs of the row's module."""
    return dict(row["configs"]["whole"]) if "configs" in row else {"schedule": row["schedule"], **row["config"]}


def stages_of(row: dict) -> dict[str, float]:
    """Microseconds a step that each stage accounts for; what cannot be told apart is missing."""
    us = {name: row[f"{name}_us"] for name in row["sides"]}
    steps = (("gate math", "whole", "bare"), ("projection", "bare", "recurrence"))
    found = {stage: us[more] - us[less] for stage, more, less in steps if {more, less} <= us.keys()}
    if {"recurrence", "unmultiplied"} <= us.keys():
        exchange = min(us["unmultiplied"], us["recurrence"])
        return found | {"exchange": exchange, "products": us["recurrence"] - exchange}
    return found | {name: us[name] for name in ("recurrence",) if name in us}


def excess(entry: dict, gpu: Device) -> dict[str, tuple[float, float]]:
    """Of each stage that is known: microseconds a step, and its part of the row's floor."""
    least = floor_of(entry, gpu)
    floors = {"gate math": 0.0, "projection": least.projection, "products": least.recurrent + least.bytes,
              "exchange": least.exchange, "recurrence": least.recurrent + least.bytes + least.exchange}
    stages = entry.get("stages") or stages_of(entry)
    return {name: (stages[name], floors[name]) for name in STAGES if name in stages}


def reasons(entry: dict, gpu: Device) -> list[str]:
    """The stages that exceed their floors most, worst first."""
    over = {name: us - least for name, (us, least) in excess(entry, gpu).items()}
    ordered = sorted(over, key=lambda name: -over[name])
    return [name for name in ordered if over[name] >= ALSO * over[ordered[0]] and over[name] > 0]


def over(entry: dict, gpu: Device) -> float:
    """How many times its floor a row took, when its stages were timed."""
    return entry["whole_us"] / floor_of(entry, gpu).total


def in_words(entry: dict, gpu: Device) -> str:
    """The reason, in a sentence for each stage that is one."""
    if over(entry, gpu) <= HIGH:
        return f"at most {HIGH} times its floor in this run"
    stages = excess(entry, gpu)
    return "; ".join(_sentence(entry, name, *stages[name], gpu) for name in reasons(entry, gpu))


def _sentence(entry: dict, stage: str, us: float, least: float, gpu: Device) -> str:
    config = knobs_of(entry)
    if stage == "gate math":
        return f"gate math on the critical path, {us:.2f}, which the floor leaves out"
    if stage == "projection":
        return f"the input product and reading its values, {us:.2f} where the whole chip's rate allows {least:.2f}"
    if stage == "products":
        kept = config.get("registers")
        where = f", {100 - kept}% of the weights outside registers" if kept not in (None, 100) else ""
        return f"products and partial sums, {us:.2f} where the tensor cores' rate and bytes allow {least:.2f}{where}"
    if stage == "recurrence":
        return f"products, exchange and synchronisation, {us:.2f} where the floor has {least:.2f}; not told apart"
    cut = floor_of(entry, gpu)
    among = "one block" if cut.blocks == 1 else f"{cut.blocks} blocks" + (
        " of a cluster" if cut.blocks <= gpu.can.cluster else "")
    of_floor = f"the floor has {least:.2f} for {among}"
    if config["schedule"] not in SERVED:
        return f"a launch a step, and the state through memory, {us:.2f}; {of_floor}"
    blocks = -(-entry["H"] // config["units"])
    if config.get("carrier") == "cluster":
        return f"exchange and synchronisation, {us:.2f}, in clusters of {blocks} blocks; {of_floor}"
    trip = polled(gpu, entry["B"], entry["H"], arithmetic_of(entry), config["groups"], blocks)
    of_it = f"of which about {trip:.2f} is" if trip < us else "all of it"
    text = f"exchange and synchronisation, {us:.2f}, {of_it} the way through L2 between the {blocks} blocks of a group"
    if (parts := entry.get("waits") or waits(entry)) > 1:
        text += f", and h comes in {parts} parts, one waited for after the other, for want of registers"
    if (sharers := config.get("parts", 1)) > 1:
        text += f", and partial sums go between the {sharers} blocks that share a unit's weights"
    if entry.get("unmultiplied_us", us) > MORE * us:
        text += f" (without products a step takes {entry['unmultiplied_us']:.2f}, as blocks poll sooner and more)"
    return f"{text}; {of_floor}"


def report(results: Results, layers: list[Layer]) -> list[str]:
    """The table, in Markdown; ``layers`` that the file lacks are named."""
    rows, gpu = results.good, measured(results.environment["gpu"])
    lines = [f"# Rows above {HIGH} times their floor", "",
             "Stages are differences of medians between modules that have the stage and modules that have not, in the "
             "row's configuration (`benchmarks/why_above_floor.py`); in brackets what the floor has for the stage. "
             f"{results.source}", ""]
    if gpu is None:
        lines += ["Nobody measured the constants of this GPU, so there are no floors, and no reasons.", ""]
    lines += [*table(("layer, T x B x I x H", "dtype", "configuration", "whole", "floor", "of its floor", *STAGES,
                      "reason"), (_line(r, gpu) for r in rows)), ""]
    missing = [f"- {r['name']}, {side}: {why}" for r in rows for side, why in r.get("missing", {}).items()]
    failed = [f"- {r['name']}: {r['failed']}" for r in results.rows if r.get("failed")]
    left = [f"- {one.name}: not measured" for one in layers if one.name not in {r["name"] for r in results.rows}]
    return [*lines, "## Missing", "", *(missing + failed + left or ["Nothing."]), ""]


def _line(r: dict, gpu: Device | None) -> list[str]:
    known, stages = excess(r, gpu) if gpu else {}, r.get("stages") or stages_of(r)
    cells = [f"{stages[name]:.2f}" + (f" ({known[name][1]:.2f})" if name in known else "") if name in stages else ""
             for name in STAGES]
    least = [f"{r['whole_us'] / over(r, gpu):.2f}", f"{over(r, gpu):.2f}"] if gpu else ["", ""]
    config = " ".join(v if k == "schedule" else f"{k}={v}" for k, v in knobs_of(r).items())
    return [layer(r), r["dtype"], config, times(r, "whole"), *least, *cells, in_words(r, gpu) if gpu else ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", type=Path, help="results of grids/grid.toml")
    parser.add_argument("--output", type=Path, required=True, help="JSON lines to append to; a table is written beside")
    parser.add_argument("--only", action="append", default=[], metavar="WORDS", help="rows with all of these words")
    parser.add_argument("--seconds", type=float, default=0.5, help="of timing each side [%(default)s]")
    parser.add_argument("--jobs", type=int, default=8, help="rows that are compiled at a time [%(default)s]")
    parser.add_argument("--report", action="store_true", help="only write the table of what --output has")
    arguments = parser.parse_args()
    if not arguments.grid.is_file():
        parser.error(f"argument grid: {arguments.grid} is missing; python benchmarks/run_all.py grid measures it")
    layers, good = selected(layers_of(arguments.grid), arguments.only), True
    if not arguments.report:
        with tempfile.TemporaryDirectory(prefix="ecornn-") as folder:
            good = measure_into(RowLog(arguments.output), layers, Plan((), arguments.seconds), Path(folder),
                                arguments.jobs, LONGEST, described)
    arguments.output.with_suffix(".md").write_text("\n".join(report(read(arguments.output), layers)) + "\n")
    sys.exit(not good)


if __name__ == "__main__":
    main()

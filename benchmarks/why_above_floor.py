"""Why rows of the grid take more than 1.5 times their floor: each is timed again with stages left out; on a GPU.

    python benchmarks/why_above_floor.py benchmarks/results/h100_grid.jsonl --output reasons.jsonl --seconds 240
    python benchmarks/why_above_floor.py benchmarks/results/h100_grid.jsonl --target sm_90a --compile-only

Every row is timed by itself. Its sides have its schedule and knobs, and one stage less each time:

    whole         the row's cell
    bare          without gate math: h' is the largest of its gates' sums (stage_cells.py)
    recurrence    and without the input product: neither the projection nor its values are there
    unmultiplied  and without recurrent products (unmultiplied.py): blocks still wait for all of h, and add zeros

So gate math = whole - bare, projection = bare - recurrence, products = recurrence - unmultiplied (with the weights that
are read in every step), and what is left is exchange and synchronisation: polling the state, barriers inside a block,
partial sums through shared memory, and a part of the launch and of the weights' first load. The four add up to the row.
Where a step without products takes longer, since blocks that poll sooner are in the writers' way, products are hidden
in the wait: they count as zero.
Each stage is set against the row's floor (floor.py); the reason is the stage that exceeds its own floor most. A step
that does not wait for the exchange is not timed: blocks that do not wait overlap steps which otherwise follow each
other, so that the difference would not be the wait.

The row furthest above its floor comes first. A row that hangs or fails costs that row only; the same command goes on
with those that the file lacks. All sides are checked against float64 and timed in turns, in CUDA graphs. A schedule
that launches a kernel a step, and `persistent_block`, have no side `unmultiplied`: products and exchange stay together
as the stage `recurrence`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from cases import Files, parser_of, run
from compiled_case import Knobs, Made, knobs
from grid import Row
from grid_log import GridLog
from grid_summary import HIGH, Summary
from grid_tables import layer, table, times
from measuring_process import Limits
from stage_cells import Bare
from unmultiplied import SERVED

from ecornn.device import Device
from ecornn.floor import GATES, floor, measured, polled

STATES = {"lstm": 2, "gru": 1, "rnn_tanh": 1, "rnn_relu": 1}
STAGES = ("gate math", "projection", "products", "exchange", "recurrence")
ALSO = 0.5  # of the largest excess: what else is named
LONGEST = 20.0  # seconds that a row may take
MORE = 1.05  # times as long as with products: what is then said of a step without


@dataclass(frozen=True)
class Case:
    """A row of the grid as it was measured there."""

    cell: str
    T: int
    B: int
    I: int
    H: int
    dtype: str
    schedule: str
    config: Knobs

    @property
    def row(self) -> Row:
        return Row(self.cell, self.T, self.B, self.I, self.H, self.dtype)

    def sides(self) -> dict[str, Made]:
        """The row's module, and those with stages left out."""
        gates, second = GATES[self.cell], STATES[self.cell] > 1
        alone = self._made(Bare(gates, second, False), self._without_input())
        made = {"whole": self._made(self.cell, self.config), "bare": self._made(Bare(gates, second), self.config),
                "recurrence": alone}
        return made | ({"unmultiplied": replace(alone, multiplied=False)} if self.schedule in SERVED else {})

    def _without_input(self) -> Knobs:
        """Nothing can run beside a recurrence that has no projection, and there are no values of it to round."""
        none = {"ahead": 100, "hoisted": "float32"}
        return knobs(dict(self.config) | {name: none[name] for name in none if name in dict(self.config)})

    def _made(self, cell: str | Bare, config: Knobs) -> Made:
        return Made(cell, self.T, self.B, self.I, self.H, self.row.kind, self.schedule, config,
                    precision="tf32" if self.row.arithmetic == "tf32" else None)

    def __str__(self) -> str:
        return str(self.row)


def cases_of(path: Path) -> list[Case]:
    """The rows of a grid that exceed 1.5 times their floor, the furthest first."""
    return [Case(*(row[k] for k in ("cell", "T", "B", "I", "H", "dtype", "schedule")), knobs(row["config"]))
            for row in Summary(GridLog(path).rows).high()]


def row_of(entry: dict) -> Row:
    """The row of the grid that an entry of a file is of."""
    return Row(*(entry[name] for name in ("cell", "T", "B", "I", "H", "dtype")))


def compare(case: Case, files: Files, limits: Limits) -> dict:
    """One row: every side checked and timed, and what the stages take."""
    import numpy as np
    import torch
    from many_sides import Sides
    from side_by_side import CELLS, DEVICE, float64_forward, relative
    from stage_cells import bare_forward

    from ecornn.tune.tolerance import TOLERANCE

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = case.row.arithmetic == "tf32"
    if isinstance(files["whole"], str):
        return {"failed": files["whole"]}
    kwargs = {"nonlinearity": "tanh"} if case.cell == "rnn_tanh" else {}
    sides = Sides((case.T, case.B, case.I, case.H), case.row.kind)
    library = CELLS[case.cell](case.I, case.H, device=DEVICE, **kwargs).to(sides.kind)
    weights = {"whole": {k: v.detach() for k, v in library.named_parameters()}}
    cells = {name: made.cell for name, made in case.sides().items()}
    generator = np.random.default_rng(0)
    for name, cell in cells.items():
        if isinstance(cell, Bare):
            weights[name] = {k: torch.from_numpy(v).to(DEVICE, sides.kind)
                             for k, v in cell.random(case.I, case.H, generator).items()}
    with torch.no_grad():
        for name, file in files.items():
            sides.add_module(name, file, weights[name])
        sides.x.copy_(sides.random())
        references = {name: float64_forward(case.cell, sides.x, weights[name]) if name == "whole"
                      else bare_forward(cells[name], sides.x, weights[name], multiplied=name != "unmultiplied")
                      for name in sides.row["sides"]}
        near = 1e-5 if case.row.arithmetic == "float32" else (
            2 * relative(library(sides.x)[0], references["whole"]) + 1e-6)
        sides.check(references, dict.fromkeys(files, TOLERANCE[case.row.arithmetic]) | {"whole": near})
        del references
        if "whole" in sides.row["wrong"]:
            return {"failed": sides.row["missing"]["whole"]}
        row = sides.time(limits)
    return row | {"stages": stages_of(row), "waits": waits(case)}


def waits(case: Case) -> int:
    """How often in a step a warp of `persistent` waits for a part of h: what it multiplies at a time is limited by its
    registers. The parts come one after the other, each a trip."""
    if case.schedule != "persistent":
        return 1
    from ecornn.cells import get
    from ecornn.schedules import all_schedules
    from ecornn.targets import KNOWN
    from ecornn.task import make_task
    from ecornn.workload import Workload

    work = Workload(case.cell, case.H, case.I, case.B, case.T, case.row.kind,
                    precision="tf32" if case.row.arithmetic == "tf32" else None)
    plan = all_schedules()["persistent"].plan(make_task(get(case.cell), work, KNOWN["sm_90a"]), dict(case.config))
    return sum(-(-phase.pairs // phase.polled_pairs) for phase in plan.phases)


def stages_of(row: dict) -> dict[str, float]:
    """Microseconds a step that each stage accounts for; what cannot be told apart is missing."""
    us = {name: row[f"{name}_us"] for name in row["sides"]}
    found = {}
    if "bare" in us:
        found["gate math"] = us["whole"] - us["bare"]
    if {"bare", "recurrence"} <= set(us):
        found["projection"] = us["bare"] - us["recurrence"]
    if {"recurrence", "unmultiplied"} <= set(us):
        found["exchange"] = min(us["unmultiplied"], us["recurrence"])
        found["products"] = us["recurrence"] - found["exchange"]
    elif "recurrence" in us:
        found["recurrence"] = us["recurrence"]
    return found


def excess(entry: dict, gpu: Device) -> dict[str, tuple[float, float]]:
    """Of each stage that is known: microseconds a step, and its part of the row's floor."""
    row = row_of(entry)
    least = floor(gpu, row.cell, row.B, row.I, row.H, row.arithmetic)
    floors = {"gate math": 0.0, "projection": least.projection, "products": least.recurrent + least.bytes,
              "exchange": least.exchange, "recurrence": least.recurrent + least.bytes + least.exchange}
    return {name: (entry["stages"][name], floors[name]) for name in STAGES if name in entry["stages"]}


def reasons(entry: dict, gpu: Device) -> list[str]:
    """The stages that exceed their floors most, worst first."""
    over = {name: us - least for name, (us, least) in excess(entry, gpu).items()}
    ordered = sorted(over, key=lambda name: -over[name])
    return [name for name in ordered if over[name] >= ALSO * over[ordered[0]] and over[name] > 0]


def over(entry: dict, gpu: Device) -> float:
    """How many times its floor a row took, when its stages were timed."""
    row = row_of(entry)
    return entry["whole_us"] / floor(gpu, row.cell, row.B, row.I, row.H, row.arithmetic).total


def in_words(entry: dict, gpu: Device) -> str:
    """The reason, in a sentence for each stage that is one."""
    if over(entry, gpu) <= HIGH:
        return f"at most {HIGH} times its floor in this run"
    stages = excess(entry, gpu)
    return "; ".join(_sentence(entry, name, *stages[name], gpu) for name in reasons(entry, gpu))


def _sentence(entry: dict, stage: str, us: float, least: float, gpu: Device) -> str:
    row, config = row_of(entry), entry["configs"]["whole"]
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
    cut = floor(gpu, row.cell, row.B, row.I, row.H, row.arithmetic)
    among = "one block" if cut.blocks == 1 else f"{cut.blocks} blocks" + (
        " of a cluster" if cut.blocks <= gpu.can.cluster else "")
    of_floor = f"the floor has {least:.2f} for {among}"
    if config["schedule"] not in ("persistent", "persistent_wide"):
        return f"a launch a step, and the state through memory, {us:.2f}; {of_floor}"
    blocks = -(-row.H // config["units"])
    if config.get("carrier") == "cluster":
        return f"exchange and synchronisation, {us:.2f}, in clusters of {blocks} blocks; {of_floor}"
    trip = polled(gpu, row.B, row.H, row.arithmetic, config["groups"], blocks)
    of_it = f"of which about {trip:.2f} is" if trip < us else "all of it"
    text = f"exchange and synchronisation, {us:.2f}, {of_it} the way through L2 between the {blocks} blocks of a group"
    if (parts := entry.get("waits", 1)) > 1:
        text += f", and h comes in {parts} parts, one waited for after the other, for want of registers"
    if (sharers := config.get("parts", 1)) > 1:
        text += f", and partial sums go between the {sharers} blocks that share a unit's weights"
    if entry.get("unmultiplied_us", us) > MORE * us:
        text += f" (without products a step takes {entry['unmultiplied_us']:.2f}, as blocks poll sooner and more)"
    return f"{text}; {of_floor}"


def report(path: Path, log: GridLog, cases: Sequence[Case] = ()) -> list[str]:
    """The table, in Markdown; ``cases`` that the file lacks are named."""
    env, rows = log.environment, [r for r in log.rows if "failed" not in r]
    gpu = measured(env["gpu"])
    lines = [f"# Rows above {HIGH} times their floor", "",
             f"{env['gpu']}, CUDA {env['cuda']}, PyTorch {env['torch']}; µs a step in CUDA graphs, interleaved, median "
             "[p20, p80], outputs checked against float64. Stages are differences of medians between modules that have "
             "the stage and modules that have not, in the row's configuration (`benchmarks/why_above_floor.py`); in "
             f"brackets what the floor has for the stage. Data: `{path.name}`; `make bench`.", ""]
    if gpu is None:
        lines += ["Nobody measured the constants of this GPU, so there are no floors, and no reasons.", ""]
    lines += [*table(("layer, T x B x I x H", "dtype", "configuration", "whole", "floor", "of its floor", *STAGES,
                      "reason"), (_line(r, gpu) for r in rows)), ""]
    missing = [f"- {r['name']}, {side}: {why}" for r in rows for side, why in r["missing"].items()]
    lines += ["## Sides that could not be made", "", *(missing or ["None."]), ""]
    if failed := [r for r in log.rows if "failed" in r]:
        lines += ["## Failed", "", *(f"- {r['name']}: {r['failed']}" for r in failed), ""]
    if left := [str(case) for case in cases if str(case) not in {r["name"] for r in log.rows}]:
        lines += ["## Not measured", "", *(f"- {name}" for name in left), ""]
    return lines


def _line(r: dict, gpu: Device | None) -> list[str]:
    known = excess(r, gpu) if gpu else {}
    cells = []
    for name in STAGES:
        text = f"{r['stages'][name]:.2f}" if name in r["stages"] else ""
        cells.append(text + (f" ({known[name][1]:.2f})" if name in known else ""))
    least = [f"{r['whole_us'] / over(r, gpu):.2f}", f"{over(r, gpu):.2f}"] if gpu else ["", ""]
    config = " ".join(v if k == "schedule" else f"{k}={v}" for k, v in r["configs"]["whole"].items())
    return [layer(r), r["dtype"], config, times(r, "whole"), *least, *cells, in_words(r, gpu) if gpu else ""]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("grid", type=Path, help="the file of compare_grid.py")
    parser.set_defaults(longest=LONGEST)
    arguments = parser.parse_args()
    if not arguments.grid.is_file():
        parser.error(f"argument grid: {arguments.grid} is missing; compare_grid.py --output FILE measures it")
    cases = cases_of(arguments.grid)
    run(arguments, cases, compare, partial(report, cases=cases))


if __name__ == "__main__":
    main()

"""Why rows of the grid take more than 1.5 times their floor: each is timed again with stages left out; on a GPU.

    cd benchmarks/results && python ../why_above_floor.py h100_grid.jsonl --output h100_reasons.jsonl
    python benchmarks/why_above_floor.py benchmarks/results/h100_grid.jsonl --target sm_90a --compile-only

Every side has the row's schedule and knobs, and is made from another cell (stage_cells.py), one stage less each time:

    whole        the row's cell
    bare         without gate math: h' is the largest of its gates' sums
    recurrence   and without the input product: neither the projection nor its values are there
    narrow       and with fewer gates: what a gate's product takes is the slope, and none at all is extrapolated to

So gate math = whole - bare, projection = bare - recurrence, products = the slope times the gates (with the reading
of weights and the adding of partial sums), and what is left is exchange and synchronisation: polling the state,
barriers inside a block, a launch where there is one each step. A vanilla cell has one gate, so its `narrow` has two.
Each stage is set against the row's floor (floor.py); the reason is the stage that exceeds its own floor most. A step
that does not wait for the exchange is not timed: no cell has it, and blocks that do not wait overlap steps which
otherwise follow each other, so that the difference would not be the wait.

Rows whose kernels are alike are timed once: of 16-bit types one, of cuDNN's two precisions one, of batches, and of
sizes beside a tile, one for each cut into groups, units and warps; the row furthest above its floor stands for them.
All sides are checked against float64 and timed in turns, in CUDA graphs. Where `narrow` cannot be made (two gates of a
vanilla cell may not fit), products and exchange stay together as the stage `recurrence`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cases import Files, parser_of, run
from floor import GATES, Machine, floor, machine_of, polled
from grid import TILES, Row
from grid_log import GridLog
from grid_summary import HIGH, Summary
from grid_tables import layer, table, times
from made import Knobs, Made, knobs
from measuring_process import Limits
from stage_cells import Bare

MOST = 40  # rows that are timed
STATES = {"lstm": 2, "gru": 1, "rnn_tanh": 1, "rnn_relu": 1}
STAGES = ("gate math", "projection", "products", "exchange", "recurrence")
ALSO = 0.5  # of the largest excess: what else is named
CUT = ("groups", "units", "warps", "rows")  # knobs that make kernels unlike
BELOW = {up.H: off.H for off, up in TILES}  # sizes that fill tiles, and what is just below


@dataclass(frozen=True)
class Case:
    """A row of the grid as it was measured there, and the rows that are like it."""

    cell: str
    T: int
    B: int
    I: int
    H: int
    dtype: str
    schedule: str
    config: Knobs
    like: tuple[str, ...]

    @property
    def row(self) -> Row:
        return Row(self.cell, self.T, self.B, self.I, self.H, self.dtype)

    def sides(self) -> dict[str, Made]:
        """The row's module, and those with stages left out."""
        gates, second = GATES[self.cell], STATES[self.cell] > 1
        made = {"whole": self._made(self.cell, self.config),
                "bare": self._made(Bare(gates, second), self.config),
                "recurrence": self._made(Bare(gates, second, False), self._without_input(self.config))}
        fewer = other_gates(self)
        config = dict(self._without_input(self.config))
        if "interleave" in config and fewer < 3:
            config["interleave"] = 0
        return made | {"narrow": self._made(Bare(fewer, second, False), knobs(config))}

    def _without_input(self, config: Knobs) -> Knobs:
        """Nothing can run beside a recurrence that has no projection."""
        return knobs(dict(config) | ({"ahead": 100} if "ahead" in dict(config) else {}))

    def _made(self, cell: str | Bare, config: Knobs) -> Made:
        return Made(cell, self.T, self.B, self.I, self.H, self.row.kind, self.schedule, config,
                    precision="tf32" if self.row.arithmetic == "tf32" else None)

    def __str__(self) -> str:
        return str(self.row)


def other_gates(case: Case) -> int:
    """Gates of the side `narrow`: the fewest that fill tiles of rows with the units of the configuration."""
    if GATES[case.cell] == 1:
        return 2
    tile = 16 if case.schedule == "layout_transform" else 8
    units = int(dict(case.config).get("units", tile))
    return next((g for g in (1, 2) if g * units % tile == 0), 2)


def cases_of(path: Path) -> list[Case]:
    """The rows of a grid that exceed 1.5 times their floor, each family once, the furthest first."""
    families: dict[object, list[dict]] = {}
    high = {row["name"]: row for row in Summary(GridLog(path).rows).high()}
    for row in high.values():
        families.setdefault(family(high.get(row["name"].replace("bfloat16", "float16"), row)), []).append(row)
    found = []
    for first, *others in families.values():
        found.append(Case(*(first[k] for k in ("cell", "T", "B", "I", "H", "dtype", "schedule")),
                          knobs(first["config"]), tuple(r["name"] for r in others)))
    return found


def family(row: dict) -> object:
    """What rows have in common whose kernels are alike."""
    kind = "16 bits" if row["dtype"] in ("float16", "bfloat16") else row_of(row).arithmetic
    cut = tuple(row["config"].get(name) for name in CUT)
    return row["cell"], row["T"], BELOW.get(row["H"], row["H"]), kind, row["schedule"], cut


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

    from ecornn.tune.oracle import TOLERANCE

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
                      else bare_forward(cells[name], sides.x, weights[name]) for name in sides.row["sides"]}
        near = 1e-5 if case.row.arithmetic == "float32" else (
            2 * relative(library(sides.x)[0], references["whole"]) + 1e-6)
        sides.check(references, dict.fromkeys(files, TOLERANCE[case.row.arithmetic]) | {"whole": near})
        del references
        if "whole" in sides.row["wrong"]:
            return {"failed": sides.row["missing"]["whole"]}
        row = sides.time(limits)
    return row | {"stages": stages_of(row, GATES[case.cell], other_gates(case))}


def stages_of(row: dict, gates: int, others: int) -> dict[str, float]:
    """Microseconds a step that each stage accounts for; what cannot be told apart is missing."""
    us = {name: row[f"{name}_us"] for name in row["sides"]}
    found = {}
    if "bare" in us:
        found["gate math"] = us["whole"] - us["bare"]
    if {"bare", "recurrence"} <= set(us):
        found["projection"] = us["bare"] - us["recurrence"]
    if {"recurrence", "narrow"} <= set(us):
        found["products"] = gates * (us["recurrence"] - us["narrow"]) / (gates - others)
        found["exchange"] = us["recurrence"] - found["products"]
    elif "recurrence" in us:
        found["recurrence"] = us["recurrence"]
    return found


def excess(entry: dict, machine: Machine) -> dict[str, tuple[float, float]]:
    """Of each stage that is known: microseconds a step, and its part of the row's floor."""
    row = row_of(entry)
    least = floor(machine, row.cell, row.B, row.I, row.H, row.arithmetic)
    floors = {"gate math": 0.0, "projection": least.projection, "products": least.recurrent + least.bytes,
              "exchange": least.exchange, "recurrence": least.recurrent + least.bytes + least.exchange}
    return {name: (entry["stages"][name], floors[name]) for name in STAGES if name in entry["stages"]}


def reasons(entry: dict, machine: Machine) -> list[str]:
    """The stages that exceed their floors most, worst first."""
    over = {name: us - least for name, (us, least) in excess(entry, machine).items()}
    ordered = sorted(over, key=lambda name: -over[name])
    return [name for name in ordered if over[name] >= ALSO * over[ordered[0]] and over[name] > 0]


def in_words(entry: dict, machine: Machine) -> str:
    """The reason, in a sentence for each stage that is one."""
    stages = excess(entry, machine)
    return "; ".join(_sentence(entry, name, *stages[name], machine) for name in reasons(entry, machine))


def _sentence(entry: dict, stage: str, us: float, least: float, machine: Machine) -> str:
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
        return (f"products, exchange and synchronisation, {us:.2f} where the floor has {least:.2f}; not told apart, "
                "since a cell of another number of gates does not fit")
    cut = floor(machine, row.cell, row.B, row.I, row.H, row.arithmetic)
    among = "one block" if cut.blocks == 1 else f"{cut.blocks} blocks" + (
        " of a cluster" if cut.blocks <= machine.cluster else "")
    of_floor = f"the floor has {least:.2f} for {among}"
    if config["schedule"] not in ("persistent", "persistent_wide"):
        return f"a launch a step, and the state through memory, {us:.2f}; {of_floor}"
    blocks = -(-row.H // config["units"])
    if config.get("carrier") == "cluster":
        return f"exchange and synchronisation, {us:.2f}, in clusters of {blocks} blocks; {of_floor}"
    trip = polled(machine, row.B, row.H, row.arithmetic, config["groups"], blocks)
    return (f"exchange and synchronisation, {us:.2f}, of which about {trip:.2f} is the way through L2 between the "
            f"{blocks} blocks of a group; {of_floor}")


def report(path: Path, log: GridLog) -> list[str]:
    """The table, in Markdown."""
    env, rows = log.environment, [r for r in log.rows if "failed" not in r]
    machine = machine_of(env["gpu"])
    lines = [f"# Rows above {HIGH} times their floor", "",
             f"{env['gpu']}, CUDA {env['cuda']}, PyTorch {env['torch']}; µs a step in CUDA graphs, interleaved, "
             "outputs checked against float64. Stages are differences of medians between cells that have the stage and "
             "cells that have not, in the row's configuration (`benchmarks/why_above_floor.py`); in brackets what the "
             f"floor has for the stage. Data: `{path.name}`; `make bench`.", ""]
    if machine is None:
        lines += ["Nobody measured the constants of this GPU, so there are no floors, and no reasons.", ""]
    lines += [*table(("layer, T x B x I x H", "dtype", "whole", "of its floor", *STAGES, "reason", "also"), (
        _line(r, machine) for r in rows)), ""]
    missing = [f"- {r['name']}, {side}: {why}" for r in rows for side, why in r["missing"].items()]
    lines += ["## Sides that could not be made", "", *(missing or ["None."]), ""]
    if failed := [r for r in log.rows if "failed" in r]:
        lines += ["## Failed", "", *(f"- {r['name']}: {r['failed']}" for r in failed), ""]
    return lines


def _line(r: dict, machine: Machine | None) -> list[str]:
    known = excess(r, machine) if machine else {}
    cells = []
    for name in STAGES:
        text = f"{r['stages'][name]:.2f}" if name in r["stages"] else ""
        cells.append(text + (f" ({known[name][1]:.2f})" if name in known else ""))
    total = floor(machine, r["cell"], r["B"], r["I"], r["H"], row_of(r).arithmetic).total if machine else None
    return [layer(r), r["dtype"], times(r, "whole"), f"{r['whole_us'] / total:.2f}" if total else "", *cells,
            in_words(r, machine) if machine else "", ", ".join(r["like"])]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("grid", type=Path, help="the file of compare_grid.py")
    parser.set_defaults(limit=MOST)
    arguments = parser.parse_args()
    if not arguments.grid.is_file():
        parser.error(f"argument grid: {arguments.grid} is missing; compare_grid.py --output FILE measures it")
    cases: Sequence[Case] = cases_of(arguments.grid)
    if len(cases) > arguments.limit:
        print(f"{len(cases)} kinds of rows are above {HIGH} times their floor; the first {arguments.limit} are timed")
    run(arguments, cases, compare, report)


if __name__ == "__main__":
    main()

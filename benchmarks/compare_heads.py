"""Cells with heads against the same cells with whole matrices, whose other blocks are zeros; on a GPU.

    python benchmarks/compare_heads.py --output benchmarks/results/h100_heads.jsonl
    python benchmarks/compare_heads.py --target sm_90a --compile-only     # no GPU needed

sLSTM and the block GRU of DreamerV3, as tests/published has them, with 8 heads, of inputs as wide as the layer, and
of narrow ones, whose product counts little. `dense` is the same class with one head; `built_in` ecornn's own `slstm`,
of a whole matrix, too, whose formula is the same. All sides have the same weights and read the same input. Outputs of
all steps are held against a loop in float64: they may be as far from it as twice that loop in their own type, or as a
candidate of the tuner. Whole forward passes in CUDA graphs, interleaved; median, 20th and 80th percentile. The ratio is
that to the faster one of the dense sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cases import Files, parser_of, run
from compiled_case import Made
from grid_log import GridLog
from grid_tables import table, times
from measuring_process import Limits
from published_loop import Published, drawn, heads, loop

if TYPE_CHECKING:
    import torch

HEADS, T, B = 8, 256, 16
NARROW = 64
BUILT_IN = {"W": "weight_ih", "R": "weight_hh", "b": "bias_ih"}  # names that `slstm` has for the published cell's


@dataclass(frozen=True)
class SLSTM(heads.SLSTMHeads):
    """With any number of heads."""

    heads: int


@dataclass(frozen=True)
class BlockGRU(heads.BlockGRU):
    """With any number of heads."""

    heads: int


KINDS: dict[str, Any] = {"sLSTM": SLSTM, "block GRU": BlockGRU}


@dataclass(frozen=True)
class Case:
    """A cell of `KINDS` at one size."""

    cell: str
    H: int
    I: int
    B: int = B
    T: int = T
    heads: int = HEADS
    dtype: str = "float16"

    def with_heads(self, heads: int) -> Published:
        return KINDS[self.cell](heads)

    def sides(self) -> dict[str, Made]:
        cells = {"heads": self.with_heads(self.heads), "dense": self.with_heads(1)}
        if self.cell == "sLSTM":
            cells["built_in"] = "slstm"
        return {name: Made(cell, self.T, self.B, self.I, self.H, self.dtype) for name, cell in cells.items()}

    def __str__(self) -> str:
        return f"{self.cell}, {self.heads} heads, {self.T}x{self.B}x{self.I}x{self.H} {self.dtype}"


SIZES = [("sLSTM", 512), ("sLSTM", 1024), ("sLSTM", 2048), ("block GRU", 4096)]
CASES = [Case(cell, H, I) for cell, H in SIZES for I in (NARROW, H)]


def whole(blocks: torch.Tensor) -> torch.Tensor:
    """(G, H, H) of (G, H, H / heads): blocks on diagonals of zeros."""
    gates, hidden, own = blocks.shape
    found = blocks.new_zeros(gates, hidden, hidden)
    for n in range(0, hidden, own):
        found[:, n:n + own, n:n + own] = blocks[:, n:n + own]
    return found


def weights_of(side: str, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As a side's module takes them, of those of the cell with heads."""
    found = weights if side == "heads" else weights | {"R": whole(weights["R"])}
    names = BUILT_IN if side == "built_in" else {n: n for n in found}
    return {f"{names[n]}_l0": w.reshape(-1, *w.shape[2:]) for n, w in found.items()}


def compare(case: Case, files: Files, limits: Limits) -> dict:
    """One row: every side checked and timed."""
    import torch
    from many_sides import Sides
    from side_by_side import DEVICE, relative

    from ecornn.tune.tolerance import TOLERANCE

    cell = case.with_heads(case.heads)
    if missing := [name for name in ("heads", "dense") if isinstance(files[name], str)]:
        return {"failed": f"{missing[0]}: {files[missing[0]]}"}
    sides = Sides((case.T, case.B, case.I, case.H), case.dtype)
    states, weights = drawn(cell, case.B, case.I, case.H, sides.kind, DEVICE)

    def at(kind: torch.dtype) -> torch.Tensor:
        return loop(cell, sides.x.to(kind), [s.to(kind) for s in states], {n: w.to(kind) for n, w in weights.items()})

    with torch.no_grad():
        for name, file in files.items():
            sides.add_module(name, file, weights_of(name, weights), states)
        sides.x.copy_(sides.random())
        exact = at(torch.float64)
        allowed = max(2 * relative(at(sides.kind), exact) + 1e-6, TOLERANCE[case.dtype])
        sides.check(dict.fromkeys(sides.row["sides"], exact), dict.fromkeys(sides.row["sides"], allowed))
        if sides.row["wrong"]:
            return {"failed": f"{sides.row['wrong'][0]}: {sides.row['missing'][sides.row['wrong'][0]]}"}
        row = sides.time(limits)
    return row | {"ratio": min(row[f"{s}_us"] for s in row["sides"] if s != "heads") / row["heads_us"]}


def lines_of(path: Path, log: GridLog) -> list[str]:
    """The table, in Markdown, with where its figures are from."""
    env, rows = log.environment, [r for r in log.rows if "failed" not in r]
    lines = table(("layer, T x B x I x H", "8 heads, µs/step [p20, p80]", "dense", "built-in `slstm`", "ratio"), (
        (f"{r['cell']} {r['T']}x{r['B']}x{r['I']}x{r['H']}", f"{times(r, 'heads')}, {_schedule(r, 'heads')}",
         f"{times(r, 'dense')}, {_schedule(r, 'dense')}", times(r, "built_in") if "built_in" in r["sides"] else "",
         f"{r['ratio']:.2f}x") for r in rows))
    return [*lines, "", f"{', '.join(sorted({r['dtype'] for r in rows}))}; {env['gpu']}, CUDA {env['cuda']}, "
            f"PyTorch {env['torch']}; whole forward passes in CUDA graphs, interleaved, outputs checked against "
            f"float64. Data: `{path.as_posix()}`; `python benchmarks/compare_heads.py`."]


def _schedule(r: dict, side: str) -> str:
    return str(r["configs"][side]["schedule"])


def report(path: Path, log: GridLog) -> list[str]:
    """All rows, and what failed."""
    failed = [f"- {r['name']}: {r['failed']}" for r in log.rows if "failed" in r]
    return ["# Products with heads against whole matrices", "", *lines_of(path, log), "",
            "## Not compiled or not right", "", *(failed or ["None."]), ""]


def main() -> None:
    run(parser_of(__doc__).parse_args(), CASES, compare, report)


if __name__ == "__main__":
    main()

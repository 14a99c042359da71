"""Published cells against PyTorch's loop over steps, both in CUDA graphs, on a GPU.

    python benchmarks/compare_published.py --output benchmarks/results/h100_published.jsonl
    python benchmarks/compare_published.py --target sm_90a --compile-only     # no GPU needed

Every cell of tests/published at one size, by the schedule and the knobs that it gets untuned, against its formula in
PyTorch operations (published_loop.py), a step after the other, in the same type; where PyTorch has an operation in
float32 alone, in that. Weights are those that the cell's ``sample`` draws. Outputs of all steps are held against the
formula in float64: ours may be as far from it as twice PyTorch's loop, or as a candidate of the tuner. Units of spiking
cells, and of others that step over a threshold, fall to its other side where roundings differ, on both sides alike.
Whole forward passes, interleaved; median, 20th and 80th percentile.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from cases import Files, parser_of, run
from compiled_case import Made
from grid_log import GridLog
from grid_tables import table, times
from measuring_process import Limits
from published_loop import CELLS, Published, drawn, loop

T, B, H = 128, 16, 512  # I is H: some of these cells read x at each unit


@dataclass(frozen=True)
class Case:
    """A cell of `CELLS`, by name."""

    cell: str
    T: int = T
    B: int = B
    H: int = H
    dtype: str = "float16"

    def sides(self) -> dict[str, Made]:
        return {"ecornn": Made(CELLS[self.cell], self.T, self.B, self.H, self.H, self.dtype)}

    def __str__(self) -> str:
        return f"{self.cell} {self.T}x{self.B}x{self.H}x{self.H} {self.dtype}"


CASES = [Case(name) for name in CELLS]


def source(cell: Published) -> str:
    """The cell in words, up to who published it."""
    text = " ".join((cell.__doc__ or "").split())
    return re.match(r"[^(]*\([^)]*\)|.*", text)[0]


def compare(case: Case, files: Files, limits: Limits) -> dict:
    """One row: both sides checked and timed."""
    import torch
    from many_sides import Sides
    from side_by_side import DEVICE, relative

    from ecornn.tune.tolerance import TOLERANCE

    cell, file = CELLS[case.cell], files["ecornn"]
    if isinstance(file, str):
        return {"failed": file}
    sides = Sides((case.T, case.B, case.H, case.H), case.dtype)
    states, weights = drawn(cell, case.B, case.H, case.H, sides.kind, DEVICE)

    def at(kind: torch.dtype) -> torch.Tensor:
        return loop(cell, sides.x.to(kind), [s.to(kind) for s in states], {n: w.to(kind) for n, w in weights.items()})

    with torch.no_grad():
        kind = sides.kind
        try:
            at(kind)
        except (KeyError, RuntimeError):  # PyTorch has no complex numbers of such halves
            kind = torch.float32
        flat = {cell.parameter_name(n): w.reshape(-1, *w.shape[2:]) for n, w in weights.items()}
        sides.add_module("ecornn", file, flat, states)
        owned, ready = [s.to(kind) for s in states], {n: w.to(kind) for n, w in weights.items()}
        sides.add("torch", lambda y: loop(cell, sides.x.to(kind), owned, ready))
        sides.x.copy_(sides.random())
        exact = at(torch.float64)
        theirs = relative(at(kind), exact)
        allowed = max(2 * theirs + 1e-6, TOLERANCE[case.dtype])
        sides.check({"ecornn": exact, "torch": exact}, {"ecornn": allowed, "torch": float("inf")})
        if sides.row["wrong"]:
            return {"failed": f"{sides.row['wrong'][0]}: {sides.row['missing'][sides.row['wrong'][0]]}"}
        row = sides.time(limits)
    return row | {"ratio": row["torch_us"] / row["ecornn_us"], "torch_dtype": str(kind).removeprefix("torch."),
                  "schedule": row["configs"]["ecornn"]["schedule"], "source": source(cell)}


def lines_of(path: Path, log: GridLog) -> list[str]:
    """The table, in Markdown, with where its figures are from."""
    env, rows = log.environment, [r for r in log.rows if "failed" not in r]
    lines = table(("cell", "what it is", "schedule", "ecornn µs/step [p20, p80]", "PyTorch's loop", "ratio"), (
        (f"`{r['cell']}`", r["source"], r["schedule"], times(r, "ecornn"),
         times(r, "torch") + f" ({r['torch_dtype']})" * (r["torch_dtype"] != r["dtype"]), f"{r['ratio']:.0f}x")
        for r in rows))
    sizes = sorted({f"{r['T']}x{r['B']}x{r['H']}x{r['H']}, {r['dtype']}" for r in rows})
    return [*lines, "", f"{'; '.join(sizes)}; {env['gpu']}, CUDA {env['cuda']}, PyTorch {env['torch']}; whole forward "
            "passes in CUDA graphs, interleaved, outputs checked against float64; untuned. PyTorch's loop has a kernel "
            f"for each operation. Data: `{path.as_posix()}`; `python benchmarks/compare_published.py`."]


def report(path: Path, log: GridLog) -> list[str]:
    """All rows, and what failed."""
    failed = [f"- {r['name']}: {r['failed']}" for r in log.rows if "failed" in r]
    errors = table(("cell", "error", "of PyTorch's loop"), (
        (f"`{r['cell']}`", f"{r['errors']['ecornn']:.1e}", f"{r['errors']['torch']:.1e}")
        for r in log.rows if "failed" not in r))
    return ["# Published cells against PyTorch's loop over steps", "", *lines_of(path, log), "",
            "## Errors", "", *errors, "", "## Not compiled or not right", "", *(failed or ["None."]), ""]


def main() -> None:
    run(parser_of(__doc__).parse_args(), CASES, compare, report)


if __name__ == "__main__":
    main()

"""What a variant of a cell costs against its plain cell, per step, both ours; on a GPU.

    python benchmarks/compare_variants.py --output benchmarks/results/h100_variants.jsonl
    python benchmarks/compare_variants.py --target sm_90a --compile-only     # no GPU needed

Options of the LSTM, the GRU and the vanilla cell, the sLSTM against the LSTM, the IndRNN against the vanilla cell with
relu, the GRU that resets before its product against the one that resets after it, and heads: an LSTM whose recurrent
matrices are four blocks on the diagonal, the rest zeros. A variant is timed twice: as it is compiled, by its own best
record or the heuristic, and with the plain cell's schedule and knobs, since plain cells have records of a search and
variants mostly have not. A variant that cannot be compiled is listed with the reason.

A variant may take 1.25 times as long as its plain cell, layer norm 1.6 times; a projection has one more exchange and
one more product a step, and may take 1.25 times as much longer as its floor (floor.py) is higher. Whole forward passes
in CUDA graphs, interleaved; the first steps are checked against float64; median, 20th and 80th percentile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cases import Files, parser_of, run
from compiled_case import Made
from grid_log import GridLog
from grid_tables import knobs, table, times
from measuring_process import Limits

from ecornn.device import Device
from ecornn.floor import floor, measured

T, B, DTYPE = 256, 16, "float16"
SIZES = (256, 1024)
ONCE, NORM = 1.25, 1.6  # how much longer a variant may take, and one with layer norm
HEADS = 4
VARIANTS: dict[str, tuple[str, ...]] = {  # plain cell -> variants
    "lstm": ("lstm(peepholes)", "lstm(projection)", "lstm(coupled)", "lstm(layer_norm)", "lstm(clip=3)",
             "lstm(clip_state=3)", "lstm(zoneout_h=0.1,zoneout_c=0.1)", "heads", "slstm"),
    "gru": ("gru(layer_norm)", "gru(clip=3)", "gru(zoneout=0.1)", "gru_reset_before"),
    "rnn_tanh": ("rnn_tanh(clip=3)", "rnn_tanh(zoneout=0.1)"),
    "rnn_relu": ("indrnn",)}


@dataclass(frozen=True)
class Case:
    """A variant at one size; ``heads`` is a plain cell with other weights."""

    plain: str
    variant: str
    H: int
    dtype: str = DTYPE

    def sides(self) -> dict[str, Made]:
        """The plain cell, the variant, and the variant in the plain cell's configuration."""
        return {"plain": self._made(self.plain), "variant": self._made(self.cell),
                "alike": self._made(self.cell, self.plain)}

    @property
    def cell(self) -> str:
        return self.plain if self.variant == "heads" else self.variant

    def _made(self, cell: str, like: str | None = None) -> Made:
        return Made(cell, T, B, self.H, self.H, self.dtype, like=like)

    def __str__(self) -> str:
        return f"{self.variant} H={self.H}"


CASES = [Case(plain, variant, H) for plain, variants in VARIANTS.items() for variant in variants for H in SIZES]


def random_weights(cell: Any, hidden: int, heads: int, generator: Any) -> dict[str, Any]:
    """By the cell's names, in te shape: uniform in +-1/sqrt(H), gains of layer normalization about 1; recurrent
    matrices in blocks on the diagonal."""
    import numpy as np

    found = {name: generator.uniform(-1, 1, shape) / hidden ** 0.5 + name.startswith("weight_ln")
             for name, shape in cell.parameters(hidden, hidden).items()}
    if heads > 1:
        block = np.arange(hidden) * heads // hidden
        found["weight_hh"] = np.where(block[:, None] == block, found["weight_hh"], 0)
    return found


def compare(case: Case, files: Files, limits: Limits) -> dict:
    """One row: every side checked and timed."""
    import numpy as np
    import torch
    from many_sides import Sides
    from side_by_side import DEVICE

    from ecornn.cells import get
    from ecornn.interpreter import interpret
    from ecornn.tune.oracle import STEPS
    from ecornn.tune.quick_tvm import import_tvm
    from ecornn.tune.tolerance import TOLERANCE

    import_tvm()
    for side in ("plain", "variant"):
        if isinstance(files[side], str):
            return {"failed": files[side], "served": False}
    sides, references = Sides((T, B, case.H, case.H), case.dtype), {}
    with torch.no_grad():
        sides.x.copy_(sides.random())
        first = sides.x[:STEPS].double().cpu().numpy()
        for name, text, heads in (("plain", case.plain, 1), ("variant", case.cell, HEADS * (case.variant == "heads"))):
            cell = get(text)
            shaped = {n: torch.from_numpy(w).to(DEVICE, sides.kind) for n, w in random_weights(
                cell, case.H, heads, np.random.default_rng(0)).items()}
            weights = {cell.parameter_name(n): w.reshape(-1, *w.shape[2:]) for n, w in shaped.items()}
            zero = [np.zeros((B, case.H))] * len(cell.states)
            y, _ = interpret(cell, first, {n: w.double().cpu().numpy() for n, w in shaped.items()}, zero)
            for side in ("plain",) if name == "plain" else ("variant", "alike"):
                sides.add_module(side, files[side], weights)
                references[side] = torch.from_numpy(y).to(DEVICE)
        sides.check(references, dict.fromkeys(references, TOLERANCE[case.dtype]))
        if wrong := [side for side in ("plain", "variant") if side in sides.row["wrong"]]:
            return {"failed": f"{wrong[0]}: {sides.row['missing'][wrong[0]]}"}
        row = sides.time(limits)
    ratios = {f"{side}_ratio": row[f"{side}_us"] / row["plain_us"] for side in row["sides"] if side != "plain"}
    return row | ratios | {"T": T, "B": B}


def allowed(row: Mapping[str, Any], gpu: Device | None) -> float | None:
    """How much longer than its plain cell a variant may take; None where nobody can say."""
    if "projection" not in row["variant"]:
        return NORM if "layer_norm" in row["variant"] else ONCE
    if gpu is None:
        return None
    plain, extra = (floor(gpu, cell, B, row["H"], row["H"], row["dtype"]) for cell in ("lstm", "rnn_tanh"))
    return ONCE * (plain.total + extra.exchange + extra.recurrent) / plain.total


def report(path: Path, log: GridLog) -> list[str]:
    """The table, in Markdown."""
    env, rows = log.environment, [r for r in log.rows if "failed" not in r]
    gpu = measured(env["gpu"])
    lines = ["# What variants of a cell cost", "",
             f"{env['gpu']}, CUDA {env['cuda']}, PyTorch {env['torch']}; {T}x{B}xHxH, {DTYPE}, µs a step of whole "
             "forward passes in CUDA graphs, interleaved, medians with 20th and 80th percentiles, the first steps "
             "checked against float64. `alike` is the variant with the plain cell's schedule and knobs. Data: "
             f"`{path.name}`; `make bench`.", "",
             *table(("variant", "H", "of", "plain", "variant", "ratio", "alike", "ratio", "at most", "", "variant's"), (
                 _line(r, gpu) for r in rows)), ""]
    lines += ["## Not compiled or not right", "",
              *([f"- {r['name']}: {r['failed']}" for r in log.rows if "failed" in r] or ["None."]),
              *(f"- {r['name']}, {side}: {why}" for r in rows for side, why in r["missing"].items()), ""]
    return lines


def _line(r: dict, gpu: Device | None) -> list[str]:
    most, config = allowed(r, gpu), dict(r["configs"]["variant"])
    alike = [times(r, "alike"), f"{r['alike_ratio']:.2f}x"] if "alike" in r["sides"] else ["", ""]
    verdict = "" if most is None else "holds" if r["variant_ratio"] <= most else "**missed**"
    return [r["variant"], str(r["H"]), r["plain"], times(r, "plain"), times(r, "variant"),
            f"{r['variant_ratio']:.2f}x", *alike, "" if most is None else f"{most:.2f}x", verdict,
            f"{config.pop('schedule')} {knobs(config)}"]


def main() -> None:
    run(parser_of(__doc__).parse_args(), CASES, compare, report)


if __name__ == "__main__":
    main()

"""The rows of the grid as Markdown: the short form for docs, and all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from grid import CLIFF
from grid_log import GridLog
from grid_summary import HIGH, Summary

NAMES = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "vanilla tanh", "rnn_relu": "vanilla relu",
         "slstm": "sLSTM", "slstm(heads=8)": "sLSTM with 8 heads,"}

def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a Markdown table."""
    return [f"| {' | '.join(map(str, cells))} |" for cells in (heads, ["---"] * len(heads), *rows)]


def layer(r: dict) -> str:
    """A row's layer, as tables name it."""
    return f"{NAMES[r['cell']]} {r['T']}x{r['B']}x{r['I']}x{r['H']}"


def times(r: dict, side: str) -> str:
    return f"{r[f'{side}_us']:.2f} [{r[f'{side}_p20']:.2f}, {r[f'{side}_p80']:.2f}]"


def against(r: dict) -> list[str]:
    """Layer, data type, both sides, ratio, and the floor where there is one."""
    floors = [f"{r['floor_us']:.2f}", f"{r['over_floor']:.2f}"] if "floor_us" in r else ["", ""]
    return [layer(r), r["dtype"], times(r, "ecornn"), times(r, "cudnn"), f"{r['ratio']:.2f}x", *floors]


AGAINST = ("layer, T x B x I x H", "dtype", "ecornn", "cuDNN", "ratio", "floor", "times the floor")


def knobs(config: dict) -> str:
    return " ".join(f"{k}={v}" for k, v in config.items())


def size(r: dict) -> str:
    """Of the module's file, in kB, where it is known."""
    return f"{r['module_bytes'] / 1000:.0f}" if "module_bytes" in r else ""


def source(log: GridLog, path: Path) -> str:
    """Where the figures are from."""
    env, rounded = log.environment, any(r["dtype"] == "tf32-both" for r in log.rows)
    return (f"{env['gpu']}, CUDA {env['cuda']}, cuDNN {env['cudnn']} through PyTorch {env['torch']} in a CUDA graph; "
            f"µs a step of whole forward passes, interleaved, medians with 20th and 80th percentiles, outputs checked "
            f"against float64. Rows `tf32` let cuDNN round to TF32; ecornn computes float32 there"
            f"{', and in rows `tf32-both` TF32 too' if rounded else ''}. Data: `{path.as_posix()}`; `make bench`.")


def short(path: Path, log: GridLog) -> list[str]:
    """For docs/PERFORMANCE.md: means, the worst rows, cliffs."""
    s = Summary(log.rows)
    lines = table(("single layers against cuDNN", "rows", "geometric mean", "least", "below 1x"), (
        (g.dtype, len(g.rows) if len(g.rows) == g.expected else f"{len(g.rows)} of {g.expected}", f"{g.mean:.2f}x",
         f"{g.least['ratio']:.2f}x, {layer(g.least)}", g.below) for g in s.groups()))
    lines += ["", "The rows with the least ratio:", "", *table(AGAINST, map(against, s.worst(6))), ""]
    if pairs := s.pairs():
        worst = max(pairs, key=lambda p: p.cliff)
        lines.append(f"Sizes off every tile take at most {worst.cliff:.2f} times as long as the next tile up "
                     f"({layer(worst.off)} against {layer(worst.up)}; {len(pairs)} pairs).")
    if s.failed:
        lines.append(f"{len(s.failed)} rows failed: " + "; ".join(f"{layer(r)} {r['dtype']}" for r in s.failed) + ".")
    whole = path.with_suffix(".md").as_posix()
    return [*lines, f"Every row, with its configuration and its floor: [{whole}](../{whole}).", "",
            source(log, path)]


def long(path: Path, log: GridLog) -> list[str]:
    """Every row, and what must hold."""
    s = Summary(log.rows)
    lines = ["# Single layers on a GPU", "", source(log, path), "",
             "The floor of a row is what `ecornn/floor.py` computes: exchange, products and bytes of the best cut.",
             "Modules were compiled several at a time; `benchmarks/compile_times.py` times them one by one.",
             "", *table((*AGAINST, "schedule", "knobs", "from", "module, kB"), (
                 (*against(r), r["schedule"], knobs(r["config"]), r["provenance"].split(":")[0], size(r))
                 for r in s.rows.values()))]
    lines += ["", "## Bounds", "", *table(("layer", "dtype", "ecornn", "at most", "ratio", "at least", ""), (
        (layer(b.row), b.row["dtype"], times(b.row, "ecornn"), b.most or "", f"{b.row['ratio']:.2f}x", b.least or "",
         "holds" if b.good else "**missed**") for b in s.bounds()))]
    lines += ["", "## Vanilla tanh, H = 1152, float16 (Persistent RNNs)", "",
              "TFLOP/s are those of the recurrent product alone, over the time of the whole layer.", "",
              *table(("B", "ecornn", "cuDNN", "TFLOP/s", "exchange floor / time"), (
                  (p.B, f"{p.us:.2f}", f"{p.cudnn_us:.2f}", f"{p.tflops:.2f}",
                   "" if p.share is None else f"{p.share:.0%}") for p in s.scaling()))]
    lines += ["", "## Off every tile", "", *table(("layer", "ecornn", "next tile up", "ecornn", "cliff", ""), (
        (layer(p.off), times(p.off, "ecornn"), layer(p.up), times(p.up, "ecornn"), f"{p.cliff:.2f}",
         "holds" if p.good else f"**above {CLIFF}**") for p in s.pairs()))]
    lines += ["", f"## Above {HIGH} times the floor", "", ", ".join(
        f"{layer(r)} {r['dtype']} ({r['over_floor']:.2f})" for r in s.high()) or "None.", "",
        "`benchmarks/why_above_floor.py` says which stage of a step is the reason.", ""]
    if s.failed:
        lines += ["## Failed", "", *(f"- {layer(r)} {r['dtype']}: {r['failed']}" for r in s.failed), ""]
    return lines

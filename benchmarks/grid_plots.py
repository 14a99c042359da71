"""Plots of the grid."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from grid_summary import Summary, singles
from measured_rows import Results

COLOURS = {"float16": "tab:blue", "bfloat16": "tab:orange", "tf32": "tab:green", "tf32-both": "tab:purple",
           "float32": "tab:red"}


def plot_rows(log: Results, path: Path) -> None:
    """Times with their spread and floors, and the ratios, a line for each row of the grid."""
    summary = Summary(log.rows, log.environment["gpu"])
    rows = summary.measured(singles())
    if not rows:
        return
    at = np.arange(len(rows))
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 2 + 0.19 * len(rows)), sharey=True)
    for side, name, colour, marker in (("ecornn", "ecornn", "tab:blue", "o"), ("cudnn", "cuDNN", "tab:gray", "s")):
        middle = np.array([r[f"{side}_us"] for r in rows])
        spread = np.abs(np.array([[r[f"{side}_p20"], r[f"{side}_p80"]] for r in rows]).T - middle)
        left.errorbar(middle, at, xerr=spread, fmt=marker, color=colour, markersize=4, label=name)
    known = [(r["floor_us"], y) for r, y in zip(rows, at, strict=True) if "floor_us" in r]
    if known:
        left.plot(*zip(*known, strict=True), "|", color="black", markersize=8, label="floor")
    left.set(xscale="log", xlabel="µs a step", yticks=at, ylim=(len(rows) - 0.5, -0.5))
    left.set_yticklabels([r["name"] for r in rows], fontsize=7)
    left.legend()
    right.barh(at, [r["ratio"] for r in rows], color=[COLOURS[r["dtype"]] for r in rows])
    right.axvline(1, color="black", linewidth=1)
    right.set(xlabel="times as fast as cuDNN")
    for panel in (left, right):
        panel.grid(alpha=0.3, axis="x", which="both")
    _save(figure, path)


def plot_scaling(log: Results, path: Path) -> None:
    """Vanilla, H = 1152: time, TFLOP/s and share of the exchange floor against the batch."""
    points = Summary(log.rows, log.environment["gpu"]).scaling()
    if not points:
        return
    batches = [p["B"] for p in points]
    figure, panels = plt.subplots(1, 3, figsize=(13, 3.6))
    panels[0].plot(batches, [p["ecornn_us"] for p in points], "o-", label="ecornn")
    panels[0].plot(batches, [p["cudnn_us"] for p in points], "s-", color="tab:gray", label="cuDNN")
    panels[0].set(ylabel="µs a step", ylim=(0, None))
    panels[0].legend()
    panels[1].plot(batches, [p["tflops"] for p in points], "o-", label="ecornn")
    panels[1].plot(batches, [p["tflops"] * p["ecornn_us"] / p["cudnn_us"] for p in points], "s-", color="tab:gray")
    panels[1].set(ylabel="TFLOP/s of the recurrent product", yscale="log")
    panels[2].plot(batches, [np.nan if p["share"] is None else p["share"] for p in points], "o-")
    panels[2].set(ylabel="exchange floor / time", ylim=(0, 1))
    for panel in panels:
        panel.set(xscale="log", xlabel="B", xticks=batches, xticklabels=batches)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    figure.suptitle(f"vanilla tanh, H = {points[0]['H']}, {points[0]['dtype']}, {log.environment['gpu']}")
    _save(figure, path)


def _save(figure: plt.Figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)

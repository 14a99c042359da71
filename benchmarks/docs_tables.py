"""Writes docs' tables of measured results from the files of the ``compare_*.py`` beside this one.

    python benchmarks/docs_tables.py benchmarks/results/h100.json
    python benchmarks/docs_tables.py benchmarks/results/h100_grid.jsonl
    python benchmarks/docs_tables.py benchmarks/results/h100_flashrnn.json
    python benchmarks/docs_tables.py benchmarks/results/h100_flashrnn_training.json
    python benchmarks/docs_tables.py benchmarks/results/h100_stacks.json
    python benchmarks/docs_tables.py benchmarks/results/cpu_skylake.json
    python benchmarks/docs_tables.py benchmarks/results/h100_published.jsonl
    python benchmarks/docs_tables.py benchmarks/results/h100_heads.jsonl
    python benchmarks/docs_tables.py benchmarks/results/h100_classes.jsonl
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
from grid_log import GridLog
from grid_tables import NAMES, short, table

PAGES = (Path("docs/PERFORMANCE.md"), Path("docs/PERFORMANCE_CPU.md"), Path("docs/CELLS.md"))  # from the checkout


def gpu_table(path: Path, data: dict) -> list[str]:
    """The table as Markdown, with its environment and the command that makes it."""
    env = data["environment"]
    lines = ["| layer, T x B x I x H | dtype | ecornn µs/step [p20, p80] | cuDNN µs/step [p20, p80] | ratio |",
             "|---|---|---|---|---|"]
    for r in data["rows"]:
        lines.append(f"| {NAMES[r['cell']]} {r['T']}x{r['B']}x{r['I']}x{r['H']} | {r['dtype']} | "
                     f"{r['ecornn_us']:.2f} [{r['ecornn_p20']:.2f}, {r['ecornn_p80']:.2f}] | "
                     f"{r['cudnn_us']:.2f} [{r['cudnn_p20']:.2f}, {r['cudnn_p80']:.2f}] | {r['ratio']:.2f}x |")
    return [*lines, "", f"{env['gpu']}, CUDA {env['cuda']}, cuDNN {env['cudnn']} through PyTorch {env['torch']} in "
            f"a CUDA graph; whole forward pass, outputs checked against float64. Data: `{path.as_posix()}`; "
            f"`{env['command']}`."]


def cpu_table(path: Path, data: dict) -> list[str]:
    """Layers and latencies, a line for the grid, and a line for rounded weights."""
    env, suites = data["environment"], {r["suite"]: [] for r in data["rows"]}
    for row in data["rows"]:
        suites[row["suite"]].append(row)
    sides = ("ecornn", "torch", "onnxruntime")
    lines = ["| layer, T x B x I x H | ecornn ms [p20, p80] | torch.nn | ONNX Runtime | ratio to the faster | "
             "with `int21` |", "|---|---|---|---|---|---|"]
    for r in suites.get("layers", []) + suites.get("stacks", []) + suites.get("latency", []):
        times = " | ".join(f"{r[f'{s}_ms']:.3g} [{r[f'{s}_p20']:.3g}, {r[f'{s}_p80']:.3g}]" for s in sides)
        stack = ", 5 layers, both directions" if r["suite"] == "stacks" else ""
        int21 = f"{r['ratio_int21']:.2f}x" if "ratio_int21" in r else ""
        lines.append(f"| {NAMES[r['cell']]} {r['T']}x{r['B']}x{r['I']}x{r['H']}{stack} | {times} | {r['ratio']:.2f}x | "
                     f"{int21} |")
    lines.append("")
    if grid := [r["ratio"] for r in suites.get("grid", [])]:
        mean = np.exp(np.mean(np.log(grid)))
        lines.append(f"Over a grid of {len(grid)} shapes the geometric mean is {mean:.2f}x, the least "
                     f"{min(grid):.2f}x; {sum(r < 1 for r in grid)} are below 1.")
    if "layers" in suites:
        lines.append("Against products and pointwise operations of PyTorch one by one the layers of 300x20x800x800 are "
                     + ", ".join(f"{r['ratio_unfused']:.2f}x ({NAMES[r['cell']]}"
                                 + (", 5 layers, both directions)" if r["suite"] == "stacks" else ")")
                                 for r in suites["layers"] + suites.get("stacks", [])) + ".")
    if "weights" in suites:
        lines.append("Rounded weights at 100x1x1024x1024, against float32 ones: " + "; ".join(
            f"{NAMES[r['cell']]} " + ", ".join(
                f"{kind} {r[f'ratio_ecornn_{kind}']:.2f}x (error {r[f'ecornn_{kind}_error']:.1e})"
                for kind in ("int21", "int16", "bfloat16", "int8") if f"ratio_ecornn_{kind}" in r)
            for r in suites["weights"]) + ".")
    if "threads" in suites:
        lines.append("Two threads against one at 300x20x800x800: " + ", ".join(
            f"{r['ratio_ecornn_1_thread']:.2f}x ({NAMES[r['cell']]})" for r in suites["threads"]) + ".")
    return [*lines, "", f"{env['cpu']} ({env['arch']}), {env['cores']} cores and threads, float32, whole forward pass, "
            f"outputs checked against float64; PyTorch {env['torch']}, ONNX Runtime {env.get('onnxruntime')}. Data: "
            f"`{path.as_posix()}`; `{env['command']}`."]


def flashrnn_table(path: Path, data: dict) -> list[str]:
    """The table of ``compare_flashrnn.py``."""
    env, rows = data["environment"], []
    for r in data["rows"]:
        theirs = min((s for s in ("flashrnn", "flashrnn_triton") if f"{s}_us" in r), key=lambda s: r[f"{s}_us"])
        sides = [f"{r[f'{side}_us']:.2f} [{r[f'{side}_p20']:.2f}, {r[f'{side}_p80']:.2f}]"
                 for side in ("ecornn_recurrence", "ecornn", theirs)]
        sides[-1] += " (Triton)" * (theirs == "flashrnn_triton")
        rows.append((f"{NAMES[r['cell']]} {r['T']}x{r['B']}x{r['H']}", *sides, f"{r['ratio_recurrence']:.2f}x"))
    return [*table(("bfloat16, µs/step [p20, p80]", "ecornn, recurrence", "ecornn, whole layer",
                    "FlashRNN, recurrence", "ratio"), rows), "",
            f"FlashRNN {env['flashrnn']} (`cuda_fused`, or `triton_fused` where it takes the heads and is faster) "
            f"through its own API on {env['gpu']}, PyTorch {env['torch']}; ours in CUDA graphs, its launches queued "
            f"behind a kernel that waits; interleaved, outputs checked against float64. {env['recurrence']} Data: "
            f"`{path.as_posix()}`; `make bench`."]


def flashrnn_training_table(path: Path, data: dict) -> list[str]:
    """The table of ``compare_flashrnn.py --training``."""
    env = data["environment"]
    rows = [(f"{NAMES[r['cell']]} {r['T']}x{r['B']}x{r['I']}x{r['H']}",
             *(f"{r[f'{side}_us']:.2f} [{r[f'{side}_p20']:.2f}, {r[f'{side}_p80']:.2f}]"
               for side in ("ecornn", "cudnn", "flashrnn")),
             f"{r['ratio']:.2f}x", f"{r['ratio_flashrnn']:.2f}x") for r in data["rows"]]
    return [*table(("bfloat16, forward and backward, µs/step [p20, p80]", "ecornn", "cuDNN", "FlashRNN, recurrence",
                    "to cuDNN", "to FlashRNN"), rows), "",
            f"FlashRNN {env['flashrnn']} (`cuda_fused`) through its own API and PyTorch's autograd on {env['gpu']}, "
            f"PyTorch {env['torch']}, cuDNN {env['cudnn']}; interleaved, gradients checked against float64. "
            f"{env['recurrence']} Data: `{path.as_posix()}`; `{env['command']}`."]


def stacks_table(path: Path, data: dict) -> list[str]:
    """The table of ``compare_stacks.py``; in bold the arrangement that is compiled unless another one is asked for."""
    env, rows = data["environment"], []
    for r in data["rows"]:
        ours = [f"{r[f'{side}_us']:.2f} [{r[f'{side}_p20']:.2f}, {r[f'{side}_p80']:.2f}]"
                for side in ("serial", "overlapped")]
        chosen = r["ecornn_us"] == r["overlapped_us"]
        ours[chosen] = f"**{ours[chosen]}**"
        layers = f"{r['layers']} layers" + (", both directions" if r["bidirectional"] else "")
        rows.append((f"{NAMES[r['cell']]} {r['T']}x{r['B']}x{r['I']}x{r['H']}, {layers}", *ours,
                     f"{r['cudnn_us']:.2f} [{r['cudnn_p20']:.2f}, {r['cudnn_p80']:.2f}]", f"{r['ratio']:.2f}x"))
    return [*table(("float16, µs per layer and step [p20, p80]", "one after the other", "at the same time", "cuDNN",
                    "ratio"), rows), "",
            f"{env['gpu']}, CUDA {env['cuda']}, cuDNN {env['cudnn']} through PyTorch {env['torch']}; all in CUDA "
            f"graphs, interleaved, outputs checked against float64. Data: `{path.as_posix()}`; `{env['command']}`."]


def section(path: Path) -> tuple[str, list[str]]:
    """The name of the part of ``PAGES`` that a file belongs to, and its lines."""
    for name in ("published", "heads", "classes", "integer_weights"):
        if path.stem.endswith(f"_{name}"):
            return f"measured-{name}", importlib.import_module(f"compare_{name}").lines_of(path, GridLog(path))
    if path.suffix == ".jsonl":
        return "measured-grid", short(path, GridLog(path))
    data = json.loads(path.read_text())
    env = data["environment"]
    if "ratio_flashrnn" in data["rows"][0]:
        return "measured-flashrnn-training", flashrnn_training_table(path, data)
    if "flashrnn" in env:
        return "measured-flashrnn", flashrnn_table(path, data)
    if "serial_us" in data["rows"][0]:
        return "measured-stacks", stacks_table(path, data)
    return ("measured", gpu_table(path, data)) if "gpu" in env else ("measured-cpu", cpu_table(path, data))


def main() -> None:
    name, lines = section(Path(sys.argv[1]))
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    (page,) = (page for page in PAGES if begin in page.read_text())
    text = page.read_text()
    before, after = text.split(begin)[0], text.split(end)[1]
    page.write_text(before + "\n".join([begin, "", *lines, "", end]) + after)


if __name__ == "__main__":
    main()

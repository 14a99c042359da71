"""Where a training step goes: the kernels of forward and backward of one layer, by the time that they take.

    python benchmarks/training_kernels.py "lstm 1024x16x768x768 bfloat16 training"

Rows are those of ``grids/training.toml``. Durations are of CUPTI, by way of PyTorch's profiler, of one step after some
others; ``gaps`` is what is left of the time from the first kernel's start to the last one's end, where kernels of two
streams count once.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import torch
from side_by_side import DEVICE, kernels

import ecornn
from ecornn.bench.grid import read_grid
from ecornn.compiler import compile_layer

FILE = Path(__file__).parent / "grids" / "training.toml"


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("this needs a CUDA GPU and a PyTorch that sees it")
    layers = {layer.name: layer.case.layer() for layer in read_grid(FILE).expanded(FILE.name)}
    for name in sys.argv[1:]:
        if name not in layers:
            sys.exit(f"no row {name!r}; there are: {', '.join(layers)}")
        row = layers[name]
        kind = getattr(torch, row.dtype)
        with tempfile.TemporaryDirectory(prefix="ecornn-") as folder:
            module = compile_layer(row, target="cuda", out=Path(folder, "module.so"))
            shapes = {p.name: p.shape for p in module.manifest.parameters}
            layer = module.bind({n: (torch.rand(s, device=DEVICE) * 2 - 1).to(kind) / row.hidden ** 0.5
                                 for n, s in shapes.items()})
            x = torch.randn(row.seq, row.batch, row.workload.input, device=DEVICE).to(kind)
            dy = torch.randn(row.seq, row.batch, row.hidden * (1 + row.bidirectional), device=DEVICE).to(kind)
            for part in ("forward", "backward"):
                show(f"{name}, {part}", part, layer, x, dy, row.seq * row.layers)


def show(title: str, part: str, layer: ecornn.Layer, x: torch.Tensor, dy: torch.Tensor, steps: int) -> None:
    """A table of the kernels of one entry, in microseconds and microseconds a step."""
    def step() -> None:
        layer.backward(layer.forward(x)[2], dy)

    for _ in range(3):
        step()
    _, _, kept = layer.forward(x)
    found = kernels(lambda: layer.forward(x) if part == "forward" else layer.backward(kept, dy))
    times: defaultdict[str, list[float]] = defaultdict(list)
    for name, begin, end in found:
        times[name].append(end - begin)
    spans = [(begin, end) for _, begin, end in found]
    print(f"{title}: microseconds, launches, microseconds a step and layer")
    for kernel, values in sorted(times.items(), key=lambda each: -sum(each[1])):
        print(f"  {kernel[:44]:44} {sum(values):9.1f} {len(values):5} {sum(values) / steps:8.3f}")
    busy, end = 0.0, 0.0
    for start, stop in sorted(spans):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    whole = end - min(start for start, _ in spans)
    print(f"  {'gaps':44} {whole - busy:9.1f} {'':5} {(whole - busy) / steps:8.3f}")
    print(f"  {'in all':44} {whole:9.1f} {'':5} {whole / steps:8.3f}", flush=True)


if __name__ == "__main__":
    main()

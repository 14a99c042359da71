"""Where a training step goes: of the language model what both sides share, and the kernels of each; of layers kernels.

    python benchmarks/model_stages.py --output benchmarks/results/h100_model_stages.json
    python benchmarks/model_stages.py "lstm 1024x16x768x768 bfloat16 training"

The model and its steps are those of ``compare_models.py``, as one CUDA graph each: as it is written, and with all but
the recurrent layers compiled by PyTorch. A third model, ``rest``, has the same
parameters, but its recurrent layers pass on what they get, and zeros as the gradients of their weights: what
embedding, dropout, scores, loss, clipping and Adam take. All three take turns. No recurrent layers, however fast, make
a step shorter than ``rest``, so that ``torch / rest`` bounds what can be reached, and ``torch / wanted - rest`` is what
is left to them. Kernels are those of the graphs, by CUPTI through PyTorch's profiler, in microseconds a step.

Layers are rows of ``grids/training.toml``: the kernels of forward and of backward, of one call after some others.
``gaps`` is what is left of the time from the first kernel's start to the last one's end, where kernels of two streams
count once.
"""

from __future__ import annotations

import copy
import itertools
import os
import re
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from compare_models import COMPILED, KINDS, Case, CompiledStep, language
from side_by_side import environment, kernels, options, write
from torch import nn
from training_steps import DEVICE, Step, middle, take_turns

import ecornn.torch
from ecornn.bench.grid import read_grid
from ecornn.compiler import compile_layer
from ecornn.layer_spec import LayerSpec

FILE = Path(__file__).parent / "grids" / "training.toml"
STEPS = 5  # that are profiled
# Kernels of ecornn are named by what they do; of other libraries they have longer names.
STAGES = {"pack": "ecornn_pack_weights", "recurrence backward": "backward_(persistent|layout|step|start)",
          "recurrence forward": "(persistent|fused|layout|step|start|whole)", "dx": "backward_inputs",
          "weights": "backward_(add_)?outer", "projection": "(project|align)",
          "replay": "backward_(replay|gather|align)", "sums": "backward_(sums|once|finish|no_)"}


class _Through(torch.autograd.Function):
    """x as it is, with zeros for the gradients of weights."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.like = weights
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradient, *(torch.zeros_like(weight) for weight in ctx.like)


class Through(nn.Module):
    """Layers of as many units as inputs that do nothing."""

    def __init__(self, layers: nn.RNNBase) -> None:
        super().__init__()
        self.layers = layers

    @torch.compiler.disable  # as the layers of the others
    def forward(self, x: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        return _Through.apply(x, *self.layers.parameters()), state


def times_of(run: Any) -> dict[str, tuple[float, float]]:
    """Microseconds and launches a step of each kernel."""
    run()
    found: defaultdict[str, list[float]] = defaultdict(list)
    for name, begin, end in kernels(lambda: [run() for _ in range(STEPS)]):
        found[name].append(end - begin)
    return {name: (sum(values) / STEPS, len(values) / STEPS)
            for name, values in sorted(found.items(), key=lambda each: -sum(each[1]))}


def shortened(found: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """The same by names without where PyTorch keeps them, and without all of their types."""
    made: defaultdict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for name, (microseconds, launches) in found.items():
        name = name.removeprefix("void ").replace("at::native::", "").replace("(anonymous namespace)::", "")[:100]
        made[name] = (round(made[name][0] + microseconds, 2), made[name][1] + launches)
    return dict(made)


def stages(found: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Microseconds a step of kernels of the recurrent layers, by what they do, and of all others."""
    times: defaultdict[str, float] = defaultdict(float)
    for name, (microseconds, _) in found.items():
        stage = next((stage for stage, pattern in STAGES.items() if re.match(pattern, name)), "others")
        times[stage] += microseconds
    return dict(times)


def compared(case: Case, way: str, of: type[Step], seconds: float) -> dict[str, Any]:
    """A row: the three models in turns, and their kernels."""
    models = {"torch": copy.deepcopy(case.model).to(DEVICE)}
    models |= {name: copy.deepcopy(models["torch"]) for name in ("ecornn", "rest")}
    ecornn.torch.replace(models["ecornn"], fullgraph=True, wait=True)
    rest: Any = models["rest"]
    rest.recurrent = Through(rest.recurrent)
    batches = itertools.cycle([case.draw() for _ in range(8)])
    sides, graphs = {}, {}
    for name, model in models.items():
        step = case.step(model, KINDS["bf16"], of)
        graphs[name] = step.graphed()
        sides[name] = lambda step=step, run=graphs[name]: (step.load(*next(batches)), run())
    row: dict[str, Any] = {"model": case.name, **case.sizes, "dtype": "bf16", "way": way, "wanted": case.wanted}
    for name, times in take_turns(sides, seconds, 5, 7).items():
        median, p20, p80 = middle(times)
        row |= {f"{name}_ms": median * 1e3, f"{name}_p20": p20 * 1e3, f"{name}_p80": p80 * 1e3}
    row |= {"ratio": row["torch_ms"] / row["ecornn_ms"], "bound": row["torch_ms"] / row["rest_ms"],
            "layers_ms": {name: row[f"{name}_ms"] - row["rest_ms"] for name in ("ecornn", "torch")},
            "left_ms": row["torch_ms"] / case.wanted - row["rest_ms"]}
    found = {name: times_of(graph) for name, graph in graphs.items()}
    return row | {"stages_us": stages(found["ecornn"]),
                  "kernels_us": {name: shortened(each) for name, each in found.items()}}


def shown(row: dict[str, Any]) -> str:
    """A row for people."""
    told = (f"{row['way']}: torch.nn {row['torch_ms']:.3f} ms, ecornn {row['ecornn_ms']:.3f} ({row['ratio']:.2f}x of "
            f"{row['wanted']:.1f}x), the rest {row['rest_ms']:.3f}; recurrent layers {row['layers_ms']['torch']:.3f} "
            f"and {row['layers_ms']['ecornn']:.3f}, for {row['wanted']:.1f}x {row['left_ms']:.3f}")
    return "\n".join([told, *(f"  {stage:20} {microseconds:8.1f} us" for stage, microseconds in
                              sorted(row["stages_us"].items(), key=lambda each: -each[1]))])


def of_layer(name: str, row: LayerSpec) -> None:
    """The tables of a layer's two passes."""
    kind = getattr(torch, row.dtype)
    with tempfile.TemporaryDirectory(prefix="ecornn-") as folder:
        module = compile_layer(row, target="cuda", out=Path(folder, "module.so"))
        layer = module.bind({p.name: (torch.rand(p.shape, device=DEVICE) * 2 - 1).to(kind) / row.hidden ** 0.5
                             for p in module.manifest.parameters})
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


def main() -> None:
    parser = options(__doc__, language=("35,20,650,10000", "sizes T,B,H,V"), seconds=(3.0, "of turns"))
    parser.add_argument("layers", nargs="*", metavar="LAYER", help="the kernels of these in place of the model")
    arguments = parser.parse_args()
    if DEVICE != "cuda":
        sys.exit("this needs a CUDA GPU and a PyTorch that sees it")
    layers = {layer.name: layer.case.layer() for layer in read_grid(FILE).expanded(FILE.name)}
    if unknown := set(arguments.layers) - set(layers):
        sys.exit(f"no row {', '.join(unknown)}; there are: {', '.join(layers)}")
    for name in arguments.layers:
        of_layer(name, layers[name])
    if arguments.layers:
        return
    os.environ["ECORNN_STRICT"] = "1"
    torch.manual_seed(0)
    case = language(*map(int, arguments.language.split(",")))
    rows = []
    for way, of in (("graph", Step), (COMPILED, CompiledStep)):
        rows.append(compared(case, way, of, arguments.seconds))
        print(shown(rows[-1]), flush=True)
        write(arguments.output, environment(), rows)


if __name__ == "__main__":
    main()

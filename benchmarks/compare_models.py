"""Whole models in training, of compiled layers and of torch.nn's, in turns, in one process; and where a step goes.

    python benchmarks/compare_models.py --output benchmarks/results/h100_models.json
    python benchmarks/compare_models.py --only language --compile
    python benchmarks/compare_models.py --stages --output benchmarks/results/h100_model_stages.json
    python benchmarks/compare_models.py --kernels "lstm 1024x16x768x768 bfloat16 training"

The models are those of examples/: a language model of words with dropout, 2 x 650, and a speech recognizer, five layers
of 800 in both directions with CTC. A step is all of it: a new batch, forward, loss, backward, clipping, Adam; on a GPU
in bfloat16 by autocast. Before anything is timed, loss and gradients of all parameters are compared with float64's, on
the code that is timed, but that dropout drops nothing: our gradients must be within twice the error of torch.nn's in
the same data type, in float32 within 2e-5; the loss within one rounding. Then both sides run plain, on a GPU as CUDA
graphs (of the recognizer all but the loss, which PyTorch captures only in some versions), the language model also as
graphs of steps of which PyTorch compiles what is not recurrent (:class:`CompiledStep`), and under torch.compile if
asked for. Times are medians with 20th and 80th percentiles in milliseconds a step, on the host's clock, of several
steps in a row. Where a compiled layer cannot run, that is an error.

``--stages``: the language model's steps, as one CUDA graph each: as it is written, and with all but the recurrent
layers compiled by PyTorch. A third model, ``rest``, has the same parameters, but its recurrent layers pass on what they
get, and zeros as the gradients of their weights: what embedding, dropout, scores, loss, clipping and Adam take. All
three take turns. No recurrent layers, however fast, make a step shorter than ``rest``, so that ``torch / rest`` bounds
what can be reached, and ``torch / wanted - rest`` is what is left to them. Kernels are those of the graphs, by CUPTI
through PyTorch's profiler, in microseconds a step.

``--kernels``: of rows of ``grids/training.toml``, the kernels of forward and of backward, of one call after some
others. ``gaps`` is what is left of the time from the first kernel's start to the last one's end, where kernels of two
streams count once.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import os
import platform
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from training_steps import DEVICE, Step, middle, peak, take_turns

# PyTorch after that, which says how its threads wait
# isort: split
import torch
from side_by_side import WrongResultError, environment, kernels, options, relative, told, write
from torch import nn
from torch.func import functional_call
from torch.optim.adam import adam

import ecornn.torch
from ecornn.bench.grid import read_grid
from ecornn.compiler import compile_layer
from ecornn.layer_spec import LayerSpec

FILE = Path(__file__).parent / "grids" / "training.toml"
KINDS = {"bf16": torch.bfloat16, "f32": None}  # of autocast
FLOAT32 = 2e-5  # relative, of float32
ONE_ROUNDING = 2.0**-8  # of the loss to bfloat16: a single number is as near as chance has it
NOTHING = 1e-30  # dropout of this drops nothing, and goes the way of all dropout
BATCHES = 8  # that take turns
SIDES = ("ecornn", "torch")
COMPILED = "compiled graph"
GRAPHS = ["graph", COMPILED]
STEPS = 5  # that are profiled
# Kernels of ecornn are named by what they do; of other libraries they have longer names.
STAGES = {"pack": "ecornn_pack_weights", "recurrence backward": "backward_(persistent|layout|step|start)",
          "recurrence forward": "(persistent|fused|layout|step|start|whole)", "dx": "backward_inputs",
          "weights": "backward_(add_)?outer", "projection": "(project|align)",
          "replay": "backward_(replay|gather|align)", "sums": "backward_(sums|once|finish|no_)"}


@dataclass(frozen=True)
class Case:
    """A model, and how it is trained."""

    name: str
    sizes: dict[str, Any]  # that a row has
    model: nn.Module
    criterion: Callable[..., torch.Tensor]
    draw: Callable[[], tuple[list[torch.Tensor], list[torch.Tensor]]]  # a batch: inputs and targets
    work: int  # ``unit``s, as words, in a step
    unit: str
    captured: bool  # whether the loss can be in a CUDA graph
    wanted: float  # how many times as fast as torch.nn's it should be
    compiled: type[Step] | None = None  # a step whose parts PyTorch compiles, if there is one

    def step(self, model: nn.Module, kind: torch.dtype | None, of: type[Step] = Step) -> Step:
        return of(model, self.criterion, *self.draw(), kind=kind)


class CompiledStep(Step):
    """A :class:`Step` of which PyTorch compiles all but the recurrent layers; of a model with ``words``,
    ``recurrent``, ``scores``, ``dropout``, and states ``h``, ``c``.

    Embedding and dropout are one function of ``torch.compile``; dropout, scores and the loss a second one, with rows
    that are filled up to what tensor cores like; clipping and Adam a third one, in which gradients are scaled on their
    way into Adam and not written back. The recurrent layers, compiled or torch.nn's, are called between them as they
    are, so that both sides have the same code around them, which a CUDA graph then holds as a whole.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._before = torch.compile(self._words)
        self._after = torch.compile(self._judged, options={"force_shape_pad": True})
        self._update = torch.compile(self._clip_and_adam, fullgraph=True)
        self._parameters = [*self.model.parameters()]
        self._averages = [[torch.zeros_like(p) for p in self._parameters] for _ in range(2)]
        self._steps = [torch.zeros((), device=p.device) for p in self._parameters]

    def _words(self, text: torch.Tensor) -> torch.Tensor:
        return self.model.dropout(self.model.words(text))

    def _judged(self, y: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return self.criterion(self.model.scores(self.model.dropout(y)), wanted)

    def _clip_and_adam(self, gradients: list[torch.Tensor]) -> None:
        own = self.optimizer.defaults
        norm = sum(n.square() for n in torch._foreach_norm(gradients)) ** 0.5
        share = (self.clip / (norm + 1e-6)).clamp(max=1.0)
        adam(self._parameters, list(torch._foreach_mul(gradients, share)), *self._averages, [], self._steps,
             foreach=True, capturable=True, amsgrad=False, beta1=own["betas"][0], beta2=own["betas"][1], lr=own["lr"],
             weight_decay=own["weight_decay"], eps=own["eps"], maximize=False)

    def gradients(self) -> None:
        """Computes the gradients of one step, as a :class:`Step` does."""
        model = self.model
        with self.autocast():
            y, after = model.recurrent(self._before(*self.inputs), (model.h.clone(), model.c.clone()))
            torch._foreach_copy_([model.h, model.c], [state.detach() for state in after])
            loss = self._after(y, *self.targets)
        model.zero_grad()
        loss.backward()
        self.loss = loss.detach()

    def update(self) -> None:
        with torch.no_grad():
            self._update([p.grad for p in self._parameters])


def language(T: int, B: int, H: int, vocabulary: int, dropout: float = 0.5) -> Case:
    """The model of examples/05_language_model.py, on random words."""
    example: Any = importlib.import_module("05_language_model")

    def draw() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        words = torch.randint(vocabulary, (T + 1, B), device=DEVICE)
        return [words[:-1]], [words[1:]]

    sizes = {"T": T, "B": B, "H": H, "vocabulary": vocabulary, "dropout": dropout}
    return Case("language model", sizes, example.LanguageModel(vocabulary, H, B, dropout), example.cross_entropy, draw,
                T * B, "words", True, 2.0, CompiledStep)


def speech(T: int, B: int, H: int, layers: int = 5) -> Case:
    """The model of examples/06_speech.py, on noise: as many letters as fit."""
    example: Any = importlib.import_module("06_speech")

    def draw() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        letters = torch.randint(1, len(example.LETTERS), (B, T // 4), device=DEVICE)
        return [torch.randn(T, B, example.BANDS, device=DEVICE)], [letters, torch.full((B,), T // 4)]

    return Case("speech recognizer", {"T": T, "B": B, "H": H, "layers": layers}, example.Recognizer(H, layers),
                example.ctc, draw, B, "sounds", False, 1.8)


def set_dropout(models: dict[str, nn.Module], share: float) -> None:
    for part in (part for model in models.values() for part in model.modules()):
        if isinstance(part, nn.Dropout):
            part.p = share
        elif isinstance(part, nn.RNNBase):
            part.dropout = share


def cast_call(layer: nn.RNNBase, kind: torch.dtype, x: torch.Tensor, state: object = None) -> object:
    """Calls a layer in a data type of its own, also under autocast, and returns its result."""
    weights = {name: p.to(kind) for name, p in layer.named_parameters()}
    given = tuple(s.to(kind) for s in state) if isinstance(state, tuple) else state
    with torch.autocast(x.device.type, enabled=False):
        return functional_call(layer, weights, (x.to(kind), given))


def in_kind(model: nn.Module, kind: torch.dtype | None) -> nn.Module:
    """A copy of the model whose layers of torch.nn compute in this type under autocast, where cuDNN's otherwise take
    float16 whatever is asked for, with eight times less rounding than bfloat16 has."""
    made = copy.deepcopy(model)
    for part in made.modules():
        if kind is not None and isinstance(part, nn.RNNBase):
            part.forward = partial(cast_call, copy.copy(part), kind)
    return made


def checked(case: Case, models: dict[str, nn.Module], kind: torch.dtype | None,
            of: type[Step] = Step) -> dict[str, float]:
    """Relative errors of both sides' steps against float64: of the loss, and the largest of the gradients.

    Raises :class:`WrongResultError` where ours is not near enough.
    """
    inputs, targets = case.draw()

    def found(of: type[Step], model: nn.Module, kind: torch.dtype | None,
              dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        """The loss, and the gradients of all parameters; states are what they were."""
        given = [t.to(dtype) if t.is_floating_point() else t for t in inputs]
        step, before = of(model, case.criterion, given, targets, kind=kind), [b.clone() for b in model.buffers()]
        step.gradients()
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)
        return [step.loss, *(p.grad.clone() for p in model.parameters())]

    dropout = case.sizes.get("dropout", 0.0)
    if dropout:
        set_dropout(models, NOTHING)
    exact = copy.deepcopy(models["torch"]).double()
    wanted = found(Step, exact, None, torch.float64)
    (loss, *gradients), (library_loss, *library) = (
        [relative(a, b) for a, b in zip(found(of, model, kind), wanted, strict=True)]
        for model in (models["ecornn"], in_kind(models["torch"], kind)))
    limits = [ONE_ROUNDING if kind else FLOAT32, *(max(2 * e + 1e-6, 0 if kind else FLOAT32) for e in library)]
    names = ["the loss", *(f"the gradient of {name}" for name, _ in exact.named_parameters())]
    for name, error, limit in zip(names, [loss, *gradients], limits, strict=True):
        if not error <= limit:
            raise WrongResultError(f"{name}: error {error:.2e}, allowed {limit:.2e}")
    if dropout:
        set_dropout(models, dropout)
    return {"ecornn_error": max(gradients), "torch_error": max(library), "ecornn_loss_error": loss,
            "torch_loss_error": library_loss}


def both_sides(model: nn.Module) -> dict[str, Any]:
    """The model, and a copy with compiled layers."""
    models = {"torch": model.to(DEVICE), "ecornn": copy.deepcopy(model)}
    ecornn.torch.replace(models["ecornn"], fullgraph=True, wait=True)
    return models


def compare(case: Case, dtype: str, ways: list[str], seconds: float, together: int) -> Iterator[dict]:
    """A row for each way: both sides checked, then timed."""
    kind, models = KINDS[dtype], both_sides(case.model)
    start = time.perf_counter()
    errors = checked(case, models, kind)
    row: dict[str, Any] = {"model": case.name, **case.sizes, "dtype": dtype, "unit": case.unit, "wanted": case.wanted,
                           "parameters": sum(p.numel() for p in case.model.parameters()), **errors,
                           "until_checked_s": time.perf_counter() - start}
    ways = [way for way in ways if way != COMPILED or case.compiled]
    of_compiled = checked(case, models, kind, case.compiled) if COMPILED in ways else {}
    steps = {name: case.step(models[name], kind) for name in SIDES}
    if DEVICE == "cuda":
        for step in steps.values():
            step()  # which makes the optimizer's state
        row |= {f"{name}_mib": peak(step) / 2**20 for name, step in steps.items()}
    for way in ways:
        if way == "compile":
            for step in steps.values():
                step.model = torch.compile(step.model)
        of_way = {name: case.step(models[name], kind, case.compiled) for name in SIDES} if way == COMPILED else steps
        runs = {name: step.graphed(case.captured) if way in GRAPHS else step for name, step in of_way.items()}
        timed = in_turns(case, of_way, runs, seconds, together)
        yield row | {"way": way} | (of_compiled if way == COMPILED else {}) | timed | {
            f"{name}_per_second": 1e3 * case.work / timed[f"{name}_ms"] for name in SIDES} | {
            "ratio": timed["torch_ms"] / timed["ecornn_ms"]}


def in_turns(case: Case, steps: dict[str, Step], runs: dict[str, Callable[[], object]], seconds: float,
             together: int) -> dict[str, float]:
    """Milliseconds of steps, each on another batch, as a row has them."""
    batches, row = itertools.cycle([case.draw() for _ in range(BATCHES)]), {}
    sides = {name: lambda step=step, run=runs[name]: (step.load(*next(batches)), run()) for name, step in steps.items()}
    for name, times in take_turns(sides, seconds, together, 7).items():
        ends = (f"{name}_ms", f"{name}_p20", f"{name}_p80")
        row |= dict(zip(ends, (1e3 * value for value in middle(times)), strict=True)) | {"repetitions": len(times)}
    return row


class Through(torch.autograd.Function):
    """x as it is, with zeros for the gradients of weights."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.like = weights
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradient, *(torch.zeros_like(weight) for weight in ctx.like)


def by_name(found: list[tuple[str, float, float]],
            named: Callable[[str], str] = str) -> list[tuple[str, list[float]]]:
    """Microseconds of each launch of the kernels of one name, of those with the most in all first."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    for name, begin, end in found:
        times[named(name)].append(end - begin)
    return sorted(times.items(), key=lambda each: -sum(each[1]))


def shortened(name: str) -> str:
    """Without where PyTorch keeps a kernel, and without all of its types."""
    return name.removeprefix("void ").replace("at::native::", "").replace("(anonymous namespace)::", "")[:100]


def stage(name: str) -> str:
    """The stage of a recurrent layer that a kernel of this name belongs to, or ``others``."""
    return next((stage for stage, pattern in STAGES.items() if re.match(pattern, name)), "others")


def compared(case: Case, way: str, of: type[Step], seconds: float) -> dict[str, Any]:
    """A row: the three models in turns, and their kernels."""
    models = both_sides(copy.deepcopy(case.model))
    models["rest"] = rest = copy.deepcopy(models["torch"])
    layers = rest.recurrent  # which do nothing; PyTorch compiles them as little as the others
    layers.forward = torch.compiler.disable(lambda x, state: (Through.apply(x, *layers.parameters()), state))
    steps = {name: case.step(model, KINDS["bf16"], of) for name, model in models.items()}
    graphs = {name: step.graphed() for name, step in steps.items()}
    row: dict[str, Any] = {"model": case.name, **case.sizes, "dtype": "bf16", "way": way, "wanted": case.wanted}
    row |= in_turns(case, steps, graphs, seconds, 5)
    row |= {"ratio": row["torch_ms"] / row["ecornn_ms"], "bound": row["torch_ms"] / row["rest_ms"],
            "layers_ms": {name: row[f"{name}_ms"] - row["rest_ms"] for name in ("ecornn", "torch")},
            "left_ms": row["torch_ms"] / case.wanted - row["rest_ms"]}
    found = {name: kernels(lambda run=run: [run() for _ in range(STEPS)]) for name, run in graphs.items()}
    return row | {"stages_us": {name: sum(times) / STEPS for name, times in by_name(found["ecornn"], stage)},
                  "kernels_us": {side: {name: (round(sum(times) / STEPS, 2), len(times) / STEPS)
                                        for name, times in by_name(of_side, shortened)}
                                 for side, of_side in found.items()}}


def of_layer(name: str, row: LayerSpec) -> None:
    """The tables of a layer's two passes."""
    kind = getattr(torch, row.dtype)
    with tempfile.TemporaryDirectory(prefix="ecornn-") as folder:
        module = compile_layer(row, target="cuda", out=Path(folder, "module.so"))
        layer = module.bind({p.name: (torch.rand(p.shape, device=DEVICE) * 2 - 1).to(kind) / row.hidden ** 0.5
                             for p in module.manifest.parameters})
        x = torch.randn(row.seq, row.batch, row.workload.input, device=DEVICE).to(kind)
        dy = torch.randn(row.seq, row.batch, row.hidden * (1 + row.bidirectional), device=DEVICE).to(kind)
        for _ in range(3):
            layer.backward(layer.forward(x)[2], dy)
        show(f"{name}, forward", kernels(lambda: layer.forward(x)), row.seq * row.layers)
        _, _, kept = layer.forward(x)
        show(f"{name}, backward", kernels(lambda: layer.backward(kept, dy)), row.seq * row.layers)


def show(title: str, found: list[tuple[str, float, float]], steps: int) -> None:
    """A table of the kernels of one entry, in microseconds and microseconds a step."""
    print(f"{title}: microseconds, launches, microseconds a step and layer")
    for kernel, values in by_name(found):
        print(f"  {kernel[:44]:44} {sum(values):9.1f} {len(values):5} {sum(values) / steps:8.3f}")
    busy, end = 0.0, 0.0
    for _, start, stop in found:  # as they began
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    whole = end - found[0][1]
    print(f"  {'gaps':44} {whole - busy:9.1f} {'':5} {(whole - busy) / steps:8.3f}")
    print(f"  {'in all':44} {whole:9.1f} {'':5} {whole / steps:8.3f}", flush=True)


def main() -> None:
    parser = options(__doc__, language=("35,20,650,10000", "sizes T,B,H,V"), speech=("300,20,800,5", "sizes T,B,H,L"),
                     seconds=(4.0, "for each model and way"), together=(5, "steps in a row that are timed as one"))
    parser.add_argument("--only", choices=["language", "speech"], help="this model only")
    parser.add_argument("--dtype", choices=[*KINDS], default="bf16" if DEVICE == "cuda" else "f32")
    parser.add_argument("--compile", action="store_true", help="also under torch.compile, which takes a minute")
    parser.add_argument("--stages", action="store_true", help="where the steps of the language model go")
    parser.add_argument("--kernels", nargs="+", metavar="LAYER", help="the kernels of these layers in place of models")
    arguments = parser.parse_args()
    if DEVICE != "cuda" and (arguments.stages or arguments.kernels):
        sys.exit("this needs a CUDA GPU and a PyTorch that sees it")
    if arguments.kernels:
        layers = {layer.name: layer.case.layer() for layer in read_grid(FILE).expanded(FILE.name)}
        if unknown := set(arguments.kernels) - set(layers):
            sys.exit(f"no row {', '.join(unknown)}; there are: {', '.join(layers)}")
        for name in arguments.kernels:
            of_layer(name, layers[name])
        return
    os.environ["ECORNN_STRICT"] = "1"
    torch.manual_seed(0)
    done: list[dict] = []
    if arguments.stages:
        case = language(*map(int, arguments.language.split(",")))
        for way, of in (("graph", Step), (COMPILED, CompiledStep)):
            done.append(compared(case, way, of, arguments.seconds))
            print(told({name: value for name, value in done[-1].items() if name != "kernels_us"}), flush=True)
            write(arguments.output, environment(), done)
        return
    torch.backends.cudnn.allow_tf32 = False
    ways = ["plain", *(GRAPHS if DEVICE == "cuda" else []), *(["compile"] if arguments.compile else [])]
    for name, make in (("language", language), ("speech", speech)):
        if arguments.only in (None, name):
            case = make(*map(int, getattr(arguments, name).split(",")))
            try:
                for row in compare(case, arguments.dtype, ways, arguments.seconds, arguments.together):
                    done.append(row)
                    print(told(row), flush=True)
            except (WrongResultError, ecornn.errors.EcornnError) as error:
                done.append({"model": case.name, "fault": str(error)})
        cpu = {} if DEVICE == "cuda" else {"threads": torch.get_num_threads(), "python": platform.python_version()}
        write(arguments.output, environment(cpu=bool(cpu)) | cpu, done)
    print("\n" + "\n".join(map(told, done)))
    sys.exit(any("fault" in row for row in done))


if __name__ == "__main__":
    main()

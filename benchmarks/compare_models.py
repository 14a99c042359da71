"""Whole models in training, of compiled layers and of torch.nn's, in turns, in one process.

    python benchmarks/compare_models.py --output benchmarks/results/h100_models.json
    python benchmarks/compare_models.py --only language --compile

The models are those of examples/: a language model of words with dropout, 2 x 650, and a speech recognizer, five layers
of 800 in both directions with CTC. A step is all of it: a new batch, forward, loss, backward, clipping, Adam; on a GPU
in bfloat16 by autocast. Before anything is timed, loss and gradients of all parameters are compared with float64's, on
the code that is timed, but that dropout drops nothing: our gradients must be within twice the error of torch.nn's in
the same data type, in float32 within 2e-5; the loss within one rounding. Then both sides run plain, on a GPU as CUDA
graphs (of the recognizer all but the loss, which PyTorch captures only in some versions), the language model also as
graphs of steps of which PyTorch compiles what is not recurrent (:class:`CompiledStep`), and under torch.compile if
asked for. Times are medians with 20th and 80th percentiles in milliseconds a step, on the host's clock, of several
steps in a row. Where a compiled layer cannot run, that is an error.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from training_steps import DEVICE, Step, middle, peak, take_turns

# PyTorch after that, which says how its threads wait
# isort: split
import torch
from side_by_side import WrongResultError, environment, options, relative, write
from torch import nn
from torch.func import functional_call
from torch.optim.adam import adam

import ecornn.torch

KINDS = {"bf16": torch.bfloat16, "f32": None}  # of autocast
FLOAT32 = 2e-5  # relative, of float32
ONE_ROUNDING = 2.0**-8  # of the loss to bfloat16: a single number is as near as chance has it
NOTHING = 1e-30  # dropout of this drops nothing, and goes the way of all dropout
BATCHES = 8  # that take turns
SIDES = ("ecornn", "torch")
COMPILED = "compiled graph"
GRAPHS = ["graph", COMPILED]


@dataclass(frozen=True)
class Case:
    """A model, and how it is trained.

    Attributes
    ----------
    sizes : that a row has
    draw : a batch: inputs and targets
    work : ``unit``s, as words, in a step
    captured : whether the loss can be in a CUDA graph
    compiled : a step whose parts PyTorch compiles, if there is one
    wanted : how many times as fast as torch.nn's it should be
    """

    name: str
    sizes: dict[str, Any]
    model: nn.Module
    criterion: Callable[..., torch.Tensor]
    draw: Callable[[], tuple[list[torch.Tensor], list[torch.Tensor]]]
    work: int
    unit: str
    captured: bool
    wanted: float
    compiled: type[Step] | None = None

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
        model: Any = self.model
        return model.dropout(model.words(text))

    def _judged(self, y: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        model: Any = self.model
        return self.criterion(model.scores(model.dropout(y)), wanted)

    def _clip_and_adam(self, gradients: list[torch.Tensor]) -> None:
        own = self.optimizer.defaults
        norm = sum(n.square() for n in torch._foreach_norm(gradients)) ** 0.5
        share = (self.clip / (norm + 1e-6)).clamp(max=1.0)
        adam(self._parameters, list(torch._foreach_mul(gradients, share)), *self._averages, [], self._steps,
             foreach=True, capturable=True, amsgrad=False, beta1=own["betas"][0], beta2=own["betas"][1], lr=own["lr"],
             weight_decay=own["weight_decay"], eps=own["eps"], maximize=False)

    def gradients(self) -> None:
        """Computes the gradients of one step, as a :class:`Step` does."""
        model: Any = self.model
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


def set_dropout(model: nn.Module, share: float) -> None:
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = share
        elif isinstance(part, nn.RNNBase):
            part.dropout = share


class InKind(nn.Module):
    """A layer of torch.nn in a data type of its own under autocast, where cuDNN's layers otherwise take float16
    whatever is asked for, with eight times less rounding than bfloat16 has."""

    def __init__(self, layer: nn.RNNBase, kind: torch.dtype) -> None:
        super().__init__()
        self.layer, self.kind = layer, kind

    def forward(self, x: torch.Tensor, state: object = None) -> object:
        weights = {name: p.to(self.kind) for name, p in self.layer.named_parameters()}
        given = tuple(s.to(self.kind) for s in state) if isinstance(state, tuple) else state
        with torch.autocast(x.device.type, enabled=False):
            return functional_call(self.layer, weights, (x.to(self.kind), given))


def in_kind(model: nn.Module, kind: torch.dtype | None) -> nn.Module:
    """A copy of the model whose recurrent layers are :class:`InKind`."""
    made = copy.deepcopy(model)
    for part in [*made.modules()] if kind is not None else []:
        for name, child in [*part.named_children()]:
            if isinstance(child, nn.RNNBase):
                setattr(part, name, InKind(child, kind))
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
        for model in models.values():
            set_dropout(model, NOTHING)
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
        for model in models.values():
            set_dropout(model, dropout)
    return {"ecornn_error": max(gradients), "torch_error": max(library), "ecornn_loss_error": loss,
            "torch_loss_error": library_loss}


def compare(case: Case, dtype: str, ways: list[str], seconds: float, together: int) -> Iterator[dict]:
    """A row for each way: both sides checked, then timed."""
    kind = KINDS[dtype]
    models = {"torch": case.model.to(DEVICE)}
    models["ecornn"] = copy.deepcopy(models["torch"])
    ecornn.torch.replace(models["ecornn"], fullgraph=True, wait=True)
    start = time.perf_counter()
    errors = checked(case, models, kind)
    row: dict[str, Any] = {"model": case.name, **case.sizes, "dtype": dtype, "unit": case.unit, "wanted": case.wanted,
                           "parameters": sum(p.numel() for p in case.model.parameters()), **errors,
                           "until_checked_s": time.perf_counter() - start}
    of_compiled = checked(case, models, kind, case.compiled) if case.compiled and COMPILED in ways else {}
    batches = itertools.cycle([case.draw() for _ in range(BATCHES)])
    steps = {name: case.step(models[name], kind) for name in SIDES}
    if DEVICE == "cuda":
        for step in steps.values():
            step()  # which makes the optimizer's state
        row |= {f"{name}_mib": peak(step) / 2**20 for name, step in steps.items()}
    for way in ways:
        if way == COMPILED and case.compiled is None:
            continue
        if way == "compile":
            for step in steps.values():
                step.model = torch.compile(step.model)
        sides: dict[str, Callable[[], object]] = {}
        for name, step in steps.items():
            if way == COMPILED and case.compiled is not None:
                step = case.step(models[name], kind, case.compiled)
            run = step.graphed(case.captured) if way in GRAPHS else step
            sides[name] = lambda step=step, run=run: (step.load(*next(batches)), run())  # type: ignore[misc]
        timed = dict(row) | {"way": way} | (of_compiled if way == COMPILED else {})
        for name, times in take_turns(sides, seconds, together, 7).items():
            median, p20, p80 = middle(times)
            timed |= {f"{name}_ms": median * 1e3, f"{name}_p20": p20 * 1e3, f"{name}_p80": p80 * 1e3,
                      f"{name}_per_second": case.work / median, "repetitions": len(times)}
        yield timed | {"ratio": timed["torch_ms"] / timed["ecornn_ms"]}


def line(r: dict) -> str:
    """One row for people."""
    if "fault" in r:
        return f"{r['model']:18} {r['fault']}"
    memory = f"  {r['ecornn_mib']:.0f} / {r['torch_mib']:.0f} MiB" if "ecornn_mib" in r else ""
    return (f"{r['model']:18} {r['dtype']:5} {r['way']:14} ecornn {r['ecornn_ms']:8.2f} [{r['ecornn_p20']:.2f}, "
            f"{r['ecornn_p80']:.2f}]  torch.nn {r['torch_ms']:8.2f} [{r['torch_p20']:.2f}, {r['torch_p80']:.2f}] ms  "
            f"{r['ecornn_per_second']:.0f} / {r['torch_per_second']:.0f} {r['unit']} a second  {r['ratio']:.2f}x of "
            f"{r['wanted']:.1f}x  error {r['ecornn_error']:.1e} / {r['torch_error']:.1e}{memory}")


def main() -> None:
    parser = options(__doc__, language=("35,20,650,10000", "sizes T,B,H,V"), speech=("300,20,800,5", "sizes T,B,H,L"),
                     seconds=(4.0, "for each model and way"), together=(5, "steps in a row that are timed as one"))
    parser.add_argument("--only", choices=["language", "speech"], help="this model only")
    parser.add_argument("--dtype", choices=[*KINDS], default="bf16" if DEVICE == "cuda" else "f32")
    parser.add_argument("--compile", action="store_true", help="also under torch.compile, which takes a minute")
    arguments = parser.parse_args()
    os.environ["ECORNN_STRICT"] = "1"
    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = False
    ways = ["plain", *(GRAPHS if DEVICE == "cuda" else []), *(["compile"] if arguments.compile else [])]
    done: list[dict] = []
    for name, make in (("language", language), ("speech", speech)):
        if arguments.only in (None, name):
            case = make(*map(int, getattr(arguments, name).split(",")))
            try:
                for row in compare(case, arguments.dtype, ways, arguments.seconds, arguments.together):
                    done.append(row)
                    print(line(row), flush=True)
            except (WrongResultError, ecornn.errors.EcornnError) as error:
                done.append({"model": case.name, "fault": str(error)})
        cpu = {} if DEVICE == "cuda" else {"threads": torch.get_num_threads(), "python": platform.python_version()}
        write(arguments.output, environment(cpu=bool(cpu)) | cpu, done)
    print("\n" + "\n".join(map(line, done)))
    sys.exit(any("fault" in row for row in done))


if __name__ == "__main__":
    main()

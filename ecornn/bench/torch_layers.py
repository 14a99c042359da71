"""PyTorch's side: torch.nn's layer, through cuDNN or not; of a cell that torch.nn has not, a loop over its step."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ecornn.bench.machines import Results
from ecornn.bench.sides import Side, Subject, Weights, random_weights
from ecornn.bench.step_loop import StepLoop
from ecornn.cells import Cell
from ecornn.workload import Stack, Workload

TORCH: dict[str, tuple[str, dict[str, str]]] = {
    "lstm": ("LSTM", {}), "gru": ("GRU", {}), "rnn_tanh": ("RNN", {"nonlinearity": "tanh"}),
    "rnn_relu": ("RNN", {"nonlinearity": "relu"})}
PRODUCTS = {"lstm": 4, "gru": 3, "rnn_tanh": 1}  # with (H, H) a step, of cells that others may be near


def layer_of(work: Workload, stack: Stack, kind: str) -> Any:
    """``torch.nn``'s layer with weights of its own, on the device; None where PyTorch has none like it."""
    if work.cell not in TORCH or stack.reverse:
        return None
    import torch

    name, options = TORCH[work.cell]
    layer = getattr(torch.nn, name)(work.input, work.hidden, stack.layers, bidirectional=stack.bidirectional, **options)
    return layer.to(device="cuda" if kind == "cuda" else "cpu", dtype=getattr(torch, work.dtype))


def no_layer(work: Workload, stack: Stack) -> str:
    """Why :func:`layer_of` has none."""
    return f"PyTorch has no {f'layer that goes in reverse only: {work.cell}' if stack.reverse else f'cell {work.cell}'}"


def torch_side(subject: Subject, weights: Weights) -> Side | str:
    """PyTorch's own kernels: on a CPU those of torch.nn's layer, on a GPU these without cuDNN, or a loop of steps."""
    work, stack = subject.work, subject.stack
    if (layer := layer_of(work, stack, subject.kind)) is not None:
        on_gpu = subject.kind == "cuda"
        return _side("torch", subject, *_loaded(layer, weights, subject.training), weights, subject.cell,
                     f"torch.nn.{TORCH[work.cell][0]}" + ", without cuDNN" * on_gpu)
    if subject.cell is None:
        return f"{no_layer(work, stack)}, and the module does not hold the cell's step: name it with --cell"
    return loop_side("torch", subject, weights)


def loop_side(name: str, subject: Subject, weights: Weights) -> Side | str:
    """A loop over the cell's step, whatever layers PyTorch has."""
    work, stack = subject.work, subject.stack
    if subject.cell is None:
        return "the module does not hold the cell's step: name it with --cell"
    loop = StepLoop(subject.cell, work, stack, subject.rows, subject.kind, work.dtype)
    return _side(name, subject, loop, loop.tensors(weights), weights, subject.cell,
                 "a loop over the step, in operations of PyTorch")


def cudnn_side(side: str, subject: Subject, weights: Weights, rng: np.random.Generator) -> Side | str:
    """cuDNN's layer, through torch.nn; of a cell that it has not its nearest, with weights of its own. ``cudnn-tf32``
    may round factors of float32 to TF32, as PyTorch lets it unless it is told otherwise."""
    from msgspec import structs

    from ecornn.cells import get

    work, stack = subject.work, subject.stack
    if subject.kind != "cuda":
        return "cuDNN runs on GPUs alone"
    if stack.reverse:
        return "cuDNN has no layer that goes in reverse only"
    layer = layer_of(work, stack, subject.kind)
    if layer is not None:
        return _side(side, subject, *_loaded(layer, weights, subject.training), weights, subject.cell,
                     f"torch.nn.{TORCH[work.cell][0]} through cuDNN", cudnn=True)
    name = nearest(subject.cell, work) if subject.cell is not None else None
    if name is None:
        return f"cuDNN has no cell {work.cell}, and none near it"
    cell, like = get(name), structs.replace(work, cell=name)
    own = random_weights(cell, like, stack, rng)
    return _side(side, subject, *_loaded(layer_of(like, stack, subject.kind), own, subject.training), own, cell,
                 f"its nearest, torch.nn.{TORCH[name][0]} through cuDNN: another cell", cudnn=True)


def nearest(cell: Cell, work: Workload) -> str | None:
    """The cell of cuDNN with about as many recurrent products, one more or less at most; None without one. An LSTM has
    two states."""
    from ecornn.analysis import analyse

    graph = analyse(cell, work.input, work.hidden)
    count = sum(len(product.terms) for phase in graph.product_phases for product in phase.products)
    found = min((name for name in PRODUCTS if name != "lstm" or len(graph.states) > 1),
                key=lambda name: abs(PRODUCTS[name] - count))
    return found if count and abs(PRODUCTS[found] - count) <= 1 else None


def exact_layer(subject: Subject, cell: Cell, weights: Weights) -> tuple[Callable[..., Any], dict[str, Any], str]:
    """A layer of the cell in float64 that goes forward, or both ways: y of x and the weights, these as parameters, and
    the device that it is on."""
    from msgspec import structs

    work = structs.replace(subject.work, cell=cell.identity(), dtype="float64", weights=None, precision=None)
    stack = structs.replace(subject.stack, reverse=False)
    layer = layer_of(work, stack, subject.kind)
    device = "cuda" if subject.kind == "cuda" else "cpu"
    if layer is not None:
        return *_loaded(layer, weights, True), device
    loop = StepLoop(cell, work, stack, subject.rows, subject.kind, "float64")
    return loop, loop.tensors(weights), device


def _loaded(layer: Any, weights: Weights, training: bool) -> tuple[Callable[..., Any], dict[str, Any]]:
    """y of x by the layer with these weights, and these as parameters."""
    import torch

    layer.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    layer.train(training)
    layer.flatten_parameters()
    # which leaves bfloat16 as it is: a call copies such weights, and its time has that, as in every program
    warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
    return lambda x, _: layer(x)[0], dict(layer.named_parameters())


def _side(name: str, subject: Subject, run: Callable[..., Any], parameters: dict[str, Any], weights: Weights,
          cell: Cell | None, about: str, cudnn: bool = False) -> Side:
    """A layer of PyTorch: ``run`` is y of x and of the ``parameters``, by name."""
    import torch

    work = subject.work
    width, rounding = subject.stack.directions * work.hidden, work.precision == "tf32" or name == "cudnn-tf32"
    torch.backends.cuda.matmul.allow_tf32 = work.precision == "tf32"  # exact float32 against exact float32
    if subject.threads and subject.kind == "llvm":
        torch.set_num_threads(subject.threads)

    def read(name: str) -> Any:
        value = subject.inputs[name]
        return value if isinstance(value, torch.Tensor) else torch.from_numpy(value)

    def forward() -> Results:
        with how():
            return {"y": run(read("x"), parameters)}

    def step() -> Results:
        with how():
            x, dy = read("x").detach().requires_grad_(), read("dy")
            y = run(x, parameters)
            dy = dy if y.shape == dy.shape else dy[..., :width]  # of a cell with several outputs, beside another cell
            found = torch.autograd.grad(y, [x, *parameters.values()], dy)
        return dict(zip(("x", *parameters), found, strict=True))

    @contextlib.contextmanager
    def how() -> Iterator[None]:
        without: Callable[[], Any] = contextlib.nullcontext
        if not subject.training:  # a tensor of inference mode cannot be written outside of it
            without = torch.no_grad if subject.kind == "cuda" else torch.inference_mode
        with without(), torch.backends.cudnn.flags(enabled=cudnn, allow_tf32=rounding):
            yield

    return Side(name, step if subject.training else forward, about, cell, weights)

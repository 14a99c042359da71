"""Sides beside ours, as ``--against`` names them: PyTorch's layer or a loop over the step; ONNX Runtime on a CPU."""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from msgspec import structs

from ecornn.analysis import analyse
from ecornn.bench.step_loop import StepLoop
from ecornn.bench.turns import Results, Side, Subject, Weights, random_weights
from ecornn.cells import Cell, get
from ecornn.errors import ArgumentError, CellError, DeviceError, MissingPackageError
from ecornn.tune.timing import torch_sees_gpu
from ecornn.workload import Stack, Workload

PACKAGES = {"cudnn": ("torch",), "cudnn-tf32": ("torch",), "torch": ("torch",), "loop": ("torch",),
            "onnxruntime": ("onnxruntime", "onnx")}
NONE = "none"
TORCH: dict[str, tuple[str, dict[str, str]]] = {
    "lstm": ("LSTM", {}), "gru": ("GRU", {}), "rnn_tanh": ("RNN", {"nonlinearity": "tanh"}),
    "rnn_relu": ("RNN", {"nonlinearity": "relu"})}
PRODUCTS = {"lstm": 4, "gru": 3, "rnn_tanh": 1}  # with (H, H) a step, of cells that others may be near
OPERATORS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {  # with the gates in ONNX's order
    "lstm": ("LSTM", {}, (0, 3, 1, 2)), "gru": ("GRU", {"linear_before_reset": 1}, (1, 0, 2)),
    "gru_reset_before": ("GRU", {"linear_before_reset": 0}, (1, 0, 2)),
    "rnn_tanh": ("RNN", {"activations": ["Tanh"]}, (0,)), "rnn_relu": ("RNN", {"activations": ["Relu"]}, (0,))}


def named(text: str) -> tuple[str, ...]:
    """The sides of a list with commas. Raises :class:`ArgumentError` for a name that is none."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if names == (NONE,):
        return ()
    if not PACKAGES.keys() >= {*names}:
        raise ArgumentError("--against", text, f"{NONE}, or some of {', '.join(PACKAGES)}, separated by commas")
    return names


def installed(names: tuple[str, ...], kind: str) -> None:
    """Raises :class:`MissingPackageError` for a missing package, :class:`DeviceError` where PyTorch lacks the GPU."""
    for name in names:
        for package in PACKAGES[name]:
            if importlib.util.find_spec(package) is None:
                raise MissingPackageError(f"{package} is not installed, but --against {name} needs it: install "
                                          f"ecornn's extra [bench], or pip install {package}")
    if kind == "cuda" and "torch" in {PACKAGES[name][0] for name in names} and not torch_sees_gpu():
        raise DeviceError("--against", ",".join(names), "a PyTorch that finds the GPU; this one finds none")


def usual(kind: str) -> tuple[str, ...]:
    """Who is compared with where nobody says: PyTorch's fastest, if it is installed for the device."""
    if importlib.util.find_spec("torch") is None or (kind == "cuda" and not torch_sees_gpu()):
        return ()
    return ("cudnn",) if kind == "cuda" else ("torch",)


def peer(name: str, subject: Subject, weights: Weights, rng: np.random.Generator) -> Side | str:
    """The side; or why it computes no such layer."""
    if name in ("cudnn", "cudnn-tf32"):
        return cudnn_side(name, subject, weights, rng)
    if name == "onnxruntime":
        return onnx_side(subject, weights)
    try:
        return loop_side(name, subject, weights) if name == "loop" else torch_side(subject, weights)
    except CellError as error:  # an operation that the loop over the step has not
        return str(error)


def layer_of(work: Workload, stack: Stack, kind: str) -> Any:
    """``torch.nn``'s layer with weights of its own, on the device; None where PyTorch has none like it."""
    if work.cell not in TORCH or stack.reverse:
        return None
    import torch

    name, options = TORCH[work.cell]
    layer = getattr(torch.nn, name)(work.input, work.hidden, stack.layers, bidirectional=stack.bidirectional, **options)
    return layer.to(device="cuda" if kind == "cuda" else "cpu", dtype=getattr(torch, work.dtype))


def torch_side(subject: Subject, weights: Weights) -> Side | str:
    """PyTorch's own kernels: on a CPU those of torch.nn's layer, on a GPU these without cuDNN, or a loop of steps."""
    work, stack = subject.work, subject.stack
    if (layer := layer_of(work, stack, subject.kind)) is not None:
        return _side("torch", subject, *_loaded(layer, weights, subject.training), weights, subject.cell,
                     f"torch.nn.{TORCH[work.cell][0]}" + ", without cuDNN" * (subject.kind == "cuda"))
    if subject.cell is None:
        what = f"layer {work.cell} that only runs in reverse" if stack.reverse else f"cell {work.cell}"
        return f"PyTorch has no {what}, and the module file does not contain the step; give --cell"
    return loop_side("torch", subject, weights)


def loop_side(name: str, subject: Subject, weights: Weights) -> Side | str:
    """A loop over the cell's step, whatever layers PyTorch has."""
    work, stack = subject.work, subject.stack
    if subject.cell is None:
        return "the module file does not contain the step; give --cell"
    loop = StepLoop(subject.cell, work, stack, subject.rows, subject.kind, work.dtype)
    return _side(name, subject, loop, loop.tensors(weights), weights, subject.cell,
                 "a loop over the step in PyTorch")


def cudnn_side(side: str, subject: Subject, weights: Weights, rng: np.random.Generator) -> Side | str:
    """cuDNN's layer through torch.nn, or the nearest with its own weights; ``cudnn-tf32`` may round float32 to TF32."""
    work, stack = subject.work, subject.stack
    if subject.kind != "cuda":
        return "cuDNN only runs on GPUs"
    if stack.reverse:
        return "cuDNN has no layer that only runs in reverse"
    cell, about = subject.cell, "torch.nn.{} through cuDNN"
    if work.cell not in TORCH:
        name = nearest(cell, work)
        if name is None:
            return f"cuDNN has no cell {work.cell}, and no similar one"
        cell, work, about = get(name), structs.replace(work, cell=name), f"the most similar cell, {about}"
        weights = random_weights(cell, work, stack, rng)
    return _side(side, subject, *_loaded(layer_of(work, stack, subject.kind), weights, subject.training), weights, cell,
                 about.format(TORCH[work.cell][0]), cudnn=True)


def nearest(cell: Cell | None, work: Workload) -> str | None:
    """The cell of cuDNN with as many recurrent products, give or take one; None without. An LSTM has two states."""
    if cell is None:
        return None
    graph = analyse(cell, work.input, work.hidden)
    count = sum(len(product.terms) for phase in graph.product_phases for product in phase.products)
    found = min((name for name in PRODUCTS if name != "lstm" or len(graph.states) > 1),
                key=lambda name: abs(PRODUCTS[name] - count))
    return found if count and abs(PRODUCTS[found] - count) <= 1 else None


def exact_layer(subject: Subject, cell: Cell, weights: Weights) -> tuple[Callable[..., Any], dict[str, Any], str]:
    """A layer of the cell in float64, never in reverse: y of x and the weights, these as parameters, its device."""
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


def onnx_side(subject: Subject, weights: Weights) -> Side | str:
    """The layer as a model; why there is none."""
    work, stack = subject.work, subject.stack
    if subject.kind != "llvm":
        return "ONNX Runtime is only timed on CPUs"
    if subject.training:
        return "ONNX Runtime has no gradients"
    if work.cell not in OPERATORS or work.dtype != "float32" or stack.reverse:
        return f"ONNX has no operator for it; it has {', '.join(OPERATORS)} in float32, forward or bidirectional"
    run = session(work.cell, weights, work.hidden, stack.layers, stack.bidirectional, subject.threads or 0)
    return Side("onnxruntime", lambda: {"y": run(subject.inputs["x"])}, f"operator {OPERATORS[work.cell][0]}",
                subject.cell, weights)


def session(cell: str, weights: Weights, hidden: int, layers: int, bidirectional: bool,
            threads: int) -> Callable[[np.ndarray], np.ndarray]:
    """y (T, B, D*H) of x (T, B, I) in float32, by ``weights`` as PyTorch names them; ``threads`` 0: ONNX Runtime's."""
    import onnx
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    kind, more, order = OPERATORS[cell]
    if bidirectional:
        more = {**more, "direction": "bidirectional", **{k: v * 2 for k, v in more.items() if k == "activations"}}
    nodes, initial = [], [numpy_helper.from_array(np.array([0, 0, -1] if bidirectional else [1], np.int64), "shape")]

    def sorted_gates(name: str) -> np.ndarray:
        value = np.asarray(weights[name])
        return np.concatenate([value[g * hidden:(g + 1) * hidden] for g in order])

    above = "x"
    for n in range(layers):
        ends = [f"_l{n}", f"_l{n}_reverse"][:1 + bidirectional]
        parts = {f"W{n}": [sorted_gates(f"weight_ih{e}") for e in ends],
                 f"R{n}": [sorted_gates(f"weight_hh{e}") for e in ends],
                 f"B{n}": [np.concatenate([sorted_gates(f"bias_ih{e}"), sorted_gates(f"bias_hh{e}")]) for e in ends]}
        initial += [numpy_helper.from_array(np.stack(value), name) for name, value in parts.items()]
        nodes.append(helper.make_node(kind, [above, *parts], [f"four{n}"], hidden_size=hidden, **more))
        if bidirectional:  # (T, 2, B, H) -> (T, B, 2 H)
            nodes.append(helper.make_node("Transpose", [f"four{n}"], [f"turned{n}"], perm=[0, 2, 1, 3]))
        nodes.append(helper.make_node("Reshape", [f"turned{n}", "shape"], [f"y{n}"]) if bidirectional else
                     helper.make_node("Squeeze", [f"four{n}", "shape"], [f"y{n}"]))
        above = f"y{n}"
    width = np.shape(weights["weight_ih_l0"])[1]
    graph = helper.make_graph(
        nodes, "layer", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", "B", width])],
        [helper.make_tensor_value_info(above, TensorProto.FLOAT, ["T", "B", (1 + bidirectional) * hidden])], initial)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    made = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda x: made.run(None, {"x": x})[0]

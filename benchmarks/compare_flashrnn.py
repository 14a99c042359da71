"""LSTM, vanilla and sLSTM layers against FlashRNN's fused backends, through its own API, interleaved in one run.

    pip install flashrnn==1.0.8
    python benchmarks/compare_flashrnn.py --output benchmarks/results/h100_flashrnn.json
    python benchmarks/compare_flashrnn.py --output benchmarks/results/h100_flashrnn.json --only slstm
    python benchmarks/compare_flashrnn.py --output benchmarks/results/h100_flashrnn_training.json --training

FlashRNN has no input projection: it is given W x + b, in the layouts that it uses inside, and computes the recurrence.
So ours is timed twice: the whole layer, projection included, and a layer of one input value (I = 1), whose projection
is little but writing its result; recurrence alone would take no longer. All of them are checked against float64. Ours
are CUDA graphs; FlashRNN is called as its users call it, with its launches behind a kernel that waits, so that only
the GPU's time counts. Medians in microseconds a step with 20th and 80th percentiles. sLSTM has one head, or eight, of
which ours has the blocks alone as well; heads of up to 64 units FlashRNN's Triton backend takes, too, and the ratio is
that to the faster one of both. ``--training``: forward and backward of LSTM and vanilla layers in turns.
FlashRNN then has the gradients of W x + b, of recurrent weights and of biases; the products that make W x, and the
gradients of x and W, are its caller's. Ours is the whole layer with all of them, and cuDNN's is, too.

With ``--only`` rows of other layers stay as the file has them. FlashRNN compiles an extension for each layer, which
takes about a minute of nvcc: a process for each does that at the same time as the others, and has the GPU to itself
while it uses it. On a machine where something else measures too, --lock FILE holds an exclusive lock on FILE meanwhile.
--builds FOLDER keeps the extensions for the next time.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import msgspec
import side_by_side
import torch
from measured_rows import alone, of_bench, read
from side_by_side import DEVICE, WrongResultError, environment, float64_forward, options, relative, timed, told

import ecornn
from ecornn.bench.grid import Case
from ecornn.bench.measure import Plan, measure
from ecornn.bench.turns import graph_of
from ecornn.cells import get
from ecornn.errors import ScheduleError
from ecornn.targets import default_target, resolve

LAYERS = [*((cell, H) for cell in ("lstm", "rnn_tanh", "slstm") for H in (768, 1024)),
          *(("slstm(heads=8)", H) for H in (512, 1024, 2048))]
T, B = 1024, 16
FUNCTIONS = {"lstm": ("lstm", 4, 2), "rnn_tanh": ("elman", 1, 1), "slstm": ("slstm", 4, 4)}  # its name, gates, states
TRAINED = [(cell, H) for cell, H in LAYERS if cell in ("lstm", "rnn_tanh")]
TRITON = 64  # units of a head, at most, that its Triton backend takes
LIMIT = 2e-2  # relative error of a side; a bfloat16 has 2^-9, and errors go on from step to step
LIMIT_OF_GRADIENTS = 5e-2  # of FlashRNN's: bfloat16 from step to step; another function is off by one
WAIT = 4_000_000  # cycles, about 2 ms: longer than FlashRNN's Python takes
DTYPE = "bfloat16"


def adapt(lock: IO[str]) -> None:
    """FlashRNN's loader: leaves the GPU to others while it solves for a configuration or nvcc works; takes properties
    of the GPU from ecornn (its own helper for them does not compile with CUDA 13, which took members from
    cudaDeviceProp); makes no pause of up to ten seconds before a build, since each layer has a folder of its own.
    """
    from flashrnn.flashrnn import cuda_init, cuda_init_parametric

    def leaving(function: Callable) -> Callable:
        def call(*args, **kwargs):
            fcntl.flock(lock, fcntl.LOCK_UN)
            try:
                return function(*args, **kwargs)
            finally:
                fcntl.flock(lock, fcntl.LOCK_EX)

        return call

    device = resolve("cuda")
    front: Any = importlib.import_module("flashrnn.flashrnn.flashrnn")  # a function of the package has its name
    front.get_gpu_info = lambda device_id: {
        "maxThreadsPerBlock": 1024, "regsPerMultiprocessor": device.registers, "multiProcessorCount": device.cores,
        "sharedMemPerBlockOptin": device.shared}
    cuda_init.time = SimpleNamespace(sleep=lambda seconds: None)
    cuda_init_parametric.load = leaving(cuda_init_parametric.load)
    cuda_init_parametric.cst.solve_constrint = leaving(cuda_init_parametric.cst.solve_constrint)


def described(cell: str) -> tuple[str, int, int, int]:
    """FlashRNN's name of a cell, its gates, states and heads."""
    found = get(cell)
    return *FUNCTIONS[found.name], getattr(found, "heads", 1)


def flashrnn_of(cell: str, hidden: int, batch: int, backend: str = "cuda_fused"):
    """A function of (Wx, R, b, states) in the layouts that FlashRNN's fused backend uses inside: (T, B, N, D, G),
    (N, D, G, D), (N, D, G), (S, 1, B, N, D) of N heads with D units to all states (S, T, B, N, D)."""
    from flashrnn import FlashRNNConfig, flashrnn

    function, _, _, heads = described(cell)
    config = FlashRNNConfig(
        backend=backend, function=function, num_heads=heads, head_dim=hidden // heads, hidden_dim=hidden,
        batch_size=batch, dtype=DTYPE, input_shape="TBHDG", recurrent_shape="HDGP", bias_shape="HDG",
        output_shape="STBHD")
    return lambda wx, r, b, states: flashrnn(wx, r, b, states=states, config=config)[0]


def backends(cell: str, hidden: int) -> dict[str, str]:
    """FlashRNN's sides of a row, and which backend each is."""
    function, _, _, heads = described(cell)
    triton = {"flashrnn_triton": "triton_fused"} if function != "elman" and hidden // heads <= TRITON else {}
    return {"flashrnn": "cuda_fused"} | triton


def their_inputs(cell: str, gates, weight_hh):
    """(Wx, R, b, states) of preactivations (T, B, G*H) and recurrent weights (G*H, D), of each unit those of its
    head."""
    _, count, states, heads = described(cell)
    steps, batch, own = gates.shape[0], gates.shape[1], weight_hh.shape[1]
    like = {"device": gates.device, "dtype": gates.dtype}
    return (gates.reshape(steps, batch, count, heads, own).permute(0, 1, 3, 4, 2).contiguous(),
            weight_hh.reshape(count, heads, own, own).permute(1, 2, 0, 3).contiguous(),
            torch.zeros(heads, own, count, **like), torch.zeros(states, 1, batch, heads, own, **like))


def drawn(cell: str, inputs: int, hidden: int) -> dict[str, Any]:
    """Weights of a layer, as ours and PyTorch's take them, uniform as PyTorch begins."""
    shapes = get(cell).parameters(inputs, hidden)
    return {f"{name}_l0": torch.empty(gates * H, *rest, device=DEVICE).uniform_(-1, 1).div(hidden ** 0.5).bfloat16()
            for name, (gates, H, *rest) in shapes.items()}


def prepare(folder: Path, cell: str, hidden: int) -> None:
    """Where the extension of a layer is built, and its configuration kept; before FlashRNN is imported."""
    place = folder / f"{cell}_{hidden}"
    place.mkdir(parents=True, exist_ok=True)
    os.environ["TORCH_EXTENSIONS_DIR"] = str(place.absolute())
    os.environ.setdefault("CONSTRINT_CACHE_DIR", str(place.absolute()))
    os.environ.setdefault("MAX_JOBS", "6")  # files of one extension


def modules_of(cell: str, hidden: int) -> dict[str, ecornn.Module]:
    """Ours: the whole layer, and that of one input value with the same configuration, projection first."""
    size: dict[str, Any] = {"hidden": hidden, "batch": B, "seq": T, "dtype": DTYPE, "target": "cuda"}
    whole = ecornn.compile(cell, **size)
    config = whole.manifest.config | ({"ahead": 100} if "ahead" in whole.manifest.config else {})
    try:
        alone = ecornn.compile(cell, input=1, schedule=whole.manifest.schedule, config=config, **size)
    except ScheduleError:  # for another I it does not fit
        alone = ecornn.compile(cell, input=1, **size)
    return {"ecornn": whole, "ecornn_recurrence": alone}


def compare(cell: str, hidden: int, modules: dict[str, ecornn.Module], repeats: int, seconds: float) -> dict:
    """One row: all sides checked and timed."""
    row: dict = {"cell": cell, "T": T, "B": B, "I": hidden, "H": hidden, "dtype": DTYPE}
    sides: dict[str, Callable[[], object]] = {}
    width, kept = described(cell)[1] * hidden, []  # what graphs use must stay

    def check(name: str, y: torch.Tensor, x: torch.Tensor, weights: dict[str, torch.Tensor]) -> None:
        zero = torch.zeros(width, device=DEVICE)
        exact = float64_forward(cell, x, {"bias_ih_l0": zero, "bias_hh_l0": zero} | weights)
        error = row[f"{name}_error"] = relative(y, exact)
        if not error <= LIMIT:
            raise WrongResultError(f"{name} has error {error:.2e}")

    with torch.no_grad():
        gates = torch.randn(T, B, width, device=DEVICE).bfloat16()
        weight = drawn(cell, 1, hidden)["weight_hh_l0"]
        arguments = their_inputs(cell, gates, weight)
        inputs = [arguments[0]]
        for name, backend in backends(cell, hidden).items():
            theirs = flashrnn_of(cell, hidden, B, backend)
            check(name, theirs(*arguments)[0].reshape(T, B, hidden), gates,
                  {"weight_ih_l0": torch.eye(width, device=DEVICE), "weight_hh_l0": weight})
            sides[name] = partial(theirs, *arguments)
        for name, module in modules.items():
            weights = drawn(cell, module.manifest.workload.input, hidden)
            x = torch.randn(T, B, module.manifest.workload.input, device=DEVICE).bfloat16()
            layer = module.bind(weights)
            y = torch.full((T, B, hidden), float("nan"), device=DEVICE, dtype=torch.bfloat16)
            graph = graph_of(partial(layer, x, out=y))
            y.fill_(float("nan"))
            graph.replay()
            check(name, y, x, weights)
            sides[name] = graph.replay
            inputs.append(x)
            kept.append((layer, y))
            row[f"{name}_config"] = {"schedule": module.manifest.schedule, **module.manifest.config}
        row |= timed(sides, lambda: [x.copy_(torch.randn_like(x)) for x in inputs], repeats, T, seconds)
    least = min(row[f"{name}_us"] for name in backends(cell, hidden))
    return row | {"sides": [*modules, *backends(cell, hidden)], "ratio": least / row["ecornn_us"],
                  "ratio_recurrence": least / row["ecornn_recurrence_us"]}


def exact_gradients(cell: str, gates: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor,
                    dh: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of preactivations (T, B, G*H), recurrent weights (G*H, H) and biases (G*H) of a cell of one head, in
    float64, from the gradients dh (T, B, H); in FlashRNN's layouts."""
    leaves = [t.double().requires_grad_() for t in (gates, weight, bias)]
    eye, zero = torch.eye(len(weight), device=weight.device), torch.zeros_like(bias)
    h = float64_forward(cell, leaves[0], {"weight_ih_l0": eye, "weight_hh_l0": leaves[1], "bias_ih_l0": zero,
                                          "bias_hh_l0": leaves[2]})
    dgates, dweight, dbias = torch.autograd.grad(h, leaves, dh.double())
    return [*their_inputs(cell, dgates, dweight)[:2], their_inputs(cell, dbias[None, None], dweight)[0][0, 0]]


def compare_training(cell: str, hidden: int, seconds: float) -> dict:
    """One row: ours and cuDNN's as ``ecornn bench`` checks and times them, and FlashRNN's in the same turns, in
    microseconds a step. Raises what ``ecornn bench`` does, and WrongResultError where gradients are wrong."""
    width = described(cell)[1] * hidden
    gates = torch.randn(T, B, width, device=DEVICE).bfloat16()
    weight = drawn(cell, 1, hidden)["weight_hh_l0"]
    *leaves, states = their_inputs(cell, gates, weight)
    for leaf in leaves:
        leaf.requires_grad_()
    dh = torch.randn(T, B, 1, hidden, device=DEVICE).bfloat16()
    theirs = flashrnn_of(cell, hidden, B)

    def step() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(theirs(*leaves, states)[0], leaves, dh)

    exact = exact_gradients(cell, gates, weight, torch.zeros(width, device=DEVICE), dh[:, :, 0])
    error = max(relative(g, e) for g, e in zip(step(), exact, strict=True))
    if not error <= LIMIT_OF_GRADIENTS:
        raise WrongResultError(f"FlashRNN's gradients have error {error:.2e}")
    del exact, gates
    torch.cuda.empty_cache()
    case = Case(cell=cell, hidden=hidden, batch=B, seq=T, dtype=DTYPE, target="cuda", training=True)
    row = measure(case, Plan(("cudnn",), seconds, more={"flashrnn": step}))
    if row.wrong:
        raise WrongResultError(str(row.wrong))
    found = of_bench(msgspec.to_builtins(row))
    names = ("cell", "T", "B", "I", "H", "dtype", "sides", "ratio", "schedule", "keep")
    times = {f"{side}_{end}": found[f"{side}_{end}"] for side in found["sides"] for end in ("us", "p20", "p80")}
    return {name: found[name] for name in names} | times | {
        "error": row.errors["ecornn"], "cudnn_error": row.errors["cudnn"], "flashrnn_error": error,
        "ratio_flashrnn": found["flashrnn_us"] / found["ecornn_us"]}


def serve(cell: str, hidden: int, arguments: argparse.Namespace) -> tuple[dict, dict]:
    """The environment and the row of a layer, in a process of its own."""
    prepare(arguments.builds, cell, hidden)
    torch.manual_seed(0)
    side_by_side.WAIT = WAIT
    modules = {} if arguments.training else modules_of(cell, hidden)
    with arguments.lock.open("a") as lock:
        adapt(lock)
        fcntl.flock(lock, fcntl.LOCK_EX)
        row = compare(cell, hidden, modules, arguments.repeats, arguments.seconds) if modules else compare_training(
            cell, hidden, arguments.seconds)
        found = environment()
    return found, row | {"time": found["time"]}  # a file may have rows of several runs


def measure_all(arguments: argparse.Namespace) -> bool:
    """Measures the layers that are asked for; whether all of them could be."""
    layers = [(cell, H) for cell, H in (TRAINED if arguments.training else LAYERS)
              if all(w in f"{cell} {H}" for w in arguments.only.split())]
    rows, missing = [], len(layers)
    if arguments.only and arguments.output and arguments.output.exists():  # other layers stay as they are
        rows = [row for row in read(arguments.output).rows if (row["cell"], row["H"]) not in layers]
    recurrence = "Ours and cuDNN's are the whole layer; FlashRNN is given W x + b." if arguments.training else (
        "Ours is timed whole, and as a layer of one input value; FlashRNN is given W x + b.")
    with ThreadPoolExecutor(max(1, len(layers))) as threads:
        for one in as_completed([threads.submit(alone, serve, *layer, arguments) for layer in layers]):
            try:
                found, row = one.result()
            except Exception:  # whatever stopped one layer's process, the others are measured
                traceback.print_exc()
                continue
            rows.append(row)
            missing -= 1
            print(told(row), flush=True)
            rows.sort(key=lambda row: LAYERS.index((row["cell"], row["H"])))
            side_by_side.write(arguments.output, found | {
                "flashrnn": importlib.metadata.version("flashrnn"), "command": " ".join(["python", *sys.argv]),
                "recurrence": recurrence}, rows)
    return not missing


def main() -> None:
    parser = options(__doc__, repeats=(30, "timed repetitions a row, at most"), seconds=(1.0, "of measuring a row"),
                     only=("", "layers with all of these words in cell and H"))
    parser.add_argument("--training", action="store_true", help="training steps in place of forward passes")
    parser.add_argument("--builds", type=Path, metavar="FOLDER", help="where to keep FlashRNN's extensions")
    parser.add_argument("--lock", type=Path, metavar="FILE", help="locked while the GPU is in use")
    arguments = parser.parse_args()
    if not importlib.util.find_spec("flashrnn"):
        sys.exit("this compares with FlashRNN, which is not installed: pip install flashrnn==1.0.8")
    if default_target() != "cuda":
        sys.exit("FlashRNN's fused backend needs a CUDA GPU")
    with tempfile.TemporaryDirectory(prefix="ecornn-") as folder:
        arguments.builds = arguments.builds or Path(folder, "flashrnn")
        arguments.lock = arguments.lock or Path(folder, "lock")
        sys.exit(not measure_all(arguments))


if __name__ == "__main__":
    main()

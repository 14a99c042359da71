"""LSTM and vanilla layers against FlashRNN's fused CUDA backend, through its own API, interleaved in one run.

    pip install flashrnn==1.0.8
    python benchmarks/compare_flashrnn.py --output benchmarks/results/h100_flashrnn.json

FlashRNN has no input projection: it is given W x + b, in the layouts that it uses inside, and computes the recurrence.
So ours is timed twice: the whole layer, projection included, and a layer of one input value (I = 1), whose projection
is little but writing its result; recurrence alone would take no longer. All of them are checked against float64. Ours
are CUDA graphs; FlashRNN is called as its users call it, with its launches behind a kernel that waits, so that only
the GPU's time counts. Medians in microseconds a step with 20th and 80th percentiles.

FlashRNN compiles an extension for each layer, which takes about a minute of nvcc: a process for each does that at the
same time as the others, and has the GPU to itself while it uses it. On a machine where something else measures too,
--lock FILE holds an exclusive lock on FILE meanwhile. --builds FOLDER keeps the extensions for the next time.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ecornn
from ecornn.errors import ScheduleError
from ecornn.targets import resolve
from ecornn.tune.choose import default_target

LAYERS = [(cell, H) for cell in ("lstm", "rnn_tanh") for H in (768, 1024)]
T, B = 1024, 16
FUNCTIONS = {"lstm": ("lstm", 4, 2), "rnn_tanh": ("elman", 1, 1)}  # its name, gates, states
LIMIT = 2e-2  # relative error of a side; a bfloat16 has 2^-9, and errors go on from step to step
WAIT = 4_000_000  # cycles, about 2 ms: longer than FlashRNN's Python takes
DTYPE = "bfloat16"


class Gpu:
    """The exclusive lock on a file, held while this process may use the GPU."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def take(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def give(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)


def adapt(gpu: Gpu) -> None:
    """FlashRNN's loader: leaves the GPU to others while it solves for a configuration or nvcc works; takes properties
    of the GPU from ecornn (its own helper for them does not compile with CUDA 13, which took members from
    cudaDeviceProp); makes no pause of up to ten seconds before a build, since each layer has a folder of its own.
    """
    from flashrnn.flashrnn import cuda_init, cuda_init_parametric

    def leaving(function: Callable) -> Callable:
        def call(*args, **kwargs):
            gpu.give()
            try:
                return function(*args, **kwargs)
            finally:
                gpu.take()

        return call

    device = resolve("cuda")
    front: Any = importlib.import_module("flashrnn.flashrnn.flashrnn")  # a function of the package has its name
    front.get_gpu_info = lambda device_id: {
        "maxThreadsPerBlock": 1024, "regsPerMultiprocessor": device.registers, "multiProcessorCount": device.cores,
        "sharedMemPerBlockOptin": device.shared}
    cuda_init.time = SimpleNamespace(sleep=lambda seconds: None)
    cuda_init_parametric.load = leaving(cuda_init_parametric.load)
    cuda_init_parametric.cst.solve_constrint = leaving(cuda_init_parametric.cst.solve_constrint)


def flashrnn_of(cell: str, hidden: int, batch: int, backend: str = "cuda_fused"):
    """A function of (Wx, R, b, states) in the layouts that FlashRNN's fused backend uses inside: (T, B, 1, H, G),
    (1, H, G, H), (1, H, G), (S, 1, B, 1, H) to all states (S, T, B, 1, H)."""
    from flashrnn import FlashRNNConfig, flashrnn

    config = FlashRNNConfig(
        backend=backend, function=FUNCTIONS[cell][0], num_heads=1, head_dim=hidden, hidden_dim=hidden,
        batch_size=batch, dtype=DTYPE, input_shape="TBHDG", recurrent_shape="HDGP", bias_shape="HDG",
        output_shape="STBHD")
    return lambda wx, r, b, states: flashrnn(wx, r, b, states=states, config=config)[0]


def their_inputs(cell: str, gates, weight_hh):
    """(Wx, R, b, states) of preactivations (T, B, G*H) and PyTorch's weight_hh (G*H, H)."""
    import torch

    _, count, states = FUNCTIONS[cell]
    steps, batch, hidden = gates.shape[0], gates.shape[1], weight_hh.shape[1]
    like = {"device": gates.device, "dtype": gates.dtype}
    return (gates.reshape(steps, batch, 1, count, hidden).transpose(3, 4).contiguous(),
            weight_hh.reshape(count, hidden, hidden).transpose(0, 1)[None].contiguous(),
            torch.zeros(1, hidden, count, **like), torch.zeros(states, 1, batch, 1, hidden, **like))


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


def compare(cell: str, hidden: int, gpu: Gpu, repeats: int, seconds: float) -> dict:
    """One row: all sides built, checked and timed."""
    import side_by_side
    import torch
    from side_by_side import CELLS, DEVICE, WrongResultError, float64_forward, graph_of, relative, summary, take_turns

    side_by_side.WAIT = WAIT
    count = FUNCTIONS[cell][1]
    row: dict = {"cell": cell, "T": T, "B": B, "H": hidden, "dtype": DTYPE}
    sides, inputs, kept = {}, [], []  # what graphs read must stay

    def check(name: str, y: torch.Tensor, x: torch.Tensor, weights: dict[str, torch.Tensor]) -> None:
        row[f"{name}_error"] = relative(y, float64_forward(cell, x, weights))
        if not row[f"{name}_error"] <= LIMIT:
            raise WrongResultError(f"{name} has error {row[f'{name}_error']:.2e}")

    modules = modules_of(cell, hidden)
    adapt(gpu)
    gpu.take()
    theirs = flashrnn_of(cell, hidden, B)
    with torch.no_grad():
        gates = torch.randn(T, B, count * hidden, device=DEVICE).bfloat16()
        weight = torch.empty(count * hidden, hidden, device=DEVICE).uniform_(-1, 1).div(hidden ** 0.5).bfloat16()
        arguments, zero = their_inputs(cell, gates, weight), torch.zeros(count * hidden, device=DEVICE)
        y = theirs(*arguments)[0].reshape(T, B, hidden)
        check("flashrnn", y, gates, {"weight_ih_l0": torch.eye(count * hidden, device=DEVICE), "bias_ih_l0": zero,
                                     "weight_hh_l0": weight, "bias_hh_l0": zero})
        for name, module in modules.items():
            kwargs = {"nonlinearity": "tanh"} if cell == "rnn_tanh" else {}
            library = CELLS[cell](module.manifest.workload.input, hidden, device=DEVICE, **kwargs).bfloat16()
            weights = {k: v.detach() for k, v in library.named_parameters()}
            layer, x = module.bind(weights), torch.randn(T, B, library.input_size, device=DEVICE).bfloat16()
            y = torch.full((T, B, hidden), float("nan"), device=DEVICE, dtype=torch.bfloat16)
            graph = graph_of(partial(layer, x, out=y))
            y.fill_(float("nan"))
            graph.replay()
            check(name, y, x, weights)
            sides[name] = graph.replay
            inputs.append(x)
            kept.append((layer, y))
            row[f"{name}_config"] = {"schedule": module.manifest.schedule, **module.manifest.config}
        sides["flashrnn"] = lambda: theirs(*arguments)
        inputs.append(arguments[0])
        times = take_turns(sides, lambda: [x.copy_(torch.randn_like(x)) for x in inputs], repeats, seconds)
    for name, values in times.items():
        row |= summary(name, values, T)
    row["ratio"], row["ratio_recurrence"] = (row["flashrnn_us"] / row[f"{name}_us"]
                                             for name in ("ecornn", "ecornn_recurrence"))
    return row


def serve(pipe: Connection, cell: str, hidden: int, arguments: argparse.Namespace) -> None:
    """A layer, in a process of its own: sends the environment and the row."""
    prepare(arguments.builds, cell, hidden)
    import torch
    from side_by_side import environment

    torch.manual_seed(0)
    gpu = Gpu(arguments.lock)
    row = compare(cell, hidden, gpu, arguments.repeats, arguments.seconds)
    found = environment()
    gpu.give()
    pipe.send((found, row))


def measure_all(arguments: argparse.Namespace) -> bool:
    """Measures every layer; whether all of them could be."""
    context, rows = multiprocessing.get_context("spawn"), []
    waiting: dict[Any, Any] = {}  # pipe -> process
    for cell, hidden in LAYERS:
        ours, other = context.Pipe()
        process = context.Process(target=serve, args=(other, cell, hidden, arguments))
        process.start()
        other.close()
        waiting[ours] = process
    while waiting:
        pipe: Any
        for pipe in wait(list(waiting)):
            process = waiting.pop(pipe)
            try:
                environment, row = pipe.recv()
            except EOFError:  # it has said why
                continue
            finally:
                process.join()
            rows.append(row)
            print(f"{row['cell']:8} H={row['H']:4} ecornn {row['ecornn_us']:.2f}, recurrence "
                  f"{row['ecornn_recurrence_us']:.2f}, FlashRNN {row['flashrnn_us']:.2f}  "
                  f"{row['ratio_recurrence']:.2f}x ({row['ratio']:.2f}x whole)", flush=True)
            if arguments.output:
                write(arguments.output, environment, rows)
    return len(rows) == len(LAYERS)


def write(path: Path, environment: dict, rows: list[dict]) -> None:
    """The file, with the rows that there are so far."""
    path.parent.mkdir(parents=True, exist_ok=True)
    environment |= {
        "flashrnn": importlib.metadata.version("flashrnn"), "command": " ".join(["python", *sys.argv]),
        "recurrence": "Ours is timed whole, and as a layer of one input value; FlashRNN is given W x + b."}
    rows = sorted(rows, key=lambda row: LAYERS.index((row["cell"], row["H"])))
    path.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--repeats", type=int, default=30, help="timed repetitions a row, at most")
    parser.add_argument("--seconds", type=float, default=1.0, help="of measuring a row (default: 1)")
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

"""One layer on a GPU, ecornn's and cuDNN's through PyTorch: both checked against float64, then timed in turns.

Both run as CUDA graphs. Every repetition copies fresh random inputs into the buffer that both read, then replays one
graph after the other; a kernel that waits goes first each time, so that a graph is queued before it starts and the
time between its events is the GPU's alone. The turns and the clock are those of ``ecornn bench`` (ecornn/bench/).
"""

from __future__ import annotations

import datetime
import importlib.metadata
import sys
from collections.abc import Callable, Mapping

import numpy as np
import torch

import ecornn
from ecornn.bench import cuda_graphs, turns
from ecornn.bench.cuda_graphs import graph_of
from ecornn.bench.turns import FEWEST, WARM

__all__ = ["CELLS", "DEVICE", "FEWEST", "WAIT", "WARM", "WrongResultError", "clock", "compare", "environment",
           "float64_forward", "graph_of", "relative", "summary", "take_turns"]
CELLS = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn_tanh": torch.nn.RNN}
DEVICE = "cuda"
WAIT = cuda_graphs.WAIT  # cycles before each run


class WrongResultError(Exception):
    """A side computes something else than the layer."""


def float64_forward(cell: str, x: torch.Tensor, p: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The layer in float64 on x's device; x (T, B, I) to y (T, B, H), initial state zero."""
    p = {k: v.double() for k, v in p.items()}
    gates = x.double() @ p["weight_ih_l0"].T + p["bias_ih_l0"]
    hidden = p["weight_hh_l0"].shape[1]
    h = torch.zeros(x.shape[1], hidden, dtype=torch.float64, device=x.device)
    c, s, m, out = h, h, h, []
    for g in gates:
        r = h @ p["weight_hh_l0"].T + p["bias_hh_l0"]
        if cell == "lstm":
            i, f, n, o = (g + r).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * n.tanh()
            h = o.sigmoid() * c.tanh()
        elif cell == "gru":
            (gr, gz, gn), (rr, rz, rn) = g.chunk(3, 1), r.chunk(3, 1)
            n = (gn + (gr + rr).sigmoid() * rn).tanh()
            z = (gz + rz).sigmoid()
            h = (1 - z) * n + z * h
        elif cell == "slstm":
            i, f, z, o = (g + r).chunk(4, 1)
            f = torch.nn.functional.logsigmoid(f) + m
            m = i if not out else torch.maximum(i, f)  # nothing is remembered before the first step
            i, f = (i - m).exp(), (f - m).exp()
            c, s = f * c + i * z.tanh(), f * s + i
            h = o.sigmoid() * c / s
        else:
            h = (g + r).tanh()
        out.append(h)
    return torch.stack(out)


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative error in the Frobenius norm; NaN where value has one."""
    return ((value.double() - reference).norm() / reference.norm()).item()


def clock(run: Callable[[], object]) -> float:
    """Microseconds of a run on an idle GPU."""
    return cuda_graphs.clock(run, WAIT) * 1e6


def take_turns(sides: Mapping[str, Callable[[], object]], fresh: Callable[[], object], repeats: int,
               seconds: float) -> dict[str, list[float]]:
    """Microseconds of every run; ``repeats`` of each side, or as many as ``seconds`` allow."""
    return turns.take_turns(sides, fresh, repeats, seconds, clock)


def summary(name: str, times: list[float], steps: int) -> dict[str, float]:
    """Median, 20th and 80th percentile in microseconds a step, as a row has them."""
    p20, median, p80 = np.percentile(times, [20, 50, 80]) / steps
    return {f"{name}_us": float(median), f"{name}_p20": float(p20), f"{name}_p80": float(p80)}


def compare(cell: str, shape: tuple[int, int, int, int], dtype: str, module: ecornn.Module, *, tf32: bool = False,
            repeats: int = 30, seconds: float = float("inf")) -> dict:
    """One row: both sides checked and timed. ``shape`` is T, B, I, H; ``tf32``: cuDNN may round to TF32.

    Raises :class:`WrongResultError` where ours is further from float64 than twice cuDNN's error (exact float32:
    1e-5 relative), or differs between runs.
    """
    T, B, I, H = shape
    kind = getattr(torch, dtype)
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = False, tf32
    kwargs = {"nonlinearity": "tanh"} if cell == "rnn_tanh" else {}
    library = CELLS[cell](I, H, device=DEVICE, **kwargs).to(kind)
    weights = {k: v.detach() for k, v in library.named_parameters()}
    layer = module.bind(weights)
    x = torch.randn(T, B, I, device=DEVICE).to(kind)
    ours = torch.full((T, B, H), float("nan"), device=DEVICE, dtype=kind)
    with torch.no_grad():
        run_ours = graph_of(lambda: layer(x, out=ours))
        run_theirs = graph_of(lambda: library(x))
        x.copy_(torch.randn(T, B, I, device=DEVICE))
        ours.fill_(float("nan"))
        run_ours.replay()
        reference = float64_forward(cell, x, weights)
        error, library_error = relative(ours, reference), relative(library(x)[0], reference)
        repeat = ours.clone()
        ours.fill_(float("nan"))
        run_ours.replay()
        identical = torch.equal(repeat, ours)
    del reference, repeat
    limit = 1e-5 if module.manifest.workload.arithmetic == "float32" else 2 * library_error + 1e-6
    if not error <= limit:
        raise WrongResultError(f"error {error:.2e}, allowed {limit:.2e}")
    if not identical:
        raise WrongResultError("two runs differ")
    times = take_turns({"ecornn": run_ours.replay, "cudnn": run_theirs.replay},
                       lambda: x.copy_(torch.randn(T, B, I, device=DEVICE)), repeats, seconds)
    row: dict = {"cell": cell, "T": T, "B": B, "I": I, "H": H, "dtype": dtype, "error": error,
                 "cudnn_error": library_error, "schedule": module.manifest.schedule,
                 "config": module.manifest.config, "provenance": module.manifest.provenance}
    for name, values in times.items():
        row |= summary(name, values, T)
    row["ratio"] = row["cudnn_us"] / row["ecornn_us"]
    row["repetitions"] = len(times["ecornn"])
    return row


def environment() -> dict:
    """What a file of results says of where they come from."""
    return {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(), "ecornn": ecornn.__version__,
            "tvm": importlib.metadata.version("apache-tvm"),
            "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "command": " ".join(["python", *sys.argv])}

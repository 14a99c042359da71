"""Runs a compiled module on random input and checks it against the float64 reference.

    ecornn tune --cell lstm --hidden 800
    ecornn compile --cell lstm --hidden 800 --output lstm800.so
    python examples/00_first_run.py lstm800.so

At the end it says how many times as fast as PyTorch the layer is, if PyTorch is installed. It exits with 1 if the error
is above the limit of the data type. On a CPU it takes a minute at most.
"""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec
from typing import Any

import ml_dtypes  # NumPy's bfloat16; comes with apache-tvm
import numpy as np
from stages import stage

import ecornn
from ecornn.numpy_reference import random_weights

# ||y - reference|| / ||reference||: accumulation in float32, and for the 16-bit types also one rounding of the state
# in every step, of 2**-11 and 2**-8 at most; errors that states carry on from earlier steps at most double that.
LIMITS = {"float32": 1e-5, "float16": 2.0**-10, "bfloat16": 2.0**-7}
LAYERS: dict[str, tuple[str, dict[str, str]]] = {
    "lstm": ("LSTM", {}), "gru": ("GRU", {}), "rnn_tanh": ("RNN", {}), "rnn_relu": ("RNN", {"nonlinearity": "relu"})}


def main(path: str) -> int:
    module = ecornn.load(path)
    print(module, flush=True)
    work = module.manifest.workload
    dtype = np.dtype(ml_dtypes.bfloat16 if work.dtype == "bfloat16" else work.dtype)
    weights = {name: value.astype(dtype)
               for name, value in random_weights(work.cell, work.input, work.hidden).items()}
    x = np.random.default_rng(1).standard_normal((work.seq, work.batch, work.input)).astype(dtype)

    with stage("packing weights and the first call"):
        layer = module.bind(weights)
        y, state = layer(x)
    times: list[float] = []
    while len(times) < 5 and sum(times) < 2:  # seconds, in case the machine is busy
        start = time.perf_counter()
        layer(x)
        times.append(time.perf_counter() - start)

    note = ", copies to and from the GPU included" if module.manifest.device.kind == "cuda" else ""
    print(f"y {y.shape} {y.dtype}: {np.median(times) / work.seq * 1e6:.1f} us a step{note}", flush=True)

    with stage("float64 reference in NumPy"):
        expected, after = ecornn.reference(work.cell, x, weights)
    errors = [np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)
              for got, want in zip((y, *state), (expected, *after), strict=True)]
    print(f"relative error of y and the last state against float64: {max(errors):.1e}, "
          f"limit {LIMITS[work.dtype]:.1e}")
    if max(errors) <= LIMITS[work.dtype]:  # a NaN is not
        with stage("comparison with PyTorch"):
            print(beside_pytorch(module.manifest))
        return 0
    print("the module's result is wrong", file=sys.stderr)
    return 1


def beside_pytorch(manifest: Any) -> str:
    """How many times as fast as torch.nn this layer is, and a small one; or how to see that."""
    work, on_gpu = manifest.workload, manifest.device.kind == "cuda"
    if find_spec("torch") is None:
        return "To see how much faster than PyTorch this is, pip install torch here and run this again."
    if work.cell not in LAYERS:
        return ""
    import torch

    import ecornn.torch

    place = {"device": "cuda" if on_gpu else "cpu", "dtype": getattr(torch, work.dtype)}

    def gain(layer: torch.nn.Module, steps: int, batch: int, width: int) -> Any:
        with torch.no_grad():
            return ecornn.torch.profile(layer.to(**place), torch.randn(steps, batch, width, **place)).model

    kind = getattr(torch.nn, LAYERS[work.cell][0])
    own = gain(kind(work.input, work.hidden, **LAYERS[work.cell][1]), work.seq, work.batch, work.input)
    small = gain(torch.nn.GRU(64, 64), 100, 1, 64)
    busy = " Other programs kept the processor busy, so an idle machine may differ." if own.busy or small.busy else ""
    return (f"Beside PyTorch {torch.__version__} on this machine: your {kind.__name__} of {work.hidden} units is "
            f"{own.ratio:.2f} times as fast, and a GRU of 64 units with one batch row {small.ratio:.3g} times.{busy}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))

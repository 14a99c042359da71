"""Times ONNX models before and after `ecornn onnx-rewrite`, in turns, on the CPU at hand; nothing is set by the user.

    python benchmarks/compare_onnx.py --output benchmarks/results/onnx_cpu.json

The models are such as users have: taggers, detectors of voice and of words, forecasters, for one to eight rows. Both
sides are sessions of ONNX Runtime, the rewritten one with ``ecornn.onnxruntime.session_options()``, which need not be
alike: threads that wait for work while the other side runs would take its time, so each side's turn is a process of
its own. A row has the medians of the turns' medians, and how many of the model's nodes are compiled.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measured_rows import alone

TOLERANCE = 1e-4  # of outputs, relative to the largest
SECONDS = 1.0  # of calls in a turn, after as many that warm up

# name: the kind of layer, I, H, layers, both directions, outputs of the layer behind, B, T
MODELS: dict[str, tuple[str, int, int, int, bool, int, int, int]] = {
    "tagger, 2 x 128 both ways": ("LSTM", 100, 128, 2, True, 20, 4, 60),
    "tagger, 2 x 256 both ways": ("LSTM", 100, 256, 2, True, 20, 8, 60),
    "voice activity, 2 x 64": ("LSTM", 40, 64, 2, False, 1, 1, 100),
    "keyword, 2 x 154": ("GRU", 40, 154, 2, False, 12, 1, 98),
    "forecaster, 2 x 50": ("LSTM", 8, 50, 2, False, 24, 8, 96),
    "forecaster, 96": ("GRU", 8, 96, 1, False, 24, 1, 168),
    "vibration, vanilla 128": ("RNN", 16, 128, 1, False, 4, 2, 200),
    "recognizer, 3 x 320 both ways": ("LSTM", 80, 320, 3, True, 30, 1, 200),
}


def export(name: str, file: Path) -> Any:
    """Writes the model of a name by torch.onnx; returns an input for it."""
    import torch

    kind, width, hidden, layers, both, outputs, batch, steps = MODELS[name]

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = getattr(torch.nn, kind)(width, hidden, layers, bidirectional=both)
            self.out = torch.nn.Linear(hidden * (1 + both), outputs)

        def forward(self, x: torch.Tensor) -> Any:
            return self.out(self.rnn(x)[0])

    x = torch.randn(steps, batch, width)
    torch.onnx.export(Model().eval(), (x,), str(file), dynamo=False, input_names=["x"])
    return x.numpy()


def turn(file: str, side: str, seed: int) -> dict[str, Any]:
    """The median seconds of a call in a new process, and the sum of what it returns for a random input."""
    import numpy as np
    import onnxruntime

    import ecornn.onnxruntime

    options = ecornn.onnxruntime.session_options(file) if side == "ecornn" else None
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    x = np.random.default_rng(seed).standard_normal(session.get_inputs()[0].shape).astype(np.float32)
    seconds: list[float] = []
    begin = time.perf_counter()
    while (now := time.perf_counter()) < begin + 2 * SECONDS or not seconds:
        (y,) = session.run(None, {"x": x})
        if now > begin + SECONDS:
            seconds.append(time.perf_counter() - now)
    return {"seconds": statistics.median(seconds), "outputs": y.ravel()[:: max(1, y.size // 64)].tolist()}


def measure(name: str, rounds: int) -> dict[str, Any]:
    """A row."""
    import numpy as np

    import ecornn.onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        files = {"ONNX Runtime": str(Path(folder) / "own.onnx"), "ecornn": str(Path(folder) / "fast.onnx")}
        export(name, Path(files["ONNX Runtime"]))
        made = ecornn.onnxruntime.rewrite(files["ONNX Runtime"], files["ecornn"])
        found: dict[str, list[dict[str, Any]]] = {side: [] for side in files}
        for seed in range(rounds):
            for side in sorted(files, reverse=bool(seed % 2)):
                found[side].append(alone(turn, files[side], side, seed))
    own, ours = (statistics.median(one["seconds"] for one in found[side]) for side in files)
    outputs = [np.array([one["outputs"] for one in found[side]]) for side in files]
    difference = float(abs(outputs[0] - outputs[1]).max() / abs(outputs[0]).max())
    return {"name": name, "B": MODELS[name][6], "T": MODELS[name][7], "own_ms": own * 1e3, "ours_ms": ours * 1e3,
            "faster": own / ours, "compiled": len(made.taken), "left": [one.reason for one in made.left],
            "difference": difference}


def main() -> int:
    from side_by_side import options, write  # with PyTorch: not what a turn begins with

    from ecornn.bench.results import environment
    from ecornn.targets import resolve

    given = options(__doc__, rounds=(5, "turns of each side")).parse_args()
    rows = []
    print("| model | B | T | ONNX Runtime | compiled | as fast | nodes compiled, left |\n|---|---|---|---|---|---|---|")
    for name in MODELS:
        rows.append(row := measure(name, given.rounds))
        print(f"| {name} | {row['B']} | {row['T']} | {row['own_ms']:.3g} ms | {row['ours_ms']:.3g} ms | "
              f"{row['faster']:.2f}x | {row['compiled']}, {len(row['left'])} |", flush=True)
    print(f"\nGeometric mean: {statistics.geometric_mean(row['faster'] for row in rows):.2f}x.")
    write(given.output, environment() | {
        "device": resolve("cpu").name, "cores": len(os.sched_getaffinity(0)), "rounds": given.rounds,
        "command": " ".join(["python", *sys.argv])}, rows)
    return int(any(row["difference"] > TOLERANCE for row in rows))


if __name__ == "__main__":
    sys.exit(main())

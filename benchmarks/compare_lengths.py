"""Rows of random lengths, against all rows at full length and PyTorch's packed sequences, on a CPU.

    python benchmarks/compare_lengths.py --hidden 256 --batch 32 --seq 100 --threads 2

Lengths are uniform in 1..T. Contestants take turns on fresh inputs; outputs are checked against float64. The share
of valid steps is what a layer would need that spent nothing on rows that have ended.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import ecornn
from ecornn.numpy_reference import random_weights, reference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("hidden", 256), ("batch", 32), ("seq", 100), ("threads", 2), ("runs", 15), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    a = parser.parse_args()
    H, B, T, rng = a.hidden, a.batch, a.seq, np.random.default_rng(a.seed)
    torch.set_num_threads(a.threads)
    weights = random_weights("lstm", H, H, a.seed)
    with_lengths, without = (ecornn.compile("lstm", hidden=H, batch=B, seq=T, target="cpu", lengths=given).bind(
        weights, threads=a.threads) for given in (True, False))
    theirs = torch.nn.LSTM(H, H)
    theirs.load_state_dict({n: torch.from_numpy(w) for n, w in weights.items()})

    def packed(x: Any, lengths: Any) -> Any:
        rnn = torch.nn.utils.rnn
        with torch.inference_mode():
            rows = rnn.pack_padded_sequence(torch.from_numpy(x), torch.from_numpy(lengths), enforce_sorted=False)
            return rnn.pad_packed_sequence(theirs(rows)[0], total_length=T)[0].numpy()

    contestants: dict[str, Callable[[Any, Any], Any]] = {
        "full rows, module without lengths": lambda x, _: without(x)[0],
        "full rows, module with lengths": lambda x, _: with_lengths(x)[0],
        "lengths": lambda x, n: with_lengths(x, lengths=n)[0],
        "lengths, rows sorted by them": lambda x, n: with_lengths(x, lengths=np.sort(n))[0],
        "PyTorch, packed": packed}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    shares = []
    for turn in range(a.runs + 2):
        x, lengths = rng.standard_normal((T, B, H)).astype(np.float32), rng.integers(1, T + 1, B)
        if not turn:
            expected, _ = reference("lstm", x, weights, lengths=lengths)
            for name in ("lengths", "PyTorch, packed"):
                error = np.linalg.norm(contestants[name](x, lengths) - expected) / np.linalg.norm(expected)
                if not error < 1e-5:
                    raise SystemExit(f"{name}: relative error {error:.2g}")
        shares.append(lengths.sum() / (T * B))
        for name, run in contestants.items():
            time.sleep(0.01)  # threads of the one before stop spinning
            begin = time.perf_counter()
            run(x, lengths)
            times[name].append(time.perf_counter() - begin)
    print(f"LSTM T={T} B={B} I=H={H} float32, {a.threads} threads, {without.manifest.device.name}, "
          f"PyTorch {torch.__version__}; valid steps {np.mean(shares):.3f} of all")
    for name, found in times.items():
        low, middle, high = np.percentile(found[2:], (20, 50, 80)) * 1e3
        print(f"{name:36} {middle:8.2f} ms   p20 {low:.2f}  p80 {high:.2f}")


if __name__ == "__main__":
    main()

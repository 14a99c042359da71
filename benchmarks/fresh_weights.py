"""Layers whose weights are new at each call, as weight norm, hypernetworks and ``functional_call`` make them, on a CPU.

    python benchmarks/fresh_weights.py

Both sides, a replaced LSTM and torch.nn's, get the same new tensors by ``torch.func.functional_call``, in turns, with
and without gradients; beside that, the same weights each time. Outputs and gradients are compared first. Medians of
milliseconds a call with the 20th percentile.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time

import numpy as np
import torch
from torch.func import functional_call

import ecornn.torch
from ecornn.bench.turns import settle
from ecornn.host_cpu import detect


def call(layer: torch.nn.Module, weights: dict[str, torch.Tensor], x: torch.Tensor,
         training: bool) -> list[torch.Tensor]:
    """y, or the gradients of all weights."""
    if not training:
        with torch.no_grad():
            return [functional_call(layer, weights, (x,))[0]]
    for weight in weights.values():
        weight.requires_grad_().grad = None
    functional_call(layer, weights, (x,))[0].square().mean().backward()
    return [weight.grad for weight in weights.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--seq", type=int, default=32)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--threads", type=int, default=detect().cores)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    for hidden in arguments.hidden:
        theirs = torch.nn.LSTM(hidden, hidden)
        ours = copy.deepcopy(theirs)
        ecornn.torch.replace(ours, wait=True)
        base, x = {k: v.detach() for k, v in theirs.named_parameters()}, torch.randn(
            arguments.seq, arguments.batch, hidden)
        for training in (False, True):
            for fresh in (False, True):
                times: dict[str, list[float]] = {"ecornn": [], "torch": []}
                for number in range(arguments.repeats + 2):
                    weights = {k: (v.detach() * (1 + 0.01 * number) if fresh else v) for k, v in base.items()}
                    found = {}
                    for name, layer in (("ecornn", ours), ("torch", theirs)):
                        settle()
                        begin = time.perf_counter()
                        found[name] = call(layer, weights, x, training)
                        if number > 1:
                            times[name].append((time.perf_counter() - begin) * 1e3)
                    for one, other in zip(*found.values(), strict=True):
                        if not float((one - other).norm() / other.norm()) < 1e-5:
                            sys.exit(f"H={hidden}: the two sides differ")
                ecornn_ms, torch_ms = (np.percentile(values, [50, 20]) for values in times.values())
                print(f"LSTM {arguments.seq}x{arguments.batch}x{hidden} {'training' if training else 'inference':9} "
                      f"{'new' if fresh else 'same':4} weights  ecornn {ecornn_ms[0]:.2f} [{ecornn_ms[1]:.2f}]  torch "
                      f"{torch_ms[0]:.2f} [{torch_ms[1]:.2f}] ms  {torch_ms[0] / ecornn_ms[0]:.2f}x", flush=True)


if __name__ == "__main__":
    main()

"""Calls on a CPU that `ecornn bench` does not make, ours and PyTorch's in turns: cells, new weights, lengths.

    python benchmarks/cpu_calls.py cells --output benchmarks/results/cpu_cells.json
    python benchmarks/cpu_calls.py weights
    python benchmarks/cpu_calls.py lengths

cells: replaced cells and torch.nn's, called in a loop, as policies and decoders call them. A row is the median of
microseconds a step with the 20th and 80th percentile, of forward alone ("inference") or of a whole training step with
SGD.
weights: an LSTM whose weights are new at each call, as weight norm, hypernetworks and ``functional_call`` make them,
with and without gradients; beside that, the same weights each time.
lengths: an LSTM's rows of lengths uniform in 1..T, against all rows at full length and PyTorch's packed sequences. The
share of valid steps is what a layer would need that spent nothing on rows that have ended.

Inputs are new in each round, but for the x of new weights. Outputs and gradients are compared with float64 first;
with new weights ours are compared with PyTorch's in each round.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain, count, product
from typing import Any

import numpy as np
import torch
from measured_rows import mean
from side_by_side import environment, host_clock, options, relative, summary, write
from torch.func import functional_call
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import ecornn
import ecornn.torch
from ecornn.bench import turns
from ecornn.host_cpu import detect
from ecornn.numpy_reference import random_weights, reference
from ecornn.tune.timing import wall_clock

CELLS = ("LSTMCell", "GRUCell", "RNNCell")
SIZES = [(1, 64), (1, 256), (1, 512), (8, 128), (32, 256), (64, 512)]  # B, H; I is H
LIMITS = {"inference": 1e-5, "training": 2e-5}
Row = dict[str, Any]


def replaced(library: torch.nn.Module) -> torch.nn.Module:
    """Ours, of the same weights."""
    ours = copy.deepcopy(library)
    ecornn.torch.replace(ours, wait=True)
    return ours


def timed(sides: Mapping[str, Callable[[], object]], fresh: Callable[[], object], repeats: int) -> Row:
    """Microseconds of calls that take turns, as a row has them."""
    found: Row = {}
    for name, times in turns.take_turns(sides, fresh, repeats, float("inf"), host_clock).items():
        found |= summary(name, times, 1)
    return found


def loop(cell: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The output states of all steps."""
    hx, found = None, []
    for row in x:
        hx = cell(row, hx)
        found.append(hx[0] if isinstance(hx, tuple) else hx)
    return torch.stack(found)


def train(cell: torch.nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer | None = None) -> list[torch.Tensor]:
    """A training step; the gradients."""
    cell.zero_grad()
    loop(cell, x).square().mean().backward()
    if optimizer is not None:
        optimizer.step()
    return [p.grad for p in cell.parameters()]


def results(cell: torch.nn.Module, x: torch.Tensor, kind: str) -> list[torch.Tensor]:
    """The results of this kind of call."""
    if kind == "training":
        return train(cell, x)
    with torch.no_grad():
        return [loop(cell, x)]


def compare_cells(name: str, batch: int, hidden: int, kind: str, arguments: argparse.Namespace) -> Row:
    """One row: loops of calls, each from the states of the one before."""
    torch.manual_seed(0)
    library = getattr(torch.nn, name)(hidden, hidden)
    sides, x = {"ecornn": replaced(library), "torch": library}, torch.randn(arguments.steps, batch, hidden)
    row: Row = {"cell": name, "B": batch, "H": hidden, "kind": kind, "steps": arguments.steps, "device": "cpu",
                "threads": torch.get_num_threads()}
    wanted = results(copy.deepcopy(library).double(), x.double(), kind)
    for side, cell in sides.items():
        row[f"{side}_error"] = max(map(relative, results(cell, x, kind), wanted))
        if not row[f"{side}_error"] <= LIMITS[kind]:
            sys.exit(f"{name} B={batch} H={hidden}: {side} has error {row[f'{side}_error']:.2e}")
    if kind == "training":
        runs = {side: partial(train, cell, x, torch.optim.SGD(cell.parameters(), 1e-6)) for side, cell in sides.items()}
    else:
        runs = {side: partial(loop, cell, x) for side, cell in sides.items()}
    with torch.set_grad_enabled(kind == "training"):
        found, _ = turns.host_turns(runs, lambda: x.copy_(torch.randn_like(x)), arguments.repeats, float("inf"),
                                    lambda run: wall_clock(run) * 1e6)
    for side, times in found.items():
        row |= summary(side, [*chain(*times)], arguments.steps)
    return row | {"ratio": row["torch_us"] / row["ecornn_us"]}


def all_cells(arguments: argparse.Namespace) -> list[Row]:
    """Every cell, size and kind that is asked for."""
    rows = []
    for name, (batch, hidden), kind in product(arguments.cell or CELLS, SIZES, arguments.kind or LIMITS):
        if arguments.only and f"{batch}x{hidden}" not in arguments.only:
            continue
        rows.append(compare_cells(name, batch, hidden, kind, arguments))
        print(f"{name:8} B={batch:<3} H={hidden:<4} {kind:9} {shown(rows[-1], 'us a step')}", flush=True)
    ratios = [row["ratio"] for row in rows]
    print(f"geometric mean {mean(ratios):.2f}x, least {min(ratios):.2f}x, {len(rows)} rows")
    return rows


def shown(row: Row, unit: str) -> str:
    """Times of both sides and their ratio."""
    sides = [f"{side} {row[f'{side}_us']:.1f} [{row[f'{side}_p20']:.1f}, {row[f'{side}_p80']:.1f}]"
             for side in ("ecornn", "torch")]
    return f"{'  '.join(sides)} {unit}  {row['torch_us'] / row['ecornn_us']:.2f}x"


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


def compare_weights(hidden: int, training: bool, new: bool, arguments: argparse.Namespace) -> Row:
    """One row: both sides get the same tensors."""
    T, B, numbers = arguments.seq or 32, arguments.batch or 4, count()
    theirs = torch.nn.LSTM(hidden, hidden)
    base, x = {k: v.detach() for k, v in theirs.named_parameters()}, torch.randn(T, B, hidden)
    weights, found = dict(base), dict[str, list[torch.Tensor]]()

    def check() -> None:
        """The last round's."""
        if not max(map(relative, found.get("ecornn", []), found.get("torch", [])), default=0.0) < LIMITS["inference"]:
            sys.exit(f"H={hidden}: the two sides differ")

    def fresh() -> None:
        check()
        number = next(numbers)
        weights.update({k: v.detach() * (1 + 0.01 * number) if new else v for k, v in base.items()})

    def run(side: str, layer: torch.nn.Module) -> None:
        found[side] = call(layer, weights, x, training)

    row = timed({"ecornn": partial(run, "ecornn", replaced(theirs)), "torch": partial(run, "torch", theirs)}, fresh,
                arguments.repeats)
    check()
    print(f"LSTM {T}x{B}x{hidden} {'training' if training else 'inference':9} {'new' if new else 'same':4} weights  "
          f"{shown(row, 'us')}", flush=True)
    return {"H": hidden, "T": T, "B": B, "training": training, "new": new, **row}


def compare_lengths(hidden: int, arguments: argparse.Namespace) -> Row:
    """One row: a module with lengths, another one without, and PyTorch's packed sequences."""
    T, B, rng = arguments.seq or 100, arguments.batch or 32, np.random.default_rng(0)
    weights = random_weights("lstm", hidden, hidden, 0)
    with_lengths, without = (ecornn.compile("lstm", hidden=hidden, batch=B, seq=T, target="cpu", lengths=given).bind(
        weights, threads=arguments.threads) for given in (True, False))
    theirs = torch.nn.LSTM(hidden, hidden)
    theirs.load_state_dict({n: torch.from_numpy(w) for n, w in weights.items()})
    x, lengths, shares = np.empty((T, B, hidden), np.float32), np.empty(B, np.int64), list[float]()

    def fresh() -> None:
        x[:], lengths[:] = rng.standard_normal(x.shape), rng.integers(1, T + 1, B)
        shares.append(lengths.sum() / (T * B))

    def packed() -> Any:
        with torch.inference_mode():
            rows = pack_padded_sequence(torch.from_numpy(x), torch.from_numpy(lengths), enforce_sorted=False)
            return pad_packed_sequence(theirs(rows)[0], total_length=T)[0].numpy()

    sides: dict[str, Callable[[], Any]] = {
        "full": lambda: without(x)[0], "full_by_lengths": lambda: with_lengths(x)[0],
        "lengths": lambda: with_lengths(x, lengths=lengths)[0],
        "sorted": lambda: with_lengths(x, lengths=np.sort(lengths))[0], "torch": packed}
    fresh()
    expected, _ = reference("lstm", x, weights, lengths=lengths)
    for side in ("lengths", "torch"):
        error = np.linalg.norm(sides[side]() - expected) / np.linalg.norm(expected)
        if not error < LIMITS["inference"]:
            sys.exit(f"{side}: relative error {error:.2g}")
    row = timed(sides, fresh, arguments.repeats)
    print(f"LSTM T={T} B={B} I=H={hidden}, valid steps {np.mean(shares):.3f} of all: " + ", ".join(
        f"{side} {row[f'{side}_us']:.0f} us [{row[f'{side}_p20']:.0f}, {row[f'{side}_p80']:.0f}]" for side in sides))
    return {"H": hidden, "T": T, "B": B, "valid": float(np.mean(shares)), **row}


def main() -> None:
    parser = options(__doc__, repeats=(15, "timed rounds a row"), steps=(32, "calls of a cell's loop"),
                     threads=(detect().cores, "of both sides"), seq=(0, "T of a layer; 0: 32, of lengths 100"),
                     batch=(0, "B of a layer; 0: 4, of lengths 32"))
    parser.add_argument("mode", choices=("cells", "weights", "lengths"))
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 512], help="H of layers [%(default)s]")
    parser.add_argument("--cell", choices=CELLS, action="append", help="only this cell; may repeat")
    parser.add_argument("--only", metavar="BxH", action="append", help="only this size of cells; may repeat")
    parser.add_argument("--kind", choices=list(LIMITS), action="append", help="only this, of cells; may repeat")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    if arguments.mode == "cells":
        rows = all_cells(arguments)
    elif arguments.mode == "weights":
        rows = [compare_weights(*each, arguments) for each in product(arguments.hidden, (False, True), (False, True))]
    else:
        rows = [compare_lengths(hidden, arguments) for hidden in arguments.hidden]
    write(arguments.output, environment(cpu=True), rows)


if __name__ == "__main__":
    main()

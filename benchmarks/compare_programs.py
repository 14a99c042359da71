"""Times programs from their first call on, with PyTorch's layers and with replaced ones, and with what was compiled
before (a warm cache) and nothing (a cold one).

    python benchmarks/compare_programs.py                        # all programs, on the GPU if there is one
    python benchmarks/compare_programs.py tagger --device cpu    # some
    python benchmarks/compare_programs.py --output programs.json

Each side is a process of its own, as a user would have it. A round is PyTorch's, then ours with a cold cache, then
with a warm one; a call's time is the median over rounds. When all calls have been made ours waits for its compilers,
and both sides make the calls again, for a second and some: what a program takes once all is compiled, by the medians of
each call. Results are compared call by call.

Of each program the table says: the largest ratio of the time of the first k calls, k from 5 on, to PyTorch's (1.1 is
aimed at); how much longer than PyTorch's longest call one takes (10 ms); how fast it is when all is compiled; how many
modules were made, and in which call the last one was taken.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from measured_rows import alone
from torch.nn import GRU, LSTM, Embedding, Linear, LSTMCell, Module, ModuleDict
from torch.nn.functional import cross_entropy, ctc_loss
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

SIDES = ("torch", "cold", "warm")
LEAST = 5  # calls, from which on the first ones are added up
PASSES, SECONDS = 7, 1.5  # over all calls once all is compiled: so many, or until they have taken as long
TOLERANCE = {"cpu": 1e-3, "cuda": 2e-2}  # relative, of one number for a call: training lets differences grow


# -- programs: each yields its model, and a function for each of its calls, which returns a number to compare --------
def calls_of(net: Module, batches: Iterable[tuple[Any, ...]], loss: Callable[..., torch.Tensor],
             optimizer: Any = torch.optim.Adam, rate: float = 1e-3) -> Iterator[Any]:
    """The model, then a call for each batch: a step of training, but where the loss has no gradient."""
    yield net
    optimizer = optimizer(net.parameters(), rate)  # of layers that may have been replaced

    def call(batch: tuple[Any, ...]) -> torch.Tensor:
        found = loss(*batch)
        if found.requires_grad:
            optimizer.zero_grad()
            found.backward()
            optimizer.step()
        return found

    for batch in batches:
        yield partial(call, batch)


class Draw:
    """Random inputs of a program, the same each time."""

    def __init__(self, seed: int, device: str) -> None:
        self.random, self.device = torch.Generator().manual_seed(seed), device

    def number(self, low: int, high: int) -> int:
        """From ``low`` to below ``high``."""
        return int(torch.randint(low, high, (), generator=self.random))

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.random).to(self.device)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random).to(self.device)


def tagger(device: str, packed: bool = False) -> Iterator[Any]:
    """Two bidirectional LSTMs that tag words, trained over 40 shapes."""
    draw = Draw(1, device)
    net = ModuleDict({"words": Embedding(1000, 64), "tags": Linear(256, 20),
                      "lstm": LSTM(64, 128, 2, bidirectional=True, batch_first=True)}).to(device)

    def batch(number: int) -> tuple[torch.Tensor, ...]:
        rows, steps = (32, 17)[number % 2], draw.number(20, 200)
        words, tags = draw.integers(0, 1000, rows, steps), draw.integers(0, 20, rows, steps)
        lengths = draw.integers(steps // 4, steps + 1, rows).sort(descending=True).values.cpu()
        lengths[0] = steps
        return words, tags, lengths

    def loss(words: torch.Tensor, tags: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = net["words"](words)
        y = net["lstm"](pack_padded_sequence(x, lengths, batch_first=True) if packed else x)[0]
        y = pad_packed_sequence(y, batch_first=True)[0] if packed else y
        return cross_entropy(net["tags"](y).flatten(0, 1), tags.flatten())

    return calls_of(net, map(batch, range(40)), loss)


def packed_tagger(device: str) -> Iterator[Any]:
    """The same on packed sequences."""
    return tagger(device, packed=True)


def requests(device: str) -> Iterator[Any]:
    """A service that answers 120 requests of random shapes by two GRUs of 384 units."""
    draw, dtype = Draw(2, device), torch.float16 if device == "cuda" else torch.float32
    net = GRU(96, 384, 2).to(device, dtype).eval()
    answer = torch.no_grad()(lambda x: net(x)[0].float().norm())
    return calls_of(net, ((draw.normal(draw.number(1, 129), draw.number(1, 17), 96).to(dtype),) for _ in range(120)),
                    answer)


def policy(device: str) -> Iterator[Any]:
    """A policy that takes 400 steps in 16 environments, one by one, and learns from each 40 of them."""
    draw, state = Draw(3, device), None
    net = ModuleDict({"lstm": LSTM(32, 128), "action": Linear(128, 6)}).to(device)

    def loss(seen: torch.Tensor) -> torch.Tensor:
        nonlocal state
        if len(seen) == 1:
            with torch.no_grad():
                y, state = net["lstm"](seen, state)
                return net["action"](y).norm()
        return net["action"](net["lstm"](seen)[0]).square().mean()

    return calls_of(net, ((draw.normal(40 if number % 41 == 40 else 1, 16, 32),) for number in range(440)), loss)


def decoder(device: str) -> Iterator[Any]:
    """A decoder of an LSTMCell with attention, trained on 60 batches of 20 to 40 words."""
    draw = Draw(4, device)
    net = ModuleDict({"words": Embedding(500, 128), "cell": LSTMCell(384, 256), "out": Linear(256, 500)}).to(device)

    def loss(words: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        h = c = source.new_zeros(16, 256)
        outputs = []
        for x in net["words"](words):
            weights = (source * h).sum(-1, keepdim=True).softmax(0)
            h, c = net["cell"](torch.cat([x, (weights * source).sum(0)], 1), (h, c))
            outputs.append(h)
        y = net["out"](torch.stack(outputs))
        return cross_entropy(y[:-1].flatten(0, 1), words[1:].flatten())

    lengths = (draw.number(20, 41) for _ in range(60))
    return calls_of(net, ((draw.integers(0, 500, n, 16), draw.normal(30, 16, 256)) for n in lengths), loss)


def language_model(device: str) -> Iterator[Any]:
    """A language model of two LSTMs whose batches come in buckets of 16, 32, 64 and 128 words, with dropout."""
    draw = Draw(5, device)
    net = ModuleDict({"words": Embedding(2000, 200), "out": Linear(200, 2000), "lstm": LSTM(200, 200, 2)}).to(device)

    def loss(words: torch.Tensor) -> torch.Tensor:
        y = net["out"](net["lstm"](net["words"](words[:-1]))[0])
        return cross_entropy(y.flatten(0, 1), words[1:].flatten())

    buckets = ((16, 32, 64, 128)[draw.number(0, 4)] for _ in range(60))
    return calls_of(net, ((draw.integers(0, 2000, steps + 1, 2048 // steps),) for steps in buckets), loss,
                    torch.optim.SGD, 0.1)


def speech(device: str) -> Iterator[Any]:
    """A recognizer of three bidirectional GRUs, trained by CTC on spectra of 100 to 400 frames."""
    draw = Draw(6, device)
    net = ModuleDict({"gru": GRU(80, 160, 3, bidirectional=True), "out": Linear(320, 30)}).to(device)

    def loss(spectra: torch.Tensor, letters: torch.Tensor) -> torch.Tensor:
        log = net["out"](net["gru"](spectra)[0]).log_softmax(-1)
        return ctc_loss(log, letters, (len(spectra),) * 8, (letters.shape[1],) * 8)

    lengths = (draw.number(100, 401) for _ in range(30))
    return calls_of(net, ((draw.normal(n, 8, 80), draw.integers(1, 30, 8, n // 10)) for n in lengths), loss)


def evaluated(device: str) -> Iterator[Any]:
    """A forecaster, one GRU, trained on windows of 96 hours, and evaluated after each ten steps on other batches."""
    draw = Draw(7, device)
    net = ModuleDict({"gru": GRU(8, 96, batch_first=True), "out": Linear(96, 24)}).to(device)

    def loss(hours: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(len(hours) == 64):
            return (net["out"](net["gru"](hours)[0][:, -1]) - wanted).square().mean()

    rows = (64 if number % 11 < 10 else 200 for number in range(220))
    return calls_of(net, ((draw.normal(n, 96, 8), draw.normal(n, 24)) for n in rows), loss)


PROGRAMS = {one.__name__: one for one in (tagger, packed_tagger, requests, policy, decoder, language_model, speech,
                                          evaluated)}


# -- one side, in a process of its own --------------------------------------------------------------------------------
def run(name: str, device: str, side: str, cache: str) -> dict[str, Any]:
    """The seconds and results of all calls, from the first on and again once all is compiled."""
    os.environ["ECORNN_CACHE"] = cache
    os.environ.pop("ECORNN_WAIT", None)
    torch.manual_seed(0)
    calls = PROGRAMS[name](device)
    net = next(calls)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    if side != "torch":
        import ecornn.torch

        ecornn.torch.replace(net)
    made = list(calls)
    found: dict[str, Any] = {}
    def each() -> dict[str, Any]:
        seconds, results = [], []
        for call in made:
            wait()
            begin = time.perf_counter()
            result = call()
            wait()
            seconds.append(time.perf_counter() - begin)
            results.append(float(result.detach()))
        return {"seconds": seconds, "results": results}

    found["first"] = each()
    if side != "torch":
        found |= _compiled(made)
    passes, begin = [each()], time.perf_counter()
    while len(passes) < PASSES and time.perf_counter() < begin + SECONDS:
        passes.append(each())
    found["then"] = {"seconds": [*map(statistics.median, zip(*(one["seconds"] for one in passes), strict=True))]}
    return found


def _compiled(made: list[Callable[[], Any]]) -> dict[str, Any]:
    """Waits until all that calls have asked for is compiled; its number."""
    from ecornn.torch import compiling as background
    from ecornn.torch.compiling import outcomes

    for _ in range(3):  # a call may find another layer to compile once the first one is there
        for job in [*background._jobs.values()]:
            job.wait()
        for call in made:
            call()
    return {"modules": len(outcomes), "errors": [job.error for job in background._jobs.values() if job.error]}


# -- all of them ------------------------------------------------------------------------------------------------------
def measure(name: str, device: str, rounds: int) -> dict[str, Any]:
    """A row: the calls' seconds of each side, and what they come to."""
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            for side in SIDES:
                runs[side].append(alone(run, name, device, side, cache))
    first, again = ({side: [*map(statistics.median, zip(*(one[part]["seconds"] for one in found), strict=True))]
                     for side, found in runs.items()} for part in ("first", "then"))
    then = {side: sum(times) for side, times in again.items()}
    row: dict[str, Any] = {"name": name, "calls": len(first["torch"]), "modules": runs["cold"][0]["modules"],
                           "errors": runs["cold"][0]["errors"], "difference": _difference(runs),
                           "first": first, "then": then, "faster": then["torch"] / then["warm"]}
    for side in SIDES[1:]:
        sums = [[*accumulate(first[which])] for which in (side, "torch")]
        row[side] = {"worst": max(ours / theirs for ours, theirs in zip(*(s[LEAST - 1:] for s in sums), strict=True)),
                     "all": sums[0][-1] / sums[1][-1], "longer_ms": (max(first[side]) - max(first["torch"])) * 1e3}
    return row


def _difference(runs: dict[str, list[dict[str, Any]]]) -> float:
    """The largest relative difference of a call's result from PyTorch's, of calls from the first on."""
    wanted = runs["torch"][0]["first"]["results"]
    return max(abs(one - right) / max(abs(right), 1e-6) for side in SIDES[1:] for found in runs[side]
               for one, right in zip(found["first"]["results"], wanted, strict=True))


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = ["| program | calls | first k, cold | warm | longest call, cold | warm | all compiled | modules |",
             "|---|---|---|---|---|---|---|---|"]
    lines += [f"| {r['name']} | {r['calls']} | {r['cold']['worst']:.2f}x | {r['warm']['worst']:.2f}x | "
              f"{r['cold']['longer_ms']:+.0f} ms | {r['warm']['longer_ms']:+.0f} ms | {r['faster']:.2f}x as fast | "
              f"{r['modules']} |" for r in rows]
    lines.append(f"\nAll compiled, geometric mean: {statistics.geometric_mean(r['faster'] for r in rows):.2f}x.")
    return "\n".join(lines)


def main() -> int:
    from side_by_side import options, write

    from ecornn.bench.results import environment
    from ecornn.targets import resolve

    parser = options(__doc__, rounds=(3, "processes of each side"))
    parser.add_argument("programs", nargs="*", help=f"of {', '.join(PROGRAMS)}; default: all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu",
                        help="default: the GPU if there is one")
    given = parser.parse_args()
    if unknown := {*given.programs} - {*PROGRAMS}:
        parser.error(f"no program of that name: {', '.join(sorted(unknown))}; there are {', '.join(PROGRAMS)}")
    rows = []
    for name in given.programs or PROGRAMS:
        rows.append(measure(name, given.device, given.rounds))
        print(f"{name}: {rows[-1]['cold']}, warm {rows[-1]['warm']}, {rows[-1]['faster']:.2f}x as fast when all is "
              f"compiled", file=sys.stderr)
    where = resolve(given.device)
    write(given.output, environment() | {
        "device": where.name, "arch": where.arch, "cores": len(os.sched_getaffinity(0)), "rounds": given.rounds,
        "command": " ".join(["python", *sys.argv])}, rows)
    print(table(rows))
    wrong = [r["name"] for r in rows if r["errors"] or not r["difference"] <= TOLERANCE[given.device]]
    if wrong:
        print(f"other results than PyTorch's: {', '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

"""Times programs from their first call on, with PyTorch's layers and with replaced ones, and with what was compiled
before (a warm cache) and nothing (a cold one).

    python benchmarks/compare_programs.py                        # all programs, on the GPU if there is one
    python benchmarks/compare_programs.py tagger --device cpu    # some
    python benchmarks/compare_programs.py --output programs.json

Each side is a process of its own, as a user would have it. A round is PyTorch's, then ours with a cold cache, then
with a warm one; a call's time is the median over rounds. When all calls have been made ours waits for its compilers,
and both sides make the calls again: what a program takes once all is compiled. Results are compared call by call.

Of each program the table says: the largest ratio of the time of the first k calls, k from 5 on, to PyTorch's (1.1 is
aimed at); how much longer than PyTorch's longest call one takes (10 ms); how fast it is when all is compiled; how many
modules were made, and in which call the last one was taken.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SIDES = ("torch", "cold", "warm")
LEAST = 5  # calls, from which on the first ones are added up
TOLERANCE = {"cpu": 1e-3, "cuda": 2e-2}  # relative, of one number for a call: training lets differences grow


# -- programs: each yields one function for each of its calls, which returns a number to compare --------------------
def learn(optimizer: Any, loss: Any) -> Any:
    """Takes a step of training; returns the loss, a tensor without axes."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def tagger(device: str, packed: bool = False) -> Iterator[Callable[[], Any]]:
    """Two bidirectional LSTMs that tag words, trained over 40 shapes."""
    import torch
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

    net = torch.nn.ModuleDict({"words": torch.nn.Embedding(1000, 64), "tags": torch.nn.Linear(256, 20),
                               "lstm": torch.nn.LSTM(64, 128, 2, bidirectional=True, batch_first=True)}).to(device)
    yield net
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    random = torch.Generator().manual_seed(1)
    for number in range(40):
        batch, steps = (32, 17)[number % 2], int(torch.randint(20, 200, (), generator=random))
        words = torch.randint(1000, (batch, steps), generator=random).to(device)
        tags = torch.randint(20, (batch, steps), generator=random).to(device)
        lengths = torch.randint(steps // 4, steps + 1, (batch,), generator=random).sort(descending=True).values
        lengths[0] = steps

        def call(words: Any = words, tags: Any = tags, lengths: Any = lengths) -> Any:
            x = net["words"](words)
            if packed:
                y = net["lstm"](pack_padded_sequence(x, lengths, batch_first=True))[0]
                y = pad_packed_sequence(y, batch_first=True)[0]
            else:
                y = net["lstm"](x)[0]
            loss = torch.nn.functional.cross_entropy(net["tags"](y).flatten(0, 1), tags.flatten())
            return learn(optimizer, loss)

        yield call


def packed_tagger(device: str) -> Iterator[Callable[[], Any]]:
    """The same on packed sequences."""
    return tagger(device, packed=True)


def requests(device: str) -> Iterator[Callable[[], Any]]:
    """A service that answers 120 requests of random shapes by two GRUs of 384 units."""
    import torch

    dtype = torch.float16 if device == "cuda" else torch.float32
    net = torch.nn.GRU(96, 384, 2).to(device, dtype).eval()
    yield net
    random = torch.Generator().manual_seed(2)
    for _ in range(120):
        steps, batch = (int(torch.randint(1, most + 1, (), generator=random)) for most in (128, 16))
        x = torch.randn(steps, batch, 96, generator=random).to(device, dtype)

        def call(x: Any = x) -> Any:
            with torch.no_grad():
                return net(x)[0].float().norm()

        yield call


def policy(device: str) -> Iterator[Callable[[], Any]]:
    """A policy that takes 400 steps in 16 environments, one by one, and learns from each 40 of them."""
    import torch

    net = torch.nn.ModuleDict({"lstm": torch.nn.LSTM(32, 128), "action": torch.nn.Linear(128, 6)}).to(device)
    yield net
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    random = torch.Generator().manual_seed(3)
    state: Any = None
    for number in range(440):
        seen = torch.randn(40 if number % 41 == 40 else 1, 16, 32, generator=random).to(device)

        def call(seen: Any = seen) -> Any:
            nonlocal state
            if len(seen) == 1:
                with torch.no_grad():
                    y, state = net["lstm"](seen, state)
                    return net["action"](y).norm()
            loss = net["action"](net["lstm"](seen)[0]).square().mean()
            return learn(optimizer, loss)

        yield call


def decoder(device: str) -> Iterator[Callable[[], Any]]:
    """A decoder of an LSTMCell with attention, trained on 60 batches of 20 to 40 words."""
    import torch

    net = torch.nn.ModuleDict({"words": torch.nn.Embedding(500, 128), "cell": torch.nn.LSTMCell(384, 256),
                               "out": torch.nn.Linear(256, 500)}).to(device)
    yield net
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    random = torch.Generator().manual_seed(4)
    for _ in range(60):
        steps = int(torch.randint(20, 41, (), generator=random))
        words = torch.randint(500, (steps, 16), generator=random).to(device)
        source = torch.randn(30, 16, 256, generator=random).to(device)

        def call(words: Any = words, source: Any = source) -> Any:
            h = c = source.new_zeros(16, 256)
            outputs = []
            for x in net["words"](words):
                weights = (source * h).sum(-1, keepdim=True).softmax(0)
                h, c = net["cell"](torch.cat([x, (weights * source).sum(0)], 1), (h, c))
                outputs.append(h)
            y = net["out"](torch.stack(outputs))
            loss = torch.nn.functional.cross_entropy(y[:-1].flatten(0, 1), words[1:].flatten())
            return learn(optimizer, loss)

        yield call


def language_model(device: str) -> Iterator[Callable[[], Any]]:
    """A language model of two LSTMs whose batches come in buckets of 16, 32, 64 and 128 words, with dropout."""
    import torch

    net = torch.nn.ModuleDict({"words": torch.nn.Embedding(2000, 200), "out": torch.nn.Linear(200, 2000),
                               "lstm": torch.nn.LSTM(200, 200, 2)}).to(device)
    yield net
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    random = torch.Generator().manual_seed(5)
    for _ in range(60):
        steps = (16, 32, 64, 128)[int(torch.randint(4, (), generator=random))]
        words = torch.randint(2000, (steps + 1, 2048 // steps), generator=random).to(device)

        def call(words: Any = words) -> Any:
            y = net["out"](net["lstm"](net["words"](words[:-1]))[0])
            loss = torch.nn.functional.cross_entropy(y.flatten(0, 1), words[1:].flatten())
            return learn(optimizer, loss)

        yield call


def speech(device: str) -> Iterator[Callable[[], Any]]:
    """A recognizer of three bidirectional GRUs, trained by CTC on spectra of 100 to 400 frames."""
    import torch

    net = torch.nn.ModuleDict({"gru": torch.nn.GRU(80, 160, 3, bidirectional=True),
                               "out": torch.nn.Linear(320, 30)}).to(device)
    yield net
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    random = torch.Generator().manual_seed(6)
    for _ in range(30):
        frames = int(torch.randint(100, 401, (), generator=random))
        spectra = torch.randn(frames, 8, 80, generator=random).to(device)
        letters = torch.randint(1, 30, (8, frames // 10), generator=random).to(device)

        def call(spectra: Any = spectra, letters: Any = letters, frames: int = frames) -> Any:
            log = net["out"](net["gru"](spectra)[0]).log_softmax(-1)
            loss = torch.nn.functional.ctc_loss(log, letters, (frames,) * 8, (letters.shape[1],) * 8)
            return learn(optimizer, loss)

        yield call


def evaluated(device: str) -> Iterator[Callable[[], Any]]:
    """A forecaster, one GRU, trained on windows of 96 hours, and evaluated after each ten steps on other batches."""
    import torch

    net = torch.nn.ModuleDict({"gru": torch.nn.GRU(8, 96, batch_first=True), "out": torch.nn.Linear(96, 24)}).to(device)
    yield net
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    random = torch.Generator().manual_seed(7)
    for number in range(220):
        rows, trains = (64, True) if number % 11 < 10 else (200, False)
        hours = torch.randn(rows, 96, 8, generator=random).to(device)
        wanted = torch.randn(rows, 24, generator=random).to(device)

        def call(hours: Any = hours, wanted: Any = wanted, trains: bool = trains) -> Any:
            with torch.set_grad_enabled(trains):
                loss = (net["out"](net["gru"](hours)[0][:, -1]) - wanted).square().mean()
            return learn(optimizer, loss) if trains else loss

        yield call


PROGRAMS = {one.__name__: one for one in (tagger, packed_tagger, requests, policy, decoder, language_model, speech,
                                          evaluated)}


# -- one side, in a process of its own --------------------------------------------------------------------------------
def run(name: str, device: str, side: str) -> dict[str, Any]:
    """The seconds and results of all calls, from the first on and again once all is compiled."""
    import torch

    torch.manual_seed(0)
    calls = PROGRAMS[name](device)
    net: Any = next(calls)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    if side != "torch":
        import ecornn.torch

        ecornn.torch.replace(net)
    made = list(calls)
    found: dict[str, Any] = {}
    for part in ("first", "then"):
        if part == "then" and side != "torch":
            found |= _compiled(made)
        seconds, results = [], []
        for call in made:
            wait()
            begin = time.perf_counter()
            result = call()
            wait()
            seconds.append(time.perf_counter() - begin)
            results.append(float(result.detach()))
        found[part] = {"seconds": seconds, "results": results}
    return found


def _compiled(made: list[Callable[[], Any]]) -> dict[str, Any]:
    """Waits until all that calls have asked for is compiled; its number."""
    from ecornn.torch import background
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
                environment = os.environ | {"ECORNN_CACHE": cache}
                environment.pop("ECORNN_WAIT", None)
                done = subprocess.run([sys.executable, __file__, name, "--device", device, "--side", side],
                                      env=environment, capture_output=True, text=True, check=False)
                if done.returncode:
                    sys.exit(f"{name}, {side}: {done.stderr}")
                runs[side].append(json.loads(done.stdout.splitlines()[-1]))
    first = {side: _median([one["first"]["seconds"] for one in found]) for side, found in runs.items()}
    then = {side: sum(_median([one["then"]["seconds"] for one in found])) for side, found in runs.items()}
    row: dict[str, Any] = {"name": name, "calls": len(first["torch"]), "modules": runs["cold"][0]["modules"],
                           "errors": runs["cold"][0]["errors"], "difference": _difference(runs),
                           "first": first, "then": then, "faster": then["torch"] / then["warm"]}
    for side in SIDES[1:]:
        sums = [_sums(first[which]) for which in (side, "torch")]
        row[side] = {"worst": max(ours / theirs for ours, theirs in zip(*(s[LEAST - 1:] for s in sums), strict=True)),
                     "all": sums[0][-1] / sums[1][-1], "longer_ms": (max(first[side]) - max(first["torch"])) * 1e3}
    return row


def _median(runs: list[list[float]]) -> list[float]:
    """The median of each call."""
    return [statistics.median(times) for times in zip(*runs, strict=True)]


def _sums(seconds: list[float]) -> list[float]:
    total, sums = 0.0, []
    for one in seconds:
        total += one
        sums.append(total)
    return sums


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", help=f"of {', '.join(PROGRAMS)}; default: all")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU if there is one")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each side")
    parser.add_argument("--output", type=Path, help="a file for the results, in JSON")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := {*given.programs} - {*PROGRAMS}:
        parser.error(f"no program of that name: {', '.join(sorted(unknown))}; there are {', '.join(PROGRAMS)}")
    import torch

    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if given.side:
        print(json.dumps(run(given.programs[0], device, given.side)))
        return 0
    rows = []
    for name in given.programs or PROGRAMS:
        rows.append(measure(name, device, given.rounds))
        print(f"{name}: {rows[-1]['cold']}, warm {rows[-1]['warm']}, {rows[-1]['faster']:.2f}x as fast when all is "
              f"compiled", file=sys.stderr)
    if given.output:
        from ecornn.bench.results import environment
        from ecornn.targets import resolve

        where = resolve("cpu" if device == "cpu" else "cuda")
        found = environment() | {"device": where.name, "arch": where.arch, "cores": len(os.sched_getaffinity(0)),
                                 "rounds": given.rounds, "command": " ".join(["python", *sys.argv])}
        given.output.write_text(json.dumps({"environment": found, "rows": rows}, indent=1) + "\n")
    print(table(rows))
    wrong = [r["name"] for r in rows if r["errors"] or not r["difference"] <= TOLERANCE[device]]
    if wrong:
        print(f"other results than PyTorch's: {', '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

"""Inference on several GPUs of one process, for ``run_many_gpus.py``.

    python benchmarks/many_gpus_inference.py COUNT SECONDS FILE

A thread for each of COUNT GPUs calls a stack that lies there: calls a second of one alone, and of all at once. Then
each thread calls all stacks in turns, and every result must be the bits of the first one. On a machine without a GPU
all are on the CPU.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from many_gpus_models import GPU, KIND, MODELS, batch_of, made

AHEAD = 4  # calls that a thread issues before it waits


def main() -> None:
    count, seconds, path = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
    devices = [torch.device("cuda", n) if GPU else torch.device("cpu") for n in range(count)]
    if not GPU:
        torch.set_num_threads(1)
    sizes = MODELS["speech"]
    rows = sizes.rows[-1]
    stacks = [made(sizes, "ecornn", device).stack.to(KIND).eval() for device in devices]
    inputs = [batch_of(sizes, rows, device)[0].to(KIND) for device in devices]

    def calls(number: int) -> None:
        for _ in range(AHEAD):
            stacks[number](inputs[number])
        if GPU:
            torch.cuda.synchronize(number)

    with torch.no_grad():
        wanted = stacks[0](inputs[0])[0].cpu()
    found = {"rows": rows, "one": rate(calls, 1, seconds), "all": rate(calls, count, seconds),
             "same_bits": in_turns(stacks, inputs, wanted, seconds / 4)}
    found |= {"gain": found["all"] / found["one"], "gpus": count}
    path.write_text(json.dumps(found))
    if not found["same_bits"]:
        sys.exit("threads that took devices in turns had other results")


def rate(calls: Callable[[int], None], threads: int, seconds: float) -> float:
    """Calls a second of so many threads together, each on its device."""
    ready, begun = threading.Barrier(threads + 1), []

    def work(number: int) -> int:
        with torch.no_grad():
            calls(number)
            ready.wait()
            done, end = 0, time.perf_counter() + seconds
            while time.perf_counter() < end:
                calls(number)
                done += AHEAD
        return done

    with ThreadPoolExecutor(threads) as pool:
        running = [pool.submit(work, number) for number in range(threads)]
        ready.wait()
        begun.append(time.perf_counter())
        done = sum(one.result() for one in running)
        return done / (time.perf_counter() - begun[0])


def in_turns(stacks: list[torch.nn.Module], inputs: list[torch.Tensor], wanted: torch.Tensor, seconds: float) -> bool:
    """Whether threads that call all stacks in turns, each begun with another one, have what is wanted every time."""
    def work(first: int) -> bool:
        end, number, same = time.perf_counter() + seconds, first, True
        with torch.no_grad():
            while time.perf_counter() < end:
                number = (number + 1) % len(stacks)
                same &= torch.equal(stacks[number](inputs[number])[0].cpu(), wanted)
        return same

    with ThreadPoolExecutor(len(stacks)) as pool:
        return all([*pool.map(work, range(len(stacks)))])


if __name__ == "__main__":
    main()

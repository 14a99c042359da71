"""A process of ``run_many_gpus.py``: what is compiled before, inference, or one of those that train on several GPUs.

    python benchmarks/many_gpus.py build 1 FILE
    WORLD_SIZE=2 python benchmarks/many_gpus.py inference 1 FILE
    RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python benchmarks/many_gpus.py deep 1 FILE

The first argument is ``build``, which compiles all modules into the build cache, on all cores; ``inference``,
``data_parallel`` or the name of a model, whose strong scaling is measured. Then come seconds for each point. The
process of rank 0 writes what is found to FILE, as JSON, after each thing that is. Without a GPU all are on the CPU.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from run_many_gpus import Stack
from side_by_side import relative
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ecornn.torch
from ecornn.layer_spec import LayerSpec
from ecornn.torch import engine as training
from ecornn.torch.compiling import KEPT
from ecornn.torch.kind import kind_of, text_of
from ecornn.torch.replacing import compile_all

LETTERS, BLANK = 29, 0
GPU = torch.cuda.is_available()
wait = torch.cuda.synchronize if GPU else lambda: None
KIND = torch.bfloat16 if GPU else torch.float32  # of autocast; weights and gradients are float32
autocast = partial(torch.autocast, "cuda" if GPU else "cpu", KIND, enabled=GPU, cache_enabled=False)
SIDES = {"ecornn": ecornn.torch.LSTM, "torch": nn.LSTM}
RANK, WORLD = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
DEVICE = torch.device("cuda", RANK) if GPU else torch.device("cpu")
FEW = 4  # blocks of NCCL's kernels, at most, where the others are left to the compiled ones
TOGETHER = 4  # steps that are timed as one: the host goes on while the GPU is at work
FEWEST, WARM = 5, 3
FLOAT32 = 2e-5  # relative, of gradients in float32
MESSAGES = [1 << shift for shift in range(18, 29, 2)]  # bytes of an all-reduce alone
AHEAD = 4  # calls that a thread issues before it waits


def main() -> None:
    part, seconds, path = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])
    found: dict[str, Any] = {}

    def note(**more: Any) -> None:
        found.update(more)
        if RANK == 0:
            path.write_text(json.dumps(found))

    if part == "build":
        return build(note)
    if not GPU:
        torch.set_num_threads(1)
    if part == "inference":
        return inference(seconds, note)
    if GPU:
        torch.cuda.set_device(DEVICE)
    if part == "data_parallel":
        data_parallel(seconds, note)
    else:
        scaling(part, seconds, note)
    distributed.barrier()
    distributed.destroy_process_group()


@dataclass(frozen=True)
class Sizes(Stack):
    """A model: layers of LSTM, and a linear layer on them; ``rows`` of the batch on a GPU, ascending, each twice the
    one before."""

    rows: tuple[int, ...]

    def stack(self, side: str, device: torch.device | str) -> nn.Module:
        return SIDES[side](self.I, self.H, self.layers, bidirectional=self.bidirectional, device=device)


MODELS = {"speech": Sizes(5, True, 300, 101, 800, (4, 8, 16, 32)),
          "deep": Sizes(7, False, 300, 768, 768, (4, 8, 16, 32))} if GPU else {
    "speech": Sizes(3, True, 12, 5, 16, (2, 4)), "deep": Sizes(3, False, 12, 16, 16, (2, 4))}


class Model(nn.Module):
    """x (T, B, I) to scores (T, B, LETTERS)."""

    def __init__(self, sizes: Sizes, side: str) -> None:
        super().__init__()
        self.stack = sizes.stack(side, "cpu")
        self.stack.wait = True  # else other processes would have it compiled at other times
        self.last = nn.Linear(sizes.H * (1 + sizes.bidirectional), LETTERS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.stack(x)[0]).log_softmax(-1)


def made(sizes: Sizes, side: str, device: torch.device) -> Model:
    """A model with the weights that all have."""
    torch.manual_seed(0)
    return Model(sizes, side).to(device)


Batch = tuple[torch.Tensor, torch.Tensor]


def batch_of(sizes: Sizes, batch: int, device: torch.device, seed: int = 1) -> Batch:
    """x (T, B, I) and letters (B, T // 4), the same in every process."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(sizes.T, batch, sizes.I, generator=random)
    letters = torch.randint(1, LETTERS, (batch, sizes.T // 4), generator=random)
    return x.to(device), letters.to(device)


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Connectionist temporal classification of the scores, averaged over the rows."""
    x, letters = batch
    scores = model(x)
    T, B = scores.shape[:2]
    return nn.functional.ctc_loss(scores if scores.dtype == torch.float64 else scores.float(), letters,
                                  torch.full((B,), T), torch.full((B,), letters.shape[1]), BLANK)


def step_of(model: nn.Module, batch: Batch, around: Callable[[], AbstractContextManager[None]] = nullcontext,
            update: bool = True) -> Callable[[], None]:
    """A training step of a model on one batch: forward, loss, backward, Adam; ``around`` it a context, such as
    DistributedDataParallel's ``no_sync``."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-4, fused=GPU)

    def step() -> None:
        model.zero_grad()
        with around():
            with autocast():
                loss = loss_of(model, batch)
            loss.backward()
        if update:
            optimizer.step()

    return step


def modules() -> Iterator[LayerSpec]:
    """The layers to compile, the longest first: whole stacks for one process, and layers alone for several."""
    dtype, kept = str(KIND).removeprefix("torch."), KEPT["cuda" if GPU else "cpu"]
    for name, sizes in MODELS.items():
        stack = sizes.stack("ecornn", "meta")
        layers = dict.fromkeys(text_of(stack, layer) for layer in range(sizes.layers))
        for rows in reversed(sizes.rows):
            for text in (text_of(stack), *(layers if rows < sizes.rows[-1] else ())):
                yield kind_of(text).spec(rows, sizes.T, dtype, "", kept)
        if name == "speech":
            yield kind_of(text_of(stack)).spec(sizes.rows[-1], sizes.T, dtype, "")  # for inference


def build(note: Callable[..., None]) -> None:
    """Compiles what the parts need."""
    begun, wanted = time.perf_counter(), [*modules()]
    compile_all([(spec, "cuda" if GPU else "cpu") for spec in wanted], len(os.sched_getaffinity(0)))
    note(modules=len(wanted), seconds=time.perf_counter() - begun)


def inference(seconds: float, note: Callable[..., None]) -> None:
    """Calls a second of one GPU's stack alone and of all at once, a thread each; and whether all have the same bits."""
    devices = [torch.device("cuda", n) if GPU else DEVICE for n in range(WORLD)]
    sizes, rows = MODELS["speech"], MODELS["speech"].rows[-1]
    stacks = [made(sizes, "ecornn", device).stack.to(KIND).eval() for device in devices]
    inputs = [batch_of(sizes, rows, device)[0].to(KIND) for device in devices]

    def calls(number: int) -> None:
        for _ in range(AHEAD):
            stacks[number](inputs[number])
        if GPU:
            torch.cuda.synchronize(number)

    with torch.no_grad():
        wanted = stacks[0](inputs[0])[0].cpu()
    one, all_ = rate(calls, 1, seconds), rate(calls, WORLD, seconds)
    same = in_turns(stacks, inputs, wanted, seconds / 4)
    note(rows=rows, one=one, all=all_, same_bits=same, gain=all_ / one, gpus=WORLD)
    if not same:
        sys.exit("threads that took devices in turns had other results")


def rate(calls: Callable[[int], None], threads: int, seconds: float) -> float:
    """Calls a second of so many threads together, each on its device."""
    ready = threading.Barrier(threads)

    @torch.no_grad()
    def work(number: int) -> float:
        calls(number)
        ready.wait()
        done, begun = 0, time.perf_counter()
        while time.perf_counter() < begun + seconds:
            calls(number)
            done += AHEAD
        return done / (time.perf_counter() - begun)

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(work, range(threads)))


def in_turns(stacks: list[torch.nn.Module], inputs: list[torch.Tensor], wanted: torch.Tensor, seconds: float) -> bool:
    """Tells whether threads that call all stacks in turns, each from another one on, always have what is wanted."""
    @torch.no_grad()
    def work(number: int) -> bool:
        end, same = time.perf_counter() + seconds, True
        while time.perf_counter() < end:
            number = (number + 1) % len(stacks)
            same &= torch.equal(stacks[number](inputs[number])[0].cpu(), wanted)
        return same

    with ThreadPoolExecutor(len(stacks)) as pool:
        return all([*pool.map(work, range(len(stacks)))])


def start() -> None:
    distributed.init_process_group("nccl" if GPU else "gloo", **({"device_id": DEVICE} if GPU else {}))


def take_turns(sides: Mapping[str, Callable[[], object]], seconds: float, together: bool = True) -> dict[str, Any]:
    """Milliseconds of a step of each side: median, 20th and 80th percentile of several, one side after the other; the
    time of the slowest process. ``together``: all processes take as many."""
    def clock(run: Callable[[], object]) -> float:
        wait()
        if together:
            distributed.barrier()
        begun = time.perf_counter()
        for _ in range(TOGETHER):
            run()
        wait()
        return (time.perf_counter() - begun) * 1e3 / TOGETHER

    for run in [*sides.values()] * WARM:
        run()
    turns = max(FEWEST, int(seconds / max(1e-6, sum(map(clock, sides.values())) * 1e-3 * TOGETHER)))
    if together:
        turns = int(agreed([turns], distributed.ReduceOp.MIN)[0])
    times = zip(*([*map(clock, sides.values())] for _ in range(turns)), strict=True)
    return {name: summary(agreed(values, distributed.ReduceOp.MAX) if together else values)
            for name, values in zip(sides, times, strict=True)}


def agreed(values: Sequence[float], how: Any) -> list[float]:
    """The least or most of each over all processes."""
    told = torch.tensor(values, dtype=torch.float64, device=DEVICE)
    distributed.all_reduce(told, how)
    return told.tolist()


def summary(times: Sequence[float]) -> dict[str, float]:
    percentiles = map(float, np.percentile(times, [50, 20, 80]))
    return dict(zip(("ms", "p20", "p80"), percentiles, strict=True), runs=len(times))


def scaling(name: str, seconds: float, note: Callable[..., None]) -> None:
    """A training step of the same batches on one GPU, which is shared out over the processes, and on all."""
    sizes = MODELS[name]
    models = {side: made(sizes, side, DEVICE) for side in SIDES}
    alone = {rows: take_turns({side: step_of(model, batch_of(sizes, rows, DEVICE)) for side, model in models.items()},
                              seconds, together=False) for rows in sizes.rows[RANK::WORLD]}
    start()
    everywhere: list[Any] = [None] * WORLD
    distributed.all_gather_object(everywhere, alone)
    bytes_ = sum(p.numel() * 4 for p in models["ecornn"].parameters())
    note(sizes={k: getattr(sizes, k) for k in ("layers", "bidirectional", "T", "I", "H")}, gradient_bytes=bytes_,
         one=dict(sorted((rows, times) for each in everywhere for rows, times in each.items())))
    parallel = {side: wrapped(model) for side, model in models.items()}
    many = {}
    for rows in sizes.rows[:-1]:
        batch = batch_of(sizes, rows, DEVICE, 1 + RANK)
        steps = {side: step_of(model, batch) for side, model in parallel.items()}
        # the same without communication
        steps |= {f"{side}_alone": step_of(model, batch, model.no_sync) for side, model in parallel.items()}
        many[rows] = take_turns(steps, seconds)
        note(many=many)
    note(all_reduce=take_turns({"all": partial(all_reduce, bytes_)}, seconds / 2)["all"])


def wrapped(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, **({"device_ids": [RANK]} if GPU else {"bucket_cap_mb": 0.01}))


_room: dict[int, torch.Tensor] = {}


def with_few_blocks(sizes: Sizes, part: Batch, step: Callable[[], None], count: int, seconds: float) -> dict[str, Any]:
    """A step with kernels of ``FEW`` blocks for what is exchanged, beside one with all of them: a persistent kernel,
    which waits for its whole grid to fit on the GPU, may find room beside few."""
    options = distributed.ProcessGroupNCCL.Options()
    options.config.max_ctas = FEW
    group = distributed.new_group(pg_options=options)
    model = DistributedDataParallel(made(sizes, "ecornn", DEVICE), device_ids=[RANK], process_group=group)
    return take_turns({"layer_by_layer": step_of(model, part), "all_blocks": step,
                       "all_reduce": partial(all_reduce, count, group=group)}, seconds)


def all_reduce(count: int, bucket: int = 25 << 20, group: Any = None) -> None:
    """Adds so many bytes up over all processes, a bucket of DistributedDataParallel's default size at a time."""
    for size in [bucket] * (count // bucket) + [count % bucket]:
        if size not in _room:
            _room[size] = torch.zeros(max(1, size // 4), device=DEVICE)
        distributed.all_reduce(_room[size], group=group)


def data_parallel(seconds: float, note: Callable[..., None]) -> None:
    """Gradients against one process with the whole batch; when they leave; what that gains; and sharded weights."""
    start()
    sizes = MODELS["speech"]
    rows = sizes.rows[len(sizes.rows) // 2 - 1]
    whole = batch_of(sizes, rows * WORLD, DEVICE)
    part = whole[0].chunk(WORLD, 1)[RANK].contiguous(), whole[1].chunk(WORLD)[RANK]
    parallel = wrapped(made(sizes, "ecornn", DEVICE))
    step_of(parallel, part, update=False)()
    found = [p.grad.clone() for p in parallel.parameters()]
    note(rows=rows, gradients=compared(sizes, found, whole))
    note(ready=leaving(sizes, part))
    step, alone = step_of(parallel, part), step_of(parallel, part, parallel.no_sync)
    bytes_ = sum(g.numel() * 4 for g in found)
    note(overlap=take_turns({"layer_by_layer": step, "one_node": one_node()(step), "layer_by_layer_alone": alone,
                             "one_node_alone": one_node()(alone), "all_reduce": partial(all_reduce, bytes_)}, seconds),
         gradient_bytes=bytes_)
    curve = take_turns({str(size): partial(all_reduce, size, size) for size in MESSAGES}, seconds / 2)
    note(messages={size: times["ms"] for size, times in curve.items()})
    try:
        if GPU:
            note(few_blocks=with_few_blocks(sizes, part, step, bytes_, seconds))
    except Exception as error:  # a setting that not every NCCL has
        note(few_blocks={"fault": f"{type(error).__name__}: {error}"})
    del parallel, step, alone
    note(sharded=sharded(sizes, part, found, seconds))


def compared(sizes: Sizes, found: list[torch.Tensor], whole: Batch) -> dict[str, Any]:
    """Relative errors against float64 of the gradients of several processes, of one with the whole batch, and of one
    that takes the parts of the others in turns: twice these are allowed, since parts whose gradients cancel have more
    rounding than their sum, whoever adds them up."""
    same = True
    for g in found:
        other = g.clone()
        distributed.broadcast(other, 0)
        same &= torch.equal(g, other)
    worst: dict[str, Any] = {"same_bits_everywhere": bool(agreed([float(same)], distributed.ReduceOp.MIN)[0])}
    if RANK == 0:
        exact = made(sizes, "torch", DEVICE).double()
        loss_of(exact, (whole[0].double(), whole[1])).backward()
        wanted = [p.grad for p in exact.parameters()]
        sides = [found]
        for count in (1, WORLD):
            model = made(sizes, "ecornn", DEVICE)
            for x, letters in zip(whole[0].chunk(count, 1), whole[1].chunk(count), strict=True):
                with one_node():
                    with autocast():
                        loss = loss_of(model, (x.contiguous(), letters)) / count
                    loss.backward()
            sides.append([p.grad for p in model.parameters()])
        many, one, in_turns = ([*map(relative, side, wanted)] for side in sides)
        shares = [e / (2 * limit + 1e-6 if GPU else FLOAT32) for e, limit in zip(many, in_turns, strict=True)]
        worst |= {"many": max(many), "one": max(one), "in_turns": max(in_turns), "most_of_limit": max(shares),
                  "within": worst["same_bits_everywhere"] and all(share <= 1 for share in shares)}
    distributed.barrier()
    return worst


def one_node() -> Any:
    """Stacks are one node of the graph within, or in a function that this decorates, not one for each layer."""
    return patch.object(training, "by_layer", lambda *_: False)


def leaving(sizes: Sizes, part: Batch) -> dict[str, Any]:
    """When buckets of gradients were ready in a backward pass, in milliseconds from its begin, that pass's end with all
    that is exchanged, and its end without: layer by layer, and with the whole stack as one node."""
    found, marks = {}, list[Any]()

    def hook(_, bucket):  # PyTorch refuses annotations that are texts
        marks.append(mark())
        return allreduce_hook(None, bucket)

    def backward(model: DistributedDataParallel) -> list[float]:
        model.zero_grad()
        with autocast():
            loss = loss_of(model, part)
        wait()
        marks[:] = [mark()]
        loss.backward()
        marks.append(mark())
        wait()
        return [marks[0].elapsed_time(m) if GPU else (m - marks[0]) * 1e3 for m in marks[1:]]

    for how in ("layer_by_layer", "one_node"):
        model = wrapped(made(sizes, "ecornn", DEVICE))
        model.register_comm_hook(None, hook)
        with one_node() if how == "one_node" else nullcontext():
            each = [backward(model) for _ in range(8)][3:]  # by then buckets are what they will stay
            with model.no_sync():
                alone = [backward(model)[-1] for _ in range(8)][3:]
        middle = [statistics.median(times) for times in zip(*each, strict=True)]
        found[how] = {"buckets_ms": middle[:-1], "backward_ms": middle[-1], "alone_ms": statistics.median(alone)}
    return found


def mark() -> Any:
    """A point in the work of the GPU, or in time."""
    return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True)) if GPU else (
        time.perf_counter())


def sharded(sizes: Sizes, part: Batch, wanted: list[torch.Tensor], seconds: float) -> dict[str, Any]:
    """The same gradients and steps with weights that are sharded between calls."""
    model: Model = made(sizes, "ecornn", DEVICE)
    fully_shard(model.stack)
    fully_shard(model)
    held = sum(p.to_local().numel() for p in model.parameters()) / sum(p.numel() for p in model.parameters())
    step_of(model, part, update=False)()
    gradients = [p.grad.full_tensor() for p in model.parameters()]
    errors = [relative(g, w.double()) for g, w in zip(gradients, wanted, strict=True)]
    return {"held": held, "largest_difference": max(errors), **take_turns({"step": step_of(model, part)}, seconds)}


if __name__ == "__main__":
    main()

"""One of the processes of ``run_many_gpus.py`` that train on several GPUs, each on its own.

    RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python benchmarks/many_gpus_training.py deep 1 FILE

The first argument is ``data_parallel`` or the name of a model, whose strong scaling is measured; then come seconds for
each point. The process of rank 0 writes what is found to FILE, as JSON, after each thing that is.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from many_gpus_models import GPU, MODELS, Batch, Model, Sizes, Step, autocast, batch_of, loss_of, made
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ecornn.torch import training

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("cuda", RANK) if GPU else torch.device("cpu")
FEW = 4  # blocks of NCCL's kernels, at most, where the others are left to the compiled ones
TOGETHER = 4  # steps that are timed as one: the host goes on while the GPU is at work
FEWEST, WARM = 5, 3
FLOAT32 = 2e-5  # relative, of gradients in float32
MESSAGES = [1 << shift for shift in range(18, 29, 2)]  # bytes of an all-reduce alone


def main() -> None:
    part, seconds, path = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])
    found: dict[str, Any] = {}

    def note(**more: Any) -> None:
        found.update(more)
        if RANK == 0:
            path.write_text(json.dumps(found))

    if GPU:
        torch.cuda.set_device(DEVICE)
    else:
        torch.set_num_threads(1)
    if part == "data_parallel":
        start()
        data_parallel(seconds, note)
    else:
        scaling(part, seconds, note)
    distributed.barrier()
    distributed.destroy_process_group()


def start() -> None:
    distributed.init_process_group("nccl" if GPU else "gloo", **({"device_id": DEVICE} if GPU else {}))


def wait() -> None:
    if GPU:
        torch.cuda.synchronize()


def take_turns(sides: Mapping[str, Callable[[], object]], seconds: float, together: bool = True) -> dict[str, Any]:
    """Milliseconds of a step of each side: median, 20th and 80th percentile of several, one side after the other; the
    time of the slowest process. ``together``: all processes take as many."""
    for run in sides.values():
        for _ in range(WARM):
            run()
    wait()
    begun = time.perf_counter()
    for run in sides.values():
        run()
        wait()
    turns = max(FEWEST, int(seconds / max(1e-6, (time.perf_counter() - begun) * TOGETHER)))
    if together:
        turns = int(agreed([turns], distributed.ReduceOp.MIN)[0])
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(turns):
        for name, run in sides.items():
            wait()
            if together:
                distributed.barrier()
            begun = time.perf_counter()
            for _ in range(TOGETHER):
                run()
            wait()
            times[name].append((time.perf_counter() - begun) * 1e3 / TOGETHER)
    return {name: summary(agreed(values, distributed.ReduceOp.MAX) if together else values)
            for name, values in times.items()}


def agreed(values: list[float], how: Any) -> list[float]:
    """The least or most of each over all processes."""
    told = torch.tensor(values, dtype=torch.float64, device=DEVICE)
    distributed.all_reduce(told, how)
    return told.tolist()


def summary(times: list[float]) -> dict[str, float]:
    p20, median, p80 = np.percentile(times, [20, 50, 80])
    return {"ms": float(median), "p20": float(p20), "p80": float(p80), "runs": len(times)}


def scaling(name: str, seconds: float, note: Callable[..., None]) -> None:
    """A training step of the same batches on one GPU, which is shared out over the processes, and on all."""
    sizes = MODELS[name]
    models = {side: made(sizes, side, DEVICE) for side in ("ecornn", "torch")}
    alone = {rows: take_turns({side: Step(model, batch_of(sizes, rows, DEVICE)) for side, model in models.items()},
                              seconds, together=False)
             for n, rows in enumerate(sizes.rows) if n % WORLD == RANK}
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
        steps = {side: Step(model, batch) for side, model in parallel.items()}
        # the same without communication
        steps |= {f"{side}_alone": Step(model, batch, model.no_sync) for side, model in parallel.items()}
        many[rows] = take_turns(steps, seconds)
        note(many=many)
    note(all_reduce=take_turns({"all": partial(all_reduce, bytes_)}, seconds / 2)["all"])


def wrapped(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, **({"device_ids": [RANK]} if GPU else {"bucket_cap_mb": 0.01}))


_room: dict[int, torch.Tensor] = {}


def with_few_blocks(sizes: Sizes, part: Batch, step: Step, count: int, seconds: float) -> dict[str, Any]:
    """A step with kernels of ``FEW`` blocks for what is exchanged, beside one with all of them: a persistent kernel,
    which waits for its whole grid to fit on the GPU, may find room beside few."""
    options = distributed.ProcessGroupNCCL.Options()
    options.config.max_ctas = FEW
    group = distributed.new_group(pg_options=options)
    model = DistributedDataParallel(made(sizes, "ecornn", DEVICE), device_ids=[RANK], process_group=group)
    return take_turns({"layer_by_layer": Step(model, part), "all_blocks": step,
                       "all_reduce": partial(all_reduce, count, group=group)}, seconds)


def all_reduce(count: int, bucket: int = 25 << 20, group: Any = None) -> None:
    """Adds so many bytes up over all processes, a bucket of DistributedDataParallel's default size at a time."""
    for size in [bucket] * (count // bucket) + [count % bucket]:
        if size not in _room:
            _room[size] = torch.zeros(max(1, size // 4), device=DEVICE)
        distributed.all_reduce(_room[size], group=group)


def data_parallel(seconds: float, note: Callable[..., None]) -> None:
    """Gradients against one process with the whole batch; when they leave; what that gains; and sharded weights."""
    sizes = MODELS["speech"]
    rows = sizes.rows[len(sizes.rows) // 2 - 1]
    whole = batch_of(sizes, rows * WORLD, DEVICE)
    part = whole[0].chunk(WORLD, 1)[RANK].contiguous(), whole[1].chunk(WORLD)[RANK]
    parallel = wrapped(made(sizes, "ecornn", DEVICE))
    Step(parallel, part, update=False)()
    found = [p.grad.clone() for p in parallel.parameters()]
    note(rows=rows, gradients=compared(sizes, found, whole))
    note(ready=leaving(sizes, part))

    def as_one_node(step: Step) -> None:
        before = training.by_layer
        training.by_layer = lambda *_: False  # type: ignore[assignment]
        try:
            step()
        finally:
            training.by_layer = before

    step, alone = Step(parallel, part), Step(parallel, part, parallel.no_sync)
    bytes_ = sum(g.numel() * 4 for g in found)
    sides = {"layer_by_layer": step, "one_node": partial(as_one_node, step), "layer_by_layer_alone": alone,
             "one_node_alone": partial(as_one_node, alone), "all_reduce": partial(all_reduce, bytes_)}
    note(overlap=take_turns(sides, seconds), gradient_bytes=bytes_)
    curve = take_turns({str(size): partial(all_reduce, size, size) for size in MESSAGES}, seconds / 2)
    note(messages={size: times["ms"] for size, times in curve.items()})
    try:
        if GPU:
            note(few_blocks=with_few_blocks(sizes, part, step, bytes_, seconds))
    except Exception as error:  # a setting that not every NCCL has
        note(few_blocks={"fault": f"{type(error).__name__}: {error}"})
    del parallel, step, alone, sides
    try:
        note(sharded=sharded(sizes, part, found, seconds))
    except Exception as error:
        note(sharded={"fault": f"{type(error).__name__}: {error}"})
        raise


def compared(sizes: Sizes, found: list[torch.Tensor], whole: Batch) -> dict[str, Any]:
    """Relative errors against float64 of the gradients of several processes, of one with the whole batch, and of one
    that takes the parts of the others in turns: twice these are allowed, since parts whose gradients cancel have more
    rounding than their sum, whoever adds them up."""
    same = True
    for g in found:
        other = g.clone()
        distributed.broadcast(other, 0)
        same &= torch.equal(g, other)
    same = bool(agreed([float(same)], distributed.ReduceOp.MIN)[0])
    worst = {"same_bits_everywhere": same}
    if RANK == 0:
        exact = made(sizes, "torch", DEVICE).double()
        loss_of(exact, (whole[0].double(), whole[1])).backward()
        wanted = [p.grad for p in exact.parameters()]
        before = training.by_layer
        training.by_layer = lambda *_: False  # type: ignore[assignment]
        sides = [found]
        for count in (1, WORLD):
            one = made(sizes, "ecornn", DEVICE)
            for x, letters in zip(whole[0].chunk(count, 1), whole[1].chunk(count), strict=True):
                with autocast():
                    loss = loss_of(one, (x.contiguous(), letters)) / count
                loss.backward()
            sides.append([p.grad for p in one.parameters()])
        training.by_layer = before
        errors = [[relative(g, e) for g, e in zip(side, wanted, strict=True)] for side in sides]
        limits = [2 * e + 1e-6 if GPU else FLOAT32 for e in errors[2]]
        worst |= {"many": max(errors[0]), "one": max(errors[1]), "in_turns": max(errors[2]),
                  "within": same and all(e <= limit for e, limit in zip(errors[0], limits, strict=True)),
                  "most_of_limit": max(e / limit for e, limit in zip(errors[0], limits, strict=True))}
    distributed.barrier()
    return worst


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    return ((value.double() - reference).norm() / reference.norm()).item()


def leaving(sizes: Sizes, part: Batch) -> dict[str, Any]:
    """When buckets of gradients were ready in a backward pass, in milliseconds from its begin, that pass's end with all
    that is exchanged, and its end without: layer by layer, and with the whole stack as one node."""
    found = {}
    for how in ("layer_by_layer", "one_node"):
        before = training.by_layer
        if how == "one_node":
            training.by_layer = lambda *_: False  # type: ignore[assignment]
        marks: list[Any] = []
        model = wrapped(made(sizes, "ecornn", DEVICE))
        model.register_comm_hook(None, lambda _, bucket, marks=marks: (marks.append(mark()),
                                                                       allreduce_hook(None, bucket))[1])

        def backward(model: DistributedDataParallel = model, marks: list[Any] = marks) -> list[float]:
            with autocast():
                loss = loss_of(model, part)
            wait()
            marks.clear()
            begun = mark()
            loss.backward()
            end = mark()
            wait()
            for p in model.parameters():
                p.grad = None
            return [since(begun, m) for m in (*marks, end)]

        each = [backward() for _ in range(8)][3:]  # by then buckets are what they will stay
        with model.no_sync():
            alone = [backward()[-1] for _ in range(8)][3:]
        training.by_layer = before
        middle = [statistics.median(times) for times in zip(*each, strict=True)]
        found[how] = {"buckets_ms": middle[:-1], "backward_ms": middle[-1], "alone_ms": statistics.median(alone)}
    return found


def mark() -> Any:
    """A point in the work of the GPU, or in time."""
    if not GPU:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def since(begun: Any, end: Any) -> float:
    return begun.elapsed_time(end) if GPU else (end - begun) * 1e3


def sharded(sizes: Sizes, part: Batch, wanted: list[torch.Tensor], seconds: float) -> dict[str, Any]:
    """The same gradients and steps with weights that are sharded between calls."""
    model: Model = made(sizes, "ecornn", DEVICE)
    fully_shard(model.stack)
    fully_shard(model)
    held = sum(p.to_local().numel() for p in model.parameters()) / sum(p.numel() for p in model.parameters())
    Step(model, part, update=False)()
    gradients = [p.grad.full_tensor() for p in model.parameters()]
    errors = [relative(g, w.double()) for g, w in zip(gradients, wanted, strict=True)]
    return {"held": held, "largest_difference": max(errors), **take_turns({"step": Step(model, part)}, seconds)}


if __name__ == "__main__":
    main()

"""One of two processes that train a stack with the same weights, each on half of the batch; see
test_torch_distributed.py.

    python tests/torch/distributed_steps.py RANK FILE
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from small_tiles import take_small_tiles
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ecornn.torch
from ecornn.torch import operator, training


class Model(nn.Module):
    """A stack, and what reads its y."""

    def __init__(self, stack: nn.Module, width: int) -> None:
        super().__init__()
        self.stack, self.last = stack, nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.stack(x)[0])


def data_parallel(model: Model, xs: list[torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The weights after training on this process's part of each x; and what happened in the last step, in order:
    ``backward of N`` of so many weights, and ``bucket`` with the weights whose gradients left together."""
    happened: list[str] = []
    names = {id(p): name for name, p in model.named_parameters()}

    def send(bucket: Any) -> Any:
        happened.append("bucket " + " ".join(names[id(p)] for p in bucket.parameters()))
        sent = torch.distributed.all_reduce(bucket.buffer().div_(2), async_op=True)
        return sent.get_future().then(lambda future: future.value()[0])

    def backward(engine: Any, weights: Any, *arguments: Any, **named: Any) -> Any:
        happened.append(f"backward of {len(weights)}")
        return training.backward(engine, weights, *arguments, **named)

    operator.training = type("Watched", (), {"forward": training.forward, "backward": backward})
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.004)
    parallel.register_comm_hook(None, lambda _, bucket: send(bucket))
    train(parallel, xs, happened)
    operator.training = training
    return {name: value.clone() for name, value in model.state_dict().items()}, happened


def sharded(model: Model, xs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights after the same, of which each process has half between two calls."""
    fully_shard(model.stack)
    fully_shard(model)
    assert all(p.to_local().numel() < p.numel() for p in model.stack.parameters())
    train(model, xs, [])
    model.eval()
    with torch.no_grad():
        model(xs[0])
        model.stack.reshard()
    assert all(p.to_local().numel() < p.numel() for p in model.stack.parameters())
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def train(model: nn.Module, xs: list[torch.Tensor], happened: list[str]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in xs:
        happened.clear()
        optimizer.zero_grad()
        model(x.chunk(2, 1)[torch.distributed.get_rank()]).square().mean().backward()
        optimizer.step()


def main() -> None:
    rank, file = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    take_small_tiles()
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}.store", rank=rank, world_size=2)
    given = torch.load(file)

    def model() -> Model:
        made = Model(ecornn.torch.GRU(*given["sizes"], bidirectional=True), 2 * given["sizes"][1])
        made.load_state_dict(given["weights"])
        return made

    weights, happened = data_parallel(model(), given["x"])
    torch.save((weights, happened, sharded(model(), given["x"])), Path(f"{file}{rank}"))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

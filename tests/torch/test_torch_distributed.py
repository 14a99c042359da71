"""Stacks in two processes of torch.distributed, as they are: the weights that one process has with the whole batch.

As a program: one of the two processes, which train a stack with the same weights, each on half of the batch.

    python tests/torch/test_torch_distributed.py RANK FILE"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_tiles import take_small_tiles
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch_values import BACKWARD, close, error

import ecornn.torch
from ecornn.torch.engine import Engine, by_layer
from ecornn.torch.replacing import specs

T, B, I, H, L = 7, 4, 5, 8, 3
EACH = 8  # weights of a layer in both directions
pytestmark = pytest.mark.usefixtures("one_thread")


class Model(nn.Module):
    def __init__(self, stack: nn.Module, width: int) -> None:
        super().__init__()
        self.stack, self.last = stack, nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.stack(x)[0])


def data_parallel(model: Model, xs: list[torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Weights after training on parts of each x, and the last step's events: ``backward of N``, ``bucket``."""
    happened: list[str] = []
    names = {id(p): name for name, p in model.named_parameters()}
    def send(bucket: Any) -> Any:
        happened.append("bucket " + " ".join(names[id(p)] for p in bucket.parameters()))
        sent = torch.distributed.all_reduce(bucket.buffer().div_(2), async_op=True)
        return sent.get_future().then(lambda future: future.value()[0])

    def watched(engine: Any, weights: Any, *arguments: Any, **named: Any) -> Any:
        happened.append(f"backward of {len(weights)}")
        return backward(engine, weights, *arguments, **named)
    backward, Engine.backward = Engine.backward, watched
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.004)
    parallel.register_comm_hook(None, lambda _, bucket: send(bucket))
    train(parallel, xs, happened)
    Engine.backward = backward
    return {name: value.clone() for name, value in model.state_dict().items()}, happened


def sharded(model: Model, xs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
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
        model(x).square().mean().backward()
        optimizer.step()


def in_one_process() -> None:
    rank, file = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    take_small_tiles()
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}.store", rank=rank, world_size=2)
    given = torch.load(file)
    xs = [x.chunk(2, 1)[rank] for x in given["x"]]
    def model() -> Model:
        made = Model(ecornn.torch.GRU(*given["sizes"], bidirectional=True), 2 * given["sizes"][1])
        made.load_state_dict(given["weights"])
        return made
    torch.save((*data_parallel(model(), xs), sharded(model(), xs)), Path(f"{file}{rank}"))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    torch.manual_seed(0)
    model = Model(torch.nn.GRU(I, H, L, bidirectional=True), 2 * H)
    xs, file = [torch.randn(T, B, I) for _ in range(3)], str(tmp_path_factory.mktemp("two") / "given")
    torch.save({"sizes": (I, H, L), "weights": model.state_dict(), "x": xs}, file)
    environment = os.environ | {"ECORNN_STRICT": "1", "GLOO_SOCKET_IFNAME": "lo",
                                "PYTHONPATH": os.pathsep.join(sys.path)}
    made = [subprocess.Popen([sys.executable, "-W", "ignore", __file__, str(rank), file], env=environment)
            for rank in range(2)]
    train(model.double(), [x.double() for x in xs], [])
    assert [process.wait() for process in made] == [0, 0]
    return model.state_dict(), *(torch.load(f"{file}{rank}") for rank in range(2))


@pytest.mark.parametrize("which", [0, 2], ids=["data parallel", "sharded"])
def test_two_processes_train_as_one_with_the_whole_batch(trained, which: int):
    exact, first, second = trained[0], trained[1][which], trained[2][which]
    for name, wanted in exact.items():
        assert torch.equal(first[name], second[name]) and error(first[name], wanted) < BACKWARD


def test_gradients_leave_layer_by_layer(trained):
    """The last layer's are on their way before the first one's are computed."""
    for _, happened, _ in trained[1:]:
        computed, left = 0, dict[str, int]()
        for event in happened:
            what, *names = event.split()
            if what == "backward":
                assert names == ["of", str(EACH)]
                computed += 1
            else:
                left |= dict.fromkeys(names, computed)
        assert computed == L
        for name, after in left.items():
            if name.startswith("stack."):
                layer = int(name.split("_l")[1][0])
                assert L - layer <= after <= L - layer + (layer > 0), happened
        assert min(after for name, after in left.items() if "_l2" in name) == 1


def test_hooks_of_weights_have_a_stack_go_layer_by_layer():
    layer, x, order = ecornn.torch.RNN(I, H, 2), torch.randn(T, B, I), []
    y, state = layer(x)
    (y.sum() + state.square().sum()).backward()
    wanted = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    assert not by_layer(layer, layer.parameters())
    for name, p in layer.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: order.append((name, layer.weight_hh_l0.grad is None)))
    again, other = layer(x)
    assert torch.equal(again, y) and torch.equal(other, state)
    (again.sum() + other.square().sum()).backward()
    assert len(order) == 8 and all("_l1" in name and waits for name, waits in order[:4]), order
    close([p.grad for p in layer.parameters()], wanted, BACKWARD)
    assert [spec.workload.input for spec, _ in specs(layer, x, None)] == [I, H]


if __name__ == "__main__":
    in_one_process()

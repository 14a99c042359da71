"""Stacks in two processes of torch.distributed, as they are: the weights that one process has with the whole batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from distributed_steps import Model
from test_torch_layers import error

import ecornn.torch
from ecornn.torch import training
from ecornn.torch.replacing import Call, specs

T, B, I, H, L = 7, 4, 5, 8, 3
FLOAT32 = 2e-5  # relative, of steps in float32 against float64
EACH = 8  # weights of a layer in both directions
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    """What float64 has after three steps, and each process of what it saves."""
    torch.manual_seed(0)
    model = Model(torch.nn.GRU(I, H, L, bidirectional=True), 2 * H)
    xs, file = [torch.randn(T, B, I) for _ in range(3)], str(tmp_path_factory.mktemp("two") / "given")
    torch.save({"sizes": (I, H, L), "weights": model.state_dict(), "x": xs}, file)
    environment = os.environ | {"ECORNN_STRICT": "1", "GLOO_SOCKET_IFNAME": "lo",
                                "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(__file__).with_name("distributed_steps.py")
    made = [subprocess.Popen([sys.executable, "-W", "ignore", script, str(rank), file], env=environment)
            for rank in range(2)]
    model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in xs:
        optimizer.zero_grad()
        model(x.double()).square().mean().backward()
        optimizer.step()
    assert [process.wait() for process in made] == [0, 0]
    return model.state_dict(), *(torch.load(f"{file}{rank}") for rank in range(2))


def test_distributed_data_parallel_trains_as_one_process_with_the_whole_batch(trained):
    exact, (first, *_), (second, *_) = trained
    for name, wanted in exact.items():
        assert torch.equal(first[name], second[name]) and error(first[name], wanted) < FLOAT32


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


def test_sharded_weights_train_the_same(trained):
    exact, (*_, first), (*_, second) = trained
    for name, wanted in exact.items():
        assert torch.equal(first[name], second[name]) and error(first[name], wanted) < FLOAT32


def test_hooks_of_weights_have_a_stack_go_layer_by_layer():
    layer, x, order = ecornn.torch.RNN(I, H, 2), torch.randn(T, B, I), []
    y, state = layer(x)
    (y.sum() + state.square().sum()).backward()
    wanted = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    assert not training.by_layer(layer, layer.parameters())
    for name, p in layer.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: order.append((name, layer.weight_hh_l0.grad is None)))
    again, other = layer(x)
    assert torch.equal(again, y) and torch.equal(other, state)
    (again.sum() + other.square().sum()).backward()
    assert len(order) == 8 and all("_l1" in name and waits for name, waits in order[:4]), order
    for p, before in zip(layer.parameters(), wanted, strict=True):
        assert error(p.grad, before.double()) < FLOAT32
    call = Call(T, B, "float32", "", "cpu", True, None)
    assert [spec.workload.input for spec in specs(layer, call)] == [I, H]

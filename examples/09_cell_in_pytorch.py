"""A step that is written in PyTorch, trained as a layer of compiled kernels: the loop's results, and the time of both.

    pip install ".[examples]"    # in the checkout
    python examples/09_cell_in_pytorch.py [--steps 20]

The step is the minimal gated unit of Zhou et al. 2016 with layer normalization, a module whose `forward` is one step.
The program exits with 1 if outputs or gradients differ from those of the loop, or if the layer learns nothing. On a CPU
it takes two minutes at most.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
from stages import stage
from torch import nn

import ecornn.torch

T, B, I, H = 60, 16, 32, 96


class MinimalGatedUnit(nn.Module):
    """One step, written without ecornn."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.of_x = nn.Linear(input_size, 2 * hidden_size)
        self.of_h = nn.Linear(hidden_size, hidden_size)
        self.of_kept = nn.Linear(hidden_size, hidden_size, bias=False)
        self.norm = nn.LayerNorm(hidden_size)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        gate, new = self.of_x(x).chunk(2, -1)
        forget = torch.sigmoid(gate + self.of_h(h))
        new = torch.tanh(self.norm(new + self.of_kept(forget * h)))
        return h + forget * (new - h)


def loop(step: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """y (T, B, H) in PyTorch: one call of the module for each step."""
    h, y = x.new_zeros(x.shape[1], H), []
    for row in x:
        h = step(row, h)
        y.append(h)
    return torch.stack(y)


def gradients(forward: Callable[[], torch.Tensor], parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """The gradients of the mean square of y."""
    return list(torch.autograd.grad(forward().square().mean(), parameters))


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).detach().norm() / wanted.detach().norm())


def seconds(run: Callable[[], object]) -> float:
    """The median of five runs."""
    times = []
    for _ in range(6):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return sorted(times[1:])[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="training steps [20]")
    torch.manual_seed(0)
    step, x = MinimalGatedUnit(I, H), torch.randn(T, B, I)

    with stage("tracing the step and comparing it with the module"):
        cell = ecornn.torch.cell(step)
    layer = ecornn.torch.Recurrent(cell, I, H)  # with parameters of its own, named as the cell's
    with torch.no_grad():
        for name, value in cell.weights().items():
            layer.get_parameter(name).copy_(torch.as_tensor(value))
    names = {name: f"{name.replace('.', '_')}_l0" for name, _ in step.named_parameters()}
    ours = [layer.get_parameter(names[name]) for name, _ in step.named_parameters()]

    with stage("compiling and first calls"):
        off = error(layer(x)[0], loop(step, x))
        theirs = gradients(lambda: loop(step, x), list(step.parameters()))
        of_gradients = max(error(a.reshape(b.shape), b)
                           for a, b in zip(gradients(lambda: layer(x)[0], ours), theirs, strict=True))
    print(f"y differs from the loop by {off:.1e}, gradients by {of_gradients:.1e}")
    with stage("timing"):
        there = seconds(lambda: gradients(lambda: loop(step, x), list(step.parameters())))
        here = seconds(lambda: gradients(lambda: layer(x)[0], ours))
    print(f"forward and backward: the loop {there * 1e3:.1f} ms, compiled {here * 1e3:.1f} ms, "
          f"{there / here:.1f} times as fast")

    target = torch.roll(x[..., :1], 3, 0)  # the value of x three steps before
    read = nn.Linear(H, 1)
    optimizer = torch.optim.Adam([*layer.parameters(), *read.parameters()], 1e-2)
    losses = []
    with stage("training"):
        for _ in range(parser.parse_args().steps):
            loss = (read(layer(x)[0]) - target)[3:].square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")
    return int(not (off < 1e-5 and of_gradients < 1e-4 and losses[-1] < losses[0]))


if __name__ == "__main__":
    sys.exit(main())

"""Shared by the examples of training: a training step, plain or as a CUDA graph, with its time and its memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
AUTOCAST = torch.bfloat16 if DEVICE == "cuda" else None  # on CPUs compiled layers are for float32
Criterion = Callable[..., torch.Tensor]  # (model's output, *targets) -> loss


class Step:
    """A training step of a model: loss, gradients, clipping, Adam.

    Parameters
    ----------
    criterion : (model's output, *targets) -> loss
    inputs, targets : of the model and the criterion; they are copied into buffers, which :meth:`load` fills again
    rate : learning rate of Adam
    clip : the largest norm of all gradients together
    kind : data type of ``torch.autocast``, or None for float32

    Attributes
    ----------
    loss : the loss of the last step, 0-dimensional
    """

    def __init__(self, model: nn.Module, criterion: Criterion, inputs: Sequence[torch.Tensor],
                 targets: Sequence[torch.Tensor], rate: float = 1e-3, clip: float = 1.0,
                 kind: torch.dtype | None = AUTOCAST) -> None:
        self.model, self.criterion, self.clip, self.kind = model, criterion, clip, kind
        self.inputs, self.targets = [t.clone() for t in inputs], [t.clone() for t in targets]
        self.optimizer = torch.optim.Adam(model.parameters(), rate, fused=True, capturable=self.inputs[0].is_cuda)

    def load(self, inputs: Iterable[torch.Tensor], targets: Iterable[torch.Tensor]) -> None:
        """Copies another batch into the buffers."""
        for buffer, value in zip([*self.inputs, *self.targets], [*inputs, *targets], strict=True):
            buffer.copy_(value)

    def autocast(self) -> torch.autocast:
        """The context in which the model and its loss compute."""
        # without its cache, weights are cast in each step, also in each replay of a graph
        return torch.autocast(self.inputs[0].device.type, self.kind, self.kind is not None, cache_enabled=False)

    def forward(self) -> torch.Tensor:
        with self.autocast():
            return self.model(*self.inputs)

    def judge(self, output: torch.Tensor) -> torch.Tensor:
        """The gradient of the loss with respect to the model's output."""
        leaf = output.detach().requires_grad_()
        with self.autocast():
            loss = self.criterion(leaf, *self.targets)
        self.loss = loss.detach()
        return torch.autograd.grad(loss, leaf)[0]

    def backward(self, output: torch.Tensor, gradient: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        output.backward(gradient)

    def gradients(self) -> None:
        """Computes the loss and the gradients of all parameters, without the update."""
        output = self.forward()
        self.backward(output, self.judge(output))

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()

    def __call__(self) -> torch.Tensor:
        self.gradients()
        self.update()
        return self.loss

    def graphed(self, with_loss: bool = True) -> Callable[[], torch.Tensor]:
        """The step as one CUDA graph, or as two around a loss that cannot be captured. It makes a few steps first."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self()
            gradient = None if with_loss else self.judge(self.forward())
        torch.cuda.current_stream().wait_stream(side)
        if gradient is None:
            whole, loss = captured(self)

            def run() -> torch.Tensor:
                whole.replay()
                return loss
        else:
            before, output = captured(self.forward)
            after, _ = captured(lambda: (self.backward(output, gradient), self.update()), before.pool())

            def run() -> torch.Tensor:
                before.replay()
                gradient.copy_(self.judge(output))
                after.replay()
                return self.loss
        return run


def captured(function: Callable[[], Any], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of one call, and the call's result, which each replay overwrites."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool):
        found = function()
    return graph, found


def take_turns(sides: Mapping[str, Callable[[], object]], seconds: float, together: int = 1,
               fewest: int = 5) -> dict[str, list[float]]:
    """Times of each side in seconds a run; the sides are interleaved, and ``together`` runs are timed as one."""
    wait = torch.cuda.synchronize if DEVICE == "cuda" else lambda: None
    found: dict[str, list[float]] = {name: [] for name in sides}
    for run in sides.values():
        run()  # warms up
    end, turns = time.perf_counter() + seconds, 0
    while time.perf_counter() < end or turns < fewest:
        turns += 1
        for name, run in sides.items():
            wait()
            start = time.perf_counter()
            for _ in range(together):
                run()
            wait()
            found[name].append((time.perf_counter() - start) / together)
    return found


def middle(times: Sequence[float]) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile."""
    ordered = sorted(times)
    p20, median, p80 = (ordered[round(part * (len(ordered) - 1))] for part in (0.2, 0.5, 0.8))
    return median, p20, p80


def memory_by_layer(model: nn.Module, step: Callable[[], torch.Tensor]) -> dict[str, int]:
    """Bytes that each child of a model saves for the backward pass while ``step`` runs forward: the tensors that
    autograd holds, each once, without the parameters. The name "" has the bytes saved outside of all children."""
    found = dict.fromkeys([*(name for name, _ in model.named_children()), ""], 0)
    open_, seen = [""], {p.untyped_storage().data_ptr() for p in model.parameters()}
    alive = []  # if memory were used twice, the second tensor in it would not be counted

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            alive.append(tensor.detach())
            found[open_[-1]] += storage.nbytes()
        return tensor.detach()

    hooks = [hook for name, child in model.named_children() for hook in
             (child.register_forward_pre_hook(lambda *_, name=name: open_.append(name)),
              child.register_forward_hook(lambda *_: open_.pop() and None))]
    try:
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            step()
    finally:
        for hook in hooks:
            hook.remove()
    return {name: size for name, size in found.items() if name or size}


def peak(step: Callable[[], object]) -> int:
    """The most bytes of a GPU that a step takes, without those allocated before it."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["allocated_bytes.all.current"]
    step()
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["allocated_bytes.all.peak"] - before

"""A layer as a loop over its step, an operation of PyTorch after the other, as those write it who have no kernel."""

from __future__ import annotations

from typing import Any

from ecornn.bench.sides import Weights
from ecornn.bench.torch_step import torch_step
from ecornn.cells import Cell
from ecornn.interpreter import output_numbers
from ecornn.workload import Part, Stack, Workload


class StepLoop:
    """A function from x (T, B, I) and weights to y (T, B, D*O*H), from zero states; every layer and direction of a
    stack.

    Its operations are PyTorch's, so that autograd has the gradients. Only values of the weights alone are computed
    outside the loop.

    Raises :class:`~ecornn.errors.CellError` for a step that uses what PyTorch has no operation for.
    """

    def __init__(self, cell: Cell, work: Workload, stack: Stack, rows: int, kind: str, dtype: str) -> None:
        import torch

        self.torch, self.cell, self.stack, self.rows = torch, cell, stack, rows
        self.device, self.dtype = "cuda" if kind == "cuda" else "cpu", getattr(torch, dtype)
        self.hidden, self.outputs = work.hidden, output_numbers(cell)
        self.parts = stack.parts(work)
        self.steps = {width: torch_step(cell, width, work.hidden, rows).functions(self.device, self.dtype)
                      for width in {part.workload.input for part in self.parts}}

    def tensors(self, weights: Weights) -> dict[str, Any]:
        """The weights as parameters, which have gradients."""
        return {name: self.torch.as_tensor(value).to(self.device, self.dtype).requires_grad_()
                for name, value in weights.items()}

    def __call__(self, x: Any, weights: Weights) -> Any:
        y = x
        for layer in range(self.stack.layers):
            directions = [self.sequence(part, y, weights) for part in self.parts if part.layer == layer]
            y = self.torch.cat(directions, 2) if len(directions) > 1 else directions[0]
        return y

    def sequence(self, part: Part, x: Any, weights: Weights) -> Any:
        """One layer in one direction."""
        prepare, step = self.steps[part.workload.input]
        own = self.cell.own_input(part.workload.input, self.hidden)
        prepared = prepare([weights[self.cell.parameter_name(name, part.layer, part.second)].reshape(tuple(shape))
                            for name, shape in self.cell.parameters(own, self.hidden).items()])
        states = [x.new_zeros(self.rows, self.hidden) for _ in self.cell.states]
        y: list[Any] = [None] * len(x)
        rows = x.unbind(0)
        for t in reversed(range(len(x))) if part.traversal.reverse else range(len(x)):
            returned = step(rows[t], states, prepared)
            states = returned[:len(states)]
            outputs = [returned[n] for n in self.outputs]
            y[t] = self.torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0]
        return self.torch.stack(y)

"""``TracedCell``: the cell of a step that is written in PyTorch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ecornn.cells import Cell
from ecornn.cells.base import Shape
from ecornn.cells.deriving import flat_shape
from ecornn.errors import CellError
from ecornn.torch.traced_graph import Learned, Traced, export
from ecornn.torch.traced_step import Walk
from ecornn.torch.traced_values import Sizes
from ecornn.torch.traced_weights import Matrix, Source, Use, Weights


class TracedCell(Cell):
    """A cell that :func:`ecornn.torch.cell` has made; ``traced`` is the step, ``read`` the weights that it reads."""

    def __init__(self, traced: Traced) -> None:
        from tvm import te

        self.traced, self.graph = traced, export(traced)
        self.own = self.graph.sizes
        uses: dict[Use, Any] = {}

        def parameter(use: Use) -> Any:
            shape = use.shape(traced.input, traced.hidden)
            return uses.setdefault(use, te.placeholder(shape, "float32", name="weights"))

        x = te.placeholder((3, traced.input), "float32", name="x")
        before = [te.placeholder((3, traced.hidden), "float32", name=n) for n in traced.states]
        results = Walk(self.graph, x, before, parameter).results(len(before))
        self.read = Weights(self.graph, list(uses))
        self.states, self.shown = traced.states, len(results) - len(before)  # 1: y is none of the states
        if self.shown:
            self.states, self.output = ("y", *traced.states), "y"
            if "y" in traced.states:
                raise CellError(f"cell {self.name!r}: a state is called y, as the output before the states would be")
        self.unread = tuple(self.read.names.values())  # a product may have gates that the step leaves out
        learned = {name: source.learned for name, source in self.read.direct.items()} | self.read.originals
        self.buffers = {name: one.value for name, one in learned.items() if one.kind == "buffer"}
        self.frozen = {name: one.value for name, one in learned.items() if one.kind == "parameter" and not (
            one.value.requires_grad)}

    def walk(self, x: Any, states: Sequence[Any], parameters: Mapping[str, Any]) -> Walk:
        """The step on te tensors, at any I and H."""
        return Walk(self.graph, x, states[self.shown:], lambda use: parameters[self.read.names[use]])

    def step(self, x: Any, states: Sequence[Any], parameters: Mapping[str, Any]) -> Sequence[Any]:
        """The module's step on te tensors; see :meth:`ecornn.Cell.step`."""
        return self.walk(x, states, parameters).results(len(self.traced.states))

    def parameters(self, input: int, hidden: int) -> dict[str, Shape]:
        """The shapes of the parameters that the step reads, by name."""
        return {name: use.shape(input, hidden) for use, name in self.read.names.items()}

    def learned(self, input: int, hidden: int) -> dict[str, Shape]:
        """The shapes of the module's weights by name, gates first; tensors that it computes weights of, as it stores
        them.

        Raises :class:`~ecornn.errors.CellError` if such tensors have the module's sizes alone.
        """
        shapes = {name: source.use.shape(input, hidden) for name, source in self.read.direct.items()}
        for name, original in self.read.originals.items():
            shape = tuple(original.value.shape)
            if (input, hidden) != (self.own.input, self.own.hidden) and not {*shape} <= {1}:
                raise CellError(f"cell {self.name!r}: {original.name} {shape} is not for I = {input}, H = {hidden}: "
                                "what is computed of weights has the sizes of the module, "
                                f"I = {self.own.input} and H = {self.own.hidden}")
            shapes[name] = _axes(shape)
        return shapes

    def derived(self, p: Mapping[str, Any], xp: Any) -> dict[str, Any]:
        """The weights that the module computes of its learned ones, ``p``, arrays of NumPy or PyTorch."""
        if not self.read.derived:
            return {}
        given = {name: torch.from_numpy(v) if xp is np else v for name, v in p.items()}
        if not all(isinstance(tensor, torch.Tensor) for tensor in given.values()):
            raise TypeError("its weights are computed by PyTorch; pass arrays of NumPy or PyTorch")
        like = next(iter(given.values()), torch.empty(0))
        values = {name: given[name].reshape(one.value.shape) for name, one in self.read.originals.items()}
        weights = self.read.computed(values, like)
        return {name: v.numpy() if xp is np else v for name, v in weights.items()}

    def sample(self, name: str, shape: Shape, rng: Any) -> Any:
        """The module's own values, repeated or cut for other sizes."""
        source = self.read.direct.get(name)
        value = (source.learned if source else self.read.originals[name]).value
        return np.resize(value.detach().double().cpu().numpy(), shape)

    def weights(self, module: Any = None, layer: int = 0, reverse: bool = False) -> dict[str, torch.Tensor]:
        """The weights of a module, by default the one that was traced, as those of a layer, by name.

        They are for ``load_state_dict`` of an :class:`ecornn.torch.Recurrent`, and through :func:`ecornn.derive` for
        :meth:`Module.bind`. They share the module's memory unless they are parts of a tensor, or vectors of less than H
        values.
        """
        known = {} if module is None else dict(module.named_parameters(remove_duplicate=False)) | dict(
            module.named_buffers(remove_duplicate=False))

        def value(learned: Learned) -> torch.Tensor:
            return known.get(learned.name, learned.value).detach()

        weights = {name: self._flat(source.use.of(value(source.learned), self._sizes(value(source.learned), source)))
                   for name, source in self.read.direct.items()}
        weights |= {name: self._flat(value(original).reshape(_axes(tuple(original.value.shape))))
                    for name, original in self.read.originals.items()}
        return {self.parameter_name(name, layer, reverse): weight for name, weight in weights.items()}

    def _sizes(self, value: torch.Tensor, source: Source) -> Sizes:
        """The sizes of the module that has this weight, which may be larger than the traced one."""
        hidden, rows = self.own.hidden, source.use.shape(self.own.input, self.own.hidden)
        if value.shape[0] != source.learned.value.shape[0] and rows[1] == hidden:
            hidden = value.shape[0] // rows[0]
        input = value.shape[1] if value.dim() == 2 and isinstance(source.use, Matrix) and source.use.widths == (
            "I",) else self.own.input
        return Sizes(self.own.batch, input, hidden)

    @staticmethod
    def _flat(value: torch.Tensor) -> torch.Tensor:
        return value.reshape(flat_shape(tuple(value.shape)))


def _axes(shape: Shape) -> Shape:
    """The two or three axes of a learned tensor's shape."""
    if len(shape) <= 2:
        return (1, *shape) if shape else (1, 1)
    return 1, shape[0], math.prod(shape[1:])

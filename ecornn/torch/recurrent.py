"""``Recurrent``: a cell of one's own as a layer of a PyTorch model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from ecornn.boundary import public
from ecornn.cells import Cell, get
from ecornn.cells.base import derives, learned_shapes
from ecornn.errors import ArgumentError, ShapeError
from ecornn.torch import engine
from ecornn.torch.compiling import checked_keep
from ecornn.torch.engine import Derived
from ecornn.torch.kind import kind_of, name_of, text_of
from ecornn.torch.modules import Sequences
from ecornn.workload import by_output


class Recurrent(Sequences):
    """A recurrent layer of any cell, or a stack of them, called as ``torch.nn``'s are.

    Parameters
    ----------
    cell : a :class:`ecornn.Cell`, or the name of a built-in one, also with options, as ``lstm(peepholes)``
    input_size, hidden_size : I and H
    num_layers, batch_first, dropout, bidirectional : the options of ``torch.nn.LSTM``
    tf32 : whether products of float32 on a GPU may be in TF32; None: they may if cuDNN's RNNs may
    keep : the values that a training step keeps, see :func:`ecornn.compile`; None: ``gates``
    device, dtype : of the parameters, which have the names and shapes of the cell's, such as ``weight_ih_l0`` (G*H, I),
        and start as torch.nn's, uniform in +-1/sqrt(H). If the cell computes weights, its learned ones are the
        parameters

    A cell that has sequences beside x is called with ``inputs``, tensors by name: (T, B, H), or (T, B, 1) for one value
    for all units; they have the layout of x, batch first or not, without the axis of the batch, or packed alike. They
    have gradients, too.

    A call returns y (T, B, D*H), or a dict of the outputs by name if the cell has several, and the last states, each
    (L*D, B, H): a tuple of them if the cell has several. It computes on CPUs in float32 and float64, and on GPUs, and
    raises :class:`~ecornn.errors.FallbackError` elsewhere: PyTorch has no such layer. Programs of ``torch.export`` have
    it, too, in a process that can import the cell's class.

    Raises :class:`~ecornn.errors.ArgumentError` for a cell without parameters, and for options that do not fit."""

    @public
    def __init__(self, cell: Cell | str, input_size: int, hidden_size: int, num_layers: int = 1,
                 batch_first: bool = False, dropout: float = 0.0, bidirectional: bool = False, device: Any = None,
                 dtype: Any = None, tf32: bool | None = None, keep: str | None = None) -> None:
        super().__init__()
        if not isinstance(cell, (Cell, str)):
            raise ArgumentError("cell", cell, "a Cell, such as MyCell(), or the name of a built-in one")
        if not 0 <= dropout <= 1:
            raise ArgumentError("dropout", dropout, "a number from 0 to 1")
        self.cell = get(cell)
        self.mode, self.bias, self.proj_size = "cell", True, 0
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.batch_first, self.dropout, self.bidirectional = batch_first, float(dropout), bidirectional
        self.state_names, self.tf32, self.keep = tuple(self.cell.states), tf32, checked_keep(keep)
        self.output_names = self.cell.output_names()
        self.cell_name = f":{name_of(self.cell)}"
        kind = kind_of(text_of(self))
        kind.spec(1, 1, "float32", "")  # which checks the sizes
        if not kind.names:
            raise ArgumentError("cell", self.cell.name, "a cell with parameters; compile others with "
                                "ecornn.compile")
        learned = kind.flat(partial(learned_shapes, self.cell))  # other cells may have the same step
        buffers, frozen = self._of_layers(self.cell.buffers), self._of_layers(self.cell.frozen)
        for name, shape in learned.items():
            weight = torch.empty(shape, device=device, dtype=dtype)
            if name in buffers:
                self.register_buffer(name, weight)
            else:
                self.register_parameter(name, torch.nn.Parameter(weight, requires_grad=name not in frozen))
        self._flat_weights_names = list(kind.names)
        self._derived = Derived(self.cell, input_size, hidden_size, list(learned), list(kind.names)) if derives(
            self.cell) else None
        self.reset_parameters()

    def forward(self, input: Any, hx: Any = None, inputs: Mapping[str, Any] | None = None) -> Any:
        """Computes the outputs and the last states of ``input`` and the cell's ``inputs``; see the class for shapes.

        Raises the errors of :meth:`Sequences.forward`."""
        if self.cell.inputs or inputs is not None:
            input = self._with_inputs(input, inputs)
        if self._derived is None or torch.compiler.is_compiling():
            y, states = super().forward(input, hx)
        else:
            with self._derived.once(self):
                y, states = super().forward(input, hx)
        if len(self.output_names) == 1 or isinstance(y, torch.fx.Proxy):
            return y, states
        return self._named(y), states

    def _named(self, y: Any) -> dict[str, Any]:
        """The outputs by name of rows of y, packed or not."""
        if not isinstance(y, PackedSequence):
            return by_output(y, self.output_names, 1 + self.bidirectional)
        parts = by_output(y.data, self.output_names, 1 + self.bidirectional)
        return {name: PackedSequence(rows, *y[1:]) for name, rows in parts.items()}

    @property
    def _row_width(self) -> int:
        return self.cell.row_width(self.input_size, self.hidden_size)

    def _with_inputs(self, x: Any, inputs: Any) -> Any:
        """x with ``inputs`` behind it in its rows."""
        names = self.cell.inputs
        if not isinstance(inputs, Mapping) or {*inputs} != {*names}:
            got = sorted(map(str, inputs)) if isinstance(inputs, Mapping) else inputs
            raise ArgumentError("inputs", got, f"tensors by name: {', '.join(names)}" if names else
                                "None: the cell has no inputs beside x")
        packed = isinstance(x, PackedSequence)
        rows = [x.data if packed else x]
        wanted = *rows[0].shape[:-1], self.hidden_size
        for name in names:
            value = inputs[name]
            if packed != isinstance(value, PackedSequence) or (packed and not torch.equal(
                    value.batch_sizes, x.batch_sizes)):
                raise ArgumentError(f"inputs[{name!r}]", type(value), "a packed sequence with the batch_sizes of x, "
                                    "if x is packed; else a tensor")
            value = value.data if packed else value
            if not isinstance(value, torch.Tensor):
                raise ArgumentError(f"inputs[{name!r}]", type(value), "a tensor")
            if value.shape[:-1] != wanted[:-1] or value.shape[-1] not in (1, self.hidden_size):
                raise ShapeError(f"inputs[{name!r}].shape", tuple(value.shape), f"{wanted}, or with 1 as the last, for "
                                 "one value for all units")
            rows.append(value.expand(wanted))
        whole = torch.cat(rows, dim=-1)
        return PackedSequence(whole, *x[1:]) if packed else whole

    def reset_parameters(self) -> None:
        """Sets weights to values uniform in +-1/sqrt(H), and those that do not train to the cell's own."""
        limit, fixed = 1 / math.sqrt(self.hidden_size), self._of_layers({**self.cell.buffers, **self.cell.frozen})
        for name, weight in (*self.named_parameters(), *self.named_buffers()):
            if name not in fixed:
                torch.nn.init.uniform_(weight, -limit, limit)
                continue
            value = torch.as_tensor(fixed[name])
            if value.numel() != weight.numel():
                raise ShapeError(f"cell: {name}", tuple(value.shape), f"{tuple(weight.shape)}, in this layer")
            with torch.no_grad():
                weight.copy_(value.reshape(weight.shape))

    def _of_layers(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values by the cell's names, for all layers, by this module's names."""
        return {self.cell.parameter_name(key, layer, reverse): value for layer in range(self.num_layers)
                for reverse in (False, True)[:1 + self.bidirectional] for key, value in values.items()}

    @property
    def _flat_weights(self) -> list[torch.Tensor]:
        return engine.weights_of(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_derived", None)  # a pickle may be older than cells that compute weights
        name_of(self.cell)  # a process that reads a pickle knows the cell from then on

    def extra_repr(self) -> str:
        """The cell, the sizes, and the options that differ from their defaults."""
        words = [self.cell_name[1:].partition("@")[0], str(self.input_size), str(self.hidden_size)]
        words += [f"num_layers={self.num_layers}"] if self.num_layers > 1 else []
        words += [f"dropout={self.dropout}"] if self.dropout else []
        words += [f"{name}=True" for name in ("batch_first", "bidirectional") if getattr(self, name)]
        return ", ".join(words)

"""``LSTMCell``, ``GRUCell`` and ``RNNCell`` with constructor, parameters and calls of ``torch.nn``'s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ecornn.torch import engine, falling_back, like_before
from ecornn.torch.falling_back import by_torch, derivatives, obstacle
from ecornn.torch.kind import CELLS, text_of
from ecornn.torch.modules import CompiledModule, called, leaf
from ecornn.torch.snapshot import suspect

SERVED = {"cpu"}  # on a GPU a step takes PyTorch less time than a module takes to begin with its weights
WEIGHTS = "weight_ih", "weight_hh", "bias_ih", "bias_hh"


class CompiledCell(CompiledModule, torch.nn.RNNCellBase):
    """Compiled modules in float32 on a CPU; elsewhere, and for arguments that do not fit, PyTorch's own cell runs."""

    # what a layer has besides
    num_layers, bidirectional, proj_size, dropout, batch_first, _drops = 1, False, 0, 0.0, False, False
    one_step = True

    def _any_call(self, input: Any, hx: Any) -> Any:
        """Does what :meth:`forward` does, for a call like no earlier one."""
        if isinstance(input, torch.fx.Proxy):
            return leaf(self, input, hx)
        state, weights = _states(hx, len(self.state_names)), engine.weights_of(self)
        if state is None or not _fits(self, weights[0], input, state):
            return by_torch(self, input, hx)
        if falling_back.waits(self):
            return self._compiled(input, hx, state, weights)
        kind = "cell", input.shape, input.dtype, input.device, torch.is_grad_enabled()
        return falling_back.call(self, input, hx, kind, lambda: self._compiled(input, hx, state, weights))

    def _compiled(self, input: torch.Tensor, hx: Any, state: Sequence[torch.Tensor],
                  weights: Sequence[torch.Tensor]) -> Any:
        """Does what :meth:`forward` does by a compiled module, if one can."""
        compiling, tensors = torch.compiler.is_compiling(), (input, *state, *weights)
        if not (compiling or input.dtype != torch.float32 or torch.jit.is_tracing() or torch.is_autocast_enabled("cpu")
                or engine.watched(tensors)) and derivatives(lambda: tensors) == "gradients":
            after: Any = like_before.train_step(engine.engine_of(self), weights, input, state)
            like_before.remember(engine.engine_of(self), self, input, weights, True)
        else:
            why, asked = obstacle(self, input, hx)
            if why:
                return by_torch(self, input, hx, why)
            rows = [t.reshape(1, -1, t.shape[-1]) for t in (input, *state)]
            _, *after = called(self, rows[0], rows[1:], None, [*weights], text_of(self), asked)
            after = [s.reshape(*input.shape[:-1], -1) for s in after]
            if not asked and not compiling:
                like_before.remember(engine.engine_of(self), self, input, weights, False)
        return tuple(after) if len(after) > 1 else after[0]

    @property
    def _flat_weights_names(self) -> tuple[str, ...]:
        return WEIGHTS if self.bias else WEIGHTS[:2]

    @property
    def _flat_weights(self) -> list[torch.Tensor]:
        return engine.weights_of(self)

    def call_sizes(self, input: torch.Tensor) -> tuple[int, int] | None:
        """T and B of a call; None if PyTorch's own cell runs."""
        return (1, input.shape[0] if input.dim() == 2 else 1) if input.device.type in SERVED else None


class LSTMCell(CompiledCell, torch.nn.LSTMCell):
    """``torch.nn.LSTMCell`` by compiled modules."""

    TORCH = torch.nn.LSTMCell
    mode, state_names = "LSTM", ("h", "c")


class GRUCell(CompiledCell, torch.nn.GRUCell):
    """``torch.nn.GRUCell`` by compiled modules."""

    TORCH = torch.nn.GRUCell
    mode = "GRU"


class RNNCell(CompiledCell, torch.nn.RNNCell):
    """``torch.nn.RNNCell`` (tanh or relu) by compiled modules. Steps of a training of less than 65536 multiply-adds,
    which are B*H*(I+H), are PyTorch's own: what autograd takes to call a function is all of their time."""

    TORCH = torch.nn.RNNCell
    least = 1 << 16

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Computes the states after one step; see the other cells."""
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and _too_small(self, input):
            return self.TORCH.forward(self, input, hx)
        return super().forward(input, hx)

    @property
    def mode(self) -> str:
        """The name that a layer has for this kind."""
        return f"RNN_{self.nonlinearity.upper()}"


def _states(hx: Any, count: int) -> Sequence[Any] | None:
    """The initial states, empty for zeros; None if ``hx`` is something else."""
    if hx is None:
        return ()
    if count == 1:
        return (hx,)
    return hx if isinstance(hx, (tuple, list)) and len(hx) == count else None


def _too_small(cell: Any, input: Any) -> bool:
    """Tells whether PyTorch's own cell trains this step. Then bound layers read weights again: an optimizer follows."""
    weight, hidden = cell._parameters.get("weight_hh"), cell.hidden_size
    if weight is None or not weight.requires_grad or not isinstance(input, torch.Tensor):
        return False
    rows = input.numel() // max(1, cell.input_size)
    if rows * hidden * (cell.input_size + hidden) >= cell.least:
        return False
    if engine.known_engine(cell) is not None:
        suspect(engine.weights_of(cell))
    return True


def _fits(cell: Any, weight: torch.Tensor, input: Any, state: Sequence[Any]) -> bool:
    """Tells whether a compiled module takes this input and these states."""
    if not isinstance(input, torch.Tensor) or input.dim() not in (1, 2) or cell.mode not in CELLS:
        return False
    *rows, width = input.shape
    shape, dtype, device = (*rows, cell.hidden_size), input.dtype, input.device
    if (width != cell.input_size or not all(shape) or weight.dtype != dtype or weight.device != device
            or device.type not in SERVED or input.layout is not torch.strided):
        return False
    return all(isinstance(s, torch.Tensor) and s.shape == shape and s.dtype == dtype and s.device == device
               and s.layout is torch.strided for s in state)

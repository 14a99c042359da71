"""``LSTMCell``, ``GRUCell`` and ``RNNCell`` with constructor, parameters and calls of ``torch.nn``'s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ecornn.torch import compiling, engine, falling_back, like_before
from ecornn.torch.falling_back import by_torch, derivatives, obstacle
from ecornn.torch.kind import CELLS, text_of
from ecornn.torch.modules import CompiledModule, called, leaf
from ecornn.torch.snapshot import suspect

WEIGHTS = "weight_ih", "weight_hh", "bias_ih", "bias_hh"
# multiply-adds of a step on a GPU up to which compiled ones are faster, measured; of exact float32 without gradients
MOST, MOST_EXACT = 1 << 30, 1 << 31
# PyTorch's own, without the checks of torch.nn's forward
FUNCTIONS = {"LSTM": torch.lstm_cell, "GRU": torch.gru_cell, "RNN_TANH": torch.rnn_tanh_cell,
             "RNN_RELU": torch.rnn_relu_cell}


class CompiledCell(CompiledModule, torch.nn.RNNCellBase):
    """Compiled modules in float32 on a CPU, and on a GPU, but where a CUDA graph captures a step with gradients;
    elsewhere, and for arguments that do not fit, PyTorch's own cell runs. Products of float32 on a GPU are as exact as
    those of PyTorch's cell."""

    # what a layer has besides
    num_layers, bidirectional, proj_size, dropout, batch_first, _drops = 1, False, 0, 0.0, False, False
    one_step = True
    least = 0  # multiply-adds of a step of training on a CPU; smaller ones are PyTorch's own

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Computes the states (B, H), or (H,), after one step from input (B, I), or (I,), and the states ``hx``; None:
        zeros. Raises PyTorch's own errors for arguments that do not fit."""
        if not torch.compiler.is_compiling() and is_left(self, input):
            weights = engine.weights_of(self)
            if torch.is_grad_enabled() and engine.known_engine(self) is not None:
                suspect(weights)  # bound layers read weights again: an optimizer may follow
            h = hx[0] if type(hx) in (tuple, list) and hx else hx
            if not isinstance(h, torch.Tensor) or h.dim() != 2 or input.dim() != 2 or len(weights) != len(WEIGHTS):
                return self.TORCH.forward(self, input, hx)
            return FUNCTIONS[self.mode](input, hx, *weights)
        return super().forward(input, hx)

    def _any_call(self, input: Any, hx: Any) -> Any:
        """Does what :meth:`forward` does, for a call like no earlier one."""
        if isinstance(input, torch.fx.Proxy):
            return leaf(self, input, hx)
        if torch.compiler.is_compiling() and isinstance(input, torch.Tensor) and input.is_cuda:
            return self.TORCH.forward(self, input, hx)  # torch.compile puts it together with what is around it
        state, weights = _states(hx, len(self.state_names)), engine.weights_of(self)
        if state is None or not _fits(self, weights, input, state):
            return by_torch(self, input, hx)
        if falling_back.waits(self):
            return self._compiled(input, hx, state, weights)
        kind = "cell", input.shape, input.dtype, input.device, torch.is_grad_enabled()
        return falling_back.call(self, input, hx, kind, lambda: self._compiled(input, hx, state, weights))

    def _compiled(self, input: torch.Tensor, hx: Any, state: Sequence[torch.Tensor],
                  weights: Sequence[torch.Tensor]) -> Any:
        """Does what :meth:`forward` does by a compiled module, if one can."""
        compiles, tensors = torch.compiler.is_compiling(), (input, *state, *weights)
        if not (compiles or input.dtype == torch.float64 or torch.jit.is_tracing() or engine.watched(tensors)
                or torch.is_autocast_enabled(input.device.type)) and derivatives(lambda: tensors) == "gradients":
            after: Any = like_before.train_step(engine.engine_of(self), weights, input, state)
            like_before.remember(engine.engine_of(self), self, input, weights, True)
        else:
            why, asked = obstacle(self, input, hx)
            if why:
                return by_torch(self, input, hx, why)
            rows = [t.reshape(1, -1, t.shape[-1]) for t in (input, *state)]
            _, *after = called(self, rows[0], rows[1:], None, [*weights], text_of(self), asked)
            after = [s.reshape(*input.shape[:-1], -1) for s in after]
            if not asked and not compiles:
                like_before.remember(engine.engine_of(self), self, input, weights, False)
        return tuple(after) if len(after) > 1 else after[0]

    @property
    def _flat_weights_names(self) -> tuple[str, ...]:
        return WEIGHTS if self.bias else WEIGHTS[:2]

    @property
    def _flat_weights(self) -> list[torch.Tensor]:
        return engine.weights_of(self)

    def call_sizes(self, input: torch.Tensor) -> tuple[int, int]:
        return 1, input.shape[0] if input.dim() == 2 else 1

    @property
    def tf32(self) -> bool | None:
        """True if products of float32 on a GPU may be in TF32; where that is not set, if PyTorch's of matrices may."""
        own: bool | None = self.__dict__.get("tf32")
        weight = self._parameters.get("weight_hh")  # computed if it is no parameter
        if own is not None or (weight is not None and not weight.is_cuda) or not torch.cuda.is_initialized():
            return own
        return compiling.allows_tf32("matmul")

    @tf32.setter
    def tf32(self, value: bool | None) -> None:
        self.__dict__["tf32"] = value


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


def is_left(cell: Any, input: Any) -> bool:
    """Tells whether this step is PyTorch's own: a small one of a training on a CPU, or a large one on a GPU."""
    weight = cell._parameters.get("weight_hh")  # computed if it is no parameter
    if weight is None or not isinstance(input, torch.Tensor):
        return False
    trains = weight.requires_grad and torch.is_grad_enabled()
    if not (trains or input.is_cuda):
        return False
    products = input.numel() // max(1, cell.input_size) * (cell.input_size + cell.hidden_size)  # of each gate and unit
    if not input.is_cuda:
        return bool(products * cell.hidden_size < cell.least)
    work = products * weight.shape[0]
    return bool(work > MOST and (work > MOST_EXACT or trains or input.dtype != torch.float32 or cell.tf32))


def _fits(cell: Any, weights: Sequence[torch.Tensor], input: Any, state: Sequence[Any]) -> bool:
    """Tells whether a compiled module takes this input and these states."""
    if not isinstance(input, torch.Tensor) or input.dim() not in (1, 2) or cell.mode not in CELLS:
        return False
    *rows, width = input.shape
    shape, dtype, device = (*rows, cell.hidden_size), input.dtype, input.device
    if (width != cell.input_size or not all(shape) or weights[0].dtype != dtype or weights[0].device != device
            or device.type not in ("cpu", "cuda") or input.layout is not torch.strided):
        return False
    if not all(isinstance(s, torch.Tensor) and s.shape == shape and s.dtype == dtype and s.device == device
               and s.layout is torch.strided for s in state):
        return False
    if device.type == "cpu":
        return True
    tensors = input, *state, *weights
    if torch.is_autocast_enabled("cuda") or engine.watched(tensors):
        return False
    asked = derivatives(lambda: tensors)
    return not asked or (asked == "gradients" and compiling.serves(device, dtype) and not engine.captured(input))

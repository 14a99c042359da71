"""``LSTM``, ``GRU`` and ``RNN`` with constructor, parameters and calls of ``torch.nn``'s; and how layers are called."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import dropout
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from ecornn.boundary import refuse_untyped, shown
from ecornn.errors import ArgumentError, DeviceError, DTypeError, FallbackError, ScheduleError, ShapeError
from ecornn.torch import engine, falling_back, like_before, packed
from ecornn.torch.compiling import KEPT, checked_keep, few_steps, serves
from ecornn.torch.engine import watched
from ecornn.torch.falling_back import by_torch, obstacle, tensors_of
from ecornn.torch.kind import keeping, text_of
from ecornn.torch.operator import directly, forward, recurrent

_functorch = torch._C._functorch


class CompiledModule(torch.nn.Module):
    """Attributes of all compiled layers and cells, and the moments at which their weights are let go or read again."""

    TORCH: Any = None  # the class of torch.nn whose forward runs where no module can; None: there is none
    state_names: tuple[str, ...] = ("h",)
    output_names: tuple[str, ...] = ("h",)
    cell_name = ""  # a colon and the name of a cell that is not torch's
    tf32: bool | None = None  # products of float32 on a GPU may be in TF32; None: they may if cuDNN's RNNs may
    keep: str | None = None  # the values that a training step keeps, gates or states; None: gates
    wait = False  # a first call waits until its module is compiled; False: PyTorch's own layer runs until it is
    one_step = False  # True for a cell, whose states are all that a call returns

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Computes y and the last states of a tensor or PackedSequence, with the shapes of ``torch.nn``'s; of a cell
        the states (B, H), or (H,), after one step from input (B, I), or (I,). Raises ``ShapeError``, ``DTypeError`` and
        ``DeviceError`` where an argument does not fit; a cell raises PyTorch's own errors."""
        if torch.compiler.is_compiling():
            return self._any_call(input, hx)
        if isinstance(input, torch.Tensor) and _functorch.is_functorch_wrapped_tensor(input):
            input = _functorch.unwrap_if_dead(input)  # it may have left its transform
        try:
            result = like_before.again(self, input, hx)
            return result if result is not None else self._any_call(input, hx)
        except Exception as error:
            refuse_untyped(error, lambda: f"a call of {self!r} with input={shown(input)}")
            raise

    def _get_name(self) -> str:
        """The name that ``print(model)`` shows, such as CompiledLSTM, though the class is still called LSTM."""
        return f"{'Compiled' * (self.TORCH is not None)}{super()._get_name()}"

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        if torch.__future__.get_swap_module_params_on_conversion():
            engine.let_go(self)
        return super()._apply(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        engine.rebind(self)  # in inference mode copies leave no other trace

    def __prepare_scriptable__(self) -> None:
        """torch.jit.script compiles PyTorch's own layers only. Raises :class:`~ecornn.errors.FallbackError`."""
        raise FallbackError("torch.jit.script only knows PyTorch's own layers: call ecornn.torch.restore(model) first, "
                            "or use torch.export")


class Sequences(CompiledModule):
    """A module that is called on sequences, with the attributes of ``torch.nn.RNNBase``.

    It packs weights again once a tensor's version is another one. Writes through ``.data`` or NumPy, by another
    process, and any in inference mode are seen on a CPU if they change whole rows or columns, or any value in float64:
    call :func:`ecornn.torch.rebind` after others, and on a GPU."""

    def _any_call(self, input: Any, hx: Any) -> Any:
        """Does what :meth:`forward` does, for a call like no earlier one."""
        if not isinstance(input, (torch.Tensor, PackedSequence)):
            return leaf(self, input, hx)
        why, asked = obstacle(self, input, hx)
        if why:
            return by_torch(self, input, hx, why)
        given = (input, hx)
        if torch.is_autocast_enabled("cuda"):
            given = autocasted(given)
        if not falling_back.waits(self):
            return falling_back.call(self, input, hx, call_kind(self, input, asked),
                                     lambda: self._compiled(*given, asked))
        if not asked:
            return self._compiled(*given, False)
        try:
            return self._compiled(*given, True)
        except ScheduleError as error:
            return by_torch(self, input, hx, f"no compiled layer computes these gradients: {error}")

    def _compiled(self, input: Any, hx: Any, asked: bool) -> Any:
        """Does what :meth:`forward` does by a compiled module; ``asked``: with gradients."""
        if isinstance(input, PackedSequence):
            return self._forward_packed(input, hx, asked)
        x = input.transpose(0, 1) if self.batch_first and input.dim() == 3 else input
        single = x.dim() == 2
        x = x.unsqueeze(1) if single else x
        if x.dim() != 3 or x.shape[2] != self._row_width:
            raise ShapeError("input.shape", tuple(input.data.shape),
                             f"2 or 3 axes, the last of input_size={self._row_width}")
        steps, batch = x.shape[:2]
        if steps == 0:
            raise ShapeError("input.shape", tuple(input.shape), "at least one step")
        if batch == 0:
            return by_torch(self, input, hx)
        y, *after = self._run(x, states_of(self, hx, x, batch, single, None), None, asked)
        if not (self._drops or torch.compiler.is_compiling()):
            like_before.remember(engine.engine_of(self), self, input, engine.weights_of(self), asked)
        if single:
            output, after = y.squeeze(1), [s.squeeze(1) for s in after]
        else:
            output = y.transpose(0, 1) if self.batch_first else y
        return output, self._states(after)

    def call_sizes(self, input: torch.Tensor) -> tuple[int, int]:
        """T and B of a call."""
        first, second = (input.shape[0], 1) if input.dim() == 2 else input.shape[:2]
        return (second, first) if self.batch_first and input.dim() == 3 else (first, second)

    def _states(self, after: list[torch.Tensor]) -> Any:
        return tuple(after) if len(self.state_names) > 1 else after[0]

    @property
    def _row_width(self) -> int:
        return int(self.input_size)

    @property
    def _drops(self) -> bool:
        return bool(self.training and self.dropout > 0 and self.num_layers > 1)

    def _run(self, x: Any, state: list[torch.Tensor], lengths: Any, asked: bool) -> list[torch.Tensor]:
        """y and the states; ``asked``: with gradients."""
        weights = engine.weights_of(self)
        if asked:
            engine.check_type(x, weights[0])
        if self._drops or (asked and engine.by_layer(self, weights)):
            return run_layers(self, weights, x, state, lengths, asked)
        if not (asked or state) and torch.compiler.is_exporting():
            state = self._zeros(x)  # AOTInductor would make None of an empty list
        return called(self, x, state, lengths, weights, text_of(self), asked)

    def _zeros(self, x: torch.Tensor) -> list[torch.Tensor]:
        """First states of zeros for x (T, B, I)."""
        widths = [self.proj_size or self.hidden_size, *[self.hidden_size] * (len(self.state_names) - 1)]
        return [x.new_zeros(self.num_layers * (1 + self.bidirectional), x.shape[1], width) for width in widths]

    def _forward_packed(self, input: PackedSequence, hx: Any, asked: bool) -> Any:
        """Computes packed rows, the longest sequence first. The module needs no order of sequences; states have one."""
        data = input.data
        if data.dim() != 2 or data.shape[1] != self._row_width:
            raise ShapeError("input.shape", tuple(data.shape), f"2 axes, the last of input_size={self._row_width}")
        seen = torch.compiler.is_compiling() or watched((data, *tensors_of(hx), *engine.weights_of(self)))
        if not seen:
            input = packed.checked(input)
            if not len(input.data):
                return by_torch(self, input, hx)
        data, sizes, order, back = input
        found = None  # rows and states
        if not (self._drops or seen):
            if asked:
                engine.check_type(data, engine.weights_of(self)[0])
            state = states_of(self, hx, data, int(sizes[0]), False, order)
            found = (packed.train if asked else packed.run)(self, input, state)
        if found is None:
            x, lengths = pad_packed_sequence(PackedSequence(data, sizes))
            y, *after = self._run(x, states_of(self, hx, x, x.shape[1], False, order), lengths, asked)
            found = [pack_padded_sequence(y, lengths).data, *after]
        rows, *after = found
        after = after if back is None else [s.index_select(1, back) for s in after]
        return PackedSequence(rows, sizes, order, back), self._states(after)


class Compiled(Sequences, torch.nn.RNNBase):
    """The common part of ``LSTM``, ``GRU`` and ``RNN``: a compiled module computes in place of torch, gradients, too.

    PyTorch's own forward runs where there is no compiled layer: in torch.jit.trace, for no sequences, other devices
    and types, autocast on a CPU, and gradients on a GPU that no schedule has. The base is RNNBase, since torch.compile
    refuses to look into a ``torch.nn.LSTM``. ``tf32``: whether float32 products on a GPU may be in TF32, None: if
    cuDNN's RNNs may; ``keep``: as of :func:`ecornn.compile`, None: ``gates``."""

    def __init__(self, *args: Any, tf32: bool | None = None, keep: str | None = None, **kwargs: Any) -> None:
        if self.mode != "LSTM" and "proj_size" in kwargs:
            raise ArgumentError("proj_size", kwargs["proj_size"], "no value: proj_size argument is only supported for "
                                "LSTM, not RNN or GRU")
        super().__init__(self.mode, *args, **kwargs)
        self.tf32, self.keep = tf32, checked_keep(keep)


class LSTM(Compiled):
    """``torch.nn.LSTM`` by compiled modules. A projection costs as much as one that keeps the size."""

    TORCH = torch.nn.LSTM
    mode, state_names = "LSTM", ("h", "c")
    get_expected_cell_size = torch.nn.LSTM.get_expected_cell_size
    check_forward_args = torch.nn.LSTM.check_forward_args
    permute_hidden = torch.nn.LSTM.permute_hidden


class GRU(Compiled):
    """``torch.nn.GRU`` by compiled modules."""

    TORCH = torch.nn.GRU
    mode = "GRU"


class RNN(Compiled):
    """``torch.nn.RNN`` (tanh or relu) by compiled modules."""

    TORCH = torch.nn.RNN

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # as torch.nn.RNN has it: the fourth positional argument, or by name
        self.nonlinearity = args[3] if len(args) > 3 else kwargs.pop("nonlinearity", "tanh")
        if self.nonlinearity not in ("tanh", "relu"):
            raise ArgumentError("nonlinearity", self.nonlinearity, "'tanh' or 'relu'")
        self.mode = f"RNN_{self.nonlinearity.upper()}"
        super().__init__(*args[:3], *args[4:], **kwargs)


def call_kind(module: Any, input: Any, asked: bool) -> tuple[Any, ...]:
    """The properties of a call that its modules depend on; ``asked``: whether gradients are asked for."""
    if isinstance(input, PackedSequence):
        data, sizes, lengths = input.data, input.batch_sizes, True
        steps, batch = len(sizes), int(sizes[0]) if len(sizes) else 0
    else:
        data, lengths = input, False
        steps, batch = module.call_sizes(input) if input.dim() in (2, 3) else (0, 0)  # of others the call says so
    return "call", batch, few_steps(steps), data.dtype, data.device, lengths, asked


def leaf(module: Any, input: Any, hx: Any) -> Any:
    """A call in torch.fx's graph. Raises :class:`ArgumentError` if ``input`` is none of its symbols either."""
    if isinstance(input, torch.fx.Proxy):
        given = (input,) if hx is None else (input, hx)
        tracer: Any = input.tracer
        return tracer.create_proxy("call_module", tracer.path_of_module(module), given, {})
    raise ArgumentError("input", type(input), "a tensor or a PackedSequence")


def called(module: Any, x: torch.Tensor, state: list[torch.Tensor], lengths: torch.Tensor | None,
           weights: list[torch.Tensor], kind: str, asked: bool, layer: int | None = None) -> list[torch.Tensor]:
    """y and the states of a module, or of one ``layer`` of it; ``asked``: with gradients. See :func:`recurrent`."""
    by_operator = torch.compiler.is_compiling() or watched((x, *state, *weights))
    if asked and by_operator:
        return forward(x, state, lengths, weights, keeping(kind, KEPT[x.device.type]))[:-1]
    if asked:
        return directly(engine.engine_of(module).part(layer, kind), x, state, lengths, weights)
    if by_operator or layer is not None:
        results: list[torch.Tensor] = recurrent(x, state, lengths, weights, kind)
        return results
    return engine.engine_of(module).run(weights, x, state, lengths)


def run_layers(module: Any, weights: list[torch.Tensor], x: torch.Tensor, state: list[torch.Tensor],
               lengths: torch.Tensor | None, asked: bool) -> list[torch.Tensor]:
    """y and the states, layer by layer, with dropout between, which is drawn for packed rows, as by PyTorch."""
    last = []
    for layer, (its, given) in enumerate(engine.layers_of(module, weights, state)):
        if layer and module._drops and lengths is None:
            x = dropout(x, module.dropout)
        elif layer and module._drops:
            rows = pack_padded_sequence(x, lengths)
            x = pad_packed_sequence(PackedSequence(dropout(rows.data, module.dropout), rows.batch_sizes))[0]
        x, *after = called(module, x, given, lengths, [*its], text_of(module, layer), asked, layer)
        last.append(after)
    return [x, *(torch.cat(states) for states in zip(*last, strict=True))]


def autocasted(value: Any) -> Any:
    """Tensors on a GPU in autocast's data type, which ``torch.nn`` gives them, too; anything else as it is."""
    if isinstance(value, torch.Tensor):
        if value.is_cuda and serves(value.device, value.dtype):
            return value.to(torch.get_autocast_dtype("cuda"))
        return value
    if isinstance(value, PackedSequence):
        return PackedSequence(autocasted(value.data), *value[1:])
    return type(value)(map(autocasted, value)) if type(value) in (tuple, list) else value


def states_of(module: Any, hx: Any, x: torch.Tensor, batch: int, single: bool,
              order: torch.Tensor | None) -> list[torch.Tensor]:
    """The initial states, each (L*D, ``batch``, H), in the order of the rows of x; [] for zeros. Raises
    :class:`ArgumentError`, :class:`ShapeError`, :class:`DTypeError` or :class:`DeviceError` if ``hx`` does not fit."""
    if hx is None:
        return []
    names = [f"{name}_0" for name in module.state_names]
    given = hx if len(names) > 1 else (hx,)
    if not isinstance(given, (tuple, list)) or len(given) != len(names):
        raise ArgumentError("hx", type(hx), f"a tuple ({', '.join(names)})" if names[1:] else f"a tensor {names[0]}")
    parts, states = module.num_layers * (1 + module.bidirectional), []
    for name, value in zip(names, given, strict=True):
        if not isinstance(value, torch.Tensor):
            raise ArgumentError(name, type(value), "a tensor")
        width = module.proj_size or module.hidden_size if name == names[0] else module.hidden_size
        wanted = (parts, width) if single else (parts, batch, width)
        if tuple(value.shape) != wanted:
            raise ShapeError(f"{name}.shape", tuple(value.shape), str(wanted))
        if value.dtype != x.dtype:
            raise DTypeError(f"{name}.dtype", str(value.dtype), f"{x.dtype}, as the input's")
        if value.device != x.device:
            raise DeviceError(f"{name}.device", str(value.device), f"{x.device}, as the input's")
        value = value.unsqueeze(1) if single else value
        states.append(value if order is None else value.index_select(1, order))
    return states

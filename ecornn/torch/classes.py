"""Classes of layers that were one of torch.nn's, or a user's below it, and are compiled now."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn.utils import parametrize

from ecornn.torch.cells import CompiledCell, GRUCell, LSTMCell, RNNCell
from ecornn.torch.modules import GRU, LSTM, RNN, Compiled
from ecornn.torch.sequences import Sequences

CELLS: dict[type[Any], type[Any]] = {torch.nn.LSTMCell: LSTMCell, torch.nn.GRUCell: GRUCell,
                                     torch.nn.RNNCell: RNNCell}
OURS: dict[type[Any], type[Any]] = {torch.nn.LSTM: LSTM, torch.nn.GRU: GRU, torch.nn.RNN: RNN, **CELLS}
COMPILED = Compiled, CompiledCell
THEIRS = {ours: kind for kind, ours in OURS.items()}
# what a call goes through: a class that has one of its own may mean something else
CALL = ("forward", "__call__", "_call_impl", "check_input", "check_forward_args", "check_hidden_size",
        "get_expected_hidden_size", "get_expected_cell_size", "permute_hidden", "flatten_parameters")


def base_of(kind: type[Any]) -> type[Any] | None:
    """torch.nn's own class that this one is, or is below."""
    return next((base for base in OURS if issubclass(kind, base)), None)


def overridden(kind: type[Any]) -> list[str] | None:
    """The methods of a call that are not torch.nn's, nor end in torch.nn's; None where the class is below none of
    its."""
    base = base_of(kind)
    if base is None:
        return None
    own = [name for name in CALL if getattr(kind, name, None) is not getattr(base, name, None)]
    return [] if own == ["forward"] and _goes_on(kind) else own


def _goes_on(kind: type[Any]) -> bool:
    """Whether each ``forward`` of a class calls that of the next one, as ``super().forward()``, until torch.nn's."""
    own = [vars(one)["forward"] for one in kind.__mro__[:kind.__mro__.index(base_of(kind))] if "forward" in vars(one)]
    codes = [getattr(forward, "__code__", None) for forward in own]
    return all(code is not None and {"super", "forward"} <= {*code.co_names} for code in codes)


@cache
def compiled_class(kind: Any) -> type[Any]:
    """A class below ``kind`` whose calls are those of the compiled one, or end there, where ``kind`` has its own."""
    base: Any = base_of(kind)
    forward = CompiledCell.forward if base in CELLS else _forward
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__,
             "__init__": kind.__init__, "__reduce_ex__": _reduce, "_compiled_from": kind}
    if kind.forward is not base.forward:
        return type(kind.__name__, (kind, compiled_class(base)), named)  # which has the compiled one before torch.nn's
    return type(kind.__name__, (OURS[base], kind), named | {"forward": forward})


def original_class(kind: type[Any]) -> type[Any]:
    """What a compiled layer's class was, or torch.nn's of the same kind."""
    found = kind.__dict__.get("_compiled_from")
    return found or next(theirs for ours, theirs in THEIRS.items() if issubclass(kind, ours))


def reclass(module: torch.nn.Module, change: Callable[[type[Any]], type[Any]]) -> None:
    """Changes a module's class; of one under a parametrization that below it, which has its parameters as
    properties."""
    kind = type(module)
    if parametrize.is_parametrized(module):
        own = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
        module.__class__ = type(kind.__name__, (change(kind.__bases__[0]),), own)
    else:
        module.__class__ = change(kind)


def _forward(self: Any, input: Any, hx: Any = None) -> Any:
    """As ``torch.nn``'s."""
    return Sequences.forward(self, input, hx)


# torch.compile breaks its graph around what is a torch.nn.LSTM; it must not look into the call then, all the way down
_frames = torch._C._dynamo.eval_frame
_frames.set_code_exec_strategy(_forward.__code__, _frames._FrameExecStrategy(
    _frames._FrameAction.SKIP, _frames._FrameAction.SKIP))


def _reduce(module: Any, protocol: Any) -> tuple[Any, ...]:
    """A pickle says what the class was: the one that is made of it has no name by which it could be found."""
    if "_compiled_from" not in vars(type(module)):  # a class below: the usual way
        made: Any = object.__reduce_ex__(module, protocol)
        return made
    state = getattr(module, "__getstate__", lambda: module.__dict__)  # RNNBase's: without its weak references
    return _empty, (type(module)._compiled_from,), state()


def _empty(kind: Any) -> Any:
    made: Any = compiled_class(kind)
    return made.__new__(made)

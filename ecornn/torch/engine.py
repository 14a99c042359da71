"""Compiled layers behind a torch module: one for each kind of call, bound again when weights change."""

from __future__ import annotations

import threading
import weakref
from functools import lru_cache
from typing import Any
from uuid import uuid4

import torch
from torch.nn.functional import pad

from ecornn.errors import ArgumentError, DTypeError
from ecornn.runtime.layer import Layer
from ecornn.runtime.loader import Module
from ecornn.workload import DTYPES

NAMES = {getattr(torch, name): name for name in DTYPES}
_modules: weakref.WeakValueDictionary[str, torch.nn.RNNBase] = weakref.WeakValueDictionary()
_engines: weakref.WeakKeyDictionary[torch.nn.RNNBase, Engine] = weakref.WeakKeyDictionary()


def register(module: torch.nn.RNNBase) -> str:
    """A name by which :func:`torch.ops.ecornn.recurrent` finds the module; a string, since a graph that
    torch.compile makes keeps it as a constant, and one that no layer of another process has, since a program of
    torch.export can be saved."""
    handle = uuid4().hex
    _modules[handle] = module
    return handle


def registered(handle: str) -> torch.nn.RNNBase:
    """The module of that name; :class:`ArgumentError` where this process has none."""
    found = _modules.get(handle)
    if found is None:
        raise ArgumentError("handle", handle, "a layer that lives in this process: exported programs do not hold the "
                            "layers of ecornn.torch. Keep the layer and export again here, or export the model with "
                            "torch.nn's layers")
    return found


def cell_of(module: torch.nn.RNNBase) -> str:
    """The built-in cell that a torch module is."""
    if module.proj_size:
        return "lstm(projection)"
    return {"LSTM": "lstm", "GRU": "gru", "RNN_TANH": "rnn_tanh", "RNN_RELU": "rnn_relu"}[module.mode]


@lru_cache(maxsize=256)
def compiled(cell: str, hidden: int, inputs: int, batch: int, seq: int, dtype: str, target: str, layers: int,
             bidirectional: bool, masks: str) -> Module:
    """A module for these sizes; every layer of a process that has them shares it."""
    from ecornn.compiler import compile

    return compile(cell, hidden=hidden, input=inputs, batch=batch, seq=seq, dtype=dtype, target=target,
                   layers=layers, bidirectional=bidirectional,
                   lengths=masks == "lengths", sequences=masks == "sequences")


class Engine:
    """The compiled layers of one torch module."""

    def __init__(self) -> None:
        # what a call is like -> the batch it was compiled for -> the weights when it was bound, and the layer
        self._bound: dict[tuple[Any, ...], dict[int, tuple[Snapshot, Layer]]] = {}
        self._captured: set[Layer] = set()  # CUDA graphs read their weights, nobody tells for how long
        self._lock = threading.Lock()
        self.refused: set[tuple[torch.dtype, int]] = set()  # columns that no schedule serves, see packed.py

    def layer(self, module: torch.nn.RNNBase, x: Any, batch: int, steps: int, masks: str = "") -> Layer:
        """The layer for x, of this B and about this T, with the module's weights as they are now; it takes
        ``masks``: nothing, ``lengths`` or ``sequences``."""
        threads = torch.get_num_threads() if x.is_cpu else None
        key = (x.device, x.dtype, masks, threads)
        with self._lock:
            bound = self._bound.setdefault(key, {})
            most = batch if masks == "sequences" else 4 * batch  # columns are few of themselves
            rooms = [room for room in sorted(bound) if batch <= room <= most]
            # the batch of the first call; where calls differ, some room for the next ones
            room = rooms[0] if rooms else 1 << (batch - 1).bit_length() if bound else batch
            known = bound.get(room)
            weights = weights_of(module)
            if known is None or not known[0].holds(weights):
                check_type(x, weights[0])
                made = compiled(cell_of(module), module.hidden_size, module.input_size, room, steps,
                                NAMES[x.dtype], "cpu" if x.is_cpu else "cuda", module.num_layers,
                                module.bidirectional, masks) if known is None else known[1].module
                layer = made.bind(_parameters(module, weights), 0 if x.is_cpu else x.device.index, threads=threads)
                bound[room] = known = Snapshot(weights), layer
            if x.is_cuda and torch.cuda.is_current_stream_capturing():
                self._captured.add(known[1])
            return known[1]

    def rebind(self) -> None:
        """Has the next call of every kind read the weights again. Until then the layers keep what they have, also for
        calls that run now."""
        with self._lock:
            for bound in self._bound.values():
                for snapshot, _ in bound.values():
                    snapshot.outdate()


def engine_of(module: torch.nn.RNNBase) -> Engine:
    """The module's engine, made with its first call; copies of a module get their own."""
    if module not in _engines:
        _engines[module] = Engine()
    return _engines[module]


def check_type(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Raises :class:`DTypeError` where x is not of the weights' type, unless autocast sees to that."""
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        found, wanted = (str(t.dtype).removeprefix("torch.") for t in (x, weight))
        raise DTypeError("input.dtype", found, f"{wanted}, as the weights'")


def rebind(module: torch.nn.RNNBase) -> None:
    """:meth:`Engine.rebind` of the module's engine, if it has been called."""
    known = _engines.get(module)
    if known is not None:
        known.rebind()


def weights_of(module: torch.nn.RNNBase) -> list[torch.Tensor]:
    """The weights as they are at this moment. ``_flat_weights`` may have others: torch.func.functional_call puts its
    own into ``_parameters``, and a parametrization makes new ones at each access."""
    own: dict[str, Any] = module._parameters
    try:
        return [*map(own.__getitem__, module._flat_weights_names)]  # a module's getattr() takes its time
    except KeyError:
        return [getattr(module, name) for name in module._flat_weights_names]


class Snapshot:
    """Tells whether weights have changed since. It keeps the tensors and their memory, whose ids and addresses could
    otherwise be those of other weights one day."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        self._kept = [(w, w.detach()) for w in weights]
        self._state = self._of(weights)

    def holds(self, weights: list[torch.Tensor]) -> bool:
        """Whether every weight is the one that it was."""
        return self._of(weights) == self._state

    def outdate(self) -> None:
        """From now on they are taken for changed."""
        self._kept, self._state = [], []

    @staticmethod
    def _of(weights: list[torch.Tensor]) -> list[tuple[int, int, int]]:
        """Tensors made in inference mode count no versions."""
        return [(id(w), w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights]


def _parameters(module: torch.nn.RNNBase, weights: list[torch.Tensor]) -> dict[str, Any]:
    """Weights by name; without biases, zeros in their place, and around those of a projection."""
    found = {name: w.detach() for name, w in zip(module._flat_weights_names, weights, strict=True)}
    if not module.bias:
        for name in [n for n in found if n.startswith("weight_hh")]:
            zeros = torch.zeros(found[name].shape[0], dtype=found[name].dtype)
            found |= {name.replace("weight_hh", f"bias_{kind}"): zeros for kind in ("ih", "hh")}
    if module.proj_size:
        room = module.hidden_size - module.proj_size
        for name, value in found.items():
            if name.startswith("weight_hr"):
                found[name] = pad(value, (0, 0, 0, room))
            elif name.startswith("weight_hh"):
                found[name] = pad(value, (0, room))
            elif name.startswith("weight_ih") and not name.endswith(("_l0", "_l0_reverse")):
                parts = value.reshape(len(value), -1, module.proj_size)  # one for each direction of the layer below
                found[name] = pad(parts, (0, room)).reshape(len(value), -1)
    return found


@torch.library.custom_op("ecornn::recurrent", mutates_args=())
def recurrent(x: torch.Tensor, state: list[torch.Tensor], lengths: torch.Tensor | None,
              handle: str) -> list[torch.Tensor]:
    """y (T, B, D*H) and the states (L*D, B, H) of the layer ``handle`` on x (T, B, I), from ``state``, or
    from zeros if that is empty."""
    return run(registered(handle), x, state, lengths)


@recurrent.register_fake
def _(x: torch.Tensor, state: list[torch.Tensor], lengths: torch.Tensor | None,
      handle: str) -> list[torch.Tensor]:
    module = registered(handle)
    directions, width = 1 + module.bidirectional, module.proj_size or module.hidden_size
    states = (directions * module.num_layers, x.shape[1])
    return [x.new_empty((*x.shape[:2], directions * width)), x.new_empty((*states, width)),
            *(x.new_empty((*states, module.hidden_size)) for _ in range(module.mode == "LSTM"))]


def run(module: torch.nn.RNNBase, x: torch.Tensor, state: list[torch.Tensor],
        lengths: torch.Tensor | None) -> list[torch.Tensor]:
    """As :func:`recurrent`, without the dispatcher."""
    steps, batch = x.shape[:2]
    if lengths is None:
        return called(module, engine_of(module).layer(module, x, batch, steps), x, state)
    return called(module, engine_of(module).layer(module, x, batch, steps, "lengths"), x, state, lengths=lengths)


def called(module: torch.nn.RNNBase, layer: Layer, x: torch.Tensor, state: list[torch.Tensor],
           **masks: Any) -> list[torch.Tensor]:
    """As :func:`recurrent`, by this layer of the module."""
    single = module.num_layers == 1 and not module.bidirectional
    width = module.proj_size or module.hidden_size
    if state and width < module.hidden_size:
        state = [pad(state[0], (0, module.hidden_size - width)), state[1]]
    given = tuple(s[0] if single else s for s in state) or None
    with torch.no_grad():
        y, after = layer(x, given, **masks)
        states = [s.reshape(-1, s.shape[-2], module.hidden_size) for s in after]
        if width < module.hidden_size:
            rows = y.reshape(*y.shape[:2], -1, module.hidden_size)[..., :width].contiguous()
            y = rows.reshape(*y.shape[:2], -1)
            states[0] = states[0][..., :width].contiguous()
    return [y, *states]

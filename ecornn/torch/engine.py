"""Engines, the compiled layers of a module, one for each kind of call; the weights that a module has at a moment, those
among them that a cell computes from its parameters; and who watches a call.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch.autograd import profiler
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils.weak import WeakTensorKeyDictionary

from ecornn.cells import Cell, derive
from ecornn.errors import DTypeError, WeightsError
from ecornn.runtime.layer import Layer
from ecornn.torch.bound import BoundLayers
from ecornn.torch.compiling import KEPT, Job
from ecornn.torch.kind import Kind, kind_of, narrowed, narrowed_rows, text_of, widened
from ecornn.torch.snapshot import Snapshot, replayed

_modules: weakref.WeakKeyDictionary[torch.nn.Module, Engine] = weakref.WeakKeyDictionary()
# the first of the weights -> all of them and their engine, for each layer that has this one
_weights = WeakTensorKeyDictionary()
_lock = threading.Lock()
_options_of = attrgetter(
    "mode", "input_size", "hidden_size", "num_layers", "bias", "bidirectional", "proj_size", "tf32")
_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
PLAIN = {torch.Tensor, torch.nn.Parameter}  # classes that run no code of a subclass


# -- watched calls go through PyTorch's dispatcher, all others the short way past it ------------
def watching() -> bool:
    """Tells whether modes, functorch's transforms or the profiler, who see operators only, watch all calls."""
    if _modes() or torch._C._functorch.maybe_current_level() is not None or profiler._is_profiler_enabled:
        return True
    # torch.device(...) as a context has nothing to see here
    return _function_modes() > 0 and any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())


def watched(tensors: Iterable[torch.Tensor]) -> bool:
    """Tells whether a call on these tensors must go through the dispatcher, as tracers and tensor subclasses need."""
    return watching() or not PLAIN.issuperset(map(type, tensors))


# -- engines ------------------------------------------------------------------------------------
class Engine:
    """The compiled layers of one torch module, or of the weights that the operator is given.

    Attributes
    ----------
    kind : the kind of the module
    refused : kinds of calls, and columns of packed sequences, that no schedule serves
    pending : kinds of calls whose modules are compiled in the background, see falling_back.py
    calls, shared : values kept between calls, see like_before.py and stepping_training.py
    """

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.refused: set[tuple[Any, ...]] = set()
        self.pending: dict[tuple[Any, ...], Job] = {}
        self._captured: set[Layer] = set()  # CUDA graphs read their weights, nobody tells for how long
        self.trained = BoundLayers(kind)
        self.inference, self.training = BoundLayers(kind, self.trained), self.trained.layer
        self._parts: dict[int, Engine] = {}
        self.calls: dict[Any, Any] = {}
        self.shared: Any = None

    @contextmanager
    def layer(self, weights: Sequence[torch.Tensor], x: Any, batch: int, steps: int,
              masks: str = "") -> Iterator[Layer]:
        """The layer for x, of this B and about this T, with the weights as they are now, which it keeps until the
        context ends; ``masks``: its argument besides, nothing, ``lengths`` or ``sequences``."""
        check_type(x, weights[0])
        one = self.inference.take(weights, x, (steps, batch), masks)
        try:
            if x.is_cuda and torch.cuda.is_current_stream_capturing():
                self._captured.add(one.layer)
            yield one.layer
        finally:
            self.inference.give(one)

    def run(self, weights: Sequence[torch.Tensor], x: torch.Tensor, state: Sequence[torch.Tensor],
            lengths: torch.Tensor | None) -> list[torch.Tensor]:
        """y (T, B, D*H) and the states (L*D, B, H) of the layer with these weights, in PyTorch's order, on x
        (T, B, I), from ``state``, or from zeros if that is empty."""
        masks = {} if lengths is None else {"lengths": lengths}
        if x.is_cuda and replayed(weights):  # packed at each call, and so where the last ones were
            with self.training(weights, x, "".join(masks), states=False) as layer:
                return self.called(layer, x, state, **masks)
        with self.layer(weights, x, x.shape[1], x.shape[0], "".join(masks)) as layer:
            return self.called(layer, x, state, **masks)

    def called(self, layer: Layer, x: torch.Tensor, state: Sequence[torch.Tensor], **masks: Any) -> list[torch.Tensor]:
        """The results of :meth:`run` by this layer."""
        with torch.no_grad():
            return self.results(*layer(x, self.given(state), **masks))

    def given(self, state: Sequence[Any]) -> tuple[Any, ...] | None:
        """The states that a layer takes for states (L*D, B, H), or gradients of them; None in place of one is zeros."""
        return tuple(s[0] if self.kind.single and s is not None else s for s in widened(self.kind, state)) or None

    def results(self, y: torch.Tensor, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """y and states (L*D, B, H) from those that a layer returns."""
        return [narrowed_rows(self.kind, y), *self.states(states)]

    def states(self, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """States (L*D, B, H), or gradients of them, from those that a layer returns."""
        return narrowed(self.kind, [s.reshape(-1, s.shape[-2], self.kind.hidden) for s in states])

    def part(self, layer: int | None, kind: str) -> Engine:
        """The engine of one layer, of the kind that this text names; None: this engine, of all layers."""
        if layer is None:
            return self
        if layer not in self._parts:
            self._parts[layer] = Engine(kind_of(kind))
        return self._parts[layer]

    def rebind(self) -> None:
        """Has the next call of every kind read the weights again. Calls that run now keep what they have."""
        self.inference.outdate()
        self.trained.outdate()
        for part in self._parts.values():
            part.rebind()


def engine_of(module: torch.nn.Module) -> Engine:
    """The module's engine, made with its first call; the operator finds it by the weights. A copy gets its own."""
    engine = known_engine(module)
    if engine is None:
        engine = _modules[module] = engine_for(kind_of(text_of(module)), weights_of(module))
    return engine


def known_engine(module: Any) -> Engine | None:
    """The module's engine, if it has one and its attributes are what they were: a user may set them."""
    engine = _modules.get(module)
    if engine is None:
        return None
    kind, keep = engine.kind, module.keep
    kept = kind.keep == keep or (kind.keep is None and keep in KEPT.values())
    return engine if kept and kind.options == _options_of(module) else None


def engine_for(kind: Kind, weights: Sequence[torch.Tensor]) -> Engine:
    """The engine of these very tensors. Raises :class:`WeightsError` if a layer has more of them, or fewer."""
    if len(weights) != len(kind.names):
        raise WeightsError(f"{len(weights)} weights of {kind}; expected {', '.join(kind.names)}")
    if kind.keep is not None and kind.keep == KEPT.get(weights[0].device.type):
        kind = replace(kind, keep=None)  # the kind of calls without a graph
    with _lock:
        known: list[tuple[list[weakref.ref[torch.Tensor]], Engine]] = _weights.setdefault(weights[0], [])
        for tensors, engine in known:
            if engine.kind == kind and all(ref() is w for ref, w in zip(tensors, weights, strict=True)):
                return engine
        # weights that are new at each call die, and leave the layers compiled for them to the next ones
        gone = [entry for entry in known if any(ref() is None for ref in entry[0])]
        engine = next((engine for _, engine in gone if engine.kind == kind), None) or Engine(kind)
        known[:] = [*(entry for entry in known if entry not in gone), ([weakref.ref(w) for w in weights], engine)]
        return engine


def check_type(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Raises :class:`DTypeError` if x is not of the weights' type, unless autocast sees to that."""
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        given, wanted = (str(t.dtype).removeprefix("torch.") for t in (x, weight))
        raise DTypeError("input.dtype", given, f"{wanted}, as the weights'")


def rebind(module: torch.nn.Module) -> None:
    """:meth:`Engine.rebind` of the engines of a module and of its own weights, as far as these have been called."""
    _computed.pop(module, None)
    engines = [_modules.get(module)] if hasattr(module, "_flat_weights_names") else []
    with _lock:
        for weight in (*module._parameters.values(), *module._buffers.values()):
            engines += [engine for _, engine in (_weights.get(weight) or ())] if weight is not None else []
    for engine in engines:
        if engine is not None:
            engine.rebind()


def let_go(module: torch.nn.Module) -> None:
    """Forgets the weak references to a module and its own weights: PyTorch swaps no tensor that has one."""
    _modules.pop(module, None)
    with _lock:
        for weight in module._parameters.values():
            if weight is not None:
                _weights.pop(weight, None)


def let_go_if_swapped(module: torch.nn.Module) -> None:
    """:func:`let_go` before a conversion that swaps the module's tensors."""
    if torch.__future__.get_swap_module_params_on_conversion():
        let_go(module)


def weights_of(module: Any) -> list[torch.Tensor]:
    """The weights of a module at this moment; raises :class:`WeightsError` if one has been set to None.
    ``_flat_weights`` may have others: torch.func.functional_call puts its own into ``_parameters``, and a
    parametrization makes new ones at each access, as a cell that computes its own does."""
    own, names = module._parameters, module._flat_weights_names
    derived: Derived | None = module.__dict__.get("_derived")
    if derived is not None:
        return derived.weights(module)
    try:
        weights = [w for w in map(own.__getitem__, names) if w is not None]  # a module's getattr() takes its time
    except KeyError:
        weights = [w for name in names if (w := getattr(module, name)) is not None]
    if len(weights) < len(names):
        none = ", ".join(name for name in names if getattr(module, name) is None)
        raise WeightsError(f"{none} of {module} is None; expected a tensor")
    return weights


# -- weights that a cell computes ---------------------------------------------------------------
# for calls without gradients: the parameters, the weights that were computed of them, and whether in inference mode
_computed: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Snapshot, list[torch.Tensor], bool]] = \
    weakref.WeakKeyDictionary()
_calls = threading.local()  # the weights of modules that this thread is calling


class Derived:
    """Computes the weights with these ``names``, in this order, and their gradients, of a module's ``learned`` ones."""

    def __init__(self, cell: Cell, input: int, hidden: int, learned: list[str], names: list[str]) -> None:
        self._cell, self._input, self._hidden, self._learned, self._names = cell, input, hidden, learned, names

    def weights(self, module: torch.nn.Module) -> list[torch.Tensor]:
        """The weights of the module as it is now."""
        calls: tuple[tuple[torch.nn.Module, list[torch.Tensor]], ...] = getattr(_calls, "now", ())
        for called, weights in calls:
            if called is module:
                return weights
        own = [getattr(module, name) for name in self._learned]
        if torch.compiler.is_compiling() or watched(own):
            return self._computed(own)
        if torch.is_grad_enabled() and any(w.requires_grad for w in own):
            weights = self._computed(own)
            for weight in weights:
                if weight.requires_grad:  # an optimizer comes next, and some leave no trace
                    weight.register_hook(partial(_trained, weakref.ref(module)))
            return weights
        known = _computed.get(module)
        inference = torch.is_inference_mode_enabled()  # no graph keeps tensors of that
        if known is None or known[2] != inference or not known[0].holds(own):
            known = _computed[module] = Snapshot(own), self._computed(own), inference
        return known[1]

    def _computed(self, own: list[torch.Tensor]) -> list[torch.Tensor]:
        weights = derive(self._cell, dict(zip(self._learned, own, strict=True)), self._input, self._hidden)
        return [torch.as_tensor(weights[name]).contiguous() for name in self._names]  # NumPy's if computed of none

    @contextmanager
    def once(self, module: torch.nn.Module) -> Iterator[None]:
        """Gives all calls within the context the same weights, whose gradients go one way back."""
        before = getattr(_calls, "now", ())
        _calls.now = ((module, self.weights(module)), *before)
        try:
            yield
        finally:
            _calls.now = before


def _trained(module: weakref.ref[torch.nn.Module], gradient: torch.Tensor) -> None:
    """Runs as a hook of a weight, when its gradient is there."""
    alive = module()
    if alive is not None:
        _computed.pop(alive, None)

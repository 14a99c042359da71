"""Engines, the compiled layers of a module by kind of call; the weights that it has at a moment; who watches a call."""

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
from torch import distributed
from torch.autograd import forward_ad, profiler
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils.weak import WeakTensorKeyDictionary

from ecornn.cells import Cell, derive
from ecornn.errors import ArgumentError, DTypeError, WeightsError
from ecornn.runtime.columns import Columns
from ecornn.runtime.layer import Layer
from ecornn.runtime.plan import kept_layout
from ecornn.torch.bound import BoundLayer, BoundLayers
from ecornn.torch.by_address import LayerStep
from ecornn.torch.compiling import KEPT, NAMES, Job, compiled, precision_of
from ecornn.torch.kind import Kind, kind_of, text_of
from ecornn.torch.snapshot import Snapshot, replayed, suspect

_modules: weakref.WeakKeyDictionary[torch.nn.Module, Engine] = weakref.WeakKeyDictionary()
# the first of the weights -> all of them and their engine, for each layer that has this one
_weights = WeakTensorKeyDictionary()
_lock = threading.Lock()
# what a user may set in a module, and the same in its kind
_options_of = attrgetter(
    "mode", "input_size", "hidden_size", "num_layers", "bias", "bidirectional", "proj_size", "tf32")
_kinds_options = attrgetter("mode", "input", "hidden", "layers", "bias", "bidirectional", "projection", "tf32")
_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
PLAIN = {torch.Tensor, torch.nn.Parameter}  # classes that run no code of a subclass


# -- watched calls go through PyTorch's dispatcher, all others the short way past it ------------
def watching() -> bool:
    """Tells whether modes, transforms, forward derivatives or the profiler, who see operators only, watch all calls."""
    if (_modes() or torch._C._functorch.maybe_current_level() is not None or profiler._is_profiler_enabled
            or forward_ad._current_level >= 0):
        return True
    # torch.device(...) as a context has nothing to see here
    return _function_modes() > 0 and any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())


def watched(tensors: Iterable[torch.Tensor]) -> bool:
    """Tells whether a call on these tensors must go through the dispatcher, as tracers and tensor subclasses need."""
    return watching() or not PLAIN.issuperset(map(type, tensors))


# -- engines ------------------------------------------------------------------------------------
class Passes:
    """The layer ``one`` of a forward pass, which had packed ``packs`` times then, for the backward pass: modules may
    come in between, and what one of them keeps is not what another one reads; and its ``step``, if it went by that."""

    one: BoundLayer | None = None
    packs = 0
    step: LayerStep | None = None


def captured(x: torch.Tensor) -> bool:
    """Tells whether a CUDA graph captures calls on x, and so keeps for ever what computes them."""
    return bool(x.is_cuda and torch.cuda.is_current_stream_capturing())


class Engine:
    """The compiled layers of one torch module, or of the weights that the operator is given."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.options = kind, _kinds_options(kind)
        self.refused: set[tuple[Any, ...]] = set()  # kinds of calls, and columns, that no schedule serves
        self.pending: dict[tuple[Any, ...], Job] = {}  # kinds of calls whose modules are compiled in the background
        self._captured: set[Layer] = set()  # CUDA graphs read their weights, nobody tells for how long
        self.trained = BoundLayers(kind)
        self.inference, self.training = BoundLayers(kind, self.trained), self.trained.layer
        self._parts: dict[int, Engine] = {}
        # kept between calls, see like_before.py; the second by place, as of :func:`ecornn.torch.bound.place_of`
        self.calls: dict[Any, Any] = {}
        self.shared: dict[Any, Any] = {}

    @contextmanager
    def layer(self, weights: Sequence[torch.Tensor], x: Any, batch: int, steps: int,
              masks: str = "") -> Iterator[Layer]:
        """The layer for x, of this B and about this T, with the weights of now, kept until the context ends."""
        check_type(x, weights[0])
        one = self.inference.take(weights, x, (steps, batch), masks)
        try:
            if captured(x):
                self._captured.add(one.layer)
            yield one.layer
        finally:
            self.inference.give(one)

    def run(self, weights: Sequence[torch.Tensor], x: torch.Tensor, state: Sequence[torch.Tensor],
            lengths: torch.Tensor | None) -> list[torch.Tensor]:
        """y (T, B, D*H) and the states (L*D, B, H) of a layer on x (T, B, I), from ``state``; empty: zeros."""
        masks = masks_of(lengths)
        if x.is_cuda and replayed(weights):  # packed at each call, and so where the last ones were
            with self.training(weights, x, "".join(masks), states=False) as layer:
                return self.called(layer, x, state, **masks)
        with self.layer(weights, x, x.shape[1], x.shape[0], "".join(masks)) as layer:
            return self.called(layer, x, state, **masks)

    def called(self, layer: Layer, x: torch.Tensor, state: Sequence[torch.Tensor], **masks: Any) -> list[torch.Tensor]:
        with torch.no_grad():
            return self.results(*layer(x, self.given(state), **masks))

    def forward(self, weights: Sequence[torch.Tensor], x: torch.Tensor, state: Sequence[torch.Tensor],
                lengths: torch.Tensor | Columns | None, passes: Passes | None = None) -> list[torch.Tensor]:
        """The results of :meth:`run`, and the bytes that :meth:`backward` reads; ``lengths`` may be columns of x.
        ``passes``: notes the layer for the way back; a module's call and autograd have checked the arguments then."""
        steps, batch = x.shape[:2]
        masks = masks_of(lengths)
        one = self.trained.take(weights, x, (steps, batch), "".join(masks), states=False)
        try:
            if passes is not None:
                passes.one, passes.packs = one, one.packs
                passes.step = step = self._by_address(one, x, lengths)
                if step is not None:
                    return step.forward(x, state)
            with torch.no_grad():
                kept = x.new_empty(one.layer.kept_bytes(steps, batch), dtype=torch.uint8)
                y, after, _ = one.layer.forward(x, self.given(state), **masks, memory=kept)
                # autograd lets nobody write to views of what several are returned of
                return [*(t.data if t._is_view() else t for t in self.results(y, after)), kept]
        finally:
            self.trained.give(one)

    def backward(self, weights: Sequence[torch.Tensor], x: torch.Tensor, state: Sequence[torch.Tensor],
                 lengths: torch.Tensor | Columns | None, y: torch.Tensor, kept: torch.Tensor,
                 gradients: Sequence[torch.Tensor | None], want_state: bool = True,
                 passes: Passes | None = None) -> list[Any]:
        """Gradients of x, ``state``, None unless ``want_state``, and the weights, from those of y and last states."""
        kind, masks, wanted = self.kind, masks_of(lengths), want_state and bool(state)
        step = None
        if passes is None or passes.one is None or captured(x):  # a graph packs what it reads
            one = self.trained.take(weights, x, x.shape[:2], "".join(masks), again=True, states=wanted)
        else:
            one = self.trained.take_again(passes.one, weights, x, passes.packs, wanted)
            step = passes.step if one is passes.one else self._by_address(one, x, lengths)
        try:
            if step is not None:
                found = step.backward(x, state, y, kept, gradients, wanted, weights[0].dtype)
            else:
                with torch.no_grad():
                    memory = kept.clone() if kept.data_ptr() % 16 else kept  # it may have been in a file or on the host
                    again = one.layer.kept_in(memory, x, kind.widened(y), self.given(state), **masks)
                    dy, *dstates = gradients
                    computed = one.layer.backward(again, None if dy is None else kind.widened(dy), self.given(dstates),
                                                  want_state=wanted)
                    before = self.states(computed.state) if wanted else [None] * len(state)
                    found = [computed.x, *before, *kind.gradients(computed.weights)]
        finally:
            self.trained.give(one)
        suspect(weights)  # an optimizer may come next
        return [g if g is None or g.dtype is of.dtype else g.to(of.dtype)
                for g, of in zip(found, (x, *state, *weights), strict=True)]

    def _by_address(self, one: BoundLayer, x: torch.Tensor, lengths: Any) -> LayerStep | None:
        """A step of the layer that checks nothing; None where there is none of that kind."""
        return None if lengths is not None or self.kind.projection or captured(x) else one.step(*x.shape[:2])

    def given(self, state: Sequence[Any]) -> tuple[Any, ...] | None:
        """The states that a layer takes for states (L*D, B, H), or gradients of them; None in place of one is zeros."""
        padded = [self.kind.widened(s) if n == 0 and s is not None else s for n, s in enumerate(state)]
        return tuple(s[0] if self.kind.single and s is not None else s for s in padded) or None

    def results(self, y: torch.Tensor, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """y and states (L*D, B, H) from those that a layer returns."""
        return [self.kind.narrowed(y), *self.states(states)]

    def states(self, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """States (L*D, B, H), or gradients of them, from those that a layer returns."""
        whole = [s.reshape(-1, s.shape[-2], self.kind.hidden) for s in states]
        return [s if n else self.kind.narrowed(s) for n, s in enumerate(whole)]

    def part(self, layer: int | None, kind: str) -> Engine:
        """The engine of one layer, of the kind that this text names; None: this engine, of all layers."""
        if layer is None:
            return self
        if layer not in self._parts:
            self._parts[layer] = Engine(kind_of(kind))
        return self._parts[layer]

    def rebind(self) -> None:
        self.inference.outdate()
        self.trained.outdate()
        for part in self._parts.values():
            part.rebind()


def masks_of(lengths: torch.Tensor | Columns | None) -> dict[str, Any]:
    return {} if lengths is None else {"sequences" if isinstance(lengths, Columns) else "lengths": lengths}


def kept_bytes(kind: Kind, x: torch.Tensor, lengths: torch.Tensor | None) -> Any:
    """The bytes that :meth:`Engine.forward` keeps for x (T, B, I). Raises :class:`ArgumentError` for other types."""
    if x.dtype not in NAMES:
        raise ArgumentError("x.dtype", x.dtype, ", ".join(NAMES.values()))
    steps, batch = x.shape[:2]
    spec = kind.spec(_hint(batch, 8), _hint(steps, 64), NAMES[x.dtype], "".join(masks_of(lengths)),
                     kind.keep or KEPT[x.device.type], precision_of(kind, x))
    return kept_layout(compiled(spec, "cuda" if x.is_cuda else "cpu").manifest, steps, batch)[1]


def _hint(size: Any, otherwise: int) -> int:
    """The value that a size had when it was traced."""
    hint = size if isinstance(size, int) else size.node.hint
    return otherwise if hint is None else hint


def engine_of(module: torch.nn.Module) -> Engine:
    """The module's engine, made with its first call; the operator finds it by the weights. A copy gets its own."""
    if (engine := known_engine(module)) is None:
        engine = _modules[module] = engine_for(kind_of(text_of(module)), weights_of(module))
    return engine


def known_engine(module: Any) -> Engine | None:
    """The module's engine, if it has one and its attributes are what they were: a user may set them."""
    if (engine := _modules.get(module)) is None:
        return None
    kind, keep = engine.kind, module.keep
    kept = kind.keep == keep or (kind.keep is None and keep in KEPT.values())
    return engine if kept and engine.options == _options_of(module) else None


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
    for engine in filter(None, engines):
        engine.rebind()


def let_go(module: torch.nn.Module) -> None:
    """Forgets the weak references to a module and its own weights: PyTorch swaps no tensor that has one."""
    _modules.pop(module, None)
    with _lock:
        for weight in module._parameters.values():
            if weight is not None:
                _weights.pop(weight, None)


def weights_of(module: Any) -> list[torch.Tensor]:
    """The weights of a module at this moment; raises :class:`WeightsError` if one is None. ``_flat_weights`` may have
    others: functional_call puts its own into ``_parameters``, and a parametrization makes new ones at each access."""
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


# -- gradients that leave layer by layer --------------------------------------------------------
# A compiled stack is one node of PyTorch's graph, and all of its gradients are there at once. If somebody waits for one
# layer's, as when they are added up over processes, layers are compiled and called one after the other, as with dropout
# between them: a node each. That costs a few calls more, and what layers would do at the same time.
def layers_of(module: Any, weights: Sequence[torch.Tensor],
              state: Sequence[torch.Tensor]) -> Iterator[tuple[Sequence[torch.Tensor], list[torch.Tensor]]]:
    """The weights of each layer of a module, and its part of states (L*D, B, H)."""
    parts, each = 1 + module.bidirectional, len(weights) // module.num_layers
    for layer in range(module.num_layers):
        yield weights[layer * each:(layer + 1) * each], [s[layer * parts:(layer + 1) * parts] for s in state]


def by_layer(module: Any, weights: Iterable[torch.Tensor]) -> bool:
    """Tells whether gradients leave layer by layer: in ``torch.distributed``, whose DistributedDataParallel leaves no
    trace, and for hooks of weights; not in graphs of torch.compile, which runs the nodes of a backward pass as one."""
    if module.num_layers == 1 or torch.compiler.is_compiling():
        return False
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return True
    return any(getattr(w, "_post_accumulate_grad_hooks", None) for w in weights)


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
    if (alive := module()) is not None:
        _computed.pop(alive, None)

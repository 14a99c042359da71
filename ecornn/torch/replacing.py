"""Swapping the recurrent layers of a model in place, by changing their classes; compiling ahead; and ``profile()``."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from ecornn.boundary import public
from ecornn.build import cache
from ecornn.build.commands import WORK
from ecornn.cells import BUILTIN
from ecornn.errors import ArgumentError, EcornnError, FallbackError
from ecornn.heartbeat import going
from ecornn.interrupts import safe_interrupts
from ecornn.layer_spec import LayerSpec
from ecornn.module_cache import get_ready, known, without_hints
from ecornn.notebook import table
from ecornn.torch import compiling, engine, falling_back, gains
from ecornn.torch.cells import CompiledCell, GRUCell, LSTMCell, RNNCell, is_left
from ecornn.torch.compiling import KEPT, NAMES, about, checked_keep, compiled, few_steps, precision_of
from ecornn.torch.kind import kind_of, text_of
from ecornn.torch.modules import GRU, LSTM, RNN, Compiled, Sequences

CELLS: dict[type[Any], type[Any]] = {one.TORCH: one for one in (LSTMCell, GRUCell, RNNCell)}
OURS: dict[type[Any], type[Any]] = {one.TORCH: one for one in (LSTM, GRU, RNN)} | CELLS
COMPILED = Compiled, CompiledCell
# the methods that a call goes through: a class with one of its own may mean something else
CALL = ("forward", "__call__", "_call_impl", "check_input", "check_forward_args", "check_hidden_size",
        "get_expected_hidden_size", "get_expected_cell_size", "permute_hidden", "flatten_parameters")
ROUNDS, SECONDS = 7, 5.0  # of a profile: turns of each side, and seconds of a row at most
BUSY = "Other programs kept the processor busy meanwhile. On an idle machine, times and their ratios may differ."


@dataclass(frozen=True)
class Report:
    """The layers that :func:`replace` swapped and those that it left.

    Attributes
    ----------
    swapped : names of the layers that are compiled from now on
    kept : name of a recurrent layer that was left alone -> the reason
    expected : name of a swapped layer -> how many times as fast layers like it are where these were measured, in
        words; :func:`profile` times a model here"""

    swapped: tuple[str, ...]
    kept: dict[str, str]
    expected: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{name}: compiled" + (f"; {self.expected[name]}" if name in self.expected else "")
                 for name in self.swapped]
        lines += [f"{name}: not compiled, {why}" for name, why in self.kept.items()]
        return "\n".join(lines) or "no recurrent layers"

    def _repr_html_(self) -> str:
        return table([*((name, "compiled", self.expected.get(name, "")) for name in self.swapped),
                      *((name, "not compiled", why) for name, why in self.kept.items())], ("layer", "", ""))


@public
def replace(model: torch.nn.Module, *, fullgraph: bool = False, tf32: bool | None = None,
            keep: str | None = None, wait: bool = False) -> Report:
    """Makes every ``torch.nn.LSTM``, ``GRU`` and ``RNN`` of a model a compiled one, in place, and every ``LSTMCell``,
    ``GRUCell`` and ``RNNCell``.

    The layers stay the same objects, with their parameters, hooks, parametrizations and names, and ``isinstance``
    still finds their old class; only their class changes, to one below that. The same goes for classes of a user's own
    that leave the calls to torch.nn, or whose ``forward`` ends in ``super().forward()``. The model itself may be such a
    layer. Returns which layers were swapped, what to expect of these, and which were not and why.

    ``fullgraph``: torch.compile refuses to look into any ``torch.nn.LSTM``, ``GRU`` or ``RNN``, and leaves these out of
    its graphs, replaced or not. With ``fullgraph`` layers of these very classes become :class:`ecornn.torch.LSTM` and
    so on, which it takes into one graph; they are ``torch.nn.RNNBase`` and no ``torch.nn.LSTM``.

    ``tf32``: True or False says whether products of float32 on a GPU may be in TF32. None: they may if cuDNN's RNNs may
    at the time of a call, which is PyTorch's default; ``torch.backends.cudnn.rnn.fp32_precision = "ieee"`` or
    ``torch.backends.cudnn.allow_tf32 = False`` keep them exact. A layer has it as ``tf32``. Cells go by the setting of
    PyTorch's products, ``torch.backends.cuda.matmul``, which are exact by default.

    ``keep``: the values that a training step keeps for its backward pass: ``gates``, or ``states``, which takes less
    memory and more time; None: ``gates``. A layer has it as ``keep``; cells have their own way.

    ``wait``: True has the first call of each kind wait until its module is compiled, which takes seconds. By default
    PyTorch's own layer runs until then, forward and backward, and a process of low priority compiles the module. A
    layer has it as ``wait``. ``ECORNN_WAIT=1`` and ``torch.use_deterministic_algorithms(True)`` have all layers wait;
    :func:`ecornn.torch.prepare` compiles ahead.

    Raises :class:`ArgumentError` for another ``tf32``, ``keep`` or ``wait``; with ``ECORNN_STRICT=1``
    :class:`~ecornn.errors.FallbackError` in place of leaving a recurrent layer alone, and changes nothing."""
    if tf32 is not None and not isinstance(tf32, bool):
        raise ArgumentError("tf32", tf32, "None, True or False")
    if not isinstance(wait, bool):
        raise ArgumentError("wait", wait, "True or False")
    checked_keep(keep)

    def ours(kind: Any) -> type[Any]:
        return OURS[kind] if kind in CELLS or (fullgraph and kind in OURS) else compiled_class(kind)

    swapped, kept = dict[str, Any](), dict[str, str]()
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.RNNBase, torch.nn.RNNCellBase)) and not isinstance(module, COMPILED):
            if (why := obstacle(module)) is None:
                swapped[name or type(module).__name__] = module
            else:
                kept[name or type(module).__name__] = why
    if kept and falling_back.strict():
        raise FallbackError("; ".join(f"{name} would not be compiled: {why}" for name, why in kept.items()))
    for module in swapped.values():
        reclass(module, ours)
        module.tf32, module.wait = tf32, wait
        if isinstance(module, torch.nn.RNNBase):
            module.keep = keep
    if swapped:
        with contextlib.suppress(ImportError, EcornnError):  # which the first call raises
            get_ready()
    known = {name: gains.expected(module) for name, module in swapped.items()}
    return Report(tuple(swapped), kept, {name: words for name, words in known.items() if words})


@public
def restore(model: torch.nn.Module) -> tuple[str, ...]:
    """Undoes :func:`replace`, in place: every compiled LSTM, GRU, RNN and cell of a model gets its class of before, or
    that of ``torch.nn``. Returns their names."""
    names = []
    for name, module in model.named_modules():
        if isinstance(module, COMPILED):
            reclass(module, original_class)
            for option in ("tf32", "keep", "wait"):
                module.__dict__.pop(option, None)
            names.append(name or type(module).__name__)
    return tuple(names)


@public
def rebind(model: torch.nn.Module) -> None:
    """Has the compiled layers of a model, which may be one itself, read their weights again at their next call.

    Call it after writes that leave no trace on a tensor, if the weights are on a GPU or single values changed: writes
    through ``.data``, which often swap averaged weights in, through NumPy, by another process that shares the memory,
    and in inference mode. The model may also be one of ``torch.export``."""
    for module in model.modules():
        engine.rebind(module)


def obstacle(module: torch.nn.Module) -> str | None:
    """The reason that a layer cannot be swapped; None if it can."""
    own = overridden(type(module))
    if own is None:
        return f"{type(module).__name__} is not an LSTM, GRU or RNN of torch.nn"
    if own:
        return f"{type(module).__name__} overrides methods, which may change what it computes: {', '.join(own)}"
    name = "weight_hh_l0" if isinstance(module, torch.nn.RNNBase) else "weight_hh"
    weight = getattr(module, name, None)  # of whatever kind: a parameter, a buffer, computed from others
    if not isinstance(weight, torch.Tensor):
        return f"its {name} is {weight}, not a tensor"
    if weight.device.type not in ("cpu", "cuda"):
        return f"it is on {weight.device}"
    if not compiling.serves(weight.device, weight.dtype):
        return f"ecornn does not compile layers with {weight.dtype} weights on {weight.device.type}"
    return None


# -- compiling ahead ---------------------------------------------------------------------------
@public
def prepare(model: torch.nn.Module, *example: Any, processes: int | None = None, **named: Any) -> int:
    """Compiles the modules that the layers of ``model`` need for calls like ``model(*example, **named)``: of these
    shapes, data types and devices, with gradients if these would be asked for. The model may be a layer itself.
    Progress is printed on stderr every few seconds, or shown in one line of a notebook. Compiled modules stay in the
    build cache, for other processes, too.

    The model is called once, with PyTorch's own layers; a :class:`Recurrent` compiles then. ``processes``: the number
    of processes that compile at the same time, by default that of PyTorch's threads. Returns the number of kinds of
    layers. Packed sequences on a GPU are left to their first call, since their columns depend on lengths, and so are
    layers of a class that has a ``forward`` of its own.

    Raises :class:`ArgumentError` if no layer of the model is compiled."""
    layers: list[Any] = [module for module in model.modules() if isinstance(module, COMPILED)]
    if not layers:
        raise ArgumentError("model", type(model), "a model with compiled layers, as after "
                            "ecornn.torch.replace(model)")
    wanted: dict[Any, tuple[LayerSpec, str]] = {}

    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given, runs = {**dict(zip(("input", "hx"), args, strict=False)), **kwargs}, type(module)
        module.__class__ = kinds[module]
        for spec, target in specs(module, given["input"], given.get("hx")):
            wanted[spec.workload, spec.stack, spec.training, target] = spec, target
        module.__class__ = runs

    # arguments that a class's own forward hands on are not seen before its first call
    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in layers
             if (kind := original_class(type(module))).forward is getattr(base_of(kind), "forward", None)]
    kinds: dict[Any, Any] = {module: type(module) for module in layers}
    try:
        for module in layers:
            reclass(module, original_class)
        with without_hints(), torch.random.fork_rng(), going("ecornn: calling the model to see what it needs"):
            model(*example, **named)
    finally:
        for module, kind in kinds.items():
            module.__class__ = kind
        for hook in hooks:
            hook.remove()
    with without_hints():
        compile_all([*wanted.values()], processes or torch.get_num_threads())
    return len(wanted)


def specs(module: Any, input: Any, hx: Any) -> list[tuple[LayerSpec, str]]:
    """The layers to compile for a call, with their targets: one by one if it goes layer by layer; or none."""
    why, asked = falling_back.obstacle(module, input, hx)
    packed = isinstance(input, PackedSequence)
    data = input.data if packed else input
    if why or data.numel() == 0 or (data.is_cuda and packed) or (module.one_step and is_left(module, data)):
        return []
    sizes = (len(input.batch_sizes), int(input.batch_sizes[0])) if packed else module.call_sizes(data)
    target, (T, B) = "cpu" if data.is_cpu else "cuda", sizes
    alone = module._drops or (asked and engine.by_layer(module, engine.weights_of(module)))
    kinds = [kind_of(text_of(module, layer)) for layer in (range(module.num_layers) if alone else [None])]
    steps = (few_steps(T) if target == "cuda" and not asked else 0) or about(T)
    return [(kind.spec(B, steps, NAMES[data.dtype], "lengths" if packed else "", KEPT[target] if asked else None,
                       precision_of(kind, data)), target) for kind in kinds]


@safe_interrupts()
def compile_all(wanted: Sequence[tuple[LayerSpec, str]], processes: int) -> None:
    """Compiles all layers, in processes of their own if there is a cache that hands modules on."""
    def apart(spec: LayerSpec, target: str) -> bool:
        return spec.workload.cell.partition("(")[0] in BUILTIN and not known(spec, target)

    alone = len(wanted) == 1 or processes == 1 or cache.folder() is None
    compilers = compiling.Compilers(0 if alone else min(processes, len(wanted)))
    try:
        jobs = [compiling.Job(*asked) if not alone and apart(*asked) else None for asked in wanted]
        for begun in filter(None, jobs):
            compilers.submit(begun)
        with going(f"ecornn: compiled 0 of {len(wanted)} layers") as told:
            for number, (asked, job) in enumerate(zip(wanted, jobs, strict=True), 1):
                if job is not None:
                    job.wait(WORK)  # what it could not compile is compiled here, where its error is one
                compiled(*asked)
                told(f"ecornn: compiled {number} of {len(wanted)} layers, {asked[0].workload}")
    finally:
        compilers.stop()


# -- times of a model and of its layers, as PyTorch's and as compiled ones -----------------------
@dataclass(frozen=True)
class Gain:
    """Seconds of one call ``before``, as PyTorch's, and ``after``, compiled; with backward if that would follow."""

    name: str  # of the layer in the model; empty for the model itself
    kind: str  # its class, such as LSTM(40, 64)
    calls: int  # how often one call of the model calls it
    before: float
    after: float
    busy: bool = False  # other programs used the processor in half of the turns, or more: an idle machine may differ

    @property
    def ratio(self) -> float:
        """How many times as fast it is."""
        return self.before / self.after


@dataclass(frozen=True)
class Profile:
    """The layers that were called, in the model's order, and the whole model. As text it is a table."""

    layers: tuple[Gain, ...]
    model: Gain

    def _rows(self) -> list[tuple[str, ...]]:
        return [("layer", "calls", "before", "after", "as fast"),
                *((f"{one.name} {one.kind}".strip(), str(one.calls), f"{one.before * 1e3:.3g} ms",
                   f"{one.after * 1e3:.3g} ms", f"{one.ratio:.2f}x") for one in (*self.layers, self.model))]

    def _note(self) -> list[str]:
        return [BUSY] * any(one.busy for one in (*self.layers, self.model))

    def _repr_html_(self) -> str:
        head, *rows = self._rows()
        return table(rows, head) + "".join(f"<p>{note}</p>" for note in self._note())

    def __str__(self) -> str:
        rows = self._rows()
        first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
        lines = ["  ".join((row[0].ljust(first), *map(str.rjust, row[1:], others))) for row in rows]
        return "\n".join(lines + self._note())


@public
def profile(model: torch.nn.Module, *example: Any, **named: Any) -> Profile:
    """Times a model and its recurrent layers as PyTorch's and as compiled ones, in turns, for calls like
    ``model(*example, **named)``: of these shapes, in the mode that the model is in, with the backward pass to its
    weights unless gradients are disabled.

    The model stays as it is, replaced or not: copies of it are timed, one with PyTorch's layers, and one with those
    that :func:`replace` swaps. What is not compiled yet is compiled first. Each layer is timed by itself, with the
    arguments of its first call in the model; of one that is called several times, one call. A row takes some seconds
    at most; turns in which other programs were busy are made again.

    Raises :class:`ArgumentError` for a model without a layer that can be compiled."""
    ours = copy.deepcopy(model)
    if not any(isinstance(module, COMPILED) for module in ours.modules()):
        report = replace(ours)
        if not report.swapped:
            raise ArgumentError("model", type(model), f"a model with a layer that can be compiled: {report}")
    theirs = copy.deepcopy(ours)
    restore(theirs)
    layers: dict[str, Any] = {name: one for name, one in ours.named_modules() if isinstance(one, COMPILED)}
    for layer in layers.values():
        layer.wait = True
    with torch.random.fork_rng():
        prepare(ours, *example, **named)
        calls = calls_of(theirs, [*layers], example, named)
        with going("ecornn: timing PyTorch's layers and compiled ones in turns"):
            found = [Gain(name, f"{type(layer).__name__}({layer.input_size}, {layer.hidden_size})", len(calls[name]),
                          *seconds(theirs.get_submodule(name), layer, *calls[name][0]))
                     for name, layer in layers.items() if calls[name]]
            return Profile(tuple(found), Gain("", type(model).__name__, 1, *seconds(theirs, ours, example, named)))


def calls_of(model: torch.nn.Module, names: list[str], example: Any, named: Any) -> dict[str, list[tuple[Any, Any]]]:
    """The arguments of all calls of the layers with these names in a call of the model."""
    calls: dict[str, list[tuple[Any, Any]]] = {name: [] for name in names}
    hooks = [model.get_submodule(name).register_forward_pre_hook(
        lambda _, args, kwargs, name=name: calls[name].append((args, kwargs)), with_kwargs=True) for name in names]
    with torch.no_grad():
        model(*example, **named)
    for hook in hooks:
        hook.remove()
    return calls


def seconds(theirs: Any, ours: Any, args: Any, kwargs: Any) -> tuple[float, float, bool]:
    """Medians of calls of a module as PyTorch's and as a compiled one, that take turns; and whether as many turns were
    disturbed by other programs as were not."""
    from ecornn.bench.turns import host_turns  # not with ecornn.torch, which is imported more often than it profiles

    sides = {"before": step_of(theirs, args, kwargs), "after": step_of(ours, args, kwargs)}
    turns, again = host_turns(sides, lambda: None, ROUNDS, SECONDS, clock)
    before, after = (median(chain(*turns[side])) for side in sides)
    return before, after, again >= len(turns["after"])


def step_of(module: torch.nn.Module, args: Any, kwargs: Any) -> Callable[[], None]:
    """A call of a module, and the gradients of its weights if a user could ask for these."""
    weights = [p for p in module.parameters() if p.requires_grad]

    def step() -> None:
        results = [t for t in tree_leaves(module(*args, **kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
        if results and weights:
            torch.autograd.grad(results, weights, [*map(torch.ones_like, results)], allow_unused=True)

    return step


def clock(run: Callable[[], object]) -> float:
    """Seconds of a run, until the current GPU has done it, if there is one."""
    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    wait()
    begin = perf_counter()
    run()
    wait()
    return perf_counter() - begin


# -- classes of layers --------------------------------------------------------------------------
def base_of(kind: type[Any]) -> type[Any] | None:
    """The class of torch.nn that ``kind`` is, or is below."""
    return next((base for base in OURS if issubclass(kind, base)), None)


def overridden(kind: type[Any]) -> list[str] | None:
    """The methods of a call that neither are torch.nn's nor end in torch.nn's; None for a class below none of its."""
    base = base_of(kind)
    if base is None:
        return None
    own = [name for name in CALL if getattr(kind, name, None) is not getattr(base, name, None)]
    return [] if own == ["forward"] and _goes_on(kind) else own


def _goes_on(kind: type[Any]) -> bool:
    """Tells whether each ``forward`` of a class calls the next one, as ``super().forward()``, until torch.nn's."""
    own = [vars(one)["forward"] for one in kind.__mro__[:kind.__mro__.index(base_of(kind))] if "forward" in vars(one)]
    codes = [getattr(forward, "__code__", None) for forward in own]
    return all(code is not None and {"super", "forward"} <= {*code.co_names} for code in codes)


@functools.cache
def compiled_class(kind: Any) -> type[Any]:
    """A class below ``kind`` whose calls are those of the compiled class, or end there if ``kind`` has its own."""
    base: Any = base_of(kind)
    forward = OURS[base].forward if base in CELLS else _forward
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__,
             "__init__": kind.__init__, "__reduce_ex__": _reduce, "_compiled_from": kind}
    if kind.forward is not base.forward:
        return type(kind.__name__, (kind, compiled_class(base)), named)  # which has the compiled one before torch.nn's
    return type(kind.__name__, (OURS[base], kind), named | {"forward": forward})


def original_class(kind: Any) -> type[Any]:
    before: type[Any] | None = kind.__dict__.get("_compiled_from")
    return before or kind.TORCH


def reclass(module: torch.nn.Module, change: Callable[[type[Any]], type[Any]]) -> None:
    """Changes a module's class; of a parametrized one, whose class has its parameters, the class below."""
    kind = type(module)
    if parametrize.is_parametrized(module):
        own = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
        module.__class__ = type(kind.__name__, (change(kind.__bases__[0]),), own)
    else:
        module.__class__ = change(kind)


def _forward(self: Sequences, input: Any, hx: Any = None) -> Any:
    return Sequences.forward(self, input, hx)


# torch.compile breaks its graph around what is a torch.nn.LSTM; it must not look into the call then, all the way down
_frames = torch._C._dynamo.eval_frame
_frames.set_code_exec_strategy(_forward.__code__, _frames._FrameExecStrategy(
    _frames._FrameAction.SKIP, _frames._FrameAction.SKIP))


def _reduce(module: Any, protocol: Any) -> str | tuple[Any, ...]:
    """Pickles the class of before: the class made of it has no name by which it could be found."""
    if "_compiled_from" not in vars(type(module)):  # a class below: the usual way
        return object.__reduce_ex__(module, protocol)
    state = getattr(module, "__getstate__", lambda: module.__dict__)  # RNNBase's: without its weak references
    return _empty, (type(module)._compiled_from,), state()


def _empty(kind: Any) -> Any:
    compiled: Any = compiled_class(kind)
    return compiled.__new__(compiled)


# -- torch.ao.quantization, which goes by exact classes -----------------------------------------
# It gives each module a ``qconfig``, None if the class is none of those to quantize. A compiled layer that is given
# one, by its name or its own class, becomes torch.nn's, which PyTorch then quantizes. A layer that is given None stays
# as it is; it warns, since torch.nn.LSTM among the classes may have meant it.
def _qconfig(module: Any) -> Any:
    if "qconfig" not in vars(module):
        raise AttributeError("qconfig")
    return vars(module)["qconfig"]


def _set_qconfig(module: Any, value: Any) -> None:
    vars(module)["qconfig"] = value
    if value is not None:
        restore(module)
        return
    warnings.warn(f"torch.ao.quantization does not quantize a compiled {type(module).__name__}, since it only knows "
                  "exact classes. To quantize it, call ecornn.torch.restore(model) first, or name the layer in "
                  "qconfig_spec", stacklevel=2)


for _kind in COMPILED:
    _kind.qconfig = property(_qconfig, _set_qconfig, lambda module: vars(module).pop("qconfig", None))

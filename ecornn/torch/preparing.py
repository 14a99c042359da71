"""``prepare()``: compiles what a model's first calls would, ahead and in parallel."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from ecornn.boundary import public
from ecornn.build import cache
from ecornn.build.commands import WORK
from ecornn.cells import BUILTIN
from ecornn.errors import ArgumentError
from ecornn.interrupts import safe_interrupts
from ecornn.layer_spec import LayerSpec
from ecornn.module_cache import known
from ecornn.torch import training
from ecornn.torch.background import Compilers
from ecornn.torch.compiling import KEPT, NAMES, compiled, few_steps, precision_of
from ecornn.torch.engine import weights_of
from ecornn.torch.falling_back import obstacle
from ecornn.torch.kind import kind_of, text_of
from ecornn.torch.replacing import COMPILED, base_of, original_class, reclass


@public
def prepare(model: torch.nn.Module, *example: Any, processes: int | None = None, **named: Any) -> int:
    """Compiles the modules that the layers of ``model`` need for calls like ``model(*example, **named)``: of these
    shapes, data types and devices, with gradients if these would be asked for. The model may be a layer itself.
    Progress is printed on stderr. Compiled modules stay in the build cache, for other processes, too.

    The model is called once, with PyTorch's own layers; a :class:`Recurrent` compiles then. ``processes``: the number
    of processes that compile at the same time, by default that of PyTorch's threads. Returns the number of kinds of
    layers. Packed sequences on a GPU are left to their first call, since their columns depend on lengths, and so are
    layers of a class that has a ``forward`` of its own.

    Raises :class:`ArgumentError` if no layer of the model is compiled.
    """
    layers: list[Any] = [module for module in model.modules() if isinstance(module, COMPILED)]
    if not layers:
        raise ArgumentError("model", type(model), "a model with compiled layers: ecornn.torch.replace(model) makes "
                            "them")
    calls: dict[tuple[Any, Call], None] = {}

    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given, runs = {**dict(zip(("input", "hx"), args, strict=False)), **kwargs}, type(module)
        module.__class__ = kinds[module]
        if (call := call_of(module, given["input"], given.get("hx"))) is not None:
            calls[module, call] = None
        module.__class__ = runs

    # arguments that a class's own forward hands on are not seen before its first call
    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in layers
             if (kind := original_class(type(module))).forward is getattr(base_of(kind), "forward", None)]
    kinds: dict[Any, Any] = {module: type(module) for module in layers}
    try:
        for module in layers:
            reclass(module, original_class)
        with torch.random.fork_rng():
            model(*example, **named)
    finally:
        for module, kind in kinds.items():
            module.__class__ = kind
        for hook in hooks:
            hook.remove()
    wanted = {(spec.workload, spec.stack, spec.training, call.target): (spec, call.target)
              for module, call in calls for spec in specs(module, call)}
    compile_all([*wanted.values()], processes or torch.get_num_threads())
    return len(wanted)


@dataclass(frozen=True)
class Call:
    """The properties of a call that a layer is compiled for: T, B, the data type, masks, the target, whether gradients
    are asked for, and the precision of products."""

    steps: int
    batch: int
    dtype: str
    masks: str
    target: str
    asked: bool
    precision: str | None


def call_of(module: Any, input: Any, hx: Any) -> Call | None:
    """The call of a layer with these arguments; None if no module serves it, or if nobody can say which."""
    why, asked = obstacle(module, input, hx)
    packed = isinstance(input, PackedSequence)
    data = input.data if packed else input
    if why or (packed and data.is_cuda) or data.numel() == 0:
        return None
    sizes = (len(input.batch_sizes), int(input.batch_sizes[0])) if packed else module.call_sizes(data)
    if sizes is None:
        return None
    masks, target = "lengths" if packed else "", "cpu" if data.is_cpu else "cuda"
    steps, batch = sizes
    return Call(steps, batch, NAMES[data.dtype], masks, target, asked, precision_of(kind_of(text_of(module)), data))


def specs(module: Any, call: Call) -> list[LayerSpec]:
    """The layers to compile for a call: one by one with dropout, and with gradients that leave layer by layer."""
    alone = module._drops or (call.asked and training.by_layer(module, weights_of(module)))
    kinds = [text_of(module, layer) for layer in range(module.num_layers)] if alone else [text_of(module)]
    keep = KEPT[call.target] if call.asked else None
    steps = (few_steps(call.steps) if call.target == "cuda" and not call.asked else 0) or call.steps
    return [kind_of(kind).spec(call.batch, steps, call.dtype, call.masks, keep, call.precision) for kind in kinds]


@safe_interrupts()
def compile_all(wanted: Sequence[tuple[LayerSpec, str]], processes: int) -> None:
    """Compiles all layers, in processes of their own if there is a cache that hands modules on."""
    def apart(spec: LayerSpec, target: str) -> bool:
        return spec.workload.cell.partition("(")[0] in BUILTIN and not known(spec, target)

    alone = len(wanted) == 1 or processes == 1 or cache.folder() is None
    compilers = Compilers(0 if alone else min(processes, len(wanted)))
    try:
        jobs = [None if alone or not apart(*asked) else compilers.submit(*asked) for asked in wanted]
        for number, (asked, job) in enumerate(zip(wanted, jobs, strict=True), 1):
            if job is not None:
                job.wait(WORK)  # what it could not compile is compiled here, where its error is one
            compiled(*asked)
            print(f"ecornn: {number} of {len(wanted)} layers are compiled, {asked[0].workload}", file=sys.stderr)
    finally:
        compilers.stop()

"""Swapping the recurrent layers of a model in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ecornn.boundary import public
from ecornn.errors import ArgumentError
from ecornn.torch import engine
from ecornn.torch.classes import CELLS, COMPILED, OURS, compiled_class, original_class, overridden, reclass
from ecornn.torch.compiling import checked_keep, serves
from ecornn.torch.sequences import Sequences


@dataclass(frozen=True)
class Report:
    """What :func:`replace` did.

    Attributes
    ----------
    swapped : names of the layers that are compiled from now on
    kept : name of a recurrent layer that was left alone -> why
    """

    swapped: tuple[str, ...]
    kept: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{name}: compiled" for name in self.swapped]
        lines += [f"{name}: left alone, {why}" for name, why in self.kept.items()]
        return "\n".join(lines) or "no recurrent layers"


@public
def replace(model: torch.nn.Module, *, fullgraph: bool = False, tf32: bool | None = None,
            keep: str | None = None) -> Report:
    """Makes every ``torch.nn.LSTM``, ``GRU`` and ``RNN`` of a model a compiled one, in place, and every ``LSTMCell``,
    ``GRUCell`` and ``RNNCell``.

    The layers stay the same objects, with their parameters, hooks, parametrizations and names, and ``isinstance`` finds
    them to be what they were; only their class changes, to one below that. So it is with classes of a user's own that
    leave the calls to torch.nn, or whose ``forward`` goes on in ``super().forward()``. The model itself may be such a
    layer. Returns what was swapped, and what was not and why.

    ``fullgraph``: torch.compile refuses to look into what is a ``torch.nn.LSTM``, ``GRU`` or ``RNN``, and leaves it out
    of its graphs, as it did before. With this, layers of these very classes become :class:`ecornn.torch.LSTM` and so
    on, which it has in one graph, and which are ``torch.nn.RNNBase`` alone.

    ``tf32``: whether products of float32 on a GPU may be in TF32. None: where cuDNN's RNNs may at the time of a call,
    which is PyTorch's default; ``torch.backends.cudnn.rnn.fp32_precision = "ieee"`` or
    ``torch.backends.cudnn.allow_tf32 = False`` keep them exact, and so does False here. A layer has it as ``tf32``.

    ``keep``: what layers keep of a training step: ``gates``, or ``states``, which takes less memory and more time;
    None: ``gates``. A layer has it as ``keep``; cells have their own way.

    Raises :class:`ArgumentError` for another ``tf32`` or ``keep``.
    """
    if tf32 is not None and not isinstance(tf32, bool):
        raise ArgumentError("tf32", tf32, "None, True or False")
    checked_keep(keep)

    def ours(kind: Any) -> type[Any]:
        return OURS[kind] if kind in CELLS or (fullgraph and kind in OURS) else compiled_class(kind)

    swapped, kept = [], {}
    for name, module in model.named_modules():
        name = name or type(module).__name__
        if isinstance(module, (Sequences, *COMPILED)):
            continue
        if isinstance(module, (torch.nn.RNNBase, torch.nn.RNNCellBase)):
            why = obstacle(module)
            if why is None:
                reclass(module, ours)
                module.tf32 = tf32  # type: ignore[assignment]
                if isinstance(module, torch.nn.RNNBase):
                    module.keep = keep  # type: ignore[assignment]
                swapped.append(name)
            else:
                kept[name] = str(why)
    return Report(tuple(swapped), kept)


@public
def restore(model: torch.nn.Module) -> tuple[str, ...]:
    """Makes every compiled LSTM, GRU, RNN and cell of a model what it was, or one of ``torch.nn``, in place: what
    :func:`replace` did, undone. Returns their names."""
    names = []
    for name, module in model.named_modules():
        if isinstance(module, COMPILED):
            reclass(module, original_class)
            for option in ("tf32", "keep"):
                module.__dict__.pop(option, None)
            names.append(name or type(module).__name__)
    return tuple(names)


@public
def rebind(model: torch.nn.Module) -> None:
    """Has the compiled layers of a model, which may be one itself, read their weights again at their next call.

    Needed on a GPU, or where single values change, after writes that leave no trace on a tensor: through ``.data``, as
    many do that swap averaged weights in, through NumPy, by another process that shares them, and in inference mode.
    The model may also be one of ``torch.export``.
    """
    for module in model.modules():
        engine.rebind(module)


def obstacle(module: torch.nn.Module) -> str | None:
    """Why a layer cannot be swapped; None: it can."""
    own = overridden(type(module))
    if own is None:
        return f"{type(module).__name__} is no LSTM, GRU or RNN of torch.nn's"
    if own:
        return f"{type(module).__name__} has methods of its own, which may do more: {', '.join(own)}"
    name = "weight_hh_l0" if isinstance(module, torch.nn.RNNBase) else "weight_hh"
    weight = getattr(module, name, None)  # of whatever kind: a parameter, a buffer, computed from others
    if not isinstance(weight, torch.Tensor):
        return f"its {name} is {weight}, which is no tensor"
    if weight.device.type not in ("cpu", "cuda"):
        return f"it is on {weight.device}"
    if not serves(weight.device, weight.dtype):
        return f"its weights are {weight.dtype}, which is not compiled for {weight.device.type}"
    return None

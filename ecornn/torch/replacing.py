"""Swapping the recurrent layers of a model in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ecornn.torch import engine
from ecornn.torch.modules import GRU, LSTM, RNN

OURS: dict[type[torch.nn.RNNBase], type[torch.nn.RNNBase]] = {
    torch.nn.LSTM: LSTM, torch.nn.GRU: GRU, torch.nn.RNN: RNN}


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


def replace(model: torch.nn.Module) -> Report:
    """Makes every ``torch.nn.LSTM``, ``GRU`` and ``RNN`` of a model a compiled one, in place.

    The layers stay the same objects, with their parameters, hooks and names; only their class changes. The
    model itself may be such a layer. Returns what was swapped, and what was not and why.
    """
    swapped, kept = [], {}
    for name, module in model.named_modules():
        name = name or type(module).__name__
        if isinstance(module, (LSTM, GRU, RNN)):
            continue
        if isinstance(module, (torch.nn.RNNBase, torch.nn.RNNCellBase)):
            why = obstacle(module)
            if why is None and isinstance(module, torch.nn.RNNBase):
                module.__class__ = OURS[type(module)]
                swapped.append(name)
            else:
                kept[name] = str(why)
    return Report(tuple(swapped), kept)


def restore(model: torch.nn.Module) -> tuple[str, ...]:
    """Makes every compiled LSTM, GRU and RNN of a model one of ``torch.nn``, in place: what :func:`replace` did,
    undone. Returns their names."""
    theirs, names = {ours: kind for kind, ours in OURS.items()}, []
    for name, module in model.named_modules():
        if type(module) in theirs:
            module.__class__ = theirs[type(module)]
            names.append(name or type(module).__name__)
    return tuple(names)


def rebind(model: torch.nn.Module) -> None:
    """Has the compiled layers of a model, which may be one itself, read their weights again at their next call.

    Needed on a GPU, or where single values change, after writes that leave no trace on a tensor: through ``.data``, as
    many do that swap averaged weights in, through NumPy, and in inference mode. The model may also be one of
    ``torch.export``.
    """
    for module in model.modules():
        engine.rebind(module)


def obstacle(module: torch.nn.Module) -> str | None:
    """Why a layer cannot be swapped; None: it can."""
    if isinstance(module, torch.nn.RNNCellBase):
        return "a cell is called one step at a time: there is no sequence to compile"
    if type(module) not in OURS:
        return f"{type(module).__name__} is a class of its own, whose forward() may do more"
    weight = module.weight_hh_l0
    if weight.dtype not in engine.NAMES:
        return f"its weights are {weight.dtype}"
    if weight.device.type not in ("cpu", "cuda"):
        return f"it is on {weight.device}"
    if weight.is_cpu and weight.dtype != torch.float32:
        return f"on a CPU, only float32 is compiled, not {weight.dtype}"
    return None

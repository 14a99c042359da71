"""``cell()``: a step that is written in PyTorch, as a cell."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

import torch

from ecornn.errors import ArgumentError
from ecornn.torch.traced_cell import TracedCell
from ecornn.torch.traced_check import hold
from ecornn.torch.traced_graph import Traced


def cell(step: Any, *, input_size: int | None = None, hidden_size: int | None = None,
         states: Sequence[str] | None = None, name: str | None = None) -> TracedCell:
    """A step that is written in PyTorch, as an :class:`ecornn.Cell`.

    Parameters
    ----------
    step : a ``torch.nn.Module`` or a function, called as ``step(x, h)``, ``step(x, h, c)`` or, with several ``states``,
        ``step(x, (h, c))``, with x (B, I) and states (B, H); it returns the new states in their order, or y (B, H)
        before these. Also a ``torch.nn.LSTMCell``, ``GRUCell`` or ``RNNCell``
    input_size, hidden_size : I and H of the module; default: its attributes of these names
    states : their names; default: those of the step's arguments behind x
    name : of the cell; default: the module's class

    Its parameters are the module's, with underscores for dots in their names; :meth:`TracedCell.weights` returns their
    values. A matrix, or vector, of less than H rows stays so at any H; such a vector is a parameter (H,), zeros behind
    it. PyTorch computes tensors that the module computes of its weights alone, as a weight norm or a mask, once for
    weights and not in each step: then the cell's ``learned`` are the module's. Buffers do not train, nor do parameters
    that are frozen.

    torch.export reads the step once: a branch of Python cannot depend on the values of tensors. The cell is compared
    with the module, on random inputs and states, values and gradients, before it is returned.

    Raises :class:`~ecornn.errors.CellError` for an operator that is not taken, with its line, and if the cell computes
    anything else than the module, with the first operator that differs; and
    :class:`~ecornn.errors.ArgumentError` if a size or a name is missing.
    """
    if not isinstance(step, torch.nn.Module) and not callable(step):
        raise ArgumentError("step", step, "a torch.nn.Module or a function")
    sizes = {}
    for key, value in (("input_size", input_size), ("hidden_size", hidden_size)):
        size = value if value is not None else getattr(step, key, None)
        if not isinstance(size, int) or size < 1:
            raise ArgumentError(key, size, "a number >= 1, here or as an attribute of the module")
        sizes[key] = size
    own = type(step).__name__ if isinstance(step, torch.nn.Module) else getattr(step, "__name__", "step")
    name = re.sub(r"\W", "_", own).strip("_").lower() if name is None else name
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z]\w{0,63}", name, re.ASCII):
        raise ArgumentError("name", name, "letters, digits and underscores, a letter first")
    names = states_of(step, states)
    together = len(names) > 1 and len(_positional(step)) == 2
    # a class of its own, which no other process can import
    kind: type[TracedCell] = type(name, (TracedCell,), {"__qualname__": f"cell.<locals>.{name}", "name": name})
    traced = kind(Traced(step, sizes["input_size"], sizes["hidden_size"], names, together))
    hold(traced)
    return traced


def states_of(step: Any, states: Sequence[str] | None) -> tuple[str, ...]:
    """The names of the states: those given, or of the step's arguments. Raises :class:`ArgumentError` if there are
    none."""
    if states is not None:
        if isinstance(states, str) or not states or not all(isinstance(s, str) for s in states):
            raise ArgumentError("states", states, "a tuple of names, such as ('h', 'c')")
        return tuple(states)
    given = _positional(step)[1:]
    if given == ["hx"] and isinstance(step, torch.nn.RNNCellBase):
        return ("h", "c") if isinstance(step, torch.nn.LSTMCell) else ("h",)
    if not given:
        raise ArgumentError("step", step, "one with arguments behind x, its states")
    return tuple(given)


def _positional(step: Any) -> list[str]:
    """The names of a step's arguments."""
    given = inspect.signature(step.forward if isinstance(step, torch.nn.Module) else step).parameters.values()
    return [p.name for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]

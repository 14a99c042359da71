"""``cell``: a step that is written in PyTorch, as a cell."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ecornn.cells import Cell
from ecornn.errors import ArgumentError, CellError
from ecornn.torch.traced_step import Source, Traced, Walk, trace


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

    Its parameters are the module's, a dot in a name as an underscore; :meth:`TracedCell.weights` has their values. A
    matrix, or vector, of less than H rows stays so at any H; such a vector is a parameter (H,), zeros behind it. The
    step is read once, by torch.fx: what depends on the values of tensors cannot be a branch of Python.

    Raises :class:`~ecornn.errors.CellError` for an operator that is not taken, with its line, and
    :class:`~ecornn.errors.ArgumentError` where a size or a name is missing.
    """
    if not isinstance(step, torch.nn.Module) and not callable(step):
        raise ArgumentError("step", step, "a torch.nn.Module or a function")
    sizes = {}
    for key, value in (("input_size", input_size), ("hidden_size", hidden_size)):
        found = value if value is not None else getattr(step, key, None)
        if not isinstance(found, int) or found < 1:
            raise ArgumentError(key, found, "a number >= 1, here or as an attribute of the module")
        sizes[key] = found
    kind = type(step).__name__ if isinstance(step, torch.nn.Module) else getattr(step, "__name__", "step")
    name = re.sub(r"\W", "_", kind).strip("_").lower() if name is None else name
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z]\w{0,63}", name, re.ASCII):
        raise ArgumentError("name", name, "letters, digits and underscores, a letter first")
    return _here(name, Traced(step, sizes["input_size"], sizes["hidden_size"], states_of(step, states)))


def _here(name: str, traced: Traced) -> TracedCell:
    """A cell of a class of its own, which no other process can import."""
    return type(name, (TracedCell,), {"__qualname__": f"cell.<locals>.{name}", "name": name})(traced)


def states_of(step: Any, states: Sequence[str] | None) -> tuple[str, ...]:
    """The names of the states."""
    if states is not None:
        if isinstance(states, str) or not states or not all(isinstance(s, str) for s in states):
            raise ArgumentError("states", states, "a tuple of names, such as ('h', 'c')")
        return tuple(states)
    if isinstance(step, torch.nn.RNNCellBase):
        return ("h", "c") if isinstance(step, torch.nn.LSTMCell) else ("h",)
    given = inspect.signature(step.forward if isinstance(step, torch.nn.Module) else step).parameters.values()
    names = tuple(p.name for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))[1:]
    if not names:
        raise ArgumentError("step", step, "one with arguments behind x, its states")
    return names


class TracedCell(Cell):
    """A cell that :func:`cell` has made."""

    def __init__(self, traced: Traced) -> None:
        from tvm import te

        self.traced, self.graph = traced, trace(traced.step)
        self.states = traced.states
        self.sources: dict[str, Source] = {}
        shapes: dict[str, Any] = {}

        def made(name: str, source: Source) -> Any:
            known = self.sources.setdefault(name, source)
            if known != source:
                raise CellError(f"cell {self.name!r}: {source} and {known} would both be the parameter {name!r}")
            return shapes.setdefault(name, te.placeholder(source.shape(traced.input, traced.hidden), "float32",
                                                          name=name))

        x = te.placeholder((3, traced.input), "float32", name="x")
        before = [te.placeholder((3, traced.hidden), "float32", name=n) for n in traced.states]
        walk = Walk(traced, self.graph, x, before, made)
        self.shown = len(walk.run()) - len(traced.states)  # 1: y is none of the states
        if self.shown:
            self.states, self.output = ("y", *traced.states), "y"
            if "y" in traced.states:
                raise CellError(f"cell {self.name!r}: a state is called y, as the output before the states would be")

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        """The module's, gates first."""
        return {name: source.shape(input, hidden) for name, source in self.sources.items()}

    def step(self, x: Any, states: Sequence[Any], parameters: Mapping[str, Any]) -> Sequence[Any]:
        """The module's step on te tensors, at any I and H."""
        walk = Walk(self.traced, self.graph, x, states[self.shown:], lambda name, _: parameters[name])
        return walk.run()

    def weights(self, module: Any = None, layer: int = 0, reverse: bool = False) -> dict[str, torch.Tensor]:
        """The weights of a module, by default the one that was traced, as those of a layer: for :meth:`Module.bind`, or
        ``load_state_dict`` of an :class:`ecornn.torch.Recurrent`; the module's memory where they are no parts of it,
        nor vectors of less than H values."""
        module = self.traced.step if module is None else module
        known: dict[str, torch.Tensor] = dict(module.named_parameters()) | dict(module.named_buffers()) if isinstance(
            module, torch.nn.Module) else {}
        hidden = next((len(w.t() if s.transposed else w) // s.gates for s in self.sources.values() if not s.rows
                       for w in [known[s.name]]), 0)
        return {self.parameter_name(name, layer, reverse): source.of(known[source.name].detach(), hidden)
                for name, source in self.sources.items()}

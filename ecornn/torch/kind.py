"""The kind of a torch module, all that it is beside its weights, and what these are in a compiled layer.

Its text is an argument of the operator, which graphs and files keep: it says where to find a user's cell."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch.nn.functional import pad

from ecornn.cells import BUILTIN, Cell, get
from ecornn.cells.base import flat_shape
from ecornn.cells.naming import load_cell
from ecornn.errors import ArgumentError
from ecornn.layer_spec import LayerSpec

CELLS = {"LSTM": "lstm", "GRU": "gru", "RNN_TANH": "rnn_tanh", "RNN_RELU": "rnn_relu"}
FIELDS = ("input", "hidden", "layers", "bias", "bidirectional", "projection")
TF32, KEEP = "tf32", "keep"  # fields of kinds that set them
_here: dict[str, Cell] = {}  # the cells that this process has named, by identity


def text_of(module: Any, layer: int | None = None) -> str:
    """The :class:`Kind` of a module, or of one of its layers, as text: ``LSTM(input=7,hidden=11,layers=2,bias=1,...)``,
    with a colon and the name of a ``Recurrent``'s cell behind it. torch.compile can trace this function."""
    input, layers = module.input_size, module.num_layers
    if layer is not None:
        width = module.proj_size or module.hidden_size
        input, layers = (1 + module.bidirectional) * width if layer else input, 1
    tf32 = "" if module.tf32 is None else f",{TF32}={int(module.tf32)}"
    keep = "" if module.keep is None else f",{KEEP}={module.keep}"
    return (f"{module.mode}(input={input},hidden={module.hidden_size},layers={layers},"
            f"bias={int(module.bias)},bidirectional={int(module.bidirectional)},projection={module.proj_size}{tf32}{keep})"
            f"{module.cell_name}")


def keeping(text: str, keep: str) -> str:
    """A kind's text with ``keep`` in it: graphs, cached by it, know how many bytes a training step keeps."""
    if f",{KEEP}=" in text:
        return text
    sizes, colon, name = text.partition("):")
    return f"{sizes.removesuffix(')')},{KEEP}={keep}){colon[1:]}{name}"


@dataclass(frozen=True)
class Kind:
    """A ``torch.nn.RNNBase`` or a ``Recurrent`` in torch's words."""

    mode: str  # LSTM, GRU, RNN_TANH or RNN_RELU; or cell
    input: int
    hidden: int
    layers: int
    bias: int  # 0 or 1
    bidirectional: int  # 0 or 1
    projection: int  # the width of a projected state; 0: none
    name: str = ""  # of the cell, where it is not torch's
    tf32: bool | None = None  # float32 products on a GPU may be in TF32; None: PyTorch's settings say, see compiling.py
    keep: str | None = None  # what a training step keeps, states or gates; None: as usual, see compiling.py

    @cached_property
    def cell(self) -> Cell | str:
        """The cell, or the name of a built-in one; equal for kinds of equal cells."""
        if self.name:
            return cell_of(self.name)
        return "lstm(projection)" if self.projection else CELLS[self.mode]

    @cached_property
    def text(self) -> str:
        sizes = ",".join(f"{field}={getattr(self, field)}" for field in FIELDS)
        sizes += "" if self.tf32 is None else f",{TF32}={int(self.tf32)}"
        sizes += "" if self.keep is None else f",{KEEP}={self.keep}"
        return f"{self.mode}({sizes})" + (f":{self.name}" if self.name else "")

    @cached_property
    def directions(self) -> int:
        return 1 + self.bidirectional

    @cached_property
    def width(self) -> int:
        """The number of values of one direction of an output, and of h."""
        return self.projection or self.hidden

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """The width of each state that a call returns, (L*D, B, width)."""
        return (self.width, *[self.hidden] * (len(get(self.cell).states) - 1))

    @cached_property
    def outputs(self) -> int:
        """The number of outputs in a row of y, each of ``width`` values in each direction."""
        return len(get(self.cell).output_names()) if self.name else 1

    @cached_property
    def single(self) -> bool:
        """True for one layer of one direction, whose states have no axis for these."""
        return self.layers * self.directions == 1

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the weights, in the order of torch's ``_flat_weights``, or of the cell's parameters."""
        if self.name:
            return tuple(self.flat(get(self.cell).parameters))
        kinds = ["weight_ih", "weight_hh", *(["bias_ih", "bias_hh"] if self.bias else []),
                 *(["weight_hr"] if self.projection else [])]
        ends = [f"_l{layer}{end}" for layer in range(self.layers) for end in ("", "_reverse")[:self.directions]]
        return tuple(kind + end for end in ends for kind in kinds)

    def flat(self, of: Callable[[int, int], Mapping[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
        """Shapes by a user's names in all layers, gates folded into the first axis; ``of``: one layer's for I, H."""
        cell, shapes = get(self.cell), {}
        for layer in range(self.layers):
            for second in (False, True)[:self.directions]:
                input = self.directions * self.hidden if layer else self.input
                for key, shape in of(input, self.hidden).items():
                    shapes[cell.parameter_name(key, layer, second)] = flat_shape(tuple(shape))
        return shapes

    def spec(self, batch: int, seq: int, dtype: str, masks: str, keep: str | None = None,
             precision: str | None = None) -> LayerSpec:
        """The layer for calls of this B and about this T; ``masks``: none, ``lengths`` or ``sequences``; ``keep``: of a
        training step, None if it does not train; ``precision``: None or ``tf32``."""
        return LayerSpec(self.cell, self.hidden, self.input, batch, seq, dtype, precision=precision, layers=self.layers,
                         bidirectional=bool(self.bidirectional), lengths=masks == "lengths",
                         sequences=masks == "sequences", training=keep is not None, keep=keep)

    # -- weights, states and gradients of torch's layers as those of compiled ones, and back ----
    # A compiled layer has biases, and a projection that keeps the size, with zeros where torch has nothing.
    def parameters(self, weights: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Weights of torch's layer as a compiled one's. Raises :class:`ArgumentError` for one without memory."""
        with_memory = [w.clone() if w._is_zerotensor() else w for w in weights]  # zeros of autograd's have none
        if self.projection:  # torch would copy from nowhere
            for name, w in zip(self.names, with_memory, strict=True):
                if not w.untyped_storage().size() and w.numel():
                    raise ArgumentError(f"weights[{name!r}]", "a tensor without memory of its own",
                                        "a tensor with memory")
        return self.completed({name: w.detach() for name, w in zip(self.names, with_memory, strict=True)})

    def completed(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A compiled layer's weights, of those of torch's layer by name."""
        compiled = dict(weights)
        if not self.bias:
            for name in [n for n in compiled if n.startswith("weight_hh")]:
                zeros = compiled[name].new_zeros(len(compiled[name]))
                compiled |= {name.replace("weight_hh", f"bias_{which}"): zeros for which in ("ih", "hh")}
        if self.projection:
            for name, value in compiled.items():
                if name.startswith("weight_hr"):
                    compiled[name] = pad(value, (0, 0, 0, self.hidden - self.projection))
                elif _reads_state(name):
                    compiled[name] = self.widened(value)
        return compiled

    def gradients(self, compiled: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The gradients of torch's weights, from those of the weights that :meth:`parameters` makes of them."""
        return [compiled[name][:self.width].clone() if self.projection and name.startswith("weight_hr") else
                self.narrowed(compiled[name]) if _reads_state(name) else compiled[name] for name in self.names]

    def widened(self, y: torch.Tensor) -> torch.Tensor:
        """Values (..., D*width), or of one direction, as of y and the first state, padded to (..., D*H)."""
        if not self.projection:
            return y
        return pad(y.unflatten(-1, (-1, self.width)), (0, self.hidden - self.width)).flatten(-2)

    def narrowed(self, y: torch.Tensor) -> torch.Tensor:
        if not self.projection:
            return y
        return y.unflatten(-1, (-1, self.hidden))[..., :self.width].flatten(-2).contiguous()


def _reads_state(name: str) -> bool:
    """Tells whether a weight multiplies h, or y of a layer below."""
    return name.startswith("weight_hh") or (name.startswith("weight_ih") and not name.endswith(("_l0", "_l0_reverse")))


@lru_cache(maxsize=1024)
def kind_of(text: str) -> Kind:
    """The kind of a text by :func:`text_of` or :func:`keeping`. Raises :class:`ArgumentError` for another text."""
    sizes, colon, name = text.partition("):")
    mode, _, rest = (sizes if colon else text.removesuffix(")")).partition("(")
    parts = dict(part.partition("=")[::2] for part in rest.split(","))
    keep = parts.pop(KEEP, None)
    known = (mode == "cell" if colon else mode in CELLS) and keep in (None, "states", "gates")
    fields = *parts, *([] if TF32 in parts else [TF32])
    if not known or fields != (*FIELDS, TF32) or not all(value.isdecimal() for value in parts.values()):
        raise ArgumentError("kind", text, f"a text that text_of() returns: MODE({'=N,'.join(FIELDS)}=N)")
    input, hidden, layers, bias, bidirectional, projection, *tf32 = map(int, parts.values())
    return Kind(mode, input, hidden, layers, bias, bidirectional, projection, name, bool(tf32[0]) if tf32 else None,
                keep)


def name_of(cell: Cell) -> str:
    """The name of a cell, which :func:`cell_of` knows: ``lstm(peepholes)``, or ``mgu@0f5ac8d1=package.file:Class``."""
    identity, kind = cell.identity(), type(cell)
    _here.setdefault(identity, cell)
    named = kind.__module__ != "__main__" and "<locals>" not in kind.__qualname__ and kind.__module__ in sys.modules
    return f"{identity}={kind.__module__}:{kind.__qualname__}" if named and not _builtin(identity) else identity


def cell_of(name: str) -> Cell:
    """The cell of a name by :func:`name_of`, perhaps of another process. Raises :class:`ArgumentError` without one."""
    identity, _, where = name.partition("=") if not _builtin(name) else (name, "", "")
    if identity not in _here and (where or _builtin(identity)):
        cell = load_cell(where or identity)
        if cell.identity() != identity:
            raise ArgumentError("kind", name, f"{cell.identity()}, which is the cell that {where} makes in this "
                                "process")
        _here[identity] = cell
    if identity not in _here:
        raise ArgumentError("kind", name, "a cell of this process: make an ecornn.torch.Recurrent of it first")
    return _here[identity]


def _builtin(name: str) -> bool:
    return name.partition("(")[0] in BUILTIN

"""What a torch module is beside its weights; as text it is the operator's argument, which graphs and files keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from ecornn.cells import Cell, get
from ecornn.cells.deriving import flat_shape
from ecornn.errors import ArgumentError
from ecornn.layer_spec import LayerSpec
from ecornn.torch.cell_names import cell_of

CELLS = {"LSTM": "lstm", "GRU": "gru", "RNN_TANH": "rnn_tanh", "RNN_RELU": "rnn_relu"}
FIELDS = ("input", "hidden", "layers", "bias", "bidirectional", "projection")
TF32, KEEP = "tf32", "keep"  # fields of those that say


def text_of(module: Any, layer: int | None = None) -> str:
    """The :class:`Kind` of a ``torch.nn.RNNBase`` as text, such as
    ``LSTM(input=7,hidden=11,layers=2,bias=1,bidirectional=0,projection=0)``, or that of one of its layers. Of a
    ``Recurrent`` it goes on with a colon and its cell's name. torch.compile can trace it."""
    input, layers = module.input_size, module.num_layers
    if layer is not None:
        width = module.proj_size or module.hidden_size
        input, layers = (1 + module.bidirectional) * width if layer else input, 1
    tf32 = "" if module.tf32 is None else f",{TF32}={int(module.tf32)}"
    keep = "" if module.keep is None else f",{KEEP}={module.keep}"
    return (f"{module.mode}(input={input},hidden={module.hidden_size},layers={layers},"
            f"bias={int(module.bias)},bidirectional={int(module.bidirectional)},projection={module.proj_size}{tf32}{keep})"
            + module.cell_name)


def keeping(text: str, keep: str) -> str:
    """The text of a kind that keeps this of a training step, unless it says what: graphs are cached by it, and know
    how many bytes that are."""
    if f",{KEEP}=" in text:
        return text
    sizes, colon, name = text.partition("):")
    return f"{sizes.removesuffix(')')},{KEEP}={keep}){colon[1:]}{name}"


@dataclass(frozen=True)
class Kind:
    """What a ``torch.nn.RNNBase`` or a ``Recurrent`` is, by torch's words.

    Attributes
    ----------
    mode : ``LSTM``, ``GRU``, ``RNN_TANH`` or ``RNN_RELU``; or ``cell``
    input, hidden, layers : I, H and L
    bias, bidirectional : 0 or 1
    projection : the width of a projected state; 0: none
    name : of the cell, where it is not torch's
    tf32 : whether products of float32 on a GPU may be in TF32; None: as PyTorch's settings say, see precision.py
    keep : what a training step keeps, ``states`` or ``gates``; None: as usual, see compiling.py
    """

    mode: str
    input: int
    hidden: int
    layers: int
    bias: int
    bidirectional: int
    projection: int
    name: str = ""
    tf32: bool | None = None
    keep: str | None = None

    @cached_property
    def cell(self) -> Cell | str:
        """The cell, or what a built-in one is called; equal for kinds of equal cells."""
        if self.name:
            return cell_of(self.name)
        return "lstm(projection)" if self.projection else CELLS[self.mode]

    @cached_property
    def text(self) -> str:
        """As :func:`text_of` and :func:`keeping` have it."""
        sizes = ",".join(f"{field}={getattr(self, field)}" for field in FIELDS)
        sizes += "" if self.tf32 is None else f",{TF32}={int(self.tf32)}"
        sizes += "" if self.keep is None else f",{KEEP}={self.keep}"
        return f"{self.mode}({sizes})" + (f":{self.name}" if self.name else "")

    @cached_property
    def said(self) -> tuple[Any, ...]:
        """What a module of this kind has as ``mode``, ``input_size``, ``hidden_size``, ``num_layers``, ``bias``,
        ``bidirectional``, ``proj_size`` and ``tf32``."""
        return (self.mode, self.input, self.hidden, self.layers, self.bias, self.bidirectional, self.projection,
                self.tf32)

    @cached_property
    def directions(self) -> int:
        """D."""
        return 1 + self.bidirectional

    @cached_property
    def width(self) -> int:
        """Values of one direction of an output, and of h."""
        return self.projection or self.hidden

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Of each state, as a call returns them: (L*D, B, width)."""
        return (self.width, *[self.hidden] * (len(get(self.cell).states) - 1))

    @cached_property
    def outputs(self) -> int:
        """How many a row of y has, of ``width`` values each, in each direction."""
        return len(get(self.cell).output_names()) if self.name else 1

    @cached_property
    def single(self) -> bool:
        """Whether there is one layer of one direction, whose states have no axis for these."""
        return self.layers * self.directions == 1

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the weights, in the order of torch's ``_flat_weights``, or of the cell's parameters."""
        if self.name:
            return tuple(self.shapes)
        kinds = ["weight_ih", "weight_hh", *(["bias_ih", "bias_hh"] if self.bias else []),
                 *(["weight_hr"] if self.projection else [])]
        ends = [f"_l{layer}{end}" for layer in range(self.layers) for end in ("", "_reverse")[:self.directions]]
        return tuple(kind + end for end in ends for kind in kinds)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the parameters of a cell, by name: gates are folded into the first axis."""
        return self.flat(get(self.cell).parameters)

    def flat(self, of: Callable[[int, int], Mapping[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
        """Shapes by a user's names in all layers, of what has the shapes ``of`` a layer's I and H."""
        cell, found = get(self.cell), {}
        for layer in range(self.layers):
            for second in (False, True)[:self.directions]:
                input = self.directions * self.hidden if layer else self.input
                for key, shape in of(input, self.hidden).items():
                    found[cell.parameter_name(key, layer, second)] = flat_shape(tuple(shape))
        return found

    def spec(self, batch: int, seq: int, dtype: str, masks: str, keep: str | None = None,
             precision: str | None = None) -> LayerSpec:
        """The layer to compile for calls of this B and about this T, with ``masks``: nothing, ``lengths`` or
        ``sequences``; ``keep``: what it keeps of a training step, if it trains; ``precision``: None or ``tf32``."""
        return LayerSpec(self.cell, self.hidden, self.input, batch, seq, dtype, precision=precision, layers=self.layers,
                         bidirectional=bool(self.bidirectional), lengths=masks == "lengths",
                         sequences=masks == "sequences", training=keep is not None, keep=keep)


@lru_cache(maxsize=1024)
def kind_of(text: str) -> Kind:
    """The kind that :func:`text_of` or :func:`keeping` wrote; :class:`ArgumentError` for another text."""
    sizes, colon, name = text.partition("):")
    mode, _, rest = (sizes if colon else text.removesuffix(")")).partition("(")
    parts = dict(part.partition("=")[::2] for part in rest.split(","))
    keep = parts.pop(KEEP, None)
    known = (mode == "cell" if colon else mode in CELLS) and keep in (None, "states", "gates")
    fields = *parts, *([] if TF32 in parts else [TF32])
    if not known or fields != (*FIELDS, TF32) or not all(value.isdecimal() for value in parts.values()):
        raise ArgumentError("kind", text, f"a text as text_of() makes: MODE({'=N,'.join(FIELDS)}=N)")
    input, hidden, layers, bias, bidirectional, projection, *tf32 = map(int, parts.values())
    return Kind(mode, input, hidden, layers, bias, bidirectional, projection, name, bool(tf32[0]) if tf32 else None,
                keep)

"""Options of built-in cells, and their text, such as ``lstm(peepholes,clip=3)``: a cell's name on the command line, in
records and in manifests. Activations are ONNX's: ``name``, ``name:alpha`` or ``name:alpha:beta``, with its defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from ecornn.cells.base import Cell
from ecornn.errors import ArgumentError

if TYPE_CHECKING:
    from tvm.ir import Expr

Value = bool | float | str

# name -> defaults of alpha and beta, those that it has; https://onnx.ai/onnx/operators/onnx__LSTM.html
DEFAULTS: dict[str, tuple[float, ...]] = {
    "sigmoid": (), "tanh": (), "relu": (), "softsign": (), "softplus": (), "affine": (1.0, 0.0),
    "leaky_relu": (0.01,), "thresholded_relu": (1.0,), "scaled_tanh": (1.0, 1.0), "hard_sigmoid": (0.2, 0.5),
    "elu": (1.0,)}


class Optioned(Cell):
    """A cell with options. ``OPTIONS``: names and defaults: False of a switch, a number (0: none) of a bound or share,
    an integer of a count, a text of an activation. Raises :class:`ArgumentError` for others."""

    OPTIONS: ClassVar[dict[str, Value]] = {}

    def __init__(self, **options: Value) -> None:
        for name, value in options.items():
            if name not in self.OPTIONS:
                raise ArgumentError(f"{self.name}({name})", value, f"an option of {self.name}: "
                                    f"{', '.join(self.OPTIONS) or 'it has none'}")
            check(f"{self.name}({name})", name, value, self.OPTIONS[name])
        self.options: dict[str, Any] = self.OPTIONS | options

    def spec(self) -> str:
        """The cell's name with the options that are not the defaults."""
        parts = [name if value is True else f"{name}={number(value)}" if isinstance(value, (int, float)) else
                 f"{name}={value}" for name, value in self.options.items() if value != self.OPTIONS[name]]
        return f"{self.name}({','.join(parts)})" if parts else self.name

    def identity(self) -> str:
        """The key of :meth:`Cell.identity`; of a built-in cell the text with its options."""
        return self.spec() if type(self).__module__.startswith("ecornn.cells.") else super().identity()

    def clipped(self, value: Expr) -> Expr:
        """``value`` within the bounds that ``clip`` gives the inputs of activations."""
        return within(value, self.options["clip"])


def number(value: float) -> str:
    """``value`` in as few digits as read back as the same number: six where these do."""
    text = f"{value:g}"
    return text if float(text) == value else repr(float(value))


def within(value: Expr, bound: float) -> Expr:
    """``value`` kept from ``-bound`` to ``bound``; 0 is no bound."""
    if not bound:
        return value
    from tvm import tirx

    return tirx.max(tirx.min(value, tirx.const(bound, "float32")), tirx.const(-bound, "float32"))


def mixed(share: float, old: Expr, new: Expr) -> Expr:
    """``share`` of the old value and the rest of the new one, as zoneout has it at inference."""
    if not share:
        return new
    from tvm import tirx

    return tirx.const(share, "float32") * old + tirx.const(1.0 - share, "float32") * new


def check(where: str, name: str, value: Any, default: Value) -> None:
    """Raises :class:`ArgumentError` where ``value`` is not of the option's kind."""
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ArgumentError(where, value, "True or False")
    elif isinstance(default, str):
        check_activation(where, value)
    elif name == "heads":
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 1 or value % 1:
            raise ArgumentError(where, value, "an integer, 1 at least")
    elif isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise ArgumentError(where, value, "a number >= 0")
    elif name.startswith("zoneout") and value > 1:
        raise ArgumentError(where, value, "a share from 0 to 1")


def parse(text: str) -> tuple[str, dict[str, Value]]:
    """Name and options of ``name(switch,option=value)``; :class:`ArgumentError` for another form."""
    name, bracket, rest = text.partition("(")
    if bracket and not rest.endswith(")"):
        raise ArgumentError("cell", text, "NAME or NAME(OPTION,OPTION=VALUE)")
    options: dict[str, Value] = {}
    for part in filter(None, rest.removesuffix(")").split(",")):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not key.isidentifier() or key in options or (equals and not value):
            raise ArgumentError("cell", text, "NAME or NAME(OPTION,OPTION=VALUE), each option once")
        options[key] = _value(value if equals else "true")
    return name, options


def _value(text: str) -> Value:
    try:
        return text == "true" if text in ("true", "false") else float(text)
    except ValueError:
        return text


def check_activation(where: str, text: Any) -> tuple[str, tuple[float, ...]]:
    """The name and numbers of an activation. Raises :class:`ArgumentError` for a text that names none."""
    name, *numbers = text.split(":") if isinstance(text, str) else ("",)
    try:
        values = tuple(float(n) for n in numbers)
    except ValueError:
        values = (float("nan"),)
    if name not in DEFAULTS or len(values) > len(DEFAULTS[name]) or not all(abs(v) < float("inf") for v in values):
        forms = ", ".join(":".join((n, "ALPHA", "BETA")[:1 + len(d)]) for n, d in DEFAULTS.items())
        raise ArgumentError(where, text, f"one of {forms}")
    return name, values + DEFAULTS[name][len(values):]


def activation(text: str) -> Callable[[Expr], Expr]:
    """The function of an activation, on float32 scalar expressions."""
    from tvm import te, tirx

    name, numbers = check_activation("activation", text)
    alpha, beta = (*(tirx.const(n, "float32") for n in numbers), None, None)[:2]
    zero, one = tirx.const(0.0, "float32"), tirx.const(1.0, "float32")
    table: dict[str, Callable[[Expr], Expr]] = {
        "sigmoid": te.sigmoid, "tanh": te.tanh,
        "relu": lambda v: tirx.max(v, zero),
        "softsign": lambda v: v / (one + te.abs(v)),
        # log(1 + e^v) without the overflow of e^v
        "softplus": lambda v: tirx.max(v, zero) + te.log(one + te.exp(zero - te.abs(v))),
        "affine": lambda v: alpha * v + beta,
        "leaky_relu": lambda v: tirx.Select(v >= zero, v, alpha * v),
        "thresholded_relu": lambda v: tirx.Select(v >= alpha, v, zero),
        "scaled_tanh": lambda v: alpha * te.tanh(beta * v),
        "hard_sigmoid": lambda v: tirx.max(tirx.min(alpha * v + beta, one), zero),
        "elu": lambda v: tirx.Select(v >= zero, v, alpha * (te.exp(v) - one)),
    }
    return table[name]

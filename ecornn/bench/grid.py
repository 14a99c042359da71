"""Cases to time, sides of ours compiled otherwise, and grids of both in TOML: docs/BENCHMARKING.md.

``dtype`` may also be tf32-both, float32 with precision tf32, and tf32, in which cuDNN alone rounds; of several lists
the last one's values vary fastest."""

from __future__ import annotations

import contextlib
import itertools
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from ecornn import compiler
from ecornn.bench.peers import named
from ecornn.errors import ArgumentError, MissingPackageError, ScheduleError
from ecornn.layer_spec import LayerSpec, usual_dtype
from ecornn.targets import default_target, kind_of
from ecornn.tune.choose import serving_or_raise

ALIKE = "the same as is compiled anyway"
OF_CASE = ("cell", "weights", "precision", "keep")
OF_LAYER = ("size", "group", "against", "sides", "at_most", "at_least")


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """One of ``ecornn bench``'s layers, its fields named as the options. What is None the device or the module says."""

    cell: str | None = None  # its name, or FILE.py:NAME; with a module of such a cell: what its output is held against
    hidden: int | None = None
    input: int | None = None
    batch: int | None = None
    seq: int | None = None
    dtype: str | None = None
    weights: str | None = None
    precision: str | None = None
    layers: int = 1
    bidirectional: bool = False
    reverse: bool = False
    training: bool = False  # forward and backward are timed, with the gradients of x and all weights
    keep: str | None = None
    target: str | None = None
    threads: int | None = None  # of every side, on a CPU; None: the physical cores that the process may use
    module: str | None = None  # a module's file, in place of the properties but seq and batch

    def layer(self) -> LayerSpec:
        """The layer, where it is not a module's. Raises what a layer raises, also where a property is missing."""
        for name in ("cell", "hidden"):
            if getattr(self, name) is None:
                raise ArgumentError(f"--{name}", None, "a value, or a module file in its place")
        target = self.target or default_target()
        dtype = self.dtype or usual_dtype(kind_of(target), self.precision)
        given = {name: value for name in LayerSpec.__dataclass_fields__
                 if (value := getattr(self, name, None)) is not None}
        return LayerSpec(**given | {"dtype": dtype})

    def command(self, against: tuple[str, ...]) -> list[str]:
        """The words that time it again beside these sides."""
        words = ["ecornn", "bench", *([self.module] if self.module else [])]
        for name, value in msgspec.to_builtins(self).items():
            if name != "module":
                words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        return [*words, "--against", ",".join(against) or "none"]


def case_of(values: Mapping[str, Any], where: str) -> Case:
    """A case of a file's values, which may be text, without those that are empty; or an :class:`ArgumentError`."""
    given = {name: value for name, value in values.items() if value not in ("", None)}
    try:
        return msgspec.convert(given, Case, strict=False)
    except msgspec.ValidationError as error:
        raise ArgumentError("case", f"{where}: {dict(given)}", f"options of ecornn bench as {', '.join(FIELDS)} "
                            f"({error})") from None


FIELDS = Case.__struct_fields__


class Own(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """How a side is compiled, as by :func:`ecornn.compile`; what is left open is the layer's."""

    cell: str | None = None
    weights: str | None = None
    precision: str | None = None
    keep: str | None = None
    schedule: str | None = None
    config: dict[str, Any] = {}  # knobs that are set to something else than what is chosen
    overlap: str = "auto"
    untuned: bool = False  # as if there were no records; such a side is left out where records choose the same
    like: str | None = None  # another cell, whose schedule and knobs at this size are taken
    module: str | None = None  # a module's file, which is not compiled; the side is left out where there is none
    within: str | None = None  # MODULE:NAME of a function that makes a context, in which the module is built

    def case(self, case: Case) -> Case:
        changed = {name: value for name in OF_CASE if (value := getattr(self, name)) is not None}
        return structs.replace(case, module=self.module, **changed)

    def planned(self, case: Case) -> compiler.LayerPlan:
        """The plan of what is built for a case. Raises what :func:`ecornn.compiler.plan_layer` raises, and
        :class:`~ecornn.errors.ScheduleError` where it is the same as without records."""
        own = self.case(case)

        def plan(case: Case, schedule: str | None, config: Mapping[str, Any] | None) -> compiler.LayerPlan:
            return compiler.plan_layer(case.layer(), target=case.target, schedule=schedule, config=config,
                                       overlap=self.overlap)

        whole = plan(own if self.like is None else structs.replace(own, cell=self.like), self.schedule, None)
        found = whole.found
        if self.untuned:
            first = serving_or_raise(whole.task)[0]
            config = first.default(whole.task)
            if (first.name, config) == (found.schedule.name, dict(found.config)):
                raise ScheduleError(ALIKE)
            return plan(own, first.name, config)
        if self.like is None and not self.config:
            return whole
        return plan(own, found.schedule.name, {**found.config, **self.config})

    def build(self, case: Case, out: Path) -> Path:
        """The module's file, built unless it is there."""
        if self.module is not None:
            return Path(self.module)
        if not out.exists():
            with pkgutil.resolve_name(self.within)() if self.within is not None else contextlib.nullcontext():
                compiler.build(self.planned(case), out)
        return out


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """A layer of a grid, or a file's only one: what is timed, and beside whom."""

    name: str  # of its row
    case: Case
    group: str = ""
    against: tuple[str, ...] | None = None  # libraries; None: who is there
    own: dict[str, Own] = {}  # sides of ours, by name
    at_most: float | None = None  # microseconds a step
    at_least: float | None = None  # ratio to the first side beside ours


class Grid(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A file, as it is written."""

    title: str = ""  # for the report, as about
    about: str = ""
    against: list[str] | None = None  # sides beside ours, as --against names them
    calls: int = 1  # of a short sequence that are timed as one, so that a graph's launch does not count
    means: dict[str, float] = {}  # geometric means of the ratios of a group, at least
    sides: dict[str, Own] = {}  # of ours, of every layer that does not name its own
    all: dict[str, Any] = {}
    layers: list[dict[str, Any]]

    def expanded(self, where: str) -> list[Layer]:
        """Every layer once, in the file's order; in the first of its groups."""
        found: dict[str, Layer] = {}
        for layer in self._every(where):
            found.setdefault(layer.name, layer)
        return [*found.values()]

    def members(self, group: str) -> list[Layer]:
        """The layers that the file names in a group, whether or not another has them before."""
        return [layer for layer in self._every(group) if layer.group == group]

    def _every(self, file: str) -> Iterator[Layer]:
        for number, layer in enumerate(self.layers, 1):
            values, where = self.all | layer, f"{file}, layers {number}"
            if unknown := set(values) - {*FIELDS, *OF_LAYER}:
                raise ArgumentError("--grid", f"{where}: {', '.join(sorted(unknown))}",
                                    f"some of {', '.join((*FIELDS, *OF_LAYER))}")
            against, sides = values.pop("against", self.against), values.pop("sides", None)
            own = self.sides if sides is None else msgspec.convert(sides, dict[str, Own])
            lists = [value if isinstance(value, list) else [value] for value in values.values()]
            for chosen in itertools.product(*lists):
                yield _layer(dict(zip(values, chosen, strict=True)), against, own, where)


def _layer(values: dict[str, Any], against: list[str] | None, own: dict[str, Own], where: str) -> Layer:
    """One of the combinations."""
    group, most, least = values.pop("group", ""), values.pop("at_most", None), values.pop("at_least", None)
    if "size" in values:
        parts = (text := values.pop("size")).split("x")
        if len(parts) not in (3, 4) or not all(part.isdecimal() for part in parts):
            raise ArgumentError("--grid", f"{where}: {text!r}",
                                "a size as 300x20x800 (T, B, H) or 300x20x40x800 (with I)")
        T, B, *rest = map(int, parts)
        values |= {"seq": T, "batch": B, "input": rest[0], "hidden": rest[-1]}
    dtype = str(values.get("dtype", ""))
    if dtype.startswith("tf32"):
        values |= {"dtype": "float32"} | ({"precision": "tf32"} if dtype == "tf32-both" else {})
    if dtype == "tf32":
        against = ["cudnn-tf32" if side == "cudnn" else side for side in against or ["cudnn"]]
    case = case_of(values, where)
    return Layer(name=name_of(case, dtype), case=case, group=group, own=own, at_most=most, at_least=least,
                 against=None if against is None else named(",".join(against) or "none"))


def name_of(case: Case, dtype: str = "") -> str:
    """A layer in words: its cell, T, B, I and H, the data type, and what else is not usual."""
    size = "x".join(str(v or "?") for v in (case.seq, case.batch, case.input or case.hidden, case.hidden))
    more = [f"{case.layers} layers" * (case.layers > 1), "both ways" * case.bidirectional, "reverse" * case.reverse,
            "training" * case.training, f"keep {case.keep}" if case.keep else "",
            f"weights {case.weights}" if case.weights else "", f"{case.threads} threads" if case.threads else ""]
    cell = (case.cell or case.module or "").rpartition(":")[2]
    return " ".join(filter(None, [cell, size, dtype or case.dtype or "", *more]))


def read_grid(path: Path) -> Grid:
    """A file of TOML; :class:`ArgumentError` where it is none, :class:`MissingPackageError` without a reader."""
    try:
        return msgspec.toml.decode(path.read_bytes(), type=Grid)
    except ImportError:  # Python 3.10
        raise MissingPackageError("tomli is not installed, which Python 3.10 needs for a grid in TOML: install "
                                  "ecornn's extra [bench], or pip install tomli") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ArgumentError("--grid", str(path), f"a grid in TOML ({error})") from None


def selected(layers: Sequence[Layer], only: Sequence[str]) -> list[Layer]:
    """The layers of which one of ``only`` has all its words; all without any. Raises :class:`ArgumentError` if none."""
    found = [layer for layer in layers
             if not only or any(all(word in f"{layer.group} {layer.name}" for word in text.split()) for text in only)]
    if not found:
        raise ArgumentError("--only", ", ".join(only), "words that occur in the name of a layer; --list shows the "
                            "names")
    return found

"""What is timed: a layer by its properties, or a module file; in a row of a result, and as a command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ecornn.errors import ArgumentError
from ecornn.layer_spec import LayerSpec, usual_dtype


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """One of ``ecornn bench``'s layers, its fields named as the options. What is None the device or the module says.

    Attributes
    ----------
    cell : its name, or ``FILE.py:NAME``; of a module with a cell of one's own what its output is held against
    module : a module's file, in place of the properties but ``seq`` and ``batch``
    training : whether forward and backward are timed, with the gradients of x and all weights
    threads : of every side, on a CPU; None: the physical cores that the process may use
    """

    cell: str | None = None
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
    training: bool = False
    keep: str | None = None
    target: str | None = None
    threads: int | None = None
    module: str | None = None

    def layer(self) -> LayerSpec:
        """The layer, where it is not a module's. Raises what a layer raises; of one of a grid, too, where a property
        that it needs is missing."""
        from ecornn.tune.choose import default_target

        for name in ("cell", "hidden"):
            if getattr(self, name) is None:
                raise ArgumentError(f"--{name}", None, "a value; or give a module's file")
        target = self.target or default_target()
        dtype = self.dtype or usual_dtype("cuda" if target == "cuda" or target.startswith("sm_") else "llvm",
                                          self.precision)
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
    """A case of a file's values, which may be text; what is empty is left out. Raises :class:`ArgumentError`, with
    ``where`` they stand, for names and values that a case has not."""
    given = {name: value for name, value in values.items() if value not in ("", None)}
    try:
        return msgspec.convert(given, Case, strict=False)
    except msgspec.ValidationError as error:
        raise ArgumentError("case", f"{where}: {dict(given)}", f"options of ecornn bench as {', '.join(FIELDS)} "
                            f"({error})") from None


FIELDS = Case.__struct_fields__

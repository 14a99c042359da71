"""The manifest: the description of a module in its file, which the loader reads."""

from __future__ import annotations

import msgspec

from ecornn.device import Device
from ecornn.errors import ModuleError
from ecornn.program import Buffer
from ecornn.workload import SERIAL, SINGLE, Overlap, Stack, Workload

FORMAT = 4
PACKAGES = {"ecornn": "ecornn", "tvm": "apache-tvm", "tvm_ffi": "apache-tvm-ffi"}
_INDEX_LIMIT = 2**31 - 1  # kernels count elements in int32


class Parameter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A parameter as the user passes it: PyTorch's ``name`` and ``shape``; ``key``, the packings' name, has the part's
    prefix in a stack; ``gates`` is the G that the first axis folds in."""

    name: str
    key: str
    shape: tuple[int, ...]
    gates: int


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that the loader needs besides code; ``together``, ``dx_in`` and ``in_place`` are the program's."""

    workload: Workload  # with the input size of the first layer
    device: Device
    schedule: str  # where the parts of a stack have schedules of their own, each once
    config: dict[str, int | str | bool]  # of the first part
    provenance: str  # which record was used and why, in one line
    states: tuple[str, ...]
    output: str  # the name of y
    parameters: tuple[Parameter, ...]
    buffers: tuple[Buffer, ...]
    entries: dict[str, tuple[str, ...]]  # function -> names of the buffers whose pointers it takes, in order
    versions: dict[str, str]
    format: int = FORMAT
    stack: Stack = SINGLE
    overlap: Overlap = SERIAL
    together: int = 1
    # sequences beside x: rows of x have H values of each behind its I, in this order; the workload's input counts all
    inputs: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    # tensors that a call of `backward` may have null for, and the packed buffers that such a call does not read
    optional: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    packed_for_optional: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    # several names of y: its rows have H values of each, in this order, of one direction after the other
    outputs: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    dx_in: str | msgspec.UnsetType = msgspec.UNSET
    in_place: dict[str, str] | msgspec.UnsetType = msgspec.UNSET

    @property
    def own_input(self) -> int:
        return self.workload.input - len(self.inputs or ()) * self.workload.hidden

    @property
    def y_width(self) -> int:
        """Values of a row of y: H of each output, in each direction."""
        return self.stack.directions * max(1, len(self.outputs or ())) * self.workload.hidden

    @property
    def longest(self) -> int:
        """The largest T of a call: no buffer may have more elements than an int32 counts."""
        widest = max(self.workload.input, self.y_width)
        return min([_INDEX_LIMIT // (self.workload.batch * widest), *(
            (_INDEX_LIMIT - b.extent.fixed) // b.extent.per_step for b in self.buffers if b.extent.per_step)])


class _Said(msgspec.Struct):
    """The one field that a manifest of any format has."""

    format: int


def decode(text: str) -> Manifest:
    """The manifest from its JSON. Raises :class:`ModuleError` where it is of another format, or not as it says."""
    try:
        if (number := msgspec.json.decode(text, type=_Said).format) == FORMAT:
            return msgspec.json.decode(text, type=Manifest)
    except msgspec.MsgspecError as error:
        raise ModuleError("the module does not fit this version of ecornn; compile it again "
                          f"({error})") from error
    raise ModuleError(f"the module does not fit this version of ecornn; compile it again (format {number} of its "
                      f"manifest, not {FORMAT})")


def versions() -> dict[str, str]:
    """Versions of ecornn, TVM and tvm-ffi, for manifests and records."""
    from importlib.metadata import PackageNotFoundError, version

    known = {}
    for name, package in PACKAGES.items():
        try:
            known[name] = version(package)
        except PackageNotFoundError:
            known[name] = "unknown"
    return known

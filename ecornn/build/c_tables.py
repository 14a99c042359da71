"""The C interface of a module: its code, c_api.cc, is the same for all, and reads the tables of this one.

These are 64-bit integers in the order of c_tables.h; a string is its length and its bytes, padded."""

from __future__ import annotations

from collections.abc import Container
from importlib import resources

from ecornn.build.generated import NumberTables, texts
from ecornn.device import Device
from ecornn.dtypes import DLPACK, DTYPES
from ecornn.host_cpu import FLAGS
from ecornn.manifest import Manifest
from ecornn.program import BACKWARD, ENTRIES, FORWARD, KEPT, PACKED, RUN, TENSORS, WORKSPACE, Buffer, Program, packs
from ecornn.workload import summed

SYMBOL = "ecornn_c_tables"
FILES = ("c_api.cc", "c_call.h", "c_device_pack.h", "c_layer.h", "c_pack.h", "c_tables.h", "c_tensor.h",
         "ecornn_blob.h", "number_tables.h")
HEADERS = ("ecornn.h", "ecornn_checksum.h")
# the functions that c_api.cc calls, in its order; 0 stands for one that a module does not have
FUNCTIONS = (RUN, FORWARD, BACKWARD, "pack", "alloc", "free", "copy", "synchronize")
# Kinds of pointers that an entry takes, and of packings, numbered in this order, which c_kinds.h repeats.
POINTERS = (*(name for name, tensor in TENSORS.items() if tensor.role != KEPT), KEPT, PACKED, WORKSPACE)
PACKINGS = (*DTYPES, "tf32", "int8", "scale", "int16", "int16_scale", "int21", "int21_scale", "balanced", "balance",
            "pairs")


def sources() -> dict[str, str]:
    headers = resources.files("ecornn").joinpath("include")
    return {"c_kinds.h": kinds(), **texts(*FILES), **{name: (headers / name).read_text() for name in HEADERS}}


def kinds() -> str:
    """``c_kinds.h``: the numbers of :data:`POINTERS` and :data:`PACKINGS`, as ``kStateIn`` and the like."""
    lines = [f"enum {name} : int64_t {{{', '.join('k' + v.title().replace('_', '') for v in values)}}};"
             for name, values in (("Kind", POINTERS), ("Stored", PACKINGS))]
    return "\n".join(["#pragma once", "#include <cstdint>", "", "namespace ecornn_c {", "", *lines, "",
                      "}  // namespace ecornn_c", ""])


def functions(program: Program, device: Device) -> tuple[str, ...]:
    """Symbols of :data:`FUNCTIONS`, empty where the program's module has none."""
    there, cuda = {*program.entries}, device.kind == "cuda"
    if not cuda or packs(program):
        there.add("pack")
    if cuda:
        there |= {"alloc", "free", "copy", "synchronize"}
    return tuple(f"__tvm_ffi_{name}" if name in there else "" for name in FUNCTIONS)


def tables(manifest: Manifest, entries: Container[str]) -> bytes:
    """The text that c_tables.h reads; empty for a module with packings that c_pack.h does not know. One that is no
    layer, or has other ``entries``, packs weights and no more."""
    work, stack, device = manifest.workload, manifest.stack, manifest.device
    buffers = {b.name: b for b in manifest.buffers}
    taken = {name: [buffers[b] for b in manifest.entries[name]] for name in ENTRIES if name in manifest.entries}
    packings = tuple(dict.fromkeys(b.packing for b in manifest.buffers if b.packing is not None))
    of = {p.key: number for number, p in enumerate(manifest.parameters)}
    if not all(p.dtype in PACKINGS and of.keys() >= {name for name, _ in p.sources if name} for p in packings):
        return b""
    layer = not work.backward and RUN in taken and all(name in entries for name in taken) and all(
        _kind(b) in POINTERS for each in taken.values() for b in each)
    optional = {*(manifest.packed_for_optional or ())}
    always = {b.packing for b in manifest.buffers if b.name not in optional}
    table = NumberTables()
    cuda = device.kind == "cuda"
    table.numbers(layer, 2 if cuda else 1, *DLPACK[work.dtype], *DLPACK[summed(work.dtype)], work.input, work.hidden,
                  work.batch, manifest.longest, manifest.y_width, stack.layers, stack.directions, stack.lengths,
                  stack.resets, stack.sequences, BACKWARD in taken)
    table.strings(work.cell, device.arch)
    flags = {feature: flag for flag, feature in FLAGS.items()}  # the kernel's names of them, in /proc/cpuinfo
    table.strings(*(flags.get(f, f) for f in (() if cuda else device.features)), counted=True)
    table.strings(*manifest.states, counted=True)
    table.numbers(len(manifest.parameters))
    for parameter in manifest.parameters:
        table.strings(parameter.name)
        table.numbers(parameter.gates, len(parameter.shape), *parameter.shape)
    table.numbers(len(packings))
    for packing in packings:
        table.numbers(packing not in always, PACKINGS.index(packing.dtype), len(packing.sources))
        for name, gate in packing.sources:  # one of zeros has parameter -1, a whole parameter gate -1
            table.numbers(of[name] if name else -1, gate)
        for axes in (packing.pad, packing.split, packing.order):
            table.numbers(len(axes), *axes)
    kept = [b for b in manifest.buffers
            if b.role == KEPT and any(b in taken.get(name, ()) for name in (FORWARD, BACKWARD))]
    table.numbers(len(kept), *(n for b in kept for n in (b.extent.fixed, b.extent.per_step, b.itemsize)))
    for name in (RUN, FORWARD, BACKWARD):
        each = taken.get(name, []) if layer else []
        table.numbers(len(each))
        for b in each:
            kind, index = _kind(b), 0
            if kind == PACKED:
                index = packings.index(b.packing) if b.packing is not None else -1
            elif kind == KEPT:
                index = kept.index(b)
            elif kind == "gradient":
                index = of[str(b.state)]
            elif b.state is not None:
                index = manifest.states.index(b.state)
            table.numbers(POINTERS.index(kind), index, b.part, b.nbytes(0), b.nbytes(1) - b.nbytes(0))
    return bytes(table.content)


def _kind(b: Buffer) -> str:
    return b.role if b.role in (KEPT, PACKED, WORKSPACE) else b.tensor or ""

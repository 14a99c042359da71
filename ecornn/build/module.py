"""Program and manifest -> module file."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import msgspec

from ecornn.build import c_tables
from ecornn.build.archive import archive
from ecornn.build.generated import Generated
from ecornn.build.link import link
from ecornn.device import Device
from ecornn.errors import BuildError
from ecornn.host_cpu import machine_of
from ecornn.manifest import Manifest
from ecornn.program import Program

MANIFEST = "ecornn_manifest"


def generate(program: Program, device: Device, apart: bool = False) -> Generated:
    """Machine code and host code of ``program``, not linked; ``apart``: in several files where that takes less time.
    Raises :class:`~ecornn.errors.BuildError`."""
    if device.kind == "cuda":
        from ecornn.build import cuda

        return cuda.generate(program, device)
    from ecornn.build import llvm

    return llvm.generate(program, device, apart)


def build_module(program: Program, manifest: Manifest, out: Path) -> Generated:
    """Builds ``program`` for ``manifest.device`` and writes the module file ``out``.

    Returns what was generated on the way: text for people and the compiler's report of resources.
    Raises :class:`~ecornn.errors.BuildError`; ``out`` is then left as it was.
    """
    generated = _complete(program, manifest)
    link(generated, out)
    return generated


def build_archive(program: Program, manifest: Manifest, out: Path) -> Path:
    """Builds the static library ``out`` of a CPU's program and returns its header, see :mod:`ecornn.build.archive`.

    Raises :class:`~ecornn.errors.BuildError`.
    """
    return archive(_complete(program, manifest), out, f"{manifest.workload}, {manifest.device.arch}")


def _complete(program: Program, manifest: Manifest) -> Generated:
    """All that is linked."""
    device = manifest.device
    if device.kind == "llvm" and (machine := machine_of(device)) != os.uname().machine:
        raise BuildError(f"a module for {device.arch} is linked on an {machine} machine: compile it there, or have "
                         "the object file of its code with --emit object")
    generated = generate(program, device, apart=True)
    own = {MANIFEST: msgspec.json.encode(manifest), c_tables.SYMBOL: c_tables.tables(manifest, program.entries)}
    return replace(generated, binaries={**own, **generated.binaries}, shared={**generated.shared, **c_tables.sources()},
                   functions=c_tables.functions(program, device))

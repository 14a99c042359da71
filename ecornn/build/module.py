"""Program and manifest -> module file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from ecornn.build.generated import Generated
from ecornn.build.link import link
from ecornn.manifest import Manifest
from ecornn.program import Program

MANIFEST = "ecornn_manifest"


def build_module(program: Program, manifest: Manifest, out: Path) -> Generated:
    """Builds ``program`` for ``manifest.device`` and writes the module file ``out``.

    Returns what was generated on the way: text for people and the compiler's report of resources.
    Raises :class:`~ecornn.errors.BuildError`; ``out`` is then left as it was.
    """
    if manifest.device.kind == "cuda":
        from ecornn.build import cuda

        generated = cuda.generate(program, manifest.device)
    else:
        from ecornn.build import llvm

        generated = llvm.generate(program, manifest.device)
    text = msgspec.json.encode(manifest)
    generated = replace(generated, binaries={**generated.binaries, MANIFEST: text})
    link(generated, out)
    return generated

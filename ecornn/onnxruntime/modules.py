"""The modules that a rewritten model needs, in its folder."""

from __future__ import annotations

import re
from pathlib import Path

from ecornn import checksum
from ecornn.compiler import compile_layer
from ecornn.device import Device
from ecornn.layer_spec import LayerSpec
from ecornn.runtime.loader import Module


class Modules:
    """Of one device; a layer that several nodes have is compiled once."""

    def __init__(self, folder: Path, device: Device) -> None:
        self.folder, self.device = folder, device
        self._known: dict[str, tuple[Module, Path, str]] = {}

    def of(self, layer: LayerSpec) -> tuple[Module, Path, str]:
        """The module, its file, and the digest at the file's end. Raises what :func:`ecornn.compile` raises."""
        key = f"{layer.workload} {layer.stack}"
        if key not in self._known:
            module = compile_layer(layer, target=self.device)
            digest = checksum.said(module.path.read_bytes()).hex()
            cell = re.sub(r"\W+", "-", layer.workload.cell)[:40].strip("-")
            path = self.folder / f"{cell}-{digest[:16]}.so"
            self.folder.mkdir(parents=True, exist_ok=True)
            module.save(path)
            self._known[key] = module, path, digest
        return self._known[key]

"""Manifests of formats that are not read, and manifests that are not as their format says."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import runtime_sample as sample

import ecornn
from ecornn.errors import ModuleError
from ecornn.manifest import FORMAT, decode


def test_this_format_is_read_as_it_was_written():
    manifest = sample.manifest()
    assert decode(msgspec.json.encode(manifest).decode()) == manifest and manifest.format == FORMAT


@pytest.mark.parametrize("found", [0, 1, FORMAT - 1, FORMAT + 1, -1])
def test_other_formats_are_refused(found: int):
    fields = msgspec.to_builtins(sample.manifest()) | {"format": found}
    with pytest.raises(ModuleError, match=rf"of format {found}, and {FORMAT} is read; compile the layer again"):
        ecornn.load(sample.build_text(msgspec.json.encode(fields).decode()))


@pytest.mark.parametrize("change", [{"format": "2"}, {"format": None}, {"buffers": 1}, {"entries": None}], ids=str)
def test_a_manifest_must_be_as_its_format_says(change: dict[str, Any]):
    fields = msgspec.to_builtins(sample.manifest()) | change
    with pytest.raises(ModuleError, match="not a module of this version"):
        decode(msgspec.json.encode(fields).decode())

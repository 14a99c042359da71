"""Manifests of earlier formats, as modules have them that were compiled before; and formats that are not read.

``data/format1_*.json`` and ``data/format2_*.json`` were written by the code that wrote these formats.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import runtime_sample as sample

import ecornn
from ecornn import checksum
from ecornn.build import module as building
from ecornn.build.link import link
from ecornn.compiler import plan
from ecornn.compose import compose
from ecornn.errors import ModuleError
from ecornn.manifest import FORMAT, Manifest, decode
from ecornn.program import BACKWARD, WHOLE
from ecornn.runtime.plan import SCALARS, entry_plan, make_plan
from ecornn.task import make_manifest

FILES = {path.stem: path for path in sorted(Path(__file__).with_name("data").glob("format1_*.json"))}


def as_format1(manifest: Manifest) -> dict[str, Any]:
    """What format 1 said of a module whose ``run`` takes all buffers."""
    fields = msgspec.json.decode(msgspec.json.encode(manifest))
    assert fields.pop("entries") == {"run": [b.name for b in manifest.buffers]}
    assert fields["stack"].pop("keep") is None
    for b in fields["buffers"]:
        b["role"] = b["tensor"] or b["role"]
        del b["tensor"], b["state"], b["part"]
    return fields | {"format": 1}


@pytest.mark.parametrize("name", FILES)
def test_nothing_of_a_manifest_is_lost(name: str):
    text = FILES[name].read_text()
    found = decode(text)
    assert found.format == FORMAT and as_format1(found) == msgspec.json.decode(text)
    plan, buffers = make_plan(found), found.buffers
    assert buffers[plan.x - SCALARS].tensor == "x" and buffers[plan.y - SCALARS].tensor == "y"
    parts = found.stack.parts(found.workload)
    for end, positions in (("in", plan.state_in), ("out", plan.state_out)):
        for state, each in zip(found.states, positions, strict=True):
            prefixes = [f"{part.label}_" for part in parts] if len(parts) > 1 else [""]
            assert [buffers[p - SCALARS].name for p in each] == [f"{prefix}{state}_{end}" for prefix in prefixes]
    masks = {b.name for b in buffers if b.name in ("lengths", "resets", "sequences")}
    assert masks == {buffers[p - SCALARS].name for p in plan.masks}


def test_format_2_is_this_one_without_whole_parameters():
    (path,) = Path(__file__).with_name("data").glob("format2_*.json")
    fields = msgspec.json.decode(path.read_text())
    found = decode(path.read_text())
    again = msgspec.json.decode(msgspec.json.encode(found))
    assert fields["format"] == 2 and again == fields | {"format": FORMAT}
    assert not any(gate == WHOLE for b in found.buffers if b.packing for _, gate in b.packing.sources)
    made = plan("lstm", hidden=34, input=21, batch=3, dtype="bfloat16", target="sm_90a", training=True)
    now = compose(made.stack, made.workload, made.programs())
    assert any(gate == WHOLE for b in now.buffers if b.packing for _, gate in b.packing.sources)


def test_format_3_is_this_one_whose_backward_always_adds():
    """And keeps each value of a step in a buffer of its own."""
    (path,) = Path(__file__).with_name("data").glob("format3_*.json")
    found = decode(path.read_text())
    again = msgspec.json.decode(msgspec.json.encode(found))
    assert again == msgspec.json.decode(path.read_text()) | {"format": FORMAT}
    assert entry_plan(found, BACKWARD).at["existing"] == ()
    made = plan("lstm", hidden=34, input=21, batch=3, dtype="bfloat16", target="sm_90a", training=True)
    program = compose(made.stack, made.workload, made.programs())
    now = make_manifest(made.cell, made.task, made.found.schedule, made.found.config, program, "test", made.stack)
    more = {*now.entries[BACKWARD]} - {*found.entries[BACKWARD]}
    assert more == {"existing", "values_kept"}  # in one buffer; where it is is the program's affair in any format
    (place,) = entry_plan(now, BACKWARD).at["existing"]
    assert now.entries[BACKWARD][place - SCALARS] == "existing"


def test_there_are_files_of_both_kinds_of_device():
    kinds = {decode(path.read_text()).device.kind for path in FILES.values()}
    assert kinds == {"cuda", "llvm"}


@pytest.mark.parametrize(("cell", "options"), [
    ("lstm", {}), ("gru", {"layers": 2, "bidirectional": True, "lengths": True, "resets": True})])
def test_modules_of_format_1_run(tmp_path: Path, cell: str, options: dict[str, Any]):
    """A module is the same in both formats but for what it says of itself, ``run`` takes the same pointers, and for
    its checksum."""
    planned = plan(cell, hidden=20, input=12, batch=3, target="cpu", **options)
    program = compose(planned.stack, planned.workload, planned.programs())
    said = make_manifest(planned.cell, planned.task, planned.found.schedule, planned.found.config, program, "test",
                         planned.stack)
    code = building.generate(program, planned.device)
    for name, text in (("old", msgspec.json.encode(as_format1(said))), ("new", msgspec.json.encode(said))):
        link(replace(code, binaries={building.MANIFEST: text}), tmp_path / f"{name}.so")
        os.truncate(tmp_path / f"{name}.so", (tmp_path / f"{name}.so").stat().st_size - checksum.SIZE)
    with pytest.raises(ModuleError, match="its checksum is missing"):
        ecornn.load(tmp_path / "new.so")
    checksum.append(tmp_path / "new.so")
    assert b'"format":1' in ecornn.load(tmp_path / "old.so").library.manifest().encode()
    rng = np.random.default_rng(3)
    weights = {p.name: rng.uniform(-0.4, 0.4, p.shape).astype(np.float32) for p in said.parameters}
    x = rng.standard_normal((9, 3, 12)).astype(np.float32)
    shape = (3, 20) if planned.stack.count == 1 else (planned.stack.count, 3, 20)
    state = tuple(rng.standard_normal(shape).astype(np.float32) for _ in said.states)
    masks = {"lengths": [9, 4, 6], "resets": rng.random((9, 3)) < 0.2} if options else {}
    wanted_y, wanted = ecornn.reference(cell, x, weights, state, **masks)
    for name in ("old", "new"):
        y, after = ecornn.load(tmp_path / f"{name}.so").bind(weights, threads=1)(x, state, **masks)
        np.testing.assert_allclose(y, wanted_y, atol=2e-6)
        for one, other in zip(after, wanted, strict=True):
            np.testing.assert_allclose(one, other, atol=2e-6)


@pytest.mark.parametrize("found", [0, 5, 9, -1])
def test_other_formats_are_refused(found: int):
    fields = msgspec.to_builtins(sample.manifest()) | {"format": found}
    with pytest.raises(ModuleError, match=rf"is of format {found}; formats 1 to 4 are read"):
        ecornn.load(sample.build_text(msgspec.json.encode(fields).decode()))


@pytest.mark.parametrize("change", [{"format": "2"}, {"format": None}, {"format": 1}, {"buffers": 1, "format": 1}],
                         ids=str)
def test_a_manifest_must_be_as_its_format_says(change: dict[str, Any]):
    """Format 1 knows neither entries nor tensors."""
    fields = msgspec.to_builtins(sample.manifest()) | change
    with pytest.raises(ModuleError, match="not a module of this version"):
        decode(msgspec.json.encode(fields).decode())


def test_a_state_that_format_1_does_not_name_is_refused():
    old = as_format1(sample.manifest())
    old["states"] = ["h", "d"]
    with pytest.raises(ModuleError, match="do not fit states"):
        make_plan(decode(msgspec.json.encode(old).decode()))

"""Random ONNX models, rewritten, against ONNX Runtime's own nodes.

    ECORNN_RANDOM=1000:1300 python -m pytest -m exhaustive -s tests/onnx/test_random_onnx.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
from onnxruntime_sample import alike, session
from pairwise import seeds
from random_onnx import feeds_of, random_model

import ecornn.onnxruntime
from ecornn.compiler import compile_layer
from ecornn.errors import ArgumentError
from ecornn.onnxruntime import rewriting

MANY = seeds(range(1000, 1300))
LEAST = 0.1  # states of some turns may be small, and what is added up to them is not


@pytest.fixture(scope="module", autouse=True)
def _compiled_once():
    """A layer that several models have."""
    known = {}

    def compiled(layer, target):
        key = f"{layer.workload} {layer.stack}"
        if key not in known:
            known[key] = compile_layer(layer, target=target)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rewriting, "compile_layer", compiled)
        yield


def check(seed: int, folder: Path) -> int:
    """That a model's nodes are compiled and compute the same, and those that cannot be stay with a reason; returns the
    number of nodes that are compiled."""
    sample = random_model(seed)
    out = folder / "fast.onnx"
    try:
        made = ecornn.onnxruntime.rewrite(sample.model, out, batch=4, seq=7, target="cpu", measure=False)
    except ArgumentError as error:
        assert sample.refused and "can be compiled" in str(error), sample.made
        return 0
    assert {one.node for one in made.left} == {*sample.refused}, (made.left, sample.made)
    for one in made.left:
        assert sample.refused[one.node] in one.reason
    before = session(sample.plain)
    after = session(out, ecornn.onnxruntime.session_options(out, threads=1))
    for number, (steps, rows) in enumerate(sample.sizes):
        alike(after, before, feeds_of(sample, steps, rows, number), least=LEAST)
    return len(made.taken)


@pytest.mark.parametrize("seed", range(6))
def test_some(seed: int, tmp_path: Path):
    check(seed, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_many(tmp_path: Path):
    """All are looked at before those that are wrong are named."""
    wrong, compiled = {}, 0
    for seed in MANY:
        try:
            compiled += check(seed, tmp_path)
        except Exception as error:
            wrong[seed] = f"{type(error).__name__}: {str(error)[:300]}"
    print(f"{len(MANY)} models, {compiled} nodes compiled, {len(wrong)} wrong")
    assert not wrong, "\n".join(f"{seed}: {what}" for seed, what in wrong.items())

"""The step schedules and `elementwise` on a GPU: every cell and dtype, and configurations off the default."""

from __future__ import annotations

from typing import Any

import pytest
import step_cells
import torch
from exact import expected
from limits import Wanted

import ecornn
from ecornn.cells import BUILTIN
from ecornn.dtypes import SERVED
from ecornn.numpy_reference import STEPS
from ecornn.workload import ALONE

pytestmark = pytest.mark.gpu
CELLS = {n: BUILTIN[n] for n in STEPS} | step_cells.CELLS
SERVING = [(schedule, cell) for schedule in ("layout_transform", "elementwise", "fused_step") for cell in CELLS
          if schedule == "fused_step" or (cell not in step_cells.ROW_BY_ROW
                                          and (schedule == "elementwise") == (cell in step_cells.NO_PRODUCT))]
SHAPES = [  # T, B, I, H
    (1, 1, 1, 1),  # the smallest of everything
    (3, 2, 5, 7),  # odd rows of x
    (5, 20, 33, 65),  # one more than a tile in I and H
    (4, 33, 31, 129),  # one more than a tile in B and H
    (7, 3, 64, 128),  # whole tiles
]


def check(schedule: str, cell: str, shape: tuple[int, int, int, int], dtype: str,
          config: dict[str, Any] | None = None, compiled: int | None = None) -> None:
    """Two runs into poisoned memory: equal, and within the limit of float64. ``compiled`` is B's bound."""
    T, B, I, H = shape
    if cell in step_cells.SQUARE:
        I = H
    kind, found = getattr(torch, dtype), CELLS[cell]
    generator = torch.Generator().manual_seed(T * 1000 + H)

    def draw(*size: int, scale: float = 1.0) -> Any:
        return ((torch.rand(size, generator=generator) * 2 - 1) * scale).to(kind)

    parameters = {n: draw(*s, scale=H ** -0.5) for n, s in found.parameters(I, H).items()}
    weights = {found.parameter_name(n): p.reshape(-1, *p.shape[2:]) for n, p in parameters.items()}
    x = draw(T, B, I, scale=1.5)
    states = {name: draw(B, H) for name in found.states}
    layer = ecornn.compile(found, hidden=H, input=I, batch=compiled or B, seq=T, dtype=dtype, target="cuda",
                           schedule=schedule, config=config).bind({n: w.float().numpy() for n, w in weights.items()})
    runs = []
    for _ in range(2):
        out = torch.full((T, B, H), float("nan"), device="cuda", dtype=kind)
        y, after = layer(x.cuda(), tuple(s.cuda() for s in states.values()), out=out)
        torch.cuda.synchronize()
        runs.append([y.clone(), *(s.clone() for s in after)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True)), "two runs differ"

    exact, given = ({n: v.double().numpy() for n, v in tensors.items()} for tensors in (states, parameters))
    y, *last = (v.double().cpu().numpy() for v in runs[0])
    Wanted(dtype, lambda forward: expected(cell, ALONE, x.double().numpy(), exact, given, {}, forward)).check(
        y, dict(zip(states, last, strict=True)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", SERVED["cuda"])
@pytest.mark.parametrize(("schedule", "cell"), SERVING)
def test_matches_float64(schedule: str, cell: str, dtype: str, shape: tuple[int, int, int, int]):
    check(schedule, cell, shape, dtype)


CUT = {"units": 16, "rows": 16, "row_warps": 1, "batch_warps": 1, "split": 1, "depth": 1, "stages": 2,
       "layout": "hidden"}


@pytest.mark.parametrize("dtype", SERVED["cuda"])
@pytest.mark.parametrize("knobs", [
    {},
    {"layout": "batch"},
    {"split": 4, "depth": 2, "stages": 4},
    {"rows": 64, "batch_warps": 4, "depth": 4, "stages": 3},
    {"units": 32, "row_warps": 2, "stages": 6, "layout": "batch"},
], ids=str)
@pytest.mark.parametrize("cell", ["lstm", "gru", "gru_reset_before"])
def test_layout_transform_configurations(cell: str, knobs: dict[str, Any], dtype: str):
    math = "exact" if dtype == "float32" else "fast"
    check("layout_transform", cell, (6, 33, 40, 300), dtype, {**CUT, **knobs, "math": math}, compiled=70)


@pytest.mark.parametrize("dtype", SERVED["cuda"])
@pytest.mark.parametrize("cut", [(1, 32, 128, 16), (2, 256, 16, 4), (4, 64, 8, 8)], ids=str)
@pytest.mark.parametrize("cell", ["indrnn", "highway", "decay"])
def test_elementwise_configurations(cell: str, cut: tuple[int, ...], dtype: str):
    math = "exact" if dtype == "float32" else "fast"
    config = dict(zip(("units", "threads", "prefetch", "group"), cut, strict=True)) | {"math": math}
    if cut[0] == 1:  # one value of 16 bits is too little for a copy
        config["hoisted"] = "float32"
    check("elementwise", cell, (150, 21, 40, 300), dtype, config, compiled=40)


@pytest.mark.parametrize("dtype", SERVED["cuda"])
@pytest.mark.parametrize("cut", [(8, 1, 4, 1, 16), (16, 4, 2, 16, 16), (32, 8, 2, 4, 64), (32, 2, 1, 1, 32)], ids=str)
@pytest.mark.parametrize("cell", ["lstm", "gru_reset_before"])
def test_fused_step_configurations(cell: str, cut: tuple[int, ...], dtype: str):
    math = "exact" if dtype == "float32" else "fast"
    config = dict(zip(("units", "thread_rows", "groups", "split", "depth"), cut, strict=True)) | {"math": math}
    check("fused_step", cell, (6, 21, 40, 300), dtype, config, compiled=40)

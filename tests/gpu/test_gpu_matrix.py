"""Every cell, schedule and dtype on a GPU, against float64 and the library's own error; other configurations."""

from typing import Any

import numpy as np
import pytest
import step_cells
import torch
from exact import Wanted, expected, limit, of_stack, relative

import ecornn
from ecornn.cells import BUILTIN
from ecornn.compiler import plan
from ecornn.dtypes import SERVED as DTYPES
from ecornn.numpy_reference import STEPS, random_weights, reference
from ecornn.schedules import all_schedules
from ecornn.workload import ALONE, SINGLE

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:RNN module weights")]
SHAPES = [  # T, B, I, H
    (1, 1, 1, 1),  # the smallest of everything
    (5, 3, 7, 13),  # primes, odd rows of x
    (4, 20, 33, 65),  # one more than a tile in H and I, three tiles of batch rows less four
    (3, 33, 31, 129),  # one more than a tile in B
    (6, 8, 64, 128),  # exact tiles
    (7, 17, 800, 800),  # the size people ask for first, last batch rows missing
]
CELLS = ["lstm", "gru", "gru_reset_before", "rnn_tanh", "rnn_relu"]
SERVED = [(schedule, cell, dtype) for schedule in ("persistent", "persistent_wide", "layout_transform", "fused_step")
          for cell in CELLS for dtype in ("float32", "float16", "bfloat16")  # wide: 16 bits, one product a step
          if schedule != "persistent_wide" or (dtype != "float32" and cell != "gru_reset_before")]
LIBRARY = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn_tanh": torch.nn.RNN, "rnn_relu": torch.nn.RNN}


def library_error(cell, x, weights, state, expected, kind):
    p = {k: torch.tensor(v, device="cuda").to(kind) for k, v in weights.items()}
    if cell in LIBRARY:
        layer = LIBRARY[cell](x.shape[2], expected.shape[2],
                              **({"nonlinearity": cell[4:]} if cell.startswith("rnn") else {})).cuda().to(kind)
        layer.load_state_dict(p)
        layer.flatten_parameters()
        start = tuple(s[None] for s in state)
        with torch.no_grad():
            y = layer(x, start if len(start) > 1 else start[0])[0]
    else:
        (h,), steps = state, []
        hidden = h.shape[1]
        for t in range(x.shape[0]):
            g = torch.nn.functional.linear(x[t], p["weight_ih_l0"], p["bias_ih_l0"]).chunk(3, 1)
            R, b = p["weight_hh_l0"].split(hidden), p["bias_hh_l0"].split(hidden)
            r = torch.sigmoid(g[0] + torch.nn.functional.linear(h, R[0], b[0]))
            z = torch.sigmoid(g[1] + torch.nn.functional.linear(h, R[1], b[1]))
            n = torch.tanh(g[2] + torch.nn.functional.linear(r * h, R[2], b[2]))
            h = (1 - z) * n + z * h
            steps.append(h)
        y = torch.stack(steps)
    return relative(y.double().cpu().numpy(), expected)


def repeated(layer: Any, x: Any, state: tuple[Any, ...], width: int, times: int = 2) -> list[Any]:
    runs = []
    for _ in range(times):
        out = torch.full((*x.shape[:2], width), float("nan"), device="cuda", dtype=x.dtype)
        y, new = layer(x, state, out=out)
        torch.cuda.synchronize()
        runs.append([y.clone(), *(s.clone() for s in new)])
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True)), "two runs differ"
    return [v.double().cpu().numpy() for v in runs[0]]


class Sample:
    def __init__(self, cell: str, sizes: tuple[int, int, int, int], dtype: str, seed: int, **options: Any) -> None:
        (T, B, I, H), kind = sizes, getattr(torch, dtype)
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        self.cell, self.dtype, self.kind, self.hidden = cell, dtype, kind, H
        self.weights = {k: torch.tensor(v).to(kind).float().numpy()
                        for k, v in random_weights(cell, I, H, seed=seed).items()}
        self.layer = ecornn.compile(cell, hidden=H, input=I, batch=B, seq=T, dtype=dtype, target="cuda",
                                    **options).bind(self.weights)
        self.x = torch.randn(T, B, I, device="cuda").to(kind)
        self.state = tuple((torch.rand(B, H, device="cuda") - 0.5).to(kind) for _ in self.layer.manifest.states)
        self.exact = [v.double().cpu().numpy() for v in (self.x, *self.state)]

    def check(self, times: int = 2) -> list[Any]:
        found = repeated(self.layer, self.x, self.state, self.hidden, times)
        wanted, _ = reference(self.cell, self.exact[0], self.weights, tuple(self.exact[1:]))
        library = library_error(self.cell, self.x, self.weights, self.state, wanted, self.kind)
        assert relative(found[0], wanted) <= limit(self.dtype, wanted, library)
        return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("schedule", "cell", "dtype"), SERVED)
def test_matches_float64(schedule, cell, dtype, shape):
    torch.manual_seed(shape[0] + shape[3])
    sample = Sample(cell, shape, dtype, shape[3], schedule=schedule)
    y, *after = sample.check()
    Wanted(dtype, lambda forward: of_stack(
        cell, SINGLE, sample.exact[0], sample.exact[1:], sample.weights, {}, forward)).check(y, after)


LONG = [("persistent", cell, dtype, B, {  # many times around the ring of an exchange
            "carrier": "l2", "fences": fences, "groups": groups, "units": units, "warps": 4, "gate_warps": gates,
            "chains": 1, "registers": 100, "interleave": 0, "ahead": 100})
        for cell, dtype, B, groups, units, gates in (
            ("lstm", "bfloat16", 1, 1, 4, 1), ("gru", "float16", 33, 5, 16, 4),
            ("gru_reset_before", "bfloat16", 9, 2, 16, 3), ("rnn_tanh", "float32", 20, 3, 16, 4))
        for fences in ("every", "products", "rare")]
LONG += [("persistent", cell, dtype, B, {"carrier": "cluster", "fences": "rare", "ahead": 100, **cut})
         for cell, dtype, B, cut in (("lstm", "bfloat16", 1, {"groups": 1, "units": 20, "warps": 5, "gate_warps": 1}),
                                     ("gru_reset_before", "bfloat16", 9, {}), ("rnn_tanh", "float32", 20, {}))]
LONG += [("persistent_wide", "gru", "float16", 23, {"units": 32, "parts": parts, "row_teams": teams, "groups": 1})
         for parts, teams in ((1, 1), (1, 2), (2, 2), (3, 2))]


@pytest.mark.parametrize(("schedule", "cell", "dtype", "B", "config"), LONG, ids=str)
def test_long_sequences(schedule, cell, dtype, B, config):
    Sample(cell, (250, B, 24, 320), dtype, 5, schedule=schedule, config=config).check(times=4)


STREAMED = [("gru", "float16", 60, 1, 2816), ("lstm", "bfloat16", 20, 3, 2816), ("lstm", "float16", 20, 16, 2304),
            ("gru_reset_before", "float16", 20, 2, 2816), ("rnn_tanh", "bfloat16", 30, 8, 5120),
            ("lstm", "float32", 12, 1, 2048)]


@pytest.mark.parametrize(("cell", "dtype", "T", "B", "H"), STREAMED, ids=str)
def test_weights_past_the_chip(cell, dtype, T, B, H):
    """`persistent` reads what does not fit from L2 in every step."""
    planned = plan(cell, hidden=H, input=64, batch=B, seq=T, dtype=dtype, target="cuda", schedule="persistent")
    assert all_schedules()["persistent"].plan(planned.task, planned.found.config).streamed
    Sample(cell, (T, B, 64, H), dtype, 6, schedule="persistent", config=planned.found.config).check(times=3)


HOISTED = [(schedule, cell, dtype, sizes)
           for schedule, cell in (("persistent", "lstm"), ("persistent", "gru"), ("persistent", "gru_reset_before"),
                                  ("persistent", "rnn_tanh"), ("persistent", "rnn_relu"), ("persistent_wide", "lstm"),
                                  ("persistent_wide", "gru"), ("persistent_wide", "rnn_tanh"),
                                  ("layout_transform", "lstm"), ("layout_transform", "gru"))
           for dtype in ("float16", "bfloat16") for sizes in SHAPES[1::2]]


@pytest.mark.parametrize("choice", ["float32", "same"])
@pytest.mark.parametrize(("schedule", "cell", "dtype", "sizes"), HOISTED, ids=str)
def test_hoisted_values_in_16_bits(schedule, cell, dtype, sizes, choice):
    Sample(cell, sizes, dtype, sizes[3] + 1, schedule=schedule, config={"hoisted": choice}).check()


@pytest.mark.parametrize("schedule", ["persistent", "layout_transform"])
def test_long_sums_in_float32(schedule):
    """Tensor cores cut sums off: kept on them, one of 2560 products has an error of 1.4e-5."""
    H = 2560
    weights = random_weights("rnn_tanh", H, H, seed=3)
    layer = ecornn.compile("rnn_tanh", hidden=H, batch=2, seq=3, dtype="float32", target="cuda",
                           schedule=schedule).bind(weights)
    x = np.random.default_rng(1).standard_normal((3, 2, H)).astype(np.float32)
    assert relative(layer(x)[0], reference("rnn_tanh", x, weights)[0]) <= 5e-6


def test_not_a_number_does_not_stop_the_exchange():
    for dtype in (torch.float32, torch.bfloat16):
        weights = {k: torch.tensor(v).to(dtype).float().numpy()
                   for k, v in random_weights("rnn_relu", 16, 40, seed=4).items()}
        layer = ecornn.compile("rnn_relu", hidden=40, input=16, batch=9, dtype=str(dtype)[6:], target="cuda",
                               schedule="persistent").bind(weights)
        x = torch.randn(6, 9, 16, device="cuda").to(dtype)
        bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
        h = torch.full((9, 40), -1, device="cuda", dtype=bits).view(dtype)  # every bit set: the sentinel itself
        layer(x, (h,))
        torch.cuda.synchronize()  # a reader that waits for such a word would never come back
        y, _ = layer(x)
        given, start = x.double().cpu().numpy(), [np.zeros((9, 40))]
        Wanted(str(dtype)[6:], lambda forward, given=given, start=start, weights=weights: of_stack(
            "rnn_relu", SINGLE, given, start, weights, {}, forward)).check(y.double().cpu().numpy())


@pytest.mark.parametrize(("schedule", "dtype"), [
    (schedule, dtype) for schedule in ("persistent", "persistent_wide", "layout_transform", "fused_step")
    for dtype in ("float32", "bfloat16") if (schedule, dtype) != ("persistent_wide", "float32")])
@pytest.mark.parametrize("cell", ["rnn_relu", "lstm"])
def test_not_a_number_comes_out_where_it_went_in(cell: str, schedule: str, dtype: str):
    weights = random_weights(cell, 16, 64, seed=5)
    layer = ecornn.compile(cell, hidden=64, input=16, batch=9, dtype=dtype, target="cuda",
                           schedule=schedule).bind(weights)
    x = torch.randn(6, 9, 16, device="cuda").to(getattr(torch, dtype))
    x[2, 4, 3] = float("nan")
    y, _ = layer(x)
    expected, _ = reference(cell, x.double().cpu().numpy(), weights)
    assert np.isnan(expected[2:, 4]).all() and np.array_equal(np.isnan(y.float().cpu().numpy()), np.isnan(expected))


STEP_CELLS = {n: BUILTIN[n] for n in STEPS} | step_cells.CELLS
# without spikes: of a value near a threshold, the order of sums decides on which side it is
SERVING = [(schedule, cell) for schedule in ("layout_transform", "elementwise", "fused_step") for cell in STEP_CELLS
          if cell != "spiking" and (schedule == "fused_step" or (
              cell not in step_cells.ROW_BY_ROW and (schedule == "elementwise") == (cell in step_cells.NO_PRODUCT)))]
STEP_SHAPES = [  # T, B, I, H
    (1, 1, 1, 1),  # the smallest of everything
    (3, 2, 5, 7),  # odd rows of x
    (5, 20, 33, 65),  # one more than a tile in I and H
    (4, 33, 31, 129),  # one more than a tile in B and H
    (7, 3, 64, 128),  # whole tiles
]


def check(schedule: str, cell: str, shape: tuple[int, int, int, int], dtype: str,
          config: dict[str, Any] | None = None, compiled: int | None = None) -> None:
    T, B, I, H = shape
    if cell in step_cells.SQUARE:
        I = H
    kind, found = getattr(torch, dtype), STEP_CELLS[cell]
    config = config and {**config, "math": "exact" if dtype == "float32" else "fast"}
    generator = torch.Generator().manual_seed(T * 1000 + H)
    def draw(*size: int, scale: float = 1.0) -> Any:
        return ((torch.rand(size, generator=generator) * 2 - 1) * scale).to(kind)
    parameters = {n: draw(*s, scale=H ** -0.5) for n, s in found.parameters(I, H).items()}
    weights = {found.parameter_name(n): p.reshape(-1, *p.shape[2:]) for n, p in parameters.items()}
    x, states = draw(T, B, I, scale=1.5), {name: draw(B, H) for name in found.states}
    layer = ecornn.compile(found, hidden=H, input=I, batch=compiled or B, seq=T, dtype=dtype, target="cuda",
                           schedule=schedule, config=config).bind({n: w.float().numpy() for n, w in weights.items()})
    y, *last = repeated(layer, x.cuda(), tuple(s.cuda() for s in states.values()), H)
    exact, given = ({n: v.double().numpy() for n, v in tensors.items()} for tensors in (states, parameters))
    Wanted(dtype, lambda forward: expected(cell, ALONE, x.double().numpy(), exact, given, {}, forward)).check(
        y, dict(zip(states, last, strict=True)))


@pytest.mark.parametrize("shape", STEP_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES["cuda"])
@pytest.mark.parametrize(("schedule", "cell"), SERVING)
def test_steps_match_float64(schedule: str, cell: str, dtype: str, shape: tuple[int, int, int, int]):
    check(schedule, cell, shape, dtype)


CUT = {"units": 16, "rows": 16, "row_warps": 1, "batch_warps": 1, "split": 1, "depth": 1, "stages": 2,
       "layout": "hidden"}


@pytest.mark.parametrize("dtype", DTYPES["cuda"])
@pytest.mark.parametrize("knobs", [
    {},
    {"layout": "batch"},
    {"split": 4, "depth": 2, "stages": 4},
    {"rows": 64, "batch_warps": 4, "depth": 4, "stages": 3},
    {"units": 32, "row_warps": 2, "stages": 6, "layout": "batch"},
], ids=str)
@pytest.mark.parametrize("cell", ["lstm", "gru", "gru_reset_before"])
def test_layout_transform_configurations(cell: str, knobs: dict[str, Any], dtype: str):
    check("layout_transform", cell, (6, 33, 40, 300), dtype, {**CUT, **knobs}, compiled=70)


@pytest.mark.parametrize("dtype", DTYPES["cuda"])
@pytest.mark.parametrize("cut", [(1, 32, 128, 16), (2, 256, 16, 4), (4, 64, 8, 8)], ids=str)
@pytest.mark.parametrize("cell", ["indrnn", "highway", "decay"])
def test_elementwise_configurations(cell: str, cut: tuple[int, ...], dtype: str):
    config: dict[str, Any] = dict(zip(("units", "threads", "prefetch", "group"), cut, strict=True))
    if cut[0] == 1:  # one value of 16 bits is too little for a copy
        config["hoisted"] = "float32"
    check("elementwise", cell, (150, 21, 40, 300), dtype, config, compiled=40)


@pytest.mark.parametrize("dtype", DTYPES["cuda"])
@pytest.mark.parametrize("cut", [(8, 1, 4, 1, 16), (16, 4, 2, 16, 16), (32, 8, 2, 4, 64), (32, 2, 1, 1, 32)], ids=str)
@pytest.mark.parametrize("cell", ["lstm", "gru_reset_before"])
def test_fused_step_configurations(cell: str, cut: tuple[int, ...], dtype: str):
    config = dict(zip(("units", "thread_rows", "groups", "split", "depth"), cut, strict=True))
    check("fused_step", cell, (6, 21, 40, 300), dtype, config, compiled=40)

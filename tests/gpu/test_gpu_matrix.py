"""Every cell, schedule and dtype on a GPU, against float64 and against the library's own error."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from exact import of_stack
from limits import Wanted, limit, relative

import ecornn
from ecornn.compiler import plan
from ecornn.numpy_reference import random_weights, reference
from ecornn.schedules import all_schedules
from ecornn.workload import SINGLE

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
    """Error of the same computation in the same dtype by PyTorch: cuDNN, or a loop of its own products."""
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


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("schedule", "cell", "dtype"), SERVED)
def test_matches_float64(schedule, cell, dtype, shape):
    T, B, I, H = shape
    kind = getattr(torch, dtype)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(T + H)
    weights = {k: torch.tensor(v).to(kind).float().numpy()
               for k, v in random_weights(cell, I, H, seed=H).items()}
    layer = ecornn.compile(cell, hidden=H, input=I, batch=B, seq=T, dtype=dtype, target="cuda",
                           schedule=schedule).bind(weights)
    x = torch.randn(T, B, I, device="cuda").to(kind)
    state = tuple((torch.rand(B, H, device="cuda") - 0.5).to(kind) for _ in layer.manifest.states)
    exact = [v.double().cpu().numpy() for v in (x, *state)]
    wanted = Wanted(dtype, lambda forward: of_stack(cell, SINGLE, exact[0], exact[1:], weights, {}, forward))
    runs = []
    for _ in range(2):
        out = torch.full((T, B, H), float("nan"), device="cuda", dtype=kind)
        y, new = layer(x, state, out=out)
        torch.cuda.synchronize()
        runs.append((y.clone(), *(s.clone() for s in new)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True)), "two runs differ"
    y, *after = (v.double().cpu().numpy() for v in runs[0])
    wanted.check(y, after)
    assert relative(y, wanted.y) <= limit(dtype, wanted.y, library_error(cell, x, weights, state, wanted.y, kind))


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
    T, I, H, kind = 250, 24, 320, getattr(torch, dtype)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    weights = {k: torch.tensor(v).to(kind).float().numpy() for k, v in random_weights(cell, I, H, seed=5).items()}
    layer = ecornn.compile(cell, hidden=H, input=I, batch=B, seq=T, dtype=dtype, target="cuda", schedule=schedule,
                           config=config).bind(weights)
    x = torch.randn(T, B, I, device="cuda").to(kind)
    state = tuple(torch.zeros(B, H, device="cuda", dtype=kind) for _ in layer.manifest.states)
    expected, _ = reference(cell, x.double().cpu().numpy(), weights)
    runs = []
    for _ in range(4):
        out = torch.full((T, B, H), float("nan"), device="cuda", dtype=kind)
        runs.append(layer(x, state, out=out)[0].clone())
    assert all(torch.equal(runs[0], run) for run in runs), "two runs differ"
    most = limit(dtype, expected, library_error(cell, x, weights, state, expected, kind))
    assert relative(runs[0].double().cpu().numpy(), expected) <= most


STREAMED = [("gru", "float16", 60, 1, 2816), ("lstm", "bfloat16", 20, 3, 2816), ("lstm", "float16", 20, 16, 2304),
            ("gru_reset_before", "float16", 20, 2, 2816), ("rnn_tanh", "bfloat16", 30, 8, 5120),
            ("lstm", "float32", 12, 1, 2048)]


@pytest.mark.parametrize(("cell", "dtype", "T", "B", "H"), STREAMED, ids=str)
def test_weights_past_the_chip(cell, dtype, T, B, H):
    """`persistent` reads what does not fit from L2 in every step."""
    kind, I = getattr(torch, dtype), 64
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    planned = plan(cell, hidden=H, input=I, batch=B, seq=T, dtype=dtype, target="cuda", schedule="persistent")
    assert all_schedules()["persistent"].plan(planned.task, planned.found.config).streamed
    weights = {k: torch.tensor(v).to(kind).float().numpy() for k, v in random_weights(cell, I, H, seed=6).items()}
    layer = ecornn.compile(cell, hidden=H, input=I, batch=B, seq=T, dtype=dtype, target="cuda", schedule="persistent",
                           config=planned.found.config).bind(weights)
    x = torch.randn(T, B, I, device="cuda").to(kind)
    state = tuple((torch.rand(B, H, device="cuda") - 0.5).to(kind) for _ in layer.manifest.states)
    exact = [v.double().cpu().numpy() for v in (x, *state)]
    expected, _ = reference(cell, exact[0], weights, tuple(exact[1:]))
    runs = []
    for _ in range(3):
        out = torch.full((T, B, H), float("nan"), device="cuda", dtype=kind)
        runs.append(layer(x, state, out=out)[0].clone())
    assert all(torch.equal(runs[0], run) for run in runs), "two runs differ"
    most = limit(dtype, expected, library_error(cell, x, weights, state, expected, kind))
    assert relative(runs[0].double().cpu().numpy(), expected) <= most


HOISTED = [(schedule, cell, dtype, sizes)
           for schedule, cell in (("persistent", "lstm"), ("persistent", "gru"), ("persistent", "gru_reset_before"),
                                  ("persistent", "rnn_tanh"), ("persistent", "rnn_relu"), ("persistent_wide", "lstm"),
                                  ("persistent_wide", "gru"), ("persistent_wide", "rnn_tanh"),
                                  ("layout_transform", "lstm"), ("layout_transform", "gru"))
           for dtype in ("float16", "bfloat16") for sizes in SHAPES[1::2]]


@pytest.mark.parametrize("choice", ["float32", "same"])
@pytest.mark.parametrize(("schedule", "cell", "dtype", "sizes"), HOISTED, ids=str)
def test_hoisted_values_in_16_bits(schedule, cell, dtype, sizes, choice):
    """The default takes one of the two, by the size; the library, which rounds them too, is the measure of both."""
    (T, B, I, H), kind = sizes, getattr(torch, dtype)
    weights = {k: torch.tensor(v).to(kind).float().numpy() for k, v in random_weights(cell, I, H, seed=H + 1).items()}
    layer = ecornn.compile(cell, hidden=H, input=I, batch=B, seq=T, dtype=dtype, target="cuda", schedule=schedule,
                           config={"hoisted": choice}).bind(weights)
    x = torch.randn(T, B, I, device="cuda").to(kind)
    state = tuple((torch.rand(B, H, device="cuda") - 0.5).to(kind) for _ in layer.manifest.states)
    exact = [v.double().cpu().numpy() for v in (x, *state)]
    expected, _ = reference(cell, exact[0], weights, tuple(exact[1:]))
    out = torch.full((T, B, H), float("nan"), device="cuda", dtype=kind)
    y = layer(x, state, out=out)[0].clone()
    again = layer(x, state, out=out.fill_(float("nan")))[0]
    assert torch.equal(y, again), "two runs differ"
    most = limit(dtype, expected, library_error(cell, x, weights, state, expected, kind))
    assert relative(y.double().cpu().numpy(), expected) <= most


@pytest.mark.parametrize("schedule", ["persistent", "layout_transform"])
def test_long_sums_in_float32(schedule):
    """Tensor cores cut sums off: kept on them, one of 2560 products has an error of 1.4e-5."""
    H = 2560
    weights = random_weights("rnn_tanh", H, H, seed=3)
    layer = ecornn.compile("rnn_tanh", hidden=H, batch=2, seq=3, dtype="float32", target="cuda",
                           schedule=schedule).bind(weights)
    x = np.random.default_rng(1).standard_normal((3, 2, H)).astype(np.float32)
    assert relative(layer(x)[0], reference("rnn_tanh", x, weights)[0]) <= 5e-6


def test_fewer_rows_and_more_steps_than_compiled():
    weights = random_weights("lstm", 48, 96, seed=1)
    layer = ecornn.compile("lstm", hidden=96, input=48, batch=20, seq=5, dtype="float32", target="cuda").bind(weights)
    x = np.random.default_rng(0).standard_normal((33, 7, 48)).astype(np.float32)
    y, state = layer(x)
    expected, expected_state = reference("lstm", x, weights)
    assert relative(y, expected) <= 1e-5
    for found, wanted in zip(state, expected_state, strict=True):
        assert relative(found, wanted) <= 1e-5


def test_state_continues_where_the_last_call_stopped():
    weights = random_weights("gru", 48, 96, seed=2)
    layer = ecornn.compile("gru", hidden=96, input=48, batch=4, dtype="float32", target="cuda").bind(weights)
    x = torch.randn(20, 4, 48, device="cuda")
    whole, last = layer(x)
    first, state = layer(x[:9])
    second, state = layer(x[9:], state)
    # |h| <= 1: a few roundings of float32, and tighter than the 1e-5 that the layer itself is held to
    assert torch.allclose(torch.cat([first, second]), whole, rtol=0, atol=1e-6)
    assert torch.allclose(state[0], last[0], rtol=0, atol=1e-6)


def test_captures_into_a_cuda_graph():
    weights = random_weights("lstm", 64, 128, seed=3)
    layer = ecornn.compile("lstm", hidden=128, input=64, batch=4, dtype="float16", target="cuda").bind(weights)
    x = torch.randn(12, 4, 64, device="cuda").half()
    layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, state = layer(x)
    x.copy_(torch.randn(12, 4, 64, device="cuda"))
    y.fill_(float("nan"))
    graph.replay()
    eager, eager_state = layer(x)
    torch.cuda.synchronize()
    assert torch.equal(y, eager) and torch.equal(state[0], eager_state[0])


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

"""Stacks, directions, lengths, resets and columns on a GPU, by every schedule, with gradients; ecornn.torch there."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from column_gradients import errors_of
from exact import Wanted, of_stack, relative
from torch.nn.utils.rnn import pack_sequence

import ecornn
import ecornn.torch
from ecornn.numpy_reference import STEPS, random_weights
from ecornn.torch import engine, packed
from ecornn.workload import Stack

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:RNN module weights")]
STACKS = [Stack(1, True, True, True), Stack(3, False, True), Stack(2, True), Stack(2, False, False, True),
          Stack(2, False, True, True, True)]
KINDS = [("lstm", "bfloat16"), ("gru", "float16"), ("gru_reset_before", "float32"), ("lstm", "float32")]
SERVED = [(schedule, *kind) for schedule in ("persistent", "persistent_wide", "layout_transform", "fused_step")
          for kind in KINDS if schedule != "persistent_wide" or kind[1] != "float32"]
SHAPES = [(1, 1, 1, 1), (5, 3, 7, 13), (9, 20, 33, 65), (6, 17, 64, 128)]  # T, B, I, H


def compiled(cell: str, dtype: str, stack: Stack, sizes: tuple[int, int, int, int], **options: Any) -> tuple[Any, Any]:
    T, B, I, H = sizes
    weights = {k: torch.tensor(v).to(getattr(torch, dtype)).float().numpy()
               for k, v in random_weights(cell, I, H, 1, stack.layers, stack.directions).items()}
    module = ecornn.compile(cell, hidden=H, input=I, batch=B, seq=T, dtype=dtype, target="cuda", layers=stack.layers,
                            bidirectional=stack.bidirectional, lengths=stack.lengths, resets=stack.resets,
                            reverse=stack.reverse, sequences=stack.sequences, **options)
    return module.bind(weights), weights


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("stack", STACKS, ids=str)
@pytest.mark.parametrize(("schedule", "cell", "dtype"), SERVED)
def test_matches_float64(schedule: str, cell: str, dtype: str, stack: Stack, shape: tuple[int, int, int, int]):
    T, B, I, H = shape
    kind, rng = getattr(torch, dtype), np.random.default_rng(T + H)
    layer, weights = compiled(cell, dtype, stack, shape, schedule=schedule)
    x = torch.tensor(rng.standard_normal((T, B, I)), device="cuda").to(kind)
    size = (B, H) if stack.count == 1 else (stack.count, B, H)
    state = tuple(torch.tensor(rng.uniform(-0.5, 0.5, size), device="cuda").to(kind) for _ in range(STEPS[cell][1]))
    call: dict[str, Any] = {"lengths": rng.integers(0, T + 1, B)} if stack.lengths else {}
    call |= {"resets": rng.random((T, B)) < 0.4} if stack.resets else {}
    exact = [v.double().cpu().numpy() for v in (x, *state)]
    wanted = Wanted(dtype, lambda forward: of_stack(cell, stack, exact[0], exact[1:], weights, call, forward))
    for b, n in enumerate(call.get("lengths", ())):
        x[n:, b] = float("nan")
    for on_gpu in (False, True):  # lengths of the host end the loop early; those of the GPU do not
        given = {k: torch.as_tensor(v).cuda() if on_gpu else v for k, v in call.items()}
        out = torch.full((T, B, stack.directions * H), float("nan"), device="cuda", dtype=kind)
        y, after = layer(x, state, out=out, **given)
        y = y.double().cpu().numpy()
        wanted.check(y, [s.double().cpu().numpy() for s in after])
        for b, n in enumerate(call.get("lengths", ())):
            assert not y[n:, b].any()


TWO_GROUPS = {"groups": 2, "units": 16, "warps": 3, "gate_warps": 3, "chains": 1, "registers": 100, "interleave": 0,
              "ahead": 100, "fences": "rare", "hoisted": "float32", "carrier": "l2", "math": "exact"}


@pytest.mark.parametrize("stack", [Stack(sequences=True), Stack(reverse=True, sequences=True),
                                   Stack(2, True, sequences=True)], ids=str)
@pytest.mark.parametrize(("schedule", "cell", "dtype", "config"), [
    *((*one, None) for one in SERVED if one[0].startswith("persistent")),
    *((*one, TWO_GROUPS) for one in SERVED if one[0] == "persistent")])
def test_sequences_in_columns(schedule: str, cell: str, dtype: str, config: dict[str, Any] | None, stack: Stack):
    T, B, I, H, S, kind = 23, 11, 40, 96, 37, getattr(torch, dtype)
    layer, weights = compiled(cell, dtype, stack, (T, B, I, H), schedule=schedule, config=config)
    rng = np.random.default_rng(1)
    assert config is None or layer.together == 6
    for width, together, least in ((B, 1, 1), (B, layer.together, 16), (3, layer.together, 16)):
        lengths = rng.integers(least, T + 1, S)
        columns = ecornn.Columns.of(lengths, width, together)
        assert (columns.wrapped.size > 0) == (together > 1)
        rows = torch.randn(T, S, I, device="cuda").to(kind)
        x = rows[columns.inside, columns.table]
        x[torch.from_numpy(columns.table).cuda() < 0] = float("nan")
        size = (S, H) if stack.count == 1 else (stack.count, S, H)
        state = tuple((torch.rand(size, device="cuda") - 0.5).to(kind) for _ in range(STEPS[cell][1]))
        for given in (state, None):  # without states, more zeros than for the compiled batch
            start = state if given else [torch.zeros_like(s) for s in state]
            exact = [v.double().cpu().numpy() for v in (rows, *start)]
            wanted = Wanted(dtype, lambda forward, exact=exact, lengths=lengths: of_stack(
                cell, stack, exact[0], exact[1:], weights, {"lengths": lengths}, forward))
            out = torch.full((*columns.table.shape, stack.directions * H), float("nan"), device="cuda", dtype=kind)
            y, after = layer(x, given, sequences=columns, out=out)
            again, after_again = layer(x, given, sequences=columns)
            assert all(torch.equal(a, b) for a, b in zip((y, *after), (again, *after_again), strict=True))
            y = y.double().cpu().numpy()
            assert not y[columns.table < 0].any()
            found = np.zeros_like(wanted.y)
            for s, n in enumerate(lengths):
                found[:n, s] = y.reshape(-1, y.shape[2])[columns.of_sequence(s)]
            wanted.check(found, [s.double().cpu().numpy() for s in after])


@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "num_layers": 2}, {"num_layers": 2},
                                     {"proj_size": 40}], ids=str)
@pytest.mark.parametrize("with_state", [False, True])
def test_packed_sequences_in_columns(options: dict[str, Any], with_state: bool):
    ours = ecornn.torch.LSTM(40, 96, **options).cuda().eval()
    theirs = torch.nn.LSTM(40, 96, **options).cuda().double().eval()
    theirs.load_state_dict({k: v.double() for k, v in ours.state_dict().items()})
    count = options.get("num_layers", 1) * (1 + options.get("bidirectional", False))
    state = tuple(torch.randn(count, 30, n, device="cuda") for n in (options.get("proj_size", 96), 96))
    with torch.inference_mode():
        for seed in range(3):
            lengths = torch.randint(1, 50, (30,), generator=torch.Generator().manual_seed(seed))
            packed = torch.nn.utils.rnn.pack_padded_sequence(
                torch.randn(int(lengths.max()), 30, 40, device="cuda"), lengths, enforce_sorted=False)
            y, after = ours(packed, state if with_state else None)
            wanted, last = theirs(packed.double(), tuple(s.double() for s in state) if with_state else None)
            for a, b in zip((y.data, *after), (wanted.data, *last), strict=True):
                assert relative(a.cpu().numpy(), b.cpu().numpy()) <= 1e-5
            assert (y.batch_sizes == wanted.batch_sizes).all()
    # A layer after another is a wavefront, and where columns gain nothing rows have lengths, too.
    used = {key[2] for key in engine.engine_of(ours).inference._bound}
    assert used == {"lengths"} if options == {"num_layers": 2} else "sequences" in used


OVERLAPPED = [("lstm", "float16", Stack(2, True)), ("gru", "bfloat16", Stack(1, True, True, True)),
              ("gru_reset_before", "float32", Stack(2, True)), ("lstm", "float16", Stack(4)),
              ("gru", "bfloat16", Stack(5, False, True, True)), ("lstm", "float32", Stack(3))]


def overlapped(cell: str, dtype: str, stack: Stack, overlap: str, sizes: tuple[int, int, int, int],
               **options: Any) -> tuple[Any, Any, Any, Any]:
    (T, B, I, H), kind = sizes, getattr(torch, dtype)
    layer, weights = compiled(cell, dtype, stack, sizes, overlap=overlap, **options)
    assert layer.manifest.overlap.kind == overlap
    generator = torch.Generator("cuda").manual_seed(5)
    x = torch.randn(T, B, I, device="cuda", generator=generator).to(kind)
    state = tuple((torch.rand(stack.count, B, H, device="cuda", generator=generator) - 0.5).to(kind)
                  for _ in range(STEPS[cell][1]))
    return layer, weights, x, state


@pytest.mark.parametrize(("schedule", "cell", "dtype", "stack"), [
    *((None, *case) for case in OVERLAPPED), ("layout_transform", *OVERLAPPED[0]),
    ("fused_step", *OVERLAPPED[4])], ids=str)
def test_what_overlaps_computes_the_same(schedule: str | None, cell: str, dtype: str, stack: Stack):
    """For several T, each twice with bitwise the same result, and in a graph that is replayed on other input."""
    B, I, H = 12, 40, 256
    kind = "directions" if stack.bidirectional else "wavefront"
    plain, weights, x, state = overlapped(cell, dtype, stack, "none", (70, B, I, H), schedule=schedule)
    layer = overlapped(cell, dtype, stack, kind, (70, B, I, H), schedule=schedule)[0]
    rng, start = np.random.default_rng(3), [s.double().cpu().numpy() for s in state]
    for T in (1, 2, 5, 23, 70, 131):
        given = torch.randn(T, B, I, device="cuda").to(x.dtype)
        call: dict[str, Any] = {"lengths": rng.integers(0, T + 1, B)} if stack.lengths else {}
        call |= {"resets": rng.random((T, B)) < 0.2} if stack.resets else {}
        exact = given.double().cpu().numpy()
        wanted = Wanted(dtype, lambda forward, exact=exact, call=call: of_stack(
            cell, stack, exact, start, weights, call, forward))
        call = {k: torch.as_tensor(v).cuda() for k, v in call.items()}
        first, last = plain(given, state, **call)
        wanted.check(first.double().cpu().numpy(), [s.double().cpu().numpy() for s in last])
        y, after = layer(given, state, out=torch.full_like(first, float("nan")), **call)
        again, _ = layer(given, state, **call)
        wanted.check(y.double().cpu().numpy(), [s.double().cpu().numpy() for s in after])
        assert torch.equal(y, again)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured, _ = layer(given, state, **call)
        captured.fill_(float("nan"))
        given.copy_(torch.randn_like(given))
        for _ in range(3):
            graph.replay()
        assert torch.equal(captured, layer(given, state, **call)[0])


@pytest.mark.parametrize("kind", ["directions", "wavefront"])
def test_streams_at_once(kind: str):
    stack = Stack(2, True) if kind == "directions" else Stack(3)
    layer, _, x, state = overlapped("lstm", "float16", stack, kind, (60, 8, 64, 128))
    inputs = [x, x + 0.5, x - 0.5]
    wanted, graph = [layer(one, state)[0].clone() for one in inputs], torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = layer(inputs[2], state)[0]
    streams = [torch.cuda.Stream() for _ in range(3)]
    outs: list[list[Any]] = [[], []]
    for _ in range(20):
        for number in range(2):
            with torch.cuda.stream(streams[number]):
                outs[number].append(layer(inputs[number], state)[0])
        with torch.cuda.stream(streams[2]):
            captured.fill_(float("nan"))
            graph.replay()
    torch.cuda.synchronize()
    for number in range(2):
        assert all(torch.equal(y, wanted[number]) for y in outs[number])
    assert torch.equal(captured, wanted[2])


@pytest.mark.parametrize(("name", "options"), [("LSTM", {"num_layers": 2, "bidirectional": True}), ("GRU", {}),
                                               ("LSTM", {"proj_size": 16})])
def test_torch_modules(name: str, options: dict[str, Any]):
    ours = getattr(ecornn.torch, name)(24, 48, **options).cuda().eval()
    theirs = copy.deepcopy(ours).double()
    theirs.__class__ = getattr(torch.nn, name)
    x = torch.randn(7, 5, 24, device="cuda")
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, [7, 3, 5, 1, 2], enforce_sorted=False)
    with torch.inference_mode():
        for given in (x, packed):
            y, wanted = ours(given)[0], theirs(given.double())[0]
            y, wanted = (y, wanted) if given is x else (y.data, wanted.data)
            assert relative(y.cpu(), wanted.cpu().numpy()) <= 1e-5
        graph, kept = torch.cuda.CUDAGraph(), x.clone()
        ours(kept)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = ours(kept)[0]
        kept.copy_(torch.randn_like(kept))
        graph.replay()
        assert relative(y.cpu(), theirs(kept.double())[0].cpu().numpy()) <= 1e-5


LIMITS = {"float32": 2e-5, "float16": 8 * 2.0 ** -11, "bfloat16": 8 * 2.0 ** -8}


@pytest.mark.parametrize(("schedule", "cell", "dtype", "sizes", "stack"), [
    ("persistent", "lstm", "float32", (24, 9, 24, 64), {}), ("persistent", "gru", "bfloat16", (40, 16, 96, 256), {}),
    ("persistent", "gru_reset_before", "float16", (24, 9, 24, 64), {"reverse": True}),
    ("persistent", "lstm(layer_norm)", "float32", (24, 9, 24, 64), {}),
    ("persistent", "lstm", "float16", (40, 9, 64, 128), {"layers": 2, "bidirectional": True}),
    ("persistent_wide", "lstm", "bfloat16", (24, 16, 64, 256), {"layers": 2}),
    ("persistent_wide", "rnn_tanh", "float16", (40, 48, 64, 136), {"bidirectional": True}),
], ids=str)
def test_a_training_step(schedule, cell, dtype, sizes, stack):
    T, B, I, H = sizes
    layer = ecornn.compile(cell, hidden=H, input=I, batch=B, seq=T, dtype=dtype, target="cuda", schedule=schedule,
                           sequences=True, training=True, **stack)
    kind = getattr(torch, dtype)
    drawn = random_weights(cell, I, H, 1, stack.get("layers", 1), 1 + stack.get("bidirectional", False))
    weights = {n: torch.tensor(v).to(kind).float().numpy() for n, v in drawn.items()}
    bound = layer.bind(weights)
    if stack.get("reverse"):
        assert gradients_reversed(bound, cell, weights) == gradients_reversed(bound, cell, weights)
        return
    errors = errors_of(bound, cell, weights, np.random.default_rng(0))
    assert max(errors.values()) < LIMITS[dtype], errors


def gradients_reversed(layer, cell, weights):
    w = layer.manifest.workload
    rng, kind = np.random.default_rng(0), getattr(torch, w.dtype)
    lengths = rng.integers(w.seq // 2, w.seq + 1, 2 * w.batch + 1)
    columns = ecornn.Columns.of(lengths, w.batch, layer.together)
    rows, drows = (torch.tensor(rng.standard_normal((w.seq, len(lengths), n))).to(kind) for n in (w.input, w.hidden))
    _, _, kept = layer.forward(rows[columns.inside, columns.table].cuda(), sequences=columns)
    found = layer.backward(kept, drows[columns.inside, columns.table].cuda())
    turned = [np.zeros(v.shape) for v in (rows, drows)]
    for s, n in enumerate(lengths):
        for into, value in zip(turned, (rows, drows), strict=True):
            into[:n, s] = value[:n, s].double().numpy()[::-1]
    state = [np.zeros((len(lengths), w.hidden)) for _ in layer.manifest.states]
    dx, dweights, _ = ecornn.reference_gradients(cell, turned[0], weights, state, dy=turned[1], lengths=lengths)
    laid = found.x.double().cpu().numpy().reshape(-1, w.input)
    for s, n in enumerate(lengths):
        assert relative(laid[columns.of_sequence(s)], dx[:n, s][::-1]) < LIMITS[w.dtype]
    for name, wanted in dweights.items():
        assert relative(found.weights[name].cpu().numpy(), wanted) < LIMITS[w.dtype], name
    return [laid.tobytes(), *(found.weights[name].cpu().numpy().tobytes() for name in dweights)]


@pytest.mark.parametrize(("layers", "both"), [(1, False), (2, True)])
def test_packed_sequences_of_pytorch(monkeypatch, layers, both):
    monkeypatch.setenv("ECORNN_STRICT", "1")
    taken = []
    monkeypatch.setattr(packed, "laid", lambda *of: taken.append(of) or packed_laid(*of))
    torch.manual_seed(0)
    library = torch.nn.LSTM(64, 128, layers, bidirectional=both).cuda()
    ours = copy.deepcopy(library)
    ecornn.torch.replace(ours)
    exact = copy.deepcopy(library).double()
    rows = [torch.randn(n, 64, device="cuda") for n in np.random.default_rng(0).integers(1, 61, 64)]
    state = [torch.randn(layers * (1 + both), len(rows), 128, device="cuda") for _ in range(2)]
    found = []
    for module in (exact, ours):
        kind = next(module.parameters()).dtype
        inputs, first = ([v.to(kind).requires_grad_() for v in values] for values in (rows, state))
        y, after = module(pack_sequence(inputs, enforce_sorted=False), tuple(first))
        generator, outputs = torch.Generator("cuda").manual_seed(1), [y.data, *after]
        dy = [torch.randn(o.shape, generator=generator, device="cuda").to(kind) for o in outputs]
        made = torch.autograd.grad(outputs, [*inputs, *first, *module.parameters()], dy)
        found.append([torch.cat(made[:len(rows)]), *made[len(rows):]])
    assert taken
    for value, wanted in zip(found[1], found[0], strict=True):
        assert relative(value.double().cpu().numpy(), wanted.cpu().numpy()) < LIMITS["float32"]


packed_laid = packed.laid

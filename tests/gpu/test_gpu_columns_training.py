"""Gradients of sequences in columns on a GPU: layers and stacks, and packed sequences of PyTorch."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from column_gradients import errors_of
from limits import relative
from torch.nn.utils.rnn import pack_sequence

import ecornn
import ecornn.torch
from ecornn.numpy_reference import random_weights
from ecornn.torch import packed

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:RNN module weights")]
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
        bits = []
        for _ in range(2):
            bits.append(gradients_reversed(bound, cell, weights))
        assert bits[0] == bits[1]
        return
    errors = errors_of(bound, cell, weights, np.random.default_rng(0))
    assert max(errors.values()) < LIMITS[dtype], errors


def gradients_reversed(layer, cell, weights):
    """Of a layer that goes backwards: as of one that goes forward, on sequences turned round. The bits of all."""
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
    """In columns, as without gradients; against PyTorch's layer in float64."""
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
        generator = torch.Generator("cuda").manual_seed(1)
        outputs = [y.data, *after]
        dy = [torch.randn(o.shape, generator=generator, device="cuda").to(kind) for o in outputs]
        made = torch.autograd.grad(outputs, [*inputs, *first, *module.parameters()], dy)
        found.append([torch.cat(made[:len(rows)]), *made[len(rows):]])
    assert taken
    for value, wanted in zip(found[1], found[0], strict=True):
        assert relative(value.double().cpu().numpy(), wanted.cpu().numpy()) < LIMITS["float32"]


packed_laid = packed.laid

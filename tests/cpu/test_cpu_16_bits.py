"""Layers in 16 bits on a CPU, against float64: with its matrix unit if it has one, without it, and as for other CPUs.

Layers are random: each seed is one, and a fault shows by its seed."""

from typing import Any

import numpy as np
import pytest
import step_cells
import torch
from exact import Wanted, of_stack, relative
from msgspec import structs
from torch.nn.utils.rnn import pack_padded_sequence

import ecornn
import ecornn.torch
from ecornn.cells import get
from ecornn.dtypes import TABLE
from ecornn.errors import ModuleError
from ecornn.host_cpu import detect, named
from ecornn.runtime import loader
from ecornn.workload import Stack

HALVES = "float16", "bfloat16"
CELLS = ["lstm", "gru", "gru_reset_before", "rnn_tanh", "rnn_relu", "lstm(peepholes)", "lstm(layer_norm)",
         "slstm", "slstm(heads=2)", "indrnn", "gated", "pair", "blend", "focus", "contrast"]
TARGETS = {"here": detect, "no matrix unit": lambda: without_matrix_unit(), "haswell": lambda: named("haswell"),
           "x86-64": lambda: named("x86-64")}
MATRIX_UNIT = "amx-bf16" in detect().features


def without_matrix_unit() -> Any:
    here = detect()
    return structs.replace(here, features=tuple(f for f in here.features if not f.startswith("amx")))


def values(*shape: int, dtype: str, rng: np.random.Generator) -> torch.Tensor:
    return torch.tensor(rng.standard_normal(shape)).to(getattr(torch, dtype))


def check(seed: int, dtype: str, target: str) -> None:
    rng = np.random.default_rng(seed)
    cell = str(rng.choice(CELLS))
    found = step_cells.CELLS.get(cell) or get(cell)
    H, I = (int(rng.choice([1, 2, 7, 16, 31, 33, 64, 65, 100, 130])) for _ in range(2))
    H += H % 2 if "heads" in cell else 0
    B, T = int(rng.choice([1, 3, 16, 17, 33, 50])), int(rng.integers(1, 9))
    options = {"bidirectional": bool(rng.integers(2)), "layers": int(rng.integers(1, 3)),
               "lengths": bool(rng.integers(2)), "resets": bool(rng.integers(2))}
    if found.inputs or len(found.output_names()) > 1:
        options |= {"bidirectional": False, "layers": 1}
    module = ecornn.compile(found, hidden=H, input=I, batch=B, seq=T, dtype=dtype, target=TARGETS[target](), **options)
    stack = Stack(options["layers"], options["bidirectional"], options["lengths"], options["resets"])
    weights = {p.name: values(*p.shape, dtype=dtype, rng=rng) / H ** 0.5 for p in module.manifest.parameters}
    layer = module.bind(weights, threads=int(rng.integers(1, 4)))
    x = values(T, B, module.manifest.workload.input, dtype=dtype, rng=rng)
    states = [values(stack.count, B, H, dtype=dtype, rng=rng) / 2 for _ in found.states]
    masks = {}
    if options["lengths"]:
        masks["lengths"] = torch.tensor(rng.integers(1, T + 1, B), dtype=torch.int32)
    if options["resets"]:
        masks["resets"] = torch.tensor(rng.random((T, B)) < 0.2)
    out = torch.full((T, B, module.manifest.y_width), float("nan"), dtype=x.dtype)
    given = [s if stack.count > 1 else s[0] for s in states]
    y, last = layer(x, tuple(given), out=out, **masks)
    again, _ = layer(x, tuple(given), **masks)
    assert torch.equal(y, again)
    numbers = {name: mask.numpy() for name, mask in masks.items()}
    exact = {name: w.double().numpy() for name, w in weights.items()}
    wanted = Wanted(dtype, lambda forward: of_stack(
        cell, stack, x.double().numpy(), [s.double().numpy() for s in given], exact, numbers, forward))
    wanted.check(y.double().numpy(), [s.double().numpy() for s in last])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(2, 30))])
def test_random_layers(seed, dtype, target):
    check(seed, dtype, target)


KINDS = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn": torch.nn.RNN}


def gradients(layer: Any, x: Any, gy: Any, lengths: Any) -> list[Any]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    given = x if lengths is None else pack_padded_sequence(x, lengths, enforce_sorted=False)
    y, last = layer(given)
    y = y if lengths is None else y.data
    loss = (y * gy[:y.shape[0]] if lengths is None else y * gy.flatten(0, 1)[:y.shape[0]]).sum()
    (loss + sum(s.sum() for s in (last if isinstance(last, tuple) else (last,)))).backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(3, 40))])
def test_gradients_of_random_layers(seed, dtype):
    """At most twice as far from float64 as PyTorch's own layer of the type is, or as an adjoint may be."""
    rng, kind = np.random.default_rng(seed), getattr(torch, dtype)
    torch.manual_seed(seed)
    cell = str(rng.choice([*KINDS]))
    I, H = int(rng.choice([1, 5, 16, 33, 64])), int(rng.choice([7, 16, 33, 64, 100]))  # one unit may have a tiny sum
    B, T = int(rng.choice([1, 2, 17, 40])), int(rng.integers(1, 12))
    options: dict[str, Any] = {name: bool(rng.integers(2)) for name in ("bidirectional", "bias")}
    options["num_layers"] = int(rng.integers(1, 3))
    theirs = KINDS[cell](I, H, **options).to(kind)
    ours, exact = KINDS[cell](I, H, **options).to(kind), KINDS[cell](I, H, **options).double()
    for layer in (ours, exact):
        layer.load_state_dict(theirs.state_dict())
    ecornn.torch.replace(ours, wait=True)
    x, gy = (values(T, B, n, dtype=dtype, rng=rng) for n in (I, H * (1 + options["bidirectional"])))
    lengths = torch.tensor(rng.integers(1, T + 1, B)) if rng.integers(2) else None
    found, same = gradients(ours, x, gy, lengths), gradients(ours, x, gy, lengths)
    assert all(torch.equal(a, b) for a, b in zip(found, same, strict=True))
    library, wanted = gradients(theirs, x, gy, lengths), gradients(exact, x.double(), gy.double(), lengths)
    # of all tensors together, since a bias has few numbers
    errors = [np.sqrt(np.mean([relative(v.double().numpy(), true.numpy()) ** 2
                               for v, true in zip(made, wanted, strict=True)])) for made in (found, library)]
    assert errors[0] <= max(2 * errors[1], TABLE[dtype].gradients or 0.0)


@pytest.mark.parametrize("dtype", HALVES)
def test_changed_weights_are_packed_again(dtype):
    """By the module's own code, which copies 16-bit weights to their places, as by the one that packs them first."""
    torch.manual_seed(0)
    kind, x = getattr(torch, dtype), torch.randn(3, 5, 33).to(getattr(torch, dtype))
    layer, fresh = (torch.nn.LSTM(33, 40).to(kind) for _ in range(2))
    for one in (layer, fresh):
        ecornn.torch.replace(one, wait=True)
    layer(x)[0].sum().backward()
    with torch.no_grad():
        for number, weight in enumerate(layer.parameters()):
            weight.copy_(torch.randn(weight.shape) * (10.0 ** -number if weight.dim() == 1 else 0.2))
        layer.bias_ih_l0.view(-1)[:3] = torch.tensor([0.0, float("inf"), 6e-8])  # float16 has it as a subnormal
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x)[0].nan_to_num(7.0), fresh(x)[0].nan_to_num(7.0))


@pytest.mark.parametrize("dtype", HALVES)
def test_special_values_stay_special(dtype):
    """NaN of any bits, infinities and the largest numbers come out as they went in, rounded as PyTorch does."""
    kind = getattr(torch, dtype)
    module = ecornn.compile("rnn_relu", hidden=40, input=40, batch=2, seq=1, dtype=dtype, target="cpu")
    # AMX takes subnormal numbers of bfloat16 for zeros, as PyTorch's products by it do
    numbers = torch.tensor([float("inf"), 65504.0, 3e38, 1.0, 2.0 ** -24, 0.0, 1.0 + 2.0 ** -8, 1.0 + 3 * 2.0 ** -8])
    x = torch.ones(1, 2, 40).to(kind)
    weights = {"weight_ih_l0": torch.diag(numbers.repeat(5)).to(kind), "weight_hh_l0": torch.zeros(40, 40).to(kind),
               "bias_ih_l0": torch.zeros(40).to(kind), "bias_hh_l0": torch.zeros(40).to(kind)}
    layer = module.bind(weights)
    assert torch.equal(layer(x)[0][0, 0], weights["weight_ih_l0"].diagonal())
    x[0, 1, 3] = float("nan")
    y = layer(x)[0]
    assert torch.isnan(y[0, 1]).all() and torch.equal(y[0, 0], weights["weight_ih_l0"].diagonal())


@pytest.mark.skipif(not MATRIX_UNIT, reason="this CPU has no AMX")
def test_a_process_may_not_have_tiles(monkeypatch):
    module = ecornn.compile("gru", hidden=32, input=32, batch=16, dtype="bfloat16", target="cpu")
    assert module.manifest.config["matrix"] == 1
    monkeypatch.setattr(loader, "permit_tiles", lambda: False)
    with pytest.raises(ModuleError, match=r"AMX.*float32"):
        module.bind({p.name: torch.zeros(p.shape) for p in module.manifest.parameters})

"""Rounded weights on the CPU: values against float64 models of what is rounded, and who is refused."""

import re

import ml_dtypes
import msgspec.structs
import numpy as np
import pytest
from cpu_sample import rows_that_fit
from exact import relative as error
from hypothesis import given
from hypothesis import strategies as st
from numpy_packing import pack
from pairwise import halved
from refusals import refused
from step_cells import Chain, Peephole, run
from step_cells import sigmoid as logistic

import ecornn
from ecornn.cells import get
from ecornn.compiler import generate, plan
from ecornn.errors import ArgumentError, DTypeError, ScheduleError
from ecornn.host_cpu import detect
from ecornn.numpy_reference import random_weights, reference
from ecornn.program import Packing
from ecornn.schedules.cpu import CPUSequence
from ecornn.task import make_task
from ecornn.workload import Workload

VNNI = bool({"avx512vnni", "avxvnni"} & set(detect().features))
needs_vnni = pytest.mark.skipif(not VNNI, reason="this CPU has no VNNI")
CELLS = ("lstm", "gru", "gru_reset_before", "rnn_tanh", "rnn_relu")
SIZES = [(1, 1, 1, 2), (5, 7, 2, 3), (33, 101, 5, 6), (64, 48, 1, 9)]  # I, H, B, T; odd I and H end in half a pair


def random_layer(cell, input: int, hidden: int, seed: int = 0) -> dict[str, np.ndarray]:
    generator, found = np.random.default_rng(seed), get(cell)
    return {found.parameter_name(name): generator.uniform(-1, 1, (shape[0] * shape[1], *shape[2:])).astype(np.float32)
            / np.float32(hidden ** 0.5) for name, shape in found.parameters(input, hidden).items()}


def called(cell, size, weights: dict[str, np.ndarray], kind: str, threads: int = 2, x=None, **options):
    input, hidden, batch, steps = size
    if x is None:
        x = np.random.default_rng(1).standard_normal((steps, batch, input), np.float32)
    module = ecornn.compile(cell, hidden=hidden, input=input, batch=batch, seq=steps, target="cpu", weights=kind,
                            **options)
    return x, module.bind(weights, threads=threads)(x)


FIXED = {"int21": 2e-6, "int16": 6e-5}  # and the error of a layer, of which float32 has a part
ROUNDED = {"bfloat16": 1e-2, **FIXED}
KINDS = [*ROUNDED, pytest.param("int8", marks=needs_vnni)]


@pytest.mark.parametrize(("cell", "size", "kind"), halved(CELLS, SIZES, ROUNDED))
def test_weights_are_what_was_packed_and_nothing_else_is_rounded(cell, size, kind):
    weights = random_layer(cell, *size[:2])
    x, (y, last) = called(cell, size, weights, kind)
    y_ref, last_ref = reference(cell, x, as_packed(weights, kind))
    assert error(y, y_ref) < 1e-6 and all(error(a, b) < 1e-6 for a, b in zip(last, last_ref, strict=True))
    assert error(y, reference(cell, x, weights)[0]) < ROUNDED[kind]


def as_packed(weights: dict[str, np.ndarray], kind: str) -> dict[str, np.ndarray]:
    def rounded(w: np.ndarray) -> np.ndarray:
        return w.astype(ml_dtypes.bfloat16).astype(np.float32) if kind == "bfloat16" else unpacked(w, kind)
    return {n: rounded(w) if w.ndim == 2 else w for n, w in weights.items()}


def unpacked(weights: np.ndarray, kind: str) -> np.ndarray:
    (rows, k), group = weights.shape, {"int16": 2, "int21": 3}[kind]
    width = -(-k // group) * group
    packing = Packing((("w", 0),), (1, rows, width), (1, rows, 1, width // group, group), (0, 1, 3, 2, 4), kind)
    parameters = {"w": weights[None]}
    words = pack(packing, parameters)[0, ..., 0].astype(np.uint64)  # (R, groups, words)
    scales = pack(Packing((("w", 0),), (1, rows, width), (1, rows, width), (0, 1, 2), f"{kind}_scale"), parameters)[0]
    if kind == "int16":
        found = [words[..., 0] << 16, words[..., 0]]
    else:
        found = [words[..., 0], words[..., 1], words[..., 0] << 21 | (words[..., 1] & 0x7FF) << 10]
    values = (np.stack(found, -1) & 0xFFFFFFFF).astype(np.uint32).view(np.int32).reshape(rows, width)[:, :k]
    return values * scales.astype(np.float64)[:, None]


@pytest.mark.parametrize("kind", FIXED)
@given(k=st.integers(1, 9), seed=st.integers(0, 2 ** 32 - 1), spread=st.booleans())
def test_fixed_point_is_off_by_half_a_step_at_most(kind, k, seed, spread):
    generator = np.random.default_rng(seed)
    weights = generator.uniform(-1, 1, (3, k)) * 10.0 ** (generator.uniform(-9, 0, (3, k)) if spread else 0)
    weights = (weights * 10 ** generator.uniform(-1, 1)).astype(np.float32) if seed % 5 else np.sign(weights)
    step = np.abs(weights).max(-1, keepdims=True) / (2.0 ** {"int16": 15, "int21": 20}[kind] - 1)
    # the largest value itself may be off by what the lower bits of a word add to it, a step
    off = np.abs(unpacked(weights.astype(np.float32), kind) - weights) / step
    assert (off <= 1).all() and (off[np.abs(weights) < np.abs(weights).max(-1, keepdims=True) - step] <= 0.501).all()


@pytest.mark.parametrize("kind", FIXED)
def test_fixed_point_of_zeros_and_of_nan(kind):
    weights = {n: np.zeros_like(w) for n, w in random_layer("rnn_tanh", 8, 20).items()}
    assert not called("rnn_tanh", (8, 20, 2, 3), weights, kind)[1][0].any()
    weights = random_layer("rnn_tanh", 8, 20)
    weights["weight_ih_l0"][3, 2] = np.nan
    y = called("rnn_tanh", (8, 20, 2, 1), weights, kind)[1][0]
    assert np.isnan(y[0, :, 3]).all() and np.isfinite(np.delete(y[0], 3, 1)).all()


@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.parametrize("target", ["haswell", "neoverse-v1"])
def test_other_vectors(kind, target):
    text = generate(plan("gru", hidden=48, batch=4, target=target, weights=kind)).emitted["asm"]
    assert "zmm" not in text and (kind == "bfloat16" or ("scvtf" if target == "neoverse-v1" else "vcvtdq2ps") in text)


@pytest.mark.parametrize(("cell", "columns", "most"), [
    ("lstm", 4, 1), ("lstm", 4, 2), ("lstm", 4, 4), ("lstm", 4, 5),  # more than one row: with 32 registers
    ("gru", 3, 2), ("rnn_tanh", 2, 4), ("rnn_tanh", 2, 5)])  # on every CPU
def test_bfloat16_weights_in_tiles(cell, columns, most):
    weights, rows = random_layer(cell, 20, 70), rows_that_fit(most, columns, "bfloat16")
    options = {"rows": rows, "columns": columns, "project_rows": rows, "project_columns": columns}
    x, (y, _) = called(cell, (20, 70, 5, 4), weights, "bfloat16", schedule="cpu_sequence", config=options)
    assert error(y, reference(cell, x, as_packed(weights, "bfloat16"))[0]) < 1e-6


@pytest.mark.parametrize(("cell", "kind"), [
    ("lstm", "bfloat16"), ("lstm", "int16"), ("gru_reset_before", "int21"),
    *(pytest.param(*one, marks=pytest.mark.exhaustive) for one in (
        ("gru_reset_before", "bfloat16"), ("gru_reset_before", "int16"), ("lstm", "int21"))),
    *(pytest.param(cell, "int8", marks=needs_vnni) for cell in ("lstm", "gru_reset_before"))])
def test_rounded_weights_of_a_stack(cell, kind):
    T, B, I, H = 6, 5, 9, 21
    weights, generator = random_weights(cell, I, H, 3, 2, 2), np.random.default_rng(2)
    x, masks = generator.standard_normal((T, B, I), np.float32), {"lengths": [3, 6, 0, 1, 5]}
    masks["resets"] = generator.random((T, B)) < 0.3
    module = ecornn.compile(cell, hidden=H, input=I, batch=B, seq=T, target="cpu", weights=kind, layers=2,
                            bidirectional=True, lengths=True, resets=True)
    given = x.copy()
    for b, n in enumerate(masks["lengths"]):
        given[n:, b] = np.nan
    y, last = module.bind(weights, threads=2)(given, **masks)
    y_ref, last_ref = reference(cell, x, as_packed(weights, kind) if kind == "bfloat16" else weights, **masks)
    limit = {**ROUNDED, "bfloat16": 1e-6, "int8": 3e-2}[kind]  # of int8 each of two layers about 1e-2
    assert error(y, y_ref) < limit and all(error(a, b) < limit for a, b in zip(last, last_ref, strict=True))


def quantized(values: np.ndarray) -> np.ndarray:
    scale = np.abs(values).max(-1, keepdims=True) / 127
    return np.rint(values / np.where(scale > 0, scale, 1)) * scale


def int8_model(cell: str, x: np.ndarray, weights: dict[str, np.ndarray]) -> np.ndarray:
    w, r, bw, br = (weights[f"{n}_l0"].astype(np.float64) for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    w, r, hidden = quantized(w), quantized(r), r.shape[1]
    h = c = np.zeros((x.shape[1], hidden))
    y = []
    for row in x.astype(np.float64):
        a = np.split(quantized(row) @ w.T + bw, len(bw) // hidden, 1)
        b = np.split(quantized(h) @ r.T + br, len(bw) // hidden, 1)
        if cell == "lstm":
            i, f, g, o = (p + q for p, q in zip(a, b, strict=True))
            c = logistic(f) * c + logistic(i) * np.tanh(g)
            h = logistic(o) * np.tanh(c)
        elif cell == "gru":
            z = logistic(a[1] + b[1])
            h = (1 - z) * np.tanh(a[2] + logistic(a[0] + b[0]) * b[2]) + z * h
        else:
            h = np.tanh(a[0] + b[0]) if cell == "rnn_tanh" else np.maximum(a[0] + b[0], 0)
        y.append(h)
    return np.stack(y)


@needs_vnni
@pytest.mark.parametrize(("cell", "size"), halved(["lstm", "gru", "rnn_tanh", "rnn_relu"], SIZES))
def test_int8_weights_are_those_of_the_model(cell, size):
    weights = random_layer(cell, *size[:2])
    x, (y, _) = called(cell, size, weights, "int8")
    # a value in the middle between two integers may fall to either side
    assert error(y, int8_model(cell, x, weights)) < 1e-3 and error(y, reference(cell, x, weights)[0]) < 5e-2


@needs_vnni
def test_int8_error_at_a_usual_size():
    weights = random_layer("lstm", 256, 256)
    x, (y, _) = called("lstm", (256, 256, 4, 50), weights, "int8")
    assert error(y, reference("lstm", x, weights)[0]) < 1.5e-2


def test_int8_on_vectors_of_256_bits():
    text = generate(plan("gru", hidden=48, batch=4, target="alderlake", weights="int8")).emitted["asm"]
    assert re.search(r"vpdpbusd\t.*%ymm", text) and "zmm" not in text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cell", [Peephole(), Chain()], ids=lambda c: c.name)
def test_cells_of_a_user(cell, kind):
    generator = np.random.default_rng(5)
    shaped = {n: generator.uniform(-0.2, 0.2, s).astype(np.float32) for n, s in cell.parameters(19, 37).items()}
    flat = {cell.parameter_name(n): p.reshape(-1, *p.shape[2:]) for n, p in shaped.items()}
    x, (y, _) = called(cell, (19, 37, 3, 6), flat, kind)
    zeros = dict.fromkeys(cell.states, np.zeros((3, 37)))
    assert error(y, run(cell, x, zeros, shaped)[0]) < {"int8": 5e-2, **ROUNDED}[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_smaller_batches_threads_and_pieces_give_the_same(kind):
    weights = random_layer("gru", 24, 70)
    module = ecornn.compile("gru", hidden=70, input=24, batch=6, seq=8, target="cpu", weights=kind)
    x = np.random.default_rng(2).standard_normal((11, 6, 24), np.float32)
    y, last = module.bind(weights, threads=1)(x)
    many = module.bind(weights, threads=3)
    assert np.array_equal(many(x)[0], y) and np.array_equal(many(np.ascontiguousarray(x[:, 2:3]))[0], y[:, 2:3])
    first, state = many(x[:4])
    rest, state = many(x[4:], state)
    assert np.array_equal(np.concatenate([first, rest]), y) and np.array_equal(state[0], last[0])


@needs_vnni
def test_int8_of_zeros_and_of_nan():
    weights = {n: np.zeros_like(w) for n, w in random_layer("rnn_tanh", 8, 20).items()}
    x, (y, _) = called("rnn_tanh", (8, 20, 2, 3), weights, "int8", x=np.zeros((3, 2, 8), np.float32))
    assert not y.any()
    x[1, 0, 3] = np.nan
    y = called("rnn_tanh", (8, 20, 2, 3), random_layer("rnn_tanh", 8, 20), "int8", x=x)[1][0]
    assert np.isfinite(y[0]).all() and np.isnan(y[1:, 0]).all() and np.isfinite(y[:, 1]).all()


def test_int8_packing():
    weights = np.array([[[1.0, -4.0, 2.0], [0.0, 0.0, 0.0]]])
    sources, pad = (("w", 0),), (1, 3, 4)
    packed = pack(Packing(sources, pad, pad, (0, 1, 2), "int8"), {"w": weights})
    assert packed.dtype == np.uint8
    assert packed[0].tolist() == [[160, 1, 192, 128], [128] * 4, [128] * 4]  # 31.75 and 63.5, to even
    scale = pack(Packing(sources, pad, pad, (0, 1, 2), "scale"), {"w": weights})
    assert scale.dtype == np.float32 and scale[0].tolist() == [np.float32(4 / 127), 0, 0]


def test_who_is_refused():
    with pytest.raises(ScheduleError, match="does not round weights to int8"):
        ecornn.compile("lstm", hidden=8, target="sm_90a", dtype="float16", weights="int8", schedule="fused_step")
    plain = msgspec.structs.replace(detect(), features=("avx2", "fma"))
    refused(ScheduleError, "needs VNNI", ecornn.compile, "lstm", hidden=8, target=plain, weights="int8")
    with pytest.raises(DTypeError, match=r"weights='int4': expected None or one of float32, .*int8"):
        ecornn.compile("lstm", hidden=8, target="cpu", weights="int4")
    refused(ArgumentError, "weights", Workload, "lstm", 8, 8, weights="float32")
    task = make_task(get("lstm"), Workload("lstm", 8, 1 << 17, weights="int8"), detect())
    assert not VNNI or "65536" in str(CPUSequence().serves(task))


def test_the_layers_own_type_is_no_rounding():
    module = ecornn.compile("rnn_tanh", hidden=8, target="cpu", weights="float32")
    assert module.manifest.workload.weights is None
    module = ecornn.compile("rnn_tanh", hidden=8, target="cpu", weights="bfloat16")
    assert module.manifest.workload.weights == "bfloat16"

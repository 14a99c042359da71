"""Packing of weights: every element is where the packing says, rounding is right; the C interface's, to the bit."""

import ctypes
import subprocess
from collections.abc import Iterable
from importlib import resources
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import device_packing as emulated
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy_packing import bfloat16_bits, cast, pack
from refusals import refused
from runtime_sample import FakeGPU, tables_of

import ecornn
from ecornn.build import c_tables
from ecornn.build.link import find_compiler
from ecornn.cells import get
from ecornn.errors import ModuleError, ShapeError, WeightsError
from ecornn.manifest import Parameter
from ecornn.program import WHOLE, Packing
from ecornn.runtime import torch_arrays
from ecornn.runtime import weights as runtime_weights
from ecornn.runtime.weights import PackedWeights
from ecornn.schedules import all_schedules
from ecornn.targets import resolve
from ecornn.task import make_manifest, make_task
from ecornn.workload import Workload


@st.composite
def packings(draw: Any) -> tuple[Packing, dict[str, np.ndarray]]:
    gates, part = draw(st.integers(1, 4)), tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=2)))
    names = draw(st.lists(st.sampled_from(["weight_ih", "weight_hh"]), min_size=1, max_size=2, unique=True))
    size = gates * prod(part)
    parameters = {name: np.arange(1 + i * size, 1 + (i + 1) * size, dtype=np.float64).reshape(gates, *part)
                  for i, name in enumerate(names)}
    whole = len(part) == 2 and draw(st.booleans())
    kind = st.just(WHOLE) if whole else st.integers(0, gates - 1)
    if whole:
        part = (gates * part[0], part[1])
    source = st.tuples(st.sampled_from(names), kind) | st.just(("", 0))
    sources = tuple(draw(st.lists(source, min_size=1, max_size=5)))
    split: list[int] = []
    pad = []
    for extent in (len(sources), *part):
        inner = draw(st.integers(1, 4))
        outer = -(-extent // inner) + draw(st.integers(0, 1))
        pad.append(outer * inner)
        split += [outer, inner]
    order = tuple(draw(st.permutations(range(len(split)))))
    return Packing(sources, tuple(pad), tuple(split), order, "float32"), parameters


@given(packings())
def test_packing_is_invertible_and_pads_with_zeros(case: tuple[Packing, dict[str, np.ndarray]]):
    packing, parameters = case
    packed = pack(packing, parameters)
    assert packed.flags.c_contiguous and packed.dtype == np.float32
    assert packed.shape == tuple(packing.split[axis] for axis in packing.order)
    back = packed.transpose(np.argsort(packing.order)).reshape(packing.pad).copy()
    for index, (name, gate) in enumerate(packing.sources):
        if name:
            of = parameters[name]
            whole = of[gate] if gate >= 0 else of.reshape(-1, of.shape[-1])
            inside = back[index][tuple(slice(size) for size in whole.shape)]
            np.testing.assert_array_equal(inside, whole)
            inside[...] = 0
    assert not back.any()


def test_a_packing_by_hand():
    weights = {"w": np.arange(2 * 3 * 2, dtype=np.float32).reshape(2, 3, 2)}
    packing = Packing((("w", 0), ("w", 1)), (2, 4, 2), (2, 2, 2, 2), (1, 3, 0, 2), "float32")
    wanted = [[[[0, 2], [6, 8]], [[1, 3], [7, 9]]], [[[4, 0], [10, 0]], [[5, 0], [11, 0]]]]
    np.testing.assert_array_equal(pack(packing, weights), wanted)
    zeros = pack(Packing((("", 0),), (2, 3), (6,), (0,), "bfloat16"), {})
    assert zeros.dtype == np.uint16 and zeros.shape == (6,) and not zeros.any()


FLOATS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50)


@given(FLOATS)
def test_tf32_is_the_nearest_and_away_from_zero_in_ties(bits: list[int]):
    values = np.array(bits + [b & 0xFFFFE000 | 0x1000 for b in bits], np.uint32).view(np.float32)
    got = cast(values, "tf32")
    assert (got.view(np.uint32)[~np.isnan(values)] & 0x1FFF == 0).all() and (np.isnan(got) == np.isnan(values)).all()
    for value, found in zip(values.tolist(), got.tolist(), strict=True):
        if not np.isfinite(value):
            assert found == value or np.isnan(value)
            continue
        down = np.uint32(np.float32(value).view(np.uint32) & np.uint32(0xFFFFE000))
        near, far = (float(np.uint32(down + step).view(np.float32)) for step in (0, 0x2000))
        if np.isfinite(far):
            assert found == (far if abs(far - value) <= abs(value - near) else near)


@given(FLOATS)
def test_bfloat16_as_torch_rounds(bits: list[int]):
    values = np.array(bits + [b & 0xFFFF0000 | 0x8000 for b in bits], np.uint32).view(np.float32)
    got = torch.from_numpy(bfloat16_bits(values).view(np.int16)).view(torch.bfloat16)
    wanted = torch.from_numpy(values).bfloat16()
    number = ~wanted.isnan()  # the bits of a NaN are nobody's concern
    assert torch.equal(got.isnan(), wanted.isnan()) and torch.equal(got[number], wanted[number])


def test_every_float16_and_the_ends_of_ranges():
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    np.testing.assert_array_equal(cast(every.astype(np.float64), "float16"), every)
    ends = np.array([65504, 65519.99, 65520, -1e300, 1e300, 6e-8, 0.0, -0.0])
    np.testing.assert_array_equal(cast(ends, "float16"), np.array(
        [65504, 65504, np.inf, -np.inf, np.inf, 2.0**-24, 0, 0], np.float16))
    assert bfloat16_bits(np.array([1e300, -1e300, 3.4e38])).tolist() == [0x7F80, 0xFF80, 0x7F80]


@pytest.mark.parametrize("rounded", [None, "int8"])
def test_weights_on_the_gpu_are_bound_as_those_of_the_host(tmp_path, monkeypatch, rounded):
    """Where the module's kernel cannot pack, as 8-bit integers, they are copied to the host."""
    cell, schedule = get("gru"), all_schedules()["persistent"]
    task = make_task(cell, Workload(cell.identity(), 40, 24, 3, 5, "bfloat16", rounded), resolve("sm_90a"))
    config = schedule.default(task)
    manifest = make_manifest(cell, task, schedule, config, schedule.program(task, schedule.plan(task, config)), "")
    gpu = FakeGPU(manifest, tmp_path, emulated.pack if rounded is None else None)
    rng = np.random.default_rng(0)
    host = {p.name: rng.normal(size=p.shape).astype(np.float32) for p in manifest.parameters}
    tensors = {name: torch.nn.Parameter(torch.from_numpy(values)) for name, values in host.items()}
    def bound(given: dict[str, Any]) -> list[bytes]:
        made = PackedWeights(manifest, gpu.library, given, 0, None)
        assert not any(gpu.content(made.zeros(1)))
        return [gpu.content(at) for at in made.packed.values()]
    wanted = bound(host)
    parameters = {p.key: host[p.name].reshape(p.gates, -1, *p.shape[1:]) for p in manifest.parameters}
    for b, found in zip((b for b in manifest.buffers if b.role == "packed"), wanted, strict=True):
        exact = pack(b.packing, parameters).tobytes()
        assert found[:len(exact)] == exact
    assert wanted == bound(tensors) and set(gpu.queues) == {0}  # tensors of the host are as NumPy's
    monkeypatch.setattr(torch_arrays.TorchArrays, "facts",
                        lambda self, array: (tuple(array.shape), self._names[array.dtype], "cuda:0"))
    monkeypatch.setattr(torch_arrays.TorchArrays, "queue", lambda self, device: 7)
    monkeypatch.setattr(torch_arrays.TorchArrays, "to_host", None)
    gpu.queues.clear()
    assert bound(tensors) == wanted and 7 in gpu.queues
    refused(ShapeError, "weight_hh", bound, {**tensors, "weight_hh_l0": tensors["weight_hh_l0"][:, :-1]})


@pytest.mark.parametrize("cell, hidden, input", [("lstm", 19, 7), ("gru_reset_before", 19, 7), ("indrnn", 19, 7),
                                                 ("gru", 72, 150)])  # the last one: several blocks of rows and columns
def test_weights_are_packed_again_where_they_were(cell: str, hidden: int, input: int):
    module = ecornn.compile(cell, hidden=hidden, input=input, batch=3, seq=4, training=True, target="cpu")
    rng = np.random.default_rng(0)
    first, second = ({p.name: rng.standard_normal(p.shape).astype(np.float32) for p in module.manifest.parameters}
                     for _ in range(2))
    for weights in (second, first | {"weight_ih_l0": second["weight_ih_l0"]}):
        layer, x = module.bind(first, threads=2), rng.standard_normal((4, 3, input)).astype(np.float32)
        places = dict(layer.packed)
        layer.repack(weights)
        assert layer.packed == places
        (y, _, kept), (exact, _, others) = layer.forward(x), (fresh := module.bind(weights, threads=2)).forward(x)
        found, wanted = layer.backward(kept, y), fresh.backward(others, exact)
        assert np.array_equal(y, exact) and np.array_equal(found.x, wanted.x)
        assert all(np.array_equal(found.weights[n], w) for n, w in wanted.weights.items())
        with pytest.raises(WeightsError):
            layer.repack({})
        assert np.array_equal(layer.forward(x)[0], y)


G, H, K = 3, 6, 20
# of two gates and a third one of zeros: padding, a split and an order that say nothing of each other's axes
SOURCES = (("W", 2), ("", 0), ("W", 0))
MATRIX = dict(sources=SOURCES, pad=(3, 8, 24), split=(3, 2, 4, 12, 2), order=(1, 0, 3, 2, 4))
THREES = dict(sources=SOURCES, pad=(3, 8, 24), split=(3, 2, 4, 8, 3), order=(1, 3, 0, 2, 4))
PAIRS = dict(sources=SOURCES, pad=(3, 8, 24), split=(3, 8, 2, 12), order=(0, 1, 2, 3))
VECTOR = dict(sources=(("b", 1), ("b", 0)), pad=(4, 8), split=(4, 2, 4), order=(1, 0, 2))
WHOLE_MATRIX = dict(sources=(("W", WHOLE),), pad=(1, 24, 24), split=(1, 6, 4, 12, 2), order=(1, 0, 3, 2, 4))
CASES = {kind: MATRIX for kind in c_tables.PACKINGS} | {"int21": THREES, "pairs": PAIRS}
PACKINGS = [*(Packing(dtype=kind, **case) for kind, case in CASES.items()), Packing(dtype="float32", **VECTOR),
            Packing(dtype="bfloat16", **VECTOR), Packing(dtype="bfloat16", **WHOLE_MATRIX)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tvm_ffi import libinfo

    out = tmp_path_factory.mktemp("pack") / "pack.so"
    out.with_name("c_kinds.h").write_text(c_tables.kinds())
    folders = [out.parent, resources.files("ecornn.build"), resources.files("ecornn") / "include",
               libinfo.find_dlpack_include_path()]
    subprocess.run([*find_compiler(), "-shared", "-fPIC", "-O1", "-std=c++17", "-Wall", "-Wextra", "-Werror",
                    *(f"-I{f}" for f in folders), str(Path(__file__).with_name("c_pack_sample.cc")), "-o", str(out)],
                   check=True)
    return ctypes.CDLL(str(out))


def packed_by_code(library: Any, tables: bytes, values: Iterable[np.ndarray], number: int, out: np.ndarray) -> int:
    library.pack.restype, values = ctypes.c_int64, [*values]
    data = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
    return library.pack(tables, data, 2, 8 * values[0].itemsize, number, ctypes.c_void_p(out.ctypes.data))


def weights(kind: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    made = rng.standard_normal((G, H, K)) * 10.0 ** rng.integers(-6, 3, (G, H, K))
    made[0, 1] = 0
    made[2, 3, :6] = 2049, 2051, 6e-8, 65519, 1.00390625, -1e-7
    return {"W": made.astype(kind), "b": rng.standard_normal((2, H)).astype(kind)}


@pytest.mark.parametrize("kind", ["float32", "float64", "float16"])
def test_every_kind_of_packing(library: Any, kind: str):
    values = weights(kind)
    parameters = Parameter("weight_l0", "W", (G * H, K), G), Parameter("bias_l0", "b", (2 * H,), 2)
    _, tables = tables_of(parameters, PACKINGS)
    for number, packing in enumerate(PACKINGS):
        wanted = pack(packing, {k: v.astype(np.float32) if kind == "float16" else v for k, v in values.items()})
        found = np.full(1 << 14, 0xEE, np.uint8)
        size = packed_by_code(library, tables, values.values(), number, found)
        assert size == wanted.nbytes, packing
        same = found[:size].tobytes() == wanted.tobytes()
        if packing.dtype == "pairs" and not same:  # sums in another order, rounded to float32
            np.testing.assert_allclose(found[:size].view(np.float32).reshape(wanted.shape), wanted, 2e-7)
        else:
            assert same, packing


def test_what_is_no_number(library: Any):
    values = weights("float32")
    values["W"][0, 0, 0], values["W"][2, 2, 1], values["W"][0, 4, 4] = np.nan, np.inf, -np.inf
    packings = [Packing(dtype=kind, **MATRIX) for kind in ("float16", "bfloat16", "tf32", "float64")]
    _, tables = tables_of([Parameter("weight_l0", "W", (G * H, K), G)], packings)
    for number, packing in enumerate(packings):
        wanted = pack(packing, values)
        found = np.empty(wanted.shape, wanted.dtype)
        packed_by_code(library, tables, [values["W"]], number, found)
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("kind", [kind for kind in CASES if kind not in ("float16", "bfloat16", "tf32", "float64")])
def test_not_a_number_stays_in_its_row(library: Any, kind: str):
    """Not the last of a row, so that a maximum that forgets it is found."""
    values = {"W": np.random.default_rng(0).standard_normal((G, H, K)).astype(np.float32)}
    values["W"][0, 1, 2] = np.nan
    packing = Packing(dtype=kind, **CASES[kind])
    _, tables = tables_of([Parameter("weight_l0", "W", (G * H, K), G)], [packing])
    wanted = pack(packing, values)
    found = np.empty(wanted.shape, wanted.dtype)
    packed_by_code(library, tables, [values["W"]], 0, found)
    np.testing.assert_allclose(found, wanted, 2e-7)


def test_a_module_whose_c_interface_is_older():
    api = runtime_weights._Api(version=1, size=88)
    file = SimpleNamespace(ecornn_module_api=lambda version: ctypes.pointer(api))
    refused(ModuleError, "compile it again", runtime_weights.api_of, file)

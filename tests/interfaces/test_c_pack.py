"""Weights packed by a module's own C interface are those that Python packs, to the bit."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import runtime_sample as sample
from hypothesis import given, settings
from hypothesis import strategies as st
from test_runtime_packing import packings

from ecornn.build import c_tables
from ecornn.build.link import find_compiler
from ecornn.dtypes import DLPACK
from ecornn.manifest import Manifest, Parameter
from ecornn.program import WHOLE, Buffer, Extent, Packing
from ecornn.runtime.device_packing import KINDS, PARAMETERS, SOURCE, TYPES, DevicePacking
from ecornn.runtime.packing import pack

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
    """c_pack_sample.cc."""
    from tvm_ffi import libinfo

    out = tmp_path_factory.mktemp("pack") / "pack.so"
    out.with_name("c_kinds.h").write_text(c_tables.kinds())
    folders = [out.parent, resources.files("ecornn.build"), resources.files("ecornn") / "include",
               libinfo.find_dlpack_include_path()]
    subprocess.run([*find_compiler(), "-shared", "-fPIC", "-O1", "-std=c++17", "-Wall", "-Wextra", "-Werror",
                    *(f"-I{f}" for f in folders), str(Path(__file__).with_name("c_pack_sample.cc")), "-o", str(out)],
                   check=True)
    return ctypes.CDLL(str(out))


@pytest.fixture(scope="module")
def packed_by_code(library: Any) -> Any:
    """c_pack.h as a function of (tables, data pointers, DLPack code, bits, packing's number, out)."""
    library.pack.restype = ctypes.c_int64
    return library.pack


def tables_of(parameters: Sequence[Parameter], packings: Iterable[Packing]) -> tuple[Manifest, bytes]:
    """Of a module that has these."""
    base = sample.manifest()
    packed = [Buffer(f"p{n}", "packed", "float32", Extent(1), p) for n, p in enumerate(packings)]
    buffers = (*base.buffers[1:4], *packed)
    said = msgspec.structs.replace(base, parameters=tuple(parameters), buffers=buffers, entries=sample.taken(buffers))
    return said, c_tables.tables(said, said.entries)


def weights(kind: str) -> dict[str, np.ndarray]:
    """Of several magnitudes, with a row of zeros, ties, subnormal numbers of float16, and what that cannot hold."""
    rng = np.random.default_rng(7)
    made = rng.standard_normal((G, H, K)) * 10.0 ** rng.integers(-6, 3, (G, H, K))
    made[0, 1] = 0
    made[2, 3, :6] = 2049, 2051, 6e-8, 65519, 1.00390625, -1e-7
    return {"W": made.astype(kind), "b": rng.standard_normal((2, H)).astype(kind)}


@pytest.mark.parametrize("kind", ["float32", "float64", "float16"])
def test_every_kind_of_packing(packed_by_code: Any, kind: str):
    values = weights(kind)
    parameters = Parameter("weight_l0", "W", (G * H, K), G), Parameter("bias_l0", "b", (2 * H,), 2)
    (_, tables), bits = tables_of(parameters, PACKINGS), 8 * np.dtype(kind).itemsize
    data = (ctypes.c_void_p * 2)(values["W"].ctypes.data, values["b"].ctypes.data)
    for number, packing in enumerate(PACKINGS):
        wanted = pack(packing, {k: v.astype(np.float32) if kind == "float16" else v for k, v in values.items()})
        found = np.full(1 << 14, 0xEE, np.uint8)
        size = packed_by_code(tables, data, 2, bits, number, ctypes.c_void_p(found.ctypes.data))
        assert size == wanted.nbytes, packing
        same = found[:size].tobytes() == wanted.tobytes()
        if packing.dtype == "pairs" and not same:  # sums in another order, rounded to float32
            np.testing.assert_allclose(found[:size].view(np.float32).reshape(wanted.shape), wanted, 2e-7)
        else:
            assert same, packing


def test_what_is_no_number(packed_by_code: Any):
    values = weights("float32")
    values["W"][0, 0, 0], values["W"][2, 2, 1], values["W"][0, 4, 4] = np.nan, np.inf, -np.inf
    packings = [Packing(dtype=kind, **MATRIX) for kind in ("float16", "bfloat16", "tf32", "float64")]
    _, tables = tables_of([Parameter("weight_l0", "W", (G * H, K), G)], packings)
    data = (ctypes.c_void_p * 1)(values["W"].ctypes.data)
    for number, packing in enumerate(packings):
        wanted = pack(packing, values)
        found = np.empty(wanted.shape, wanted.dtype)
        packed_by_code(tables, data, 2, 32, number, ctypes.c_void_p(found.ctypes.data))
        if packing.dtype == "bfloat16":
            np.testing.assert_array_equal(found, wanted)
        else:
            np.testing.assert_array_equal(found.astype(np.float64), wanted.astype(np.float64))


def launches_of(said: Manifest, to: Sequence[int]) -> list[tuple[Any, ...]]:
    """Tables of all launches, a source's parameter by its number in the manifest, as Python makes them."""
    found: list[tuple[Any, ...]] = []
    kept: list[np.ndarray] = []

    def place(table: np.ndarray) -> int:
        kept.append(table)
        return len(kept) - 1

    def launch(device: int, queue: int, works: int, jobs: int, sources: int, places: int, count: int, kind: int,
               *parameters: int) -> None:
        assert count == len(kept[works]) and len(parameters) <= PARAMETERS
        found.append((kept[works].tobytes(), kept[jobs].tobytes(), numbered(kept[sources], parameters),
                      kept[places].tobytes()))

    made = dict(zip((b.packing for b in said.buffers if b.packing is not None), to, strict=True))
    DevicePacking(said, made, place, launch, 0)(range(len(said.parameters)), "float32", 0)
    return found


def numbered(sources: np.ndarray, parameters: Sequence[int]) -> list[tuple[int, int]]:
    """Behind sources there may be how many rows each has, in these tests more than there are parameters."""
    return [(parameters[p] if 0 <= p < len(parameters) else p, gate) for p, gate in sources.tolist()]


def check_launches(library: Any, parameters: Sequence[Parameter], given: Sequence[Packing]) -> int:
    """How many launches both make."""
    said, tables = tables_of(parameters, given)
    to = [4096 * n for n in range(len(given))]
    parts: list[bytes] = []
    take = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(
        lambda data, size: parts.append(ctypes.string_at(data, size)))
    library.launches(tables, (ctypes.c_int64 * len(to))(*to), len(to), take)
    found = [(works, jobs, numbered(np.frombuffer(sources, SOURCE), np.frombuffer(numbers, np.int64).tolist()), places)
             for works, jobs, sources, places, numbers in zip(*[iter(parts)] * 5, strict=True)]
    assert found == launches_of(said, to)
    return len(found)


@settings(deadline=None, max_examples=60)
@given(packings(), st.sampled_from(sorted(KINDS)))
def test_tables_of_a_kernel_that_packs(library: Any, case: tuple[Packing, dict[str, np.ndarray]], kind: str):
    parameters = [Parameter(name, name, (v.shape[0] * v.shape[1], *v.shape[2:]), len(v)) for name, v in case[1].items()]
    kinds = dict.fromkeys((kind, "float16"))
    assert check_launches(library, parameters, [msgspec.structs.replace(case[0], dtype=k) for k in kinds]) == 1


def test_tables_of_matrices_with_other_rows(library: Any):
    """A narrow one beside a whole one; of such with other columns the kernel packs none."""
    parameters = [Parameter("whole", "whole", (5, 6), 1), Parameter("narrow", "narrow", (3, 6), 1)]
    order = dict(pad=(3, 8, 8), split=(3, 4, 2, 8), order=(1, 0, 2, 3), dtype="float16")
    for sources in (("", "whole", "narrow"), ("narrow", "", "whole"), ("whole", "whole", "")):
        assert check_launches(library, parameters, [Packing(tuple((name, 0) for name in sources), **order)]) == 1
    parameters[1] = Parameter("narrow", "narrow", (3, 4), 1)
    _, tables = tables_of(parameters, [Packing((("whole", 0), ("narrow", 0), ("", 0)), **order)])
    take = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(lambda *_: pytest.fail("what the kernel cannot do"))
    library.launches(tables, (ctypes.c_int64 * 1)(0), 1, take)


def test_tables_of_several_launches_and_of_none(library: Any):
    parameters = [Parameter(f"w{n}", f"w{n}", (2, 2048), 1) for n in range(PARAMETERS + 5)]
    large = dict(pad=(2, 2, 2048), split=(2, 2, 2048), order=(1, 0, 2), dtype="tf32")
    assert check_launches(library, parameters, [Packing(((p.key, 0), ("", 0)), **large) for p in parameters]) == 2
    assert {name: library.kernel_type(*DLPACK[name]) for name in TYPES} == TYPES
    assert library.kernel_type(*DLPACK["float64"]) == -1
    _, tables = tables_of(parameters, [Packing((("w0", 0), ("", 0)), **large | {"dtype": "int8"})])
    take = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(lambda *_: pytest.fail("what the kernel cannot do"))
    library.launches(tables, (ctypes.c_int64 * 1)(0), 1, take)

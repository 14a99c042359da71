"""Weights packed by a module's own C interface are those that Python packs, to the bit."""

from __future__ import annotations

import ctypes
import subprocess
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy_packing import pack
from runtime_sample import tables_of

from ecornn.build import c_tables
from ecornn.build.link import find_compiler
from ecornn.errors import ModuleError
from ecornn.manifest import Parameter
from ecornn.program import WHOLE, Packing
from ecornn.runtime import weights as runtime_weights

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


@pytest.mark.parametrize("kind", [kind for kind in CASES if kind not in ("float16", "bfloat16", "tf32", "float64")])
def test_not_a_number_stays_in_its_row(packed_by_code: Any, kind: str):
    """Not the last of a row, so that a maximum that forgets it is found."""
    values = {"W": np.random.default_rng(0).standard_normal((G, H, K)).astype(np.float32)}
    values["W"][0, 1, 2] = np.nan
    _, tables = tables_of([Parameter("weight_l0", "W", (G * H, K), G)], [Packing(dtype=kind, **CASES[kind])])
    wanted = pack(Packing(dtype=kind, **CASES[kind]), values)
    found = np.empty(wanted.shape, wanted.dtype)
    packed_by_code(tables, (ctypes.c_void_p * 1)(values["W"].ctypes.data), 2, 32, 0, ctypes.c_void_p(found.ctypes.data))
    np.testing.assert_allclose(found, wanted, 2e-7)


def test_a_module_whose_c_interface_is_older():
    api = runtime_weights._Api(version=1, size=88)
    file = SimpleNamespace(ecornn_module_api=lambda version: ctypes.pointer(api))
    with pytest.raises(ModuleError, match="compile it again"):
        runtime_weights.api_of(file)

"""Polynomial exp, tanh and sigmoid of the CPU schedule against NumPy with more digits, over all magnitudes."""

import numpy as np
import pytest
from tvm import tirx

from ecornn.build.module import build_module
from ecornn.host_cpu import detect
from ecornn.manifest import Manifest
from ecornn.program import Buffer, Parallel, Program
from ecornn.schedules.cpu import math
from ecornn.schedules.cpu.emit import Emitter
from ecornn.schedules.cpu.tiling import lanes_of
from ecornn.workload import Workload

COUNT = 1 << 20
# relative of tanh, absolute of sigmoid, relative of exp: as math.py says
LIMITS = {"float32": (3e-7, 1.5e-7, 2e-7), "float64": (1e-15, 3e-16, 4e-16)}


@pytest.fixture(scope="module", params=LIMITS)
def functions(request, tmp_path_factory):
    import tvm_ffi
    real = request.param
    device, (a, b), bound = detect(), (tirx.Var(n, "float32") for n in "ab"), tirx.const(0.25, "float32")
    of_scalars = {"relu": tirx.Max(a, tirx.const(0.0, "float32")), "above": tirx.Max(bound, a),
                  "below": tirx.Min(a, bound), "larger": tirx.Max(a, b), "smaller": tirx.Min(a, b)}
    e = Emitter(lanes_of(device, real), real)
    for name in ("thread", "threads", "T", "B"):
        e.scalar(name)
    source, second = e.pointer("x"), e.pointer("other")
    names = ("tanh", "sigmoid", "exp", *of_scalars)
    outputs = [e.pointer(name) for name in names]
    with e.loop("i", COUNT // e.lanes) as i:
        at = e.let("at", i * e.index(e.lanes))
        value = {a: e.let("value", e.vload(source, at)), b: e.let("value", e.vload(second, at))}
        for name, output in zip(names, outputs, strict=True):
            found = (math.vector(e, of_scalars[name], value.__getitem__) if name in of_scalars
                     else getattr(math, name)(e, value[a]))
            e.vstore(output, at, found)
    buffers = tuple(Buffer(n, "workspace", real) for n in ("x", "other", *names))
    program = Program.running({"worker": e.function("worker")}, buffers, (Parallel("worker"),))
    manifest = Manifest(Workload("lstm", 1, 1), device, "test", {}, "", (), "", (), buffers, {}, {})
    file = tmp_path_factory.mktemp("math") / "math.so"
    build_module(program, manifest, file)
    module = tvm_ffi.load_module(str(file))

    def call(x, other=0.0):
        arrays = [*(np.resize(v, COUNT).astype(real) for v in (x, other)), *(np.full(COUNT, -7, real) for _ in names)]
        module.run(1, 1, 0, 1, *[a.ctypes.data for a in arrays])
        return dict(zip(("x", "other", *names), (a[:len(x)] for a in arrays), strict=True))

    call.real = real
    return call


def samples(real: str) -> np.ndarray:
    """Both signs of every magnitude from the smallest subnormal to the largest number."""
    largest = np.array([np.finfo(real).max]).view(f"u{np.dtype(real).itemsize}")[0]
    positive = np.linspace(0, 1, COUNT // 4, dtype=np.longdouble) * np.longdouble(largest)
    positive = positive.astype(largest.dtype).view(real)
    dense = np.linspace(-20, 20, COUNT // 4, dtype=real)
    return np.concatenate([positive, -positive, dense])


def test_errors(functions):
    got, limits, kind = functions(samples(functions.real)), LIMITS[functions.real], np.finfo(functions.real)
    x = got["x"].astype(np.longdouble)
    tanh, normal = np.tanh(x), np.abs(x) > kind.tiny
    assert np.max(np.abs(got["tanh"] - tanh)[normal] / np.abs(tanh)[normal]) < limits[0]
    assert np.max(np.abs(got["sigmoid"] - (0.5 + 0.5 * np.tanh(0.5 * x)))) < limits[1]
    with np.errstate(over="ignore", under="ignore"):
        exp = np.exp(np.clip(x, -2000, 2000))
    usual = (exp <= kind.max) & (exp >= kind.tiny)
    assert np.max(np.abs(got["exp"] - exp)[usual] / exp[usual]) < limits[2]
    assert np.all(np.isinf(got["exp"][exp > np.longdouble(1.0001) * kind.max]))
    assert np.max(np.abs(got["exp"] - exp)[exp < kind.tiny]) < 1.5 * kind.smallest_subnormal


def test_special_values(functions):
    got = functions(np.array([np.inf, -np.inf, np.nan, 0.0, -0.0]))
    assert np.array_equal(got["tanh"], [1, -1, np.nan, 0, 0], equal_nan=True)
    assert np.array_equal(got["sigmoid"], [1, 0, np.nan, 0.5, 0.5], equal_nan=True)
    assert np.array_equal(got["exp"], [np.inf, 0, np.nan, 1, 1], equal_nan=True)


def test_extremes_are_those_of_numpy_for_nan_too(functions):
    values = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 0.5, -0.5, 1e-45, -1e-45, 3e38], functions.real)
    x, other = (v.ravel() for v in np.meshgrid(values, values))
    got = functions(x, other)
    for name, wanted in {"relu": np.maximum(x, 0), "above": np.maximum(x, 0.25), "below": np.minimum(x, 0.25),
                         "larger": np.maximum(x, other), "smaller": np.minimum(x, other)}.items():
        assert np.array_equal(got[name], wanted, equal_nan=True), name

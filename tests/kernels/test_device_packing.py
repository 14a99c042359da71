"""Weights packed on a GPU by the module's kernel, emulated, from the tables that its C interface makes: the bits that
NumPy packs."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import device_packing as emulated
import msgspec
import numpy as np
import pytest
from emulated import TINY, task_of, training_program
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_packing import cast, pack
from runtime_sample import FakeGPU, tables_of
from test_narrow import NarrowInput
from test_runtime_packing import library as library
from test_runtime_packing import packings

from ecornn.analysis import analyse
from ecornn.dtypes import DLPACK, ITEMSIZE
from ecornn.errors import DeviceError, ShapeError
from ecornn.manifest import Parameter
from ecornn.program import ON_GPU, PACKED, SERVED, Packing
from ecornn.schedules import Task, all_schedules
from ecornn.workload import Traversal, Workload

TYPES = sorted(SERVED["cuda"])


def widened(values: np.ndarray, dtype: str) -> np.ndarray:
    """What a parameter of this data type is in float32."""
    return (values.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else values.astype(np.float32)


def launches(library: Any, parameters: dict[str, np.ndarray], to: dict[Packing, int]) -> list[list[bytes]]:
    """Of each launch that packs all buffers its works, jobs, sources, places, and the numbers of its parameters."""
    said = [Parameter(n, n, (v.shape[0] * v.shape[1], *v.shape[2:]), len(v)) for n, v in parameters.items()]
    parts: list[bytes] = []
    take = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(
        lambda data, size: parts.append(ctypes.string_at(data, size)))
    library.launches(tables_of(said, to)[1], (ctypes.c_int64 * len(to))(*to.values()), len(to), take)
    return [parts[n:n + 5] for n in range(0, len(parts), 5)]


def check(library: Any, cases: dict[str, Packing], parameters: dict[str, np.ndarray], dtype: str = "float32") -> int:
    """All packings at once, by the kernel and by NumPy; every byte of a buffer is written. Returns the launches."""
    given = {name: np.ascontiguousarray(cast(values, dtype)) for name, values in parameters.items()}
    wanted = {name: widened(values, dtype) for name, values in given.items()}
    made = {p: np.full(int(np.prod(p.split)) * ITEMSIZE.get(p.dtype, 4) + 272, 0xA5, np.uint8) for p in cases.values()}
    starts = {p: -memory.ctypes.data % 256 for p, memory in made.items()}
    kind, weights = library.kernel_type(*DLPACK[dtype]), [*given.values()]
    found = launches(library, given, {p: made[p].ctypes.data + starts[p] for p in made})
    assert found, "the kernel cannot do it"
    for works, *tables, numbers in found:
        kept = [np.frombuffer(table, np.uint64 if len(table) % 8 == 0 else np.uint32) for table in (works, *tables)]
        emulated.pack(0, 0, *(table.ctypes.data for table in kept), len(works) // 16, kind,
                      *(weights[n].ctypes.data for n in np.frombuffer(numbers, np.int64)))
    for name, one in cases.items():
        with np.errstate(over="ignore"):
            exact = pack(one, wanted).tobytes()
        written = made[one][starts[one]:].tobytes()
        assert written[:len(exact)] == exact, name
        assert set(written[len(exact):]) <= {0xA5}, f"{name}: written beyond its end"
    return len(found)


@settings(deadline=None, max_examples=40)
@given(packings(), st.sampled_from(ON_GPU), st.sampled_from(TYPES), st.integers(0, 1 << 30))
def test_any_packing(library: Any, case: tuple[Packing, dict[str, np.ndarray]], kind: str, dtype: str, seed: int):
    rng = np.random.default_rng(seed)
    parameters = {name: rng.normal(0, 300, values.shape).astype(np.float32) for name, values in case[1].items()}
    for values in parameters.values():
        values.flat[0] = rng.choice([1e30, -65519.0, 65520.0, 1e-8, -0.0, np.inf, np.nan])
    check(library, {"": msgspec.structs.replace(case[0], dtype=kind)}, parameters, dtype)


LAYERS = [("lstm", "persistent", "bfloat16"), ("gru", "persistent", "tf32"), ("lstm", "persistent_wide", "float16"),
          ("gru_reset_before", "layout_transform", "float32"), ("lstm(peepholes)", "fused_step", "float32"),
          ("lstm(projection)", "persistent", "bfloat16"), ("indrnn", "elementwise", "float16"),
          ("slstm", "persistent", "float32")]


@pytest.mark.parametrize(("cell", "schedule", "dtype"), LAYERS)
def test_what_training_modules_pack(library: Any, cell: str, schedule: str, dtype: str):
    """Whole tiles and parts of them, also of weights that are transposed, in pieces."""
    for sizes in ((5, 3, 13, 40),):
        task = task_of(cell, sizes, dtype, TINY, Traversal(keep="states"))
        made = all_schedules()[schedule]
        program = training_program(made, task)
        cases = {b.name: b.packing for b in program.buffers if b.role == PACKED and b.packing is not None}
        assert len(cases) > 2
        rng = np.random.default_rng(0)
        parameters = {name: rng.normal(size=shape if len(shape) > 1 else (1, *shape)).astype(np.float32)
                      for name, shape in task.graph.parameters.items()}
        check(library, cases, parameters)


def test_matrices_of_several_numbers_of_rows(library: Any):
    """Narrow ones of x beside whole ones, in one packing."""
    cell = NarrowInput(18, whole=True)
    task = Task(Workload(cell.name, 40, 13, 3, 5, "float16"), analyse(cell, 13, 40), TINY, Traversal(keep="states"))
    program = training_program(all_schedules()["persistent"], task)
    cases = {b.name: b.packing for b in program.buffers if b.role == PACKED and b.packing is not None}
    assert any({"W", "Q"} <= {name for name, _ in packing.sources} for packing in cases.values())
    rng = np.random.default_rng(0)
    shapes = task.graph.parameters
    check(library, cases, {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()})
    two = Packing((("a", 1), ("", 0), ("b", 1)), (4, 16, 8), (4, 16, 8), (0, 2, 1), "float32")
    check(library, {"": two}, {"a": rng.normal(size=(2, 5, 6)).astype(np.float32),
                               "b": rng.normal(size=(2, 16, 6)).astype(np.float32)})
    assert not launches(library, {"a": np.ones((2, 5, 6)), "b": np.ones((2, 5, 7))}, {two: 0})


def test_parameters_of_several_launches(library: Any):
    names = [f"w{n}" for n in range(emulated.PARAMETERS + 5)]
    parameters = {name: np.full((1, 2, 8), n, np.float32) for n, name in enumerate(names)}
    cases = {name: Packing(((name, 0), ("", 0)), (2, 2, 8), (2, 2, 8), (1, 0, 2), "float16") for name in names}
    assert check(library, cases, parameters) == 2


@pytest.mark.parametrize("changes", [{"dtype": "int8"}, {"split": (1, 2, 16), "order": (0, 2, 1)}],
                         ids=["kind", "rows"])
def test_packings_that_the_kernel_cannot_do(library: Any, changes: dict[str, Any]):
    packing = Packing((("w", 0),), (1, 4, 8), (1, 4, 8), (0, 1, 2), "float32")
    weights = {"w": np.ones((1, 4, 8), np.float32)}
    assert check(library, {"": packing}, weights) == 1
    assert not launches(library, weights, {msgspec.structs.replace(packing, **changes): 0})
    assert library.kernel_type(*DLPACK["float64"]) == -1


def test_a_layer_packs_on_the_gpu_when_it_is_bound_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Memory, copies and the kernel of a GPU, in host memory: what a layer holds is what one bound from NumPy holds."""
    import torch

    from ecornn.cells import get
    from ecornn.runtime import torch_arrays
    from ecornn.runtime.caller import Caller
    from ecornn.targets import resolve
    from ecornn.task import make_manifest, make_task
    from ecornn.workload import Workload

    cell, schedule = get("gru"), all_schedules()["persistent"]
    workload = Workload(cell.identity(), 40, 24, 3, 5, "bfloat16")
    task = make_task(cell, workload, resolve("sm_90a"), Traversal(keep="states"))
    config = schedule.default(task)
    manifest = make_manifest(cell, task, schedule, config, training_program(schedule, task), "")
    gpu = FakeGPU(manifest, tmp_path, emulated.pack)

    packings = {b.name: b.packing for b in manifest.buffers if b.packing is not None}

    def bits(one: Caller) -> dict[str, bytes]:
        """The bytes that are packed: what lies behind them, up to the next 256, nobody writes."""
        sizes = {name: int(np.prod(packed.split)) * ITEMSIZE[packed.dtype] for name, packed in packings.items()}
        return {name: gpu.content(at)[:sizes[name]] for name, at in one.packed.items()}

    rng = np.random.default_rng(0)
    host, others = ({p.name: rng.normal(size=p.shape).astype(np.float32) for p in manifest.parameters} for _ in "ab")
    kept = [Caller(manifest, gpu.library, given, 0, None) for given in (host, others)]
    wanted, after = map(bits, kept)
    monkeypatch.setattr(torch_arrays.TorchArrays, "facts",
                        lambda self, array: (tuple(array.shape), self._names[array.dtype], "cuda:0"))
    monkeypatch.setattr(torch_arrays.TorchArrays, "queue", lambda self, device: 7)
    tensors = {name: torch.nn.Parameter(torch.from_numpy(values)) for name, values in host.items()}
    layer = Caller(manifest, gpu.library, tensors, 0, None)
    assert bits(layer) == wanted and 7 in gpu.waits
    gpu.waits.clear()
    layer.repack({name: torch.from_numpy(values) for name, values in others.items()})
    assert bits(layer) == after and not gpu.waits
    layer.repack({name: t.t().contiguous().t() if t.dim() == 2 else t for name, t in tensors.items()})
    assert bits(layer) == wanted
    layer.repack_at([others[p.name].ctypes.data for p in manifest.parameters], "float32", 7)
    assert bits(layer) == after
    rest = {*(manifest.packed_for_optional or ())}
    assert rest and all("finish" in name for name in rest)
    layer.repack_at([0] * len(manifest.parameters), "float32", 7, optional=False)
    assert {name for name, one in bits(layer).items() if any(one)} == rest
    layer.repack_at([0] * len(manifest.parameters), "float32", 7, optional=True)
    assert not any(map(any, bits(layer).values()))
    with pytest.raises(DeviceError, match="cuda:0"):
        layer.repack(host)
    with pytest.raises(ShapeError, match="bias_hh_l0"):
        layer.repack({**tensors, "bias_hh_l0": tensors["bias_hh_l0"][1:]})
    held = len(gpu.held)
    del kept
    gc.collect()
    assert len(gpu.held) < held

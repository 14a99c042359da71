"""Weights packed on a GPU by the module's kernel, emulated: the bits that the host packs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import device_packing as emulated
import msgspec
import numpy as np
import pytest
from emulated import TINY, task_of, training_program
from hypothesis import given, settings
from hypothesis import strategies as st
from test_narrow import NarrowInput
from test_runtime_packing import packings

from ecornn.analysis import analyse
from ecornn.dtypes import ITEMSIZE
from ecornn.errors import DeviceError, ModuleError, ShapeError
from ecornn.program import PACKED, Packing
from ecornn.runtime.device_packing import KINDS, PARAMETERS, TYPES, DevicePacking
from ecornn.runtime.packing import cast, pack
from ecornn.schedules import Task, all_schedules
from ecornn.workload import Traversal, Workload


def widened(values: np.ndarray, dtype: str) -> np.ndarray:
    """What a parameter of this data type is in float32."""
    return (values.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else values.astype(np.float32)


def check(cases: dict[str, Packing], parameters: dict[str, np.ndarray], dtype: str = "float32") -> None:
    """All packings at once, by the kernel and by NumPy; every byte of a buffer is written."""
    given = {name: np.ascontiguousarray(cast(values, dtype)) for name, values in parameters.items()}
    wanted = {name: widened(values, dtype) for name, values in given.items()}
    names = [*given]
    manifest = SimpleNamespace(parameters=[SimpleNamespace(
        key=n, shape=(given[n].shape[0] * given[n].shape[1], *given[n].shape[2:]), gates=len(given[n])) for n in names])
    made = {p: np.full(int(np.prod(p.split)) * ITEMSIZE.get(p.dtype, 4) + 272, 0xA5, np.uint8) for p in cases.values()}
    starts = {p: -memory.ctypes.data % 256 for p, memory in made.items()}
    place = emulated.Placed()
    packing: Any = DevicePacking(manifest, {p: made[p].ctypes.data + starts[p] for p in made},  # type: ignore[arg-type]
                                 place, emulated.pack, 0)
    packing([given[n].ctypes.data for n in names], dtype, 0)
    for name, one in cases.items():
        with np.errstate(over="ignore"):
            exact = pack(one, wanted).tobytes()
        found = made[one][starts[one]:].tobytes()
        assert found[:len(exact)] == exact, name
        assert set(found[len(exact):]) <= {0xA5}, f"{name}: written beyond its end"


@settings(deadline=None, max_examples=40)
@given(packings(), st.sampled_from(sorted(KINDS)), st.sampled_from(sorted(TYPES)), st.integers(0, 1 << 30))
def test_any_packing(case: tuple[Packing, dict[str, np.ndarray]], kind: str, dtype: str, seed: int):
    rng = np.random.default_rng(seed)
    parameters = {name: rng.normal(0, 300, values.shape).astype(np.float32) for name, values in case[1].items()}
    for values in parameters.values():
        values.flat[0] = rng.choice([1e30, -65519.0, 65520.0, 1e-8, -0.0, np.inf, np.nan])
    check({"": msgspec.structs.replace(case[0], dtype=kind)}, parameters, dtype)


LAYERS = [("lstm", "persistent", "bfloat16"), ("gru", "persistent", "tf32"), ("lstm", "persistent_wide", "float16"),
          ("gru_reset_before", "layout_transform", "float32"), ("lstm(peepholes)", "fused_step", "float32"),
          ("lstm(projection)", "persistent", "bfloat16"), ("indrnn", "elementwise", "float16"),
          ("slstm", "persistent", "float32")]


@pytest.mark.parametrize(("cell", "schedule", "dtype"), LAYERS)
def test_what_training_modules_pack(cell: str, schedule: str, dtype: str):
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
        check(cases, parameters)


def test_matrices_of_several_numbers_of_rows():
    """Narrow ones of x beside whole ones, in one packing."""
    cell = NarrowInput(18, whole=True)
    task = Task(Workload(cell.name, 40, 13, 3, 5, "float16"), analyse(cell, 13, 40), TINY, Traversal(keep="states"))
    program = training_program(all_schedules()["persistent"], task)
    cases = {b.name: b.packing for b in program.buffers if b.role == PACKED and b.packing is not None}
    assert any({"W", "Q"} <= {name for name, _ in packing.sources} for packing in cases.values())
    rng = np.random.default_rng(0)
    check(cases, {name: rng.normal(size=shape).astype(np.float32) for name, shape in task.graph.parameters.items()})
    two = Packing((("a", 1), ("", 0), ("b", 1)), (4, 16, 8), (4, 16, 8), (0, 2, 1), "float32")
    check({"": two}, {"a": rng.normal(size=(2, 5, 6)).astype(np.float32), "b": rng.normal(size=(2, 16, 6)).astype(
        np.float32)})
    with pytest.raises(ModuleError, match="parts of shapes"):
        check({"": two}, {"a": np.ones((2, 5, 6), np.float32), "b": np.ones((2, 5, 7), np.float32)})


def test_parameters_of_several_launches():
    names = [f"w{n}" for n in range(PARAMETERS + 5)]
    parameters = {name: np.full((1, 2, 8), n, np.float32) for n, name in enumerate(names)}
    cases = {name: Packing(((name, 0), ("", 0)), (2, 2, 8), (2, 2, 8), (1, 0, 2), "float16") for name in names}
    check(cases, parameters)


@pytest.mark.parametrize(("changes", "message"), [
    ({"sources": (("other", 0),)}, "does not declare: other"), ({"pad": (1, 2, 16)}, "into"),
    ({"dtype": "int8"}, "as int8"), ({"split": (1, 2, 2, 8), "order": (0, 1, 3, 2)}, "several rows"),
    ({"order": (0, 0)}, "inconsistent")])
def test_packings_that_the_kernel_cannot_do(changes: dict[str, Any], message: str):
    packing = Packing((("w", 0),), (1, 4, 8), (1, 4, 8), (0, 1, 2), "float32")
    if "several" in message:
        changes = {"split": (1, 2, 16), "order": (0, 2, 1)}
    with pytest.raises(ModuleError, match=message):
        check({"": msgspec.structs.replace(packing, **changes)}, {"w": np.ones((1, 4, 8), np.float32)})


def test_a_layer_packs_on_the_gpu_when_it_is_bound_and_again(monkeypatch: pytest.MonkeyPatch):
    """Memory, copies and the kernel of a GPU, in host memory: what a layer holds is what one bound from NumPy holds."""
    import ctypes

    import torch

    from ecornn.cells import get
    from ecornn.runtime import torch_arrays
    from ecornn.runtime.caller import Caller
    from ecornn.runtime.library import Library
    from ecornn.runtime.weights import read_weights
    from ecornn.targets import resolve
    from ecornn.task import make_manifest, make_task
    from ecornn.workload import Workload

    cell, schedule = get("gru"), all_schedules()["persistent"]
    workload = Workload(cell.identity(), 40, 24, 3, 5, "bfloat16")
    task = make_task(cell, workload, resolve("sm_90a"), Traversal(keep="states"))
    config = schedule.default(task)
    manifest = make_manifest(cell, task, schedule, config, training_program(schedule, task), "")
    held: dict[int, Any] = {}
    waits: list[int] = []

    def alloc(device: int, nbytes: int) -> int:
        memory = ctypes.create_string_buffer(nbytes + 256)
        start = ctypes.addressof(memory) + -ctypes.addressof(memory) % 256
        held[start] = (memory, nbytes)
        return start

    def library(pack: Any) -> Library:
        return Library(lambda: "", lambda *_: None, *[lambda *_: None] * 2, alloc=alloc, free=lambda *_: None,
                       copy=lambda device, to, source, nbytes, queue: ctypes.memmove(to, source, nbytes) and None,
                       synchronize=lambda device, queue: waits.append(queue), pack=pack)

    def caller(given: dict[str, Any], pack: Any = emulated.pack) -> Caller:
        return Caller(manifest, library(pack), read_weights(manifest, given, library(pack), 0), 0, None)

    def bits(one: Caller) -> dict[str, bytes]:
        return {name: ctypes.string_at(at, held[at][1]) for name, at in one.packed.items()}

    rng = np.random.default_rng(0)
    host, others = ({p.name: rng.normal(size=p.shape).astype(np.float32) for p in manifest.parameters} for _ in "ab")
    wanted, after = bits(caller(host)), bits(caller(others))
    monkeypatch.setattr(torch_arrays.TorchArrays, "facts",
                        lambda self, array: (tuple(array.shape), self._names[array.dtype], "cuda:0"))
    monkeypatch.setattr(torch_arrays.TorchArrays, "queue", lambda self, device: 7)
    tensors = {name: torch.nn.Parameter(torch.from_numpy(values)) for name, values in host.items()}
    layer = caller(tensors)
    assert bits(layer) == wanted and 7 in waits
    waits.clear()
    layer.repack({name: torch.from_numpy(values) for name, values in others.items()})
    assert bits(layer) == after and not waits
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
    with pytest.raises(ModuleError, match="training=True"):
        caller(host, None).repack(tensors)

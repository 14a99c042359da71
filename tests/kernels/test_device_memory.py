"""A layer's memory on a GPU: workspaces in the place of others; weights packed there, emulated, as NumPy packs."""

import ctypes
import gc
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import device_packing as emulated
import msgspec
import numpy as np
import pytest
import torch
from emulated import TINY, task_of, training_program
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_packing import cast, pack
from refusals import refused
from runtime_sample import FakeGPU, tables_of
from smaller_matrices import NarrowInput
from test_runtime_packing import library as library
from test_runtime_packing import packings

from ecornn import program as programs
from ecornn.analysis import analyse
from ecornn.cells import get
from ecornn.compiler import _complete, plan
from ecornn.dtypes import DLPACK, ITEMSIZE
from ecornn.errors import DeviceError, ShapeError
from ecornn.manifest import Manifest, Parameter
from ecornn.program import BACKWARD, FORWARD, KEPT, WORKSPACE, Buffer, Chunks, Extent, Packing, Program
from ecornn.runtime import torch_arrays
from ecornn.runtime.caller import Caller
from ecornn.runtime.frameworks import arrays_of
from ecornn.runtime.layer import Kept, Training
from ecornn.runtime.memory import GivenMemory, HostMemory
from ecornn.schedules import Task, all_schedules
from ecornn.schedules.base import Component
from ecornn.schedules.chunks import Uses, free_for, overlaid
from ecornn.targets import resolve
from ecornn.task import make_manifest, make_task
from ecornn.workload import Traversal, Workload


def function(*parameters: str) -> Any:
    return SimpleNamespace(params=[SimpleNamespace(name=p) for p in parameters])


def launch(name: str, **names: str) -> programs.Launch:
    return programs.Launch(name, 1, 32, names=names)


def space(name: str, fixed: int = 0, per_step: int = 0, dtype: str = "float32") -> Buffer:
    return Buffer(name, WORKSPACE, dtype, Extent(fixed, per_step))


def test_one_lies_where_another_was():
    functions = {"first": function("T", "a", "b"), "second": function("T", "a", "c"), "third": function("b", "c", "d")}
    calls = (launch("first"), launch("second"), launch("third"))
    buffers = (space("a", per_step=4), space("b", per_step=4), space("c", per_step=4),
               space("d", per_step=16, dtype="float16"))
    made = overlaid(Component(functions, buffers, calls), 10, ())
    assert made.buffers == (space("a", per_step=8), space("b", per_step=4), space("c", per_step=4))
    assert [call.names.get("d") for call in made.calls] == [None, None, "a"]
    assert overlaid(Component(functions, buffers, calls), 10, ("d",)).buffers == buffers
    gone = overlaid(Component(functions, (*buffers[:3], space("d", fixed=1 << 20)), calls), 10, ())
    assert len(gone.buffers) == 4  # both in one would be as much, so that any T has room


def test_what_goes_on_between_chunks_stays_where_it_is():
    functions = {name: function("a", "b") for name in ("make", "take")} | {"end": function("sums")}
    one, other = launch("make", a="x", b="before"), launch("take", a="outputs", b="sums")
    buffers = tuple(space(n, 8) for n in ("before", "outputs", "sums", "state", "next"))
    beside = programs.Concurrent(((other,), (launch("take", a="outputs", b="next"),)))
    chunk = Chunks((one, beside), {}, (("state", "next"),), 8)
    made = overlaid(Component(functions, buffers, (programs.Fill("sums", 0, Extent(8)), chunk, launch("end"))), 8, ())
    assert [b.name for b in made.buffers] == ["before", "sums", "state", "next"]
    (inner,) = (call for call in made.calls if isinstance(call, Chunks))
    branches = inner.calls[1].branches  # type: ignore[union-attr]
    assert [each.names["a"] for (each,) in branches] == ["before"] * 2


def test_what_a_result_may_be_written_over():
    uses = Uses({"read": function("kept", "other"), "make": function("dx", "other")})
    calls = (Chunks((launch("read"), launch("make")), {}, (), 8), launch("read", kept="late", other="late"))
    assert free_for("dx", uses, calls, ["kept", "other", "late"]) == ["kept"]


def test_a_walk_knows_every_kind_of_call():
    leaf, rows = launch("kernel", into="a"), {"x": 3}
    kinds = [leaf, programs.Parallel("kernel", {"into": "a"}), programs.Fill("a", 0, Extent(8)), programs.Loop((leaf,)),
             programs.Relay((leaf,), "a", "b", "c", "d", 4), programs.Concurrent(((leaf,), (leaf,))),
             programs.Wave((programs.WaveLayer((leaf,), rows, (("a", "b"),)),) * 2, 2, 8),
             Chunks((leaf,), rows, (("a", "b"),), 8, in_place=(("a", "x"),))]
    assert {*map(type, kinds)} == {kind for one in get_args(programs.Call) for kind in (get_args(one) or [one])}
    assert [len([*programs.launches([call])]) for call in kinds] == [1, 0, 0, 1, 1, 2, 2, 1]
    for call in kinds:
        assert programs.mapped(call, lambda one: one) == call
        other = programs.mapped(call, lambda one: replace(one, function="other"), str.upper)
        assert all(one.function == "other" for one in programs.every([other]) if isinstance(one, programs.Leaf))
        assert not {*re.findall(r"'[abcdx]'", repr(other))} - ({"'a'"} if "into" in repr(call) else set())
    for walk in (lambda call: [*programs.every([call])], lambda call: programs.mapped(call, lambda one: one)):
        with pytest.raises(TypeError, match="is no call of a program"):
            walk(SimpleNamespace(calls=()))


MIB = 1 << 20


def made(cell: str, seq: int, keep: str = "gates", hidden: int = 768, layers: int = 1) -> tuple[Program, Manifest]:
    return _complete(plan(cell, hidden=hidden, input=hidden, batch=16, seq=seq, dtype="bfloat16", training=True,
                          keep=keep, target="sm_90a", layers=layers))


def training(manifest: Manifest, calls: list[Any]) -> Training:
    library = SimpleNamespace(forward=None, backward=lambda *arguments: calls.append(arguments))
    packed = {b.name: 0 for b in manifest.buffers if b.role == "packed"}
    return Training(SimpleNamespace(manifest=manifest, packed=packed, threads=1, device=0, library=library))


@pytest.mark.parametrize(("cell", "seq", "most"), [("lstm", 1024, 174.08), ("gru", 1024, 182), ("lstm", 4096, 621)])
def test_a_step_that_keeps_gates(cell, seq, most):
    """y, what is kept, float32 gradients and the larger workspace, MiB; the gradient of x lies in what is kept."""
    program, manifest = made(cell, seq)
    own, buffers = training(manifest, []), {b.name: b for b in program.buffers}
    kept, room = own.kept_bytes(seq, 16), own.workspace_bytes(seq)
    y, gradients = seq * 16 * 768 * 2, {"lstm": 4, "gru": 3}[cell] * 768 * (2 * 768 + 2) * 4
    assert program.dx_in is not None and buffers[program.dx_in].nbytes(seq) == y
    assert (y + kept + gradients + room) / MIB < most and room < (0.1 if cell == "lstm" else 0.11) * kept
    apart = sum(b.nbytes(seq) for n in program.entries[BACKWARD].takes if (b := buffers[n]).role == WORKSPACE)
    assert room < apart < 1.6 * room  # a caller's memory stays as it is


def test_whose_memory_is_written():
    _, manifest = made("lstm", 512, hidden=256)
    calls: list[Any] = []
    own, arrays = training(manifest, calls), arrays_of(np.empty(1), "x")
    size, takes = own.kept_bytes(512, 16), manifest.entries[BACKWARD]
    found, callers = [], HostMemory(size)
    for memory in (HostMemory(size), GivenMemory(callers, callers.pointer, size)):
        kept = Kept(own._caller, arrays, (np.empty(0), 0), (None, 0), [(None, 0)] * 2, {}, memory, 512, 16, 16)
        own.backward(kept, (None, 0), [(None, 0)] * 2, (None, 0), [(None, 0)] * 2,
                     [(None, 0)] * len(manifest.parameters))
        at = dict(zip(takes, calls.pop()[4:], strict=True))
        found.append(at["backward_outputs"] == at["values_kept"])
        inside = [n for n in takes if memory.pointer <= at[n] < memory.pointer + size]
        assert {*inside} == {b.name for b in manifest.buffers if b.role == KEPT} | {*["backward_outputs"] * found[-1]}
    assert found == [True, False]


def test_chunks_of_several_layers():
    """Every launch names what its entry takes: nothing that lies in another one's place any more."""
    program, _ = made("lstm", 1024, layers=2)
    assert not program.in_place and {FORWARD, BACKWARD} <= {*program.entries}


TYPES = sorted(programs.SERVED["cuda"])


def widened(values: np.ndarray, dtype: str) -> np.ndarray:
    return (values.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else values.astype(np.float32)


def tables_of_launches(library: Any, parameters: dict[str, np.ndarray], to: dict[Packing, int]) -> list[list[bytes]]:
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
    found = tables_of_launches(library, given, {p: made[p].ctypes.data + starts[p] for p in made})
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
@given(packings(), st.sampled_from(programs.ON_GPU), st.sampled_from(TYPES), st.integers(0, 1 << 30))
def test_any_packing(library: Any, case: tuple[Packing, dict[str, np.ndarray]], kind: str, dtype: str, seed: int):
    rng = np.random.default_rng(seed)
    parameters = {name: rng.normal(0, 300, values.shape).astype(np.float32) for name, values in case[1].items()}
    for values in parameters.values():
        values.flat[0] = rng.choice([1e30, -65519.0, 65520.0, 1e-8, -0.0, np.inf, np.nan])
    check(library, {"": msgspec.structs.replace(case[0], dtype=kind)}, parameters, dtype)


def check_layer(library: Any, task: Task, schedule: str) -> dict[str, Packing]:
    program, rng = training_program(all_schedules()[schedule], task), np.random.default_rng(0)
    cases = {b.name: b.packing for b in program.buffers if b.role == programs.PACKED and b.packing is not None}
    check(library, cases, {name: rng.normal(size=shape if len(shape) > 1 else (1, *shape)).astype(np.float32)
                           for name, shape in task.graph.parameters.items()})
    return cases


@pytest.mark.parametrize(("cell", "schedule", "dtype"), [
    ("lstm", "persistent", "bfloat16"), ("gru", "persistent", "tf32"), ("lstm", "persistent_wide", "float16"),
    ("gru_reset_before", "layout_transform", "float32"), ("lstm(peepholes)", "fused_step", "float32"),
    ("lstm(projection)", "persistent", "bfloat16"), ("indrnn", "elementwise", "float16"),
    ("slstm", "persistent", "float32")])
def test_what_training_modules_pack(library: Any, cell: str, schedule: str, dtype: str):
    assert len(check_layer(library, task_of(cell, (5, 3, 13, 40), dtype, TINY, Traversal(keep="states")), schedule)) > 2


def test_matrices_of_several_numbers_of_rows(library: Any):
    cell, rng = NarrowInput(18, whole=True), np.random.default_rng(0)
    task = Task(Workload(cell.name, 40, 13, 3, 5, "float16"), analyse(cell, 13, 40), TINY, Traversal(keep="states"))
    cases = check_layer(library, task, "persistent")
    assert any({"W", "Q"} <= {name for name, _ in packing.sources} for packing in cases.values())
    two = Packing((("a", 1), ("", 0), ("b", 1)), (4, 16, 8), (4, 16, 8), (0, 2, 1), "float32")
    check(library, {"": two}, {"a": rng.normal(size=(2, 5, 6)).astype(np.float32),
                               "b": rng.normal(size=(2, 16, 6)).astype(np.float32)})
    assert not tables_of_launches(library, {"a": np.ones((2, 5, 6)), "b": np.ones((2, 5, 7))}, {two: 0})


def test_parameters_of_several_launches(library: Any):
    names = [f"w{n}" for n in range(emulated.PARAMETERS + 5)]
    parameters = {name: np.full((1, 2, 8), n, np.float32) for n, name in enumerate(names)}
    cases = {name: Packing(((name, 0), ("", 0)), (2, 2, 8), (2, 2, 8), (1, 0, 2), "float16") for name in names}
    assert check(library, cases, parameters) == 2


@pytest.mark.parametrize("changes", [{"dtype": "int8"}, {"split": (1, 2, 16), "order": (0, 2, 1)}])
def test_packings_that_the_kernel_cannot_do(library: Any, changes: dict[str, Any]):
    packing = Packing((("w", 0),), (1, 4, 8), (1, 4, 8), (0, 1, 2), "float32")
    weights = {"w": np.ones((1, 4, 8), np.float32)}
    assert check(library, {"": packing}, weights) == 1
    assert not tables_of_launches(library, weights, {msgspec.structs.replace(packing, **changes): 0})
    assert library.kernel_type(*DLPACK["float64"]) == -1


def test_a_layer_packs_on_the_gpu_when_it_is_bound_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Memory, copies and the kernel of a GPU, in host memory: what a layer holds is what one bound from NumPy holds."""
    cell, schedule = get("gru"), all_schedules()["persistent"]
    workload = Workload(cell.identity(), 40, 24, 3, 5, "bfloat16")
    task = make_task(cell, workload, resolve("sm_90a"), Traversal(keep="states"))
    manifest = make_manifest(cell, task, schedule, schedule.default(task), training_program(schedule, task), "")
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
    refused(DeviceError, "cuda:0", layer.repack, host)
    refused(ShapeError, "bias_hh_l0", layer.repack, {**tensors, "bias_hh_l0": tensors["bias_hh_l0"][1:]})
    held = len(gpu.held)
    del kept
    gc.collect()
    assert len(gpu.held) < held

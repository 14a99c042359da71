"""The module of runtime_sample.cc for a manifest, and its values in NumPy; a GPU's module without a GPU."""

import atexit
import ctypes
import functools
import platform
import subprocess
import tempfile
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ecornn import checksum
from ecornn.build import c_tables
from ecornn.build.generated import Generated
from ecornn.build.link import find_compiler, objects_of, write_inputs
from ecornn.build.module import MANIFEST
from ecornn.device import Device
from ecornn.errors import ModuleError
from ecornn.manifest import Manifest, Parameter, decode
from ecornn.program import Buffer, Extent, Packing
from ecornn.runtime.library import Library
from ecornn.targets import KNOWN
from ecornn.workload import Stack, Workload

H, I, BATCH = 5, 3, 4
FIXED, PER_STEP = 7, 5  # words of the workspace
STATS = ("live", "copies", "synchronized", "queue", "running", "most_running", "workspace", "runs")
MEMORY = "alloc", "free", "copy", "synchronize"  # functions of a GPU's module
HOST = Device("llvm", platform.machine(), "the CPU of this test", 1)
GPU = KNOWN["sm_90a"]


def taken(buffers: tuple[Buffer, ...]) -> dict[str, tuple[str, ...]]:
    return {"run": tuple(b.name for b in buffers)}


def manifest(device: Device = HOST, dtype: str = "float32", **changes: Any) -> Manifest:
    matrix = Packing((("W", 1), ("", 0)), (2, 8, I), (2, 2, 4, I), (0, 3, 1, 2), "float32")
    bias = Packing((("b", 0),), (1, 8), (8,), (0,), "float32")
    buffers = (
        Buffer("scratch", "workspace", "uint32", Extent(FIXED, PER_STEP)), Buffer.of("x", dtype),
        Buffer.of("state_in", dtype, "h"), Buffer.of("state_in", dtype, "c"),
        Buffer("matrix", "packed", "float32", Extent(2 * 8 * I), matrix), Buffer.of("y", dtype),
        Buffer.of("state_out", dtype, "h"), Buffer.of("state_out", dtype, "c"),
        Buffer("bias", "packed", "float32", Extent(8), bias), Buffer("words", "workspace", "uint32", Extent(0, 1)))
    buffers = changes.setdefault("buffers", buffers)
    made = Manifest(
        Workload("sample", H, I, BATCH, 6, dtype), device, "by_hand", {"knob": 1}, "written for a test",
        ("h", "c"), "h", (Parameter("weight_l0", "W", (2 * H, I), 2), Parameter("bias_l0", "b", (H,), 1)), buffers,
        taken(buffers), {"ecornn": "0"})
    return msgspec.structs.replace(made, **changes)


def with_sequences(device: Device = HOST) -> Manifest:
    buffers = *manifest(device).buffers, Buffer.of("sequences", "float32")
    return manifest(device, stack=Stack(sequences=True), buffers=buffers)


@functools.cache
def folder() -> tempfile.TemporaryDirectory[str]:
    made = tempfile.TemporaryDirectory(prefix="ecornn-sample-")
    atexit.register(made.cleanup)
    return made


def build(said: Manifest) -> Path:
    return build_text(msgspec.json.encode(said).decode(), said.device.kind == "cuda",
                      said.workload.dtype == "bfloat16", said.stack.sequences)


@functools.cache
def build_text(text: str, cuda: bool = False, bfloat16: bool = False, sequences: bool = False) -> Path:
    from tvm_ffi import libinfo

    place = Path(tempfile.mkdtemp(dir=folder().name))
    constants = {"kHidden": H, "kInput": I, "kScratch0": FIXED, "kScratch1": PER_STEP}
    lines = [f"constexpr int64_t {name} = {value};" for name, value in constants.items()]
    (place / "manifest.h").write_text("\n".join([f'static const char kManifest[] = R"json({text})json";', *lines]))
    library, out = Path(libinfo.find_libtvm_ffi()), place / "sample.so"
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-O1", "-std=c++17", f"-I{place}", f"-I{libinfo.find_include_path()}",
         f"-I{libinfo.find_dlpack_include_path()}", *["-DSAMPLE_CUDA"] * cuda, *["-DSAMPLE_BFLOAT16"] * bfloat16,
         *["-DSAMPLE_SEQUENCES"] * sequences, str(Path(__file__).with_suffix(".cc")),
         *c_interface(text, place, {"run", *(MEMORY if cuda else ())}), f"-L{library.parent}", "-ltvm_ffi",
         "-o", str(out)], check=True, cwd=place)
    checksum.append(out)
    return out


def c_interface(text: str, place: Path, there: Container[str]) -> list[str]:
    try:
        said = decode(text)
        tables = c_tables.tables(said, said.entries)
    except (ModuleError, KeyError, ValueError):  # a text that is refused before it matters
        tables = b""
    objects = objects_of(find_compiler(), Generated({}, shared=c_tables.sources()))
    return write_inputs(objects, {MANIFEST: text.encode(), c_tables.SYMBOL: tables}, place,
                        [f"__tvm_ffi_{name}" if name in there else "" for name in c_tables.FUNCTIONS])


def stat(path: Path, name: str) -> int:
    import tvm_ffi

    return int(tvm_ffi.load_module(str(path))["stat"](STATS.index(name)))


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"weight_l0": rng.uniform(-1, 1, (2 * H, I)).astype(np.float32),
            "bias_l0": rng.uniform(-1, 1, H).astype(np.float32)}


def inputs(steps: int = 6, batch: int = BATCH, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((steps, batch, I)).astype(np.float32)


def expected(x: Any, values: dict[str, np.ndarray],
             state: Any = None) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    batch = x.shape[1]
    h, c = (np.zeros((2, batch, H)) if state is None else (np.asarray(s, np.float64) for s in state))
    y = []
    for row in np.asarray(x, np.float64):
        h = h / 2 + row @ np.asarray(values["weight_l0"], np.float64)[H:].T + values["bias_l0"]
        c = c + h
        y.append(h)
    return np.stack(y), (h, c)


def tables_of(parameters: Sequence[Parameter], packings: Iterable[Packing]) -> tuple[Manifest, bytes]:
    base = manifest()
    packed = [Buffer(f"p{n}", "packed", "float32", Extent(1), p) for n, p in enumerate(packings)]
    buffers = (*base.buffers[1:4], *packed)
    said = msgspec.structs.replace(base, parameters=tuple(parameters), buffers=buffers, entries=taken(buffers))
    return said, c_tables.tables(said, said.entries)


class FakeGPU:
    """A GPU's module of this manifest with the C interface alone, and host memory in place of the GPU's.

    ``pack`` packs weights on the device, if it is not None; ``library`` is as the runtime loads it, ``held`` has memory
    that is not freed by address, ``waits`` streams that were waited for."""

    def __init__(self, manifest: Manifest, folder: Path, pack: Callable[..., None] | None) -> None:
        self.held: dict[int, tuple[Any, int]] = {}
        self.waits: list[int] = []
        self.queues: list[int] = []
        functions = (pack, self._alloc, self._free, self._copy, lambda device, queue: self.waits.append(queue))
        self._answer = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int32, ctypes.POINTER(ctypes.c_int64), ctypes.c_int32)(
            lambda number, args, count: int(functions[number](*args[:count]) or 0))
        self.library = Library(lambda: "", lambda *_: None, alloc=self._alloc, free=self._free, copy=self._copy,
                               synchronize=functions[-1], file=self._build(manifest, folder, pack is not None))
        self.library.file.answer_by(self._answer)

    @staticmethod
    def _build(manifest: Manifest, folder: Path, packs: bool) -> ctypes.CDLL:
        from tvm_ffi import libinfo

        inputs = c_interface(msgspec.json.encode(manifest).decode(), folder,
                                    {"alloc", "free", "copy", "synchronize", *(["pack"] if packs else [])})
        out, library = folder / "interface.so", Path(libinfo.find_libtvm_ffi())
        subprocess.run([*find_compiler(), "-shared", "-fPIC", "-std=c++17", f"-I{libinfo.find_include_path()}",
                        f"-I{libinfo.find_dlpack_include_path()}",
                        str(Path(__file__).with_name("c_interface_sample.cc")), *inputs, f"-L{library.parent}",
                        "-ltvm_ffi", "-o", str(out)], check=True, cwd=folder)
        return ctypes.CDLL(str(out))

    def content(self, at: int) -> bytes:
        return ctypes.string_at(at, self.held[at][1])

    def _alloc(self, device: int, nbytes: int) -> int:
        memory = ctypes.create_string_buffer(b"\xff" * (nbytes + 256))
        start = ctypes.addressof(memory) + -ctypes.addressof(memory) % 256
        self.held[start] = (memory, nbytes)
        return start

    def _free(self, device: int, pointer: int) -> None:
        del self.held[pointer]

    def _copy(self, device: int, to: int, source: int, nbytes: int, queue: int) -> None:
        self.queues.append(queue)
        ctypes.memmove(to, source, nbytes)

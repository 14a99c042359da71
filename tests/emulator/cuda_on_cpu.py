"""Runs CUDA programs on the CPU: ``cuda_as_cpp.py`` makes C++, ``cuda_on_cpu.h`` and ``.cc`` carry it out."""

import atexit
import ctypes
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from cuda_as_cpp import translate

from ecornn import program as programs
from ecornn.build.cuda import lower
from ecornn.build.link import find_compiler
from ecornn.build.one_kernel import as_launched

Memory = dict[str, np.ndarray]
HEADER = Path(__file__).with_name("cuda_on_cpu.h")
DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16),
          "uint32": np.dtype(np.uint32), "int32": np.dtype(np.int32), "uint8": np.dtype(np.uint8)}

# Threads are fibers, between which longjmp goes, which hardened compilers refuse unless told.
COMPILE = ("-std=c++17", "-w", "-fPIC", "-U_FORTIFY_SOURCE")
KERNELS = (*COMPILE, "-O0")  # most of a test's time is the compiler's


@lru_cache(maxsize=1)
def emulation() -> Path:
    """A folder with the precompiled header, and ``emulation.so``, which carries out what it declares."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    header = Path(folder.name, HEADER.name)
    header.write_bytes(HEADER.read_bytes())
    for what in ([*KERNELS, "-x", "c++-header", str(header), "-o", f"{header}.gch"],
                 [*COMPILE, "-O1", "-shared", str(HEADER.with_suffix(".cc")), str(HEADER.with_name("memory_order.cc")),
                  "-o", f"{folder.name}/emulation.so"]):
        subprocess.run([*find_compiler(), *what], check=True)
    return Path(folder.name)


def compiled(source: str, kernels: Iterable[str], folder: Path, ordered: bool = False) -> ctypes.CDLL:
    """C++ with these kernels as a library, ``kernels.so`` in the folder: ``emu_<kernel>`` of each takes the number of
    blocks and threads, pointers to the arguments, ``lazy``, whether all blocks run side by side, and how many do.
    ``ordered``: memory has no more order than CUDA promises (``memory_order.cc``), which takes some times as long."""
    text = f'#include "{emulation() / HEADER.name}"\n{source}'
    for symbol in kernels:
        declared = re.search(rf"{symbol}\(([^)]*)\)", text)
        assert declared is not None
        types = [a.rsplit(" ", 1)[0].replace("__restrict__", "") for a in declared[1].split(", ")]
        given = ", ".join(f"*({t}*)a[{i}]" for i, t in enumerate(types))
        text += (f'\nextern "C" const char* emu_{symbol}(unsigned grid, unsigned threads, void** given, bool lazy, '
                 f"bool together, unsigned cluster) {{ return emu::launch([](void** a) {{ {symbol}({given}); }}, "
                 f"grid, threads, given, lazy, together, cluster, {str(ordered).lower()}); }}\n")
    path = folder / "kernels.cc"
    path.write_text(text)
    library = ["-shared", str(path), str(emulation() / "emulation.so"), "-o", str(folder / "kernels.so")]
    if ordered:  # the library of that sanitizer is not wanted: memory_order.cc has what it would have
        done = subprocess.run([*find_compiler(), *KERNELS, "-fsanitize=thread", "-c", str(path), "-o",
                               str(path.with_suffix(".o"))], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:4000]
        library[1] = str(path.with_suffix(".o"))
    done = subprocess.run([*find_compiler(), *KERNELS, *library], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(folder / "kernels.so"))


class Fault(Exception):
    """What a kernel did wrong, where the order of memory is emulated."""


class Emulated:
    """A program with its kernels compiled for this CPU.

    Parameters
    ----------
    lazy : asynchronous copies arrive only when they are waited for; otherwise at once
    ordered : as of :func:`compiled`
    change : makes another text of the CUDA source"""

    def __init__(self, program: programs.Program, folder: Path, arch: str = "sm_90a", lazy: bool = True,
                 ordered: bool = False, change: Callable[[str], str] = str) -> None:
        kernels, source = lower(program, arch)
        self.program, self.kernels, self.lazy = as_launched(program)[0], kernels, lazy
        self.library = compiled(translate(change(source)), [k.symbol for k in kernels.values()], folder, ordered)

    def run(self, x: np.ndarray, states: Mapping[str, np.ndarray],
            parameters: Mapping[str, np.ndarray], masks: Mapping[str, np.ndarray] | None = None,
            directions: int = 1, entry: str = programs.RUN) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """y and the new states; every output and workspace holds NaN before, behind each lies a guard. ``kept`` has
        what else the entry left for others.

        ``masks``: ``lengths`` (B,), ``resets`` and ``sequences`` (T, B) for programs that read them; y has
        ``directions`` times H elements a row. In a stack, states are by the part's label: ``l0_h``."""
        steps, batch = x.shape[:2]
        (rows, hidden), given = next(iter(states.values())).shape, dict(masks or {})
        width = directions * hidden
        given |= {"x": x, "y": steps * batch * width, "state_out": rows * hidden}
        memory = self.memory(steps, parameters, lambda b: states[b.name.removesuffix("_in")] if b.tensor == "state_in"
                             else given.get(b.tensor or ""))
        self.carry_out(memory, steps, batch, entry)
        self.kept = {b.name: memory[b.name] for b in self.program.buffers if b.role == programs.KEPT}
        self.check_guards(memory)
        y = memory["y"][:steps * batch * width].reshape(steps, batch, width)
        out = {b.name.removesuffix("_out"): memory[b.name][:rows * hidden].reshape(rows, hidden)
               for b in self.program.buffers if b.tensor == "state_out"}
        return y, out

    def carry_out(self, memory: Memory, steps: int, batch: int, entry: str = programs.RUN, add: bool = True) -> None:
        scalars = {"T": steps, "B": batch, "add": int(add)}
        for call, values, own in _in_turn(self.program.entries[entry].calls, scalars, memory):
            self._call(call, own, {name: ctypes.c_int32(value) for name, value in values.items()}, values["T"])

    def memory(self, steps: int, parameters: Mapping[str, np.ndarray],
               given: Callable[[programs.Buffer], np.ndarray | int | None]) -> Memory:
        """Buffers before a call: packed parameters; what is ``given``, or NaN; a guard behind each."""
        memory = {}
        for b in self.program.buffers:
            if b.role == programs.PACKED:
                assert b.packing is not None
                memory[b.name] = pack(b.packing, parameters).reshape(-1)
                assert memory[b.name].size == b.extent.at(0), b.name
                continue
            content, count = given(b), b.extent.at(steps)
            if content is not None:
                count = max(count, content.size) if isinstance(content, np.ndarray) else content
            raw = np.full(count * DTYPES[b.dtype].itemsize + GUARD, 0xFF, np.uint8)
            raw[-GUARD:] = 0xA5
            memory[b.name] = raw.view(DTYPES[b.dtype])
            if isinstance(content, np.ndarray):
                memory[b.name][:content.size] = content.reshape(-1).astype(DTYPES[b.dtype])
        return memory

    def check_guards(self, memory: Mapping[str, np.ndarray]) -> None:
        for b in self.program.buffers:
            assert b.role == programs.PACKED or (memory[b.name].view(np.uint8)[-GUARD:] == 0xA5).all(), (
                f"{b.name} was written beyond its end")

    def _call(self, call: Any, memory: Mapping[str, np.ndarray], values: Mapping[str, Any], steps: int) -> None:
        if isinstance(call, programs.Fill):
            memory[call.buffer][:call.extent.at(steps)].view(np.uint8)[:] = call.byte
            return
        assert isinstance(call, programs.Launch)
        kernel = self.kernels[call.function]
        names = [call.names.get(a, a) for a in kernel.arguments]
        given = [ctypes.c_void_p(memory[n].ctypes.data) if n in memory else values[n] for n in names]
        array = (ctypes.c_void_p * max(1, len(given)))(*(ctypes.addressof(v) for v in given))
        assert kernel.extents["blockIdx.x"] == call.grid and kernel.extents["threadIdx.x"] == call.threads
        run = getattr(self.library, f"emu_{kernel.symbol}")
        run.restype = ctypes.c_char_p
        fault = run(call.grid, call.threads, array, ctypes.c_bool(self.lazy), ctypes.c_bool(call.cooperative),
                    call.cluster)
        if fault is not None:
            raise Fault(fault.decode())


GUARD = 256  # bytes behind each buffer
Single = tuple[Any, dict[str, int], Memory]  # a Fill or Launch, with the scalars and the buffers


def _in_turn(calls: Iterable[programs.Call], values: dict[str, int], memory: Memory) -> Iterator[Single]:
    for call in calls:
        if isinstance(call, programs.Concurrent):
            yield from _mixed([_in_turn(branch, values, memory) for branch in call.branches])
        elif isinstance(call, programs.Wave):
            steps = call.steps(values["T"])
            chunks = -(-values["T"] // steps)
            for diagonal in range(chunks + len(call.layers) - 1):
                yield from _mixed([_chunk(layer, (diagonal - i) * steps, steps, values, memory, diagonal > i)
                                   for i, layer in enumerate(call.layers) if 0 <= diagonal - i < chunks])
        elif isinstance(call, programs.Chunks):
            firsts = range(0, values["T"], call.steps)
            for n, first in enumerate(reversed(firsts) if call.reverse else firsts):
                scalars = {"first_step": first, "all_steps": values["T"], "add": int(values["add"] or n > 0)}
                yield from _chunk(call, first, call.steps, values | scalars, memory, n > 0)
        elif isinstance(call, programs.Relay):
            size, places = values["B"] * call.row, [memory[call.before], memory[call.after]]
            found = memory[call.given]
            if values["T"] == 1 and np.shares_memory(found[:size], memory[call.written][:size]):
                places[0][:size] = found[:size]
                found = places[0]
            for t in range(values["T"]):
                own = memory | {call.before: found, call.after: places[(t + 1) % 2]}
                yield from ((one, values | {"t": t}, own) for one in call.calls)
                found = places[(t + 1) % 2]
        elif isinstance(call, programs.Loop):
            yield from ((one, values | {"t": t}, memory) for t in range(values["T"]) for one in call.calls)
        else:
            yield call, values, memory


def _chunk(of: programs.WaveLayer | programs.Chunks, first: int, steps: int, values: dict[str, int], memory: Memory,
           goes_on: bool) -> Iterator[Single]:
    """The launches for the steps from ``first`` on; ``goes_on``: from the states of the chunk before."""
    own = memory | {n: memory[n][first * values["B"] * size:] for n, size in of.rows.items()}
    own |= {before: memory[then] for before, then in of.states} if goes_on else {}
    own |= {a: own[b] for a, b in getattr(of, "in_place", ()) if memory[a] is memory[b]}
    return _in_turn(of.calls, values | {"T": min(steps, values["T"] - first)}, own)


def _mixed(branches: list[Iterator[Single]]) -> Iterator[Single]:
    return filter(None, chain.from_iterable(zip_longest(*branches)))


def pack(packing: programs.Packing, parameters: Mapping[str, np.ndarray]) -> np.ndarray:
    """A packed weight buffer, as :class:`~ecornn.program.Packing` defines it; parameters (G, H[, K])."""
    every = programs.WHOLE
    sources = [None if not name else np.concatenate(parameters[name]) if gate == every else parameters[name][gate]
               for name, gate in packing.sources]
    full = np.zeros(packing.pad, np.float32)
    for gate, source in enumerate(sources):
        if source is not None:
            full[gate][tuple(slice(0, n) for n in source.shape)] = source
    if packing.dtype == "tf32":
        full = (full.view(np.uint32) + np.uint32(0x1000) & np.uint32(0xFFFFE000)).view(np.float32)
        return full.reshape(packing.split).transpose(packing.order)
    if packing.dtype in ("int8", "scale"):
        step = (np.abs(full).max(-1, keepdims=True) / 127).astype(np.float32)
        whole = (np.round(full / np.where(step, step, 1)) + 128).astype(np.uint8)
        return step[..., 0] if packing.dtype == "scale" else whole.reshape(packing.split).transpose(packing.order)
    return full.reshape(packing.split).transpose(packing.order).astype(DTYPES[packing.dtype])


def inputs(cell: str, sizes: tuple[int, int, int, int], dtype: str, shapes: Mapping[str, tuple[int, ...]],
           states: tuple[str, ...], seed: int = 0) -> tuple[Any, dict[str, np.ndarray], dict[str, np.ndarray]]:
    steps, batch, input, hidden = sizes
    generator = np.random.default_rng([seed, *sizes, len(cell)])
    def draw(shape: tuple[int, ...], scale: float) -> np.ndarray:
        return generator.uniform(-scale, scale, shape).astype(DTYPES[dtype])
    x = draw((steps, batch, input), 1.5)
    parameters = {n: draw(s, hidden ** -0.5) for n, s in shapes.items()}
    return x, {s: draw((batch, hidden), 1.0) for s in states}, parameters

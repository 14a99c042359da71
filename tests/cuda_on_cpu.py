"""Runs CUDA programs on the CPU, for tests without a GPU: generated source, compiled for the host.

Inline PTX becomes calls of what ``cuda_on_cpu.h`` declares and ``cuda_on_cpu.cc`` does; an instruction that they do
not know fails the test.
"""

from __future__ import annotations

import atexit
import ctypes
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ecornn.build.cuda import lower
from ecornn.build.link import find_compiler
from ecornn.program import Beside, Buffer, Call, Fill, Launch, Loop, Packing, Program, Wave, WaveLayer

Memory = dict[str, np.ndarray]
HEADER = Path(__file__).with_name("cuda_on_cpu.h")
DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16),
          "bfloat16": np.dtype(ml_dtypes.bfloat16), "uint32": np.dtype(np.uint32),
          "int32": np.dtype(np.int32), "uint8": np.dtype(np.uint8)}
_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global \[%0\], \[%1\], (\d+)(, %2)?;")
_WGMMA = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(?:16|8)\.f32\.(\w+)\.\2 .*, ps0, 1, 1(?:, 0, 0)?; }")
_WGMMA_A = re.compile(_WGMMA.pattern.replace("1, 1(?:, 0, 0)?;", "1, 1, 0;"))  # operand A in registers
_SPECIAL = re.compile(r"mov\.u32 %0, %%(tid|ctaid)\.x;")
_HALF = re.compile(r"\{\.reg \.b16 low, high; mov\.b32 \{low, high\}, %1; cvt\.f32\.f16 %0, (low|high); ?\}")
_WGMMA_KIND = {"f16": 0, "bf16": 1, "tf32": 2}
_MMA = {"f16.f16": 0, "bf16.bf16": 1, "tf32.tf32": 2}


def instruction(text: str, outs: list[str], ins: list[str]) -> str:
    """C++ that does what one PTX instruction does."""
    name, every = text.split(" ")[0].rstrip(";"), ", ".join(outs + ins)
    if copy := _COPY.fullmatch(text):
        return f"emu::cp_async({ins[0]}, {ins[1]}, {copy[1]}, {ins[2] if copy[2] else copy[1]})"
    if name == "cp.async.commit_group":
        return "emu::commit()"
    if name == "cp.async.wait_group":
        return f"emu::wait_group({text.split(' ')[1].rstrip(';')})"
    if name.startswith("mma.sync.aligned.m16n8k"):
        return f"emu::mma({_MMA['.'.join(name.split('.')[-3:-1])]}, {every})"
    if wgmma := _WGMMA.search(text):
        pointers = ", ".join(f"&{d}" for d in outs)
        return f"emu::wgmma({_WGMMA_KIND[wgmma[2]]}, {wgmma[1]}, {', '.join(ins)}, {{{pointers}}})"
    if wgmma := _WGMMA_A.search(text):
        pointers, held = ", ".join(f"&{d}" for d in outs), ", ".join(ins[:4])
        return (f"emu::wgmma_registers({_WGMMA_KIND[wgmma[2]]}, {wgmma[1]}, {{{held}}}, {', '.join(ins[4:])}, "
                f"{{{pointers}}})")
    if name.startswith("wgmma.wait_group"):
        return f"emu::wgmma_wait({text.split(' ')[1].rstrip(';')})"
    if name.startswith("wgmma.commit_group"):
        return "emu::wgmma_commit()"
    if name.startswith(("wgmma.fence", "setmaxnreg.")):
        return "(void)0"
    if "mbarrier.try_wait.parity" in text and "@!done bra again" in text:
        return f"emu::mbarrier_wait({every})"
    if "mbarrier.test_wait.parity" in text and "selp.u32 %0, 1, 0, p" in text:
        return f"{outs[0]} = emu::mbarrier_test({', '.join(ins)})"
    if name.startswith("mbarrier.init"):
        return f"emu::mbarrier_init({every})"
    if name.startswith("mapa.shared::cluster.u32"):
        return f"{outs[0]} = emu::mapa({', '.join(ins)})"
    if name.startswith("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32"):
        return f"emu::send({ins[0]}, {ins[1]}, {ins[3]}), emu::send({ins[0]} + 4, {ins[2]}, {ins[3]})"
    if name.startswith("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32"):
        return ", ".join(f"emu::send({ins[0]} + {4 * k}, {ins[k + 1]}, {ins[5]})" for k in range(4))
    if name.startswith("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32"):
        return f"emu::send({every})"
    if name == "barrier.cluster.arrive.release.aligned":
        return "(void)0"
    if name == "barrier.cluster.wait.acquire.aligned":
        return "emu::wait(emu::kCluster)"
    if name.startswith("mbarrier.arrive") and not outs:  # also .expect_tx, with the bytes
        return f"emu::mbarrier_arrive({every})"
    if name.startswith("cp.async.mbarrier.arrive.noinc"):
        return f"emu::cp_async_arrive({every})"
    if name.startswith("cp.async.bulk.shared::cluster.global.mbarrier"):
        return f"emu::bulk_copy({every})"
    if name == "cp.async.wait_all":
        return "emu::commit(), emu::wait_group(0)"
    if name in ("bar.sync", "bar.arrive"):
        return f"emu::arrive({every}, {'true' if name == 'bar.sync' else 'false'})"
    if name.startswith("fence."):
        return "(void)0"
    if name.startswith("ld.relaxed.gpu.global.v4"):  # a poll: let others run
        return f"emu::load4({every}), emu::yield()"
    if name.startswith("ld.relaxed.gpu.global.v2"):
        return f"emu::load2({every}), emu::yield()"
    if name.startswith(("ld.acquire.gpu.global", "ld.relaxed.gpu.global.b32")):
        return f"{outs[0]} = *(unsigned*){ins[0]}, emu::yield()"
    if name.startswith("st.relaxed.gpu.global.v4.b32"):
        return f"emu::store4((void*){ins[0]}, {', '.join(ins[1:])})"
    if name.startswith("st.relaxed.gpu.global.v2.b32"):
        return f"emu::store2((void*){every})"
    if name.startswith("st.relaxed.gpu.global.b32"):
        return f"*(unsigned*){ins[0]} = {ins[1]}"
    if name.startswith("red.release.gpu.global.add.u32"):
        return f"*(unsigned*){ins[0]} += {ins[1]}"
    if name.startswith("st.shared.v4"):
        return f"emu::store4(emu::at({ins[0]}), {', '.join(ins[1:])})"
    if name in ("ld.shared.f32", "ld.shared.b32"):
        return f"{outs[0]} = *(const {'float' if name.endswith('f32') else 'uint32_t'}*)emu::at({ins[0]})"
    if name.startswith("ld.shared.v2"):
        return f"emu::load2({', '.join(outs)}, emu::at({ins[0]}))"
    if name == "cvt.rna.tf32.f32":
        return f"{outs[0]} = emu::tf32({ins[0]})"
    if name.startswith("cvt.rn.") and "x2.f32" in name:
        kind = "nv_bfloat16" if ".bf16x2" in name else "half"
        ins = [f"emu::finite_half({i})" for i in ins] if "satfinite.f16x2" in name else ins
        return f"{outs[0]} = emu::pack2<{kind}>({', '.join(ins)})"
    if half := _HALF.fullmatch(text):
        return f"{outs[0]} = emu::half_of({ins[0]}, {16 if half[1] == 'high' else 0})"
    if name.startswith("ld.shared.v4"):
        return f"emu::load4({', '.join(outs)}, emu::at({ins[0]}))"
    if name in ("ld.global.u16", "ld.global.b32"):
        return f"{outs[0]} = *({'uint16_t' if name.endswith('u16') else 'uint32_t'}*){ins[0]}"
    if name.startswith("ld.global") and ".v4." in name:
        return f"emu::load4({every})"
    if name.startswith("ld.global.v2."):
        return f"emu::load2({every})"
    if name.startswith("ldmatrix.sync.aligned.m8n8.x4.shared"):
        return f"emu::ldmatrix({every})"
    if name == "st.global.v4.f32":
        return f"emu::store4((void*){ins[0]}, {', '.join(f'emu::as_word({v})' for v in ins[1:])})"
    if name == "st.global.v4.b32":
        return f"emu::store4((void*){every})"
    if name == "st.global.v2.f32":
        return f"((float*){ins[0]})[0] = {ins[1]}, ((float*){ins[0]})[1] = {ins[2]}"
    if name == "st.global.v2.b32":
        return f"emu::store2((void*){every})"
    if name == "st.global.b32":
        return f"*(unsigned*){ins[0]} = {ins[1]}"
    simple = {"ex2.approx.ftz.f32": f"{outs and outs[0]} = exp2f({ins and ins[0]})",
              "lg2.approx.ftz.f32": f"{outs and outs[0]} = log2f({ins and ins[0]})",
              "rcp.approx.ftz.f32": f"{outs and outs[0]} = 1.0f / ({ins and ins[0]})",
              "div.approx.ftz.f32": f"{outs and outs[0]} = ({ins and ins[0]}) / ({ins and ins[-1]})",
              "rsqrt.approx.f32": f"{outs and outs[0]} = 1.0f / sqrtf({ins and ins[0]})",
              "max.NaN.f32": f"{outs and outs[0]} = emu::extremum<true>({', '.join(ins)})",
              "min.NaN.f32": f"{outs and outs[0]} = emu::extremum<false>({', '.join(ins)})",
              "tanh.approx.f32": f"{outs and outs[0]} = tanhf({ins and ins[0]})"}
    if name in simple:
        return simple[name]
    if not text:  # pins a value
        return "(void)0"
    if text == "mov.u32 %0, %%clock;":
        return f"{outs[0]} = emu::ticks += 64"
    if special := _SPECIAL.fullmatch(text):
        return f"{outs[0]} = {'threadIdx' if special[1] == 'tid' else 'blockIdx'}.x"
    if name.startswith("prefetch"):
        return "(void)0"
    pytest.fail(f"the emulation does not know {text}")


def _replace(match: re.Match[str]) -> str:
    parts = re.split(r"(?<!:):(?!:)", match[2])
    operands = [re.findall(r'"[=+]?\w"\s*\(((?:[^()]|\([^()]*\))*)\)', p) for p in [*parts, "", ""][:3]]
    return instruction(match[1], operands[1], operands[2]) + ";"


def translate(source: str) -> str:
    """Generated CUDA source as C++, without the headers of CUDA."""
    text = source.split("#define ushort unsigned short", 1)[1].split("#endif", 1)[1]
    text = re.sub(r'\basm(?: volatile)?\("([^"]*)"((?:[^;"]|"[^"]*")*)\);', _replace, text)
    assert "asm" not in text, "inline assembly that was not translated"
    text = re.sub(r"extern __shared__ \S+ (\w+) (\w+)\[\];", r"\1* \2 = (\1*)emu::shared;", text)
    return f'#include "{emulation() / HEADER.name}"\n{text}'


COMPILE = ("-std=c++17", "-w", "-fPIC")
KERNELS = (*COMPILE, "-O0")  # most of a test's time is the compiler's


@lru_cache(maxsize=1)
def emulation() -> Path:
    """A folder with the header, what the compiler makes of it, since every kernel includes it, and ``emulation.so``,
    which carries out what it declares."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    header = Path(folder.name, HEADER.name)
    header.write_bytes(HEADER.read_bytes())
    for what in ([*KERNELS, "-x", "c++-header", str(header), "-o", f"{header}.gch"],
                 [*COMPILE, "-O1", "-shared", str(HEADER.with_suffix(".cc")), "-o", f"{folder.name}/emulation.so"]):
        subprocess.run([*find_compiler(), *what], check=True)
    return Path(folder.name)


class Emulated:
    """A program with its kernels compiled for this CPU.

    Parameters
    ----------
    lazy : asynchronous copies arrive only when they are waited for; otherwise at once
    """

    def __init__(self, program: Program, folder: Path, arch: str = "sm_90a", lazy: bool = True) -> None:
        kernels, source = lower(program, arch)
        self.program, self.kernels, self.lazy = program, kernels, lazy
        text = translate(source)
        for kernel in kernels.values():
            declared = re.search(rf"{kernel.symbol}\(([^)]*)\)", text)
            assert declared is not None
            types = [a.rsplit(" ", 1)[0].replace("__restrict__", "") for a in declared[1].split(", ")]
            given = ", ".join(f"*({t}*)a[{i}]" for i, t in enumerate(types))
            text += (f'\nextern "C" void emu_{kernel.symbol}(unsigned grid, unsigned threads, void** given, bool lazy, '
                     f"bool together, unsigned cluster) {{ emu::launch([](void** a) {{ {kernel.symbol}({given}); }}, "
                     "grid, threads, given, lazy, together, cluster); }\n")
        path = folder / "kernels.cc"
        path.write_text(text)
        command = [*find_compiler(), *KERNELS, "-shared", str(path), str(emulation() / "emulation.so"), "-o",
                   str(folder / "kernels.so")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:4000]
        self.library = ctypes.CDLL(str(folder / "kernels.so"))

    def run(self, x: np.ndarray, states: Mapping[str, np.ndarray],
            parameters: Mapping[str, np.ndarray], masks: Mapping[str, np.ndarray] | None = None,
            directions: int = 1) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """y and the new states; every output and workspace holds NaN before, behind each lies a guard.

        ``masks``: ``lengths`` (B,), ``resets`` and ``sequences`` (T, B) for programs that read them; y has
        ``directions`` times H elements a row. In a stack, states are by the part's label: ``l0_h``.
        """
        steps, batch = x.shape[:2]
        (rows, hidden), given = next(iter(states.values())).shape, dict(masks or {})
        width = directions * hidden
        memory: dict[str, np.ndarray] = {}
        for b in self.program.buffers:
            if b.role in ("lengths", "resets", "sequences"):
                memory[b.name] = np.ascontiguousarray(given[b.role], DTYPES[b.dtype]).reshape(-1)
            else:
                memory[b.name] = self._allocate(b, x, states, parameters, (steps, batch, rows * hidden, width))
        self.carry_out(memory, steps, batch)
        for b in self.program.buffers:
            if b.role in ("workspace", "y", "state_out"):
                tail = memory[b.name].view(np.uint8)[-GUARD:]
                assert (tail == 0xA5).all(), f"{b.name} was written beyond its end"
        y = memory["y"][:steps * batch * width].reshape(steps, batch, width)
        out = {b.name.removesuffix("_out"): memory[b.name][:rows * hidden].reshape(rows, hidden)
               for b in self.program.buffers if b.role == "state_out"}
        return y, out

    def carry_out(self, memory: Memory, steps: int, batch: int) -> None:
        """The program's calls on the buffers."""
        for call, values, own in _in_turn(self.program.calls, {"T": steps, "B": batch}, memory):
            self._call(call, own, {name: ctypes.c_int32(value) for name, value in values.items()}, values["T"])

    def _allocate(self, b: Buffer, x: np.ndarray, states: Mapping[str, np.ndarray],
                  parameters: Mapping[str, np.ndarray], sizes: tuple[int, int, int, int]) -> np.ndarray:
        steps, batch, state, width = sizes
        if b.role == "x":
            return x.copy().reshape(-1)
        if b.role == "state_in":
            return states[b.name.removesuffix("_in")].copy().reshape(-1)
        if b.role == "packed":
            assert b.packing is not None
            made = pack(b.packing, parameters).reshape(-1)
            assert made.size == b.extent.at(0), b.name
            return made
        count = {"y": steps * batch * width, "state_out": state}.get(b.role, b.extent.at(steps))
        raw = np.full(count * DTYPES[b.dtype].itemsize + GUARD, 0xFF, np.uint8)
        raw[-GUARD:] = 0xA5
        return raw.view(DTYPES[b.dtype])

    def _call(self, call: Any, memory: Mapping[str, np.ndarray], values: Mapping[str, Any], steps: int) -> None:
        if isinstance(call, Fill):
            memory[call.buffer][:call.extent.at(steps)].view(np.uint8)[:] = call.byte
            return
        assert isinstance(call, Launch)
        kernel = self.kernels[call.function]
        names = [call.names.get(a, a) for a in kernel.arguments]
        given = [ctypes.c_void_p(memory[n].ctypes.data) if n in memory else values[n] for n in names]
        array = (ctypes.c_void_p * max(1, len(given)))(*(ctypes.addressof(v) for v in given))
        assert kernel.extents["blockIdx.x"] == call.grid and kernel.extents["threadIdx.x"] == call.threads
        getattr(self.library, f"emu_{kernel.symbol}")(call.grid, call.threads, array, ctypes.c_bool(self.lazy),
                                                          ctypes.c_bool(call.cooperative), call.cluster)


GUARD = 256  # bytes behind each buffer
Single = tuple[Any, dict[str, int], Memory]  # a Fill or Launch, with the scalars and the buffers


def _in_turn(calls: Iterable[Call], values: dict[str, int], memory: Memory) -> Iterator[Single]:
    """One launch after the other; of branches that run at the same time, one of each in turn."""
    for call in calls:
        if isinstance(call, Beside):
            yield from _mixed([_in_turn(branch, values, memory) for branch in call.branches])
        elif isinstance(call, Wave):
            steps = call.steps(values["T"])
            chunks = -(-values["T"] // steps)
            for diagonal in range(chunks + len(call.layers) - 1):
                yield from _mixed([_chunk(layer, (diagonal - i) * steps, steps, values, memory)
                                   for i, layer in enumerate(call.layers) if 0 <= diagonal - i < chunks])
        elif isinstance(call, Loop):
            yield from ((one, values | {"t": t}, memory) for t in range(values["T"]) for one in call.calls)
        else:
            yield call, values, memory


def _chunk(layer: WaveLayer, first: int, steps: int, values: dict[str, int], memory: Memory) -> Iterator[Single]:
    """A layer's launches for the steps from ``first`` on."""
    own = memory | {n: memory[n][first * values["B"] * size:] for n, size in layer.rows.items()}
    own |= {before: memory[then] for before, then in layer.states} if first else {}
    return _in_turn(layer.calls, values | {"T": min(steps, values["T"] - first)}, own)


def _mixed(branches: list[Iterator[Single]]) -> Iterator[Single]:
    return filter(None, chain.from_iterable(zip_longest(*branches)))


def pack(packing: Packing, parameters: Mapping[str, np.ndarray]) -> np.ndarray:
    """A packed weight buffer, as :class:`~ecornn.program.Packing` defines it; parameters (G, H[, K])."""
    shapes = [parameters[name][gate].shape for name, gate in packing.sources if name]
    shape = shapes[0] if shapes else packing.pad[1:]
    stack = np.stack([parameters[name][gate].astype(np.float32) if name else np.zeros(shape, np.float32)
                      for name, gate in packing.sources])
    full = np.zeros(packing.pad, np.float32)
    full[tuple(slice(0, n) for n in stack.shape)] = stack
    if packing.dtype == "tf32":
        full = (full.view(np.uint32) + np.uint32(0x1000) & np.uint32(0xFFFFE000)).view(np.float32)
        return full.reshape(packing.split).transpose(packing.order)
    return full.reshape(packing.split).transpose(packing.order).astype(DTYPES[packing.dtype])


def inputs(cell: str, sizes: tuple[int, int, int, int], dtype: str, shapes: Mapping[str, tuple[int, ...]],
           states: tuple[str, ...], seed: int = 0) -> tuple[Any, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Random x, states and parameters (G, H[, K]) in the dtype, reproducible."""
    steps, batch, input, hidden = sizes
    generator = np.random.default_rng([seed, *sizes, len(cell)])

    def draw(shape: tuple[int, ...], scale: float) -> np.ndarray:
        return generator.uniform(-scale, scale, shape).astype(DTYPES[dtype])

    x = draw((steps, batch, input), 1.5)
    parameters = {n: draw(s, hidden ** -0.5) for n, s in shapes.items()}
    return x, {s: draw((batch, hidden), 1.0) for s in states}, parameters

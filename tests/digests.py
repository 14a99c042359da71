"""What the compiler generates, as digests: a change that is meant to move code and not to change it must keep them.

    python tests/digests.py            what differs from digests.json; exit code 1 where anything does
    python tests/digests.py --renew    writes it anew, after a change that is meant to change generated code

Of each layer four digests are kept. ``code``: kernels, letter for letter. ``structure``: the same with every name that
the code itself defines replaced by its number, so that naming variables anew does not change it. ``host``: the host
code that is generated to launch them. ``interface``: buffers, packings, entries and the order of calls."""

import hashlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import rooms  # noqa: F401  makes the modules below importable
from exact import ALL_CELLS
from step_cells import CELLS, SQUARE, Chain, Peephole, Residual, Thrice

from ecornn.build import cuda, llvm
from ecornn.cells import BUILTIN, Cell, get
from ecornn.compose import compose
from ecornn.device import Device
from ecornn.overlap import arrange
from ecornn.program import Program
from ecornn.schedules.base import Config, Schedule, Task
from ecornn.targets import KNOWN
from ecornn.task import adjoint_task, make_program, tunes_backward
from ecornn.tune.choose import choose, serving_or_raise
from ecornn.tune.log import Log
from ecornn.workload import Stack, Workload

FILE = Path(__file__).with_name("digests.json")
CPU_CELLS: dict[str, Cell] = {cell.name: cell for cell in (Peephole(), Chain(), Residual(), Thrice())}
AVX2 = ("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "popcnt", "sse3", "sse4.1", "sse4.2", "ssse3")
AVX512 = (*AVX2, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")
VNNI = "avx512vnni"
DEVICES = {
    "sm_90a": KNOWN["sm_90a"], "sm_80": KNOWN["sm_80"],
    "znver3": Device("llvm", "znver3", "AVX2", cores=2, l2=512 << 10, features=AVX2),
    "skylake-avx512": Device("llvm", "skylake-avx512", "AVX-512", cores=2, l2=1 << 20, features=AVX512),
    "znver4": Device("llvm", "znver4", "AVX-512, adders apart", cores=2, l2=1 << 20, features=AVX512),
    "icelake-server": Device("llvm", "icelake-server", "VNNI", cores=4, l2=1 << 20, features=(*AVX512, VNNI)),
    "neoverse-v1": Device("llvm", "neoverse-v1", "NEON", cores=4, l2=1 << 20, features=("dotprod", "fullfp16", "neon"))}


@dataclass(frozen=True)
class Layer:
    cell: str
    device: str = "sm_90a"
    dtype: str = "bfloat16"
    sizes: tuple[int, int, int, int] = (100, 16, 256, 256)  # T, B, I, H
    schedule: str | None = None
    stack: Stack = field(default_factory=Stack)
    overlap: str = "none"
    weights: str | None = None
    config: tuple[tuple[str, int | str], ...] = ()

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.sizes))
        parts = [self.cell, self.device, self.dtype, sizes, self.schedule or "", str(self.stack),
                 f"keep={self.stack.keep}" if self.stack.keep else "", self.overlap if self.overlap != "none" else "",
                 f"{self.weights} weights" if self.weights else "", " ".join(f"{k}={v}" for k, v in self.config)]
        return ", ".join(filter(None, parts))


# state through L2 with the projection beside the recurrence, and inside a cluster
L2 = (("carrier", "l2"), ("groups", 1), ("units", 40), ("warps", 4), ("gate_warps", 4), ("registers", 50),
      ("ahead", 50), ("fences", "products"), ("hoisted", "float32"))
CLUSTER = (("carrier", "cluster"), ("groups", 1), ("units", 44), ("warps", 4), ("gate_warps", 4), ("registers", 50),
           ("fences", "rare"))
# a layer in a block, by each kind of product
BLOCK = {"fma": (("products", "fma"), ("rows", 2), ("units", 2), ("lanes", 4), ("registers", 50)),
         "mma": (("products", "mma"), ("rows", 3), ("units", 2), ("lanes", 1)),
         "wgmma": (("products", "wgmma"), ("rows", 12), ("units", 1), ("lanes", 1), ("hoisted", "same"))}
OPTIONS = ("lstm(peepholes)", "lstm(coupled)", "lstm(layer_norm)", "lstm(clip=3)", "lstm(clip_state=5)",
           "lstm(projection)", "lstm(zoneout_h=0.1,zoneout_c=0.2)", "lstm(gate=hard_sigmoid,new=softsign,out=relu)",
           "gru(layer_norm)", "gru(clip=2,zoneout=0.1)", "gru_reset_before(layer_norm)", "rnn_tanh(clip=1,zoneout=0.3)",
           "rnn_tanh(new=leaky_relu)")


def layers() -> Iterator[Layer]:
    for cell in BUILTIN:
        products = () if cell == "indrnn" else ("persistent", "layout_transform")
        for schedule in (*products, "elementwise" if cell == "indrnn" else "fused_step"):
            yield Layer(cell, schedule=schedule)
        if cell in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
            yield Layer(cell, schedule="persistent_wide", sizes=(100, 128, 256, 256))
    for cell in ("lstm", "gru", "rnn_relu"):
        for dtype in ("float32", "float16", "tf32"):
            for schedule in ("persistent", "layout_transform", "fused_step"):
                if (cell, schedule) != ("rnn_relu", "fused_step"):
                    yield Layer(cell, dtype=dtype, schedule=schedule, sizes=(50, 20, 65, 130))
        yield Layer(cell, dtype="float16", schedule="persistent_wide", sizes=(50, 200, 100, 512))
    for cell in OPTIONS:
        yield Layer(cell, dtype="float16", schedule="persistent")
        yield Layer(cell, "skylake-avx512", "float32", (20, 4, 30, 40))
    for cell in ("lstm(layer_norm)", "lstm(projection)"):
        yield Layer(cell, schedule="layout_transform")
        yield Layer(cell, schedule="fused_step", dtype="float32")
    for cell in CELLS:
        sizes = (20, 5, 96, 96) if cell in SQUARE else (20, 5, 40, 96)
        yield Layer(cell, dtype="float32", sizes=sizes)
        yield Layer(cell, schedule="fused_step", sizes=sizes)
    for cell in CPU_CELLS:
        for device in ("znver3", "skylake-avx512"):
            yield Layer(cell, device, "float32", (20, 3, 48, 48))
    for dtype, sizes in (("bfloat16", (100, 1, 1024, 1024)), ("bfloat16", (50, 1, 2048, 2048)),
                         ("float16", (1, 1, 1, 1)), ("float16", (50, 64, 1024, 1024)), ("bfloat16", (50, 7, 33, 65)),
                         ("float32", (50, 32, 20, 64))):
        yield Layer("lstm", dtype=dtype, sizes=sizes)
    yield Layer("gru", dtype="float16", sizes=(50, 4, 2816, 2816))
    for cell, dtype, sizes in (("lstm", "bfloat16", (1, 16, 256, 256)), ("gru", "float32", (4, 20, 65, 130))):
        yield Layer(cell, dtype=dtype, schedule="whole_step", sizes=sizes)
    yield Layer("lstm", schedule="persistent", config=L2, sizes=(100, 8, 512, 512))
    yield Layer("lstm", schedule="persistent", config=CLUSTER)
    for cell, dtype, sizes in (("lstm", "float32", (100, 32, 64, 64)), ("gru", "float32", (50, 200, 100, 100)),
                               ("rnn_tanh", "tf32", (50, 5, 33, 33)), ("gru_reset_before", "float16", (50, 1, 40, 40)),
                               ("pair", "bfloat16", (20, 5, 40, 96))):
        yield Layer(cell, dtype=dtype, schedule="persistent_block", sizes=sizes)
    for config in BLOCK.values():
        yield Layer("lstm", schedule="persistent_block", sizes=(50, 20, 40, 40), config=config)
    for stack in (Stack(2, True, True, True), Stack(sequences=True)):
        yield Layer("lstm", schedule="persistent_block", sizes=(40, 16, 64, 64), stack=stack)
    for cell, device, dtype in (("lstm", "sm_90a", "float16"), ("gru", "sm_80", "bfloat16")):
        yield Layer(cell, device, dtype, schedule="persistent", weights="int8")
    for cell in ("lstm", "gru"):
        yield Layer(cell, "sm_80", "float16")
        yield Layer(cell, "sm_80", "tf32", schedule="layout_transform")
    for stack in (Stack(reverse=True), Stack(lengths=True), Stack(resets=True), Stack(sequences=True),
                  Stack(lengths=True, resets=True, reverse=True), Stack(2, True, True, True), Stack(3)):
        for schedule in ("persistent", "persistent_wide", "layout_transform", "fused_step"):
            sized = (40, 128, 128, 128) if schedule == "persistent_wide" else (40, 16, 128, 128)
            if not stack.sequences or schedule.startswith("persistent"):
                yield Layer("lstm", stack=stack, schedule=schedule, sizes=sized)
        if not stack.sequences:
            yield Layer("gru", "znver3", "float32", (40, 5, 32, 48), stack=stack)
    yield Layer("indrnn", stack=Stack(2, True, True, True), sizes=(40, 16, 128, 128))
    for stack in (Stack(), Stack(lengths=True, resets=True, reverse=True, keep="states")):
        yield Layer("leaky", schedule="scan", stack=stack, sizes=(200, 2, 96, 96))
    yield Layer("lstm", stack=Stack(2, True), overlap="directions", sizes=(200, 16, 256, 256))
    yield Layer("gru", stack=Stack(3, lengths=True), overlap="wavefront", sizes=(400, 16, 256, 256))
    for device in ("znver3", "skylake-avx512", "neoverse-v1"):
        for cell in BUILTIN:
            yield Layer(cell, device, "float32", (30, 20, 64, 200))
        yield Layer("lstm", device, "float32", (30, 1, 64, 200))
    for weights, device in (("bfloat16", "znver3"), ("int21", "skylake-avx512"), ("int16", "znver3"),
                            ("int8", "icelake-server")):
        yield Layer("lstm", device, "float32", (30, 2, 64, 200), weights=weights)
        yield Layer("gru", device, "float32", (30, 20, 64, 200), weights=weights)
    for pairs in (3, 4):
        tiles = (("rows", 4), ("columns", 4), ("project_rows", 3), ("project_columns", 4))
        yield Layer("lstm", "znver4", "float32", (30, 20, 64, 256),
                    config=(*tiles, ("pairs", pairs), ("project_pairs", pairs)))
    yield Layer("lstm", "skylake-avx512", "float64", (30, 20, 64, 200))
    yield from trained()


def trained() -> Iterator[Layer]:
    for keep in ("states", "gates"):
        for cell in ("lstm", "gru", "rnn_tanh", "slstm", "lstm(layer_norm)"):
            yield Layer(cell, stack=Stack(keep=keep), sizes=(50, 16, 72, 264))
            yield Layer(cell, "skylake-avx512", "float32", (20, 5, 33, 48), stack=Stack(keep=keep))
    for cell in CELLS:
        sizes = (20, 5, 96, 96) if cell in SQUARE else (20, 5, 40, 96)
        yield Layer(cell, dtype="float32", sizes=sizes, schedule="fused_step", stack=Stack(keep="states"))
    for dtype, device in (("float32", "sm_90a"), ("tf32", "sm_90a"), ("float16", "sm_80")):
        yield Layer("gru", device, dtype, (50, 200, 130, 130), stack=Stack(keep="states"))
    for stack in (Stack(2, True, True, True, keep="states"), Stack(sequences=True, keep="gates"),
                  Stack(lengths=True, resets=True, reverse=True, keep="gates")):
        yield Layer("lstm", stack=stack, sizes=(40, 16, 128, 128))


def cell_of(layer: Layer) -> Cell:
    return CPU_CELLS.get(layer.cell) or ALL_CELLS.get(layer.cell) or get(layer.cell)


def program_of(layer: Layer) -> Program:
    T, B, I, H = layer.sizes
    dtype, precision = ("float32", "tf32") if layer.dtype == "tf32" else (layer.dtype, None)
    cell, device = cell_of(layer), DEVICES[layer.device]
    whole = Workload(layer.cell, H, I, B, T, dtype, layer.weights, precision)
    def chosen(task: Any) -> Any:
        schedule = layer.schedule or serving_or_raise(task)[0].name
        return choose(task, schedule, dict(layer.config), Log([]))
    made = arrange(cell, layer.stack, whole, device, layer.overlap, chosen,
                   lambda task: serving_or_raise(task, layer.schedule)[0].expected(task))
    programs: dict[Any, Program] = {}
    for task, found in zip(made.tasks, made.chosen, strict=True):
        if (task.workload, task.traversal) not in programs:
            programs[task.workload, task.traversal] = make_program(found.schedule, task, found.config,
                                                                   backward_of(task), made.overlap)
    return compose(layer.stack, whole, [programs[task.workload, task.traversal] for task in made.tasks], made.overlap)


def backward_of(task: Task) -> tuple[Schedule, Config] | None:
    if not tunes_backward(task):
        return None
    inner = adjoint_task(task)
    schedule = serving_or_raise(inner)[0]
    return schedule, schedule.default(inner)


def code_of(program: Program, device: Device) -> tuple[str, str]:
    """What runs, as CUDA or TIR; and what is generated of the host code that calls it."""
    if device.kind == "cuda":
        kernels, source = cuda.lower(program, device.arch)
        return source, cuda.host_program(cuda.as_launched(program)[0], kernels, device.arch).hex()
    return "\n".join(f.script() for f in program.functions.values()), llvm.tables(program)


def interface_of(program: Program) -> str:
    entries = repr(program.entries)
    for later in (", wanted=()", ", early=False", ", one_kernel=False"):  # fields that calls have had since then
        entries = entries.replace(later, "")
    return msgspec.json.encode(program.buffers).decode() + entries + str(program.together)


# a string, a comment, a function's end or beginning, a name
TOKEN = re.compile(r'"[^"\n]*"|//.*|^[}@]|(?<![\w.])[A-Za-z_]\w*', re.MULTILINE)


def structure_of(code: str) -> str:
    """``code`` with the names that a function defines replaced by their numbers."""
    words = re.sub(r'"[^"\n]*"|//.*', "", code)
    called = set(re.findall(r"([A-Za-z_]\w+)(?:\(|<(?! ))", words)) | set(re.findall(r"(\w+)\s+\w+\s*[=;,)]", words))
    numbers: dict[str, str] = {}
    def token(m: re.Match[str]) -> str:
        if m[0] in "}@":
            numbers.clear()
        return m[0] if m[0][0] in '"/}@' or m[0] in called else numbers.setdefault(m[0], f"#{len(numbers)}")
    return TOKEN.sub(token, code)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digests_of(layer: Layer) -> dict[str, str]:
    program = program_of(layer)
    cuda._latest.clear()  # or an equal kernel of another layer would lend its names
    code, host = code_of(program, DEVICES[layer.device])
    return {"code": digest(code), "structure": digest(structure_of(code)), "host": digest(host),
            "interface": digest(interface_of(program))}


@cache
def kept() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(FILE.read_text())
    return found


def main() -> None:
    from concurrent.futures import ProcessPoolExecutor

    words = [word for word in sys.argv[1:] if word != "--renew"]
    chosen = {str(layer): layer for layer in layers() if all(word in str(layer) for word in words)}
    with ProcessPoolExecutor() as processes:
        found = dict(zip(chosen, processes.map(digests_of, chosen.values()), strict=True))
    if "--renew" in sys.argv:
        lines = [f"{json.dumps(name)}: {json.dumps(digests)}" for name, digests in found.items()]
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        print(f"{len(found)} layers in {FILE}")
        return
    differ = [f"{kind} differs: {name}" for name, digests in found.items() for kind, value in digests.items()
              if kept().get(name, {}).get(kind) != value]
    print("\n".join(differ) or f"{len(found)} layers are as they were")
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()

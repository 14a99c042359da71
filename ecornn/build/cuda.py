"""CUDA backend: TIRx kernels -> CUDA source -> cubin, and the host code that launches them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from ecornn.build.commands import at_once, at_the_same_time
from ecornn.build.generated import Generated, Texts, texts
from ecornn.build.host_cuda import COOPERATIVE, FILES, PACK, SCALARS, Kernel, host_program
from ecornn.build.nvcc import as_variables, compile_cubin, ptx
from ecornn.build.one_kernel import OneKernel, as_launched, with_one_kernels
from ecornn.build.readable import readable_text, simplified, without_notes
from ecornn.device import Device
from ecornn.errors import BuildError
from ecornn.interrupts import safe_interrupts
from ecornn.program import Launch, Program, launches, packs

if TYPE_CHECKING:
    from tvm.target import Target
    from tvm.tirx import AttrStmt, PrimFunc

PROJECTION = "project"  # in the names of functions that project a sequence's input
PACK_SYMBOL = "ecornn_pack_weights"  # of pack_weights.cu
CUBIN = "ecornn_cubin"  # and its number
LARGE = 64_000  # characters of a kernel's source
TOGETHER = 6  # kernels of a source, whose compiler works for about half a second
_COMPILE_HOOK = "tvm_callback_cuda_compile"


@safe_interrupts()
def generate(program: Program, device: Device) -> Generated:
    """Machine code and host code of a CUDA program. ``emitted``: ``tir`` (as the schedule made it), ``cuda``
    (:func:`readable`), ``ptx``. Raises :class:`BuildError` where a function is no single kernel, its parameters or
    launch are not the program's, or a compiler fails."""
    (launched, made), arch = as_launched(program), device.arch
    # a compiler works on what has been lowered while the rest is
    with at_the_same_time(len(program.functions) + 1) as compilers, _lowering(program, arch) as lowered:
        pack = [compilers.submit(compile_cubin, text, arch) for text in texts("pack_weights.cu").values()
                if packs(program)]
        groups, apart = _groups(lowered, made)
        last = [compilers.submit(compile_cubin, text, arch) for text in apart.values()]
        first = [compilers.submit(compile_cubin, _whole(launched, [lowered[name]() for name in names], ofs), arch)
                 for names, ofs in groups]
        kernels = _kernels(launched, [one() for one in lowered.values()], made)
        for image, names in enumerate([*([*names, *ofs] for names, ofs in groups), *([name] for name in apart)]):
            kernels |= {name: replace(kernels[name], image=image) for name in names if name in kernels}
        if pack:
            kernels[PACK] = Kernel(PACK_SYMBOL, (), {}, image=len(groups) + len(apart))
        host = host_program(launched, kernels, arch)
        compiled = [one.result() for one in (*first, *last, *pack)]
    used = {symbol: report for _, each in compiled for symbol, report in each.items()}
    return Generated(
        shared=host_sources(), program=host,
        binaries={f"{CUBIN}{number}": cubin for number, (cubin, _) in enumerate(compiled)},
        emitted=Texts(tir=lambda: "\n".join(f.script() for f in program.functions.values()),
                      cuda=lambda: readable(program, device.arch),
                      ptx=lambda: ptx(lower(program, device.arch)[1], device.arch)),
        resources={name: used[kernel.symbol] for name, kernel in kernels.items() if kernel.symbol in used},
    )


def host_sources() -> dict[str, str]:
    return texts(*FILES)


def _groups(lowered: Mapping[str, Callable[[], _Lowered]],
            made: Mapping[str, OneKernel]) -> tuple[list[tuple[list[str], dict[str, OneKernel]]], dict[str, str]]:
    """The functions that are compiled together, :data:`TOGETHER` at most, but for the parts of one of those ``made``,
    each group with those; and the sources of those compiled alone. The projection is as good as the same for all
    configurations of a workload, so it is compiled apart, unless that takes less than starting the compiler, or it is a
    part of another kernel."""
    parts = _parts(made)
    projections = [lowered[name]() for name in lowered if PROJECTION in name and name not in parts]
    texts_of = {one.name: _kept(one.key, partial(_source, [one.code], one.key[1])) for one in projections}
    apart = {name: text for name, text in texts_of.items() if len(text) >= LARGE}
    # functions that stay together, and what is made of them
    units: list[tuple[list[str], dict[str, OneKernel]]] = [([name], {}) for name in lowered if name not in apart]
    for name, one_kernel in made.items():
        wanted = {launch.function for launch in one_kernel.launches}
        mine = [unit for unit in units if not wanted.isdisjoint(unit[0])]
        units = [unit for unit in units if unit not in mine]
        units.append(([one for names, _ in mine for one in names],
                      {n: of for _, ofs in mine for n, of in ofs.items()} | {name: one_kernel}))
    groups: list[tuple[list[str], dict[str, OneKernel]]] = []
    for names, ofs in units:
        if not groups or len(groups[-1][0]) + len(names) > TOGETHER:
            groups.append(([], {}))
        groups[-1][0].extend(names)
        groups[-1][1].update(ofs)
    return groups, apart


def _whole(launched: Program, lowered: list[_Lowered], made: Mapping[str, OneKernel], readable: bool = False) -> str:
    """The source of these functions and of those ``made`` of them."""
    codes, arch = [one.code for one in lowered], lowered[0].key[1]
    source = _printed([*map(simplified, codes)], arch) if readable else _source(codes, arch)
    own = {one.name: one.kernel for one in lowered}
    return with_one_kernels(source, made.values(), own, _alone(launched), readable)


def _kernels(launched: Program, lowered: list[_Lowered], made: Mapping[str, OneKernel]) -> dict[str, Kernel]:
    """The kernels that there are, by the function that a launch names."""
    own, alone, parts = {one.name: one.kernel for one in lowered}, _alone(launched), _parts(made)
    return {name: kernel for name, kernel in own.items() if name in alone or name not in parts} | {
        name: one.kernel(own) for name, one in made.items()}


def _alone(launched: Program) -> set[str]:
    return {one.function for one in launches(launched.calls)}


def _parts(made: Mapping[str, OneKernel]) -> set[str]:
    return {launch.function for one in made.values() for launch in one.launches}


def readable(program: Program, arch: str) -> str:
    """CUDA source of the program's kernels for people; it does the same as the source that is compiled."""
    launched, made = as_launched(program)
    return readable_text(_whole(launched, _lower(program, arch), made, readable=True))


def lower(program: Program, arch: str) -> tuple[dict[str, Kernel], str]:
    """The kernels that the program launches, see :func:`as_launched`, by function name, and the CUDA source that
    defines them all."""
    lowered, (launched, made) = _lower(program, arch), as_launched(program)
    return _kernels(launched, lowered, made), _whole(launched, lowered, made)


@dataclass(frozen=True, eq=False)
class _Lowered:
    """A function of the program: its kernel for the host, the device function, and the key of its structure."""

    name: str
    kernel: Kernel
    code: PrimFunc
    key: tuple[Any, ...]


def _lower(program: Program, arch: str) -> list[_Lowered]:
    with _lowering(program, arch) as lowered:
        return [one() for one in lowered.values()]


@contextlib.contextmanager
def _lowering(program: Program, arch: str) -> Iterator[dict[str, Callable[[], _Lowered]]]:
    """The program's functions while they are being lowered, projections first, as the largest of all kernels; each is
    waited for when it is called."""
    import tvm_ffi

    if not program.functions:
        raise BuildError("the program has no functions")
    structure = cast(Any, tvm_ffi.StructuralKey)
    # Equal structure says nothing of names, which tell a kernel's parameters apart.
    keys = {name: (name, arch, tuple(p.name for p in function.params), structure(function))
            for name, function in program.functions.items()}
    known = {name: _latest[key] for name, key in keys.items() if key in _latest}

    @functools.cache
    def lowered(name: str) -> _Lowered:
        function, key = program.functions[name], keys[name]
        code = known[name] if name in known else _kept(key, lowering[name].result)
        kernel = _kernel(program, name, function, code)
        explicit = (function.attrs or {}).get("tirx.noalias")
        restrict = _may_restrict(program, name, kernel) if explicit is None else bool(explicit)
        return _Lowered(name, kernel, code.with_attr("tirx.noalias", restrict), (*key, restrict))

    # TVM releases Python's lock, but threads contend for the reference counts of what they share: 16 of them take as
    # long as two do, and five times the CPU
    with at_the_same_time(min(2, at_once())) as threads:
        lowering = {name: threads.submit(_pipeline, name, program.functions[name], arch)
                    for name in sorted(keys, key=lambda name: PROJECTION not in name) if name not in known}
        yield {name: partial(lowered, name) for name in program.functions}


_latest: dict[Any, Any] = {}  # 64 at most


def _kept(key: Any, make: Callable[[], Any]) -> Any:
    """The result of ``make`` for a key, kept: in a search most functions of a program are those of the last one."""
    if key not in _latest:
        while len(_latest) >= 64:
            del _latest[next(iter(_latest))]
        _latest[key] = make()
    return _latest[key]


def _pipeline(name: str, function: PrimFunc, arch: str) -> PrimFunc:
    """TVM's passes over one function, so that a device function's origin is never in doubt."""
    import tvm
    from tvm import tirx

    target, (pipeline, _, finalize) = _target(arch), tirx.get_tir_pipeline("tirx")
    try:
        module = tvm.IRModule({name: function.with_attr("global_symbol", name)})
        with target:
            module = pipeline(tirx.transform.BindTarget(target)(module))
            on_device = tirx.transform.Filter(lambda one: one.attrs["target"].kind.name == "cuda")(module)
            kernels = list(finalize()(on_device).functions.values())
    except Exception as error:  # TVM raises many types, some of them only known to its C++ code
        raise BuildError(f"function {name!r} cannot be lowered: {error}") from error
    if len(kernels) != 1:
        raise BuildError(f"function {name!r} must be one kernel, but lowers to {len(kernels)}")
    return kernels[0]


def _target(arch: str) -> Target:
    import tvm

    return tvm.target.Target({"kind": "cuda", "arch": arch}, host={"kind": "llvm"})


def _kernel(program: Program, name: str, original: PrimFunc, code: PrimFunc) -> Kernel:
    """The kernel as the host must know it: the device function keeps only the parameters that it reads."""
    import tvm_ffi
    from tvm import ir, tirx

    known = {buffer.name for buffer in program.buffers}
    called = [launch.names for launch in launches_of(program, name)] or [{}]
    origin: dict[str, str] = {}  # device parameter -> buffer or scalar
    for parameter in original.params:
        scalar = isinstance(parameter.ty, ir.PrimType)
        if scalar and (parameter.name not in SCALARS or str(parameter.ty.dtype) != "int32"):
            raise BuildError(f"function {name!r}: scalar parameters are int32 {', '.join(SCALARS)}; "
                             f"{parameter.name!r} ({parameter.ty.dtype}) is none")
        strangers = {names.get(parameter.name, parameter.name) for names in called} - known
        if strangers and not scalar:
            raise BuildError(f"function {name!r}: the program has no buffer {', '.join(map(repr, sorted(strangers)))}")
        origin[parameter.name if scalar else f"{parameter.name}_ptr"] = parameter.name
    if unknown := [p.name for p in code.params if p.name not in origin]:
        raise BuildError(f"function {name!r}: the kernel's parameters {unknown} come from nowhere")
    extents: dict[str, int] = {}

    def note(attribute: AttrStmt) -> None:
        if attribute.attr_key == "thread_extent" and isinstance(attribute.value, tirx.IntImm):
            extents[attribute.node.thread_tag] = int(attribute.value)

    tvm_ffi.structural_walk(code.body, (tirx.AttrStmt, note))
    return Kernel(str(code.attrs["global_symbol"]), tuple(origin[p.name] for p in code.params), extents,
                  tuple(str(tag) for tag in code.attrs.get("tirx.kernel_launch_params", ())))


def _may_restrict(program: Program, name: str, kernel: Kernel) -> bool:
    """True where parameters may be ``__restrict__``, if ``tirx.noalias`` says nothing: not where a state's input and
    output may be the same memory, nor where blocks exchange data, since the compiler may move a load of another block's
    result in front of the barrier."""
    mine = launches_of(program, name)
    if COOPERATIVE in kernel.tags or any(call.cooperative or call.cluster > 1 for call in mine):
        return False
    given = {names.get(a, a) for names in [c.names for c in mine] or [{}] for a in kernel.arguments}
    ends = [{(b.part, b.state) for b in program.buffers if b.tensor == tensor and b.name in given}
            for tensor in ("state_in", "state_out")]
    return not ends[0] & ends[1]


def launches_of(program: Program, name: str) -> list[Launch]:
    return [call for call in launches(program.calls) if call.function == name]


def _source(functions: Sequence[PrimFunc], arch: str) -> str:
    return as_variables(without_notes(_printed(functions, arch)))


def _printed(functions: Sequence[PrimFunc], arch: str) -> str:
    """CUDA source of lowered functions as TVM prints it, without having TVM compile it."""
    import tvm
    import tvm_ffi

    captured: list[str] = []

    def capture(code: str, *_: Any) -> bytes:
        captured.append(code)
        return b"\x7fELF"  # never loaded: only the source of the module is read

    symbols = [str(code.attrs["global_symbol"]) for code in functions]
    # With a GPU in the machine TVM compiles at once, and always with --use_fast_math.
    before = tvm_ffi.get_global_func(_COMPILE_HOOK, allow_missing=True)
    tvm_ffi.register_global_func(_COMPILE_HOOK, capture, override=True)
    try:
        target = _target(arch)
        with target:
            module = tvm.IRModule(dict(zip(symbols, functions, strict=True)))
            built = tvm_ffi.get_global_func("target.build.cuda")(module, target)
        return captured[-1] if captured else str(built.inspect_source("cuda"))
    except Exception as error:
        raise BuildError(f"no CUDA source for {', '.join(symbols)}: {error}") from error
    finally:
        if before is None:
            tvm_ffi.remove_global_func(_COMPILE_HOOK)
        else:
            tvm_ffi.register_global_func(_COMPILE_HOOK, before, override=True)

"""CUDA backend: TIRx kernels -> CUDA source -> cubin, and the host code that launches them."""

from __future__ import annotations

from typing import Any

from ecornn.build.generated import Generated
from ecornn.build.host_cuda import COOPERATIVE, CUBIN, Kernel, host_sources
from ecornn.build.nvcc import compile_cubin
from ecornn.device import Device
from ecornn.errors import BuildError
from ecornn.program import Launch, Loop, Program

SCALARS = ("T", "B", "t")
_COMPILE_HOOK = "tvm_callback_cuda_compile"


def generate(program: Program, device: Device) -> Generated:
    """Machine code and host code of a CUDA program.

    ``emitted`` holds ``tir`` (the functions as the schedule made them) and ``cuda``; for PTX call
    :func:`ecornn.build.nvcc.ptx` on the latter. Raises :class:`BuildError` where a function is no
    single kernel, its parameters are not the program's, its launch differs from its declaration,
    or a compiler fails.
    """
    kernels, source = lower(program, device.arch)
    sources = host_sources(program, kernels, device.arch)
    cubin, resources = compile_cubin(source, device.arch)
    names = {kernel.symbol: name for name, kernel in kernels.items()}
    return Generated(
        sources=sources,
        binaries={CUBIN: cubin},
        emitted={"tir": "\n".join(f.script() for f in program.functions.values()), "cuda": source},
        resources={names[symbol]: found for symbol, found in resources.items() if symbol in names},
    )


def lower(program: Program, arch: str) -> tuple[dict[str, Kernel], str]:
    """The program's kernels by function name, and the CUDA source that defines them all."""
    import tvm
    from tvm import tirx

    if not program.functions:
        raise BuildError("the program has no functions")
    target = tvm.target.Target({"kind": "cuda", "arch": arch}, host={"kind": "llvm"})
    pipeline, _, finalize = tirx.get_tir_pipeline("tirx")
    kernels: dict[str, Kernel] = {}
    lowered: dict[Any, Any] = {}
    for name, function in program.functions.items():
        try:
            # One function at a time, so that a device function's origin is never in doubt.
            module = tvm.IRModule({name: function.with_attr("global_symbol", name)})
            with target:
                module = pipeline(tirx.transform.BindTarget(target)(module))
                on_device = tirx.transform.Filter(_is_device_function)(module)
                found = dict(finalize()(on_device).functions.items())
        except Exception as error:  # TVM raises many types, some of them only known to its C++ code
            raise BuildError(f"function {name!r} cannot be lowered: {error}") from error
        if len(found) != 1:
            raise BuildError(f"function {name!r} must be one kernel, but lowers to {len(found)}")
        (variable, code), = found.items()
        kernel = _kernel(program, name, function, code)
        explicit = (function.attrs or {}).get("tirx.noalias")
        restrict = _may_restrict(program, name, kernel) if explicit is None else bool(explicit)
        code = code.with_attr("tirx.noalias", restrict)
        kernels[name] = kernel
        lowered[variable] = code
    try:
        with target:
            source = _source(tvm.IRModule(lowered), target)
    except Exception as error:
        raise BuildError(f"no CUDA source for {', '.join(kernels)}: {error}") from error
    return kernels, source


def _is_device_function(function: Any) -> bool:
    return function.attrs["target"].kind.name == "cuda"


def _kernel(program: Program, name: str, original: Any, code: Any) -> Kernel:
    """What the host must know: the device function keeps only the parameters that it reads."""
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
        given = {names.get(parameter.name, parameter.name) for names in called}
        if not scalar and not given <= known:
            missing = ", ".join(map(repr, sorted(given - known)))
            raise BuildError(f"function {name!r}: the program has no buffer {missing}")
        origin[parameter.name if scalar else f"{parameter.name}_ptr"] = parameter.name
    strangers = [p.name for p in code.params if p.name not in origin]
    if strangers:
        raise BuildError(f"function {name!r}: the kernel's parameters {strangers} come from nowhere")

    extents: dict[str, int] = {}

    def note(attribute: Any) -> None:
        if attribute.attr_key == "thread_extent" and isinstance(attribute.value, tirx.IntImm):
            extents[attribute.node.thread_tag] = int(attribute.value)

    tvm_ffi.structural_walk(code.body, (tirx.AttrStmt, note))
    return Kernel(
        symbol=str(code.attrs["global_symbol"]),
        arguments=tuple(origin[p.name] for p in code.params),
        extents=extents,
        tags=tuple(str(tag) for tag in code.attrs.get("tirx.kernel_launch_params", ())),
    )


def _may_restrict(program: Program, name: str, kernel: Kernel) -> bool:
    """Whether the parameters may be ``__restrict__``, unless the function's ``tirx.noalias`` says so.

    No where a state's input and output may be the same memory; nor where blocks exchange data, since
    the compiler may then move a load of another block's result in front of the barrier.
    """
    launches = launches_of(program, name)
    if COOPERATIVE in kernel.tags or any(call.cooperative or call.cluster > 1 for call in launches):
        return False
    given = {names.get(a, a) for names in [c.names for c in launches] or [{}] for a in kernel.arguments}
    ends = [{b.name.removesuffix(end) for b in program.buffers if b.role == f"state{end}" and b.name in given}
            for end in ("_in", "_out")]
    return not ends[0] & ends[1]


def launches_of(program: Program, name: str) -> list[Launch]:
    """The launches of a function."""
    return [call for item in program.calls for call in (item.calls if isinstance(item, Loop) else (item,))
            if isinstance(call, Launch) and call.function == name]


def _source(module: Any, target: Any) -> str:
    """CUDA source of a lowered module, without having TVM compile it."""
    import tvm_ffi

    captured: list[str] = []

    def capture(code: str, *_: Any) -> bytes:
        captured.append(code)
        return b"\x7fELF"  # never loaded: only the source of the module is read

    # With a GPU in the machine TVM compiles at once, and always with --use_fast_math.
    before = tvm_ffi.get_global_func(_COMPILE_HOOK, allow_missing=True)
    tvm_ffi.register_global_func(_COMPILE_HOOK, capture, override=True)
    try:
        built = tvm_ffi.get_global_func("target.build.cuda")(module, target)
        return captured[-1] if captured else str(built.inspect_source("cuda"))
    finally:
        if before is None:
            tvm_ffi.remove_global_func(_COMPILE_HOOK)
        else:
            tvm_ffi.register_global_func(_COMPILE_HOOK, before, override=True)

"""Launches that wait for nothing of each other as one: a kernel whose blocks are theirs, one launch's behind another's.

It is made of CUDA source: a kernel becomes a device function that is given the number of its block. Where a launch has
fewer threads than another one, the others have nothing to do, and its barriers are for its own."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from ecornn.build.host_cuda import SCALARS, Kernel, check_launch
from ecornn.errors import BuildError
from ecornn.program import Call, Concurrent, Launch, Program, mapped

_BLOCK, _BARRIER = "((int)blockIdx.x)", "tvm_builtin_cuda_cta_sync();"
_KERNEL = r'^extern "C" __global__ void __launch_bounds__\([^)]*\) {symbol}\(([^)]*)\)'
_OWN = 'asm volatile("bar.sync %0, %1;" : : "r"(15), "r"({threads}) : "memory");'  # the block's last barrier


@dataclass(frozen=True)
class OneKernel:
    """Some ``launches`` in one. Its parameters are theirs, with the number of the launch before the name."""

    launches: tuple[Launch, ...]

    @property
    def name(self) -> str:
        return "_with_".join(one.function for one in self.launches)

    def launch(self, program: Program) -> Launch:
        names = {f"{n}_{p.name}": one.names.get(p.name, p.name) for n, one in enumerate(self.launches)
                 for p in program.functions[one.function].params if p.name not in SCALARS}
        return Launch(self.name, sum(one.grid for one in self.launches), max(one.threads for one in self.launches),
                      max(one.shared for one in self.launches), names=names)

    def kernel(self, kernels: Mapping[str, Kernel]) -> Kernel:
        """The kernel as the host sees it, of those of the launches. Raises :class:`BuildError` where a launch is not
        what its own is compiled for."""
        for one in self.launches:
            check_launch(one, kernels[one.function])
        arguments = (_argument(n, a) for n, one in enumerate(self.launches) for a in kernels[one.function].arguments)
        extents = {"blockIdx.x": sum(one.grid for one in self.launches),
                   "threadIdx.x": max(one.threads for one in self.launches)}
        return Kernel(f"{self.name}_kernel", (*dict.fromkeys(arguments),), extents)

    def part(self, launch: Launch, kernels: Mapping[str, Kernel]) -> str:
        """The name of the device function for a launch."""
        symbol, whole = kernels[launch.function].symbol, max(one.threads for one in self.launches)
        return f"{symbol}_part" if launch.threads == whole else f"{symbol}_part_of_{whole}"

    def source(self, kernels: Mapping[str, Kernel], types: Mapping[str, list[str]], readable: bool) -> str:
        """The kernel; ``types``: of the parameters of the launches' functions."""
        block, thread = ("block", "thread") if readable else ("(int)blockIdx.x", "(int)threadIdx.x")
        own, first, lines, kinds = self.kernel(kernels), 0, list[str](), dict[str, str]()
        threads = own.extents["threadIdx.x"]
        for n, one in enumerate(self.launches):
            given = [f"p_{_argument(n, a)}" for a in kernels[one.function].arguments]
            kinds.update(zip(given, types[one.function], strict=True))
            when = [f"{thread} < {one.threads}"] if one.threads < threads else []
            if one.wanted:
                when.append(f"({' || '.join(f'p_{_argument(n, p)}' for p in one.wanted)})")
            call = f"{self.part(one, kernels)}({', '.join((*given, f'{block} - {first}' if first else block))});"
            first += one.grid
            lines += [f"  // blocks of {one.function}", f"  if ({block} < {first}) {{",
                      f"    if ({' && '.join(when)}) {call}" if when else f"    {call}", "    return;", "  }"]
        declared = ", ".join(f"{kinds[f'p_{a}']} p_{a}" for a in own.arguments)
        named = ["  int block = (int)blockIdx.x;", *["  int thread = (int)threadIdx.x;"] * any(
            one.threads < threads for one in self.launches)] if readable else []
        return "\n".join((f'extern "C" __global__ void __launch_bounds__({threads}) {own.symbol}({declared}) {{',
                          *named, *lines, "}", ""))


def _argument(number: int, name: str) -> str:
    return name if name in SCALARS else f"{number}_{name}"


def as_launched(program: Program) -> tuple[Program, dict[str, OneKernel]]:
    """The program with one launch in place of those that are one kernel; and these kernels, by their functions."""
    found: dict[str, OneKernel] = {}

    def one(call: Concurrent) -> Call:
        launches = [branch[0] for branch in call.branches if len(branch) == 1 and isinstance(branch[0], Launch)]
        alone = any(one.cooperative or one.early or one.cluster > 1 for one in launches)
        if not call.one_kernel or alone or len(launches) < len(call.branches):
            return call
        made = OneKernel(tuple(launches))
        found.setdefault(made.name, made)
        return made.launch(program)

    entries = {name: replace(entry, calls=tuple(mapped(call, lambda leaf: leaf, together=one) for call in entry.calls))
               for name, entry in program.entries.items()}
    return replace(program, entries=entries), found


def with_one_kernels(source: str, made: Collection[OneKernel], kernels: Mapping[str, Kernel], alone: Collection[str],
                     readable: bool = False) -> str:
    """``source``, which has the ``kernels``, with those ``made`` of them, and without what is no longer launched;
    ``alone``: the functions that are launched by themselves; ``readable``: for people. Raises :class:`BuildError` for
    code that asks for its block in another way than TVM's."""
    types: dict[str, list[str]] = {}
    parts: dict[str, str] = {}
    for one in made:
        for launch in one.launches:
            symbol, name = kernels[launch.function].symbol, one.part(launch, kernels)
            found = re.search(_KERNEL.format(symbol=symbol) + r" \{\n(.*?)^\}\n", source, re.M | re.S)
            if found is None:
                raise BuildError(f"no kernel {symbol!r} in the generated source")
            declared, body = found[1].split(", "), found[2].replace(_BLOCK, "part_block")
            types[launch.function] = [p.rsplit(" ", 1)[0].replace(" __restrict__", "") for p in declared]
            if not name.endswith("_part"):
                body = body.replace(_BARRIER, _OWN.format(threads=launch.threads))
            if re.search("blockIdx|ctaid|gridDim", body):
                raise BuildError(f"kernel {symbol!r} asks for its block in a way that one of several launches cannot")
            head = f"static __device__ __forceinline__ void {name}({found[1]}, const int part_block)"
            parts[name] = f"{head} {{\n{body}}}\n"
    for function in {launch.function for one in made for launch in one.launches} - {*alone}:
        declared_and_defined = _KERNEL.format(symbol=kernels[function].symbol) + r"(;\n| \{\n.*?^\}\n)"
        source = re.sub(declared_and_defined, "", source, flags=re.M | re.S)
    return "".join((source, *parts.values(), *(one.source(kernels, types, readable) for one in made)))

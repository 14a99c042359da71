"""A CUDA module's program for host_cuda.cc, all as numbers: that code is the same for all, so compiled once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ecornn.build.generated import NumberTables
from ecornn.errors import BuildError
from ecornn.program import ENTRIES, Chunks, Concurrent, Entry, Fill, Launch, Loop, Program, Relay, Wave, WaveLayer

FILES = ("host_cuda.cc", "host_cuda.h", "cuda_driver.h", "cuda_streams.h", "ecornn_blob.h", "number_tables.h")
LANES = 32  # kMaxLanes of cuda_streams.h
CHUNK = ("first_step", "all_steps")
ADD, EXISTING = "add", "existing"  # a scalar, and the pointer that says it
SCALARS = ("T", "B", "t", ADD, *CHUNK)  # that kernels may take, in the order of Frame::Scalars of host_cuda.cc
CALLS = (Fill, Launch, Loop, Relay, Concurrent, Wave, Chunks)  # in the order of Call there
PACK = "pack_weights"  # the kernel of pack_weights.cu, where a module has it
COOPERATIVE = "tirx.use_cooperative_launch"
# Launch tags of TVM, and the field of Launch that must agree.
_TAGS = {COOPERATIVE: "cooperative", "tirx.use_dyn_shared_memory": "shared"}
_EXTENTS = {"blockIdx.x": "grid", "threadIdx.x": "threads", "clusterCtaIdx.x": "cluster"}

Words = list[int]
T = TypeVar("T")


@dataclass(frozen=True)
class Kernel:
    """A device function as the host sees it."""

    symbol: str  # its name in the cubin
    arguments: tuple[str, ...]  # buffer names and scalars, in the order of its parameters
    extents: Mapping[str, int]  # constant launch extents by thread tag such as `blockIdx.x`
    tags: tuple[str, ...] = ()  # TVM's launch tags, among them `tirx.use_cooperative_launch`
    image: int = 0  # number of the cubin that has it


def host_program(program: Program, kernels: Mapping[str, Kernel], arch: str) -> bytes:
    """The numbers and strings that host_cuda.h reads. Raises :class:`BuildError` where a call names an unknown function
    or buffer, reads ``t`` outside a loop, or is launched in another shape than the kernel was compiled for."""
    if strangers := [name for name in program.entries if name not in ENTRIES]:
        raise BuildError(f"a CUDA module has the entries {', '.join(ENTRIES)}; not {', '.join(strangers)}")
    writer = _Writer(program, kernels)
    entries = {name: writer.entry(name, entry) for name, entry in program.entries.items()}
    table = NumberTables()
    table.strings(arch)
    table.numbers(len(kernels))
    for name, kernel in kernels.items():
        mine = [launch for launch in writer.launches if launch.function == name]
        table.strings(name, kernel.symbol)
        table.numbers(kernel.image, max((one.shared for one in mine), default=0),
                     max((one.cluster for one in mine), default=1))
    table.numbers(writer.index.get(PACK, -1), len(writer.launches))
    for one in writer.launches:
        table.numbers(one.grid, one.threads, one.shared, one.cooperative, one.cluster, one.early)
    table.strings(*writer.itemsize, counted=True)
    for name in ENTRIES:
        words, takes = entries.get(name, []), program.entries[name].takes if name in entries else ()
        table.numbers(len(takes) if name in entries else -1, takes.index(EXISTING) if EXISTING in takes else -1,
                     len(words), *words)
    return bytes(table.content)


class _Writer:
    """The calls of entries as words: of each its kind, its length with these two, and what host_cuda.cc says."""

    def __init__(self, program: Program, kernels: Mapping[str, Kernel]) -> None:
        self.kernels = kernels
        self.index = {name: i for i, name in enumerate(kernels)}
        self.itemsize = {buffer.name: buffer.itemsize for buffer in program.buffers}
        self.names = {name: i for i, name in enumerate(self.itemsize)}
        self.places: dict[str, int] = {}  # buffer -> its pointer's number, in the entry that is being written
        self.launches: list[Launch] = []  # by the numbers of their shapes

    def entry(self, name: str, entry: Entry) -> Words:
        if strangers := [b for b in entry.takes if b not in self.itemsize]:
            raise BuildError(f"entry {name!r}: the program has no buffer {', '.join(strangers)}")
        self.places = {buffer: i for i, buffer in enumerate(entry.takes)}
        return self.calls(entry.calls)

    def place(self, buffer: str, user: str) -> int:
        """The number of a buffer's pointer; ``user`` is for messages."""
        if buffer not in self.places:
            raise BuildError(f"{user} {buffer!r}, which is no buffer that the entry takes")
        return self.places[buffer]

    def calls(self, calls: Iterable[object], *, loop: bool = False, chunks: bool = False) -> Words:
        return [word for call in calls for word in self.call(call, loop, chunks)]

    def call(self, call: object, loop: bool, chunks: bool) -> Words:
        """One call of the program."""
        match call:
            case Fill():
                place, size = self.place(call.buffer, "Fill of"), self.itemsize[call.buffer]
                if not 0 <= call.byte <= 255:
                    raise BuildError(f"Fill of {call.buffer!r}: {call.byte} is no byte")
                words = [place, call.byte, call.extent.fixed * size, call.extent.per_step * size,  # a memset's bytes
                         self.names[call.buffer]]
            case Launch():
                words = self.launch(call, loop, chunks)
            case Loop():
                words = self.calls(call.calls, loop=True, chunks=chunks)
            case Relay():
                places = [self.place(name, "Relay of") for name in (call.before, call.after, call.given, call.written)]
                words = [*places, call.row * self.itemsize[call.given], self.names[call.given],
                         *self.calls(call.calls, loop=True, chunks=chunks)]
            case Concurrent():
                words = [len(call.branches),
                         *self.together(call.branches, lambda branch: self.calls(branch, chunks=chunks))]
            case Wave():
                if min(call.chunks, call.least) < 1:
                    raise BuildError(f"a wave of {call.chunks} chunks, of {call.least} steps at least")
                words = [call.chunks, call.least, *self.together(
                    call.layers, lambda layer: [*self.changing(layer), *self.calls(layer.calls, chunks=chunks)])]
            case Chunks():
                if call.steps < 1:
                    raise BuildError(f"chunks of {call.steps} steps")
                places = [self.place(name, user) for pair in call.in_place
                          for name, user in zip(pair, ("in place", "rows of"), strict=True)]
                words = [call.steps, call.reverse, *self.changing(call), len(call.in_place), *places,
                         *self.calls(call.calls, chunks=True)]
            case _:
                raise BuildError(f"a CUDA program cannot carry out {call}")
        return [CALLS.index(type(call)), 2 + len(words), *words]

    def together(self, branches: Sequence[T], words: Callable[[T], Words]) -> Words:
        """The ``words`` of branches that run at the same time, each with its length before it."""
        if not 2 <= len(branches) <= LANES:
            raise BuildError(f"{len(branches)} branches at the same time; from 2 to {LANES} are possible")
        return [word for branch in map(words, branches) for word in (len(branch), *branch)]

    def changing(self, call: WaveLayer | Chunks) -> Words:
        """The pointers that a chunk changes: those of buffers with rows of time, with the bytes of a row for each row
        of the batch, and those of states, with the ones that later chunks read in their place."""
        rows = [word for n, size in call.rows.items() for word in (self.place(n, "rows of"), size * self.itemsize[n])]
        states = [self.place(name, "state") for pair in call.states for name in pair]
        return [len(call.rows), *rows, len(call.states), *states]

    def launch(self, launch: Launch, loop: bool, chunks: bool) -> Words:
        """Checks a launch and writes where its arguments come from."""
        kernel = self.kernels.get(launch.function)
        if kernel is None:
            raise BuildError(f"a launch of {launch.function!r}, which is no function of the program")
        check_launch(launch, kernel)
        if "t" in kernel.arguments and not loop:
            raise BuildError(f"function {launch.function!r} reads t, but is launched outside a loop")
        if not chunks and (only := [a for a in kernel.arguments if a in CHUNK]):
            raise BuildError(f"function {launch.function!r} reads {only[0]}, but is launched outside chunks")
        if ADD in kernel.arguments and EXISTING not in self.places:
            raise BuildError(f"function {launch.function!r} reads {ADD}, but its entry takes no {EXISTING}")
        names, user = [launch.names.get(a, a) for a in kernel.arguments], f"a launch of {launch.function!r} that reads"
        given = [-1 - SCALARS.index(n) if n in SCALARS else self.place(n, user) for n in names]
        wanted = [self.place(launch.names.get(p, p), "a launch that makes") for p in launch.wanted]
        self.launches.append(launch)
        return [self.index[launch.function], len(self.launches) - 1, len(wanted), *wanted, len(given), *given]


def check_launch(launch: Launch, kernel: Kernel) -> None:
    """Raises :class:`BuildError` where a launch is not what the kernel was compiled for."""
    def refuse(reason: str) -> None:
        raise BuildError(f"launch of {launch.function!r}: {reason}")

    if min(launch.grid, launch.threads, launch.cluster) < 1 or launch.shared < 0:
        refuse(f"grid, threads and cluster must be positive, not {launch}")
    if launch.grid % launch.cluster:
        refuse(f"a grid of {launch.grid} blocks is no whole number of clusters of {launch.cluster}")
    for tag, extent in kernel.extents.items():
        declared = getattr(launch, _EXTENTS[tag]) if tag in _EXTENTS else 1
        if declared != extent:
            refuse(f"{_EXTENTS.get(tag, tag)}={declared}, but the kernel has {extent}")
    for tag, field in _TAGS.items():
        if tag in kernel.tags and not getattr(launch, field):
            refuse(f"the kernel needs {field}")

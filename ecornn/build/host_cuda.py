"""Generates the host code of a CUDA module: tables of kernels and launches, and of each entry the calls in order. The
rest of it, host_cuda.cc, is the same for all modules, so that it is compiled once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from ecornn.errors import BuildError
from ecornn.program import Chunks, Concurrent, Entry, Fill, Launch, Loop, Program, Relay, Wave

FILES = ("host_cuda.cc", "host_cuda.h", "cuda_driver.h", "cuda_streams.h")  # the same for all programs
LANES = 32  # kMaxLanes of cuda_streams.h
CHUNK = ("first_step", "all_steps")
ADD, EXISTING = "add", "existing"  # a scalar, and the pointer that says it
SCALARS = ("T", "B", "t", ADD, *CHUNK)  # that kernels may take
PACK = "pack_weights"  # the kernel of pack_weights.cu, where a module has it
COOPERATIVE = "tirx.use_cooperative_launch"
# Launch tags of TVM, and the field of Launch that must agree.
_TAGS = {COOPERATIVE: "cooperative", "tirx.use_dyn_shared_memory": "shared"}
_EXTENTS = {"blockIdx.x": "grid", "threadIdx.x": "threads", "clusterCtaIdx.x": "cluster"}


@dataclass(frozen=True)
class Kernel:
    """A device function as the host sees it.

    Attributes
    ----------
    symbol : its name in the cubin
    arguments : buffer names and scalars, in the order of its parameters
    extents : constant launch extents by thread tag such as ``blockIdx.x``
    tags : TVM's launch tags, among them ``tirx.use_cooperative_launch``
    image : number of the cubin that has it
    """

    symbol: str
    arguments: tuple[str, ...]
    extents: Mapping[str, int]
    tags: tuple[str, ...] = ()
    image: int = 0


def host_sources(program: Program, kernels: Mapping[str, Kernel], arch: str) -> dict[str, str]:
    """File name -> text of the host code, for :func:`ecornn.build.link.link`.

    Raises :class:`BuildError` where a call names an unknown function or a buffer that its entry does not take, reads
    ``t`` outside a loop, or is launched in another shape than the kernel was compiled for.
    """
    writer = _Writer(program, kernels)
    for name, entry in program.entries.items():
        writer.entry(name, entry)
    if PACK in kernels:
        writer.functions += [f"ECORNN_PACK({writer.index[PACK]})", ""]
    files = resources.files("ecornn.build")
    return {"program.cc": writer.text(arch)} | {name: files.joinpath(name).read_text() for name in FILES}


def image(number: int) -> str:
    """Symbol of cubin ``number``."""
    return f"ecornn_cubin{number}"


class _Writer:
    """Collects the launches' shapes while it writes the functions that make the calls."""

    def __init__(self, program: Program, kernels: Mapping[str, Kernel]) -> None:
        self.kernels = kernels
        self.index = {name: i for i, name in enumerate(kernels)}
        self.itemsize = {buffer.name: buffer.itemsize for buffer in program.buffers}
        self.places: dict[str, int] = {}  # buffer -> its pointer's number, in the entry that is being written
        self.most = max((len(entry.takes) for entry in program.entries.values()), default=0)
        self.launches: list[Launch] = []
        self.lines: list[str] = []  # of the function that is being written
        self.functions: list[str] = []  # lines of those that are complete
        self.sections = 0
        self.in_chunks = False

    def entry(self, name: str, entry: Entry) -> None:
        """Writes an exported function, and before it those that it needs."""
        if strangers := [b for b in entry.takes if b not in self.itemsize]:
            raise BuildError(f"entry {name!r}: the program has no buffer {', '.join(strangers)}")
        self.places = {buffer: i for i, buffer in enumerate(entry.takes)}
        self.function(f"{name}_calls", entry.calls)
        self.functions += [f"ECORNN_ENTRY({name}, {len(entry.takes)})", ""]

    def place(self, buffer: str, user: str) -> int:
        """The number of a buffer's pointer; ``user`` is for messages."""
        if buffer not in self.places:
            raise BuildError(f"{user} {buffer!r}, which is no buffer that the entry takes")
        return self.places[buffer]

    def function(self, name: str, calls: Iterable[object]) -> None:
        """Writes the function that makes ``calls``, and before it those that it needs."""
        outer, self.lines = self.lines, []
        for call in calls:
            self.call(call)
        self.functions += [
            f"static int {name}(const State& state, int32_t T, int32_t B, Stream stream, Pointer* p) {{",
            "  (void)state, (void)T, (void)B, (void)stream, (void)p;", *self.added("  "),
            *self.lines, "  return 0;", "}", ""]
        self.lines = outer

    def added(self, indent: str) -> list[str]:
        """The scalar ``add``, in an entry that has it."""
        if EXISTING not in self.places:
            return []
        return [f"{indent}int32_t {ADD} = p[{self.places[EXISTING]}] != 0;", f"{indent}(void){ADD};"]

    def section(self, calls: Iterable[object]) -> str:
        """The name of a new function that makes ``calls``."""
        self.sections += 1
        name = f"section{self.sections}"
        self.function(name, calls)
        return name

    def together(self, branches: Sequence[Iterable[object]]) -> list[str]:
        """The names of new functions for branches that run at the same time."""
        if not 2 <= len(branches) <= LANES:
            raise BuildError(f"{len(branches)} branches at the same time; from 2 to {LANES} are possible")
        return [self.section(branch) for branch in branches]

    def call(self, call: object) -> None:
        """Writes one call of the program."""
        if isinstance(call, Fill):
            self.fill(call)
        elif isinstance(call, Launch):
            self.prepare(call, "  ", in_loop=False)
            self.lines.append(f"  {self.launch(len(self.launches) - 1)}")
        elif isinstance(call, Loop):
            self.loop(call)
        elif isinstance(call, Relay):
            self.relay(call)
        elif isinstance(call, Concurrent):
            names = self.together(call.branches)
            self.lines += ["  {", f"    const Section sections[] = {{{', '.join(names)}}};",
                           f"    ECORNN_TRY(beside(state, {len(names)}, sections, T, B, stream, p));", "  }"]
        elif isinstance(call, Wave):
            self.wave(call)
        elif isinstance(call, Chunks):
            self.chunks(call)
        else:
            raise BuildError(f"a CUDA program cannot carry out {call}")

    def wave(self, call: Wave) -> None:
        """Writes the table of a wave's layers and its call."""
        names = self.together([layer.calls for layer in call.layers])
        if min(call.chunks, call.least) < 1:
            raise BuildError(f"a wave of {call.chunks} chunks, of {call.least} steps at least")
        self.lines.append("  {")
        rows = []
        for i, (name, layer) in enumerate(zip(names, call.layers, strict=True)):
            self.lines += self.changing(i, layer.rows, layer.states)
            rows.append(f"{{{name}, moving{i}, handed{i}}}")
        self.lines += [
            f"    static const WaveLayer layers[] = {{{', '.join(rows)}}};",
            f"    ECORNN_TRY(wave(state, {len(rows)}, layers, {call.chunks}, {call.least}, T, B, stream, p));", "  }"]

    def chunks(self, call: Chunks) -> None:
        """Writes a loop over chunks, in which ``T`` and ``p`` are the chunk's."""
        if call.steps < 1:
            raise BuildError(f"chunks of {call.steps} steps")
        self.lines += ["  {", *self.changing("", call.rows, call.states), "    int32_t all_steps = T;",
                       f"    const int32_t last = (T - 1) / {call.steps};", "    Pointer* const all = p;",
                       "    for (int32_t i = 0; i <= last; ++i) {",
                       f"    int32_t first_step = {'(last - i)' if call.reverse else 'i'} * {call.steps};",
                       "    const int32_t left = all_steps - first_step;",
                       f"    int32_t T = left < {call.steps} ? left : {call.steps};",
                       f"    Pointer p[{max(1, self.most)}];", "    (void)T;",
                       "    chunk_pointers(p, all, moving, handed, first_step, B, i > 0);"]
        for workspace, rows in ((self.place(a, "in place"), self.place(b, "rows of")) for a, b in call.in_place):
            self.lines.append(f"    if (all[{workspace}] == all[{rows}]) p[{workspace}] = p[{rows}];")
        if EXISTING in self.places:  # by all chunks but the first
            self.lines += [f"    if (i > 0) p[{self.places[EXISTING]}] = 1;", *self.added("    ")]
        self.in_chunks = True
        for one in call.calls:
            self.call(one)
        self.in_chunks = False
        self.lines += ["    }", "  }"]

    def changing(self, number: object, rows: Mapping[str, int], states: Iterable[tuple[str, str]]) -> list[str]:
        """The tables of the pointers that a chunk changes."""
        moving = [f"{{{self.place(n, 'rows of')}, {size * self.itemsize[n]}}}" for n, size in rows.items()]
        handed = [f"{{{self.place(first, 'state')}, {self.place(then, 'state')}}}" for first, then in states]
        return [f"    static const Moving moving{number}[] = {{{', '.join([*moving, '{-1, 0}'])}}};",
                f"    static const Handed handed{number}[] = {{{', '.join([*handed, '{-1, 0}'])}}};"]

    def loop(self, call: Loop | Relay, between: str = "") -> None:
        """Writes the launches of all steps, and ``between`` any two. Arguments are prepared once: only the value of t,
        and where their pointers point, changes from step to step."""
        self.lines += ["  {", "    int32_t t = 0;", "    (void)t;"]
        first = len(self.launches)
        for launch in call.calls:
            self.prepare(launch, "    ", in_loop=True)
        self.lines.append("    for (; t < T; ++t) {")
        self.lines += [f"      {self.launch(i)}" for i in range(first, len(self.launches))]
        self.lines += [f"      {between}"] * bool(between) + ["    }", "  }"]

    def relay(self, call: Relay) -> None:
        """Writes a loop between whose steps two workspaces change places; the first step reads the caller's memory."""
        names = (call.before, call.after, call.given, call.written)
        before, after, given, written = (self.place(name, "Relay of") for name in names)
        bytes_ = f"INT64_C({call.row * self.itemsize[call.given]}) * B"
        self.lines += [
            "  {", f"    const Pointer one = p[{before}], other = p[{after}];",
            f'    ECORNN_TRY(taken(&p[{before}], p[{given}], p[{written}], {bytes_}, T, stream, "{call.given}"));']
        self.loop(call, f"p[{before}] = p[{after}], p[{after}] = p[{after}] == other ? one : other;")
        self.lines += [f"    p[{before}] = one, p[{after}] = other;", "  }"]

    def fill(self, call: Fill) -> None:
        """Writes a memset, whose size is known only with T."""
        place = self.place(call.buffer, "Fill of")
        if not 0 <= call.byte <= 255:
            raise BuildError(f"Fill of {call.buffer!r}: {call.byte} is no byte")
        size = self.itemsize[call.buffer]
        bytes_ = f"INT64_C({call.extent.fixed * size}) + INT64_C({call.extent.per_step * size}) * T"
        self.lines.append(f"  ECORNN_TRY(fill(p[{place}], {call.byte}, {bytes_}, "
                          f'stream, "{call.buffer}"));')

    def prepare(self, launch: Launch, indent: str, in_loop: bool) -> None:
        """Checks a launch and writes its array of arguments."""
        kernel = self.kernels.get(launch.function)
        if kernel is None:
            raise BuildError(f"a launch of {launch.function!r}, which is no function of the program")
        check_launch(launch, kernel)
        if "t" in kernel.arguments and not in_loop:
            raise BuildError(f"function {launch.function!r} reads t, but is launched outside a loop")
        if not self.in_chunks and (only := [a for a in kernel.arguments if a in CHUNK]):
            raise BuildError(f"function {launch.function!r} reads {only[0]}, but is launched outside chunks")
        if ADD in kernel.arguments and EXISTING not in self.places:
            raise BuildError(f"function {launch.function!r} reads {ADD}, but its entry takes no {EXISTING}")
        names = [launch.names.get(a, a) for a in kernel.arguments]
        user = f"a launch of {launch.function!r} that reads"
        values = [f"&{n}" if n in SCALARS else f"&p[{self.place(n, user)}]" for n in names]
        number = len(self.launches)
        self.launches.append(launch)
        self.lines.append(f"{indent}void* arguments{number}[] = {{{', '.join([*values, 'nullptr'])}}};")

    def launch(self, number: int) -> str:
        """The statement of launch ``number``."""
        launch = self.launches[number]
        places = [self.place(launch.names.get(p, p), "a launch that makes") for p in launch.wanted]
        left_out = f"if ({' || '.join(f'p[{n}]' for n in places)}) " if places else ""
        index = self.index[launch.function]
        return f"{left_out}ECORNN_TRY(launch(state, {index}, kShape{number}, stream, arguments{number}));"

    def text(self, arch: str) -> str:
        """``program.cc``: the kernels, the shapes of all launches, and the entries."""
        rows, images = [], [image(n) for n in range(1 + max((k.image for k in self.kernels.values()), default=0))]
        for name, kernel in self.kernels.items():
            mine = [launch for launch in self.launches if launch.function == name]
            shared = max((launch.shared for launch in mine), default=0)
            cluster = max((launch.cluster for launch in mine), default=1)
            rows.append(f'    {{"{name}", "{kernel.symbol}", {kernel.image}, {shared}, {cluster}}},')
        lines = [
            '#include "host_cuda.h"', "", *(f'extern "C" const unsigned char {name}[];' for name in images), "",
            "namespace ecornn {", "", f'const char kArch[] = "{arch}";',
            f"const int kMostPointers = {self.most};", f"const int kKernelCount = {len(self.kernels)};",
            f"const int kImageCount = {len(images)};",
            f"const unsigned char* const kImages[] = {{{', '.join(images)}}};",
            "const Kernel kKernels[] = {", *rows, "};",
            *(shape(i, launch) for i, launch in enumerate(self.launches)), "", *self.functions,
            "}  // namespace ecornn", ""]
        return "\n".join(lines)


def shape(number: int, launch: Launch) -> str:
    """The constant that describes one launch."""
    attributes = ["{kLaunchCooperative, 0, {1}}"] if launch.cooperative else []
    if launch.cluster > 1:
        attributes.append(f"{{kLaunchCluster, 0, {{{launch.cluster}, 1, 1}}}}")
    if launch.early:
        attributes.append("{kLaunchEarly, 0, {1}}")
    return (f"static const Shape kShape{number} = {{{launch.grid}, {launch.threads}, {launch.shared}, "
            f"{len(attributes)}, {{{', '.join(attributes)}}}}};  // {launch.function}")


def check_launch(launch: Launch, kernel: Kernel) -> None:
    """Raises :class:`BuildError` where a launch does not fit the kernel as it was compiled."""
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

"""Forward that keeps what backward reads: states after each step, beside y, which has the output state."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import structs

from ecornn.analysis.adjoint import adjoint
from ecornn.analysis.kept import kept
from ecornn.program import Buffer, Extent
from ecornn.schedules.base import Task
from ecornn.schedules.builder import T, TirBuffer

MOST = 1 << 30  # bytes of gates that are kept where nobody says what is


def kept_states(task: Task) -> tuple[str, ...]:
    """The states that the kernels of ``forward`` store besides y, of a task that trains."""
    keep, graph = task.traversal.keep, task.graph
    assert keep is not None
    made = adjoint(graph, task.workload.hidden, starts_anew=task.traversal.resets)
    return tuple(name for name in kept(made, keep).states if name != graph.output)


def usual_keep(task: Task, count: int) -> str:
    """What a CPU keeps of a layer of ``count`` sequences, of which one is a task that trains: what makes backward
    faster, unless that is large at the expected T."""
    work = task.workload
    made = adjoint(task.graph, work.hidden, starts_anew=task.traversal.resets)
    size = count * kept(made, "gates").units * work.itemsize * work.seq * work.batch * work.hidden
    return "gates" if size <= MOST else "states"


def kept_buffers(states: Iterable[str], batch: int, hidden: int, dtype: str) -> list[Buffer]:
    """Where they are, ``<state>_kept`` (T, B, H) of the layer's type: at a step's place in x's time, zero where a row
    takes no part."""
    return [structs.replace(Buffer.of("state_kept", dtype, name), extent=Extent(0, batch * hidden)) for name in states]


def value_buffers(count: int, batch: int, hidden: int, dtype: str) -> list[Buffer]:
    """Where values other than states are, ``value<number>_kept``, in the same way."""
    extent = Extent(0, batch * hidden)
    return [structs.replace(Buffer.of("value_kept", dtype, str(n)), name=f"value{n}_kept", extent=extent)
            for n in range(count)]


def kept_arguments(states: Iterable[str], dtype: str) -> dict[str, TirBuffer]:
    """The parameters of a kernel that stores them."""
    return {f"{name}_kept": T.arg(f"{name}_kept", T.buffer((T.int64(1 << 40),), dtype)) for name in states}


def keeping(kernel: str, states: Iterable[str]) -> str:
    """The name of a kernel, another one where it stores any."""
    return f"{kernel}_keeping" if tuple(states) else kernel

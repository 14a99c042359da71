"""Blocks of a cluster, which read and write each other's shared memory (PTX: barrier.cluster, st.async); and such as
begin before the kernel before has ended: programmatic dependent launch (griddepcontrol). sm_90."""

from __future__ import annotations

from collections.abc import Sequence

from ecornn.schedules.builder import Expr, T
from ecornn.schedules.cuda.isa.functions import run


def cluster_arrive() -> None:
    """Arrives at the barrier of all threads of the cluster, and releases what the thread did before."""
    T.evaluate(T.ptx["barrier.cluster.arrive.release.aligned"]())


def cluster_wait() -> None:
    """Waits until all threads of the cluster have arrived, and sees what they did before."""
    T.evaluate(T.ptx["barrier.cluster.wait.acquire.aligned"]())


def cluster_send(to: Expr, barrier: Expr, rank: Expr, words: Sequence[Expr]) -> None:
    """Writes one, two or four words of 32 bits to a block of the cluster, whose mbarrier counts their bytes. ``to`` and
    ``barrier`` are addresses in this block's shared memory, of which that block has the same."""
    count = len(words)
    if count == 1:
        name, names, vector, places = "ecornn_send", ["word"], "", "%1"
    else:
        name, names, vector = f"ecornn_send_sums{count}", [*"abcd"[:count]], f".v{count}"
        places = "{" + ", ".join(f"%{k + 1}" for k in range(count)) + "}"
    values = ", ".join(f'"r"({n})' for n in names)
    run(f"void {name}(unsigned to, unsigned barrier, unsigned rank, {', '.join(f'unsigned {n}' for n in names)})", f"""
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(to), "r"(rank));
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier) : "r"(barrier), "r"(rank));
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes{vector}.b32 [%0], {places}, [%{count + 1}];"
                     : : "r"(to), {values}, "r"(barrier) : "memory");""", to, barrier, rank, *words)


def launch_dependents() -> None:
    """Lets the next kernel begin once all blocks have come here or ended."""
    T.evaluate(T.ptx["griddepcontrol.launch_dependents"]())


def wait_on_earlier() -> None:
    """Waits until the kernels before have ended, and sees what they wrote."""
    T.evaluate(T.ptx["griddepcontrol.wait"]())

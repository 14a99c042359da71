"""Barriers in shared memory (mbarrier): 8 bytes each, in phases; a phase ends with its last arrival or byte."""

from __future__ import annotations

from ecornn.schedules.builder import Expr, T

_TEST = """
__device__ __forceinline__ unsigned ecornn_mbarrier_test(unsigned barrier, unsigned parity) {
  unsigned done;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done;
}"""
_WAIT = """
__device__ __forceinline__ void ecornn_mbarrier_wait{name}(unsigned barrier, unsigned parity) {{
  asm volatile("{{ .reg .pred done; again: mbarrier.try_wait.parity{scope}.shared::cta.b64 done, [%0], %1; \
@!done bra again; }}"
               : : "r"(barrier), "r"(parity) : "memory");
}}"""
_SEND = """
__device__ __forceinline__ void ecornn_send(unsigned to, unsigned barrier, unsigned rank, unsigned word) {
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(to), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier) : "r"(barrier), "r"(rank));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
               : : "r"(to), "r"(word), "r"(barrier) : "memory");
}"""


def mbarrier_init(barrier: Expr, arrivals: Expr) -> None:
    """Makes an mbarrier of 8 bytes of shared memory (a pointer), each of whose phases has so many arrivals."""
    T.evaluate(T.ptx["mbarrier.init.shared::cta.b64"](barrier, T.uint32(arrivals)))


def mbarrier_arrive(barrier: Expr) -> None:
    """One arrival, which releases what this thread did before."""
    T.evaluate(T.ptx["mbarrier.arrive.shared::cta.b64"](barrier))


def mbarrier_wait(barrier: Expr, parity: Expr, cluster: bool = False) -> None:
    """Until the phase of this parity of the mbarrier (a pointer into shared memory) is complete.

    Then what the block did before its arrivals can be seen, or with ``cluster`` what any block of the cluster did.
    """
    name, scope = ("_cluster", ".acquire.cluster") if cluster else ("", "")
    T.evaluate(T.cuda.func_call(f"ecornn_mbarrier_wait{name}", T.cuda.cvta_generic_to_shared(barrier), parity,
                                source_code=_WAIT.format(name=name, scope=scope)))


def mbarrier_test(barrier: Expr, parity: Expr) -> Expr:
    """Whether the phase of this parity is complete (uint32), without waiting."""
    return T.cuda.func_call("ecornn_mbarrier_test", T.cuda.cvta_generic_to_shared(barrier), parity,
                            source_code=_TEST, return_type="uint32")


def cluster_send(to: Expr, barrier: Expr, rank: int, word: Expr) -> None:
    """Writes a word of 32 bits to a block of the cluster, whose mbarrier counts its 4 bytes; ``to`` and ``barrier`` are
    addresses in this block's shared memory, of which that block has the same."""
    T.evaluate(T.cuda.func_call("ecornn_send", to, barrier, T.uint32(rank), word, source_code=_SEND))

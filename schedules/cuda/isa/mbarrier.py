"""Barriers in shared memory (mbarrier): 8 bytes each, in phases; a phase ends with its last arrival or byte."""

from __future__ import annotations

from ecornn.schedules.builder import Expr, T
from ecornn.schedules.cuda.isa.functions import call, run
from ecornn.schedules.cuda.isa.memory import shared_address


def mbarrier_init(barrier: Expr, arrivals: Expr) -> None:
    """Makes an mbarrier of 8 bytes of shared memory (a pointer), each of whose phases has ``arrivals`` arrivals."""
    T.evaluate(T.ptx["mbarrier.init.shared::cta.b64"](barrier, T.uint32(arrivals)))


def mbarrier_arrive(barrier: Expr) -> None:
    """Arrives once, and so releases what this thread did before."""
    T.evaluate(T.ptx["mbarrier.arrive.shared::cta.b64"](barrier))


def mbarrier_expect(barrier: Expr, size: int) -> None:
    """Arrives once, in a phase that lasts until ``size`` bytes have come as well; some of them may be there before."""
    T.evaluate(T.ptx["mbarrier.arrive.expect_tx.shared::cta.b64"](barrier, T.uint32(size)))


def fence_mbarrier_init() -> None:
    """Lets copy engines and other blocks of the cluster see the barriers that this thread has made."""
    T.evaluate(T.ptx["fence.mbarrier_init.release.cluster"]())


def mbarrier_wait(barrier: Expr, parity: Expr, cluster: bool = False) -> None:
    """Waits until the phase of this parity of the mbarrier (a pointer into shared memory) is complete.
    Then what the block did before its arrivals can be seen, or with ``cluster`` what any block of the cluster did."""
    name, scope = ("_cluster", ".acquire.cluster") if cluster else ("", "")
    run(f"void ecornn_mbarrier_wait{name}(unsigned barrier, unsigned parity)", f"""
        asm volatile("{{ .reg .pred done; again: mbarrier.try_wait.parity{scope}.shared::cta.b64 done, [%0], %1; \
@!done bra again; }}"
                     : : "r"(barrier), "r"(parity) : "memory");""", shared_address(barrier), parity)


def mbarrier_test(barrier: Expr, parity: Expr) -> Expr:
    """1 if the phase of this parity is complete, else 0 (uint32); does not wait."""
    return call("unsigned ecornn_mbarrier_test(unsigned barrier, unsigned parity)", """
        unsigned done;
        asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
        return done;""", shared_address(barrier), parity)

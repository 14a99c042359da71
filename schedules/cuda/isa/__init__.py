"""The only door to PTX and CUDA intrinsics: one function an instruction, with what it means and where it exists.

Instructions without a word on it exist from sm_80 on. Names are those of CUTLASS where it has one. Source: the PTX ISA,
9.0, whose sections the comments name. ``tensor_core.py`` has mma, ldmatrix and their operands, also of 8-bit integers,
``functions.py`` device functions in CUDA C, as some of these are, and scalar operators in few instructions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ecornn.schedules.builder import Expr, T
from ecornn.schedules.cuda.isa.functions import call, run

_BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
_VECTOR = {1: "", 2: "v2.", 4: "v4."}
_WGMMA = {"float16": "k16.f32.f16.f16", "bfloat16": "k16.f32.bf16.bf16", "tf32": "k8.f32.tf32.tf32"}


def _emits(instruction: str) -> Callable[..., None]:
    """The function that emits an instruction, of the operands that it is called with."""
    def emit(*operands: Expr | int) -> None:
        T.evaluate(T.ptx[instruction](*operands))

    return emit


fence_gpu = _emits("fence.acq_rel.gpu")  # orders what this thread did before and after it, for all threads of the GPU
# Orders a thread's accesses to shared or global memory and those of copy engines and wgmma, that go another way; sm_90
fence_async_shared, fence_async_global = _emits("fence.proxy.async.shared::cta"), _emits("fence.proxy.async.global")
prefetch_l1 = _emits("prefetch.global.L1")  # asks for a line of global memory, and does not wait

cp_async_commit = _emits("cp.async.commit_group")  # makes a group of the thread's copies since the last one
cp_async_wait = _emits("cp.async.wait_group")  # until at most so many of the thread's last groups are under way
cp_async_wait_all = _emits("cp.async.wait_all")  # no thread may leave before its copies have landed
# Arrives at an mbarrier once the thread's copies so far have landed: one of the arrivals that it was made for.
cp_async_mbarrier_arrive = _emits("cp.async.mbarrier.arrive.noinc.shared::cta.b64")

# Makes an mbarrier of 8 bytes of shared memory (a pointer), each of whose phases has so many arrivals (uint32). A phase
# ends with its last arrival or byte.
mbarrier_init = _emits("mbarrier.init.shared::cta.b64")
mbarrier_arrive = _emits("mbarrier.arrive.shared::cta.b64")  # once, and so releases what this thread did before
# Arrives in a phase that lasts until so many bytes (uint32) have come as well; some of them may be there before.
mbarrier_expect = _emits("mbarrier.arrive.expect_tx.shared::cta.b64")
# Lets copy engines and other blocks of the cluster see the barriers that this thread has made.
fence_mbarrier_init = _emits("fence.mbarrier_init.release.cluster")

cluster_arrive = _emits("barrier.cluster.arrive.release.aligned")  # of all threads; releases what the thread did before
cluster_wait = _emits("barrier.cluster.wait.acquire.aligned")  # for these, and sees what they did before
launch_dependents = _emits("griddepcontrol.launch_dependents")  # the next kernel begins when all blocks came or ended
wait_on_earlier = _emits("griddepcontrol.wait")  # until the kernels before have ended, and sees what they wrote

# Gives back all but so many registers of a thread, or waits for and takes them; all of a warpgroup's threads do. sm_90a
register_dealloc = _emits("setmaxnreg.dec.sync.aligned.u32")
register_alloc = _emits("setmaxnreg.inc.sync.aligned.u32")

wgmma_fence = _emits("wgmma.fence.sync.aligned")  # between a use of registers and shared memory and products
wgmma_commit = _emits("wgmma.commit_group.sync.aligned")  # makes a group of the products since the last one
# Waits until at most so many of the last groups are under way. Accumulators may not be read behind it.
wgmma_wait_pending = _emits("wgmma.wait_group.sync.aligned")


# Loads and stores (PTX: data movement; memory consistency model). Vectors are aligned to their size. A ``relaxed``
# access, one of several threads of the GPU to the same memory, sees what any of them wrote, at some time.

def _load(where: str, into: Sequence[Expr], address: Expr, kind: str = "b32") -> None:
    """Loads one, two or four neighbouring values into elements of local buffers."""
    T.evaluate(T.ptx[f"ld.{where}.{_VECTOR[len(into)]}{kind}"](*into, address))


def _store(where: str, address: Expr, values: Sequence[Expr], kind: str = "b32") -> None:
    """Stores one, two or four neighbouring values."""
    T.evaluate(T.ptx[f"st.{where}.{_VECTOR[len(values)]}{kind}"](address, *values))


ld_global, ld_shared = partial(_load, "global"), partial(_load, "shared")
st_global, st_shared = partial(_store, "global"), partial(_store, "shared")
# Words that other blocks write meanwhile, as they are by now
ld_relaxed = partial(_load, "relaxed.gpu.global")
# Words that other blocks read meanwhile; 16 bytes arrive as one
st_relaxed = partial(_store, "relaxed.gpu.global")


def ld_acquire(into: Expr, address: Expr) -> None:
    """Loads a counter (uint32): what any thread released by adding to it is seen by later accesses."""
    _load("acquire.gpu.global", [into], address, "u32")


def red_release(address: Expr) -> None:
    """Adds one to a counter (uint32) of global memory, behind all that this thread wrote or has seen."""
    T.evaluate(T.ptx["red.release.gpu.global.add.u32"](address, T.uint32(1)))


def l2_policy(into: Expr, priority: str) -> None:
    """Makes a cache policy (uint64) for :func:`bulk_copy`; ``priority``: ``evict_first`` or ``evict_last``."""
    T.evaluate(T.ptx[f"createpolicy.fractional.L2::{priority}.b64"](into))


def shared_address(pointer: Expr) -> Expr:
    """The address (uint32) of a pointer into shared memory, in that memory's own window."""
    return T.cuda.cvta_generic_to_shared(pointer)


# Copies from global to shared memory that a thread does not wait for (PTX: asynchronous copy).

def cp_async(to: Expr, source: Expr, size: int, present: Expr | None = None, *, l1: bool | None = None) -> None:
    """Copies 4, 8 or 16 bytes, of which ``present`` are read and the others are zeros. ``l1``: whether the line stays
    in L1 as well, which it must where fewer than 16 are copied, and does not otherwise."""
    cached, filled = "ca" if (size < 16 if l1 is None else l1) else "cg", () if present is None else (present,)
    T.evaluate(T.ptx[f"cp.async.{cached}.shared.global"](to, source, size, *filled))


def bulk_copy(to: Expr, source: Expr, size: Expr, barrier: Expr, *, policy: Expr | None = None,
              ranks: Expr | None = None) -> None:
    """Copies ``size`` bytes (uint32, a multiple of 16), which the mbarrier counts. One thread asks for all of them.
    sm_90. ``policy``: of L2, of :func:`l2_policy`. ``ranks``: a bit (uint16) for each block of the cluster to
    which they are copied, to the same place and barrier of each."""
    if policy is not None:
        T.evaluate(T.ptx[f"{_BULK}.L2::cache_hint"](to, source, size, barrier, policy))
    elif ranks is not None:
        T.evaluate(T.ptx[f"{_BULK}.multicast::cluster"](to, source, size, barrier, ranks))
    else:
        T.evaluate(T.ptx[_BULK](to, source, size, barrier))


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


def cluster_send(to: Expr, barrier: Expr, rank: Expr, words: Sequence[Expr]) -> None:
    """Writes one, two or four words of 32 bits to a block of the cluster, whose mbarrier counts their bytes (PTX:
    st.async; sm_90). ``to``, ``barrier``: addresses in this block's shared memory, of which that block has the same."""
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


# Threads of a block: barriers, shuffles, votes, special registers (PTX: bar, shfl, vote; CUDA C: warp functions).

def sync_block() -> None:
    """Waits for all threads of the block, and sees what they wrote (``__syncthreads``)."""
    T.evaluate(T.cuda.cta_sync())


def sync_warp() -> None:
    """Waits for all threads of the warp, and sees what they wrote (``__syncwarp``)."""
    T.evaluate(T.cuda.warp_sync())


def sync_active() -> None:
    """Waits for those threads of the warp that come here together, and sees what they wrote."""
    run("void ecornn_meet()", "__syncwarp(__activemask());")


def named_barrier_sync(name: Expr | int, threads: int) -> None:
    """Waits for so many threads at one of the block's 16 barriers, 0 is :func:`sync_block`'s; sees what they wrote."""
    T.evaluate(T.ptx["bar.sync"](_uint32(name), T.uint32(threads)))


def named_barrier_arrive(name: Expr | int, threads: int) -> None:
    """Comes to a barrier, as one of so many threads, and does not wait."""
    T.evaluate(T.ptx["bar.arrive"](_uint32(name), T.uint32(threads)))


def neighbour(value: Expr) -> Expr:
    """The float32 value of the lane beside: 0 and 1, 2 and 3, and so on."""
    return call("float ecornn_neighbour(float value)", "return __shfl_xor_sync(0xffffffffu, value, 1);", value)


def _shuffled(name: str, expression: str, value: Expr, lanes: int) -> Expr:
    """``expression`` of ``value`` and {}, the float32 value of the lane whose number differs by the bits ``lanes``."""
    theirs = "__shfl_xor_sync(0xffffffffu, value, lanes)"
    return call(f"float ecornn_{name}(float value, int lanes)", f"return {expression.format(theirs)};", value,
                T.int32(lanes))


shuffle_xor = partial(_shuffled, "exchanged", "{}")
sum_xor = partial(_shuffled, "across", "value + {}")
largest_xor = partial(_shuffled, "largest_across", "fmaxf(value, {})")


def uniform(name: str, value: Expr) -> Expr:
    """An int32 value that all threads of a warp have, as a variable of which the compiler can see that."""
    return T.let(name, call("int ecornn_uniform(int value)", "return __shfl_sync(0xffffffffu, value, 0, 32);", value))


def ballot(value: Expr) -> Expr:
    """A word (uint32) with a bit for each lane: whether its ``value`` (int32) is not 0."""
    return call("unsigned ecornn_ballot(int value)", "return __ballot_sync(0xffffffffu, value);", value)


def special_register(name: str) -> Expr:
    """``tid`` or ``ctaid`` along x (int32), as a variable of that name that is read at this place and not before."""
    return T.let(name, call(f"int ecornn_{name}()", f"""
        int value;
        asm volatile("mov.u32 %0, %%{name}.x;" : "=r"(value));
        return value;"""))


def pause(cycles: int) -> None:
    """Lets at least so many cycles of the clock pass."""
    run("void ecornn_pause(unsigned cycles)", """
        unsigned start, now;
        asm volatile("mov.u32 %0, %%clock;" : "=r"(start));
        do { asm volatile("mov.u32 %0, %%clock;" : "=r"(now)); } while (now - start < cycles);""", T.uint32(cycles))


def _uint32(value: Expr | int) -> Expr:
    return T.uint32(value) if isinstance(value, int) else T.cast(value, "uint32")


# Values that compilers must not look into.

def opaque(name: str, value: Expr) -> Expr:
    """An int32 value as a variable that TVM does not look into. What TVM sees through it puts into every index that
    uses it, with 64 bits there, and registers are few."""
    return T.let(name, call("int ecornn_named(int value)", "return value;", value))


def pinned(name: str, value: Expr) -> Expr:
    """An int32 value as a variable as :func:`opaque` makes it, computed here and not later."""
    return T.let(name, call("int ecornn_pinned(int value)", """
        asm volatile("" : "+r"(value));
        return value;""", value))


def float_bits(value: Expr) -> Expr:
    """The bits (uint32) of a float32 value, also of a constant: TVM takes the address of what it reinterprets."""
    return call("unsigned ecornn_bits(float value)", "return *(unsigned*)&value;", value)


# Warpgroup products of Hopper's tensor cores (PTX: wgmma). sm_90a.

def wgmma(acc: list[Expr], a: list[Expr], b: Expr, keep: Expr, dtype: str, across: bool = False) -> None:
    """``acc = a b + (keep ? acc : 0)`` for 32 bytes of K; b: ``2 * len(acc)`` columns, by descriptor; a: 64 rows, by
    descriptor or as four words of each thread, as operand A of ``mma``. ``across``: in memory K is the outer axis of
    both; of 16-bit types. Accumulators are those of ``mma`` for each n8 tile, warp w has rows 16 w to 16 w + 15."""
    instruction = T.ptx[f"wgmma.mma_async.sync.aligned.m64n{2 * len(acc)}{_WGMMA[dtype]}"]
    # TF32 cannot be transposed, nor can registers, so nothing says so
    layout = () if dtype == "tf32" else (int(across),) * (2 if len(a) == 1 else 1)
    T.evaluate(instruction(*acc, *a, b, T.ptx.pred(keep), 1, 1, *layout))


def descriptor(address: Expr, leading: int, stride: int, swizzled: bool) -> Expr:
    """wgmma's description of an operand at ``address`` in shared memory (uint64).

    ``stride`` bytes lie between groups of 8 rows, ``leading`` between the 16-byte halves of a product's K (ignored with
    the 128-byte swizzle, where addresses are multiples of 1024). Of an operand that is read across, swizzled:
    ``stride`` between groups of 8 values of K, ``leading`` between panels of 128 bytes. Addresses are in units of 16
    bytes: those of later values of K are larger by a constant."""
    fixed = (leading >> 4) << 16 | (stride >> 4) << 32 | (1 << 62 if swizzled else 0)
    return T.cast(address >> T.uint32(4), "uint64") + T.uint64(fixed)


def wgmma_wait(acc: list[Expr]) -> None:
    """Waits for all products; names the accumulators, so that none is read before."""
    arguments, operands = (", ".join(text.format(i) for i in range(len(acc))) for text in ("float& d{}", '"+f"(d{})'))
    run(f"void ecornn_wgmma_wait_{len(acc)}({arguments})", f"""
        asm volatile("wgmma.wait_group.sync.aligned 0;" : {operands} : : "memory");""", *acc)

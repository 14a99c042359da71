"""How statistics travel: each block sends the sums over its units, and every block adds all of them, in one order.

A batch row has neighbouring lanes of gate warps, a power of two of them, or whole warps. They add what they have by
shuffles, one lane hands it on, and then each reads its share of what all blocks sent for the row and adds that
likewise: no barrier inside the block, and the same bits in every block.

Of a value v two sums are made, of v - s and of its square, where s is the row's mean in the step before (0 in the first
one), which all blocks know: so a mean that is large beside the deviations from it costs no accuracy.

Through L2 the sums travel as state does (``exchange.py``): words that announce themselves in a ring of R slots, here
those of step t in slot t % R, polled and wiped by gate warps. What is said there holds: a word is sent by a warp that
has read the slots before, and each warp that reads a row's words sends some of the same row. In a cluster they are
sent to the shared memory of every block, as in ``cluster.py``, and each slot's mbarrier counts their bytes.
"""

from __future__ import annotations

from typing import Any

from ecornn.analysis import Statistic
from ecornn.schedules.mbarrier import mbarrier_wait
from ecornn.schedules.persistent.cluster import Cluster
from ecornn.schedules.persistent.exchange import SENTINEL, Ring, pack
from ecornn.schedules.persistent.plan import Plan
from ecornn.schedules.row_sums import across_warp

FINITE = 1e30  # a mean beyond is no good as the next step's s, nor is one that is no number

_SEND = """
__device__ __forceinline__ void ecornn_send_sums(unsigned to, unsigned barrier, unsigned rank, unsigned a, unsigned b) {
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(to), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier) : "r"(barrier), "r"(rank));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];"
               : : "r"(to), "r"(a), "r"(b), "r"(barrier) : "memory");
}"""


class Sums:
    """Emits the gate warps' part. ``rings``: workspaces of the exchanges; unused in a cluster."""

    def __init__(self, T: Any, plan: Plan, statistics: list[tuple[Statistic, ...]], carrier: Ring | Cluster,
                 rings: list[Any], group: Any, member: Any, thread: Any, steps: Any) -> None:
        self.T, self.plan, self.all, self.carrier, self.rings = T, plan, statistics, carrier, rings
        self.group, self.thread, self.steps = group, thread, steps
        self.lanes = min(32, plan.lanes)
        self.lane = T.Bind(thread % self.lanes)
        warps = plan.lanes // self.lanes  # of a row
        self.part = T.Bind(member * warps + thread // 32 % warps)  # of the row's sums, which this warp makes
        rows = [T.Bind((thread + i * plan.gate_warps * 32) // plan.lanes) for i in range(plan.items)]
        self.mine = [T.Bind(r < plan.rows) for r in rows]
        self.rows = [T.Bind(T.min(r, plan.rows - 1)) for r in rows]
        count = sum(len(s) for s in statistics)
        self.means = T.alloc_buffer((plan.items, max(1, count)), "float32", scope="local")  # of the step before
        for i in range(plan.items):
            for n in range(count):
                T.buffer_store(self.means, T.float32(0), [i, n])

    def exchange(self, e: int, t: Any, envs: list[dict[Any, Any]], owners: list[Any]) -> list[dict[Any, Any]]:
        """The variables of exchange ``e`` for each item, from the operands in ``envs``; ``owners``: whether an item is
        one of the layer's units."""
        T, plan, statistics = self.T, self.plan, self.all[e]
        first = sum(len(s) for s in self.all[:e])
        slot = T.Bind(self._slot(e, t))
        each = [(i, n, s) for i in range(plan.items) for n, s in enumerate(statistics)]
        sums = []
        for i, n, s in each:
            parts = [T.Bind(envs[i][o] - self.means[i, first + n]) for o in s.operands]
            for value in (_added(T, parts), _added(T, [T.Bind(p * p) for p in parts])):
                sums.append(T.Bind(T.Select(owners[i], value, T.float32(0))))
        sums = across_warp(T, sums, self.lanes)
        for k, (i, n, _) in enumerate(each):
            place = slot + self._place(e, n, self.rows[i], self.part)
            self._send(e, t, place, sums[2 * k:2 * k + 2], self.mine[i])
        found: list[dict[Any, Any]] = [{} for _ in envs]
        totals = across_warp(T, self._receive(e, t, slot), self.lanes)
        for k, (i, n, s) in enumerate(each):
            total, squares = totals[2 * k:2 * k + 2]
            count, before = len(s.operands) * plan.hidden, self.means[i, first + n]
            found[i][s.total] = T.Bind(total + T.float32(count) * before)
            if s.squares is not None:
                off = T.Bind(total * T.float32(1.0 / count))
                found[i][s.squares] = T.Bind(T.max(squares - total * off, T.float32(0)))
            mean = T.Bind(found[i][s.total] * T.float32(1.0 / count))
            usable = T.And(mean < T.float32(FINITE), mean > T.float32(-FINITE))
            T.buffer_store(self.means, T.Select(usable, mean, T.float32(0)), [i, first + n])
        return found

    def wipe(self, t: Any) -> None:
        """Takes back what was sent in the step before."""
        T = self.T
        if isinstance(self.carrier, Cluster):
            return
        for e, statistics in enumerate(self.all):
            slot = T.Bind(self._slot(e, t + (self.plan.ring - 1)))
            for i in range(self.plan.items):
                for n in range(len(statistics)):
                    self._store(e, slot + self._place(e, n, self.rows[i], self.part), [T.uint32(SENTINEL)] * 2,
                                T.And(self.mine[i], self.lane == 0))

    def _slot(self, e: int, t: Any) -> Any:
        """First word of the slot of a step."""
        plan = self.plan
        if isinstance(self.carrier, Cluster):
            return self.carrier.sums[e] + t % 2 * plan.sum_words(e)
        return (self.group * plan.ring + t % plan.ring) * plan.sum_words(e)

    def _place(self, e: int, n: int, row: Any, part: Any) -> Any:
        return part * self.plan.sum_stride(e) + (row * len(self.all[e]) + n) * 2

    def _send(self, e: int, t: Any, place: Any, sums: list[Any], mine: Any) -> None:
        T, plan = self.T, self.plan
        if not isinstance(self.carrier, Cluster):
            words = [T.Bind(pack([v], "float32")) for v in sums]
            self._store(e, place, words, T.And(mine, self.lane == 0))
            return
        words = [T.Bind(T.reinterpret("uint32", v)) for v in sums]
        to = T.Bind(T.cuda.cvta_generic_to_shared(self.carrier.words.ptr_to([place])))
        barrier = T.Bind(T.cuda.cvta_generic_to_shared(self.carrier.sum_barrier(e, t % 2)))
        for turn in range(-(-plan.blocks // self.lanes)):  # each lane to a block of its own
            rank = T.Bind(self.lane + turn * self.lanes)
            with T.If(T.And(mine, rank < plan.blocks)), T.Then():
                T.evaluate(T.cuda.func_call("ecornn_send_sums", to, barrier, T.cast(rank, "uint32"), *words,
                                            source_code=_SEND))

    def _store(self, e: int, place: Any, words: list[Any], mine: Any) -> None:
        T = self.T
        with T.If(mine), T.Then():
            T.evaluate(T.ptx["st.relaxed.gpu.global.v2.b32"](self.rings[e].ptr_to([place]), *words))

    def _receive(self, e: int, t: Any, slot: Any) -> list[Any]:
        """For each item and statistic both sums in turn, of the parts that this lane reads."""
        T, plan, count = self.T, self.plan, len(self.all[e])
        each = -(-plan.sum_parts // self.lanes)
        busy = plan.lanes * plan.rows == plan.items * plan.gate_warps * 32
        words = T.alloc_buffer((plan.items * count * each, 2), "uint32", scope="local")
        loads: list[tuple[Any, Any]] = []
        for i in range(plan.items):
            for n in range(count):
                for j in range(each):
                    part = self.lane + j * self.lanes
                    inside = None if (j + 1) * self.lanes <= plan.sum_parts else part < plan.sum_parts
                    if not busy:  # a warp may only wait for rows of which it sends something
                        inside = self.mine[i] if inside is None else T.And(self.mine[i], inside)
                    if inside is not None:
                        T.buffer_store(words, T.uint32(0), [len(loads), 0])
                        T.buffer_store(words, T.uint32(0), [len(loads), 1])
                        inside = T.Bind(inside)
                    loads.append((T.Bind(slot + self._place(e, n, self.rows[i], part)), inside))
        if isinstance(self.carrier, Cluster):
            mbarrier_wait(self.carrier.sum_barrier(e, t % 2), T.cast(t // 2 % 2, "uint32"), cluster=True)
            self._load(words, loads, "ld.shared.v2.b32", self.carrier.words)
            with T.If(T.And(self.thread == 0, t + 2 < self.steps)), T.Then():
                self.carrier.expect_sums(e, t % 2)
        else:
            missing = T.alloc_buffer((1,), "int32", scope="local")
            T.buffer_store(missing, T.int32(1), [0])
            with T.While(missing[0] != 0):
                self._load(words, loads, "ld.relaxed.gpu.global.v2.b32", self.rings[e])
                highest = [words[n, k] for n in range(len(loads)) for k in range(2)]
                while len(highest) > 1:
                    maxima = [T.Bind(T.max(a, b)) for a, b in zip(highest[::2], highest[1::2], strict=False)]
                    highest = maxima + highest[len(maxima) * 2:]
                T.buffer_store(missing, T.cast(highest[0] == T.uint32(SENTINEL), "int32"), [0])
            T.evaluate(T.cuda.warp_sync())
        values = [[T.Bind(T.reinterpret("float32", words[n, k])) for k in range(2)] for n in range(len(loads))]
        return [_added(T, [v[k] for v in values[first:first + each]]) for first in range(0, len(values), each)
                for k in range(2)]

    def _load(self, words: Any, loads: list[tuple[Any, Any]], instruction: str, source: Any) -> None:
        T = self.T
        for n, (at, inside) in enumerate(loads):
            def load(n: int = n, at: Any = at) -> None:
                T.evaluate(T.ptx[instruction](words[n, 0], words[n, 1], source.ptr_to([at])))

            if inside is None:
                load()
            else:
                with T.If(inside), T.Then():
                    load()


def _added(T: Any, values: list[Any]) -> Any:
    total = values[0]
    for value in values[1:]:
        total = T.Bind(total + value)
    return total

"""The persistent kernel: one launch for the whole sequence, recurrent weights on chip throughout.

Blocks form groups; a group serves its own batch rows and holds all recurrent weights, a block the
rows of ``units`` hidden units. In every block

* product warps split the hidden axis (K) among them. Each polls its part of the exchanged state
  straight into operand B, multiplies it with its weights (operand A: registers, or shared memory
  where they do not fit), and leaves partial sums in shared memory;
* gate warps add the partial sums, compute the cell's scalars, and write the new state to the
  exchange first and everything else (y, wipes, the next step's inputs) afterwards.

Named barriers hand the two buffers of partial sums over, full ones to the gate warps and read ones
back. Product warps never wait for the latter: they have been polling for longer. (A buffer that is
written again has been read, since the state that the warp has polled depends on it; the barrier says
so within the block, where a race checker can see it.)
"""

from __future__ import annotations

from typing import Any

from ecornn.schedules.base import Task
from ecornn.schedules.persistent.exchange import SENTINEL, slot_base
from ecornn.schedules.persistent.gates import FULL, READ, Gates
from ecornn.schedules.persistent.plan import RING, Plan
from ecornn.schedules.tensor_core import mma, split
from ecornn.schedules.timeline import row_arguments


def persistent_kernel(task: Task, plan: Plan, math: str) -> Any:
    """``persistent(T, B, hoisted, vectors, <state>_in, <state>_out, recurrent_<p>, exchange_<p>, y)``."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as T

    graph, dtype = task.graph, plan.dtype
    big = T.int64(1 << 40)
    with IRBuilder() as builder, T.prim_func():
        T.func_name("persistent")
        steps, batch = T.arg("T", T.int32()), T.arg("B", T.int32())
        arguments = {}
        if graph.hoisted_outputs:
            arguments["hoisted"] = T.arg("hoisted", T.buffer((big,), "float32"))
        arguments["vectors"] = T.arg("vectors", T.buffer((big,), "float32"))
        for s in graph.states:
            for name in (f"{s}_in", f"{s}_out"):
                arguments[name] = T.arg(name, T.buffer((big,), dtype))
        weights = [T.arg(f"recurrent_{i}", T.buffer((big,), dtype)) for i in range(len(plan.phases))]
        rings = [T.arg(f"exchange_{i}", T.buffer((big,), "uint32")) for i in range(len(plan.phases))]
        arguments["y"] = T.arg("y", T.buffer((big,), dtype))
        arguments |= row_arguments(T, task.place)
        T.device_entry()
        block, thread = T.cta_id([plan.groups * plan.blocks]), T.thread_id([plan.threads])
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
        shared = T.alloc_buffer((plan.shared // 4,), "float32", scope="shared.dyn", align=16)
        group, member = T.Bind(block // plan.blocks), T.Bind(block % plan.blocks)
        warp, lane = T.Bind(thread // 32), T.Bind(thread % 32)
        with T.If(warp < plan.warps):
            with T.Then():
                _products(T, plan, steps, group, member, warp, lane, weights, rings, shared)
            with T.Else():
                gates = Gates(T, task, plan, math, arguments, rings, shared, group, member,
                              T.Bind(thread - plan.warps * 32), steps, batch)
                gates.run()
    return builder.get()


def _products(T: Any, plan: Plan, steps: Any, group: Any, member: Any, warp: Any, lane: Any,
              weights: list[Any], rings: list[Any], shared: Any) -> None:
    words = shared.view("uint32")
    held, places, place = [], [], 2 * plan.sum_floats
    for phase, source in zip(plan.phases, weights, strict=True):
        octets, kept = phase.octets(plan.units), phase.register_pairs
        registers = T.alloc_buffer((max(1, kept * octets), 4), "uint32", scope="local")
        held.append(registers)
        places.append(place)
        for q in range(phase.pairs):
            for v in range(octets):
                index = T.Bind((((member * plan.warps + warp) * phase.pairs + q) * octets + v) * 32 + lane)
                address = source.ptr_to([T.cast(index, "int64") * (4 if plan.dtype == "float32" else 8)])
                if q < kept:
                    r = [registers[q * octets + v, i] for i in range(4)]
                    T.evaluate(T.ptx["ld.global.v4.b32"](*r, address))
                else:
                    r = [T.alloc_buffer((1,), "uint32", scope="local")[0] for _ in range(4)]
                    T.evaluate(T.ptx["ld.global.v4.b32"](*r, address))
                    T.evaluate(T.ptx["st.shared.v4.b32"](
                        words.ptr_to([_shared_place(plan, phase, place, warp, q, v, lane)]), *r))
        place += plan.shared_weight_words(phase)
    with T.serial(0, steps) as t:
        for index, (phase, ring) in enumerate(zip(plan.phases, rings, strict=True)):
            use = T.Bind(t * len(plan.phases) + index)
            turn = T.Bind(use % 2)
            with T.If(use >= 2), T.Then():
                T.evaluate(T.ptx["bar.sync"](T.cast(turn + READ, "uint32"), T.uint32(plan.threads)))
            state = _poll(T, plan, phase, ring, group, t, warp, lane)
            acc = _multiply(T, plan, phase, held[index], places[index], words, state, warp, lane)
            stride = plan.stride(phase)
            base = T.Bind(turn * plan.sum_floats + (warp * plan.columns + lane % 4 * 2) * stride + lane // 4)
            for m in range(-(-phase.octets(plan.units) // 2)):
                for n in range(plan.tiles):
                    for i in range(4):
                        T.buffer_store(shared, acc(m, n, i),
                                       [base + (n * 8 + i % 2) * stride + m * 16 + i // 2 * 8])
            T.evaluate(T.ptx["bar.arrive"](T.cast(turn + FULL, "uint32"), T.uint32(plan.threads)))
            T.evaluate(T.ptx["fence.acq_rel.gpu"]())  # the acquire of exchange.py, while state travels


def _shared_place(plan: Plan, phase: Any, place: int, warp: Any, q: int, v: int, lane: Any) -> Any:
    spilled = phase.pairs - phase.register_pairs
    octets = phase.octets(plan.units)
    return place + (((warp * spilled + q - phase.register_pairs) * octets + v) * 32 + lane) * 4


def _poll(T: Any, plan: Plan, phase: Any, ring: Any, group: Any, t: Any, warp: Any, lane: Any) -> Any:
    """Reads this warp's part of slot t until every word has been written."""
    state = T.alloc_buffer((phase.pairs, plan.tiles, 4), "uint32", scope="local")
    missing = T.alloc_buffer((1,), "int32", scope="local")
    start = T.Bind(slot_base(plan, phase, group, t % RING)
                   + warp * phase.warp_pairs * plan.tiles * 128 + lane * 4)
    T.buffer_store(missing, T.int32(1), [0])
    with T.While(missing[0] != 0):
        T.buffer_store(missing, T.int32(0), [0])
        for q in range(phase.pairs):
            operand, pair = divmod(q, phase.warp_pairs)
            for n in range(plan.tiles):
                offset = ((operand * plan.warps * phase.warp_pairs + pair) * plan.tiles + n) * 128
                T.evaluate(T.ptx["ld.relaxed.gpu.global.v4.b32"](*(state[q, n, i] for i in range(4)),
                                                                 ring.ptr_to([start + offset])))
        # the sentinel is the largest word: a tree of maxima is short, a chain of comparisons is not
        highest = [state[q, n, i] for q in range(phase.pairs) for n in range(plan.tiles) for i in range(4)]
        while len(highest) > 1:
            pairs = [T.Bind(T.max(a, b)) for a, b in zip(highest[::2], highest[1::2], strict=False)]
            highest = pairs + highest[len(pairs) * 2:]
        T.buffer_store(missing, T.cast(highest[0] == T.uint32(SENTINEL), "int32"), [0])
    T.evaluate(T.cuda.warp_sync())
    return state


def _multiply(T: Any, plan: Plan, phase: Any, held: Any, place: int, words: Any, state: Any, warp: Any,
              lane: Any) -> Any:
    octets = phase.octets(plan.units)
    tiles = -(-octets // 2)
    chains = min(plan.chains, phase.pairs * 2)
    acc = T.alloc_buffer((chains, tiles, plan.tiles, 4), "float32", scope="local")
    for c in range(chains):
        for m in range(tiles):
            for n in range(plan.tiles):
                for i in range(4):
                    T.buffer_store(acc, T.float32(0), [c, m, n, i])
    streamed = T.alloc_buffer((octets, 4), "uint32", scope="local")
    for q in range(phase.pairs):
        if q >= phase.register_pairs:
            for v in range(octets):
                at = _shared_place(plan, phase, place, warp, q, v, lane)
                T.evaluate(T.ptx["ld.shared.v4.b32"](*(streamed[v, i] for i in range(4)), words.ptr_to([at])))
        for tile in range(2):
            columns = [[split(state[q, n, tile * 2 + half], plan.dtype) for half in range(2)]
                       for n in range(plan.tiles)]
            for m in range(tiles):
                rows = []
                for half in range(2):  # a0, a1: word 0 of the lower and upper octet; a2, a3: word 1
                    for v in (2 * m, 2 * m + 1):
                        if v >= octets:
                            rows.append(tuple(T.uint32(0) for _ in range(2)))
                        elif q < phase.register_pairs:
                            rows.append(split(held[q * octets + v, tile * 2 + half], plan.dtype))
                        else:
                            rows.append(split(streamed[v, tile * 2 + half], plan.dtype))
                for n in range(plan.tiles):
                    chain = (2 * q + tile) % chains
                    mma([acc[chain, m, n, i] for i in range(4)], rows, columns[n], plan.dtype)

    def total(m: int, n: int, i: int) -> Any:
        value = acc[0, m, n, i]
        for c in range(1, chains):
            value = value + acc[c, m, n, i]
        return value

    return total



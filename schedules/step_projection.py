"""The hoisted product in plain float32 arithmetic, for any cell, size and CUDA GPU.

    hoisted[t, b, q, j] = projected value q of unit j, from x[t, b, :], the input weights and the vectors

:mod:`ecornn.schedules.projection` does the same on tensor cores.
"""

from __future__ import annotations

from typing import Any

from ecornn.program import Buffer
from ecornn.schedules.base import Task
from ecornn.schedules.pointwise import emit
from ecornn.schedules.step_product import Product, Tile
from ecornn.schedules.step_scalars import Layout, StepScalars, declare


def project_kernel(task: Task, tile: Tile, layout: Layout, buffers: list[Buffer], blocks: int) -> Any:
    """``project``: hoisted[t, b, q, j] for all t, by blocks that take tiles of T*B rows in turn."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as T

    w, graph = task.workload, task.graph
    H, I = w.hidden, w.input
    columns, gates = -(-H // tile.units), len(graph.hoisted_rows)
    with IRBuilder() as builder, T.prim_func():
        T.func_name("project")
        a = declare(T, buffers)
        # the gates' accuracy is not a knob here: the cost of the hoisted scalars is out of the recurrence
        scalars = StepScalars(T, task, layout, a, "exact")
        T.device_entry()
        block, thread = T.cta_id([blocks]), T.thread_id([tile.threads])
        memory = T.alloc_buffer((tile.shared(gates, 1) // 4,), "float32", scope="shared.dyn", align=16)
        total = T.Bind(a["T"] * a["B"])
        turn = T.alloc_buffer((1,), "int32", scope="local")
        T.buffer_store(turn, block, [0])
        product = Product(T, tile, graph.hoisted_rows, memory, thread)

        def input_at(row0: Any, row: Any, k: Any) -> Any:
            inside = T.Bind(T.And(row0 + row < total, k < I))
            place = T.Select(inside, T.cast(row0 + row, "int64") * I + k, T.int64(0))
            return T.Select(inside, T.cast(a["x"][place], "float32"), T.float32(0))

        with T.While(turn[0] < (total + (tile.rows - 1)) // tile.rows * columns):
            column, row0 = T.Bind(turn[0] % columns), T.Bind(turn[0] // columns * tile.rows)
            if gates:
                product.run(a["input_weights"], column, I, lambda o, row, k: input_at(row0, row, k))
            with T.serial(0, -(-tile.units * tile.rows // tile.threads)) as again:
                item = T.Bind(again * tile.threads + thread)
                row, unit = T.Bind(item // tile.units), T.Bind(column * tile.units + item % tile.units)
                inside = T.And(item < tile.units * tile.rows, T.And(row0 + row < total, unit < H))
                with T.If(inside), T.Then():
                    env = scalars.constants(unit) | product.sums(row, item % tile.units)
                    if graph.x is not None:
                        env[graph.x] = T.Bind(T.cast(a["x"][T.cast(row0 + row, "int64") * H + unit], "float32"))
                    env = emit(graph.hoisted, env)
                    first = T.Bind(T.cast(row0 + row, "int64") * (len(graph.projected) * H) + unit)
                    for q, var in enumerate(graph.projected):
                        T.buffer_store(a["hoisted"], env[var], [first + q * H])
            T.buffer_store(turn, turn[0] + blocks, [0])
    return builder.get()

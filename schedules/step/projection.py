"""The hoisted product in plain float32 arithmetic, for any cell, size and CUDA GPU.

    hoisted[t, b, q, j] = projected value q of unit j, from x[t, b, :], the input weights and the vectors

:mod:`ecornn.schedules.gemm.projection` does the same on tensor cores.
"""

from __future__ import annotations

from ecornn.program import Buffer, Launch
from ecornn.schedules.assemble import shared_buffers
from ecornn.schedules.base import Component, Task
from ecornn.schedules.builder import Expr, PrimFunc, T, ceil_div
from ecornn.schedules.gemm.epilogue import leaves_of_rows
from ecornn.schedules.hoisted import Hoisted
from ecornn.schedules.scalars.pointwise import emit
from ecornn.schedules.step.product import BlockProduct, Tile, weights_buffer
from ecornn.schedules.step.scalars import Layout, StepScalars, declare


def project_plainly(task: Task, tile: Tile, layout: Layout, hoisted: Hoisted) -> Component:
    """The projection, where the cell has hoisted values: its kernel, with the packed ``input_weights``."""
    graph, blocks = task.graph, 2 * task.device.cores
    if not graph.hoisted_outputs:
        return Component()
    own = [weights_buffer("input_weights", task, tile, graph.hoisted_products, task.own_input)
           ] if graph.hoisted_products else []
    kernel = _kernel(task, tile, layout, [*shared_buffers(task, hoisted), *own], blocks)
    return Component({"project": kernel}, tuple(own),
                     (Launch("project", blocks, tile.threads, tile.shared(len(graph.hoisted_products), 1)),))


def _kernel(task: Task, tile: Tile, layout: Layout, buffers: list[Buffer], blocks: int) -> PrimFunc:
    """``project``: hoisted[t, b, q, j] for all t, by blocks that take tiles of T*B rows in turn."""
    w, graph = task.workload, task.graph
    H, I, rows, offsets = w.hidden, task.own_input, w.input, leaves_of_rows(task)
    columns, gates = ceil_div(H, tile.units), len(graph.hoisted_products)
    with T.kernel("project") as made:
        a = declare(buffers)
        # the gates' accuracy is not a knob here: the cost of the hoisted scalars is out of the recurrence
        scalars = StepScalars(task, layout, a, "exact")
        T.device_entry()
        block, thread = T.block(blocks), T.thread(tile.threads)
        memory = T.shared(tile.shared(gates, 1) // 4)  # BlockProduct's
        total = T.let("total", a["T"] * a["B"])
        turn = T.local("turn", (1,), "int32")  # number of the tile
        T.buffer_store(turn, block, [0])
        product = BlockProduct(tile, graph.hoisted_products, memory, thread)

        def input_at(row0: Expr, row: Expr, k: Expr) -> Expr:
            inside = T.let("inside", T.And(row0 + row < total, k < I))
            place = T.Select(inside, T.cast(row0 + row, "int64") * rows + k, T.int64(0))
            return T.Select(inside, T.cast(a["x"][place], "float32"), T.float32(0))

        T.note("tiles of all T*B rows, in turn: products in FMA, then the hoisted scalars")
        with T.While(turn[0] < (total + (tile.rows - 1)) // tile.rows * columns):
            column, row0 = T.let("column", turn[0] % columns), T.let("row0", turn[0] // columns * tile.rows)
            if gates:
                product.run(a["input_weights"], column, I, lambda o, row, k: input_at(row0, row, k))
            with T.serial("again", 0, ceil_div(tile.units * tile.rows, tile.threads)) as again:
                item = T.let("item", again * tile.threads + thread)
                row, unit = T.let("row", item // tile.units), T.let("unit", column * tile.units + item % tile.units)
                inside = T.And(item < tile.units * tile.rows, T.And(row0 + row < total, unit < H))
                with T.when(inside):
                    env = scalars.constants(unit) | product.sums(row, item % tile.units)
                    for var, offset in offsets.items():
                        at = T.cast(row0 + row, "int64") * rows + unit
                        env[var] = T.let(var.name, T.cast(a["x"][at + offset if offset else at], "float32"))
                    env = emit(graph.hoisted, env)
                    first = T.let("first", T.cast(row0 + row, "int64") * (len(graph.projected) * H) + unit)
                    for q, var in enumerate(graph.projected):
                        T.buffer_store(a["hoisted"], env[var], [first + q * H])
            T.buffer_store(turn, turn[0] + blocks, [0])
    return made()

"""The CPU schedule: weights packed into register tiles, the time loop inside one function."""

from __future__ import annotations

from ecornn.analysis.heads import most_heads
from ecornn.dtypes import ITEMSIZE, SERVED
from ecornn.program import Program
from ecornn.schedules.base import Config, Knob, Schedule, Task
from ecornn.schedules.cpu import matrix, tiling
from ecornn.schedules.cpu.tiling import PAIRS, CPUKnobs, Shape
from ecornn.schedules.rates import cpu_rates
from ecornn.workload import summed

LONGEST_INT8 = 1 << 16  # 2**16 * 255 * 127 < 2**31


class CPUSequence(Schedule[Shape]):
    """All steps in one call of a team of threads, for any cell and size. Weights of float32 layers may be bfloat16,
    int21 or int16, or int8 where the CPU has VNNI. 16-bit layers compute in float32, but products of bfloat16 by the
    CPU's matrix unit where it has one (AMX). Each step multiplies the state in register tiles, and computes the cell's
    pointwise part on the sums while they are in registers."""

    name = "cpu_sequence"
    revision = 2
    kind = "llvm"
    weights = ("bfloat16", "int21", "int16", "int8")
    heads = True

    def refuses(self, task: Task) -> str | None:
        if task.device.kind != "llvm":
            return "runs on CPUs only"
        if task.workload.dtype not in SERVED["llvm"]:
            return f"computes in {' or '.join(SERVED['llvm'])}, not {task.workload.dtype}"
        if task.traversal.keep is not None and task.workload.weights is not None:
            return f"trains with {task.workload.dtype} weights, not {task.workload.weights}"
        if task.workload.weights == "int8" and most_heads(task.graph) > 1:
            return "does not support int8 weights in products with heads"
        if task.workload.weights == "int8":
            if not {"avx512vnni", "avxvnni"} & set(task.device.features):
                return f"needs VNNI (avx512vnni or avxvnni) for int8 weights, which {task.device.arch} lacks"
            if max(task.workload.hidden, task.workload.input) > LONGEST_INT8:
                return f"supports int8 weights up to H and I of {LONGEST_INT8}, since it sums products in 32 bits"
        return None

    def knobs(self, task: Task) -> tuple[Knob, ...]:
        device, work = task.device, task.workload
        widest = max((len(p.products) for p in task.graph.phases), default=1)
        steps = tuple(c for c in (1, 2, 4, 8, 16, 32, 64, 128) if c < 2 * work.seq)
        tall = (16, 32) if (by_matrix := tiling.matrix_pays(task)) else ()
        return CPUKnobs.offered({
            "rows": tuple(sorted({*tiling.row_choices(device, work.batch), *tall})), "unroll": (1, 2, 4, 8),
            "columns": tiling.column_choices(device, widest, work),
            "project_rows": tuple(sorted({*tiling.row_choices(device, work.batch * work.seq), *tall})),
            "project_columns": tiling.column_choices(device, max(1, len(task.graph.hoisted_products)), work),
            "team": tuple(t for t in (0, 1, 2, 4, 8) if t < max(2, task.device.cores)),
            "pairs": PAIRS, "project_pairs": PAIRS, "gates": (0, 1, 2), "project_gates": (0, 1, 2), "ahead": (0, 1),
            "matrix": (0, 1) if by_matrix else (0,), "chunk": steps})

    def plan(self, task: Task, config: Config) -> Shape:
        return tiling.shape_of(task, CPUKnobs(config))

    def check(self, task: Task, config: Config) -> str | None:
        available, head = tiling.registers_of(task.device), tiling.head_vectors(task)
        for name, tile in tiling.tiles(task, CPUKnobs(config)).items():
            gates = tiling.gates_of(task, name)
            if tile.matrix:
                need = matrix.registers(tile.rows, max(tile.columns(gates)))
                if tile.rows not in (matrix.ROWS, 2 * matrix.ROWS) or tile.pairs or need > matrix.REGISTERS:
                    return (f"{name}: matrix=1 needs 16 or 32 rows without pairs, and {matrix.REGISTERS} tile "
                            f"registers, not {need}")
                continue
            if tile.pairs and tile.ahead:
                return f"{name}: ahead=1 is only possible without pairs"
            if tile.pairs and task.workload.stored != "float32":
                return f"{name}: pairs need float32 weights, not {task.workload.stored}"
            if tile.pairs and head and name != "hoisted":
                return f"{name}: pairs are not possible with heads"
            if tile.gates and (tile.pairs or task.workload.weights == "int8"):
                return f"{name}: pairs and int8 weights need gates=0"
            need = tiling.registers_used(tile, gates, task.workload.stored)
            # one row of one vector is always allowed: a cell may have more gates than registers
            if need > available and (tile.rows, tile.vectors) != (1, 1):
                return (f"{name}: a tile of {tile.rows} rows and {gates * tile.vectors} vectors needs "
                        f"{need} vector registers, but {task.device.arch} has {available}")
        return None

    def default(self, task: Task) -> Config:
        """The largest tile that fits the registers and wastes the fewest rows and vectors."""
        workload, graph, rates = task.workload, task.graph, cpu_rates(task.device)
        choices = {k.name: tuple(int(v) for v in k.values) for k in self.knobs(task)}
        pay = tiling.pairs_pay(task)

        def best(rows: int, gates: list[int], prefix: str) -> tuple[int, int, int, int]:
            head = 0 if prefix else tiling.head_vectors(task)
            return tiling.best_tile(task, rows, gates, choices[f"{prefix}rows"], choices[f"{prefix}columns"],
                                    PAIRS if pay and any(gates) and not head else (0,), bool(prefix), head)

        phases = [len(p.products) for p in graph.phases if p.products] or [0]
        if by_matrix := tiling.matrix_pays(task) and workload.batch >= tiling.LEAST_ROWS:
            rows, columns, gates = tiling.matrix_tile(workload.batch, max(phases), tiling.head_vectors(task))
            project_rows, project_columns, project_gates = tiling.matrix_tile(
                workload.batch * workload.seq, max(1, len(graph.hoisted_products)))
            pairs = project_pairs = 0
        else:
            rows, columns, pairs, gates = best(workload.batch, phases, "")
            project_rows, project_columns, project_pairs, project_gates = best(
                workload.batch * workload.seq, [len(graph.hoisted_products)], "project_")
        # L3 should work while tiles multiply; with one tile of rows it does so of itself
        ahead = rates.slow_l3 and tiling.beyond_l2(task) and not pairs and workload.batch > rows
        # hoisted values of a chunk should stay in the caches between their making and their use
        values = max(1, len(graph.hoisted_outputs)) + tiling.left_for_read_out(task)
        step_bytes = ITEMSIZE[summed(workload.dtype)] * workload.batch * workload.hidden * values
        target = (0.25 if by_matrix else 2) * max(task.device.l2, 1 << 19) * max(1, task.device.cores)
        chunk = max((c for c in choices["chunk"] if c * step_bytes <= target), default=1)
        return {"rows": rows, "columns": columns, "unroll": tiling.unrolled(rows, columns),
                "project_rows": project_rows, "project_columns": project_columns, "pairs": pairs,
                "project_pairs": project_pairs, "gates": gates, "project_gates": project_gates,
                "team": tiling.best_team(task), "ahead": int(ahead), "matrix": int(by_matrix), "chunk": chunk}

    def features(self, task: Task, plan: Shape) -> dict[str, float]:
        return tiling.features(task, plan)

    def program(self, task: Task, plan: Shape) -> Program:
        """Generates the worker function, and those of training where the task has a backward pass."""
        from ecornn.schedules.cpu.memory import plan as plan_step
        from ecornn.schedules.cpu.sequence import Sequence, sequence_with_read_out
        from ecornn.schedules.cpu.training import training_program

        if task.traversal.keep is not None:
            return training_program(task, plan)
        if task.after is not None:
            return sequence_with_read_out(task, plan_step(task.graph), plan)
        return Sequence(plan_step(task.graph), plan, task.traversal).program()

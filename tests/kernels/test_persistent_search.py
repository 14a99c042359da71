"""The persistent schedule's search leaves out most cuts, and finds what a search of all of them would."""

import pytest
from emulated import task_of
from msgspec.structs import replace

from ecornn.device import Device
from ecornn.schedules.base import Task
from ecornn.schedules.persistent import DOUBT, Persistent
from ecornn.schedules.persistent import plan as persistent_plan
from ecornn.targets import KNOWN
from ecornn.task import adjoint_task
from ecornn.workload import Traversal

H100 = KNOWN["sm_90a"]
HALF = replace(H100, cores=66)
TASKS = [(("lstm", (300, 32, 128, 128), "float32"), H100, "gates"),  # a cluster
         (("gru", (100, 20, 512, 512), "bfloat16"), HALF, None), (("lstm", (100, 128, 40, 96), "float16"), H100, None),
         (("rnn_tanh", (300, 20, 2048, 640), "float32"), H100, None),  # workers beside the recurrence
         (("lstm", (100, 8, 1024, 1024), "tf32"), HALF, None),  # streamed weights
         (("gru_reset_before", (100, 57, 256, 200), "float32"), KNOWN["sm_80"], "states")]


@pytest.mark.parametrize("layer, device, keep", TASKS, ids=lambda value: getattr(value, "arch", str(value)))
@pytest.mark.parametrize("backward", [False, True])
def test_the_search_finds_the_best_of_all_cuts(layer: tuple, device: Device, keep: str | None, backward: bool):
    task = task_of(*layer, device, Traversal(keep=keep or ("gates" if backward else None)))
    task = adjoint_task(task) if backward else task
    schedule = Persistent()
    doubt = {"l2": 1, "cluster": DOUBT}
    valid = [(cost * doubt[config["carrier"]], config) for cost, config in schedule.cuts(task)
             if schedule.check(task, config) is None]
    _, best = min(valid, key=lambda one: one[0])  # the first of several
    assert {**schedule.search(task), "hoisted": best["hoisted"]} == best


@pytest.mark.parametrize("layer, device", [(layer, device) for layer, device, _ in TASKS[:5:2]],
                         ids=lambda value: getattr(value, "arch", str(value)))
def test_no_plan_has_fewer_registers_than_its_bound(layer: tuple, device: Device):
    task: Task = task_of(*layer, device)
    for shape in [*Persistent()._shapes(task)][::7]:
        for registers in shape.registers:
            placed = persistent_plan.placed(task, shape.plan, registers)
            assert persistent_plan.fewest_registers(shape.plan, registers) <= placed.registers

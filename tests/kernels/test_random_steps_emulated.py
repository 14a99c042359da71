"""Training steps of random cells by the kernels of a GPU, emulated, against a float64 tape over their formulas.

    ECORNN_RANDOM=200:700 python -m pytest -s -m exhaustive tests/kernels/test_random_steps_emulated.py
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import pytest
from cpu_training_sample import Layer, reference
from cuda_on_cpu import Emulated
from emulated_training import train_call
from msgspec import structs
from pairwise import seeds
from random_steps import Training, training
from test_random_steps import Averages, Peak, Projected

from ecornn.cells import Cell
from ecornn.compiler import plan
from ecornn.errors import CellError, ScheduleError
from ecornn.program import Program
from ecornn.targets import KNOWN
from ecornn.task import adjoint_task, make_program, make_task
from ecornn.tune.choose import serving_or_raise
from ecornn.workload import ALONE, Workload

VALUES, GRADIENTS = 1e-5, 2e-5  # relative
REFUSED = "depends on neither x nor a state"  # a sum or maximum of parameters, by its name
SEEDS = seeds(range(40))


def draw(seed: int) -> Training:
    """Of even seeds a step, of odd ones a layer with all that it may have."""
    return training(seed, whole=seed % 2 == 1)


def program_of(drawn: Training, seed: int, chosen: bool) -> tuple[Program, str, str]:
    """The program of a training step, the names of its two schedules, and an architecture, Hopper's or one before.
    ``chosen``: as compile() chooses; else others that serve."""
    (steps, batch, width, hidden), arch = drawn.sizes, ("sm_90a", "sm_80")[seed // 2 % 2]
    device, keep = structs.replace(KNOWN[arch], cores=3), ("gates", "states")[seed // 4 % 2]  # few blocks to emulate
    if chosen:
        masks = {name: getattr(drawn.traversal, name) for name in ("lengths", "resets", "reverse")}
        planned = plan(drawn.cell, hidden=hidden, input=drawn.cell.own_input(width, hidden), batch=batch, seq=steps,
                       training=True, keep=keep, target=device, overlap="none", **masks)
        (program,), (backward,) = planned.programs(), planned.backward
        assert backward is not None
        return program, f"{planned.found.schedule.name}, {backward.schedule.name}", arch
    task = make_task(drawn.cell, Workload(drawn.cell.identity(), hidden, width, batch, steps, "float32"), device,
                     structs.replace(drawn.traversal, keep=keep))
    inner = adjoint_task(task)
    forward, behind = serving_or_raise(task), serving_or_raise(inner)
    first, second = forward[(seed + 1) % len(forward)], behind[(seed // 3 + 1) % len(behind)]
    program = make_program(first, task, first.default(task), (second, second.default(inner)))
    return program, f"{first.name}, {second.name}", arch


def wrong(drawn: Training, program: Program, folder: Path, arch: str) -> dict[str, float]:
    """The errors that are too large, by what has them."""
    found = train_call(Emulated(program, folder, arch), drawn.cell.states, drawn.call)
    return {n: e for n, e in drawn.errors({n: found[n] for n in drawn.wanted}).items()
            if not e < (VALUES if n == "y" or n.endswith("_out") else GRADIENTS)}


# no gradient of x beside one of a vector by way of x's products; I = 1 where that reads x's products; an adjoint whose
# first exchange is left out, of a maximum in a softmax; one that leaves nothing but states; a product of a chosen value
@pytest.mark.parametrize(("seed", "chosen"), [(0, True), (1, True), (2, False), (3, False), (4, False), (5, True),
                                              (628, True), (676, True), (252, True), (70, True), (32, True)])
def test_a_training_step(seed: int, chosen: bool, tmp_path: Path):
    drawn = draw(seed)
    program, _, arch = program_of(drawn, seed, chosen)
    assert not wrong(drawn, program, tmp_path, arch)


@pytest.mark.parametrize(("cell", "arch"), [
    (Averages(), "sm_80"), (Projected(), "sm_80"), (Peak(), "sm_80"), (Peak("peaks"), "sm_80"),
    (Peak("peaks"), "sm_90a"), (Peak("top"), "sm_80")],
    ids=lambda value: getattr(value, "name", value))
def test_every_schedule_trains_them(cell: Cell, arch: str, tmp_path: Path):
    layer = Layer(cell, 5, 19, 3, 4)
    call = layer.arguments(4, 3)
    drawn = Training(cell, (4, 3, 5, 19), ALONE, call, reference(cell, call, False))
    task = make_task(cell, Workload(cell.identity(), 19, 5, 3, 4, "float32"), structs.replace(KNOWN[arch], cores=3),
                     structs.replace(ALONE, keep="states"))
    inner = adjoint_task(task)
    behind = serving_or_raise(inner)
    for number, schedule in enumerate(serving_or_raise(task)):
        second = behind[number % len(behind)]
        program = make_program(schedule, task, schedule.default(task), (second, second.default(inner)))
        folder = tmp_path / schedule.name
        folder.mkdir()
        assert not wrong(drawn, program, folder, arch), (schedule.name, second.name)


@pytest.mark.exhaustive
@pytest.mark.timeout(0)
@pytest.mark.parametrize("chosen", [True, False], ids=["chosen", "others"])
def test_many_training_steps(chosen: bool):
    """None is wrong, none ends in an error of another kind, and none is refused but for one reason."""
    tally, faults = Counter[str](), []
    for seed in SEEDS:
        drawn = draw(seed)
        try:
            program, names, arch = program_of(drawn, seed, chosen)
            with tempfile.TemporaryDirectory() as folder:
                errors = wrong(drawn, program, Path(folder), arch)
        except (CellError, ScheduleError) as error:
            tally["refused"] += 1
            print(seed, f"is refused: {error}", flush=True)
            faults += [] if REFUSED in str(error) else [f"{seed} is refused: {error}"]
            continue
        except Exception as error:  # whatever it is
            tally["other errors"] += 1
            faults.append(f"{seed}: {type(error).__name__}: {error}")
            print(faults[-1], flush=True)
            continue
        tally[names] += 1
        print(seed, names, errors or "", flush=True)
        if errors:
            tally["wrong"] += 1
            faults.append(f"{seed}, {names}: {errors}")
    print(f"\n{len(SEEDS)} steps:", *(f"{n} {count}" for n, count in tally.most_common()), *faults, sep="\n  ")
    assert not faults

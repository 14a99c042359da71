"""Training steps of random cells by the kernels of a GPU, emulated, against a float64 tape over their formulas.

    ECORNN_RANDOM=200:700 python -m pytest -s -m exhaustive tests/test_random_steps_emulated.py
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import random_cells
import random_steps
from emulated_training import train
from msgspec import structs
from random_cells import Call, Drawn
from random_seeds import seeds

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


def draw(seed: int) -> Drawn:
    """Of even seeds a step of ``random_steps.py``, of odd ones of ``random_cells.py``, and arguments."""
    if seed % 2:
        return random_cells.draw(seed)
    steps, batch, input, hidden = (int(v) for v in np.random.default_rng(seed).integers((1, 1, 1, 5), (7, 6, 9, 41)))
    found = random_steps.draw(seed)
    a = found.sample(steps, batch, hidden, input)
    wanted = found.reference(a)
    return Drawn(found.cell, (steps, batch, a.x.shape[2], hidden), ALONE,
                 Call(a.x, a.states, a.dy, a.dstates, a.parameters), wanted)


def program_of(drawn: Drawn, seed: int, chosen: bool) -> tuple[Program, str, str]:
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


def wrong(drawn: Drawn, program: Program, folder: Path, arch: str) -> dict[str, float]:
    """The errors that are too large, by what has them."""
    call, (steps, batch, _, _) = drawn.call, drawn.sizes
    given = {n: v for n in ("x", "dy", "lengths", "resets") if (v := getattr(call, n)) is not None}
    for name, first, last in zip(drawn.cell.states, call.states, call.dstates, strict=True):
        given |= {f"{name}_in": first, f"d{name}_out": last}
    made = {n: v.size for n, v in drawn.wanted.items() if not n.startswith("gradient_")}
    found = train(program, folder, given, made, call.parameters, steps, batch, arch)
    return {n: e for n, e in drawn.errors({n: found[n] for n in drawn.wanted}).items()
            if not e < (VALUES if n == "y" or n.endswith("_out") else GRADIENTS)}


# x without a gradient beside a vector's by way of x's products; one input of a value that a vector's gradient reads; an
# adjoint whose first exchange is left out, of a maximum in a softmax; one that leaves nothing but states; a chosen value
# that is multiplied
@pytest.mark.parametrize(("seed", "chosen"), [(0, True), (1, True), (2, False), (3, False), (4, False), (5, True),
                                              (628, True), (676, True), (252, True), (70, True), (32, True)])
def test_a_training_step(seed: int, chosen: bool, tmp_path: Path):
    drawn = draw(seed)
    program, _, arch = program_of(drawn, seed, chosen)
    assert not wrong(drawn, program, tmp_path, arch)


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

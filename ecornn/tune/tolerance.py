"""The tolerance of outputs: of a candidate that is measured, and of a record whose time counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ecornn.dtypes import TABLE
from ecornn.workload import Workload

if TYPE_CHECKING:
    from ecornn.tune.record import Trial

TOLERANCE = {name: row.tolerance for name, row in TABLE.items()} | {"tf32": 6e-4}  # of outputs
GRADIENTS = {name: row.gradients for name, row in TABLE.items() if row.gradients} | {"tf32": 6e-4}  # of adjoints

# Rounding to bfloat16 is done before the reference here; that to integers is not. int21 is as exact as float32 has to
# be; int8 costs both sides of a product.
INTEGERS = {"int21": 1e-5, "int16": 1e-4, "int8": 3e-2}

LEAST = 1e-3  # µs of a step: some cycles, and no step has fewer


def tolerance(work: Workload) -> float:
    """The largest relative error that an output may have, ||out - ref|| / ||ref||."""
    if work.backward:
        return GRADIENTS[work.arithmetic]
    return INTEGERS.get(work.weights or "", TOLERANCE[work.arithmetic])


def proven(trial: Trial) -> bool:
    """True for a trial with a time, one that a step can take, and a right output: what is wrong may be as fast as it
    likes."""
    return (trial.times is not None and trial.times.median >= LEAST and trial.check is not None
            and trial.check <= tolerance(trial.workload))

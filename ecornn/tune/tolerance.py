"""How exact an output must be: of a candidate that is measured, and of a record whose time counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ecornn.workload import Workload

if TYPE_CHECKING:
    from ecornn.tune.record import Trial

# Relative error ||out - ref|| / ||ref|| that a candidate may have. float32: a few roundings of a
# long sum. float16 and bfloat16 (unit roundoff 5e-4 and 4e-3): about twice the error of cuDNN on an
# LSTM of these types, 2.9e-4 and 2.3e-3.
TOLERANCE = {"float64": 1e-13, "float32": 1e-5, "tf32": 6e-4, "float16": 6e-4, "bfloat16": 5e-3}

# Of the recurrence of an adjoint: twice what the roundings of its factors, operands and outputs make of an LSTM's or a
# GRU's, 4.6e-4 and 3.9e-3 in 8 steps. Gradients are differences of sums.
GRADIENTS = {"float32": 2e-5, "tf32": 6e-4, "float16": 1e-3, "bfloat16": 8e-3}

# Rounding to bfloat16 is done before the reference here; that to integers is not. int21 is as exact as float32 has to
# be; int8 costs both sides of a product.
INTEGERS = {"int21": 1e-5, "int16": 1e-4, "int8": 3e-2}

LEAST = 1e-3  # µs of a step: some cycles, and no step has fewer


def tolerance(work: Workload) -> float:
    """The relative error that a candidate may have."""
    if work.backward:
        return GRADIENTS[work.arithmetic]
    return INTEGERS.get(work.weights or "", TOLERANCE[work.arithmetic])


def proven(trial: Trial) -> bool:
    """Whether a trial has a time, one that a step can take, and its output was right: what is wrong may be as fast as
    it likes."""
    return (trial.times is not None and trial.times.median >= LEAST and trial.check is not None
            and trial.check <= tolerance(trial.workload))

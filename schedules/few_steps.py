"""Calls of few steps: what schedules of whole sequences take beside the steps, which their estimates leave out, and
where that is worth code of its own."""

from __future__ import annotations

from ecornn.schedules.base import Task
from ecornn.schedules.rates import gpu_rates

# Steps of a call up to which schedules of whole sequences save on what comes before the first one. That is 19 of 30 µs
# of LSTM 1024 B=16 with 8 steps, half of 16 steps, and of 100 an eighth: code of longer calls stays what records timed
SHORT = 16
OTHERS = 18_000  # nanoseconds of an H100's calls (benchmarks/results/h100_few_steps.txt) of several launches


def short(task: Task) -> bool:
    """True if the task's calls are expected to have at most ``SHORT`` steps. Modules serve any number: this is about
    time."""
    return task.workload.seq <= SHORT


def others(task: Task) -> float:
    """Nanoseconds that a call takes beside its steps, with a schedule that has several launches and reads all weights
    before its first step; of a layer with one exchange."""
    w, rates = task.workload, gpu_rates(task.device)
    (phase,) = task.graph.phases
    weights = w.hidden * w.itemsize * (len(task.graph.hoisted_products) * task.own_input
                                       + len(phase.products) * w.hidden)
    return OTHERS + weights / (rates.memory * task.device.cores)

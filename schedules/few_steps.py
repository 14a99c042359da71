"""Calls of few steps: what schedules of whole sequences take beside the steps, which their estimates leave out."""

from __future__ import annotations

from ecornn.schedules.base import Task
from ecornn.schedules.rates import gpu_rates

OTHERS = 18_000  # nanoseconds of an H100's calls (benchmarks/results/h100_few_steps.txt) of several launches


def others(task: Task) -> float:
    """Nanoseconds that a call takes beside its steps, of schedules with several launches, which read all weights before
    their first step; of a layer with one exchange."""
    w, rates = task.workload, gpu_rates(task.device)
    (phase,) = task.graph.phases
    weights = w.hidden * w.itemsize * (len(task.graph.hoisted_products) * task.own_input
                                       + len(phase.products) * w.hidden)
    return OTHERS + weights / (rates.memory * task.device.cores)

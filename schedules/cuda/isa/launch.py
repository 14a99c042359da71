"""Programmatic dependent launch: a kernel that begins before the one before it has ended (PTX: griddepcontrol).
sm_90."""

from __future__ import annotations

from ecornn.schedules.builder import T


def launch_dependents() -> None:
    """Lets the next kernel begin once all blocks have come here or ended."""
    T.evaluate(T.ptx["griddepcontrol.launch_dependents"]())


def wait_on_earlier() -> None:
    """Waits until the kernels before have ended, and sees what they wrote."""
    T.evaluate(T.ptx["griddepcontrol.wait"]())

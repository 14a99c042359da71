"""Training steps of a program, emulated: both entries, one after the other."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from cuda_on_cpu import GUARD, Emulated
from limits import relative

from ecornn.program import BACKWARD, FORWARD, KEPT, MADE, WORKSPACE


def train(emulated: Emulated, given: Mapping[str, Any], made: Mapping[str, int], parameters: Mapping[str, Any],
          steps: int, batch: int, add: bool = False, apart: bool = False) -> dict[str, Any]:
    """What the two entries make of ``given``, arrays by the names of buffers, and of parameters in te shape: float64,
    by the names of buffers. What is written holds NaN before, and has a guard behind it; workspaces hold nothing
    between the entries.

    made : elements of those that have no extent
    add : gradients of parameters are added to ones, which the results lack again
    apart : what is kept is the caller's, and stays as it is; otherwise the gradient of x, and workspaces, are written
        over it where the program allows that
    """
    program, kept = emulated.program, dict[str, Any]()
    memory = emulated.memory(steps, parameters, lambda b: np.full(parameters[b.state].size, 1.0 if add else np.nan)
                             if b.tensor == "gradient" else given.get(b.name, made.get(b.name)))
    if not apart:
        if program.dx_in and memory["dx"].nbytes == memory[program.dx_in].nbytes:
            memory["dx"] = memory[program.dx_in]
        memory |= {own: memory[place] for own, place in program.in_place.items()}
    for entry in (FORWARD, BACKWARD):
        kept = {b.name: memory[b.name].copy() for b in program.buffers if b.role == KEPT}
        for b in program.buffers:
            if b.role == WORKSPACE and (apart or b.name not in program.in_place):
                memory[b.name].view(np.uint8)[:-GUARD] = 0xFF
        emulated.carry_out({n: memory[n] for n in program.entries[entry].takes}, steps, batch, entry, add)
    emulated.check_guards(memory)
    assert not apart or all((memory[n].view(np.uint8) == a.view(np.uint8)).all() for n, a in kept.items())
    return {b.name: memory[b.name][:-GUARD // b.itemsize].astype(np.float64) - (add if b.tensor == "gradient" else 0)
            for b in program.buffers if b.role == MADE}


def train_call(emulated: Emulated, states: Sequence[str], call: Any, **how: bool) -> dict[str, Any]:
    given = {n: v for n in ("x", "dy", "lengths", "resets", "sequences") if (v := getattr(call, n, None)) is not None}
    made = {"y": call.dy.size, "dx": call.x.size}
    for name, first, last in zip(states, call.states, call.dstates, strict=True):
        given |= {f"{name}_in": first, f"d{name}_out": last}
        made |= {f"{name}_out": first.size, f"d{name}_in": first.size}
    return train(emulated, given, made, call.parameters, *call.x.shape[:2], **how)


def check(found: Mapping[str, Any], wanted: Mapping[str, Any], limit: float) -> None:
    for name, value in wanted.items():
        assert relative(found[name].reshape(-1), value.reshape(-1), 1e-6) < limit, name

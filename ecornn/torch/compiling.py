"""What layers are compiled for, and when: for the first call of its kind, shared by all torch modules of a process."""

from __future__ import annotations

import gc
from collections.abc import Collection
from functools import lru_cache

import torch

from ecornn.dtypes import DTYPES, SERVED
from ecornn.errors import ArgumentError, ScheduleError
from ecornn.layer_spec import LayerSpec
from ecornn.runtime.loader import Module
from ecornn.workload import FEW, KEEPS

NAMES = {getattr(torch, name): name for name in DTYPES}
# What is kept, by kind of device: whatever T is, which graphs leave open. PyTorch keeps about as much.
KEPT = {"cpu": "gates", "cuda": "gates"}


def checked_keep(keep: str | None) -> str | None:
    """What a caller asks a training step to keep; None: what :data:`KEPT` says.

    Raises :class:`ArgumentError` for another one.
    """
    if keep not in (None, *KEEPS):
        raise ArgumentError("keep", keep, f"None, {' or '.join(KEEPS)}")
    return keep


def serves(place: torch.device, dtype: torch.dtype) -> bool:
    """Whether layers of that data type are compiled for that kind of device."""
    return NAMES.get(dtype) in SERVED.get("llvm" if place.type == "cpu" else place.type, ())


@lru_cache(maxsize=256)
def _found(layer: LayerSpec, target: str, infinite: bool) -> Module | ScheduleError:
    from ecornn.module_cache import compiled_layer

    without_pairs = {"pairs": 0, "project_pairs": 0} if infinite else None
    try:
        return compiled_layer(layer, target, without_pairs)
    except ScheduleError as error:  # as sure as a module, and it takes as long to find
        return error
    finally:
        # TVM leaves frames in cycles, and these hold all that called them: the graph of this training step, whose
        # streams would be those of a later step that a CUDA graph captures
        gc.collect()


def compiled(layer: LayerSpec, target: str, infinite: bool = False) -> Module:
    """Its module, also for infinite weights if told so; every torch module of a process that has such a layer shares
    it. Raises :class:`ScheduleError` where no schedule serves it."""
    found = _found(layer, target, infinite)
    if isinstance(found, ScheduleError):
        raise found.with_traceback(None)
    return found


compiled.cache_clear, compiled.cache_info = _found.cache_clear, _found.cache_info  # type: ignore[attr-defined]


def few_steps(steps: int) -> int:
    """The T that a layer on a GPU is compiled for where a call has few ``steps``: 1, 2, 4 or 8, so that lengths that
    are much the same share one; 0 where they are many, and the T of the first call serves all."""
    return 1 << (steps - 1).bit_length() if steps <= FEW else 0


def fitting(bound: Collection[int], batch: int, most: int) -> int:
    """The batch of what is bound for calls of this one, of ``most`` at most; where there is none, what to compile for:
    the batch of the first call; where calls differ, some room for the next ones."""
    rooms = [room for room in sorted(bound) if batch <= room <= most]
    return rooms[0] if rooms else 1 << (batch - 1).bit_length() if bound else batch

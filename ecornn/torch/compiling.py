"""Compiling a layer for the first call of its kind, for all torch modules of a process.

float32 products on a GPU may be in TF32 where the user lets cuDNN's RNNs use it, unless a layer says more. PyTorch's
default is that they may. If its settings differ, the one nearest to an RNN wins, as with cuDNN:
``torch.backends.cudnn.rnn.fp32_precision``, else ``torch.backends.cudnn.fp32_precision``, else
``torch.backends.fp32_precision``; ``torch.backends.cudnn.allow_tf32``, the older way, sets the first.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Collection
from typing import Any

import torch

from ecornn.dtypes import DTYPES, SERVED
from ecornn.errors import ArgumentError, ScheduleError
from ecornn.layer_spec import LayerSpec
from ecornn.runtime.loader import Module
from ecornn.torch.kind import Kind
from ecornn.workload import FEW, KEEPS

NAMES = {getattr(torch, name): name for name in DTYPES}
# A training step keeps these, by kind of device, at any T, which graphs leave open. PyTorch keeps about as much.
KEPT = {"cpu": "gates", "cuda": "gates"}
MOST = 256  # layers whose outcomes a process keeps


def checked_keep(keep: str | None) -> str | None:
    """``keep`` itself, a user's choice of what a training step keeps; None leaves it to :data:`KEPT`.

    Raises :class:`ArgumentError` for any other value than these two.
    """
    if keep not in (None, *KEEPS):
        raise ArgumentError("keep", keep, f"None, {' or '.join(KEEPS)}")
    return keep


def serves(place: torch.device, dtype: torch.dtype) -> bool:
    """Tells whether layers of that data type are compiled for that kind of device."""
    return NAMES.get(dtype) in SERVED.get("llvm" if place.type == "cpu" else place.type, ())


# of a process: the layer, the kind of device, and whether it is right for infinite weights -> its module, or the error
# that no schedule serves it, which is as sure, and takes as long to find
outcomes: dict[tuple[LayerSpec, str, bool], Module | ScheduleError] = {}


def keep(layer: LayerSpec, target: str, infinite: bool, outcome: Module | ScheduleError) -> None:
    """Notes an outcome for all torch modules of the process, in place of the oldest if there are many."""
    while len(outcomes) >= MOST:
        outcomes.pop(next(iter(outcomes)), None)
    outcomes[layer, target, infinite] = outcome


def compiled(layer: LayerSpec, target: str, infinite: bool = False) -> Module:
    """The module of a layer, which all torch modules of a process share; ``infinite``: right for infinite weights, too.

    Raises :class:`ScheduleError` where no schedule serves the layer.
    """
    known = outcomes.get((layer, target, infinite))
    if known is None:
        from ecornn.module_cache import compiled_layer

        try:
            known = compiled_layer(layer, target, {"pairs": 0, "project_pairs": 0} if infinite else None)
        except ScheduleError as error:
            known = error
        finally:
            # TVM leaves frames in cycles, and these hold all that called them: the graph of this training step, whose
            # streams would be those of a later step that a CUDA graph captures
            gc.collect()
        keep(layer, target, infinite, known)
    if isinstance(known, ScheduleError):
        raise known.with_traceback(None)
    return known


def few_steps(steps: int) -> int:
    """The T that a layer on a GPU is compiled for if a call has few ``steps``: 1, 2, 4 or 8, so that similar lengths
    share a module; 0 if they are many, and one module serves all."""
    return 1 << (steps - 1).bit_length() if steps <= FEW else 0


def about(steps: int) -> int:
    """The T that a layer is compiled for which serves all calls, by the ``steps`` of the first: the nearest power of 2,
    so that programs of other lengths find its module in the cache. Records within a factor of 2 count as equally
    near."""
    return 1 << round(math.log2(steps)) if steps <= FEW else max(2 * FEW, 1 << round(math.log2(steps)))


def fitting(bound: Collection[int], batch: int, most: int) -> int:
    """The smallest batch of the ``bound`` layers that can take ``batch``, and is ``most`` at most. If there is none,
    the batch to compile for: that of the first call, or, once calls differ, the next power of 2."""
    rooms = [room for room in sorted(bound) if batch <= room <= most]
    return rooms[0] if rooms else 1 << (batch - 1).bit_length() if bound else batch


def precision_of(kind: Kind, x: Any) -> str | None:
    """``tf32`` if products of a layer of this kind on x may be in TF32 by the settings of this moment, else None."""
    if x.is_cpu or x.dtype != torch.float32:
        return None
    allowed = cudnn_allows() if kind.tf32 is None else kind.tf32
    return "tf32" if allowed else None


def cudnn_allows() -> bool:
    """Tells whether cuDNN's RNNs may use TF32."""
    rnn = getattr(torch.backends.cudnn, "rnn", None)  # PyTorch before 2.9 has one setting for all of cuDNN
    if rnn is None:
        return bool(torch.backends.cudnn.allow_tf32)
    return bool(rnn.fp32_precision == "tf32")

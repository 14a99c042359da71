"""Times of ONNX Runtime's own nodes and of compiled ones, by which :func:`ecornn.onnxruntime.rewrite` leaves alone what
does not gain."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ecornn.bench.turns import host_turns
from ecornn.compiler import device_of
from ecornn.device import Device
from ecornn.errors import EcornnError
from ecornn.onnx.constants import Scope
from ecornn.onnx.node import INPUTS, LENGTHS, Node
from ecornn.onnxruntime import library
from ecornn.tune.timing import wall_clock

PROVIDERS = {"llvm": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
SIDES = "own", "compiled"
ROUNDS, MOST = 7, 3.0  # turns of each side, and seconds of all

Times = tuple[float, float]  # seconds of a call with ONNX Runtime's own nodes, and with compiled ones


def provider(device: Device) -> str | None:
    """The execution provider that runs nodes for this device here; None: nodes for it cannot be timed here."""
    try:
        import onnxruntime

        here = device_of("cpu" if device.kind == "llvm" else "cuda")
    except (ImportError, EcornnError):
        return None
    name = PROVIDERS[device.kind]
    return name if here == device and name in onnxruntime.get_available_providers() else None


def alone(node: Any, meaning: Node, scope: Scope, rows: int, steps: int) -> tuple[Any, dict[str, Any]]:
    """A graph of this node of ``scope`` alone, with its weights, and random feeds of B ``rows`` and T ``steps``."""
    from onnx import helper, numpy_helper

    element = helper.np_dtype_to_tensor_dtype(np.dtype(meaning.dtype))
    directions = 1 + (meaning.direction == "bidirectional")
    x, state = [steps, rows, meaning.input], [directions, rows, meaning.hidden]
    if meaning.batch_first:
        x, state = [rows, steps, meaning.input], [rows, directions, meaning.hidden]
    feeds, given = {}, dict(zip(INPUTS, node.input, strict=False))
    for key, name in given.items():
        if name and key == LENGTHS:
            feeds[name] = np.full(rows, steps, np.int32)
        elif name and key not in "WRBP":
            feeds[name] = np.random.default_rng().standard_normal(x if key == "X" else state).astype(meaning.dtype)
    weights = [numpy_helper.from_array(scope.constant(given[key]), given[key]) for key in "WRBP" if given.get(key)]
    graph = helper.make_graph(
        [type(node).FromString(node.SerializeToString())], "alone",
        [helper.make_tensor_value_info(name, element if value.dtype == meaning.dtype else helper.TensorProto.INT32,
                                       value.shape) for name, value in feeds.items()],
        [helper.make_tensor_value_info(name, element, None) for name in node.output if name], weights)
    return graph, feeds


def feeds_of(model: Any, sizes: Mapping[str, int], lengths: set[str], steps: int) -> dict[str, Any] | None:
    """Feeds for the inputs of a model: random numbers; T for ``lengths``; zeros for other integers, which are indices
    into any table. None: the model does not say enough.

    ``sizes``: B or T by the name of an axis.
    """
    from onnx import helper

    feeds, random = {}, np.random.default_rng()
    constants = {tensor.name for tensor in model.graph.initializer}
    for value in model.graph.input:
        if value.name in constants:
            continue
        axes = value.type.tensor_type.shape.dim
        shape = [axis.dim_value or sizes.get(axis.dim_param, 0) for axis in axes]
        dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        if not all(shape) or not shape:  # an open axis, or a number, of loops perhaps
            return None
        values = (np.full(shape, steps) if value.name in lengths else
                  random.standard_normal(shape) if dtype.kind not in "iub" else np.zeros(shape))
        feeds[value.name] = values.astype(dtype)
    return feeds if lengths - {""} <= feeds.keys() else None


def measured(own: Any, compiled: Any, feeds: Mapping[str, Any], folder: Path, where: str) -> Times | None:
    """Medians of calls of two models that take turns; None if ONNX Runtime cannot run its own so.

    ``own``, ``compiled``: files or serialized models; ``folder``: that of the library and the modules of ``compiled``;
    ``where``: the execution provider.
    """
    import onnxruntime

    options = [onnxruntime.SessionOptions() for _ in range(2)]
    for one in options:
        one.log_severity_level = 4  # what ONNX Runtime cannot run is no news
    library.with_library(folder / library.NAME, options[1])
    calls = []
    for model, one in zip((own, compiled), options, strict=True):
        try:
            session = onnxruntime.InferenceSession(model, one, providers=[where])
            calls.append(partial(session.run, None, feeds))
            calls[-1]()
        except Exception:  # ONNX Runtime raises types of its own, for feeds that do not fit and for nodes that it lacks
            if model is own:
                return None
            raise
    turns, _ = host_turns(dict(zip(SIDES, calls, strict=True)), lambda: None, ROUNDS, MOST, wall_clock)
    before, after = (float(np.median([*chain(*turns[side])])) for side in SIDES)
    return before, after

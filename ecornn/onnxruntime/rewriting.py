"""``rewrite()``: a model whose recurrent nodes are compiled, beside it the modules and the library that calls them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ecornn import checksum, temporary
from ecornn.bench.turns import host_turns
from ecornn.boundary import public
from ecornn.compiler import compile_layer, device_of
from ecornn.device import Device
from ecornn.errors import ArgumentError, BuildError, EcornnError, ModuleError
from ecornn.layer_spec import LayerSpec
from ecornn.onnx.constants import DOMAINS, Scope
from ecornn.onnx.layer import spec_of
from ecornn.onnx.node import INPUTS, LENGTHS, Node, Shared, from_proto, load, recurrent, title
from ecornn.onnxruntime import library
from ecornn.onnxruntime.replacing import DOMAIN, Compiled, Names, Replaced, Tensors, apply, replacement
from ecornn.tune.timing import wall_clock
from ecornn.workload import BATCH, SEQ

DEEPEST = 31  # bodies in bodies: protobuf reads 100 messages in one another; a body is the third of three
FORMAT = 4  # of the file; before that, all initializers had to be inputs, which no call brought
OWN_OPSET, IR = 14, 8  # of models of one node: the operators' version that has layouts, and all that is served knows
OPSET = 7  # the recurrent operators are as they are since then
EXTERNAL = 1 << 30  # bytes of weights above which they are in a file of their own: a protobuf has room for 2 GiB
PROVIDERS = {"llvm": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
SIDES = "own", "compiled"
ROUNDS, MOST = 7, 3.0  # turns of each side, and seconds of all

Times = tuple[float, float]  # seconds of a call with ONNX Runtime's own nodes, and with compiled ones


@dataclass(frozen=True)
class Taken:
    """A node that is compiled: its name, its operator, the layer, the module's file, and ``times``, seconds of a call
    of ONNX Runtime's node and of the compiled one, None if they were not taken."""

    node: str
    op: str
    layer: LayerSpec
    module: Path
    times: Times | None = None


@dataclass(frozen=True)
class Left:
    """A node that stays as it is: its name, its operator, and why."""

    node: str
    op: str
    reason: str


@dataclass(frozen=True)
class Rewritten:
    """The files that :func:`rewrite` wrote, the nodes that are compiled, and those that are not; and ``times``, seconds
    of a call of the model before and after, None if they were not taken."""

    model: Path
    library: Path
    taken: tuple[Taken, ...]
    left: tuple[Left, ...]
    times: Times | None = None


@public
def rewrite(model: Any, out: str | os.PathLike[str], *, batch: int | None = None, seq: int | None = None,
            target: str | Device | None = None, dtype: str | None = None, measure: bool = True) -> Rewritten:
    """Writes a model whose LSTM, GRU and RNN nodes are compiled, for :func:`ecornn.onnxruntime.session_options`.

    Beside ``out``, for example fast.onnx, is a folder, fast.modules, with the operator library and the modules, which
    stay together; the model may lie elsewhere. Weights are tensors of the new model, in place of those of the nodes.

    Parameters
    ----------
    model : a file's name or an ``onnx.ModelProto``, which stays as it is
    out : the new model's file; an older one is replaced
    batch : the largest B that a module takes at once; on a CPU calls may have more, which it takes part by part.
        Default: the model's, and 20 where it leaves it open
    seq : the length T to expect, of which every one is served; default: the model's, and 300 where it leaves it open
    target : as of :func:`ecornn.compile`. Nodes for a GPU run where the session has the CUDA execution provider
    dtype : the type that the nodes compute in; default: their own, but on a CPU float32 for those of 16 bits
    measure : whether ONNX Runtime's own nodes and compiled ones are timed, in turns, at these B and T: nodes that do
        not gain stay as they are, and all of them if the model as a whole does not. It takes ONNX Runtime, and the
        machine that the nodes are for; elsewhere, and where ONNX Runtime cannot run a node, nothing is timed

    Raises
    ------
    ArgumentError : ``out`` is the model itself; it has no node that can be compiled: the message has the reasons
    ModuleError : the model cannot be read, or contradicts itself
    BuildError : there is no C++ compiler"""
    out = Path(out)
    if out.suffix != ".onnx" or (isinstance(model, (str, os.PathLike)) and out.exists() and out.samefile(model)):
        raise ArgumentError("out", str(out), "a name that ends with .onnx, and not the model itself")
    device, changed = device_of(target), _own(model)
    opset = next((o.version for o in changed.opset_import if o.domain in DOMAINS), 0)
    if opset < OPSET:
        raise ArgumentError("model", f"one with ONNX's operators of version {opset}",
                            f"{OPSET} or newer: see onnx.version_converter")
    sizes, modules = Sizes(changed, batch, seq), Modules(library.folder_of(out), device)
    scopes = [*Scope(changed.graph, changed.opset_import).inner()]
    if (depth := max(scope.depth for scope in scopes)) > DEEPEST:
        raise ModuleError(f"the model's graphs are nested {depth} deep: a file that can be read has at most {DEEPEST}")
    names = Names(scopes)
    nodes, inside = recurrent(changed, {value.name for value in changed.graph.input})
    where = provider(device) if measure else None
    taken: list[tuple[Replaced, Taken]] = []
    left = [Left(title(n), n.op_type, f"it is in the function {name}; inline the functions of the model (onnx.inliner)")
            for name, n in inside]
    weights: Shared = {}
    tensors = {scope: Tensors(names) for scope, _ in nodes}
    for scope, node in nodes:
        try:
            if not node.input or not node.input[0]:
                raise ModuleError(f"node {title(node)}: it has no X")
            meaning = from_proto(node, {name: scope.constant(name) for name in node.input[1:] if name}, weights)
            rows, steps = sizes.of(meaning, node.input[0])
            layer = spec_of(meaning, device, rows, steps, dtype, lengths=LENGTHS in meaning.inputs)
            compiled = modules.of(layer)
            times = None if where is None else modules.times(compiled, scope, node, meaning, (rows, steps), where)
            if times is not None and times[0] <= times[1]:
                left.append(Left(title(node), node.op_type, "it is not faster when compiled ({}; compiled {})".format(
                    *map(milliseconds, times))))
                continue
            replaced = scope, node, replacement(node, meaning, tensors[scope], compiled)
            taken.append((replaced, Taken(title(node), node.op_type, layer, compiled.path, times)))
        except BuildError:
            raise
        except EcornnError as error:
            left.append(Left(title(node), node.op_type, str(error)))
    if not modules.known:
        reasons = "; ".join(f"{one.node} ({one.op}): {one.reason}" for one in left) or "this model has none"
        said = str(model) if isinstance(model, (str, os.PathLike)) else type(model)
        raise ArgumentError("model", said, f"a model with an LSTM, GRU or RNN that can be compiled; {reasons}")
    own = changed.SerializeToString() if where and taken and not _large(changed) else b""
    apply(changed, [replaced for replaced, _ in taken], tensors)
    made = library.write(modules.folder)
    _save(changed, out, bool(taken))
    times = None
    if own and where and (feeds := feeds_of(changed, sizes.axes, {n.input[4] for _, n in nodes if len(n.input) > 4},
                                            sizes.steps)) is not None:
        times = measured(own, str(out), feeds, modules.folder, where)
    if times is not None and times[0] <= times[1]:
        reason = "the model is not faster with compiled nodes ({}; compiled {})".format(*map(milliseconds, times))
        left += [Left(one.node, one.op, reason) for _, one in taken]
        taken, times = [], None
        changed.ParseFromString(own)
        _save(changed, out, False)
    modules.remove_all_but({one.module for _, one in taken})
    return Rewritten(out, made, tuple(one for _, one in taken), tuple(left), times)


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


class Modules:
    """The modules of a rewritten model for one device, in its folder; a layer of several nodes is compiled once."""

    def __init__(self, folder: Path, device: Device) -> None:
        self.folder, self.device = folder, device  # where they lie, and what they are for
        self.known: dict[str, Compiled] = {}  # by the names of their layers
        self._times: dict[tuple[Any, ...], Times | None] = {}

    def of(self, layer: LayerSpec) -> Compiled:
        """The module of a layer. Raises what :func:`ecornn.compile` raises."""
        key = f"{layer.workload} {layer.stack}"
        if key not in self.known:
            module = compile_layer(layer, target=self.device)
            digest = checksum.said(module.path.read_bytes()).hex()
            cell = re.sub(r"\W+", "-", layer.workload.cell)[:40].strip("-")
            path = self.folder / f"{cell}-{digest[:16]}.so"
            self.folder.mkdir(parents=True, exist_ok=True)
            module.save(path)
            self.known[key] = Compiled(path, self.device.kind, layer.workload.dtype, digest,
                                       [p.name for p in module.manifest.parameters])
        return self.known[key]

    def times(self, compiled: Compiled, scope: Scope, node: Any, meaning: Node, sizes: tuple[int, int],
              where: str) -> Times | None:
        """Seconds of a call of a node and of its module by itself, taken once of nodes alike; None: it cannot be."""
        from onnx import helper

        key = compiled.path, meaning.dtype, meaning.batch_first, sizes, tuple(meaning.outputs), tuple(meaning.inputs)
        if key not in self._times:
            if not self._times:
                library.write(self.folder)
            graph, feeds = alone(node, meaning, scope, *sizes)
            opsets = [helper.make_opsetid("", OWN_OPSET), helper.make_opsetid(DOMAIN, 1)]  # for ours, too
            own, changed = (helper.make_model(graph, opset_imports=opsets, ir_version=IR) for _ in range(2))
            inner = Scope(changed.graph, changed.opset_import)
            tensors, one = Tensors(Names([inner])), inner.nodes[0]
            apply(changed, [(inner, one, replacement(one, meaning, tensors, compiled))], {inner: tensors})
            self._times[key] = measured(own.SerializeToString(), changed.SerializeToString(), feeds, self.folder, where)
        return self._times[key]

    def remove_all_but(self, paths: set[Path]) -> None:
        for compiled in self.known.values():
            if compiled.path not in paths:
                compiled.path.unlink(missing_ok=True)


class Sizes:
    """T and B of recurrent nodes: as given, else as the model says, else the defaults."""

    def __init__(self, model: Any, batch: int | None, seq: int | None) -> None:
        import onnx

        self._batch, self._seq = batch, seq
        self.axes: dict[str, int] = {}  # T or B by the names that the model has for open axes
        self.steps = seq or SEQ  # T of the last node that was asked for
        with contextlib.suppress(Exception):  # a model that is wrong, or too large for it, says nothing
            model = onnx.shape_inference.infer_shapes(model)
        values = (value for scope in Scope(model.graph, model.opset_import).inner()
                  for value in (*scope.graph.input, *scope.graph.value_info))
        self._shapes = {value.name: [*value.type.tensor_type.shape.dim] for value in values
                        if value.type.HasField("tensor_type")}

    def of(self, node: Node, x: str) -> tuple[int, int]:
        """(B, T) of a node whose X has that name."""
        shape = self._shapes.get(x, [])
        axes = shape[:2] if len(shape) == 3 else []
        if node.batch_first:
            axes.reverse()
        steps, rows = (axis.dim_value for axis in axes) if axes else (0, 0)  # 0: open
        rows, self.steps = self._batch or rows or BATCH, self._seq or steps or SEQ
        self.axes |= {axis.dim_param: size for axis, size in zip(axes, (self.steps, rows), strict=False)
                      if axis.dim_param}
        return rows, self.steps


def _own(model: Any) -> Any:
    """A model that may be changed, whose inputs are those that a call may bring."""
    own = load(model)
    if own is model:
        own = type(model)()
        own.CopyFrom(model)
    if own.ir_version < FORMAT:
        constants = {t.name for t in own.graph.initializer} | {t.values.name for t in own.graph.sparse_initializer}
        inputs = [value for value in own.graph.input if value.name not in constants]
        del own.graph.input[:]
        own.graph.input.extend(inputs)
        own.ir_version = FORMAT
    return own


def _large(model: Any) -> bool:
    return sum(len(t.raw_data) for t in model.graph.initializer) > EXTERNAL


def _save(model: Any, out: Path, ours: bool) -> None:
    """Writes the model, whole or not at all, large weights in a file of their own; ``ours``: it has nodes of ours."""
    import onnx
    from onnx import helper

    if ours and all(o.domain != DOMAIN for o in model.opset_import):
        model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    large = _large(model)
    more: dict[str, Any] = {"save_as_external_data": True, "location": f"{out.name}.data"} if large else {}
    with temporary.replacing(out) as beside:
        if large:
            (out.parent / f"{out.name}.data").unlink(missing_ok=True)  # onnx adds to a file that is there
        onnx.save(model, beside, **more)


# -- times
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
    """Random feeds for the inputs of a model; T for ``lengths``, and zeros for other integers, indices of any table.
    None: the model does not say enough. ``sizes``: B or T by the name of an axis."""
    from onnx import helper

    feeds, random = {}, np.random.default_rng()
    constants = {tensor.name for tensor in model.graph.initializer}
    for value in (v for v in model.graph.input if v.name not in constants):
        given = value.type.tensor_type
        shape = [axis.dim_value or sizes.get(axis.dim_param, 0) for axis in given.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(given.elem_type)
        if not all(shape) or not shape:  # an open axis, or a number, of loops perhaps
            return None
        values = (np.full(shape, steps) if value.name in lengths else
                  random.standard_normal(shape) if dtype.kind not in "iub" else np.zeros(shape))
        feeds[value.name] = values.astype(dtype)
    return feeds if lengths - {""} <= feeds.keys() else None


def measured(own: Any, compiled: Any, feeds: Mapping[str, Any], folder: Path, where: str) -> Times | None:
    """Medians of calls of two models, files or serialized, in turns; None if ONNX Runtime cannot run its own.
    ``folder``: of the library and the modules of ``compiled``; ``where``: the execution provider."""
    import onnxruntime

    options = onnxruntime.SessionOptions(), onnxruntime.SessionOptions()
    library.with_library(folder / library.NAME, options[1])
    calls = []
    for model, one in zip((own, compiled), options, strict=True):
        one.log_severity_level = 4  # what ONNX Runtime cannot run is no news
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

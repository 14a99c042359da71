"""A recurrent node, compiled: called with ONNX's inputs, in ONNX's shapes."""

from __future__ import annotations

from typing import Any

import numpy as np

from ecornn.boundary import public
from ecornn.device import Device
from ecornn.errors import ArgumentError, DTypeError, ShapeError
from ecornn.layer_spec import LayerSpec
from ecornn.onnx.node import Node
from ecornn.runtime.layer import Layer
from ecornn.workload import BATCH, SEQ


class OnnxLayer:
    """A node with its compiled ``layer``, which has PyTorch's shapes; made by :func:`compile`."""

    def __init__(self, node: Node, layer: Layer) -> None:
        self.node, self.layer = node, layer

    @public
    def __call__(self, x: Any, sequence_lens: Any = None, initial_h: Any = None,
                 initial_c: Any = None) -> tuple[Any, ...]:
        """Runs the node on NumPy arrays of its data type, or of the layer's, and returns such.

        X is (T, B, I), states (D, B, H); with layout 1 they are (B, T, I) and (B, D, H). Returns Y (T, D, B, H), or,
        batch first, (B, T, D, H), then Y_h and, for an LSTM, Y_c of the states' shape. Rows without steps end with
        zeros. What is not given is the node's constant, else all of T and states of zeros. Raises
        :class:`ArgumentError` where the node takes it from elsewhere in the model, :class:`DTypeError` and
        :class:`ShapeError` where an array does not fit."""
        node = self.node
        sequence_lens, initial_h, initial_c = map(self._input, ("sequence_lens", "initial_h", "initial_c"),
                                                  (sequence_lens, initial_h, initial_c))
        directions = 1 + (node.direction == "bidirectional")
        x = array(x, "X")
        dtype, computed = x.dtype, self.layer.manifest.workload.dtype
        if dtype.name not in (node.dtype, computed):
            raise DTypeError("X.dtype", dtype.name, f"{node.dtype}, as the node's")
        if x.ndim != 3:
            raise ShapeError("X.shape", x.shape, "(B, T, I)" if node.batch_first else "(T, B, I)")
        x = x.swapaxes(0, 1) if node.batch_first else x
        batch = x.shape[1]

        def inwards(name: str, state: Any) -> Any:
            value = np.zeros((directions, batch, node.hidden), dtype) if state is None else array(state, name)
            if value.dtype.name not in (node.dtype, computed, "float32"):  # constants are of that
                raise DTypeError(f"{name}.dtype", value.dtype.name, f"{node.dtype}, as the node's")
            value = value.swapaxes(0, 1) if node.batch_first and state is not None and value.ndim == 3 else value
            if value.shape != (directions, batch, node.hidden):
                shape = "(B, D, H)" if node.batch_first else "(D, B, H)"
                raise ShapeError(f"{name}.shape", np.shape(state), f"{shape} with D={directions} H={node.hidden}")
            return as_type(value if directions > 1 else value[0], computed)

        given = (("initial_h", initial_h), ("initial_c", initial_c))[:1 + (node.op == "LSTM")]
        state = None if initial_h is None and initial_c is None else tuple(inwards(n, s) for n, s in given)
        y, after = self.layer(as_type(x, computed), state, lengths=sequence_lens)
        y = y.astype(dtype, copy=False).reshape(*y.shape[:2], directions, node.hidden)
        states = [s.astype(dtype, copy=False).reshape(directions, batch, node.hidden) for s in after]
        if sequence_lens is not None:  # as ONNX Runtime has them; a layer leaves the first states
            for s in states:
                s[:, np.equal(sequence_lens, 0)] = 0
        if node.batch_first:
            return y.swapaxes(0, 1), *(s.swapaxes(0, 1) for s in states)
        return y.swapaxes(1, 2), *states

    def _input(self, name: str, value: Any) -> Any:
        if value is None and name in self.node.inputs:
            value = self.node.inputs[name]
            if value is None:
                raise ArgumentError(name, None, f"an array, since it is not a constant of the model that the node "
                                    f"{self.node.name} is in")
        return value


def array(value: Any, name: str) -> Any:
    """``value`` as a NumPy array. Raises :class:`ArgumentError` where it cannot be one."""
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(name, type(value), f"an array ({error})") from error


def as_type(value: Any, dtype: str) -> Any:
    if dtype == "bfloat16":
        import ml_dtypes

        return value.astype(ml_dtypes.bfloat16, copy=False)
    return value.astype(dtype, copy=False)


@public
def compile(node: Node, *, batch: int = BATCH, seq: int = SEQ, target: str | Device | None = None,
            dtype: str | None = None) -> OnnxLayer:
    """Compiles a node, for calls of up to ``batch`` rows and lengths of about ``seq``. ``dtype``: the type that it
    computes in; default: the node's own, but on a CPU float32 for one of 16 bits. Raises what :func:`ecornn.compile`
    raises, and :class:`DTypeError` for a node of float64 on a GPU where ``dtype`` does not say that less will do."""
    from ecornn.compiler import compile_layer, device_of

    if not isinstance(node, Node):
        raise ArgumentError("node", type(node), "a Node that ecornn.onnx.read() returned")
    device = device_of(target)
    module = compile_layer(spec_of(node, device, batch, seq, dtype), target=device)
    return OnnxLayer(node, module.bind(node.weights))


def spec_of(node: Node, device: Device, batch: int, seq: int, dtype: str | None = None,
            lengths: bool = True) -> LayerSpec:
    """The layer that a node is on a device; ``dtype`` as of :func:`compile`, which raises the same."""
    if dtype is None and node.dtype == "float64" and device.kind == "cuda":
        raise DTypeError("dtype", node.dtype, "float32, float16 or bfloat16 in the node, for a GPU; else pass "
                         "dtype='float32', with relative errors of about 1e-6, or target='cpu'")
    chosen = dtype or (node.dtype if device.kind == "cuda" or node.dtype == "float64" else "float32")
    return LayerSpec(node.cell, node.hidden, node.input, batch, seq, chosen,
                     bidirectional=node.direction == "bidirectional", reverse=node.direction == "reverse",
                     lengths=lengths)

"""A recurrent node, compiled: called with ONNX's inputs, in ONNX's shapes."""

from __future__ import annotations

from typing import Any

import numpy as np

from ecornn.device import Device
from ecornn.errors import ArgumentError, ShapeError
from ecornn.layer_spec import LayerSpec
from ecornn.onnx.node import Node
from ecornn.runtime.loader import Layer


class OnnxLayer:
    """A node with its compiled layer; made by :func:`compile`.

    Attributes
    ----------
    node : what was compiled
    layer : the layer itself, in PyTorch's shapes
    """

    def __init__(self, node: Node, layer: Layer) -> None:
        self.node, self.layer = node, layer

    def __call__(self, x: Any, sequence_lens: Any = None, initial_h: Any = None,
                 initial_c: Any = None) -> tuple[Any, ...]:
        """Runs the node on NumPy arrays, float32.

        X is (T, B, I), states (D, B, H); with layout 1 they are (B, T, I) and (B, D, H). Returns Y
        (T, D, B, H), or (B, T, D, H), then Y_h and, for an LSTM, Y_c of the states' shape.

        What is not given is the node's constant; where it has none, all of T and states of zeros. Raises
        :class:`ArgumentError` where the node takes it from elsewhere in the model.
        """
        node = self.node
        sequence_lens, initial_h, initial_c = map(self._input, ("sequence_lens", "initial_h", "initial_c"),
                                                  (sequence_lens, initial_h, initial_c))
        directions = 1 + (node.direction == "bidirectional")
        x = np.asarray(x)
        if x.ndim != 3:
            raise ShapeError("X.shape", x.shape, "(B, T, I)" if node.batch_first else "(T, B, I)")
        x = x.swapaxes(0, 1) if node.batch_first else x
        batch = x.shape[1]

        def inwards(name: str, state: Any) -> Any:
            value = np.zeros((directions, batch, node.hidden), x.dtype) if state is None else np.asarray(state)
            value = value.swapaxes(0, 1) if node.batch_first and state is not None else value
            if value.shape != (directions, batch, node.hidden):
                shape = "(B, D, H)" if node.batch_first else "(D, B, H)"
                raise ShapeError(f"{name}.shape", np.shape(state), f"{shape} with D={directions} H={node.hidden}")
            return value if directions > 1 else value[0]

        given = (("initial_h", initial_h), ("initial_c", initial_c))[:1 + (node.op == "LSTM")]
        state = None if initial_h is None and initial_c is None else tuple(inwards(n, s) for n, s in given)
        y, after = self.layer(x, state, lengths=sequence_lens)
        y = y.reshape(*y.shape[:2], directions, node.hidden)
        states = [s.reshape(directions, batch, node.hidden) for s in after]
        if node.batch_first:
            return y.swapaxes(0, 1), *(s.swapaxes(0, 1) for s in states)
        return y.swapaxes(1, 2), *states

    def _input(self, name: str, value: Any) -> Any:
        """``value``, or the node's own."""
        if value is None and name in self.node.inputs:
            value = self.node.inputs[name]
            if value is None:
                raise ArgumentError(name, None, f"an array: the node {self.node.name} takes it from the model, where "
                                    "it is no constant")
        return value


def compile(node: Node, *, batch: int = 1, seq: int = 100, target: str | Device | None = None) -> OnnxLayer:
    """Compiles a node, for calls of up to ``batch`` rows and lengths of about ``seq``.

    Raises what :func:`ecornn.compile` raises.
    """
    from ecornn.compiler import compile_layer

    module = compile_layer(LayerSpec(
        node.cell, node.hidden, node.input, batch, seq, bidirectional=node.direction == "bidirectional",
        reverse=node.direction == "reverse", lengths=True), target=target)
    return OnnxLayer(node, module.bind(node.weights))

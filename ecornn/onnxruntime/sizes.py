"""How large the inputs of a model's nodes are, as far as the model says."""

from __future__ import annotations

import contextlib
from typing import Any

from ecornn.onnx.constants import Scope
from ecornn.onnx.node import Node
from ecornn.workload import BATCH, SEQ


class Sizes:
    """T and B of recurrent nodes; what is given goes before what the model says, that before the defaults."""

    def __init__(self, model: Any, batch: int | None, seq: int | None) -> None:
        import onnx

        self._batch, self._seq = batch, seq
        self._shapes: dict[str, list[int]] = {}
        with contextlib.suppress(Exception):  # a model that is wrong, or too large for it, says nothing
            model = onnx.shape_inference.infer_shapes(model)
        for scope in Scope(model.graph, model.opset_import).inner():
            for value in (*scope.graph.input, *scope.graph.value_info):
                if value.type.HasField("tensor_type"):
                    self._shapes[value.name] = [d.dim_value for d in value.type.tensor_type.shape.dim]

    def of(self, node: Node, x: str) -> tuple[int, int]:
        """(B, T) of a node whose X has that name."""
        shape = self._shapes.get(x, [])
        steps, rows = shape[:2] if len(shape) == 3 else (0, 0)  # 0: open
        if node.batch_first:
            steps, rows = rows, steps
        return self._batch or rows or BATCH, self._seq or steps or SEQ

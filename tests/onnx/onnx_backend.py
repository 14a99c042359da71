"""ecornn as a backend of ONNX's own tests: models of one recurrent node."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx.backend.base import Backend, BackendRep

from ecornn.onnx import compile
from ecornn.onnx.node import from_proto


class Prepared(BackendRep):
    """A model of one node, its weights among the inputs."""

    def __init__(self, model: Any, device: str) -> None:
        (self.node,), self.graph, self.device = model.graph.node, model.graph, device

    def run(self, inputs: Any, **_: Any) -> tuple[Any, ...]:
        values = dict(zip((i.name for i in self.graph.input), inputs, strict=True))
        node = from_proto(self.node, values)
        names = (*self.node.input, *("",) * 8)
        x, lengths, h, c = (values.get(names[k]) for k in (0, 4, 5, 6))
        batch, seq = x.shape[:2] if node.batch_first else x.shape[1::-1]
        made = compile(node, batch=batch, seq=seq, target=self.device)(x, lengths, h, c)
        return tuple(np.ascontiguousarray(made[k]) for k, o in enumerate(self.node.output) if o)


class RecurrentBackend(Backend):
    """Serves models whose only node is LSTM, GRU or RNN."""

    @classmethod
    def is_compatible(cls, model: Any, device: str = "CPU", **_: Any) -> bool:
        return len(model.graph.node) == 1 and model.graph.node[0].op_type in ("LSTM", "GRU", "RNN")

    @classmethod
    def prepare(cls, model: Any, device: str = "CPU", **_: Any) -> Prepared:
        return Prepared(model, {"CPU": "cpu", "CUDA": "cuda"}[device])

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device in ("CPU", "CUDA")


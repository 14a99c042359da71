"""ONNX's recurrent operators, LSTM, GRU and RNN, as compiled layers; needs the ``onnx`` package to read models.

    node = ecornn.onnx.read("model.onnx", "encoder_lstm")
    layer = ecornn.onnx.compile(node, batch=8, seq=100)
    y, y_h, y_c = layer(x, sequence_lens=lengths)

A node by itself runs here, not a whole model: cut the model at the node, and call the layer in between."""

from __future__ import annotations

from ecornn.onnx.layer import OnnxLayer, compile
from ecornn.onnx.node import Node, read

__all__ = ["Node", "OnnxLayer", "compile", "read"]

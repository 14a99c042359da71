"""Models of ONNX Runtime whose LSTM, GRU and RNN nodes are compiled.

    import onnxruntime
    import ecornn.onnxruntime
    ecornn.onnxruntime.rewrite("model.onnx", "fast.onnx", batch=8, seq=100)
    session = onnxruntime.InferenceSession("fast.onnx", ecornn.onnxruntime.session_options("fast.onnx"))

Beside the model is a folder, fast.modules, with an operator library, which a program in any language registers with
its session options, and the modules. To rewrite takes the extra ``onnx`` and a C++ compiler; to run, ONNX Runtime 1.18
or newer. Where ONNX Runtime is there, nodes that do not gain stay as they are."""

from __future__ import annotations

from ecornn.onnxruntime.library import session_options
from ecornn.onnxruntime.rewriting import Left, Rewritten, Taken, rewrite

__all__ = ["Left", "Rewritten", "Taken", "rewrite", "session_options"]

"""``LSTM``, ``GRU`` and ``RNN`` with the constructor, parameters and calls of ``torch.nn``'s."""

from __future__ import annotations

from typing import Any

import torch

from ecornn.errors import ArgumentError
from ecornn.torch import engine
from ecornn.torch.compiling import checked_keep
from ecornn.torch.sequences import Sequences


class Compiled(Sequences, torch.nn.RNNBase):
    """What the three have in common: where torch would compute, a compiled module does, and where gradients are asked
    for one that has them.

    For forward derivatives, in torch.jit.trace, for a batch of no sequences, where the device or the data type is not
    compiled for (on a CPU 16 bits and autocast), and for gradients on a GPU that no schedule has, PyTorch's
    own forward runs, on the same parameters: :mod:`ecornn.torch.falling_back`. The base is RNNBase, since torch.compile
    refuses to look into a ``torch.nn.LSTM``.

    Beside torch's arguments ``tf32``: whether products of float32 on a GPU may be in TF32; None: where cuDNN's RNNs
    may, :mod:`ecornn.torch.precision`; and ``keep``: what a training step keeps, as of :func:`ecornn.compile`; None:
    ``gates``.
    """

    def __init__(self, mode: str, *args: Any, tf32: bool | None = None, keep: str | None = None,
                 **kwargs: Any) -> None:
        if mode != "LSTM" and "proj_size" in kwargs:
            raise ArgumentError("proj_size", kwargs["proj_size"], "nothing: proj_size argument is only supported for "
                                "LSTM, not RNN or GRU")
        super().__init__(mode, *args, **kwargs)
        self.tf32, self.keep = tf32, checked_keep(keep)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        engine.rebind(self)  # in inference mode copies leave no other trace


class LSTM(Compiled):
    """``torch.nn.LSTM`` by compiled modules. A projection costs as much as one that keeps the size."""

    TORCH = torch.nn.LSTM
    state_names = ("h", "c")
    get_expected_cell_size = torch.nn.LSTM.get_expected_cell_size
    check_forward_args = torch.nn.LSTM.check_forward_args  # type: ignore[assignment]
    permute_hidden = torch.nn.LSTM.permute_hidden  # type: ignore[assignment]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("LSTM", *args, **kwargs)


class GRU(Compiled):
    """``torch.nn.GRU`` by compiled modules."""

    TORCH = torch.nn.GRU

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("GRU", *args, **kwargs)


class RNN(Compiled):
    """``torch.nn.RNN`` (tanh or relu) by compiled modules."""

    TORCH = torch.nn.RNN

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # as torch.nn.RNN has it: the fourth positional argument, or by name
        self.nonlinearity = args[3] if len(args) > 3 else kwargs.pop("nonlinearity", "tanh")
        if self.nonlinearity not in ("tanh", "relu"):
            raise ArgumentError("nonlinearity", self.nonlinearity, "'tanh' or 'relu'")
        super().__init__(f"RNN_{self.nonlinearity.upper()}", *args[:3], *args[4:], **kwargs)

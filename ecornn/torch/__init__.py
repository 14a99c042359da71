"""Recurrent layers for PyTorch models: ``torch.nn``'s own, run by compiled modules.

    layer = ecornn.torch.LSTM(800, 800, num_layers=2, bidirectional=True)   # as torch.nn.LSTM
    report = ecornn.torch.replace(model)                                    # every layer and cell of a model
    ecornn.torch.prepare(model, example)                                    # compiles ahead what model(example) needs
    print(ecornn.torch.profile(model, example))                             # what each layer gains
    layer = ecornn.torch.Recurrent(MyCell(), 128, 512)                      # a cell of one's own
    layer = ecornn.torch.Recurrent(ecornn.torch.cell(module), 128, 512)     # a step that is written in PyTorch

A layer is compiled at its first call of a shape, for the device and data type that it is on. It sees its weights
change, also by training; only after writes through ``.data`` and the like on a GPU, or of single values, it has to be
told:

    ecornn.torch.rebind(model)

float32 layers on a GPU multiply in TF32 wherever cuDNN's RNNs may, which is PyTorch's default; ``replace(model,
tf32=False)`` keeps them exact, as ``torch.backends.cudnn.rnn.fp32_precision = "ieee"`` does.

Layers train: in float32, float16 and bfloat16, on CPUs also in float64, on GPUs also under autocast, gradients are
those of compiled modules. Where PyTorch has to run a warning says why, and with ``ECORNN_STRICT=1`` in the environment
that is an error. Gradients of gradients are refused: ``restore(model)`` makes its layers torch.nn's again.

Under torch.compile, torch.export, the modes and transforms of torch.func and others, a layer is one operator,
``torch.ops.ecornn.recurrent``, or, with gradients, ``recurrent_forward`` with ``recurrent_backward``. They have the
weights among their arguments: a program of torch.export runs in any process that has imported ``ecornn.torch``. Where
there is no compiler it finds its modules in the folder that ``ECORNN_MODULES`` names, to which ``save_modules(folder)``
copied what the process that made the program had called. Forward derivatives are PyTorch's own.

On a CPU, PyTorch's own OpenMP threads do the work of our calls, too, as many as ``torch.set_num_threads`` allows; one
where there is little to do. Calls at the same time share the cores."""

from __future__ import annotations

from ecornn.errors import missing

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise missing(error, "ecornn.torch", "torch") from error

from ecornn.module_cache import save_modules
from ecornn.torch.cells import GRUCell, LSTMCell, RNNCell
from ecornn.torch.modules import GRU, LSTM, RNN
from ecornn.torch.recurrent import Recurrent
from ecornn.torch.replacing import Profile, Report, prepare, profile, rebind, replace, restore
from ecornn.torch.traced import cell
from ecornn.torch.traced_step import TracedCell

__all__ = ["GRU", "LSTM", "RNN", "GRUCell", "LSTMCell", "Profile", "RNNCell", "Recurrent", "Report", "TracedCell",
           "cell", "prepare", "profile", "rebind", "replace", "restore", "save_modules"]


def __dir__() -> list[str]:
    return __all__

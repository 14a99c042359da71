"""A training step of the language model of which PyTorch compiles all but the recurrent layers.

Embedding and dropout are one function of ``torch.compile``; dropout, scores and the loss a second one; clipping and
Adam a third one, in which gradients are scaled on their way into Adam and not written back. The recurrent layers,
compiled or torch.nn's, are called between them as they are, so that both sides have the same code around them, which a
CUDA graph then holds as a whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils import get_total_norm
from torch.optim.adam import adam
from training_steps import Step


class CompiledStep(Step):
    """As :class:`Step`, of a model with ``words``, ``recurrent``, ``scores``, ``dropout`` and states ``h`` and ``c``.

    Parameters
    ----------
    options : of PyTorch's compiler for the scores
    """

    def __init__(self, *args: Any, options: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._before = torch.compile(self._words)
        self._after = torch.compile(self._loss, options=options)
        self._clipped_adam = torch.compile(self._clip_and_adam, fullgraph=True)
        self._parameters = [*self.model.parameters()]
        self._averages = [[torch.zeros_like(p) for p in self._parameters] for _ in range(2)]
        self._steps = [torch.zeros((), device=p.device) for p in self._parameters]

    def _words(self, text: torch.Tensor) -> torch.Tensor:
        model: Any = self.model
        return model.dropout(model.words(text))

    def _loss(self, y: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        model: Any = self.model
        return self.criterion(model.scores(model.dropout(y)), wanted)

    def _clip_and_adam(self, gradients: list[torch.Tensor]) -> None:
        group = self.optimizer.defaults
        share = (self.clip / (get_total_norm(gradients, foreach=True) + 1e-6)).clamp(max=1.0)
        adam(self._parameters, list(torch._foreach_mul(gradients, share)), *self._averages, [], self._steps,
             foreach=True, capturable=True, amsgrad=False, beta1=group["betas"][0],
             beta2=group["betas"][1], lr=group["lr"], weight_decay=0.0, eps=group["eps"], maximize=False)

    def __call__(self) -> torch.Tensor:
        model: Any = self.model
        with self.autocast():
            y, after = model.recurrent(self._before(*self.inputs), (model.h.clone(), model.c.clone()))
            torch._foreach_copy_([model.h, model.c], [state.detach() for state in after])
            loss = self._after(y, *self.targets)
        model.zero_grad()
        loss.backward()
        self.update()
        self.loss = loss.detach()
        return self.loss

    def update(self) -> None:
        with torch.no_grad():
            self._clipped_adam([p.grad for p in self._parameters])

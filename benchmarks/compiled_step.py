"""A training step of the language model of which PyTorch compiles all but the recurrent layers.

Embedding and dropout are one function of ``torch.compile``; dropout, scores and the loss a second one, with rows that
are filled up to what tensor cores like; clipping and Adam a third one, in which gradients are scaled on their way into
Adam and not written back. The recurrent layers, compiled or torch.nn's, are called between them as they are, so that
both sides have the same code around them, which a CUDA graph then holds as a whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.adam import adam
from training_steps import Step


class CompiledStep(Step):
    """As :class:`Step`, of a model with ``words``, ``recurrent``, ``scores``, ``dropout``, and states ``h``, ``c``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._before = torch.compile(self._words)
        self._after = torch.compile(self._judged, options={"force_shape_pad": True})
        self._update = torch.compile(self._clip_and_adam, fullgraph=True)
        self._parameters = [*self.model.parameters()]
        self._averages = [[torch.zeros_like(p) for p in self._parameters] for _ in range(2)]
        self._steps = [torch.zeros((), device=p.device) for p in self._parameters]

    def _words(self, text: torch.Tensor) -> torch.Tensor:
        model: Any = self.model
        return model.dropout(model.words(text))

    def _judged(self, y: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        model: Any = self.model
        return self.criterion(model.scores(model.dropout(y)), wanted)

    def _clip_and_adam(self, gradients: list[torch.Tensor]) -> None:
        own = self.optimizer.defaults
        norm = sum(n.square() for n in torch._foreach_norm(gradients)) ** 0.5
        share = (self.clip / (norm + 1e-6)).clamp(max=1.0)
        adam(self._parameters, list(torch._foreach_mul(gradients, share)), *self._averages, [], self._steps,
             foreach=True, capturable=True, amsgrad=False, beta1=own["betas"][0], beta2=own["betas"][1], lr=own["lr"],
             weight_decay=own["weight_decay"], eps=own["eps"], maximize=False)

    def gradients(self) -> None:
        """As a :class:`Step`'s."""
        model: Any = self.model
        with self.autocast():
            y, after = model.recurrent(self._before(*self.inputs), (model.h.clone(), model.c.clone()))
            torch._foreach_copy_([model.h, model.c], [state.detach() for state in after])
            loss = self._after(y, *self.targets)
        model.zero_grad()
        loss.backward()
        self.loss = loss.detach()

    def update(self) -> None:
        with torch.no_grad():
            self._update([p.grad for p in self._parameters])

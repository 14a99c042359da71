"""What the examples of training share: steps, their times, and what they keep."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from compare_models import CompiledStep, language
from python_text import docstrings, in_columns, numbered, reference, words
from torch import nn
from training_steps import Step, memory_by_layer, middle, take_turns

LENGTH, BATCH, WIDTH = 5, 3, 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def mean_square(y: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (y - wanted).square().mean()


def batches(count: int, device: str = "cpu") -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(BATCH, WIDTH, generator=generator).to(device),
             torch.randn(BATCH, 4, generator=generator).to(device)) for _ in range(count)]


def test_a_step_is_that_of_pytorch():
    torch.manual_seed(0)
    model = Model()
    other, data = copy.deepcopy(model), batches(4)
    step = Step(model, mean_square, data[0][:1], data[0][1:], rate=1e-2, clip=0.1, kind=None)
    optimizer = torch.optim.Adam(other.parameters(), 1e-2, fused=True)
    for x, wanted in data:
        step.load([x], [wanted])
        found = step()
        optimizer.zero_grad()
        loss = mean_square(other(x), wanted)
        loss.backward()
        nn.utils.clip_grad_norm_(other.parameters(), 0.1)
        optimizer.step()
        assert torch.equal(found, loss.detach())
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of what PyTorch's tracer looks at
def test_compiled_parts_make_the_same_step(monkeypatch: pytest.MonkeyPatch):
    """Clipped and not: traced by PyTorch's compiler, carried out as traced."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, options=None, **how: compile(function, backend="eager",
                                                                                        **how))
    torch.manual_seed(0)
    case = language(4, 2, 8, 12, dropout=0.0)
    batch = [[t.cpu() for t in some] for some in case.draw()]
    steps = [of(copy.deepcopy(case.model), case.criterion, *batch, clip=clip, kind=None)
             for clip in (0.1, 1e3) for of in (Step, CompiledStep)]
    for _ in range(3):
        losses = [step().item() for step in steps]
        assert losses[1] == pytest.approx(losses[0], rel=1e-6) and losses[3] == pytest.approx(losses[2], rel=1e-6)
    for step, compiled in (steps[:2], steps[2:]):
        one, other = ([*s.model.parameters(), *s.model.buffers()] for s in (step, compiled))
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("with_loss", [True, False])
def test_graphs_compute_what_steps_do(with_loss: bool):
    torch.manual_seed(0)
    plain, data = Model().cuda(), batches(6, "cuda")
    steps = [Step(model, mean_square, data[0][:1], data[0][1:], kind=None) for model in (plain, copy.deepcopy(plain))]
    for _ in range(3):
        steps[0]()  # as warming up does
    run = steps[1].graphed(with_loss)
    for x, wanted in data:
        for step in steps:
            step.load([x], [wanted])
        torch.testing.assert_close(run(), steps[0]())
    torch.testing.assert_close([*steps[1].model.parameters()], [*plain.parameters()])


def test_memory_is_that_of_saved_tensors():
    """By the layer that saves first: ``first`` keeps x; tanh, which is the model's own, its output, and ``second``
    nothing more. A second step finds the same."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(BATCH, WIDTH)
    for _ in range(2):
        assert memory_by_layer(model, lambda: model(x)) == {
            "first": 4 * BATCH * WIDTH, "second": 0, "": 4 * BATCH * 6}
    assert not model.first._forward_hooks and not model.first._forward_pre_hooks


def test_memory_of_a_layer_that_fails_leaves_no_hooks():
    model = Model()
    with pytest.raises(RuntimeError):
        memory_by_layer(model, lambda: model(torch.randn(BATCH, WIDTH + 1)))
    assert not model.first._forward_hooks and not model.first._forward_pre_hooks


def test_sides_take_turns():
    calls: list[str] = []
    times = take_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, seconds=0.0, together=2,
                       fewest=3)
    assert "".join(calls) == "ab" + 3 * "aabb"
    assert len(times["a"]) == len(times["b"]) == 3


def test_text():
    """It is real, and enough."""
    found = words(reference())
    assert len(found) > 50_000 and {"the", "generator", ".", "yield"} <= {*found}
    tokens, names = numbered(found, 100)
    assert len(names) == 100 and names[int(tokens[7])] in (found[7], "<unk>")
    counts = torch.bincount(tokens)[1:].tolist()
    assert all(a >= b for a, b in pairwise(counts))
    columns = in_columns(torch.arange(10), 3)
    assert columns.tolist() == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


@pytest.mark.slow
def test_docstrings():
    text = docstrings()
    assert len(text) > 500_000 and "Return the absolute value" not in text[:100] and "thread" in text


def test_percentiles():
    assert middle([10.0, 0.0, 1.0, 9.0, 8.0, 2.0, 3.0, 4.0, 7.0, 6.0, 5.0]) == (5.0, 2.0, 8.0)

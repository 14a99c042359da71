"""What PyTorch tests of gradients of RNN, LSTM and GRU (its test_autograd.py, test_nn.py), of ecornn.torch's layers.

docs/PYTORCH_CASES.md lists these by intent, with what differs and why.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pytorch_cases import (
    BACKWARD,
    NAMES,
    B,
    H,
    I,
    T,
    close,
    double,
    error,
    flat,
    gradients,
    pair,
    states,
)
from torch.autograd.functional import jacobian
from torch.utils.checkpoint import checkpoint

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:LSTM with projections")]
P = 3  # a projection
DEEP = {"num_layers": 2, "bidirectional": True}


@pytest.mark.parametrize("name", NAMES)
def test_rnn_retain_variables(name: str):
    """test_rnn_retain_variables: a graph that is kept gives the same gradients again, and adds them."""
    _, ours = pair(name)
    x = torch.randn(T, B, I, requires_grad=True)
    y = ours(x)[0].square().sum()
    leaves = [x, *ours.parameters()]
    y.backward(retain_graph=True)
    first = [leaf.grad.clone() for leaf in leaves]
    for times in (2, 3):
        y.backward(retain_graph=True)
        for leaf, once in zip(leaves, first, strict=True):
            assert error(leaf.grad, times * once.double()) < 1e-6


@pytest.mark.parametrize("what", ["y", "x", "state"])
@pytest.mark.parametrize("name", NAMES)
def test_writes_to_what_the_backward_pass_reads(name: str, what: str):
    """Autograd's version checks. Differs for ``y``: torch.nn on a CPU keeps other tensors, cuDNN refuses as we do."""
    _, ours = pair(name)
    x, hx = torch.randn(T, B, I), states(name, 1)
    y, _ = ours(x, hx)
    {"y": y, "x": x, "state": flat(hx)[0]}[what].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(("name", "options"), [("LSTM", {}), ("GRU", {}), ("RNN", {}), ("LSTM", DEEP),
                                               ("LSTM", {"num_layers": 2, "proj_size": P})])
def test_writes_to_last_states(name: str, options: dict[str, Any]):
    """In-place operations on what a layer returns as states, with gradients."""
    theirs, ours = pair(name, **options)
    x, made = torch.randn(T, B, I), []
    for layer, given in ((theirs, x.double()), (ours, x)):
        y, after = layer(given)
        for number, state in enumerate(flat(after)):
            state.mul_(2 + number).add_(1)
        (y.sum() + sum(s.square().sum() for s in flat(after))).backward()
        made.append([w.grad for w in layer.parameters()])
    close(made[1], made[0], BACKWARD)


@pytest.mark.parametrize("name", NAMES)
def test_many_gradients_at_once(name: str):
    """gradcheck's batched gradients: autograd.grad(is_grads_batched=True), jacobian(vectorize=True)."""
    theirs, ours = pair(name)
    x, made = torch.randn(T, B, I), []
    ways = torch.randn(3, T, B, H)
    for layer, given in ((theirs, x.double()), (ours, x)):
        y, _ = layer(given)
        made.append([*torch.autograd.grad(y, [*layer.parameters()], ways.to(y.dtype), is_grads_batched=True),
                     jacobian(lambda z, layer=layer: layer(z)[0][-1, 0], given, vectorize=True)])
    close(made[1], made[0], BACKWARD)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_checkpoints(name: str, reentrant: bool):
    """test_checkpointing of modules, with a state that goes from one to the next."""
    theirs, ours = pair(name)
    x, made = torch.randn(T, B, I), []
    for layer, given in ((theirs, x.double()), (ours, x)):
        leaf, state = given.clone().requires_grad_(), None
        for _ in range(2):
            y, state = checkpoint(layer, leaf, state, use_reentrant=reentrant)
        y.square().sum().backward()
        made.append([leaf.grad, *(w.grad for w in layer.parameters())])
    close(made[1], made[0], BACKWARD)


@pytest.mark.parametrize("name", NAMES)
def test_states_from_call_to_call(name: str):
    """Backpropagation through several calls, and truncated: with states detached in between."""
    theirs, ours = pair(name)
    xs = torch.randn(3, T, B, I)
    for cut in (False, True):
        made = []
        for layer, given in ((theirs, xs.double()), (ours, xs)):
            state, loss = None, 0.0
            for x in given:
                y, state = layer(x, state)
                loss = loss + y.square().sum()
                if cut:
                    state = tuple(s.detach() for s in state) if name == "LSTM" else state.detach()
            made.append(torch.autograd.grad(loss, [*layer.parameters()]))
        close(made[1], made[0], BACKWARD)


@pytest.mark.parametrize("name", NAMES)
def test_expanded_and_shared_inputs(name: str):
    """x and states whose memory repeats, and one tensor in two places: gradients are added."""
    theirs, ours = pair(name)
    x, h, made = torch.randn(1, 1, I), torch.randn(1, 1, H), []
    for layer, kind in ((theirs, torch.float64), (ours, torch.float32)):
        one, state = (t.to(kind).requires_grad_() for t in (x, h))
        wide = state.expand(1, B, H)
        y, after = layer(one.expand(T, B, I), (wide, wide) if name == "LSTM" else wide)
        made.append([y, *flat(after), *torch.autograd.grad(y.square().sum(), [one, state, *layer.parameters()])])
    close(made[1], made[0], BACKWARD)


@pytest.mark.parametrize("name", NAMES)
def test_inference_tensors(name: str):
    """What inference mode made cannot be trained on, as PyTorch says; without gradients it is used."""
    theirs, ours = pair(name)
    with torch.inference_mode():
        x = torch.randn(T, B, I)
        found = ours(x)
        close(found, theirs(x.double()))
    with torch.no_grad():
        close(ours(x, found[1]), theirs(x.double(), double(found[1])))
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        ours(x)


@pytest.mark.parametrize("frozen", ["all but a bias", "recurrent weights", "all but x"])
@pytest.mark.parametrize("name", NAMES)
def test_frozen_weights(name: str, frozen: str):
    """Parameters that take no gradient get none, the others the same."""
    theirs, ours = pair(name)
    x, made = torch.randn(T, B, I), []
    for layer, kind in ((theirs, torch.float64), (ours, torch.float32)):
        leaf = x.to(kind).requires_grad_(frozen == "all but x")
        for key, weight in layer.named_parameters():
            weight.requires_grad_({"all but a bias": key == "bias_ih_l0", "recurrent weights": "hh" not in key,
                                   "all but x": False}[frozen])
        layer(leaf)[0].square().sum().backward()
        made.append([t.grad for t in (leaf, *layer.parameters())])
    assert [g is None for g in made[0]] == [g is None for g in made[1]]
    close([g for g in made[1] if g is not None], [g for g in made[0] if g is not None], BACKWARD)


@pytest.mark.parametrize("settings", ["anomaly", "deterministic", "float64 by default"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_under_other_settings(name: str, settings: str):
    """detect_anomaly, use_deterministic_algorithms, set_default_dtype: the same numbers."""
    _, ours = pair(name)
    x = torch.randn(T, B, I)
    ways = [torch.randn(t.shape) for t in flat(ours(x))]
    wanted, exact = gradients(ours, x, None, ways)
    try:
        torch.use_deterministic_algorithms(settings == "deterministic")
        torch.set_default_dtype(torch.float64 if settings == "float64 by default" else torch.float32)
        with torch.autograd.set_detect_anomaly(settings == "anomaly"):
            found, made = gradients(ours, x, None, ways)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)
    for one, other in zip((*flat(found), *made), (*flat(wanted), *exact), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_in_the_middle_of_training(name: str):
    """A deep copy between forward and backward is a layer of its own: neither sees the other's weights."""
    theirs, ours = pair(name)
    x, made = torch.randn(T, B, I), []
    for layer, given in ((theirs, x.double()), (ours, x)):
        loss = layer(given)[0].square().sum()
        other = copy.deepcopy(layer)
        with torch.no_grad():
            other.weight_hh_l0.mul_(0.5)
        loss.backward()
        other(given)[0].square().sum().backward()
        made.append([w.grad for w in (*layer.parameters(), *other.parameters())])
    close(made[1], made[0], BACKWARD)

"""PyTorch's tests of gradients of RNN, LSTM and GRU, and of modules in its tools; docs/PYTORCH_CASES.md lists them."""

import copy
import gc
import io
import logging
import warnings
import weakref
from typing import Any

import pytest
import torch
from refusals import refused
from torch.autograd.functional import jacobian
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint
from torch_pairs import B, H, I, T, gradients, load, of_both, operands, states
from torch_pairs import training_case as case
from torch_values import BACKWARD, close, double, error, flat, same

import ecornn.torch
from ecornn.errors import FallbackError
from ecornn.torch import engine
from ecornn.torch.kind import kind_of, text_of

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings(  # PyTorch's
    "ignore:LSTM with projections", "ignore:Anomaly Detection", "ignore:.torch.jit.script. is deprecated",
    "ignore:torch.ao.quantization is deprecated", "ignore:torch.quantize_per_tensor")]
P = 3  # a projection
DEEP = {"num_layers": 2, "bidirectional": True}


def test_rnn_retain_variables(name: str):
    """test_rnn_retain_variables: a graph that is kept gives the same gradients again; another is PyTorch's error."""
    _, ours, x = case(name)
    y, leaves = ours(x.requires_grad_())[0].square().sum(), [x, *ours.parameters()]
    y.backward(retain_graph=True)
    first = [leaf.grad.clone() for leaf in leaves]
    for times in (2, 3):
        y.backward(retain_graph=times == 2)
        same([leaf.grad for leaf in leaves], [times * once for once in first])
    refused(RuntimeError, "second time", y.backward)


@pytest.mark.parametrize("what", ["y", "x", "state", "weight"])
def test_writes_to_what_the_backward_pass_reads(name: str, what: str):
    """Autograd's version checks. Differs for ``y``: torch.nn on a CPU keeps other tensors, cuDNN refuses as we do."""
    _, ours, x = case(name)
    y, _ = ours(x, hx := states(name, 1))
    {"y": y, "x": x, "state": flat(hx)[0], "weight": ours.weight_hh_l0.detach()}[what].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(("name", "options"), [("LSTM", {}), ("GRU", {}), ("RNN", {}), ("LSTM", DEEP),
                                               ("LSTM", {"num_layers": 2, "proj_size": P})])
def test_writes_to_last_states(name: str, options: dict[str, Any]):
    """In-place operations on what a layer returns as states, with gradients."""
    @of_both(**options)
    def write(layer: Any, x: Any) -> Any:
        y, after = layer(x)
        for number, state in enumerate(flat(after)):
            state.mul_(2 + number).add_(1)
        (y.sum() + sum(s.square().sum() for s in flat(after))).backward()
        return [w.grad for w in layer.parameters()]
    write(name)


WAYS = torch.randn(3, T, B, H, generator=torch.Generator().manual_seed(0))


@of_both()
def test_many_gradients_at_once(layer: Any, x: torch.Tensor):
    """gradcheck's batched gradients: autograd.grad(is_grads_batched=True), jacobian(vectorize=True)."""
    grads = torch.autograd.grad(layer(x)[0], [*layer.parameters()], WAYS.to(x.dtype), is_grads_batched=True)
    return [*grads, jacobian(lambda z: layer(z)[0][-1, 0], x, vectorize=True)]


@pytest.mark.parametrize("reentrant", [False, True])
@of_both()
def test_checkpoints(layer: Any, x: torch.Tensor, reentrant: bool):
    """test_checkpointing of modules, with a state that goes from one to the next."""
    leaf, state = x.clone().requires_grad_(), None
    for _ in range(2):
        y, state = checkpoint(layer, leaf, state, use_reentrant=reentrant)
    y.square().sum().backward()
    return [leaf.grad, *(w.grad for w in layer.parameters())]


@pytest.mark.parametrize("cut", [False, True])
@of_both()
def test_states_from_call_to_call(layer: Any, x: torch.Tensor, cut: bool):
    state, loss = None, 0.0
    for scale in (1, -2, 0.5):
        y, state = layer(scale * x, state)
        loss = loss + y.square().sum()
        if cut:
            state = tuple(s.detach() for s in state) if isinstance(state, tuple) else state.detach()
    return torch.autograd.grad(loss, [*layer.parameters()])


@of_both()
def test_expanded_and_shared_inputs(layer: Any, x: torch.Tensor):
    """x and states whose memory repeats, and one tensor in two places: gradients are added."""
    one, state = x[:1, :1].clone().requires_grad_(), torch.linspace(-1, 1, H).to(x.dtype).requires_grad_()
    wide = state.expand(1, B, H)
    y, after = layer(one.expand(T, B, I), (wide, wide) if layer.mode == "LSTM" else wide)
    return [y, *flat(after), *torch.autograd.grad(y.square().sum(), [one, state, *layer.parameters()])]


def test_inference_tensors(name: str):
    """What inference mode made cannot be trained on, as PyTorch says; without gradients it is used."""
    theirs, ours, x = case(name)
    with torch.inference_mode():
        found = ours(x := x.clone())
        close(found, theirs(x.double()))
    with torch.no_grad():
        close(ours(x, found[1]), theirs(x.double(), double(found[1])))
    refused(RuntimeError, "Inference tensors cannot be saved for backward", ours, x)


@pytest.mark.parametrize("frozen", ["all but a bias", "recurrent weights", "all but x", "all but a state"])
def test_frozen_weights(name: str, frozen: str):
    theirs, ours, x = case(name)
    hx, made = flat(states(name, 1)), []
    for layer, kind in ((theirs, torch.float64), (ours, torch.float32)):
        leaf, *given = (t.to(kind) for t in (x, *hx))
        leaf.requires_grad_(frozen == "all but x")
        given[-1].requires_grad_(frozen == "all but a state")
        for key, weight in layer.named_parameters():
            weight.requires_grad_({"all but a bias": key == "bias_ih_l0",
                                   "recurrent weights": "hh" not in key}.get(frozen, False))
        layer(leaf, tuple(given) if name == "LSTM" else given[0])[0].square().sum().backward()
        made.append([t.grad for t in (leaf, *given, *layer.parameters())])
    assert [g is None for g in made[0]] == [g is None for g in made[1]]
    close([g for g in made[1] if g is not None], [g for g in made[0] if g is not None], BACKWARD)


@pytest.mark.parametrize("settings", ["anomaly", "deterministic", "float64 by default"])
def test_under_other_settings(name: str, settings: str):
    """detect_anomaly, use_deterministic_algorithms, set_default_dtype: the same numbers."""
    _, ours, x = case(name)
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
    same([found, made], [wanted, exact])


@of_both()
def test_a_copy_in_the_middle_of_training(layer: Any, x: torch.Tensor):
    """A deep copy between forward and backward is a layer of its own: neither sees the other's weights."""
    loss, other = layer(x)[0].square().sum(), copy.deepcopy(layer)
    with torch.no_grad():
        other.weight_hh_l0.mul_(0.5)
    loss.backward()
    other(x)[0].square().sum().backward()
    return [w.grad for w in (*layer.parameters(), *other.parameters())]


# -- tools: hooks, pruning, parametrizations, averaging, exporters ---------------------------------
def test_hooks(name: str):
    """test_module_hooks: forward and backward hooks see what torch.nn's layer shows them, in the same order."""
    theirs, ours, x = case(name)
    made = []
    def shapes(values: Any) -> list[Any]:
        return [None if v is None else tuple(v.shape) for v in values]
    for layer, given in ((theirs, x.double()), (ours, x)):
        seen: list[Any] = []
        handles = [
            layer.register_forward_pre_hook(lambda m, args, seen=seen: seen.append(("pre", shapes(args)))),
            layer.register_forward_hook(lambda m, args, out, seen=seen: seen.append(("post", shapes(flat(out))))),
            layer.register_full_backward_pre_hook(lambda m, out, seen=seen: seen.append(("back", shapes(out[:1])))),
            layer.register_full_backward_hook(lambda m, into, out, seen=seen: seen.append(("done", shapes(into)))),
            layer.register_state_dict_pre_hook(lambda m, prefix, keep, seen=seen: seen.append(("saved", prefix)))]
        layer(given.clone().requires_grad_())[0].sum().backward()
        layer.state_dict()
        for handle in handles:
            handle.remove()
        layer(given)
        made.append(seen)
    assert made[0] == made[1] and [word for word, _ in made[1]] == ["pre", "post", "back", "done", "saved"]


@of_both()
def test_hooks_that_change_what_they_see(layer: Any, x: torch.Tensor):
    layer.register_forward_pre_hook(lambda m, args, named: ((2 * args[0],), named), with_kwargs=True)
    layer.register_forward_hook(lambda m, args, out: (3 * out[0], out[1]))
    layer.register_full_backward_hook(lambda m, into, out: (5 * into[0],))
    leaf = x.clone().requires_grad_()
    y, _ = layer(leaf)
    y.square().sum().backward()
    return [y, leaf.grad, *(w.grad for w in layer.parameters())]


@of_both(limit=1e-4)  # of two steps, which multiply the error of a gradient
def test_hooks_of_tensors(layer: Any, x: torch.Tensor):
    optimizers = {w: torch.optim.SGD([w], lr=0.1) for w in layer.parameters()}
    def step(weight: Any) -> None:
        optimizers[weight].step()
        weight.grad = None
    for weight in layer.parameters():
        weight.register_hook(lambda g: 2 * g)
        weight.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        y, after = layer(x)
        y.register_hook(lambda g: 3 * g)
        y.retain_grad()
        (y.square().sum() + flat(after)[0].sum()).backward()
    return [y.grad, *layer.parameters()]


def test_a_hook_is_called_though_forward_fails():
    """test_hook_always_call"""
    _, ours, x = case("GRU")
    seen: list[str] = []
    ours.register_forward_hook(lambda m, args, out: seen.append("called"), always_call=True)
    with pytest.raises(RuntimeError):
        ours(x[..., 1:])
    assert seen == ["called"]


def test_rnn_pruning(name: str):
    """test_rnn_pruning: the mask counts at each call, removal makes it last, and gradients stay with the original."""
    theirs, ours, x = case(name)
    wanted = theirs(x.double())
    for layer in (theirs, ours):
        prune.l1_unstructured(layer, "weight_ih_l0", 0.5)
    assert sum(isinstance(w, torch.nn.Parameter) for w in ours._flat_weights) == 3
    found = ours(x)
    close(found, theirs(x.double()))
    assert error(found[0].detach(), wanted[0].detach()) > 1e-2
    close(gradients(ours, x)[1], gradients(theirs, x)[1], BACKWARD)
    prune.remove(ours, "weight_ih_l0")
    assert sum(isinstance(w, torch.nn.Parameter) for w in ours._flat_weights) == 4
    assert "weight_ih_l0" in dict(ours.named_parameters()) and "weight_ih_l0_orig" not in ours.state_dict()
    close(ours(x), found)


@pytest.mark.parametrize("kind", ["weight_norm", "orthogonal"])
def test_parametrizations(name: str, kind: str):
    """test_parametrization: values and gradients under it, the cache of them, and its removal."""
    theirs, ours, x = case(name)
    for layer in (theirs, ours):
        getattr(parametrizations, kind)(layer, "weight_hh_l0")
    load(theirs, ours)
    grads = []
    for layer, given in ((theirs, x.double()), (ours, x)):
        with parametrize.cached():
            y = layer(given)[0] + layer(2 * given)[0]
        y.square().sum().backward()
        grads.append([y, *(w.grad for w in layer.parameters())])
    close(grads[1], grads[0], 1e-4 if kind == "orthogonal" else BACKWARD)  # which is a solve, in float32 and float64
    parametrize.remove_parametrizations(ours, "weight_hh_l0")
    with torch.no_grad():
        close(ours(x), theirs(x.double()), 1e-5)


@of_both(limit=1e-4)
def test_averaged_models(layer: Any, x: torch.Tensor):
    """test_swa: an average of weights that is written in place, and the layer that goes on."""
    mean, optimizer = torch.optim.swa_utils.AveragedModel(layer), torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        layer(x)[0].square().sum().backward()
        optimizer.step()
        mean.update_parameters(layer)
        with torch.no_grad():
            y = mean(x)[0]
    return [y, layer(x)[0]]


@of_both(limit=1e-4)
def test_lbfgs_and_vectors_of_parameters(layer: Any, x: torch.Tensor):
    optimizer = torch.optim.LBFGS(layer.parameters(), lr=0.1, max_iter=3)
    def closure() -> Any:
        optimizer.zero_grad()
        loss = layer(x)[0].square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    vector = torch.nn.utils.parameters_to_vector(layer.parameters())
    torch.nn.utils.vector_to_parameters(0.5 * vector, layer.parameters())
    with torch.no_grad():
        return layer(x)[0]


@pytest.mark.parametrize("how", ["torch.jit.trace", "ONNX"])
@pytest.mark.filterwarnings("ignore")
def test_exporters_that_trace(name: str, how: str, monkeypatch: pytest.MonkeyPatch):
    """test_trace, test_lstm of the ONNX exporter. Differs: they record PyTorch's operators: its own layer runs."""
    theirs, ours, x = case(name, batch_first=True)
    theirs.float().eval()
    made = []
    with pytest.raises(FallbackError, match=r"torch\.jit\.trace only records PyTorch's operators"):
        torch.jit.trace(ours.eval(), (x,))
    monkeypatch.setenv("ECORNN_STRICT", "0")
    for layer in (theirs, ours):
        if how == "ONNX":
            file = io.BytesIO()
            torch.onnx.export(layer, (x,), file, dynamo=False)
            made.append(file.getvalue())
        else:
            traced = torch.jit.trace(layer, (x,))
            same(traced(2 * x[:2, :3]), theirs(2 * x[:2, :3]))
            made.append(str(next(traced.graph.nodes()).kind()))
    assert made[0] == made[1]


class Mixed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.middle = torch.nn.LSTM(I, H, bidirectional=True), torch.nn.GRU(2 * H, H, batch_first=True)
        self.last, self.cell = torch.nn.RNN(H, H), torch.nn.LSTMCell(H, H)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, (h, _) = self.encoder(x)
        y, _ = self.last(self.middle(y.transpose(0, 1))[0])
        return self.cell(y[:, 0], (h[0], h[1]))[0], y


@pytest.mark.filterwarnings("ignore")
def test_the_exporter_to_onnx_that_captures(monkeypatch: pytest.MonkeyPatch):
    """torch.onnx.export(dynamo=True), today's default. Its graph of a model with compiled layers is the one without."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)  # of which pytest keeps 100,000 lines
    monkeypatch.setenv("ECORNN_STRICT", "0")
    torch.manual_seed(0)
    model, x, made = Mixed().eval(), torch.randn(T, B, I), []
    wanted = model(x)
    for ours in (False, True):
        if ours:
            ecornn.torch.replace(model)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            proto = torch.onnx.export(model, (x,), dynamo=True, verbose=False).model_proto
        assert any("PyTorch's own layer runs: torch.onnx.export" in str(w.message) for w in said) == ours
        made.append([[(n.op_type, n.input, n.output, n.attribute) for n in proto.graph.node],
                     {t.name: t.raw_data for t in proto.graph.initializer}])
    assert made[0] == made[1] and {"LSTM", "GRU"} <= {op for op, *_ in made[0][0]}
    close(model(x), wanted)  # the model is as it was


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strict", [True, False])
def test_what_that_exporter_refuses(strict: bool, monkeypatch: pytest.MonkeyPatch):
    """Layers under ECORNN_STRICT, and cells that PyTorch lacks, also in its last attempt by torch._dynamo."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
    monkeypatch.setenv("ECORNN_STRICT", str(int(strict)))
    layer = ecornn.torch.LSTM(I, H) if strict else ecornn.torch.Recurrent("indrnn", I, H)
    words = (r"torch\.onnx\.export only knows PyTorch's operators; ecornn\.torch\.restore\(model\)" if strict else
             r"PyTorch has no layer of this cell: torch\.onnx\.export only knows")
    with pytest.raises(Exception, match=words):
        torch.onnx.export(layer.eval(), (torch.randn(T, B, I),), dynamo=True, verbose=False)


@pytest.mark.parametrize("name", ["LSTM", "GRU", "GRUCell"])
def test_quantize_dynamic(name: str):
    """test_quantized RNNs. Differs: a replaced layer is left as it is, with a warning; restore() before."""
    from torch.ao.quantization import default_dynamic_qconfig, quantize_dynamic

    kind = getattr(torch.nn, name)
    model = torch.nn.Sequential(kind(I, H))
    x = torch.randn(B, I) if name == "GRUCell" else torch.randn(T, B, I)
    wanted = quantize_dynamic(model, {kind}, dtype=torch.qint8)
    ecornn.torch.replace(model)
    with torch.no_grad():
        with pytest.warns(UserWarning, match=rf"does not quantize a compiled {name}.*ecornn\.torch\.restore"):
            left = quantize_dynamic(model, {kind}, dtype=torch.qint8)
        assert isinstance(left[0], getattr(ecornn.torch, name)) and not hasattr(left[0], "qconfig")
        close(left(x), model(x))
        by_name = quantize_dynamic(model, {"0": default_dynamic_qconfig}, dtype=torch.qint8)
        assert isinstance(model[0], getattr(ecornn.torch, name))
        ecornn.torch.restore(model)
        for found in (by_name, quantize_dynamic(model, {kind}, dtype=torch.qint8)):
            assert type(found[0]) is type(wanted[0]) is not kind and torch.equal(flat(found(x))[0], flat(wanted(x))[0])


def test_per_sample_gradients():
    """test_expanded_weights. Differs: its weights are PyTorch's alone; vmap of grad does the same for ours."""
    from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

    layer = ecornn.torch.GRU(I, H, batch_first=True)
    with pytest.raises(RuntimeError, match="Expanded Weights encountered but cannot handle"):
        call_for_per_sample_grads(layer, batch_size=B)(torch.randn(B, T, I))
    ecornn.torch.restore(layer)
    call_for_per_sample_grads(layer, batch_size=B)(torch.randn(B, T, I))[0].sum().backward()
    assert layer.weight_hh_l0.grad_sample.shape == (B, 3 * H, H)


def test_data_parallel_without_gpus():
    """test_data_parallel: a wrapper that has nothing to do."""
    theirs, ours, x = case("LSTM")
    close(torch.nn.DataParallel(ours)(x), theirs(x.double()))


def test_layers_go_when_nobody_has_them(name: str):
    """No cycle, no registry keeps a layer that was called and trained, nor its engine, nor a copy of it."""
    _, ours, x = case(name)
    ours(x)[0].sum().backward()
    with torch.no_grad():
        torch.ops.ecornn.recurrent(*operands(ours, x))
    found = engine.engine_of(ours)
    assert engine.engine_for(kind_of(text_of(ours)), engine.weights_of(ours)) is found
    gone = [weakref.ref(one) for one in (ours, copy.deepcopy(ours), found, *ours.parameters())]
    del ours, found
    gc.collect()
    assert all(ref() is None for ref in gone)

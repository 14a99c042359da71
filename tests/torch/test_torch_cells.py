"""ecornn.torch's cells against torch.nn's in float64: one call, loops, gradients, and what surrounds a cell."""

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from refusals import refused
from torch.utils.checkpoint import checkpoint
from torch_pairs import B, H, I, T, case, load, pair
from torch_values import BACKWARD, FORWARD, agree, close, double, error, flat

import ecornn.torch
from ecornn.torch import cells, engine, like_before

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
KINDS: list[tuple[str, dict[str, Any]]] = [("LSTMCell", {}), ("GRUCell", {}), ("RNNCell", {}),
                                           ("RNNCell", {"nonlinearity": "relu"})]
EVERY = pytest.mark.parametrize("name, options", KINDS, ids=["LSTM", "GRU", "tanh", "relu"])


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ecornn.torch.RNNCell, "least", 0)  # these steps are all small


def test_small_steps_of_a_training_are_left_to_pytorch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ecornn.torch.RNNCell, "least", B * H * (I + H) + 1)
    theirs, ours, x = case("RNNCell")
    nodes = [type(ours(x[:rows]).grad_fn).__name__ for rows in (B, 1)]
    assert nodes == ["TanhBackward0"] * 2 and "_Step" in type(ours(torch.randn(B + 1, I)).grad_fn).__name__
    agree_in_gradients(ours, theirs, x)
    optimizer = torch.optim.SGD(ours.parameters(), 0.1, fused=True)  # which raises no version
    optimizer.step(lambda: ours(x).sum().backward())
    load(theirs, ours)
    with torch.no_grad():
        agree(ours(x), theirs(x.double()))


class Own(torch.nn.GRUCell):
    """Leaves the calls to torch.nn."""


class Loop(torch.nn.Module):
    def __init__(self, cell: torch.nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: torch.Tensor, hx: Any = None) -> torch.Tensor:
        found = []
        for step, row in enumerate(x):
            hx = self.cell(row, hx)
            found.append((hx[0] if isinstance(hx, tuple) else hx) * (1 + step))
        return torch.stack(found)


def state_of(name: str, *rows: int) -> Any:
    made = tuple(torch.rand(*rows, H) - 0.5 for _ in range(2))
    return made if name == "LSTMCell" else made[0]


def gradients(module: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    return [*torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()])]


def agree_in_gradients(ours: torch.nn.Module, theirs: torch.nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        agree(ours(x), theirs(x.double()))
    agree(gradients(ours, x), gradients(theirs, x.double()), 2e-6)


@EVERY
def test_sparse_rows_are_left_to_pytorch(name: str, options: dict[str, Any]):
    theirs, ours = pair(name, **options)
    x, hx = torch.randn(B, I), state_of(name, B)
    found = ours(x.to_sparse(), hx)
    with torch.no_grad():
        wanted = theirs(x.double(), double(hx))
        agree(found, wanted)
        agree([ours(x.to_sparse(), hx) for _ in range(4)][-1], wanted)


@EVERY
@pytest.mark.parametrize("bias", [True, False])
def test_loops_with_and_without_gradients(name: str, options: dict[str, Any], bias: bool):
    theirs, ours = pair(name, bias=bias, **options)
    for shape in ((T, B, I), (T, I)):
        x = torch.randn(shape)
        with torch.no_grad():
            hx = state_of(name, *shape[1:-1])
            agree(ours(x[0], hx), theirs(x[0].double(), double(hx)))
        agree_in_gradients(Loop(ours), Loop(theirs), x)


def test_the_short_way_is_taken(monkeypatch: pytest.MonkeyPatch):
    theirs, ours = pair("GRUCell")
    x, taken = torch.randn(T, B, I), []
    for where, name in ((like_before.Call, "__call__"), (like_before, "train_step")):
        run = getattr(where, name)
        monkeypatch.setattr(where, name, lambda *args, run=run, name=name: (taken.append(name), run(*args))[1])
    agree_in_gradients(Loop(ours), Loop(theirs), x)
    assert taken == ["__call__"] * (T - 3) + ["train_step"] * T


@pytest.mark.parametrize("name", ["LSTMCell", "GRUCell"])
def test_gradients_of_states_and_what_is_not_asked_for(name: str):
    theirs, ours = pair(name)
    x, hx = torch.randn(B, I), state_of(name, B)
    for cell, inputs in ((ours, (x, hx)), (theirs, (x.double(), double(hx)))):
        for frozen in (False, True):
            cell.requires_grad_(not frozen)
            given = [t.detach().requires_grad_() for t in flat(inputs)]
            after = flat(cell(given[0], tuple(given[1:]) if name == "LSTMCell" else given[1]))
            after[-1].sum().backward()  # of an LSTM the gradient of h is not there
            cell.found = [*getattr(cell, "found", []), *(g.grad for g in given)]
        assert cell.weight_hh.grad is not None
    agree(ours.found, theirs.found, 2e-6)
    ours.requires_grad_(True).weight_ih.requires_grad_(False)
    ours.weight_ih.grad = None
    ours(x, hx)[0].sum().backward()
    assert ours.weight_ih.grad is None


def test_what_calls_of_a_graph_share():
    theirs, ours = pair("LSTMCell")
    x, calls = torch.randn(T, B, I), []
    ours.weight_hh.register_hook(calls.append)
    loss, exact = Loop(ours)(x).square().sum(), Loop(theirs)(x.double()).square().sum()
    loss.backward(retain_graph=True)
    assert len(calls) == 1
    exact.backward(retain_graph=True)
    loss.backward()
    exact.backward()
    agree([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()], 2e-6)
    refused(RuntimeError, "second time", loss.backward)

    x.requires_grad_()
    one, other = Loop(ours)(x), Loop(ours)(x)  # both at the same time
    found = torch.autograd.grad(one.sum(), x)[0]  # no weights
    [reference] = engine.engine_of(ours).shared.values()
    shared = reference()
    assert shared is not None and not shared.sums._passes
    exact_x = x.detach().double().requires_grad_()
    agree(found, torch.autograd.grad(Loop(theirs)(exact_x).sum(), exact_x)[0], 2e-6)
    agree(torch.autograd.grad(other.sum(), [*ours.parameters()]),
          torch.autograd.grad(Loop(theirs)(x.double()).sum(), [*theirs.parameters()]), 2e-6)
    reference = weakref.ref(shared)
    del one, other, found, shared, loss
    gc.collect()
    assert reference() is None


def test_backward_passes_of_threads_at_the_same_time():
    theirs, ours = pair("GRUCell")
    x = torch.randn(4, T, B, I)
    losses = [Loop(ours)(part).square().sum() for part in x]
    with ThreadPoolExecutor(4) as threads:
        found = [*threads.map(lambda loss: torch.autograd.grad(loss, [*ours.parameters()]), losses)]
    for one, part in zip(found, x, strict=True):
        agree(one, torch.autograd.grad(Loop(theirs)(part.double()).square().sum(), [*theirs.parameters()]), 2e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_training_is_torchs(fused: bool):
    """Weights are packed after each step, also of optimizers that leave no trace; states are written in between."""
    theirs, ours = pair("LSTMCell")
    optimizers = [torch.optim.SGD(cell.parameters(), 0.1, fused=fused) for cell in (ours, theirs)]
    for _ in range(4):
        x, done = torch.randn(T, B, I), torch.rand(B, 1) > 0.3
        for cell, optimizer, rows in zip((ours, theirs), optimizers, (x, x.double()), strict=True):
            hx, total = None, rows.new_zeros(())
            for row in rows:
                h, c = cell(row, hx)
                total = total + (3 * h).sum() + c.square().sum()
                h.mul_(done)  # torch's cell does not read what it gave
                hx = h, c * done
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
    agree(ours.parameters(), theirs.parameters(), 1e-5)


def test_weights_written_between_the_passes():
    """Gradients are those of the call, as long as the module still has its weights; else it is PyTorch's error."""
    ours, x = ecornn.torch.GRUCell(I, H), torch.randn(B, I)
    wanted = torch.autograd.grad(ours(x).square().sum(), [*ours.parameters()])
    for again in (False, True):
        y = ours(x).square().sum()
        with torch.no_grad():
            ours.weight_hh.mul_(2)
        if again:
            ours(x)
            refused(RuntimeError, "modified by an inplace operation", y.backward)
        else:
            assert all(map(torch.equal, torch.autograd.grad(y, [*ours.parameters()]), wanted))


def test_gradients_of_gradients():
    theirs, ours = torch.nn.GRUCell(I, H).double(), ecornn.torch.GRUCell(I, H)
    ours.load_state_dict(theirs.state_dict())
    x, seconds = torch.randn(2, B, I), []
    for cell, rows in ((ours, x.requires_grad_()), (theirs, x.detach().double().requires_grad_())):
        asked = [rows, *cell.parameters()]
        found = torch.autograd.grad(Loop(cell)(rows).square().sum(), asked, create_graph=True)
        seconds.append([*found, *torch.autograd.grad(sum(g.square().sum() for g in found), asked)])
    close(*seconds, BACKWARD)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_and_hooks_of_saved_tensors(reentrant: bool):
    theirs, ours = pair("LSTMCell")
    x = torch.randn(T, B, I, requires_grad=True)
    checkpoint(Loop(ours), x, use_reentrant=reentrant).square().sum().backward()
    agree([x.grad, *(p.grad for p in ours.parameters())], gradients(Loop(theirs), x.double()), 2e-6)
    with torch.autograd.graph.save_on_cpu():
        agree_in_gradients(Loop(ours), Loop(theirs), x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy(force=True).copy(), torch.from_numpy):
        agree_in_gradients(Loop(ours), Loop(theirs), x)


@pytest.mark.parametrize("name", ["LSTMCell", "RNNCell"])
def test_torch_compile_has_a_cell_in_one_graph(name: str):
    theirs, ours = pair(name)
    x = torch.randn(T, B, I)
    agree_in_gradients(torch.compile(Loop(ours), backend="aot_eager", fullgraph=True), Loop(theirs), x)


def test_functional_calls_and_transforms():
    theirs, ours = pair("GRUCell")
    x, others = torch.randn(3, B, I), {k: torch.randn_like(v) for k, v in ours.named_parameters()}
    def loss(cell: Any, weights: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(cell, weights, (x,)).square().sum()
    twice = {k: v.double() for k, v in others.items()}
    assert abs(float(loss(ours, others, x[0]) / loss(theirs, twice, x[0].double())) - 1) < 1e-6
    found = torch.func.grad(lambda w: loss(ours, w, x[0]))(others)
    agree([*found.values()], [*torch.func.grad(lambda w: loss(theirs, w, x[0].double()))(twice).values()], 2e-6)
    agree(torch.func.vmap(ours)(x), torch.stack([*map(theirs, x.double())]))


def test_replace_and_restore():
    normed = torch.nn.utils.parametrizations.weight_norm(torch.nn.RNNCell(I, H), "weight_hh")
    model = torch.nn.ModuleDict({"plain": torch.nn.LSTMCell(I, H), "own": Own(I, H), "norm": normed})
    exact, x = copy.deepcopy(model).double(), torch.randn(T, B, I)
    state, report = model.state_dict(), ecornn.torch.replace(model)
    assert report.swapped == ("plain", "own", "norm") and not report.kept
    assert type(model["plain"]) is ecornn.torch.LSTMCell and isinstance(model["plain"], torch.nn.LSTMCell)
    assert isinstance(model["own"], Own) and isinstance(model["own"], ecornn.torch.GRUCell)
    assert str(model).count("): Compiled") == 3 and str(model).replace("Compiled", "") == str(exact)
    assert [*model.state_dict()] == [*state]
    for name in model:
        agree_in_gradients(Loop(model[name]), Loop(exact[name]), x)
    assert ecornn.torch.replace(model).swapped == () and ecornn.torch.restore(model) == ("plain", "own", "norm")
    assert [type(m).__name__ for m in model.values()] == [type(m).__name__ for m in exact.values()]
    assert type(model["plain"]) is torch.nn.LSTMCell and type(model["own"]) is Own


def test_a_class_with_a_call_of_its_own_is_left_alone():
    kind = type("Mine", (torch.nn.LSTMCell,), {"forward": lambda self, *args: args})
    assert ecornn.torch.replace(torch.nn.Sequential(kind(I, H), torch.nn.GRUCell(I, H).to("meta"))).kept == {
        "0": "Mine overrides methods, which may change what it computes: forward", "1": "it is on meta"}


def test_weights_that_change_without_gradients_are_seen():
    theirs, ours, x = case("GRUCell")
    with torch.no_grad():
        ours(x)
        for write in (lambda w: w.mul_(2), lambda w: w.data.mul_(2)):
            write(ours.weight_hh)
            theirs.weight_hh.mul_(2)
            agree(ours(x, x.new_ones(B, H)), theirs(x.double(), x.new_ones(B, H).double()))
        strided = torch.randn(I, 2 * B)[:, ::2].t()
        agree(ours(strided), theirs(strided.double()))
    with torch.inference_mode():
        ours.load_state_dict({k: torch.ones_like(v) for k, v in ours.state_dict().items()})
        theirs.load_state_dict(ours.state_dict())
        agree(ours(x), theirs(x.double()))


BAD = [lambda x, h: (x[..., :-1], h), lambda x, h: (x, (h[0][:-1], h[1])), lambda x, h: (x, (h[0][:, :-1], h[1])),
       lambda x, h: (x[None], h), lambda x, h: (x, h[:1]), lambda x, h: (x.double(), h), lambda x, h: (x, h[0]),
       lambda x, h: (x[0], h), lambda x, h: (x, (h[0].double(), h[1])), lambda x, h: (x.long(), None),
       lambda x, h: (None, h), lambda x, h: (x.to("meta"), h)]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_what_does_not_fit_is_pytorchs_error(number: int):
    said = []
    for cell in (torch.nn.LSTMCell(I, H), ecornn.torch.LSTMCell(I, H)):
        with pytest.raises(Exception) as raised:  # whatever PyTorch raises
            cell(*BAD[number](torch.randn(B, I), (torch.zeros(B, H), torch.zeros(B, H))))
        said.append((raised.type, str(raised.value)))
    assert said[0] == said[1]


def test_what_is_not_compiled_is_pytorchs():
    ours = ecornn.torch.LSTMCell(I, H)
    assert ours(torch.zeros(0, I))[0].shape == (0, H)
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(UserWarning, match="autocast"):
        ours(torch.randn(B, I))


def test_prepare_compiles_what_a_loop_calls(capsys: pytest.CaptureFixture[str]):
    model = Loop(torch.nn.GRUCell(I, H))
    ecornn.torch.replace(model)
    assert ecornn.torch.prepare(model, torch.randn(T, B, I)) == 1
    assert "compiled 1 of 1 layers, gru T=1 B=4 I=7 H=11 float32" in capsys.readouterr().err
    assert type(model.cell) is ecornn.torch.GRUCell


@pytest.mark.parametrize("name, dtype, trains, runs", [
    ("LSTMCell", torch.float16, 128, 128), ("GRUCell", torch.bfloat16, 128, 128), ("RNNCell", torch.float16, 512, 512),
    ("LSTMCell", torch.float32, 128, 256)])
def test_large_steps_are_left_to_pytorch_on_a_gpu(name, dtype, trains, runs, monkeypatch: pytest.MonkeyPatch):
    cell = getattr(ecornn.torch, name)(1024, 1024, dtype=dtype)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for most, enabled in ((trains, True), (runs, False)):
        rows = [torch.empty(count, 1024, dtype=dtype) for count in (1, most, 2 * most)]
        with torch.set_grad_enabled(enabled):
            assert [cells.is_left(cell, x) for x in rows] == [False, False, True] and not cells.is_left(cell, None)


@EVERY
def test_steps_that_are_left_are_pytorchs(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    _, ours = pair(name, **options)
    theirs = copy.deepcopy(ours)
    ecornn.torch.restore(theirs)
    monkeypatch.setattr(cells, "is_left", lambda *_: True)
    for shape in ((T, B, I), (T, I)):
        x = torch.randn(shape)
        assert torch.equal(Loop(ours)(x), Loop(theirs)(x))
    wrong = torch.zeros(B, H + 1)
    given = torch.zeros(B, I), (wrong,) * 2 if name == "LSTMCell" else wrong
    refused(RuntimeError, "hidden", theirs, *given)
    refused(RuntimeError, "hidden", ours, *given)


# -- on a GPU -----------------------------------------------------------------------------------
def on_gpu(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any, torch.Tensor]:
    exact, ours = pair(name, **options)
    load(exact, ours.to("cuda", dtype))
    return exact.cuda(), ours, torch.randn(T, B, I, device="cuda", dtype=dtype)


@pytest.mark.gpu
@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_loops_on_a_gpu(name: str, options: dict[str, Any], dtype: torch.dtype):
    exact, ours, _ = on_gpu(name, dtype, **options)
    for shape in ((T, B, I), (T, I), (T, 1, I), (T, 70, I)):
        x = torch.randn(shape, device="cuda").to(dtype)
        with torch.no_grad():
            wanted, found = Loop(exact)(x.double()), Loop(ours)(x)
            ecornn.torch.restore(ours)
            limit = FORWARD if dtype == torch.float32 else 2 * error(Loop(ours)(x), wanted)
        ecornn.torch.replace(ours)
        assert error(found, wanted) <= limit and engine.known_engine(ours).inference._modules


@pytest.mark.gpu
@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_training_of_loops_on_a_gpu(name: str, options: dict[str, Any], dtype: torch.dtype):
    """Also after each step of an optimizer that raises no version; the calls in between have the new weights."""
    exact, ours, _ = on_gpu(name, dtype, **options)
    optimizer = torch.optim.SGD(ours.parameters(), 1e-3, fused=True)
    for shape in ((T, B, I), (T, B, I), (T, I), (T, 70, I)):
        load(exact, ours)
        x = torch.randn(shape, device="cuda").to(dtype)

        def step(cell: Any, x: torch.Tensor) -> list[torch.Tensor]:
            x = x.detach().requires_grad_()
            y = Loop(cell)(x)
            return [y.detach(), *torch.autograd.grad(y.square().mean(), [x, *cell.parameters()])]

        wanted, found = step(exact, x.double()), step(ours, x)
        assert engine.known_engine(ours).trained._modules
        ecornn.torch.restore(ours)
        others = step(ours, x)
        ecornn.torch.replace(ours)
        for one, other, right in zip(found, others, wanted, strict=True):
            assert one.dtype == dtype
            assert error(one, right) <= (2e-5 if dtype == torch.float32 else 2 * error(other, right) + 1e-6)
        Loop(ours)(x).square().mean().backward()
        optimizer.step()
        load(exact, ours)
        with torch.no_grad():
            limit = FORWARD if dtype == torch.float32 else 2 * error(others[0], wanted[0])
            assert error(Loop(ours)(x), Loop(exact)(x.double())) <= max(limit, 1e-3 * (dtype != torch.float32))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node", "ignore:The CUDA Graph is empty")
def test_training_on_streams_and_in_graphs_of_a_gpu():
    """Streams add up gradients apart; a CUDA graph captures PyTorch's step; torch.compile has a step in one graph."""
    exact, ours, x = on_gpu("LSTMCell")
    streams, losses = [torch.cuda.Stream() for _ in range(3)], []
    torch.cuda.synchronize()
    for stream in streams:
        with torch.cuda.stream(stream):
            losses.append(Loop(ours)(x).square().sum())
    torch.cuda.synchronize()
    found = torch.autograd.grad(sum(losses), [*ours.parameters()])
    torch.cuda.synchronize()
    agree(found, torch.autograd.grad(3 * Loop(exact)(x.double()).square().sum(), [*exact.parameters()]), 2e-5)
    graph, step = torch.cuda.CUDAGraph(), lambda: Loop(ours)(x).square().sum().backward()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    ours.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        step()
    for _ in range(2):
        for p in ours.parameters():
            p.grad.zero_()
        x.copy_(torch.randn_like(x))
        graph.replay()
        wanted = torch.autograd.grad(Loop(exact)(x.double()).square().sum(), [*exact.parameters()])
        agree([p.grad for p in ours.parameters()], wanted, 2e-5)
    captured = torch.cuda.CUDAGraph()
    with torch.no_grad():
        Loop(ours)(x)
        torch.cuda.synchronize()
        with torch.cuda.graph(captured):
            y = Loop(ours)(x)
    for _ in range(2):
        x.copy_(torch.randn_like(x))
        captured.replay()
        agree(y, Loop(exact)(x.double()), FORWARD)
    agree_in_gradients(torch.compile(Loop(ours), backend="aot_eager", fullgraph=True), Loop(exact), x)


@pytest.mark.usefixtures("cudnn_settings")
def test_products_of_a_cell_on_a_gpu_are_as_exact_as_pytorchs(monkeypatch: pytest.MonkeyPatch):
    """Which PyTorch has a setting of its own for; that of cuDNN's layers is another."""
    cell = ecornn.torch.LSTMCell(I, H)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert cell.tf32 is None
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert cell.tf32 is False
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert cell.tf32 is True
    cell.tf32 = False
    assert cell.tf32 is False

"""Training with ecornn.torch on a GPU: gradients against torch.nn in float64, and what surrounds a step there."""

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refused
from torch.func import functional_call, grad
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import ecornn.torch
from ecornn import errors
from ecornn.runtime import caller, weights
from ecornn.torch import bound, engine
from ecornn.torch.kind import text_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings(
    "ignore:LSTM with projections", "ignore:RNN module weights", "ignore:The .grad attribute of a Tensor that",
    "ignore:There is a performance drop", "ignore:.torch.jit.script", "ignore:The AccumulateGrad node",
    "ignore:Synchronization debug mode", "ignore:The CUDA Graph is empty")]
I, H, T, B = 13, 40, 30, 5
LENGTHS = [11, 30, 3, 30, 17]
FORWARD, BACKWARD = 1e-5, 2e-5  # relative, of float32 against float64


@pytest.fixture(autouse=True)
def _strict(monkeypatch: pytest.MonkeyPatch):
    """Nothing here may fall back to PyTorch's own layers."""
    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    monkeypatch.setenv("ECORNN_STRICT", "1")
    yield
    torch.cuda.set_sync_debug_mode("default")


def pair(name: str = "LSTM", dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any, Any]:
    ours = getattr(ecornn.torch, name)(I, H, device="cuda", dtype=dtype, **options)
    exact, theirs = getattr(torch.nn, name)(I, H, **options).double(), getattr(torch.nn, name)(I, H, **options)
    exact.load_state_dict({k: v.double().cpu() for k, v in ours.state_dict().items()})
    theirs = theirs.to("cuda", dtype)
    theirs.load_state_dict(ours.state_dict())
    return exact, theirs, ours


def flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, PackedSequence):
        return [value.data]
    return [value] if isinstance(value, torch.Tensor) else [t for part in value or () for t in flat(part)]


def moved(value: Any, device: str, dtype: torch.dtype | None) -> Any:
    if isinstance(value, PackedSequence):
        return PackedSequence(moved(value.data, device, dtype), value.batch_sizes,
                              *(None if t is None else t.to(device) for t in value[2:]))
    if isinstance(value, torch.Tensor):
        return value.detach().to(device, dtype).requires_grad_()
    return None if value is None else tuple(moved(v, device, dtype) for v in value)


def step(layer: Any, x: Any, hx: Any, directions: list[torch.Tensor], autocast: torch.dtype | None = None) -> Any:
    with torch.autocast(next(layer.parameters()).device.type, autocast or torch.bfloat16, enabled=autocast is not None):
        found = flat(layer(x, hx))
    loss = sum((t.double() * d.to(t.device)).sum() for t, d in zip(found, directions, strict=True))
    return found, torch.autograd.grad(loss, [*layer.parameters(), *flat(x), *flat(hx)])


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    value = float((found.detach().double().cpu() - wanted.detach()).norm() / wanted.detach().norm().clamp_min(1e-30))
    return value if value == value else float("inf")


def check(name: str, dtype: torch.dtype, x: Any, hx: Any, autocast: torch.dtype | None = None, **options: Any) -> None:
    """float32 within its bounds of float64, 16 bits within twice the error of torch's layer in the same ones."""
    exact, theirs, ours = pair(name, dtype, **options)
    x, hx = moved(x, "cuda", dtype), moved(hx, "cuda", dtype)
    again = moved(x, "cpu", torch.float64), moved(hx, "cpu", torch.float64)
    directions = [torch.randn(t.shape, dtype=torch.float64) for t in flat(exact(*again))]
    wanted, wanted_gradients = step(exact, *again, directions)
    for _ in range(2):  # bound, and packed again
        found, gradients = step(ours, x, hx, directions, autocast)
    low = autocast or (dtype if dtype != torch.float32 else None)
    like = low or dtype
    other, other_gradients = step(theirs.to(like), moved(x, "cuda", like), moved(hx, "cuda", like), directions)
    names = [*(n for n, _ in ours.named_parameters()), "x", "h", "c"]
    for n, (one, two, right) in enumerate(zip([*found, *gradients], [*other, *other_gradients],
                                              [*wanted, *wanted_gradients], strict=True)):
        what = f"output {n}" if n < len(found) else f"gradient of {names[n - len(found)]}"
        assert one.dtype == (like if n < len(found) else dtype) and one.shape == right.shape, what
        bound = 2 * error(two, right) + 1e-6 if low else FORWARD if n < len(found) else BACKWARD
        assert error(one, right) <= bound, f"{what}: {error(one, right):.2e}, bound {bound:.2e}"


def inputs(parts: int, states: int, width: int = H, batch_first: bool = False) -> tuple[torch.Tensor, Any]:
    x = torch.randn(*((B, T) if batch_first else (T, B)), I)
    hx = tuple(torch.rand(parts, B, width if n == 0 else H) for n in range(states))
    return x, hx if states > 1 else hx[0]


@pytest.mark.parametrize(("name", "dtype", "options"), [
    ("LSTM", torch.float32, {"num_layers": 2}), ("LSTM", torch.bfloat16, {}), ("LSTM", torch.float16, {}),
    ("GRU", torch.float32, {"bidirectional": True}), ("GRU", torch.bfloat16, {}),
    ("RNN", torch.float16, {"nonlinearity": "relu"}), ("RNN", torch.float32, {"bias": False, "batch_first": True}),
    ("LSTM", torch.float32, {"num_layers": 2, "proj_size": 9}),
    *(("LSTM", torch.float32, {"autocast": low}) for low in (torch.bfloat16, torch.float16))])
def test_gradients(name: str, dtype: torch.dtype, options: dict[str, Any]):
    parts = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    check(name, dtype, *inputs(parts, 2 if name == "LSTM" else 1, options.get("proj_size", H),
                               options.get("batch_first", False)), **options)


@pytest.mark.parametrize("keep", ["gates", "states"])
@pytest.mark.parametrize(("cell", "dtype"), [
    ("lstm", torch.bfloat16), ("gru", torch.float32), ("gru_reset_before", torch.float32)])
def test_gradients_by_what_is_kept(cell: str, dtype: torch.dtype, keep: str):
    made = ecornn.compile(cell, hidden=H, input=I, batch=B, seq=T, dtype=str(dtype)[6:], training=True, keep=keep,
                          target="cuda")
    rng = np.random.default_rng(0)
    weights = {p.name: torch.tensor(rng.uniform(-0.3, 0.3, p.shape)).to("cuda", dtype)
               for p in made.manifest.parameters}
    layer, states = made.bind(weights), len(made.manifest.states)
    x, dy = (torch.randn(T, B, width, device="cuda").to(dtype) for width in (I, H))
    first = [torch.randn(B, H, device="cuda").to(dtype) for _ in range(states)]
    found = layer.backward(layer.forward(x, first)[2], dy)
    fewer = layer.backward(layer.forward(x, first)[2], dy, want_state=False)
    assert fewer.state == () and torch.equal(fewer.x, found.x)
    def exact(value: torch.Tensor) -> np.ndarray:
        return value.double().cpu().numpy()
    dx, dweights, dfirst = ecornn.reference_gradients(cell, exact(x), {n: exact(w) for n, w in weights.items()},
                                                      [*map(exact, first)], dy=exact(dy))
    limit = BACKWARD if dtype == torch.float32 else 2.0 ** -6
    for one, value in [(found.x, dx), *zip(found.state, dfirst, strict=True),
                       *((found.weights[name], value) for name, value in dweights.items())]:
        assert error(one, torch.tensor(value)) < limit


@pytest.mark.parametrize("is_sorted", [True, False])
def test_gradients_of_packed_sequences(is_sorted: bool):
    x, hx = inputs(2, 1)
    lengths = sorted(LENGTHS, reverse=True) if is_sorted else LENGTHS
    check("GRU", torch.float32, pack_padded_sequence(x, lengths, enforce_sorted=is_sorted), hx, bidirectional=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_without_gradients(dtype: torch.dtype):
    *_, ours = pair()
    with torch.no_grad(), torch.autocast("cuda", dtype):
        y, states = ours(torch.randn(T, B, I, device="cuda"))
    assert y.dtype == states[0].dtype == dtype


def test_only_some_inputs_require_gradients():
    exact, _, ours = pair(num_layers=2)
    x = torch.randn(T, B, I)
    for layer in (exact, ours):
        layer.requires_grad_(False)
        layer.bias_hh_l0.requires_grad_()
    ours(x.cuda())[0].square().sum().backward()
    exact(x.double())[0].square().sum().backward()
    assert error(ours.bias_hh_l0.grad, exact.bias_hh_l0.grad) < BACKWARD and ours.weight_hh_l0.grad is None


def gradients_of(layer: Any, x: torch.Tensor, run: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    layer.zero_grad()
    x.grad = None
    run().backward()
    return [p.grad.clone() for p in layer.parameters()] + ([x.grad.clone()] if x.grad is not None else [])


def two_layers() -> tuple[Any, torch.Tensor, list[torch.Tensor]]:
    exact, _, ours = pair(num_layers=2)
    x = torch.randn(T, B, I, device="cuda")
    return ours, x, gradients_of(exact, x, lambda: exact(x.double().cpu())[0].square().sum())


def test_accumulation_checkpoints_hooks_compile_and_transforms():
    ours, x, wanted = two_layers()
    def close(found: list[torch.Tensor]) -> None:
        assert all(error(one, other) < BACKWARD for one, other in zip(found, wanted, strict=True))

    def loss(*rows: torch.Tensor) -> torch.Tensor:
        return sum(ours(r)[0].square().sum() for r in rows)  # type: ignore[return-value]
    close(gradients_of(ours, x, lambda: loss(x)))
    close(gradients_of(ours, x, lambda: loss(x[:, :2].contiguous(), x[:, 2:].contiguous())))
    close(gradients_of(ours, x, lambda: checkpoint(loss, x, use_reentrant=False)))
    with torch.autograd.graph.save_on_cpu():
        close(gradients_of(ours, x, lambda: loss(x)))
    weights = {n: p.detach() for n, p in ours.named_parameters()}
    found = grad(lambda w: functional_call(ours, w, (x,))[0].square().sum())(weights)
    close([found[n] for n in weights])
    torch._dynamo.reset()
    compiled = torch.compile(lambda r: ours(r)[0].square().sum(), fullgraph=True, backend="aot_eager")
    close(gradients_of(ours, x, lambda: compiled(x)))


def test_torch_compile_under_autocast():
    ours, x, wanted = two_layers()
    torch._dynamo.reset()
    compiled = torch.compile(lambda r: ours(r)[0].float().square().sum(), fullgraph=True, backend="aot_eager")
    def low() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return compiled(x)
    found = gradients_of(ours, x, low)
    assert all(BACKWARD < error(one, other) < 0.05 for one, other in zip(found, wanted, strict=True))


def test_dropout_between_layers():
    *_, ours = pair(num_layers=2, dropout=0.5)
    x, found = torch.randn(T, B, I, device="cuda"), []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        y = ours(x)[0]
        found.append([y.detach(), *torch.autograd.grad(y.square().sum(), ours.parameters())])
    first, again, other = found
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    with torch.no_grad():
        assert error(ours.eval()(x)[0], first[0].double().cpu()) > 0.01, "nothing was dropped"


def test_scaled_gradients():
    *_, ours = pair()
    scaler, optimizer = torch.amp.GradScaler("cuda", init_scale=2.0**30), torch.optim.SGD(ours.parameters(), lr=0.1)
    x, before, steps = torch.randn(T, B, I, device="cuda"), copy.deepcopy(ours.state_dict()), 0
    for _ in range(40):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = ours(x)[0].float().square().mean() * 10
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        steps += all(bool(p.grad.isfinite().all()) for p in ours.parameters())
    assert 0 < steps < 40 and scaler.get_scale() < 2.0**30, "the first scales are too large for float16"
    assert all(bool(p.isfinite().all()) and not torch.equal(p, before[n]) for n, p in ours.named_parameters())


def train(model: Any, optimizer: Any, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad(set_to_none=False)
    loss = torch.nn.functional.mse_loss(model(x)[0], wanted)
    loss.backward()
    optimizer.step()
    return loss.detach()


def test_a_training_step_allocates_and_waits_for_nothing(monkeypatch: pytest.MonkeyPatch):
    *_, ours = pair(num_layers=2)
    optimizer = torch.optim.Adam(ours.parameters(), fused=True)
    x, wanted = torch.randn(T, B, I, device="cuda"), torch.randn(T, B, H, device="cuda")
    for _ in range(3):
        train(ours, optimizer, x, wanted)
    def refuse(*args: Any) -> None:
        raise AssertionError("memory of a module's own, or a wait for it")
    for place, name in ((weights, "DeviceMemory"), (caller, "PackedWeights"), (weights.PackedWeights, "repack")):
        monkeypatch.setattr(place, name, refuse)
    torch.cuda.synchronize()
    names = ("segment.all.allocated", "num_device_alloc", "num_alloc_retries")
    before = [torch.cuda.memory_stats().get(name) for name in names]
    torch.cuda.set_sync_debug_mode("error")
    losses = [train(ours, optimizer, x, wanted) for _ in range(10)]
    torch.cuda.set_sync_debug_mode("default")
    assert [torch.cuda.memory_stats().get(name) for name in names] == before and losses[-1] < losses[0]


def test_a_whole_step_in_a_cuda_graph():
    *_, theirs, ours = pair(num_layers=2)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2, capturable=True) for m in (theirs, ours)]
    data = [(torch.randn(T, B, I, device="cuda"), torch.randn(T, B, H, device="cuda")) for _ in range(12)]
    x, wanted = (t.clone() for t in data[0])
    train(ours, optimizers[1], x, wanted)  # which compiles: what is left of that must not hold this step's graph
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            train(ours, optimizers[1], x, wanted)
    torch.cuda.current_stream().wait_stream(side)
    for _ in range(4):
        train(theirs, optimizers[0], x, wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = train(ours, optimizers[1], x, wanted)
    for number, (xs, ys) in enumerate(data):
        x.copy_(xs)
        wanted.copy_(ys)
        graph.replay()
        other = train(theirs, optimizers[0], xs, ys)
        assert abs(float(loss) - float(other)) < 1e-3 * float(other), f"step {number}"
        with torch.no_grad():  # nothing told that the weights have changed
            assert error(ours(xs)[0], theirs(xs)[0].double().cpu()) < 1e-3, f"step {number}"
    xs, ys = data[0]
    for number in range(3):
        one, other = train(ours, optimizers[1], xs, ys), train(theirs, optimizers[0], xs, ys)
        assert abs(float(one) - float(other)) < 1e-3 * float(other), f"step {number} after the graph"


def test_graphs_of_forward_and_backward_apart():
    *_, theirs, ours = pair(num_layers=2)
    x = torch.randn(T, B, I, device="cuda", requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(ours, (x,))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (theirs, ours)]
    for number in range(4):
        losses = []
        for model, optimizer in zip((theirs, graphed), optimizers, strict=True):
            optimizer.zero_grad()
            loss = model(x)[0].square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert abs(losses[0] - losses[1]) < 1e-4 * losses[0], f"step {number}: {losses}"


def test_layers_may_be_collected_while_a_graph_is_captured():
    *_, ours = pair(num_layers=2)
    *_, other = pair("GRU")
    x = torch.randn(T, B, I, device="cuda")
    for model in (ours, other):
        model(x)[0].sum().backward()
        with torch.no_grad():
            model(x)
    collected, graph = weakref.ref(other), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = ours(x)[0]
        del model, other
        gc.collect()
    assert collected() is None
    x.normal_()
    graph.replay()
    with torch.no_grad():
        assert torch.equal(y, ours(x)[0])


def test_a_capture_needs_a_call_before():
    *_, ours = pair("RNN", nonlinearity="tanh")
    x = torch.randn(T, B, I, device="cuda")
    torch.cuda.synchronize()
    with pytest.raises(errors.ArgumentError, match="before the capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        ours(x + 1)
    torch.cuda.synchronize()
    ours(x)[0].sum().backward()


def test_streams():
    """A step on one stream does not read what another one, which is late, packs."""
    exact, _, ours = pair(num_layers=2)
    x, right = torch.randn(T, B, I, device="cuda"), []
    for _ in range(2):
        right.append(torch.autograd.grad(exact(x.double().cpu())[0].square().sum(), exact.parameters()))
        with torch.no_grad():
            exact.weight_hh_l0.mul_(0.5)
    late, early = torch.cuda.Stream(), torch.cuda.Stream()
    for number, wanted in enumerate(right):
        torch.cuda.synchronize()
        both = []
        for stream in (late, early):
            with torch.cuda.stream(stream):
                if stream is late:
                    torch.cuda._sleep(200_000_000)
                both.append(torch.autograd.grad(ours(x)[0].square().sum(), ours.parameters()))
        torch.cuda.synchronize()
        for found in both:
            assert all(error(one, other) < BACKWARD for one, other in zip(found, wanted, strict=True)), number
        with torch.no_grad():
            ours.weight_hh_l0.mul_(0.5)


@torch.no_grad()
def test_streams_without_gradients():
    """Weights are packed in place where one stream alone has read them; else a stream reads what another one, which is
    late, packs, and a captured graph what it was captured with."""
    exact, _, ours = pair(num_layers=2)
    x, layers = torch.randn(T, B, I, device="cuda"), engine.engine_of(ours).inference
    late, early = torch.cuda.Stream(), torch.cuda.Stream()

    def halved() -> torch.Tensor:
        exact.weight_hh_l0.mul_(0.5)
        ours.weight_hh_l0.mul_(0.5)
        torch.cuda.synchronize()
        return exact(x.double().cpu())[0]

    def bound_ones() -> list[Any]:
        return [one for known in layers._bound.values() for one in known.values()]

    for number in range(4):
        wanted = halved()
        with torch.cuda.stream(late):
            assert all(error(ours(x)[0], wanted) < FORWARD for _ in range(3)), number
        (one,) = bound_ones()
        assert one.packs == number  # the first time it is bound
    for number in range(4):
        wanted, both = halved(), []
        for stream in (late, early):
            with torch.cuda.stream(stream):
                if stream is late:
                    torch.cuda._sleep(200_000_000)
                both += [ours(x)[0] for _ in range(3)]
        torch.cuda.synchronize()
        assert all(error(found, wanted) < FORWARD for found in both), number
    graph, wanted = torch.cuda.CUDAGraph(), halved()
    ours(x)
    with torch.cuda.graph(graph):
        kept = ours(x)[0]
    for _ in range(3):
        changed = halved()
        assert all(error(ours(x)[0], changed) < FORWARD for _ in range(3))
    graph.replay()
    torch.cuda.synchronize()
    assert error(kept, wanted) < FORWARD


def test_500_steps_stay_with_torch_nn():
    torch.manual_seed(0)
    compiled, head = ecornn.torch.LSTM(2, 32, 2), torch.nn.Linear(32, 2)
    compiled.wait = True
    library = torch.nn.LSTM(2, 32, 2)
    library.load_state_dict(compiled.state_dict())
    models = [torch.nn.ModuleList([layer, copy.deepcopy(head)]).cuda() for layer in (compiled, library)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=3e-3) for model in models]
    data, losses = torch.Generator().manual_seed(0), []
    for _ in range(500):
        x = torch.randn(24, 16, 2, generator=data)
        wanted = (x.cumsum(0) / torch.arange(1, 25)[:, None, None]).cuda()
        for (layer, last), optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(last(layer(x.cuda())[0]), wanted)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    ours, theirs = torch.stack(losses).view(-1, 2).T.tolist()
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-3
    assert ours[-1] < 0.2 * ours[0], "it has not learned"


def test_a_long_sequence_in_bounded_memory():
    """T = 100,000 in less than 3 GB; within eight roundings of float16 of cuDNN's in float32, by parts."""
    steps, batch, hidden = 100_000, 4, 256
    ours = ecornn.torch.LSTM(hidden, hidden, device="cuda", dtype=torch.float16, keep="states")
    exact = torch.nn.LSTM(hidden, hidden, device="cuda")
    exact.load_state_dict({k: v.float() for k, v in ours.state_dict().items()})
    x, dy = (torch.randn(steps, batch, hidden, device="cuda").half() for _ in range(2))
    def gradients(layer: torch.nn.Module) -> list[torch.Tensor]:
        kind = next(layer.parameters()).dtype
        given, made, state = x.to(kind).requires_grad_(), [], None
        for part in [given] if layer is ours else given.split(10_000):
            y, state = layer(part, state)
            made.append(y)
        return list(torch.autograd.grad(made, [given, *layer.parameters()], list(dy.to(kind).split(len(made[0])))))

    gradients(ours)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, found = torch.cuda.memory_allocated(), gradients(ours)
    assert torch.cuda.max_memory_allocated() - before + 2 * x.nbytes < 3e9
    for one, value in zip(found, gradients(exact), strict=True):
        assert error(one.cpu(), value.double().cpu()) < 8 * 2.0**-11


def test_tensors_of_another_device_or_type_are_refused():
    *_, ours = pair("GRU")
    x, state = torch.randn(T, B, I, device="cuda"), torch.zeros(1, B, H, device="cuda")
    given = x, [state], None, engine.weights_of(ours), text_of(ours)
    with torch.no_grad():
        y, after, kept = torch.ops.ecornn.recurrent_forward(*given)
        with pytest.raises(errors.DeviceError, match=r"dy\.device"):
            torch.ops.ecornn.recurrent_backward(*given, y, kept, [y.cpu(), after])
    with pytest.raises(errors.DeviceError, match="weights"):
        ecornn.torch.GRU(I, H)(x)
    refused(errors.DTypeError, "input", ours, x.half())


def test_what_no_schedule_serves_is_pytorchs(monkeypatch: pytest.MonkeyPatch):
    def refuses(*args: Any, **kwargs: Any) -> None:
        raise errors.ScheduleError("no schedule carries out the adjoint")
    monkeypatch.setattr(bound, "compiled", refuses)
    _, theirs, ours = pair("GRU")
    x = torch.randn(T, B, I, device="cuda")
    refused(errors.FallbackError, "carries out the adjoint", ours, x)
    monkeypatch.setenv("ECORNN_STRICT", "0")
    with pytest.warns(UserWarning, match="PyTorch's own layer runs: no compiled layer computes these gradients"):
        y, _ = ours(x)
    torch.testing.assert_close(y, theirs(x)[0])


def test_distributed_data_parallel(tmp_path: Path):
    exact, _, ours = pair("GRU")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, x = torch.nn.parallel.DistributedDataParallel(ours), torch.randn(T, B, I)
        model(x.cuda())[0].square().sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    exact(x.double())[0].square().sum().backward()
    assert all(error(p.grad, q.grad) < BACKWARD for p, q in zip(ours.parameters(), exact.parameters(), strict=True))


def test_cells_of_ones_own():
    layer = ecornn.torch.Recurrent("gru_reset_before", I, H, device="cuda")
    x = torch.randn(T, B, I, device="cuda")
    layer(x)[0].square().sum().backward()
    weights = {n: p.detach().double().cpu().numpy() for n, p in layer.named_parameters()}
    y, _ = layer(x)
    _, wanted, _ = ecornn.reference_gradients("gru_reset_before", x.double().cpu().numpy(), weights,
                                              dy=(2 * y).detach().double().cpu().numpy())
    for name, p in layer.named_parameters():
        assert error(p.grad, torch.from_numpy(wanted[name])) < BACKWARD, name

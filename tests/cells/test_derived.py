"""Parameters that a cell computes of others: of NumPy's, PyTorch's and JAX's arrays, bound, called and trained."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from test_published_cells import quick_host_code  # noqa: F401
from tvm import te

import ecornn
import ecornn.torch
from ecornn import Cell, derive, pointwise, product
from ecornn.errors import CellError, WeightsError
from ecornn.torch.engine import engine_of, weights_of
from ecornn.tune import oracle
from ecornn.workload import Workload

T, B, I, H = 4, 3, 5, 8
pytestmark = pytest.mark.usefixtures("quick_host_code")


class Computed(Cell):
    """An antisymmetric matrix, one of rank 2, one of unit rows, a decay between 0 and 1, and one gain for all units."""

    name, states = "computed", ("h",)

    def parameters(self, input, hidden):
        return {"W": (1, hidden, input), "R": (4, hidden, hidden), "decay": (1, hidden), "gain": (1, hidden)}

    def learned(self, input, hidden):
        return {"W": (1, hidden, input), "A": (1, hidden, hidden), "U": (1, hidden, 2), "V": (1, 2, hidden),
                "N": (1, hidden, hidden), "log_tau": (1, hidden), "gain": (1, 1)}

    def derived(self, p, xp):
        A, N = p["A"], p["N"]
        rows = N / xp.sqrt((N * N).sum(-1)[..., None])
        R = xp.concatenate([A - A.swapaxes(1, 2), A.swapaxes(1, 2), p["U"] @ p["V"], rows])
        return {"R": R, "decay": xp.exp(-xp.exp(p["log_tau"]))}

    def step(self, x, states, p):
        (h,), wx, r, decay, gain = states, product(x, p["W"], 0), product(states[0], p["R"]), p["decay"], p["gain"]
        new = pointwise(lambda b, j: te.tanh(wx[b, j] + r[b, 0, j] + r[b, 1, j] * te.sigmoid(r[b, 2, j] + r[b, 3, j])),
                        h)
        return [pointwise(lambda b, j: decay[0, j] * h[b, j] + gain[0, j] * new[b, j], h)]


def formula(x: Any, h: Any, p: dict[str, Any]) -> Any:
    p, y = {name.removesuffix("_l0"): value for name, value in p.items()}, []
    unit, decay = p["N"] / p["N"].norm(dim=1, keepdim=True), torch.exp(-torch.exp(p["log_tau"]))
    for row in x:
        across = h @ (p["A"] - p["A"].T).T
        gate = torch.sigmoid((h @ p["V"].T) @ p["U"].T + h @ unit.T)
        h = decay * h + p["gain"] * torch.tanh(row @ p["W"].T + across + h @ p["A"] * gate)
        y.append(h)
    return torch.stack(y)


def drawn(seed: int = 0) -> tuple[dict[str, Any], Any, Any]:
    rng = np.random.default_rng(seed)
    learned = {f"{n}_l0": rng.uniform(-0.5, 0.5, (s[0] * s[1], *s[2:])) for n, s in Computed().learned(I, H).items()}
    return learned, rng.uniform(-1, 1, (T, B, I)), rng.uniform(-1, 1, (B, H))


def layer(**options: Any) -> Any:
    made = ecornn.torch.Recurrent(Computed(), I, H, dtype=torch.float64, **options)
    with torch.no_grad():
        for name, value in drawn()[0].items():
            made.get_parameter(name).copy_(torch.from_numpy(value))
    return made


def test_numpy():
    learned, x, h = drawn()
    weights = derive(Computed(), learned, I, H)
    assert {n: w.shape for n, w in weights.items()} == {"W_l0": (H, I), "R_l0": (4 * H, H), "decay_l0": (H,),
                                                        "gain_l0": (H,)}
    wanted = formula(*(torch.from_numpy(v) for v in (x, h)), {n: torch.from_numpy(w) for n, w in learned.items()})
    y, _ = ecornn.reference(Computed(), x, weights, [h])
    np.testing.assert_allclose(y, wanted.numpy(), rtol=1e-12)
    module = ecornn.compile(Computed(), hidden=H, input=I, batch=B, seq=T, dtype="float64", target="cpu")
    np.testing.assert_allclose(module.bind(weights, threads=1)(x, [h])[0], wanted.numpy(), rtol=1e-12)


def test_gradients_reach_what_is_learned(one_thread):
    learned, x, h = (drawn()[0], *(torch.from_numpy(v) for v in drawn()[1:]))
    ours, theirs = layer(), {n: torch.from_numpy(w).requires_grad_() for n, w in learned.items()}
    assert {n for n, _ in ours.named_parameters()} == {*learned}
    for _ in range(2):
        y, last = ours(x, h[None])
        wanted = formula(x, h, theirs)
        torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)
        (y.square().sum() + last.sum()).backward()
        (wanted.square().sum() + wanted[-1].sum()).backward()
    for name, value in theirs.items():
        torch.testing.assert_close(ours.get_parameter(name).grad, value.grad, rtol=1e-10, atol=1e-12)


def test_what_is_computed_is_kept_until_it_changes(one_thread):
    """Once without gradients; again after a step, a write that counts no version, rebind(), functional_call()."""
    x, made = torch.from_numpy(drawn()[1]), layer()
    def right() -> list[torch.Tensor]:
        with torch.no_grad():
            y, _ = made(x)
            own = {n: p for n, p in made.named_parameters()}
            torch.testing.assert_close(y, formula(x, torch.zeros(B, H, dtype=torch.float64), own))
            return weights_of(made)

    first = right()
    assert all(a is b for a, b in zip(first, right(), strict=True))
    optimizer = torch.optim.SGD(made.parameters(), 0.1, fused=True)
    made(x)[0].sum().backward()
    optimizer.step()
    second = right()
    assert not torch.equal(first[1], second[1])
    made.A_l0.data.mul_(0.5)
    assert not torch.equal(second[1], right()[1])
    made.log_tau_l0.data.add_(1e-3)
    ecornn.torch.rebind(made)
    right()
    with torch.no_grad():
        other = {n: p * 0.5 for n, p in made.named_parameters()}
        y, _ = torch.func.functional_call(made, other, (x,))
        torch.testing.assert_close(y, formula(x, torch.zeros(B, H, dtype=torch.float64), other))
    with torch.inference_mode():
        made(x)
    for parameter in made.parameters():
        parameter.requires_grad_(False)
    given = x.clone().requires_grad_()
    made(given)[0].sum().backward()
    assert given.grad is not None


def test_stacks_and_copies(one_thread):
    made, x = layer(num_layers=2, bidirectional=True), torch.from_numpy(drawn()[1])
    with torch.no_grad():
        assert derive("lstm", {"a": 1}, I, H) == {"a": 1}, "cells that compute nothing"
        own = {n: p.detach().numpy() for n, p in made.named_parameters()}
        y, _ = ecornn.reference(Computed(), x.numpy(), derive(Computed(), own, I, H))
        torch.testing.assert_close(made(x)[0], torch.from_numpy(y), rtol=1e-12, atol=1e-12)
        other = copy.deepcopy(made)
        other.A_l0.mul_(0.5)
        assert not torch.equal(other(x)[0], made(x)[0]) and engine_of(other) is not engine_of(made)
        torch.testing.assert_close(made(x)[0], torch.from_numpy(y), rtol=1e-12, atol=1e-12)


def test_exported(one_thread):
    made, x = layer().eval(), torch.from_numpy(drawn()[1])
    program = torch.export.export(made, (x,)).module()
    with torch.no_grad():
        torch.testing.assert_close(program(x)[0], made(x)[0], rtol=1e-12, atol=1e-12)


def test_of_jax():
    jax = pytest.importorskip("jax")
    learned = {n: jax.numpy.asarray(w, "float32") for n, w in drawn()[0].items()}
    def first(learned: Any) -> Any:
        return derive(Computed(), learned, I, H)["R_l0"][0, 1]
    slope = jax.grad(first)(learned)["A_l0"]
    assert (float(slope[0, 1]), float(slope[1, 0])) == (1.0, -1.0)


def test_random_ones_are_those_of_what_is_learned():
    given = oracle.draw(Computed(), Workload(Computed().identity(), H, I, B, T), np.random.default_rng(0))
    across, unit = given.shaped["R"][0], given.shaped["R"][3]
    assert np.array_equal(across, -across.T)
    np.testing.assert_allclose(np.square(unit).sum(1), 1.0, rtol=1e-6)
    assert len({*given.shaped["gain"].ravel()}) == 1 and (given.shaped["decay"] < 1).all()


class Wrong(Computed):
    def __init__(self, made: Any) -> None:
        self.made = made

    def derived(self, p, xp):
        return self.made(p)


@pytest.mark.parametrize(("made", "says"), [
    (lambda p: {"decay": p["log_tau"]}, r"derived\(\) does not return R, nor does learned\(\)"),
    (lambda p: {"decay": p["log_tau"], "R": p["A"][:, :4]},
     r"derived\(\) returns 'R' with shape \(1, 4, 8\); expected \(4, 8, 8\); an axis"),
    (lambda p: p["B"], r"derived\(\) failed: KeyError: 'B'")])
def test_what_is_wrong_with_a_cell_is_said(made: Any, says: str):
    with pytest.raises(CellError, match=says) as raised:
        derive(Wrong(made), drawn()[0], I, H)
    assert raised.value.at == (__file__, Wrong.derived.__code__.co_firstlineno)


def test_what_is_wrong_with_weights_is_said():
    learned = drawn()[0]
    with pytest.raises(WeightsError, match=r"weights\['U_l0'\]: \(2, 8\); expected \(8, 2\) for I=5 and H=8"):
        derive(Computed(), learned | {"U_l0": np.zeros((2, 8))}, I, H)
    with pytest.raises(WeightsError, match=r"weights\['W_l1'\]: missing; .*; the given names are .*, A_l2"):
        derive(Computed(), learned | {"A_l2": np.zeros((8, 8))}, I, H)
    class Flat(Computed):
        def learned(self, input, hidden):
            return {"a": (hidden,)}
    with pytest.raises(CellError, match=r"learned\(\) gives 'a' the shape \(8,\); expected two or three axes"):
        ecornn.torch.Recurrent(Flat(), I, H)

"""Training steps beside FlashRNN's, for ``compare_flashrnn.py --training``: forward and backward through its own API.

FlashRNN has the gradients of W x + b, of recurrent weights and of biases; the products that make W x, and the
gradients of x and W, are its caller's. Ours is the whole layer with all of them, and cuDNN's is, too.
"""

from __future__ import annotations

import msgspec
import side_by_side
import torch
from compare_flashrnn import WAIT, B, Gpu, T, adapt, described, drawn, flashrnn_of, their_inputs
from measured_rows import of_bench
from side_by_side import DEVICE, WrongResultError, float64_forward, relative

from ecornn.bench.grid import Case
from ecornn.bench.measure import Plan, measure
from ecornn.cells import get

LIMIT = 5e-2  # relative error of FlashRNN's gradients: bfloat16 from step to step; another function is off by one


def exact_gradients(cell: str, gates: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor,
                    dh: torch.Tensor) -> list[torch.Tensor]:
    """Those of preactivations (T, B, G*H), recurrent weights (G*H, H) and biases (G*H) of a cell of one head, in
    float64, of the gradients dh (T, B, H); in FlashRNN's layouts."""
    leaves = [t.double().requires_grad_() for t in (gates, weight, bias)]
    eye = torch.eye(len(weight), device=weight.device)
    h = float64_forward(get(cell).name, leaves[0], {"weight_ih_l0": eye, "weight_hh_l0": leaves[1],
                                                    "bias_ih_l0": torch.zeros_like(bias), "bias_hh_l0": leaves[2]})
    dgates, dweight, dbias = torch.autograd.grad(h, leaves, dh.double())
    return [*their_inputs(cell, dgates, dweight)[:2], their_inputs(cell, dbias[None, None], dweight)[0][0, 0]]


def compare(cell: str, hidden: int, gpu: Gpu, repeats: int, seconds: float) -> dict:
    """One row: ours and cuDNN's as ``ecornn bench`` checks and times them, and FlashRNN's in the same turns, in
    microseconds a step. Raises what ``ecornn bench`` does, and WrongResultError where gradients are wrong."""
    gates = described(cell)[1]
    side_by_side.WAIT = WAIT
    adapt(gpu)
    gpu.take()
    gate_inputs = torch.randn(T, B, gates * hidden, device=DEVICE).bfloat16()
    weight = drawn(cell, 1, hidden)["weight_hh_l0"]
    wx, r, b, states = their_inputs(cell, gate_inputs, weight)
    leaves = [t.requires_grad_() for t in (wx, r, b)]
    dh = torch.randn(T, B, 1, hidden, device=DEVICE).bfloat16()
    theirs = flashrnn_of(cell, hidden, B)

    def step() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(theirs(*leaves, states)[0], leaves, dh)

    exact = exact_gradients(cell, gate_inputs, weight, torch.zeros(gates * hidden, device=DEVICE), dh[:, :, 0])
    error = max(relative(g, e) for g, e in zip(step(), exact, strict=True))
    if not error <= LIMIT:
        raise WrongResultError(f"FlashRNN's gradients have error {error:.2e}")
    del exact, gate_inputs
    torch.cuda.empty_cache()
    case = Case(cell=cell, hidden=hidden, batch=B, seq=T, dtype="bfloat16", target="cuda", training=True)
    row = measure(case, Plan(("cudnn",), seconds, more={"flashrnn": step}))
    if row.wrong:
        raise WrongResultError(str(row.wrong))
    found = of_bench(msgspec.to_builtins(row))
    names = ("cell", "T", "B", "I", "H", "dtype", "ratio", "schedule", "keep")
    times = {f"{side}_{end}": found[f"{side}_{end}"] for side in found["sides"] for end in ("us", "p20", "p80")}
    return {name: found[name] for name in names} | times | {
        "error": row.errors["ecornn"], "cudnn_error": row.errors["cudnn"], "flashrnn_error": error,
        "ratio_flashrnn": found["flashrnn_us"] / found["ecornn_us"]}


def line(row: dict) -> str:
    """A row for people."""
    return (f"{row['cell']:14} H={row['H']:4} forward and backward: ecornn {row['ecornn_us']:.2f}, cuDNN "
            f"{row['cudnn_us']:.2f}, FlashRNN {row['flashrnn_us']:.2f}  {row['ratio_flashrnn']:.2f}x  errors "
            f"{row['error']:.1e}, {row['cudnn_error']:.1e}, {row['flashrnn_error']:.1e}")

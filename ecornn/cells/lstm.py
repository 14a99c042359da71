"""Long short-term memory, gates in PyTorch's order: input, forget, cell, output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ecornn.cells.base import Shape, normalized, pointwise, product, scaled
from ecornn.cells.options import Optioned, Value, activation, mixed, within

if TYPE_CHECKING:
    from tvm.te import Tensor


class LSTM(Optioned):
    """Long short-term memory (Hochreiter and Schmidhuber 1997, with the forget gate of Gers 2000).

    i, f, o = sigmoid(W x + b_ih + R h + b_hh), g = tanh(...); c' = f c + i g; h' = o tanh(c').

    Options
    -------
    peepholes : i and f also see c, and o sees c', each by a vector (Gers and Schmidhuber 2000);
        ``weight_peephole`` (3*H,) in the order i, f, o
    coupled : f = 1 - i (Greff et al. 2017, CIFG); the forget gate's weights are not read
    layer_norm : layer normalization inside the step, as Ba et al. 2016 (arXiv 1607.06450, supplement, "LSTM") have it:
        i, f, g, o from LN(W x) weight_ln_ih + b_ih + LN(R h) weight_ln_hh + b_hh, each LN over its 4 H values
        together; h' = o tanh(LN(c') weight_ln_c + bias_ln_c), while c' itself is handed on as it is. LN subtracts
        the mean and divides by sqrt(variance + 1e-5). ``weight_ln_ih``, ``weight_ln_hh`` (4*H,), ``weight_ln_c``,
        ``bias_ln_c`` (H,); the gates' biases are bias_ih and bias_hh. Two more exchanges a step, of sums
    clip : bound of what gates and new values are activations of (ONNX Runtime's clip; c' is as it is)
    clip_state : bound of c' (Sak et al. 2014)
    projection : h' = W_hr (o tanh(c')) (Sak et al. 2014), ``weight_hr`` (H, H); one more exchange of state
        a step. A projection to P < H values is one whose other rows, and columns of R, are zero
    zoneout_h, zoneout_c : share of the old state that stays, at inference (Krueger et al. 2017)
    gate, new, out : activations instead of sigmoid (of i, f, o), tanh (of g) and tanh (of c')
    """

    name = "lstm"
    states = ("h", "c")
    OPTIONS = {"peepholes": False, "coupled": False, "layer_norm": False, "clip": 0.0, "clip_state": 0.0,  # noqa: RUF012
               "projection": False, "zoneout_h": 0.0, "zoneout_c": 0.0, "gate": "sigmoid", "new": "tanh",
               "out": "tanh"}

    def __init__(self, **options: Value) -> None:
        super().__init__(**options)
        if self.options["coupled"]:  # the forget gate's
            self.unread = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_peephole", "weight_ln_ih",
                           "weight_ln_hh")

    def parameters(self, input: int, hidden: int) -> dict[str, Shape]:
        shapes = {"weight_ih": (4, hidden, input), "weight_hh": (4, hidden, hidden),
                  "bias_ih": (4, hidden), "bias_hh": (4, hidden)}
        shapes |= {"weight_peephole": (3, hidden)} if self.options["peepholes"] else {}
        if self.options["layer_norm"]:
            shapes |= {"weight_ln_ih": (4, hidden), "weight_ln_hh": (4, hidden), "weight_ln_c": (1, hidden),
                      "bias_ln_c": (1, hidden)}
        return shapes | {"weight_hr": (1, hidden, hidden)} if self.options["projection"] else shapes

    def step(self, x: Tensor, states: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Sequence[Tensor]:
        from tvm import te, tirx

        h, c = states
        gx, gh = product(x, parameters["weight_ih"]), product(h, parameters["weight_hh"])
        bx, bh = parameters["bias_ih"], parameters["bias_hh"]
        o = self.options
        if o["layer_norm"]:
            gx, gh = scaled(gx, parameters["weight_ln_ih"]), scaled(gh, parameters["weight_ln_hh"])
        squash, new, out = (activation(o[name]) for name in ("gate", "new", "out"))
        gate = te.compute(gx.shape, lambda b, g, j: gx[b, g, j] + bx[g, j] + gh[b, g, j] + bh[g, j],
                          name="gate")

        def seen(b, g, j, state, peephole):
            """The input of a gate that may see a state."""
            if not o["peepholes"]:
                return self.clipped(gate[b, g, j])
            return self.clipped(gate[b, g, j] + parameters["weight_peephole"][peephole, j] * state[b, j])

        def forget(b, j):
            if o["coupled"]:
                return tirx.const(1.0, "float32") - squash(seen(b, 0, j, c, 0))
            return squash(seen(b, 1, j, c, 1))

        cell = pointwise(lambda b, j: within(
            forget(b, j) * c[b, j] + squash(seen(b, 0, j, c, 0)) * new(self.clipped(gate[b, 2, j])),
            o["clip_state"]), c, "cell")

        shown = normalized(cell) if o["layer_norm"] else cell

        def visible(b, j):
            if not o["layer_norm"]:
                return cell[b, j]
            return shown[b, j] * parameters["weight_ln_c"][0, j] + parameters["bias_ln_c"][0, j]

        def exposed(b, j):
            return squash(seen(b, 3, j, cell, 2)) * out(visible(b, j))

        if o["projection"]:
            kept = pointwise(lambda b, j: mixed(o["zoneout_c"], c[b, j], cell[b, j]), c, "kept")
            small = product(pointwise(exposed, c, "exposed"), parameters["weight_hr"], 0)
            return [pointwise(lambda b, j: mixed(o["zoneout_h"], h[b, j], small[b, j]), c, "state"), kept]
        return pointwise(lambda b, j: (mixed(o["zoneout_h"], h[b, j], exposed(b, j)),
                                       mixed(o["zoneout_c"], c[b, j], cell[b, j])), c, "state")

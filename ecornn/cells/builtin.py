"""The built-in cells; gates in PyTorch's order: input, forget, cell, output of an LSTM, reset, update, new of a GRU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ecornn.cells.base import Shape, normalized, pointwise, product, scaled
from ecornn.cells.options import Optioned, Value, activation, mixed, within
from ecornn.errors import CellError

if TYPE_CHECKING:
    from tvm.te import Tensor


def _with_biases(gates: int, input: int, hidden: int) -> dict[str, Shape]:
    return {"weight_ih": (gates, hidden, input), "weight_hh": (gates, hidden, hidden), "bias_ih": (gates, hidden),
            "bias_hh": (gates, hidden)}


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
    gate, new, out : activations instead of sigmoid (of i, f, o), tanh (of g) and tanh (of c')"""

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
        shapes = _with_biases(4, input, hidden)
        shapes |= {"weight_peephole": (3, hidden)} if self.options["peepholes"] else {}
        if self.options["layer_norm"]:
            shapes |= {"weight_ln_ih": (4, hidden), "weight_ln_hh": (4, hidden), "weight_ln_c": (1, hidden),
                      "bias_ln_c": (1, hidden)}
        return shapes | {"weight_hr": (1, hidden, hidden)} if self.options["projection"] else shapes

    def step(self, x: Tensor, states: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Sequence[Tensor]:
        from tvm import te, tirx

        h, c = states
        gx, gh = product(x, parameters["weight_ih"]), product(h, parameters["weight_hh"])
        bx, bh, o = parameters["bias_ih"], parameters["bias_hh"], self.options
        if o["layer_norm"]:
            gx, gh = scaled(gx, parameters["weight_ln_ih"]), scaled(gh, parameters["weight_ln_hh"])
        squash, new, out = (activation(o[name]) for name in ("gate", "new", "out"))
        gate = te.compute(gx.shape, lambda b, g, j: gx[b, g, j] + bx[g, j] + gh[b, g, j] + bh[g, j], name="gate")

        def seen(b, g, j, state, peephole):
            """The input of a gate that may see a state."""
            if not o["peepholes"]:
                return self.clipped(gate[b, g, j])
            return self.clipped(gate[b, g, j] + parameters["weight_peephole"][peephole, j] * state[b, j])

        def forget(b, j):
            if o["coupled"]:
                return tirx.const(1.0, "float32") - squash(seen(b, 0, j, c, 0))
            return squash(seen(b, 1, j, c, 1))

        cell = pointwise(lambda b, j: within(forget(b, j) * c[b, j] + squash(seen(b, 0, j, c, 0)) * new(
            self.clipped(gate[b, 2, j])), o["clip_state"]), c, "cell")
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


class GRU(Optioned):
    """GRU with the reset after the product, as cuDNN and PyTorch have it.

    r, z = sigmoid(W x + b_ih + R h + b_hh); n = tanh(W_n x + b_in + r (R_n h + b_hn));
    h' = (1 - z) n + z h.

    Options
    -------
    layer_norm : layer normalization inside the step, as Ba et al. 2016 (arXiv 1607.06450, supplement, "GRU") have it:
        W x becomes LN(W x) weight_ln_ih and R h becomes LN(R h) weight_ln_hh in the formula, the 2 H values of r and z
        normalized together and the H of n apart. LN subtracts the mean and divides by sqrt(variance + 1e-5).
        ``weight_ln_ih``, ``weight_ln_hh`` (3*H,). One more exchange a step, of sums
    clip : bound of the inputs of activations (ONNX's clip)
    zoneout : share of the old state that stays, at inference (Krueger et al. 2017)
    gate, new : activations instead of sigmoid (of r, z) and tanh (of n)"""

    name = "gru"
    states = ("h",)
    OPTIONS = {"layer_norm": False, "clip": 0.0, "zoneout": 0.0, "gate": "sigmoid", "new": "tanh"}  # noqa: RUF012
    reset_before = False  # the reset gate scales h before R_n sees it, not R_n h

    def parameters(self, input: int, hidden: int) -> dict[str, Shape]:
        shapes = _with_biases(3, input, hidden)
        gains = {"weight_ln_ih": (3, hidden), "weight_ln_hh": (3, hidden)}
        return shapes | gains if self.options["layer_norm"] else shapes

    def products(self, source, parameters, end, gates=(0, 1, 2)):
        """W x or R h, normalized where the option says so: a function of batch row, gate (a number) and unit."""
        by_gate: dict[int, tuple[Tensor, int]] = {}
        for some in ((0, 1), (2,)) if self.options["layer_norm"] else (gates,):
            if set(some) <= set(gates):
                product_ = product(source, parameters[f"weight_{end}"], some)
                if self.options["layer_norm"]:
                    product_ = scaled(product_, parameters[f"weight_ln_{end}"], some[0])
                by_gate |= {g: (product_, g - some[0]) for g in some}
        return lambda b, g, j: by_gate[g][0][b, by_gate[g][1], j]

    def step(self, x: Tensor, states: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Sequence[Tensor]:
        (h,), bx, bh = states, parameters["bias_ih"], parameters["bias_hh"]
        gx = self.products(x, parameters, "ih")
        gh = self.products(h, parameters, "hh", (0, 1) if self.reset_before else (0, 1, 2))
        squash, fresh = activation(self.options["gate"]), activation(self.options["new"])

        def gate(b, g, j):
            return squash(self.clipped(gx(b, g, j) + bx[g, j] + gh(b, g, j) + bh[g, j]))

        if self.reset_before:
            reset = pointwise(lambda b, j: gate(b, 0, j) * h[b, j], h, "reset")
            gn = self.products(reset, parameters, "hh", (2,))

        def seen(b, j):
            from_x = gx(b, 2, j) + bx[2, j]
            if self.reset_before:
                return from_x + gn(b, 2, j) + bh[2, j]
            return from_x + gate(b, 0, j) * (gh(b, 2, j) + bh[2, j])

        new = pointwise(lambda b, j: fresh(self.clipped(seen(b, j))), h, "new")
        update = pointwise(lambda b, j: gate(b, 1, j), h, "update")
        return [pointwise(lambda b, j: mixed(self.options["zoneout"], h[b, j], new[b, j] + update[b, j]
                                             * (h[b, j] - new[b, j])), h, "state")]


class GRUResetBefore(GRU):
    """GRU with the reset before the product, as Cho et al. 2014 (arXiv 1406.1078) have it.

    r, z = sigmoid(W x + b_ih + R h + b_hh); n = tanh(W_n x + b_in + R_n (r h) + b_hn);
    h' = (1 - z) n + z h. The product waits for r: two exchanges of state a step. Options as of ``gru``;
    with ``layer_norm`` R_n (r h) is normalized, one more exchange."""

    name = "gru_reset_before"
    reset_before = True


class VanillaTanh(Optioned):
    """h' = tanh(W x + b_ih + R h + b_hh), after Elman 1990.

    Options
    -------
    clip : bound of the activation's input
    zoneout : share of the old state that stays, at inference (Krueger et al. 2017)
    new : an activation instead of tanh"""

    name = "rnn_tanh"
    states = ("h",)
    OPTIONS = {"clip": 0.0, "zoneout": 0.0, "new": "tanh"}  # noqa: RUF012

    def parameters(self, input: int, hidden: int) -> dict[str, Shape]:
        return _with_biases(1, input, hidden)

    def step(self, x: Tensor, states: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Sequence[Tensor]:
        (h,), new = states, activation(self.options["new"])
        gx, gh = product(x, parameters["weight_ih"], 0), product(h, parameters["weight_hh"], 0)
        bx, bh = parameters["bias_ih"], parameters["bias_hh"]
        return [pointwise(lambda b, j: mixed(self.options["zoneout"], h[b, j], new(
            self.clipped(gx[b, j] + bx[0, j] + gh[b, j] + bh[0, j]))), h, "state")]


class VanillaReLU(VanillaTanh):
    """h' = max(0, W x + b_ih + R h + b_hh)."""

    name = "rnn_relu"
    OPTIONS = VanillaTanh.OPTIONS | {"new": "relu"}


class IndRNN(VanillaTanh):
    """h' = max(0, W x + b_ih + u h), u a vector: every unit on its own (Li et al. 2018, arXiv 1803.04831).

    ``weight_hh`` is u, (H,). Options as of ``rnn_tanh``."""

    name = "indrnn"
    OPTIONS = VanillaReLU.OPTIONS

    def parameters(self, input: int, hidden: int) -> dict[str, Shape]:
        return {"weight_ih": (1, hidden, input), "weight_hh": (1, hidden), "bias_ih": (1, hidden)}

    def step(self, x: Tensor, states: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Sequence[Tensor]:
        (h,), new = states, activation(self.options["new"])
        gx, u, bias = product(x, parameters["weight_ih"], 0), parameters["weight_hh"], parameters["bias_ih"]
        return [pointwise(lambda b, j: mixed(self.options["zoneout"], h[b, j], new(
            self.clipped(gx[b, j] + bias[0, j] + u[0, j] * h[b, j]))), h, "state")]


class SLSTM(Optioned):
    """sLSTM (Beck et al. 2024, arXiv 2405.04517), stabilised as in FlashRNN (Poeppel et al. 2024, arXiv 2412.07752).

    i, f, z, o = W x + b + R h; m' = max(i, logsigmoid(f) + m), or i where n = 0;
    p = exp(i - m'), q = exp(logsigmoid(f) + m - m'); c' = q c + p tanh(z); n' = q n + p; h' = sigmoid(o) c' / n'.
    Gates in the order i, f, z, o. With ``heads`` R has as many blocks on its diagonal, and ``weight_hh``,
    (4, H, H / heads), these alone: row j is what unit j multiplies the values of its own head by.

    h', which the next step waits for, is computed from r = p / q = exp(i - m) (1 + exp(-f)), without m':
    h' = sigmoid(o) (c + r tanh(z)) / (n + r)."""

    name = "slstm"
    states = ("h", "c", "n", "m")
    nonnegative = ("n",)
    OPTIONS = {"heads": 1}  # noqa: RUF012

    @property
    def heads(self) -> int:
        return int(self.options["heads"])

    def parameters(self, input: int, hidden: int) -> dict[str, Shape]:
        own, rest = divmod(hidden, self.heads)
        if rest:
            raise CellError(f"cell {self.spec()!r}: H = {hidden} must be a multiple of heads")
        return {"weight_ih": (4, hidden, input), "weight_hh": (4, hidden, own), "bias_ih": (4, hidden)}

    def step(self, x: Tensor, states: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Sequence[Tensor]:
        from tvm import te, tirx

        h, c, n, m = states
        gx, bias = product(x, parameters["weight_ih"]), parameters["bias_ih"]
        gh = product(h, parameters["weight_hh"], heads=self.heads)
        zero, one = tirx.const(0.0, "float32"), tirx.const(1.0, "float32")
        gate = te.compute(gx.shape, lambda b, g, j: gx[b, g, j] + bias[g, j] + gh[b, g, j], name="gate")
        # logsigmoid(f) = min(f, 0) - log(1 + exp(-|f|)), which does not overflow
        decayed = pointwise(lambda b, j: tirx.min(gate[b, 1, j], zero) + m[b, j]
                            - te.log(one + te.exp(zero - te.abs(gate[b, 1, j]))), h, "decayed")
        top = pointwise(lambda b, j: tirx.Select(n[b, j] == zero, gate[b, 0, j],
                                                 tirx.max(gate[b, 0, j], decayed[b, j])), h, "top")
        p = pointwise(lambda b, j: te.exp(gate[b, 0, j] - top[b, j]), h, "p")
        q = pointwise(lambda b, j: te.exp(decayed[b, j] - top[b, j]), h, "q")
        cell = pointwise(lambda b, j: q[b, j] * c[b, j] + p[b, j] * te.tanh(gate[b, 2, j]), h, "cell")
        norm = pointwise(lambda b, j: q[b, j] * n[b, j] + p[b, j], h, "norm")
        least, most = (tirx.const(bound, "float32") for bound in (-60.0, 60.0))  # beyond, c and n or r do not matter

        def bounded(exponent, b, j):
            floor = tirx.Select(n[b, j] == zero, tirx.max(exponent, least), exponent)  # r must not be 0 where n is
            return te.exp(tirx.min(floor, most))

        ratio = pointwise(lambda b, j: bounded(gate[b, 0, j] - m[b, j], b, j)
                          + bounded(gate[b, 0, j] - m[b, j] - gate[b, 1, j], b, j), h, "ratio")
        new = pointwise(lambda b, j: te.sigmoid(gate[b, 3, j]) * (c[b, j] + ratio[b, j] * te.tanh(gate[b, 2, j]))
                        / (n[b, j] + ratio[b, j]), h, "state")
        return [new, cell, norm, top]

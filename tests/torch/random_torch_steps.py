"""Random steps that are written in PyTorch: modules with several spellings of everything.

``draw(seed)`` makes a module and says how :func:`ecornn.torch.cell` is called for it, and what must come of it."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch_step_parts as parts
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

CAPTURED, REFUSED, EITHER = "captured", "refused", "either"


@dataclass
class Drawn:
    """A module, the arguments of ``cell()``, whether it is ``captured``, ``refused`` or ``either``, and its lines."""

    module: nn.Module
    options: dict[str, Any]
    wanted: str
    input: int
    hidden: int
    states: int
    together: bool
    words: list[str]
    again: Callable[[], nn.Module]  # makes the same module: a pruned one cannot be copied


class Step(nn.Module):
    def __init__(self, I: int, H: int, together: bool) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.together = I, H, together
        self.lines: list[tuple[str, Callable[[Any, list[Any]], Any]]] = []
        self.returned: Callable[[Any, list[Any], list[Any]], Any] = lambda m, states, v: v

    def run(self, x, states):
        self.x, values = x, list(states)
        for _, line in self.lines:
            found = line(self, values)
            values += list(found) if isinstance(found, (tuple, list)) else [found]
        self.x = None
        return self.returned(self, list(states), values)


class One(Step):
    def forward(self, x, h):
        return self.run(x, [h])


class Two(Step):
    def forward(self, x, h, c):
        return self.run(x, [h, c])


class Three(Step):
    def forward(self, x, h, c, *, n=None):
        return self.run(x, [h, c])


class Tuple(Step):
    def forward(self, x, state):
        h, c = state
        return self.run(x, [h, c])


def draw(seed: int) -> Drawn:
    r = random.Random(seed)
    torch.manual_seed(seed)
    H = r.choice([5, 6, 7, 8])
    I = H if r.random() < 0.3 else r.choice([3, 4, 9])
    if r.random() < 0.08:
        kind = r.choice([parts.NormedLSTM, parts.SlowGRU, parts.LeakyRNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell])
        module = kind(I, H)
        lstm = isinstance(module, nn.LSTMCell)
        options = {"states": ("h", "c")} if lstm and kind is not nn.LSTMCell else {}
        return Drawn(module, options, CAPTURED, I, H, 1 + lstm, lstm, [kind.__name__], lambda: draw(seed).module)
    return Writer(r, I, H).written(lambda: draw(seed).module)


class Writer:
    def __init__(self, r: random.Random, I: int, H: int) -> None:
        self.r, self.I, self.H = r, I, H
        kind = r.choice([One, Two, Tuple, Three])
        self.count = 1 if kind is One else 2
        self.module = kind(I, H, kind is Tuple)
        self.wanted, self.words = CAPTURED, []
        self.full = list(range(self.count))  # which values are (B, H)
        self.of_x: set[int] = set()  # and depend on x alone: of these a layer of its own before makes products
        self.values = self.count

    def written(self, again: Callable[[], nn.Module]) -> Drawn:
        r, module = self.r, self.module
        drawn: list[Callable[[], None]] = [self.product, self.product, self.gated, self.pointwise, self.pointwise,
                                           self.inplace, self.views, self.statistic, self.vector]
        self.product()
        for _ in range(r.randint(2, 6)):
            r.choice(drawn)()
        if r.random() < 0.06:
            self.refused()
        fresh = [n for n in self.full if n >= self.count] or self.full
        picked = [r.choice(fresh) for _ in range(self.count)]
        picked[0] = self.full[-1]
        if r.random() < 0.15:
            picked[-1] = r.choice(self.full)
        shown = r.random() < 0.25
        form = r.choice(["flat", "nested"]) if self.count > 1 or shown else "flat"
        def returned(m, states, v):
            after = [v[n] for n in picked]
            if shown:
                y = torch.tanh(v[picked[0]] * 0.5)
                return (y, tuple(after)) if form == "nested" else (y, *after)
            return after[0] if len(after) == 1 else tuple(after) if form == "flat" else list(after)

        module.returned = returned
        self.words.append(f"return {'y, ' if shown else ''}{picked}")
        if r.random() < 0.1:
            c = r.choice([0.5, 2.0])
            module.register_forward_hook(lambda m, i, o: o * c if isinstance(o, torch.Tensor) else None)
            self.words.append(f"hook of the step: * {c}")
        options = {"states": ("h", "c")} if isinstance(module, (Tuple, Three)) else {}
        together = isinstance(module, Tuple)
        return Drawn(module, options, self.wanted, self.I, self.H, self.count, together, self.words, again)

    # -- helpers ------------------------------------------------------------------------------------
    def line(self, words: str, function: Callable[[Any, list[Any]], Any], made: int = 1) -> None:
        self.module.lines.append((words, function))
        self.words.append(words)
        self.full += range(self.values, self.values + made)
        if self.of_x.issuperset(self.reads):
            self.of_x |= {*range(self.values, self.values + made)}
        self.values += made

    def any(self, multiplied: bool = False) -> int:
        last = [n for n in self.full if not multiplied or n not in self.of_x or self.r.random() < 0.1][-4:]
        return self.r.choice(last)

    def name(self) -> str:
        self.names = getattr(self, "names", 0) + 1
        return f"w{self.names}"

    # -- products -----------------------------------------------------------------------------------
    def linear(self, fan_in: int, fan_out: int, of_x: bool = False) -> str:
        """A module that multiplies, of some kind; its name. Where it is ``of_x``, mostly of x as it is."""
        r, m, name = self.r, self.module, self.name()
        kind = r.choice(["plain"] * 4 + ["no bias", "doubled", "weight_norm", "spectral", "pruned", "hook", "pre hook",
                                          "frozen", "masked", "orthogonal", "sequential", "tied", "half"])
        kind = "hook" if kind == "pre hook" and of_x and r.random() < 0.8 else kind
        layer: nn.Module = (parts.Doubled if kind == "doubled" else nn.Linear)(fan_in, fan_out, bias=kind != "no bias")
        if kind == "weight_norm":
            layer = parametrizations.weight_norm(layer, dim=r.choice([0, 1, None]))
        elif kind == "spectral":
            layer = parametrizations.spectral_norm(layer).eval()
        elif kind == "orthogonal" and fan_in <= fan_out:
            layer = parametrizations.orthogonal(layer, orthogonal_map="householder")
            kind = "orthogonal, frozen"
            with torch.no_grad():
                layer.weight  # noqa: B018
        elif kind == "pruned":
            prune.random_unstructured(layer, "weight", amount=0.3)
        elif kind == "hook":
            layer.register_forward_hook(lambda m, i, o: o * 1.5)
        elif kind == "pre hook":
            layer.register_forward_pre_hook(lambda m, i: (i[0] * 0.5,) if i[0].requires_grad or True else None)
        elif kind == "frozen":
            layer.requires_grad_(False)
        elif kind == "sequential":
            layer = nn.Sequential(layer, nn.Identity(), nn.Dropout(0.3).eval(), r.choice([
                nn.Tanh(), nn.Hardtanh(-0.7, 0.9), nn.ReLU(inplace=True), nn.PReLU(), nn.Softplus(2.0, 1.5)]))
        self.words.append(f"{name}: {kind} ({fan_out}, {fan_in})")
        if kind == "tied" and getattr(self, "first", None) and self.first[1:] == (fan_in, fan_out):
            layer.weight = getattr(m, self.first[0]).weight
        if kind in ("plain", "no bias") and not getattr(self, "first", None):
            self.first = name, fan_in, fan_out
        setattr(m, name, layer)
        if kind == "masked":
            m.register_buffer(f"{name}_mask", (torch.rand(fan_out, fan_in) > 0.3).float())
            self.functional = getattr(self, "functional", set()) | {name}
        return name

    def call(self, name: str) -> Callable[[Any, Any], Any]:
        if name in getattr(self, "functional", set()):
            return lambda m, v: F.linear(v, getattr(m, name).weight * getattr(m, f"{name}_mask"), getattr(m, name).bias)
        return lambda m, v: getattr(m, name)(v)

    def product(self) -> None:
        r, H, I, n = self.r, self.H, self.I, self.any(True)
        form = r.choice(["h", "x", "cat", "sum", "matmul", "einsum", "einsum x", "addmm", "low", "mm"])
        m, self.reads = self.module, [] if form in ("x", "einsum x") else [n]
        if form == "h":
            call = self.call(self.linear(H, H))
            self.line(f"linear({n})", lambda m, v: call(m, v[n]))
        elif form == "x":
            call = self.call(self.linear(I, H, True))
            self.line("linear(x)", lambda m, v: call(m, m.x))
        elif form == "cat":
            call = self.call(self.linear(I + H, H, True))
            how = r.choice([lambda a, b: torch.cat([a, b], 1), lambda a, b: torch.cat((a, b), dim=-1),
                            lambda a, b: torch.concat([a, b], axis=1), lambda a, b: torch.hstack((a, b))])
            self.line(f"linear(cat(x, {n}))", lambda m, v: call(m, how(m.x, v[n])))
        elif form == "sum":
            one, other = self.call(self.linear(I, H, True)), self.call(self.linear(H, H))
            self.line(f"linear(x) + linear({n})", lambda m, v: one(m, m.x).add_(other(m, v[n])))
        elif form == "low":
            k = r.choice([1, 2, 3])
            one, other = self.call(self.linear(H, k)), self.linear(k, H)
            other = self.call(other)
            if k == 1:
                self.line(f"linear_1({n}) * {n}", lambda m, v: torch.sigmoid(one(m, v[n])) * v[n])
            else:
                self.line(f"low {k}({n})", lambda m, v: other(m, torch.tanh(one(m, v[n]))))
        else:
            name = self.name()
            width = I if form == "einsum x" else H
            setattr(m, name, nn.Parameter(torch.randn(H, width) / width ** 0.5))
            calls: dict[str, Callable[[Any, Any], Any]] = {
                "matmul": lambda w, v: v @ w, "mm": lambda w, v: torch.mm(v, w.t()),
                "einsum": lambda w, v: torch.einsum("bi,ji->bj", v, w), "einsum x": lambda w, v: torch.einsum(
                    "ji,bi->bj", w, v), "addmm": lambda w, v: torch.addmm(w[0], v, w, beta=0.5, alpha=2)}
            how = calls[form]
            self.line(f"{form}({n})", lambda m, v: how(getattr(m, name), m.x if form == "einsum x" else v[n]))

    def gated(self) -> None:
        r, H, n = self.r, self.H, self.any(True)
        k, self.reads = r.choice([2, 3]), [n]
        call = self.call(self.linear(H, k * H))
        splits: list[tuple[str, Callable[[Any], Any]]] = [
            ("chunk", lambda g: g.chunk(k, dim=-1)), ("split", lambda g: torch.split(g, H, dim=1)),
            ("slices", lambda g: [g[:, i * H:(i + 1) * H] for i in range(k)]),
            ("view", lambda g: g.view(-1, k, H).unbind(1)),
            ("reshape", lambda g: [g.reshape(len(g), k, H)[:, i] for i in range(k)]),
            ("unflatten", lambda g: g.unflatten(1, (k, H)).permute(1, 0, 2)),
            ("in place", lambda g: (g[:, :H].tanh_(), g)[1].chunk(k, 1)),
            ("assigned", lambda g: parts.assigned(g, H).chunk(k, 1)),
            ("narrow", lambda g: [g.narrow(1, i * H, H) for i in range(k)]),
            ("softmax", lambda g: g.view(-1, k, H).softmax(1).unbind(1)),
            ("tensor_split", lambda g: torch.tensor_split(g, k, dim=1)),
            ("whole norm", lambda g: F.layer_norm(g, g.shape[1:]).chunk(k, 1)),
            ("group norm", lambda g: F.group_norm(g, k).chunk(k, 1)),
            ("select", lambda g: [g.view(g.size(0), k, -1).select(1, i) for i in range(k)])]
        words, how = r.choice(splits)
        self.line(f"{words} of {k} gates({n})", lambda m, v: tuple(how(call(m, v[n]) * 1.0)), k)

    # -- arithmetic ---------------------------------------------------------------------------------
    def pointwise(self) -> None:
        r = self.r
        self.reads = a, b = self.any(), self.any()
        c = round(r.uniform(0.2, 1.5), 2)
        forms: list[tuple[str, Callable[[Any, Any], Any]]] = [
            ("sigmoid", lambda p, q: torch.sigmoid(p) * q), ("tanh", lambda p, q: torch.tanh(p + q)),
            ("where", lambda p, q: torch.where(p > q * c, p, q - c)), ("where method", lambda p, q: p.where(q > 0, -q)),
            ("where number", lambda p, q: torch.where(p < c, p, 0.1)),
            ("clamp", lambda p, q: p.clamp(min=-c, max=c) + q),
            ("clip", lambda p, q: torch.clip(p, max=c)), ("sub alpha", lambda p, q: torch.sub(p, q, alpha=c)),
            ("subtract", lambda p, q: p.subtract(q, alpha=c)), ("rsub", lambda p, q: 1 - p * q),
            ("lerp", lambda p, q: torch.lerp(p, q, c / 2)), ("lerp values", lambda p, q: torch.lerp(p, q, p.sigmoid())),
            ("maximum", lambda p, q: torch.maximum(p, q)), ("fmin", lambda p, q: torch.minimum(p, q * c)),
            ("masked_fill", lambda p, q: p.masked_fill(q > c, 0.0)), ("mask", lambda p, q: (q > 0) * p),
            ("float mask", lambda p, q: p * (q > 0.1).float() + q), ("gelu", lambda p, q: F.gelu(p) + q),
            ("gelu tanh", lambda p, q: F.gelu(p, approximate="tanh") * q), ("silu", lambda p, q: F.silu(p) - q),
            ("softplus", lambda p, q: F.softplus(p, beta=c, threshold=1)), ("mish", lambda p, q: F.mish(p) + q * c),
            ("elu", lambda p, q: F.elu(p, alpha=c)), ("relu6", lambda p, q: F.relu6(p) - q),
            ("hardsigmoid", lambda p, q: F.hardsigmoid(p) * q), ("leaky", lambda p, q: F.leaky_relu(p, c / 2)),
            ("relu inplace", lambda p, q: F.relu(p + q, inplace=True)), ("square", lambda p, q: p.square() * 0.1 + q),
            ("addcmul", lambda p, q: torch.addcmul(p, p, q, value=c)), ("pow", lambda p, q: p ** 2 * c - q),
            ("abs", lambda p, q: torch.abs(p) - q), ("exp", lambda p, q: torch.exp(-p.abs()) * q),
            ("division", lambda p, q: p / (1 + q.abs())), ("rsqrt", lambda p, q: p * torch.rsqrt(1 + q * q)),
            ("logsigmoid", lambda p, q: F.logsigmoid(p) * c), ("softsign", lambda p, q: F.softsign(p - q)),
            ("sin", lambda p, q: torch.sin(p) + torch.cos(q)), ("logic", lambda p, q: torch.where(
                (p > 0) & ~(q > c) | (q < -c), p, q)), ("sign", lambda p, q: p.sign() * c + q),
            ("hardtanh", lambda p, q: F.hardtanh(p, -c, c) + q),
            ("function", lambda p, q: parts.Cubed.apply(p * 0.5) + q),
            ("spike", lambda p, q: parts.Spike.apply(p) + q), ("detach", lambda p, q: p.detach() * p + q),
            ("threshold", lambda p, q: F.threshold(p, 0.1, c)),
            ("tensor constant", lambda p, q: p * torch.tensor(c) + q),
            ("zeros", lambda p, q: torch.zeros_like(p) + q * c), ("full", lambda p, q: p + q.new_full(q.shape, c)),
            ("dropout", lambda p, q: F.dropout(p, 0.5, training=False) + q), ("out of place", lambda p, q: +p - -q)]
        words, how = r.choice(forms)
        self.line(f"{words}({a}, {b}, {c})", lambda m, v: how(v[a], v[b]))

    def inplace(self) -> None:
        r = self.r
        self.reads = a, b = self.any(), self.any()
        c = round(r.uniform(0.2, 1.5), 2)
        statements: list[tuple[str, Callable[[Any, Any], Any]]] = [
            ("tanh_", lambda p, q: p.tanh_()), ("sigmoid_", lambda p, q: torch.sigmoid_(p)),
            ("add_", lambda p, q: p.add_(q, alpha=c)), ("mul_", lambda p, q: p.mul_(q).mul_(c)),
            ("sub_", lambda p, q: p.sub_(q)), ("clamp_", lambda p, q: p.clamp_(-c, c)), ("neg_", lambda p, q: p.neg_()),
            ("relu_", lambda p, q: F.relu_(p)), ("lerp_", lambda p, q: p.lerp_(q, 0.3)),
            ("copy_", lambda p, q: p.copy_(q * c)), ("masked_fill_", lambda p, q: p.masked_fill_(q > 0, c)),
            ("addcmul_", lambda p, q: p.addcmul_(q, q, value=0.3)), ("+=", lambda p, q: p.__iadd__(q)),
            ("elu_", lambda p, q: F.elu_(p)), ("hardtanh_", lambda p, q: F.hardtanh(p, -c, c, inplace=True)),
            ("zero_", lambda p, q: p.mul_(0).add_(q)), ("div_", lambda p, q: p.div_(1 + q * q)),
            ("slice", lambda p, q: p[:].mul_(c))]
        words, how = r.choice(statements)
        copied = a if r.random() < 0.4 and a >= self.count else None  # one that lines above made, itself
        def line(m: Any, v: list[Any]) -> Any:
            p, q = (v[a] * 1.0 if copied is None else v[a]), v[b] * 1.0
            how(p, q)  # a statement: what it returns is dropped
            return p
        self.line(f"{words}({a}, {b}, {c})" + (" of a copy" if copied is None else ""), line)

    def vector(self) -> None:
        r, m, H, n = self.r, self.module, self.H, self.any()
        name, self.reads = self.name(), [n]
        shape = r.choice([(H,), (), (1,), (1, H)])
        value = torch.rand(shape) * 0.8 + 0.1
        kind = r.choice(["parameter", "frozen", "buffer", "plain"])
        if kind == "buffer":
            m.register_buffer(name, value, persistent=r.random() < 0.7)
        else:
            setattr(m, name, value if kind == "plain" else nn.Parameter(value, kind == "parameter"))
        forms: list[tuple[str, Callable[[Any, Any], Any]]] = [
            ("1 - tau", lambda w, p: p * (1 - w)), ("exp", lambda w, p: torch.exp(-w.exp()) * p),
            ("softplus", lambda w, p: p * F.softplus(w)),
            ("sigmoid", lambda w, p: torch.lerp(p, p.tanh(), w.sigmoid())),
            ("add", lambda w, p: p + w), ("threshold", lambda w, p: torch.where(p > w, p - w, p)),
            ("expand", lambda w, p: p * w.expand(p.shape)), ("mean", lambda w, p: p - w.mean())]
        words, how = r.choice(forms)
        self.line(f"{words} of {kind} {name}{shape}, {n}", lambda m, v: how(getattr(m, name), v[n]))

    # -- rows ---------------------------------------------------------------------------------------
    def statistic(self) -> None:
        r, m, H, n = self.r, self.module, self.H, self.any()
        self.reads, name, eps = [n], self.name(), 10 ** r.uniform(-5, -2)
        modules: dict[str, Callable[[], nn.Module]] = {
            "LayerNorm": lambda: nn.LayerNorm(H, eps=eps), "plain LayerNorm": lambda: nn.LayerNorm(
                H, elementwise_affine=False), "RMSNorm": lambda: nn.RMSNorm(H, eps=eps),
            "BatchNorm": lambda: parts.trained(nn.BatchNorm1d(H)).eval(), "Softmax": lambda: nn.Softmax(dim=-1),
            "GroupNorm": lambda: nn.GroupNorm(1 if H % 2 else 2, H)}
        forms: dict[str, Callable[[Any], Any]] = {
            "softmax": lambda p: torch.softmax(p, dim=1), "log_softmax": lambda p: F.log_softmax(p, dim=-1),
            "layer_norm": lambda p: F.layer_norm(p, (H,), eps=eps), "mean": lambda p: p - p.mean(-1, keepdim=True),
            "amax": lambda p: p - p.amax(dim=1, keepdim=True), "amin": lambda p: p * torch.amin(p, 1)[:, None],
            "sum": lambda p: torch.tanh(p.sum(1, keepdim=True)) * p, "var": lambda p: p / (1 + p.var(
                1, keepdim=True, unbiased=False)), "std": lambda p: p / (0.1 + p.std(-1, keepdim=True)),
            "normalize": lambda p: F.normalize(p, dim=1, eps=1e-2), "dot": lambda p: p * torch.einsum(
                "bi,bi->b", p, p).tanh().unsqueeze(1), "logsumexp": lambda p: p - p.logsumexp(1, keepdim=True),
            "mean of squares": lambda p: p * torch.rsqrt(p.pow(2).mean(-1, keepdim=True) + eps),
            "norm": lambda p: p / (1 + torch.linalg.norm(p, dim=1, keepdim=True))}
        words = r.choice([*modules, *forms])
        if words in modules:
            setattr(m, name, modules[words]())
            self.line(f"{words}({n})", lambda m, v: getattr(m, name)(v[n]))
        else:
            self.line(f"{words}({n})", lambda m, v: forms[words](v[n]))

    def views(self) -> None:
        r, H = self.r, self.H
        self.reads = a, b = self.any(), self.any()
        forms: list[tuple[str, Callable[[Any, Any], Any]]] = [
            ("stack sum", lambda p, q: torch.stack([p, q * 0.5], 1).sum(1)),
            ("stack mean", lambda p, q: torch.stack((p, q), dim=0).mean(0)),
            ("stack amax", lambda p, q: torch.stack([p, q], dim=-2).amax(-2)),
            ("attention", lambda p, q: (torch.stack([p, q], 0).softmax(0) * torch.stack([q, p], 0)).sum(0)),
            ("transpose", lambda p, q: (p.t() * 0.5).T + q),
            ("unsqueeze", lambda p, q: (p[:, None] * q[:, None])[:, 0]),
            ("squeeze", lambda p, q: torch.squeeze(p.unsqueeze(1) + q.unsqueeze(1), dim=1)),
            ("cat chunk", lambda p, q: torch.cat([p, q], -1).tanh().chunk(2, -1)[1]),
            ("flatten", lambda p, q: torch.stack([p, q], 1).flatten(1)[:, H:]),
            ("scatter", lambda p, q: parts.written(torch.cat([p, q], 1), q, H)), ("glu", lambda p, q: F.glu(
                torch.cat([p, q], 1), dim=-1)), ("view", lambda p, q: p.view(p.shape[0], -1) + q.reshape(-1, H)),
            ("expand", lambda p, q: p.mean(1, keepdim=True).expand(-1, H) * q), ("swapaxes", lambda p, q: torch.stack(
                [p, q], 1).swapaxes(0, 1)[0] * 1.0), ("movedim", lambda p, q: torch.stack([p, q], 2).movedim(2, 0)[1]),
            ("repeat", lambda p, q: p.sum(1, keepdim=True).repeat(1, H).tanh() + q), ("contiguous", lambda p, q: p.t(
                ).contiguous().t().clone() + q)]
        words, how = r.choice(forms)
        self.line(f"{words}({a}, {b})", lambda m, v: how(v[a], v[b]))

    # -- what no cell can have ----------------------------------------------------------------------
    def refused(self) -> None:
        r, n = self.r, self.any()
        self.reads = [n]
        forms: list[tuple[str, str, Callable[[Any, Any], Any]]] = [
            ("clipped", REFUSED, lambda m, p: parts.Clipped.apply(p)),
            ("no_grad", REFUSED, lambda m, p: parts.silent(p) + p),
            ("branch", REFUSED, lambda m, p: p if p.sum() > 0 else -p),
            ("item", REFUSED, lambda m, p: p * p.sum().item()),
            ("random", REFUSED, lambda m, p: F.dropout(p, 0.5, training=True)), ("rand", REFUSED, lambda m, p:
             p + torch.rand_like(p)), ("batch", REFUSED, lambda m, p: p - p.mean(0)), ("roll", EITHER, lambda m, p:
             torch.roll(p, 1, 1)), ("cumsum", EITHER, lambda m, p: torch.cumsum(p, 1)), ("unit", EITHER, lambda m, p:
             p * p[:, :1]), ("sort", EITHER, lambda m, p: p.sort(1).values),
            ("hook", REFUSED, lambda m, p: parts.hooked(p)),
            ("counter", REFUSED, lambda m, p: parts.counted(m, p)), ("outer", EITHER, lambda m, p: torch.einsum(
                "bi,bj,bj->bi", p, p, p)), ("max", EITHER, lambda m, p: p - p.max(1, keepdim=True).values)]
        words, wanted, how = r.choice(forms)
        self.wanted = wanted
        self.line(f"{words}({n})", lambda m, v: how(m, v[n]))

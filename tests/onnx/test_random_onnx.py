"""Random ONNX models around recurrent nodes, rewritten, against ONNX Runtime's own nodes: deep features, constants
computed in many ways, shared weights, bodies.

    ECORNN_RANDOM=1000:1300 python -m pytest -m exhaustive -s tests/onnx/test_random_onnx.py
    PYTHONPATH=tests/helpers python tests/onnx/test_random_onnx.py 17     # what model 17 is made of"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime_sample import GATES, alike, feeds_of, session, value
from pairwise import seeds

import ecornn.onnxruntime
from ecornn.compiler import compile_layer
from ecornn.errors import ArgumentError
from ecornn.onnxruntime import rewriting

DEEPEST = 2000  # nodes behind one another
OPSETS = (13, 14, 17, 20, 21)
ACTIVATIONS = {"LSTM": ["HardSigmoid", "Softsign", "Tanh"], "GRU": ["Sigmoid", "LeakyRelu"], "RNN": ["Relu"]}
STABLE = ("Tanh", "Sigmoid", "Identity", "Neg", "Sin", "Softsign")  # keep values where they are

@dataclass
class Sample:
    """A model, in words, too; ``plain``: the same without ONNX's layout 1; ``refused``: reasons of nodes that stay."""

    model: Any
    plain: Any
    refused: dict[str, str]
    made: list[str]


@dataclass
class Builder:
    rng: np.random.Generator
    made: list[str]
    counter: list[int] = field(default_factory=lambda: [0])
    nodes: list[Any] = field(default_factory=list)
    tensors: list[Any] = field(default_factory=list)

    def new(self, what: str) -> str:
        self.counter[0] += 1
        return f"{what}{self.counter[0]}"

    def node(self, op: str, *inputs: str, count: int = 1, **attributes: Any) -> Any:
        outputs = [self.new(op.lower()) for _ in range(count)]
        self.nodes.append(helper.make_node(op, list(inputs), outputs, **attributes))
        return outputs[0] if count == 1 else outputs

    def one_of(self, *choices: Any) -> Any:
        return choices[self.rng.integers(len(choices))]

    def chance(self, of: float) -> bool:
        return bool(self.rng.random() < of)

    def initializer(self, value: Any) -> str:
        self.tensors.append(numpy_helper.from_array(np.asarray(value), self.new("t")))
        return str(self.tensors[-1].name)

    def whole(self, *numbers: int) -> str:
        value = np.array(numbers, np.int64)
        return self.node("Constant", value_ints=list(numbers)) if self.chance(0.5) else self.initializer(value)

    def deep(self, name: str, most: int = DEEPEST) -> str:
        depth = int(np.exp(self.rng.uniform(0, np.log(most + 1)))) - 1
        self.made.append(f"{depth} nodes deep")
        for _ in range(depth):
            name = self.node(self.one_of(*STABLE), name)
        return name

    def constant(self, value: np.ndarray) -> str:
        """A constant of that value, of float32 with three axes or two, computed in one of many ways."""
        scale = np.float32(np.abs(value).max() / 127 + 1e-6)
        node, tensor, whole, turned = self.node, self.initializer, self.whole, self.rng.permutation
        ways: list[Callable[[], str]] = [
            lambda: tensor(value), lambda: node("Constant", value=numpy_helper.from_array(value)),
            lambda: node("Transpose", self.constant(np.ascontiguousarray(value.transpose(axes := turned(value.ndim)))),
                         perm=[*map(int, np.argsort(axes))]),
            lambda: node("Reshape", tensor(value.ravel()), whole(*value.shape[:-1], -1)),
            lambda: node("Cast", tensor(value.astype(np.float64)), to=TensorProto.FLOAT),
            lambda: node("Slice", tensor(np.concatenate([value[:, :2], value, value[:, :1]], 1)),
                         whole(min(2, value.shape[1])), whole(-1), whole(1)),
            lambda: node("Concat", tensor(value[:, :(at := int(self.rng.integers(value.shape[1] + 1)))]),
                         tensor(value[:, at:]), axis=1),
            lambda: node("Gather", tensor(value[:, (order := turned(value.shape[1]))]),
                         whole(*map(int, np.argsort(order))), axis=1),
            lambda: node("Split", tensor(np.concatenate([-value, value], -1)),
                         whole(value.shape[-1], value.shape[-1]), count=2, axis=-1)[1],
            # to zeros by the shape of another constant
            lambda: node("Add", given := tensor(value), node("ConstantOfShape", node("Shape", given))),
            lambda: node("DequantizeLinear", tensor(np.round(value / scale).astype(np.int8)), tensor(scale)),
            # a number, expanded to a shape that is put together
            lambda: node("Expand", tensor(value.ravel()[:1]), node("Concat", *map(whole, value.shape), axis=0)),
            lambda: self.deep(self.constant(value), most=300),
            lambda: node("Cast", tensor(value.astype(np.float16)), to=TensorProto.FLOAT)]
        number = int(self.rng.integers(len(ways)))
        self.made.append(f"constant by way {number}")
        return ways[number]()

    def size(self, of: str, axis: int) -> str:
        shape = self.node("Shape", of)
        if self.chance(0.5):
            return self.node("Slice", shape, self.whole(axis), self.whole(axis + 1))
        number = self.node("Gather", shape, self.initializer(np.array(axis)), axis=0)
        return self.node("Unsqueeze", number, self.whole(0))

    def zeros(self, sizes: list[str | int], value: float) -> str:
        shape = self.node("Concat", *(s if isinstance(s, str) else self.whole(s) for s in sizes), axis=0)
        if self.chance(0.5):
            return self.node("ConstantOfShape", shape, value=numpy_helper.from_array(np.array([value], np.float32)))
        return self.node("Expand", self.initializer(np.array([value], np.float32)), shape)

    def weights(self, op: str, both: int, inputs: int, hidden: int, peepholes: bool) -> tuple[str, ...]:
        rows = GATES[op] * hidden
        shapes = [(both, rows, inputs), (both, rows, hidden), (both, 2 * rows), (both, 3 * hidden)]
        return tuple(self.constant(self.rng.uniform(-0.5, 0.5, shape).astype(np.float32)) if is_there else ""
                     for shape, is_there in zip(shapes, [True, True, self.chance(0.8), peepholes], strict=True))


class Recurrent:
    def __init__(self, b: Builder, lengths: bool) -> None:
        self.b, self.inputs, self.refused = b, {}, {}
        self._lengths = lengths
        self._known: dict[tuple[Any, ...], list[tuple[str, ...]]] = {}

    def kind(self) -> dict[str, Any]:
        b = self.b
        op = b.one_of("LSTM", "GRU", "RNN")
        attributes: dict[str, Any] = {"hidden_size": b.one_of(4, 6)}
        direction = b.one_of("forward", "forward", "reverse", "bidirectional")
        attributes |= {} if direction == "forward" and b.chance(0.5) else {"direction": direction}
        if op == "GRU" and b.chance(0.5):
            attributes["linear_before_reset"] = 1
        if b.chance(0.15):
            attributes["clip"] = 0.5
        if b.chance(0.15):
            attributes["activations"] = ACTIVATIONS[op] * (1 + (direction == "bidirectional"))
        if op == "LSTM" and b.chance(0.1):
            attributes["input_forget"] = 1
        if b.chance(0.1):
            attributes["layout"] = 1
        return {"op": op, "peepholes": op == "LSTM" and b.chance(0.15), "attributes": attributes}

    def given(self, name: str, shape: list[Any], kind: int = TensorProto.FLOAT) -> str:
        self.inputs[name] = value(name, kind, shape)
        return name

    def add(self, x: str, width: int, kind: dict[str, Any], features: str, state: tuple[str, ...] = (),
            b: Builder | None = None) -> tuple[list[str], int, int]:
        """A node, in the graph ``b``; returns its outputs, D and H. x (T, B, width); ``features`` gives shapes."""
        b, (op, attributes) = b or self.b, (kind["op"], kind["attributes"])
        both, hidden = 1 + (attributes.get("direction") == "bidirectional"), attributes["hidden_size"]
        key = op, both, width, hidden, kind["peepholes"]
        known = self._known.setdefault(key, [])
        if not known or self.b.chance(0.4):
            known.append(self.b.weights(op, both, width, hidden, kind["peepholes"]))
        w, r, bias, p = self.b.one_of(*known)
        batch_first = attributes.get("layout", 0)
        x = b.node("Transpose", x, perm=[1, 0, 2]) if batch_first else x
        states = [*state] or [self._state(b, features, both, hidden, batch_first) for _ in range(1 + (op == "LSTM"))]
        lens = self._lens(b, features) if self._lengths and b.chance(0.5) else ""
        inputs = [x, w, r, bias, lens, *states, *([p] if p else [])]
        while not inputs[-1]:
            inputs.pop()
        outputs = [b.new(name) for name in ("Y", "Y_h", "Y_c")[:2 + (op == "LSTM")]]
        b.nodes.append(helper.make_node(op, inputs, outputs, name=b.new("node"), **attributes))
        b.made.append(f"{op} {attributes}")
        return outputs, both, hidden

    def _state(self, b: Builder, features: str, both: int, hidden: int, batch_first: int) -> str:
        rows: Any = b.size(features, 1)
        kind = b.one_of("none", "none", "input", "shape", "shape", "deep")
        b.made.append(f"state: {kind}")
        sizes: list[Any] = [rows, both, hidden] if batch_first else [both, rows, hidden]
        if kind == "none":
            return ""
        if kind == "input":
            return self.given(b.new("state"), ["B" if s is rows else s for s in sizes])
        made = b.zeros(sizes, b.one_of(0.0, 0.25))
        return b.deep(made, most=50) if kind == "deep" else made

    def _lens(self, b: Builder, features: str) -> str:
        if b.chance(0.5):
            return self.given("lens", ["B"], TensorProto.INT32)
        steps = b.node("Cast", b.size(features, 0), to=TensorProto.INT32)
        return b.node("Expand", steps, b.size(features, 1))


def random_model(seed: int) -> Sample:
    made: list[str] = []
    b = Builder(np.random.default_rng(seed), made)
    nodes, width = Recurrent(b, b.chance(0.5)), b.one_of(3, 5)
    x = b.deep(nodes.given("X", ["T", "B", width]))
    shown: list[str] = []
    for _ in range(int(b.rng.integers(1, 5))):
        kind, place = nodes.kind(), b.one_of("graph", "graph", "graph", "If", "Loop", "unrolled")
        made.append(f"in {place}")
        if place != "graph":
            shown += {"If": _branch, "Loop": _loop, "unrolled": _unrolled}[place](b, nodes, x, width, kind)
            continue
        outputs, both, hidden = nodes.add(x, width, kind, b.node("Relu", x))
        shown += [name for name in outputs if b.chance(0.6)] or outputs[:1]
        if b.chance(0.5) and not kind["attributes"].get("layout"):  # the next one's X
            y = b.node("Transpose", outputs[0], perm=[0, 2, 1, 3])
            x, width = b.node("Reshape", y, b.whole(0, 0, -1)), both * hidden
    _refused(b, nodes, x, width, shown)
    inputs = {**nodes.inputs}
    own = any(a.g.initializer for node in b.nodes for a in node.attribute)
    old = b.chance(0.2) and not nodes.refused and not own  # then initializers are inputs, too, but no call brings them
    if old:
        inputs |= {t.name: value(t.name, t.data_type, t.dims) for t in b.tensors}
    made += [f"refused: {name}" for name in nodes.refused.values()]
    graph = helper.make_graph(b.nodes, "g", [*inputs.values()], [*map(value, dict.fromkeys(shown))], b.tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", b.one_of(*OPSETS))],
                              ir_version=3 if old else 10)
    plain = type(model)()
    plain.CopyFrom(model)
    _without_layout(plain.graph)
    return Sample(model, plain, nodes.refused, made)


def _branch(b: Builder, nodes: Recurrent, x: str, width: int, kind: dict[str, Any]) -> list[str]:
    inner = Builder(b.rng, b.made, b.counter)
    outputs, _, _ = nodes.add(x, width, kind, x, b=inner)
    other = Builder(b.rng, b.made, b.counter)
    other.node("Identity", x)
    graphs = [helper.make_graph(g.nodes, "body", [], [value(name)], g.tensors)
              for g, name in ((inner, outputs[0]), (other, other.nodes[-1].output[0]))]
    on = nodes.given("on", [], TensorProto.BOOL)
    first, second = graphs if b.chance(0.7) else graphs[::-1]
    return [b.node("If", on, then_branch=first, else_branch=second)]


def _loop(b: Builder, nodes: Recurrent, x: str, width: int, kind: dict[str, Any]) -> list[str]:
    kind["attributes"].pop("layout", None)
    inner = Builder(b.rng, b.made, b.counter)
    op, attributes = kind["op"], kind["attributes"]
    both, hidden = 1 + (attributes.get("direction") == "bidirectional"), attributes["hidden_size"]
    turn, go, *states = (inner.new(name) for name in ("turn", "go", *("h", "c")[:1 + (op == "LSTM")]))
    outputs, _, _ = nodes.add(x, width, kind, x, tuple(states), b=inner)
    still = inner.node("Identity", go)
    infos = [value(turn, TensorProto.INT64, []), value(go, TensorProto.BOOL, []), *map(value, states)]
    results = [value(still, TensorProto.BOOL, []), *map(value, (*outputs[1:], outputs[0]))]
    body = helper.make_graph(inner.nodes, "body", infos, results, inner.tensors)
    first = [b.zeros([both, b.size(x, 1), hidden], 0.1) for _ in states]
    yes, turns = b.initializer(np.array(True)), b.initializer(np.array(3))
    return list(b.node("Loop", turns, yes, *first, count=len(states) + 1, body=body))


def _unrolled(b: Builder, nodes: Recurrent, x: str, width: int, kind: dict[str, Any]) -> list[str]:
    kind["attributes"].pop("layout", None)
    state: tuple[str, ...] = ()
    outputs: list[str] = []
    count = int(np.exp(b.rng.uniform(0, np.log(60))))
    b.made.append(f"{count} unrolled")
    chance, b.chance = b.chance, lambda of: False  # no weights but the first
    for _ in range(count):
        outputs, _, _ = nodes.add(x, width, kind, x, state)
        state = tuple(outputs[1:])
    b.chance = chance  # type: ignore[method-assign]
    return outputs


def _refused(b: Builder, nodes: Recurrent, x: str, width: int, shown: list[str]) -> None:
    kind = b.one_of("none", "none", "none", "directions", "computed", "brought")
    if kind == "none":
        return
    attributes: dict[str, Any] = {"hidden_size": 4}
    w, r = (b.rng.uniform(-0.5, 0.5, (2, 4, size)).astype(np.float32) for size in (width, 4))
    if kind == "directions":
        attributes |= {"direction": "bidirectional", "activations": ["Tanh", "Relu"]}
        names = b.constant(w), b.constant(r)
    elif kind == "computed":
        names = b.node("Mul", b.initializer(w[:1]), b.node("ReduceMax", x, keepdims=0)), b.constant(r[:1])
    else:
        names = b.constant(w[:1]), b.initializer(r[:1])
        nodes.given(names[1], [1, 4, 4])
    outputs = [b.new("Y")]
    b.nodes.append(helper.make_node("RNN", [x, *names], outputs, name=b.new("refused"), **attributes))
    shown += outputs
    nodes.refused[b.nodes[-1].name] = "both directions" if kind == "directions" else "must be a constant"


def _without_layout(graph: Any) -> None:
    """Nodes of ONNX's layout 1 as those of layout 0 with transpositions."""
    made = []
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _without_layout(attribute.g)
        layout = [a for a in node.attribute if a.name == "layout"]
        if not layout:
            made.append(node)
            continue
        node.attribute.remove(layout[0])
        for place in (0, 5, 6):
            if place < len(node.input) and node.input[place]:
                turned = f"{node.name}_in{place}"
                made.append(helper.make_node("Transpose", [node.input[place]], [turned], perm=[1, 0, 2]))
                node.input[place] = turned
        after = []
        for place, name in enumerate(node.output):
            node.output[place] = f"{node.name}_out{place}"
            after.append(helper.make_node("Transpose", [node.output[place]], [name],
                                          perm=[1, 0, 2] if place else [2, 0, 1, 3]))
        made += [node, *after]
    made = [onnx.NodeProto.FromString(node.SerializeToString()) for node in made]
    del graph.node[:]
    graph.node.extend(made)


MANY = seeds(range(1000, 1300))
LEAST = 0.1  # states of some turns may be small, and what is added up to them is not


@pytest.fixture(scope="module", autouse=True)
def _compiled_once():
    known = {}
    def compiled(layer, target):
        if (key := f"{layer.workload} {layer.stack}") not in known:
            known[key] = compile_layer(layer, target=target)
        return known[key]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rewriting, "compile_layer", compiled)
        yield


def check(seed: int, folder: Path) -> int:
    """Nodes that are compiled, and compute the same; those that cannot be stay with a reason."""
    sample, out = random_model(seed), folder / "fast.onnx"
    try:
        made = ecornn.onnxruntime.rewrite(sample.model, out, batch=4, seq=7, target="cpu", measure=False)
    except ArgumentError as error:
        assert sample.refused and "can be compiled" in str(error), sample.made
        return 0
    assert {one.node for one in made.left} == {*sample.refused}, (made.left, sample.made)
    for one in made.left:
        assert sample.refused[one.node] in one.reason
    before, held = session(sample.plain), {t.name for t in sample.model.graph.initializer}  # of which it has values
    after = session(out, ecornn.onnxruntime.session_options(out, threads=1))
    for number, (steps, rows) in enumerate(((7, 3), (1, 1))):
        feeds = feeds_of(sample.model, number, rows, steps)
        alike(after, before, {name: value for name, value in feeds.items() if name not in held}, least=LEAST)
    return len(made.taken)


@pytest.mark.parametrize("seed", range(6))
def test_some(seed: int, tmp_path: Path):
    check(seed, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_many(tmp_path: Path):
    """All are looked at before those that are wrong are named."""
    wrong, compiled = {}, 0
    for seed in MANY:
        try:
            compiled += check(seed, tmp_path)
        except Exception as error:
            wrong[seed] = f"{type(error).__name__}: {str(error)[:300]}"
    print(f"{len(MANY)} models, {compiled} nodes compiled, {len(wrong)} wrong")
    assert not wrong, "\n".join(f"{seed}: {what}" for seed, what in wrong.items())


if __name__ == "__main__":
    sample = random_model(int(sys.argv[1]))
    print("\n".join(sample.made), len(sample.model.graph.node), "nodes", sample.refused)

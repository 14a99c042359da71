"""The arguments of ``ecornn compile`` and ``ecornn explain``, and the plan that comes of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ecornn.cli.common import PROPERTIES, default_dtype, every, layer_options, stack_options
from ecornn.errors import ArgumentError
from ecornn.workload import OVERLAPS

if TYPE_CHECKING:
    from ecornn.compiler import LayerPlan
    from ecornn.layer_spec import LayerSpec

WISHES = ("auto", "none", *OVERLAPS)


@dataclass(frozen=True)
class AskedLayer:
    """A layer, its target, and the weights that come with a model or a file of weights, by name."""

    spec: LayerSpec
    target: str
    weights: dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """The arguments, by their options' names; ``properties`` are a layer's."""

    model: Path | None
    node: str | None
    target: str | None
    weights_from: Path | None
    prefix: str
    schedule: str | None
    config: tuple[str, ...]
    overlap: str
    properties: dict[str, Any]

    def layer(self) -> AskedLayer:
        """The layer. Raises :class:`ArgumentError` where arguments do not go together, and the errors of LayerSpec."""
        from ecornn.layer_spec import LayerSpec

        given = {name: value for name, value in self.properties.items() if value not in (None, False)}
        stated, bound = layer_of(self.model, self.node, self.weights_from, self.prefix)
        for name, value in stated.items():
            if given.get(name, value) != value:
                raise ArgumentError(f"--{name}", given[name], f"{value}, as {self.model or self.weights_from} says")
        layer = given | stated
        for name in ("cell", "hidden"):
            if name not in layer:
                raise ArgumentError(f"--{name}", None, "a value" + (", or MODEL.onnx" if name == "cell" else
                                                                   ", or --weights-from FILE, or MODEL.onnx"))
        dtype = "float32" if self.model is not None else None
        layer["dtype"], target = default_dtype(layer.get("dtype", dtype), layer.get("precision"), self.target)
        return AskedLayer(LayerSpec(**layer), target, bound)

    def plan(self, layer: AskedLayer) -> LayerPlan:
        """The plan of a layer. Raises what :func:`ecornn.compile` raises."""
        from ecornn.compiler import plan_layer

        planned = plan_layer(layer.spec, target=layer.target, schedule=self.schedule,
                             config=dict(knob(c) for c in self.config), overlap=self.overlap)
        if self.weights_from is not None:
            from ecornn.weight_files import check_shapes

            hidden = planned.workload.hidden
            parameters = planned.cell.parameters(planned.cell.own_input(planned.workload.input, hidden), hidden)
            check_shapes(layer.weights, {planned.cell.parameter_name(name): (shape[0] * shape[1], *shape[2:])
                                         for name, shape in parameters.items()})
        return planned


def plan_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of :class:`Asked`, which the function gets as its first argument."""

    @functools.wraps(function)
    def wrapper(**given: Any) -> Any:
        layer = {name: given.pop(name) for name in list(given) if name in PROPERTIES}
        own = {field.name: given.pop(field.name) for field in fields(Asked) if field.name in given}
        return function(Asked(**own, properties=layer), **given)

    return every([
        click.argument("model", required=False, metavar="[MODEL.onnx]",
                       type=click.Path(dir_okay=False, path_type=Path)),
        click.option("--node", metavar="NAME", help="With MODEL.onnx: the LSTM, GRU or RNN node, if it has several. "
                     "It is compiled in float32 unless --dtype says otherwise."),
        layer_options(required=False),
        click.option("--weights-from", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
                     help="A safetensors file or PyTorch checkpoint: sizes, layers and directions are taken from it."),
        click.option("--prefix", default="",
                     help="With --weights-from: what stands before the layer's names, as encoder.rnn."),
        stack_options(),
        click.option("--schedule", help="This schedule instead of the best record's."),
        click.option("--config", multiple=True, metavar="KNOB=VALUE",
                     help="With --schedule: change this knob of its default; may be repeated."),
        click.option("--overlap", type=click.Choice(WISHES), default="auto", show_default=True,
                     help="What of a stack runs at the same time on a GPU, each sequence on its share of it. "
                     "directions: the two of a layer side by side. wavefront: several layers, each a chunk of time "
                     "behind the one before it. auto: what is expected to be fastest, as it tells you."),
    ])(wrapper)


def layer_of(model: Path | None, node: str | None, weights: Path | None,
             prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The properties of a layer that a model or a file of weights has, and its weights. Raises :class:`ArgumentError`
    for options that do not go together."""
    if model is not None and weights is not None:
        raise ArgumentError("--weights-from", str(weights), "none with MODEL.onnx, which has its own")
    if prefix and weights is None:
        raise ArgumentError("--prefix", prefix, "none without --weights-from")
    if model is not None:
        from ecornn.onnx import read

        layer = read(model, node)
        own = [name for name, value in layer.inputs.items() if value is not None]
        if own:
            click.echo(f"the files do not hold the node's constant {', '.join(own)}: give them at each call", err=True)
        return {"cell": layer.cell.identity(), "hidden": layer.hidden, "input": layer.input, "layers": 1,
                "bidirectional": layer.direction == "bidirectional", "reverse": layer.direction == "reverse",
                "lengths": True}, layer.weights
    if node is not None:
        raise ArgumentError("--node", node, "none without MODEL.onnx")
    if weights is None:
        return {}, {}
    from ecornn.weight_files import WeightFile, sizes_of

    values = WeightFile(weights, prefix).layer()
    return sizes_of(values), values


def knob(text: str) -> tuple[str, int | str | bool]:
    """The name and value of ``NAME=VALUE``: an integer, true or false, or a word. Raises :class:`ArgumentError` for
    another text."""
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise ArgumentError("--config", text, "KNOB=VALUE")
    if value.lower() in ("true", "false"):
        return name, value.lower() == "true"
    return name, int(value) if value.removeprefix("-").isdecimal() else value

"""Weights in files, safetensors or PyTorch checkpoints, and the sizes that their shapes tell."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ecornn import temporary
from ecornn.errors import ArgumentError, ShapeError, WeightsError

_NAME = re.compile(r"(.+)_l(\d+)(_reverse)?")
CHECKPOINTS = (".pt", ".pth", ".bin", ".ckpt")
PLACES = ("state_dict", "model_state_dict", "model", "module", "net", "network", "weights", "params")  # of a checkpoint
LAST = "weight_hh_l0"  # that every layer has
MARK = {"written_by": "ecornn"}  # metadata of the files that may be replaced


def read_layer(path: str | os.PathLike[str], prefix: str = "") -> dict[str, Any]:
    """The tensors of a file named ``prefix`` and a recurrent layer's name, ``..._l0`` and so on, by the latter: NumPy
    arrays, or torch tensors of a checkpoint or a type that NumPy lacks. ``path`` ends in ``.safetensors`` or one of
    :data:`CHECKPOINTS`, read as data only. A checkpoint's model is under one of :data:`PLACES`, or the only key with
    tensors; names under others begin with these, as ``ema.encoder.weight_hh_l0``. Raises :class:`ArgumentError` for a
    file that cannot be read, :class:`WeightsError` where no name begins with ``prefix``."""
    file = Path(path)
    if not file.is_file():
        raise ArgumentError("weights", str(path), "an existing file")
    kind = file.suffix.lower()
    if kind != ".safetensors" and kind not in CHECKPOINTS:
        raise ArgumentError("weights", str(path), f"a file with a name *.safetensors or *{', *'.join(CHECKPOINTS)}")
    every = _safetensors(file) if kind == ".safetensors" else _checkpoint(file)
    found = {n.removeprefix(prefix): read for n, read in every.items() if n.startswith(prefix)}
    if not found:
        layers = [n.removesuffix(LAST) for n in every if n.endswith(LAST)]
        known = f"; layers have the prefixes {_some(map(repr, layers))}" if layers else ""
        raise WeightsError(f"{path} has no tensor whose name starts with {prefix!r}; it has {_some(every)}{known}",
                           list(every))
    return {n: read() for n, read in found.items() if _NAME.fullmatch(n) and "." not in n}


def _safetensors(path: Path) -> dict[str, Callable[[], Any]]:
    package = _package(path)
    try:
        file = package.safe_open(path, framework="numpy")
        return {name: partial(_tensor, path, file, name) for name in file.keys()}  # noqa: SIM118
    except (package.SafetensorError, OSError) as error:
        raise ArgumentError("weights", str(path), f"a safetensors file ({error})") from error


def _package(path: Path) -> Any:
    try:
        import safetensors
    except ImportError as error:
        raise ArgumentError("weights", str(path), "the package safetensors, which is not installed: pip install "
                            "safetensors"
                            ) from error
    return safetensors


def _tensor(path: Path, file: Any, name: str) -> Any:
    try:
        return file.get_tensor(name)
    except TypeError:  # bfloat16
        from safetensors import safe_open

        with safe_open(path, framework="pt") as again:
            return again.get_tensor(name)


def _checkpoint(path: Path) -> dict[str, Callable[[], Any]]:
    try:
        import torch
    except ImportError as error:
        raise ArgumentError("weights", str(path), "a *.safetensors file, or PyTorch, which reads checkpoints and is "
                            "not installed"
                            ) from error
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of damaged bytes an unpickler raises whatever they lead to
        raise ArgumentError("weights", str(path), f"a PyTorch checkpoint of tensors only ({error!r})") from error
    if not isinstance(content, Mapping):
        raise ArgumentError("weights", str(path), "a checkpoint with a state_dict; it holds a "
                            f"{type(content).__name__}")
    every, place = _tensors(content, torch.Tensor), _place(path, content, torch.Tensor)
    if not every:
        raise ArgumentError("weights", str(path), f"a checkpoint with tensors; its keys are {_some(map(str, content))}")
    inside = {name.removeprefix(place): value for name, value in every.items() if name.startswith(place)}
    return {name: value for name, value in every.items() if not name.startswith(place)} | inside


def _tensors(found: Mapping[Any, Any], tensor: type[Any]) -> dict[str, Callable[[], Any]]:
    """The tensors of nested mappings, by keys with dots between; of a mapping in several places, at the first."""
    every: dict[str, Callable[[], Any]] = {}
    seen, left = set[int](), [("", found)]
    while left:
        name, mapping = left.pop()
        if id(mapping) not in seen:
            seen.add(id(mapping))
            items = [(f"{name}{key}", value) for key, value in mapping.items()]
            every |= {path: value.detach for path, value in items if isinstance(value, tensor)}
            left += [(f"{path}.", value) for path, value in reversed(items) if isinstance(value, Mapping)]
    return every


def _place(path: Path, found: Mapping[Any, Any], tensor: type[Any]) -> str:
    """The prefix of the model's tensors: a key that training programs use, or the only one that has tensors."""
    place, seen = "", set[int]()
    while True:
        if id(found) in seen:
            raise ArgumentError("weights", str(path), "a checkpoint that does not contain itself")
        seen.add(id(found))
        below = {key: value for key, value in found.items() if isinstance(value, Mapping)}
        known = [key for key in PLACES if key in below]
        if any(isinstance(value, tensor) for value in found.values()):  # the model's own, or beside its state_dict
            known = known[:1] if known[:1] == ["state_dict"] else []
        elif not known:
            known = [key for key, value in below.items() if any(isinstance(v, tensor) for v in value.values())]
            known = known if len(known) == 1 else []
        if not known:
            return place
        place, found = f"{place}{known[0]}.", below[known[0]]


def _some(names: Iterable[str]) -> str:
    first = [*names]
    return ", ".join(first[:8]) + (", ..." if len(first) > 8 else "") or "none"


def sizes_of(weights: Mapping[str, Any]) -> dict[str, Any]:
    """``hidden``, ``input``, ``layers`` and ``bidirectional`` of a layer's weights by PyTorch's names. Raises
    :class:`WeightsError` where ``weight_ih_l0`` or ``weight_hh_l0`` is missing."""
    for name in ("weight_ih_l0", "weight_hh_l0"):
        if name not in weights:
            raise WeightsError(f"the weights have no {name}; they have {', '.join(weights) or 'no names'}. Give the "
                               "text before the names of the layer with --prefix", [name])
    ends = [end for end in map(_NAME.fullmatch, weights) if end]
    hidden = weights["weight_hh_l0"].shape
    return {"hidden": int(hidden[-1]), "input": int(weights["weight_ih_l0"].shape[-1]),
            "layers": 1 + max(int(end[2]) for end in ends), "bidirectional": any(end[3] for end in ends)}


def check_shapes(weights: Mapping[str, Any], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raises :class:`WeightsError` for a name of ``wanted`` that is missing, :class:`ShapeError` for another shape."""
    for name, shape in wanted.items():
        if name not in weights:
            raise WeightsError(f"the weights have no {name}, which the cell needs", [name])
        if tuple(weights[name].shape) != shape:
            raise ShapeError(f"weights[{name!r}].shape", tuple(weights[name].shape), f"{shape}, as in the cell")


def check_place(path: Path) -> None:
    """Checks first that :func:`save` can write; :class:`ArgumentError` for another's file, or without safetensors."""
    package = _package(path)
    said: Mapping[str, str] = {}
    if path.is_file():
        with contextlib.suppress(package.SafetensorError, OSError), package.safe_open(path, framework="numpy") as file:
            said = file.metadata() or {}
    if path.exists() and not MARK.items() <= said.items():
        raise ArgumentError("weights", str(path), "a new name, or that of a file that ecornn wrote: move this file "
                            "away, or choose another --output")


def save(path: Path, weights: Mapping[str, Any]) -> None:
    """Writes NumPy arrays as a safetensors file, complete or not at all; an older file there is replaced."""
    from safetensors.numpy import save_file

    with temporary.replacing(path) as beside:
        beside.touch()
        readers = beside.stat().st_mode  # safetensors would let nobody else read it
        save_file(dict(weights), beside, MARK)
        beside.chmod(readers)

"""Weights from safetensors files and PyTorch checkpoints, and the command line that takes them."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import safetensors.numpy
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from test_onnx import model_of

import ecornn
from ecornn.cli import compile as command
from ecornn.errors import ArgumentError, WeightsError
from ecornn.numpy_reference import random_weights, reference
from ecornn.weight_files import read_layer, save, sizes_of

I, H = 5, 12


def said(*words: str | Path | int, code: int = 0) -> str:
    done = CliRunner().invoke(command, [*map(str, words)])
    assert done.exit_code == code, done.output
    return done.output


def refused(message: str, *words: str | Path | int) -> None:
    assert message in said(*words, code=2)


def agrees(layer: ecornn.Layer, cell: str, weights: dict[str, np.ndarray]) -> None:
    x = np.random.default_rng(0).standard_normal((4, 3, I)).astype(np.float32)
    wanted, _ = reference(cell, x, weights)
    assert np.linalg.norm(layer(x)[0] - wanted) <= 1e-6 * np.linalg.norm(wanted)


def test_other_users_can_read_a_file_of_weights(tmp_path: Path):
    path, plain = tmp_path / "w.safetensors", tmp_path / "plain"
    save(path, random_weights("gru", 2, 2))
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode


def test_a_layer_of_a_safetensors_file(tmp_path: Path):
    weights, file, out = random_weights("gru", I, H, 1, 2, 2), tmp_path / "model.safetensors", tmp_path / "gru.so"
    save(file, {f"encoder.{n}": w for n, w in weights.items()} | {"encoder.more.weight_ih_l0": np.zeros((2, 2)),
                                                                 "head.weight": np.zeros((2, 2), np.float32)})
    text = said("--cell", "gru", "--weights-from", file, "--prefix", "encoder.", "--batch", 3, "--target", "cpu",
               "-o", out)
    assert "2 layers, bidirectional" in text and "prefix='encoder.'" in text
    agrees(ecornn.load(out).bind(file, prefix="encoder."), "gru", weights)
    with pytest.raises(WeightsError, match=r"missing weight_ih_l0.*expected"):
        ecornn.load(out).bind(file)
    with pytest.raises(WeightsError, match=r"starts with 'decoder\.'; it has"):
        ecornn.load(out).bind(file, prefix="decoder.")


def test_a_layer_of_a_checkpoint(tmp_path: Path):
    layer, file, out = torch.nn.LSTM(I, H), tmp_path / "model.pt", tmp_path / "lstm.so"
    torch.save({"state_dict": {f"rnn.{n}": w for n, w in layer.state_dict().items()}, "epoch": 3}, file)
    said("--cell", "lstm", "--weights-from", file, "--prefix", "rnn.", "--batch", 3, "--target", "cpu", "-o", out)
    agrees(ecornn.load(out).bind(file, prefix="rnn."), "lstm", {n: w.numpy() for n, w in layer.state_dict().items()})
    torch.save({"weight_ih_l0": Path}, file)  # code, not data
    with pytest.raises(ArgumentError, match="of tensors only"):
        read_layer(file)


def test_bfloat16_of_a_safetensors_file(tmp_path: Path):
    file = tmp_path / "half.safetensors"
    save_file({n: torch.from_numpy(w).bfloat16() for n, w in random_weights("rnn_tanh", I, H).items()}, file)
    found = read_layer(file)
    assert str(found["weight_hh_l0"].dtype).endswith("bfloat16")  # of ml_dtypes where it is installed, else of torch
    assert sizes_of(found) == {"hidden": H, "input": I, "layers": 1, "bidirectional": False}


@pytest.mark.parametrize(("words", "message"), [
    (("--weights-from", "missing.safetensors"), "an existing file"), ((), "--hidden"), (("--hidden", "7"), ""),
    (("--prefix", "a."), "expected --weights-from beside it"), (("--node", "a"), "expected MODEL.onnx beside it")])
def test_what_does_not_fit_is_named(words: tuple[str, ...], message: str, tmp_path: Path):
    assert message in said("--cell", "gru", "--target", "cpu", "-o", tmp_path / "a.so", *words,
                           code=2 if message else 0)


def test_sizes_must_agree_with_the_file(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    save(file, random_weights("gru", I, H))
    refused(f"--hidden=7: expected {H}", "--cell", "gru", "--weights-from", file, "--hidden", 7,
            "-o", "a.so")
    other = tmp_path / "model.txt"
    other.write_text("")
    with pytest.raises(ArgumentError, match=r"\*\.safetensors or \*\.pt"):
        read_layer(other)
    file.write_bytes(b"\0" * 20)
    with pytest.raises(ArgumentError, match="a safetensors file"):
        read_layer(file)


@pytest.mark.parametrize("package", ["onnx", "safetensors"])
def test_a_package_that_is_missing_is_named_before_anything_is_built(package, tmp_path, monkeypatch):
    model = tmp_path / "model.onnx"
    model.write_bytes(b"no model")
    monkeypatch.setitem(sys.modules, package, None)
    refused(f"pip install {package}", model, "-o", tmp_path / "model.so")
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]


def test_weights_of_another_cell_are_refused(tmp_path: Path):
    file, out = tmp_path / "gru.safetensors", tmp_path / "lstm.so"
    save(file, random_weights("gru", I, H))
    refused(f"weights['weight_ih_l0'].shape=({3 * H}, {I}): expected ({4 * H}, {I})", "--cell", "lstm",
            "--weights-from", file, "--target", "cpu", "-o", out)
    refused("the weights have no weight_ln_ih_l0", "--cell", "gru(layer_norm)", "--weights-from", file, "--target",
            "cpu", "-o", out)
    assert not out.exists()


def test_weights_of_a_model_have_no_prefix_and_replace_no_file_that_ecornn_did_not_write(tmp_path: Path):
    model, file = tmp_path / "model.onnx", tmp_path / "model.safetensors"
    model.write_bytes(b"no model")
    refused("--prefix='encoder.': expected --weights-from beside it", model, "--prefix", "encoder.",
            "-o", tmp_path / "a.so")
    safetensors.numpy.save_file(random_weights("gru", I, H), file)
    for other in (file.read_bytes(), b"something else"):
        file.write_bytes(other)
        refused(f"weights='{file}': expected a new name", model, "-o", tmp_path / "model.so")
        assert file.read_bytes() == other and not (tmp_path / "model.so").exists()
    save(file, random_weights("gru", I, H))  # this one may be replaced: what is wrong now is the model, or no onnx here
    text = said(model, "-o", tmp_path / "model.so", code=2)
    assert str(model) in text and str(file) not in text


def test_a_module_takes_no_other_files_name(tmp_path: Path):
    file, checkpoint, model = tmp_path / "w.safetensors", tmp_path / "w.pt", tmp_path / "w.onnx"
    for path in (checkpoint, model):
        path.write_bytes(b"kept")
    refused("--output", "--cell", "gru", "--hidden", 8, "-o", file)
    refused("--output", "--cell", "gru", "--weights-from", checkpoint, "-o", tmp_path / "." / "w.pt")
    refused("--output", model, "-o", model)
    emit = ("--target", "cpu", "--emit", "tir", "--emit-to")
    refused("--emit-to", "--cell", "gru", "--weights-from", checkpoint, *emit, tmp_path / "." / "w.pt")
    for taken in (model, tmp_path / "a.so", tmp_path / "a.safetensors"):
        refused("--emit-to", model, "-o", tmp_path / "a.so", *emit, taken)
    (link := tmp_path / "link").symlink_to(model)
    refused("--emit-to", model, *emit, link)
    assert {p.name for p in tmp_path.iterdir()} == {"w.pt", "w.onnx", "link"}
    assert checkpoint.read_bytes() == model.read_bytes() == b"kept"


def test_a_module_takes_the_place_of_a_file_only(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    refused("not a regular file", "--cell", "rnn_tanh", "--hidden", 8, "--target", "cpu", "-o", pipe)
    assert pipe.is_fifo() and [p.name for p in tmp_path.iterdir()] == ["pipe"]


def test_a_node_of_an_onnx_model(tmp_path: Path):
    model, tensors = model_of("GRU", 3, 1, linear_before_reset=1, direction="reverse",
                              constants={"h0": np.ones((1, 2, 6), np.float32)})
    onnx.save(model, tmp_path / "model.onnx")
    out = tmp_path / "node.so"
    text = said(tmp_path / "model.onnx", "--node", "recurrent", "--batch", 2, "--target", "cpu", "-o", out)
    assert "node.safetensors" in text and "reverse, lengths" in text
    assert "does not contain the node's constant initial_h; pass" in text
    layer = ecornn.load(out).bind(out.with_suffix(".safetensors"))
    x = np.random.default_rng(0).standard_normal((4, 2, 5)).astype(np.float32)
    weights = {name: np.concatenate([np.split(value, 3)[k] for k in (1, 0, 2)])  # r, z, n among ONNX's z, r, n
               for name, value in zip(("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"),
                                      (tensors["W"][0], tensors["R"][0], *np.split(tensors["B"][0], 2)), strict=True)}
    wanted, _ = reference("gru", x[::-1], weights)
    assert np.linalg.norm(layer(x)[0] - wanted[::-1]) <= 1e-6 * np.linalg.norm(wanted)


def test_a_checkpoint_that_holds_itself(tmp_path: Path):
    """It was searched without end."""
    found: dict[str, Any] = {"epoch": 3}
    found["state_dict"] = {"state_dict": found}
    torch.save(found, tmp_path / "circle.pt")
    with pytest.raises(ArgumentError, match="a checkpoint that does not contain itself"):
        read_layer(tmp_path / "circle.pt")


def test_damage_is_named(tmp_path: Path):
    weights = {name: torch.from_numpy(w) for name, w in random_weights("gru", I, H).items()}
    torch.save(weights, tmp_path / "a.pt")
    save_file(weights, tmp_path / "a.safetensors")
    draw, refused = np.random.default_rng(0), 0
    for file in (tmp_path / "a.pt", tmp_path / "a.safetensors"):
        whole = file.read_bytes()
        for number in range(150):
            data = bytearray(whole)
            for at in draw.integers(0, 900, 1 + number % 4):
                data[at] = draw.integers(0, 256)
            file.write_bytes(data if number % 5 else whole[:draw.integers(0, len(whole))])
            try:
                read_layer(file)
            except (ArgumentError, WeightsError):
                refused += 1
    assert refused > 150


LAYER = {"weight_ih_l0": (4 * H, I), "weight_hh_l0": (4 * H, H), "bias_ih_l0": (4 * H,), "bias_hh_l0": (4 * H,)}


def tensors(value: float) -> dict[str, Any]:
    layer = {f"rnn.{name}": torch.full(shape, value) for name, shape in LAYER.items()}
    return layer | {"head.weight": torch.full((2, H), value)}


def optimizer() -> dict[str, Any]:
    return {"state": {n: {"exp_avg": value} for n, value in enumerate(tensors(9).values())}, "param_groups": []}


@pytest.mark.parametrize(("made", "prefix"), [
    (lambda m: m, "rnn."),
    (lambda m: {"model_state_dict": m, "optimizer_state_dict": optimizer(), "epoch": 3, "loss": tensors(9)}, "rnn."),
    (lambda m: {"model": m, "optimizer": optimizer(), "args": {"lr": 1.0}}, "rnn."),
    (lambda m: {"module": m, "ema": tensors(9), "step": 1}, "rnn."),
    (lambda m: {"net": {"state_dict": m}, "acc": 1}, "rnn."), (lambda m: {"weights": m}, "rnn."),
    (lambda m: {"state_dict": m, "mean": tensors(9)["head.weight"]}, "rnn."),
    (lambda m: {"generator": m, "optimizer": optimizer()}, "rnn."),
    (lambda m: {"params": {f"module.{n}": w for n, w in m.items()}}, "module.rnn."),
    (lambda m: {"model": tensors(9), "ema": m}, "ema.rnn."),
    (lambda m: {"generator": m, "discriminator": tensors(9)}, "generator.rnn."),
    (lambda m: {"encoder": {n.removeprefix("rnn."): w for n, w in m.items()}, "decoder": tensors(9)}, "encoder."),
    (lambda m: {"a": {"b": {"c": m}, "d": m}, "e": {"f": tensors(9)}}, "a.b.c.rnn."),
], ids=["plain", "model_state_dict", "model", "module", "net", "weights", "beside", "one", "parallel", "ema", "gan",
        "two", "twice"])
def test_a_checkpoint_of_a_training_program(made: Any, prefix: str, tmp_path: Path):
    torch.save(made(tensors(3)), tmp_path / "model.pt")
    found = read_layer(tmp_path / "model.pt", prefix)
    assert {name: tuple(value.shape) for name, value in found.items()} == LAYER
    assert all(float(value.flatten()[0]) == 3 for value in found.values())
    with pytest.raises(WeightsError, match=f"it has .*; layers have the prefixes .*'{prefix}'"):
        read_layer(tmp_path / "model.pt", "nothing.")


def test_what_a_checkpoint_has_is_named(tmp_path: Path):
    torch.save({"epoch": 3, "model": {"config": {"hidden": 4}}}, tmp_path / "model.pt")
    with pytest.raises(ArgumentError, match=r"a checkpoint with tensors; its keys are epoch, model$"):
        read_layer(tmp_path / "model.pt")
    for found, said in ({}, "its keys are none"), ([], "it holds a list"):
        torch.save(found, tmp_path / "model.pt")
        with pytest.raises(ArgumentError, match=said):
            read_layer(tmp_path / "model.pt")
    save(tmp_path / "none.safetensors", {})
    with pytest.raises(WeightsError, match=r"starts with 'a\.'; it has none$"):
        read_layer(tmp_path / "none.safetensors", "a.")
    nested: Any = {"weight_hh_l0": torch.ones(1)}
    for _ in range(40):  # 2 to the power of 40 paths
        nested = {"a": nested, "b": nested}
    torch.save(nested, tmp_path / "model.pt")
    assert read_layer(tmp_path / "model.pt", "a." * 40)["weight_hh_l0"].shape == (1,)

"""The examples of training, small: what they print, that they notice what is wrong, and what they share."""

import asyncio
import copy
import importlib
import json
import re
import subprocess
import sys
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import compare_models
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from compare_models import CompiledStep
from python_text import docstrings, in_columns, numbered, reference, words
from rooms import ROOT
from serving_load import Load
from torch import nn
from tornado.web import HTTPError
from training_steps import Step, memory_by_layer, middle, take_turns

import ecornn
import ecornn.torch

NAMES = ("05_language_model", "06_speech", "07_attention", "08_hundred_layers")
language, speech, attention, deep, serving = map(importlib.import_module, (*NAMES, "12_serving"))
LANGUAGE = ("--text", "reference", "--hidden", 24, "--steps", 8, "--batch", 16, "--vocabulary", 60, "--updates", 120,
             "--seeds", 2, "--rate", 1e-2, "--dropout", 0.1, "--seconds", 0)
BATCH, WIDTH = 3, 8

pytestmark = pytest.mark.usefixtures("one_thread")


def run(example: Any, *arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(example.main, [*map(str, arguments)])
    assert result.exit_code == code and (code or not result.exception), result.output
    assert "--help" in arguments or re.search(r"training.*: [\d.]+ s$", result.output, re.MULTILINE)
    return result.output


def wrong_replace(model: torch.nn.Module, **options: Any) -> ecornn.torch.Report:
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "weight_hh" in name:
                weight.mul_(1.5).add_(0.3)
    return ecornn.torch.Report((), {})


@pytest.mark.slow
def test_a_language_model():
    text = run(language, *LANGUAGE)
    rows = re.findall(r"^ *(\d+) +([\d.]+) to ([\d.]+) +([\d.]+) to ([\d.]+) +([\d.]+)$", text, re.MULTILINE)
    assert re.search(r"deviate by [\d.]+, so the means may differ by [\d.]+", text)
    assert [int(row[0]) for row in rows] == [*range(12, 121, 12)]
    assert all(float(low) <= float(high) and float(apart) < 1e-3 for _, low, high, _, _, apart in rows)
    assert float(rows[-1][2]) < float(rows[0][1])
    assert re.search(r"plain: torch.nn \d+ words a second .*, ecornn \d+ words a second .*, [\d.]+ times as fast", text)


def test_another_curve_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ecornn.torch, "replace", wrong_replace)
    assert "curve differs from torch.nn's" in run(language, *LANGUAGE, code=1)


@pytest.mark.slow
def test_speech():
    sizes = "--hidden", 24, "--layers", 2, "--frames", 24, "--batch", 4, "--seconds", 0
    text = run(speech, *sizes, "--updates", 2, "--limit", 9.0)
    assert "recurrent: compiled" in text and re.search(r"ecornn [\d.]+ steps a second", text)
    text = run(speech, *sizes, "--updates", 1, code=1)
    assert re.search(r"^[\d.]+% of the letters are wrong, limit 5.0%", text, re.MULTILINE)


@pytest.mark.parametrize(("found", "wanted", "letters"), [
    ("", "", 0), ("", "abc", 3), ("abc", "", 3), ("kitten", "sitting", 3), ("ab", "ba", 2), ("abc", "axbc", 1)])
def test_the_distance_of_texts(found: str, wanted: str, letters: int):
    assert speech.distance(found, wanted) == letters


def test_letters_are_read_without_repetitions_and_blanks():
    numbers = [[0, 2, 2, 0, 2, 3, 1, 1, 4], [5] * 9]
    scores = torch.nn.functional.one_hot(torch.tensor(numbers).T, len(speech.LETTERS)).float()
    assert speech.read(scores) == ["aab c", "d"]


def test_sound_has_the_tones_of_its_letters():
    def spectrum(letter: str, seed: int) -> np.ndarray:
        sound = speech.spoken(5 * letter, speech.RATE // 2, np.random.default_rng(seed))
        assert sound.shape == (speech.RATE // 2,)
        return np.abs(np.fft.rfft(sound))[:2000].reshape(-1, 40).sum(1)

    def alike(a: np.ndarray, b: np.ndarray) -> float:
        return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
    assert alike(spectrum("a", 0), spectrum("a", 1)) > 0.8 > 0.7 > alike(spectrum("a", 0), spectrum("p", 1))
    frames, batch = 24, 3
    spectra, letters, lengths = speech.batch_of(["a", "bcd"], frames, batch, np.random.default_rng(0))
    assert spectra.shape == (frames, batch, speech.BANDS) and len(letters) == batch
    assert all((row[:n] > 0).all() and not row[n:].any() for row, n in zip(letters, lengths, strict=True))


@pytest.mark.slow
def test_attention():
    sizes = "--hidden", 16, "--batch", 8, "--seconds", 0
    text = run(attention, *sizes, "--updates", 5, "--limit", 0.0)
    kept = {name: [float(size) for size in sizes] for name, *sizes in
            re.findall(r"^([a-z]+) +([\d.]+) +([\d.]+)$", text, re.MULTILINE)}
    assert [*kept] == ["letters", "encoder", "decoder", "attention", "scores", "all"]
    assert all(ours <= theirs for theirs, ours in kept.values()) and kept["encoder"][1] < 0.5 * kept["encoder"][0]
    assert "0.0% of the dates are right, fewer than 90.0%" in run(attention, *sizes, "--updates", 1, code=1)


def test_dates():
    date = attention.datetime.date(1984, 3, 27)
    ways = [attention.written_in_some_way(date, style) for style in attention.STYLES]
    assert ways == ["27 March 1984", "March 27, 1984", "Tuesday, 27 March 1984", "27.3.1984", "03/27/1984",
                    "Mar 27 1984", "27-Mar-1984"]
    days = [date.replace(month=month, day=day) for month in range(1, 13) for day in range(1, 29)]
    longest = max(len(attention.written_in_some_way(day, style)) for day in days for style in attention.STYLES)
    assert longest < attention.LONGEST


def test_many_layers():
    sizes = "--layers", 12, "--hidden", 16, "--steps", 12, "--batch", 8, "--seconds", 0
    text = run(deep, *sizes, "--updates", 60, "--rate", 1e-2, "--limit", 0.0)
    assert "12 layers compiled" in text and len(re.findall(r"keeps [\d.]+ MiB for each layer", text)) == 2
    assert re.search(r"^the loss is [\d.]+, that of a model of frequencies [\d.]+", run(
        deep, *sizes, "--updates", 20, "--rate", 1e-9, code=1), re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_help_teaches(name: str):
    text = run(importlib.import_module(name), "--help")
    text = " ".join(text.split())
    assert f"python examples/{name}.py" in text and "It exits with 1 if" in text and "[default: " in text
    assert re.search(r"on a CPU they take (?:two|three) minutes at most", text)


def test_they_are_programs(tmp_path: Path):
    command = [sys.executable, ROOT / "examples" / f"{NAMES[0]}.py", "--help"]
    assert b"--vocabulary" in subprocess.run(command, cwd=tmp_path, capture_output=True, check=True).stdout


def benchmark(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setenv("ECORNN_STRICT", "0")  # which it sets
    monkeypatch.setattr(sys, "argv", ["compare_models.py", "--language", "7,4,24,50", "--speech", "24,3,16,2",
                                      "--seconds", "0", "--together", "1", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        compare_models.main()
    return ended.value.code


@pytest.mark.slow
def test_models_are_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture):
    path = tmp_path / "models.json"
    assert benchmark(monkeypatch, "--output", path) == 0
    found = json.loads(path.read_text())
    assert found["environment"]["torch"] == torch.__version__
    rows = [row for row in found["rows"] if row["way"] == "plain"]
    assert [row["model"] for row in rows] == ["language model", "speech recognizer"]
    for row, work in zip(rows, (7 * 4, 3), strict=True):
        assert row["ecornn_p20"] <= row["ecornn_ms"] <= row["ecornn_p80"] and row["repetitions"] >= 7
        assert row["ratio"] == row["torch_ms"] / row["ecornn_ms"]
        assert row["ecornn_per_second"] == pytest.approx(1e3 * work / row["ecornn_ms"])
        if row["dtype"] == "f32":
            assert row["ecornn_error"] < 2e-5 and row["ecornn_loss_error"] < 2e-5
    of_language = sum(row["model"] == "language model" for row in found["rows"])
    assert capsys.readouterr().out.count("language model") == 2 * of_language


def test_models_that_differ_are_not_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setattr(ecornn.torch, "replace", wrong_replace)
    assert benchmark(monkeypatch) == 1
    text = capsys.readouterr().out
    assert text.count("allowed 2.00e-05") == 2 and "a second" not in text


def test_dropout_that_drops_nothing():
    theirs, plain, x = nn.LSTM(8, 8, 2, dropout=compare_models.NOTHING), nn.LSTM(8, 8, 2), torch.randn(5, 3, 8)
    plain.load_state_dict(theirs.state_dict())
    assert torch.equal(theirs(x)[0], plain(x)[0])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def mean_square(y: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (y - wanted).square().mean()


def batches(count: int, device: str = "cpu") -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(BATCH, WIDTH, device=device), torch.randn(BATCH, 4, device=device)) for _ in range(count)]


def test_a_step_is_that_of_pytorch():
    torch.manual_seed(0)
    model = Model()
    other, data = copy.deepcopy(model), batches(4)
    step = Step(model, mean_square, data[0][:1], data[0][1:], rate=1e-2, clip=0.1, kind=None)
    optimizer = torch.optim.Adam(other.parameters(), 1e-2, fused=True)
    for x, wanted in data:
        step.load([x], [wanted])
        found = step()
        optimizer.zero_grad()
        loss = mean_square(other(x), wanted)
        loss.backward()
        nn.utils.clip_grad_norm_(other.parameters(), 0.1)
        optimizer.step()
        assert torch.equal(found, loss.detach())
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of what PyTorch's tracer looks at
def test_compiled_parts_make_the_same_step(monkeypatch: pytest.MonkeyPatch):
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, options=None, **how: compile(function, backend="eager",
                                                                                        **how))
    torch.manual_seed(0)
    case = compare_models.language(4, 2, 8, 12, dropout=0.0)
    batch = [[t.cpu() for t in some] for some in case.draw()]
    steps = [of(copy.deepcopy(case.model), case.criterion, *batch, clip=clip, kind=None)
             for clip in (0.1, 1e3) for of in (Step, CompiledStep)]
    for _ in range(3):
        losses = [step().item() for step in steps]
        assert losses[1] == pytest.approx(losses[0], rel=1e-6) and losses[3] == pytest.approx(losses[2], rel=1e-6)
    for step, compiled in (steps[:2], steps[2:]):
        one, other = ([*s.model.parameters(), *s.model.buffers()] for s in (step, compiled))
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("with_loss", [True, False])
def test_graphs_compute_what_steps_do(with_loss: bool):
    torch.manual_seed(0)
    plain, data = Model().cuda(), batches(6, "cuda")
    steps = [Step(model, mean_square, data[0][:1], data[0][1:], kind=None) for model in (plain, copy.deepcopy(plain))]
    for _ in range(3):
        steps[0]()  # as warming up does
    run = steps[1].graphed(with_loss)
    for x, wanted in data:
        for step in steps:
            step.load([x], [wanted])
        torch.testing.assert_close(run(), steps[0]())
    torch.testing.assert_close([*steps[1].model.parameters()], [*plain.parameters()])


def test_memory_is_that_of_saved_tensors():
    """By the layer that saves first. A second step finds the same; no hooks are left, also by a layer that fails."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(BATCH, WIDTH)
    for _ in range(2):
        assert memory_by_layer(model, lambda: model(x)) == {"first": 4 * BATCH * WIDTH, "second": 0, "": 4 * BATCH * 6}
        assert not model.first._forward_hooks and not model.first._forward_pre_hooks
    with pytest.raises(RuntimeError):
        memory_by_layer(model, lambda: model(torch.randn(BATCH, WIDTH + 1)))
    assert not model.first._forward_hooks and not model.first._forward_pre_hooks


def test_sides_take_turns():
    calls: list[str] = []
    times = take_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, seconds=0.0, together=2,
                       fewest=3)
    assert "".join(calls) == "ab" + 3 * "aabb" and len(times["a"]) == len(times["b"]) == 3


def test_text():
    found = words(reference())
    assert len(found) > 50_000 and {"the", "generator", ".", "yield"} <= {*found}
    tokens, names = numbered(found, 100)
    assert len(names) == 100 and names[int(tokens[7])] in (found[7], "<unk>")
    assert all(a >= b for a, b in pairwise(torch.bincount(tokens)[1:].tolist()))
    assert in_columns(torch.arange(10), 3).tolist() == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


@pytest.mark.slow
def test_docstrings():
    text = docstrings()
    assert len(text) > 500_000 and "Return the absolute value" not in text[:100] and "thread" in text


def test_percentiles():
    assert middle([10.0, 0.0, 1.0, 9.0, 8.0, 2.0, 3.0, 4.0, 7.0, 6.0, 5.0]) == (5.0, 2.0, 8.0)


def test_steps_that_wait_share_a_call():
    called: list[int] = []
    def adding(x: np.ndarray, h: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        called.append(len(x))
        return h + x, c + 2 * x
    async def calls() -> list[float]:
        sessions = serving.Sessions(adding, 1, 1, most=3, capacity=4)
        # two steps of a, and more rows than a call has
        first = [sessions.step(name, np.float32([value])) for name, value in
                 (("a", 1), ("b", 10), ("a", 2), ("c", 100), ("d", 1000))]
        values = [float(y[0]) for y in await asyncio.gather(*first)]
        with pytest.raises(HTTPError) as refused:
            sessions.step("e", np.float32([0]))
        assert refused.value.status_code == 503
        sessions.end("a")
        sessions.end("nobody")
        for name, value in (("e", 5), ("d", 1)):  # e in the row that a had
            values.append(float((await sessions.step(name, np.float32([value])))[0]))
        return values

    assert asyncio.run(calls()) == [1, 10, 3, 100, 1000, 5, 1001] and called == [3, 2, 1, 1]


def test_a_client_that_went_away_takes_no_answer():
    async def calls() -> float:
        sessions = serving.Sessions(lambda x, h, c: (h + x, c), 1, 1, most=3, capacity=2)
        sessions.step("a", np.float32([1])).cancel()
        return float((await sessions.step("b", np.float32([2])))[0])

    assert asyncio.run(calls()) == 2


@pytest.mark.parametrize("off", [0.0, 1e-3])
def test_wrong_answers_are_found(off: float):
    found = Load()
    found.sent = [*np.random.default_rng(0).standard_normal((6, 3), np.float32)]
    weights = {k: v.numpy() for k, v in serving.lstm(4, 3).state_dict().items()}
    found.got = [*ecornn.reference("lstm", np.stack(found.sent)[:, None], weights)[0][:, 0]]
    found.got[3] = found.got[3] + off
    with pytest.raises(SystemExit, match="differ from those of its sequence by") if off else nullcontext():
        serving.check(found, 4, 3)

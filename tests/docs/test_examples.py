"""The examples end to end, as a user runs them: from another folder, with records of their own."""

import ast
import os
import re
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from rooms import ROOT

import ecornn

EXAMPLES = ROOT / "examples"
SILENCE = 10.0  # seconds that a user waits for a line, at most
# Stages print a line ten times as often as for a user: a busy machine then delays none of them by SILENCE, and work
# that is in no stage shows as a gap.
OFTEN = f"import sys; sys.path.append({str(EXAMPLES)!r}); import stages; stages.EVERY /= 10\n"
TIMED = re.compile(r"^.+: \d+\.\d s$")

pytestmark = pytest.mark.slow


def run(script: str, *arguments: str | Path, cwd: Path, code: int = 0, **environment: str) -> str:
    """Runs an example; checks that it prints times, and measures its longest silence after the first line."""
    first = cwd / "sitecustomize.py"  # Python imports it before the example
    first.write_text(OFTEN + (first.read_text().removeprefix(OFTEN) if first.exists() else ""))
    with subprocess.Popen(
        [sys.executable, EXAMPLES / script, *arguments], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env=os.environ | {"ECORNN_TUNING_LOGS": str(cwd / "logs"), "CUDA_VISIBLE_DEVICES": "",
                                     "PYTHONPATH": f"{cwd}:{os.environ.get('PYTHONPATH', '')}"} | environment
    ) as process:
        lines = [(time.monotonic(), line.rstrip("\n")) for line in process.stdout]
    text = "\n".join(line for _, line in lines)
    assert process.returncode == code, text
    assert any(TIMED.match(line) for _, line in lines), text
    silence, after = max((b - a, line) for (a, line), (b, _) in pairwise(lines))
    assert silence <= SILENCE, f"silent for {silence:.1f} s after {after!r}"
    return text


def test_first_run_and_that_it_notices_a_wrong_result(tmp_path: Path):
    ecornn.compile("gru", hidden=20, input=12, batch=3, seq=7, target="cpu", out=tmp_path / "gru.so")
    text = run("00_first_run.py", "gru.so", cwd=tmp_path)
    assert float(re.search(r"against float64: (\S+),", text)[1]) <= 1e-5 and "us a step" in text
    assert re.search(r"your GRU of 20 units is \S+ times as fast, and a GRU of 64 units .* \S+ times\.", text)
    (tmp_path / "sitecustomize.py").write_text("import ecornn.numpy_reference as n\n"
                                               "n.STEPS['gru'] = (3, 1, n._gru_reset_before)\n")
    assert "wrong" in run("00_first_run.py", "gru.so", cwd=tmp_path, code=1)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    text = run("01_digits.py", cwd=folder)
    assert float(re.search(r"accuracy (\S+)% of 449", text)[1]) >= 95
    assert re.search(r"^0 predictions differ from PyTorch", text, re.MULTILINE)
    assert float(re.search(r"of the scores (\S+)", text)[1]) <= 1e-5
    return folder


def test_digits(searched: Path):
    assert any((searched / "logs").iterdir())


@pytest.mark.exhaustive
def test_digits_without_pytorch(searched: Path):
    (searched / "torch.py").write_text("raise ImportError('not installed')\n")
    text = run("01_digits.py", cwd=searched)
    assert "This run was finished at" in text
    assert re.search(r"^0 predictions differ from PyTorch's kept results", text, re.MULTILINE)


@pytest.mark.parametrize(("command", "words"), [
    ("02_own_cell.py", ["limit 1.0e-05"]), ("11_sharing_logs.py --trials 2", ["by imported.jsonl"]),
    ("04_replace.py --seconds 0.1", ["Acoustic: recurrent compiled", "Translator: encoder, decoder compiled"]),
    ("16_huggingface.py --hidden 16", ["config.json, model.safetensors", "): CompiledLSTM(128, 16", "Tagger  ",
                                       "saved again: the same file"])])
def test_it_says(command: str, words: list[str], tmp_path: Path):
    text = run(*command.split(), cwd=tmp_path)
    assert all(word in text for word in words), text


def test_lightning(tmp_path: Path):
    pytest.importorskip("lightning", reason="Lightning is in the extra `test`, but not installed here")
    text = run("17_lightning.py", "--hidden", "16", "--batches", "3", cwd=tmp_path)
    assert "recurrent: compiled" in text and "limit 1e-2; LSTM of the checkpoint: outputs differ by" in text


def test_more_cells(tmp_path: Path):
    text = run("03_more_cells.py", cwd=tmp_path)
    assert len(re.findall(r"2 layers by cpu_sequence, relative error \S+, limit", text)) == 3


def test_a_step_in_pytorch(tmp_path: Path):
    text = run("09_cell_in_pytorch.py", "--steps", "5", cwd=tmp_path)
    assert all(float(v) < 1e-5 for v in re.search(r"from the loop by (\S+), gradients by (\S+)", text).groups())


def test_streaming(tmp_path: Path):
    text = run("10_streaming.py", "--steps", "200", "--hidden", "24", cwd=tmp_path)
    p50, p95, p99 = (float(v) for v in re.search(r"p50 (\S+) us, p95 (\S+) us, p99 (\S+) us", text).groups())
    assert 0 < p50 <= p95 <= p99


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("[01]*.py")), ids=lambda path: path.stem)
def test_it_states_its_time(path: Path):
    text = " ".join(path.read_text().split())
    assert re.search(r"[Oo]n a CPU (?:it takes|they take) (?:a minute|two minutes|three minutes) at most", text)
    names = [name.id for call in ast.walk(ast.parse(path.read_text())) if isinstance(call, ast.withitem)
             for name in ast.walk(call.context_expr) if isinstance(name, ast.Name)]
    assert "stage" in names


@pytest.mark.parametrize(("script", "cell"), [("02_own_cell.py", "MinimalGatedUnit"), ("03_more_cells.py", "UGRNN"),
                                              ("03_more_cells.py", "LightGRU"), ("03_more_cells.py", "SRU")])
def test_cells_are_short(script: str, cell: str):
    lines = (EXAMPLES / script).read_text().splitlines()
    first = lines.index(f"class {cell}(Cell):")
    length = next(n for n, line in enumerate(lines[first + 1:], 1) if line and not line.startswith(" "))
    assert sum(bool(line) for line in lines[first:first + length]) < 20


def test_serving(tmp_path: Path):
    text = run("12_serving.py", "--hidden", "16", "--input", "4", "--sessions", "1", "12", "--seconds", "0.3",
               "--turns", "1", "--batch", "8", cwd=tmp_path)
    rows = re.findall(r"^ +(\d+) (ecornn|torch) +(\d+) \[", text, re.MULTILINE)
    assert [(n, side) for n, side, _ in rows] == [(n, side) for n in ("1", "12") for side in ("ecornn", "torch")]
    assert all(int(rate) > 0 for _, _, rate in rows)

"""The command line: help, errors, logs, and on the CPU the whole way from tuning to a timed module."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import runtime_sample
from click.testing import CliRunner
from events import until
from test_records import trial

import ecornn
from ecornn.cells.lstm import LSTM
from ecornn.cli import main
from ecornn.cli.compile_commands import knob
from ecornn.compiler import plan
from ecornn.errors import ArgumentError, DTypeError
from ecornn.tune.log import append, read
from ecornn.tune.record import Finish, Times
from ecornn.workload import Workload

LAYER = ["--cell", "lstm", "--hidden", "24", "--batch", "3", "--seq", "12", "--target", "cpu"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A user's folder of its own for each test."""
    monkeypatch.setenv("ECORNN_TUNING_LOGS", str(tmp_path / "logs"))
    monkeypatch.setattr("ecornn.cli.progress.torch_us", lambda work, device: None)  # seconds for each search
    return tmp_path / "logs"


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(main, [*map(str, arguments)])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.output


def test_help_is_fast():
    program = "import ecornn.cli, sys; assert not {'tvm', 'numpy', 'torch', 'xgboost'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("arguments, said", [
    (["tune", "--cell", "lstn", "--hidden", "8"], "cell='lstn' is not allowed"),
    (["tune", "--cell", "none.py:Cell", "--hidden", "8"], "there is no"),
    (["compile", "--cell", "lstm", "--hidden", "8", "--target", "sm_10", "-o", "x.so"], "target='sm_10'"),
    (["compile", "--cell", "lstm", "--hidden", "8"], "a file name"),
    (["compile", *LAYER, "--layers", "2", "--overlap", "wavefront", "-o", "x.so"], "overlap='wavefront'"),
    (["compile", *LAYER, "--dtype", "float16", "-o", "x.so"], "expected one of float32, float64 on a CPU"),
    (["compile", *LAYER, "--dtype", "float64", "--target", "sm_90a", "-o", "x.so"],
     "dtype='float64' is not allowed; expected one of float32, float16, bfloat16 on a GPU"),
    (["compile", *LAYER, "-o", "x.so", "--schedule", "magic"], "schedule='magic'"),
    (["compile", *LAYER, "-o", "x.so", "--schedule", "cpu_sequence", "--config", "nope=1"], "a knob of"),
    (["bench", "none.so"], "none.so"),
    (["log", "ls", "none.jsonl"], "cannot read"),
])
def test_a_mistake_is_one_message_and_exit_code_2(arguments, said):
    output = run(*arguments, code=2)
    assert said in output and "Traceback" not in output and output.count("error: ") == 1


def test_tuning_for_a_device_that_is_not_here_is_refused(monkeypatch):
    monkeypatch.setattr("ecornn.host_gpu.detect", lambda: None)
    output = run("tune", "--cell", "lstm", "--hidden", "8", "--target", "sm_90a", code=2)
    assert "GPU" in output


def test_a_module_for_a_gpu_that_is_not_here_is_not_timed(monkeypatch):
    monkeypatch.setattr("ecornn.host_gpu.detect", lambda index=0: None)
    monkeypatch.setattr("ecornn.tune.timing.arrays_for", lambda module: pytest.fail("asked for its memory"))
    module = runtime_sample.build(runtime_sample.manifest(runtime_sample.GPU))
    assert "error: device=0" in run("bench", str(module), code=2)


@pytest.mark.parametrize("text, value", [("a=1", ("a", 1)), ("a=-2", ("a", -2)), ("b=true", ("b", True)),
                                         ("b=False", ("b", False)), ("c=batch", ("c", "batch")),
                                         ("a=--2", ("a", "--2")), ("a=-", ("a", "-"))])
def test_knobs_of_the_command_line(text, value):
    assert knob(text) == value and type(knob(text)[1]) is type(value[1])


@pytest.mark.parametrize("text", ["a", "a=", "=1", ""])
def test_knobs_without_a_value_are_refused(text):
    with pytest.raises(ArgumentError, match="KNOB=VALUE"):
        knob(text)


def test_log_commands(folder, tmp_path):
    path = folder / "mine.jsonl"
    assert str(path) not in run("log", "ls")
    work = Workload("lstm", 799, 800, 20, 300, "bfloat16")  # of which no record ships
    append(path, trial(workload=work, times=Times.of([9.0]), config={"blocks": 1}))
    append(path, trial(workload=work, times=Times.of([4.0]), config={"blocks": 2}))
    append(path, trial(workload=work, times=None, check=None, error="run: wrong output"))
    with path.open("ab") as file:
        file.write(b'{"kind":"trial","v":1')
    output = run("log", "ls")
    assert f"{path}: 0 runs (0 finished), 3 trials, 1 failed" in output
    assert f"skipped {path}:4: torn last line" in output
    output = run("log", "best", str(path))
    assert "4 µs/step  persistent blocks=2  (mine.jsonl:2)" in output and "blocks=1" not in output
    target = tmp_path / "merged.jsonl"
    run("log", "export", str(path), "-o", str(target))
    assert len(read(target).lines) == 3 and not read(target).problems
    run("log", "export", str(path), "-o", str(target), code=2)  # never overwrites
    best = tmp_path / "best.jsonl"
    run("log", "export", "--best", "-o", str(best))  # of all folders, the shipped one too
    found = [line.record.config for line in read(best).lines]
    assert {"blocks": 2} in found and {"blocks": 1} not in found


def test_what_is_wrong_with_the_logs_is_said_once(folder, tmp_path, caplog):
    """A pipe and a link to a terminal were waited for, and nothing was said of the rest."""
    folder.mkdir()
    os.mkfifo(folder / "a.jsonl")
    (folder / "b.jsonl").symlink_to("/dev/stdin")
    (folder / "c.jsonl").symlink_to("nowhere")
    (folder / "d.jsonl").write_bytes(b"junk\n")
    (folder / "e.jsonl").write_bytes(b'{"kind":"trial"')  # cut off, as a run that was stopped leaves it
    plan("lstm", hidden=24, target="cpu")
    assert caplog.messages == [f"tuning logs: {folder}/a.jsonl is no regular file, and 3 more, which `ecornn doctor` "
                               "lists"]
    said = run("doctor")
    for name, words in (("b", "is no regular file"), ("c", "No such file"), ("d", "no JSON object")):
        assert re.search(rf"{name}\.jsonl.*{words}|{words}.*{name}\.jsonl", said)
    plan("lstm", hidden=24, target="cpu")
    assert len(caplog.messages) == 1


def test_a_folder_of_logs_that_is_a_file_is_said(folder, caplog):
    folder.write_text("")
    plan("lstm", hidden=24, target="cpu")
    assert caplog.messages == [f"tuning logs: the folder of tuning logs {folder} cannot be read: Not a directory"]
    assert "cannot be read: Not a directory" in run("doctor")


def from_json(*arguments: str):
    """What a command gives programs: JSON and nothing else on standard output, and exit code 0."""
    done = CliRunner().invoke(main, [*arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def test_doctor_for_programs():
    found = from_json("doctor")
    assert {"CPU", "GPU", "TVM", "records", "build cache"} <= set(found["found"]) and len(found["logs"]) == 2


def test_json_and_code_do_not_share_an_output():
    done = CliRunner().invoke(main, ["compile", "--cell", "lstm", "--hidden", "8", "--emit", "tir", "--json"])
    assert done.exit_code == 2 and "--emit-to" in done.stderr and not done.stdout


def test_how_a_search_goes_is_no_result(folder):
    """Results on standard output, and everything else on standard error."""
    done = CliRunner().invoke(main, ["tune", *LAYER, "--trials", "2"], catch_exceptions=False)
    assert "trial 2/2" in done.stderr and "trial " not in done.stdout.split("log:")[0]
    assert "best:" in done.stdout and "best:" not in done.stderr


def test_doctor_says_what_there_is():
    output = run("doctor")
    for word in ("CPU", "GPU", "CUDA compiler", "C++ compiler", "TVM", "XGBoost", "records"):
        assert re.search(rf"^{re.escape(word)} ", output, re.MULTILINE)


def test_from_tuning_to_a_timed_module(folder, tmp_path):
    command = ["tune", *LAYER, "--trials", "5", "--timeout", "60"]
    output = run(*command)
    found = re.search(r"^  ecornn-compile (.*)$", output, re.MULTILINE)
    assert found, output
    (path,) = folder.glob("*.jsonl")
    trials = [t for t in read(path).trials() if t.stage == "search"]
    assert len(trials) == 5 and all(t.check <= 1e-5 for t in trials if t.times)
    before = path.read_bytes()
    assert "This run is finished: 5 trials" in run(*command)
    assert path.read_bytes() == before

    finish = next(line.record for line in read(path).lines if isinstance(line.record, Finish))
    module = tmp_path / "lstm24.so"
    arguments = found[1].split()
    arguments[arguments.index("-o") + 1] = str(module)
    output = run("compile", *arguments)
    assert f"{path.name}:" in output and "this device, same batch" in output
    knobs = " ".join(f"{k}={v}" for k, v in sorted(finish.best.config.items()))
    said = re.search(r"^schedule: (\S+) (.*)$", output, re.MULTILINE)
    assert said[1] == finish.best.schedule and " ".join(sorted(said[2].split())) == knobs
    output = run("bench", str(module), "--seconds", "0.05", "--batch", "2", "--seq", "7")
    assert re.search(r"^ecornn +[\d.]+ µs/step", output, re.MULTILINE)
    timed = from_json("bench", str(module), "--seconds", "0.05", "--seq", "7")["us_per_step"]["ecornn"]
    assert 0 < timed["p20"] <= timed["median"] <= timed["p80"] and timed["runs"] >= 3
    (again,) = from_json(*command)
    assert again["finish"]["best"] == {"schedule": finish.best.schedule, "config": finish.best.config}
    made = from_json("compile", *arguments)
    assert made["written"] == [str(module)] and made["chosen"][0]["schedule"].startswith(finish.best.schedule)
    assert path.name in made["chosen"][0]["why"]
    (listed,) = from_json("log", "ls", str(path))
    assert listed == {"file": str(path), "runs": 1, "finished": 1, "trials": 5, "failed": listed["failed"]}
    (best,) = from_json("log", "best", str(path))
    assert best["trial"]["times"]["median"] == pytest.approx(finish.best_us) and best["file"] == str(path)


def test_many_layers_in_one_session_each_with_its_log(folder):
    command = ["tune", "--cell", "lstm", "--cell", "rnn_tanh", "--hidden", "16", "--batch", "2", "--seq", "8",
               "--target", "cpu", "--trials", "3", "--dtype", "float32", "--dtype", "float16"]
    output = run(*command, code=1)  # float16 is not served on CPUs; the others are tuned all the same
    assert output.count("error: dtype='float16' is not allowed") == 2 and "2 of 4 layers have a schedule" in output
    assert len(re.findall(r"^\[[13]/4\] \S+ T=8 .* µs per step", output, re.MULTILINE)) == 2
    paths = sorted(folder.glob("*.jsonl"))
    assert len(paths) == 2
    before = [path.read_bytes() for path in paths]
    run(*command, code=1)
    assert [path.read_bytes() for path in paths] == before


def test_a_list_of_layers_says_which_line_is_none(tmp_path):
    listed = tmp_path / "layers.txt"
    for line, why in (("--cell lstm", "Missing option '--hidden'"), ("--hidden x --cell gru", "'x' is not a valid"),
                      ("--cell lstm --hidden 8 --target cpu", "No such option"), ("--cell 'lstm", "No closing")):
        listed.write_text(f"# a comment\n{line}\n")
        output = run("tune", "--workloads", str(listed), code=2)
        assert f"workloads='{listed}:2: {line}'" in output.replace('"', "'") and why in output
    listed.write_text("# nothing\n")
    assert "a file with the options of a layer on each line" in run("tune", "--workloads", str(listed), code=2)
    assert "--batch is in the lines" in run("tune", "--workloads", str(listed), "--batch", "2", code=2)
    assert "Missing option '--hidden'" in run("tune", "--cell", "lstm", code=2)


@pytest.mark.slow
def test_verify_measures_again_and_reports_drift(folder, tmp_path):
    run("tune", *LAYER, "--trials", "3")
    (path,) = folder.glob("*.jsonl")
    output = run("log", "verify", str(path), "--tolerance", "100000", "--target", "cpu")
    assert "1 of 1 hold within 100000%" in output and "µs/step, " in output
    drifted = tmp_path / "drifted.jsonl"
    for record in read(path).trials():
        if record.times:
            append(drifted, msgspec.structs.replace(record, times=Times.of([record.times.median / 1000])))
    append(drifted, trial())  # of a GPU
    output = run("log", "verify", str(drifted), "--target", "cpu", code=1)
    assert "DRIFTED" in output and "1 left out, of another device" in output and "0 of 1 hold" in output


def test_without_records_the_default_is_compiled_and_said(tmp_path):
    output = run("compile", *LAYER, "--hidden", "25", "-o", str(tmp_path / "m.so"))
    assert "why: untuned default of cpu_sequence: no record applies" in output


@pytest.mark.parametrize("kind", ["tir", "asm"])
def test_emit_prints_the_code(kind, tmp_path):
    file = tmp_path / "code"
    run("compile", *LAYER, "--emit", kind, "--emit-to", str(file))
    assert len(file.read_text()) > 200
    output = run("compile", *LAYER, "--emit", "cuda", code=2)
    assert "--emit" in output


@pytest.mark.parametrize(("target", "kind", "allowed"), [("cpu", "ptx", "tir, asm, object, archive for llvm"),
                                                         ("sm_90a", "asm", "cuda, tir, ptx for cuda")])
def test_code_that_the_target_has_not_is_refused_before_anything_is_written(target, kind, allowed, tmp_path):
    file = tmp_path / "m.so"
    layer = ["compile", "--cell", "gru", "--hidden", "16", "--target", target]
    text = run(*layer, "--emit", kind, "-o", str(file), code=2)
    assert "--emit" in text and allowed in text and not file.exists()


@pytest.mark.parametrize("command", [["ecornn"], ["ecornn", "tune"], ["ecornn", "compile"]])
def test_every_program_says_its_version(command):
    asked = [sys.executable, "-m", *command, "--version"]
    said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    assert said.endswith(f"version {ecornn.__version__}")


@pytest.mark.parametrize("command", ["ls", "best", "stats"])
def test_a_file_that_is_no_log_is_an_error(command, tmp_path):
    (tmp_path / "junk.jsonl").write_bytes(b"junk\n")
    assert "is no tuning log" in run("log", command, str(tmp_path / "junk.jsonl"), code=2)


def test_overlaps_are_chosen_said_and_explained():
    layer = ["compile", "--cell", "gru", "--hidden", "256", "--batch", "2", "--target", "sm_90a", "--emit", "tir"]
    assert "directions side by side" in run(*layer, "--bidirectional")
    said = run(*layer, "--layers", "4")
    assert "a wavefront of 4 layers in" in said and "on 33 of 132 multiprocessors" in said
    assert "wavefront" not in run(*layer, "--layers", "4", "--overlap", "none")


def test_interrupting_keeps_the_trials_and_exits_with_130(folder, start):
    program = [sys.executable, "-c", "from ecornn.cli import tune; tune()"]
    command = [*program, *LAYER, "--hidden", "32", "--trials", "100000", "--no-early-stop", "--no-torch"]
    process = start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    until(lambda: process.poll() is not None or any(read(p).trials() for p in folder.glob("*.jsonl")))
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate()
    assert process.returncode == 130 and "the same command goes on" in output
    (path,) = folder.glob("*.jsonl")
    log = read(path)
    assert log.trials() and not log.problems
    assert not any(isinstance(line.record, Finish) for line in log.lines)


def test_tuning_a_cell_of_a_file(folder, tmp_path):
    cell = Path(tmp_path, "own.py")
    cell.write_text("""
from ecornn.cells import Cell, pointwise, product
from tvm import te

class Own(Cell):
    name = "own"
    states = ("h",)
    def parameters(self, input, hidden):
        return {"weight_ih": (1, hidden, input), "weight_hh": (1, hidden, hidden), "bias": (1, hidden)}
    def step(self, x, states, p):
        (h,) = states
        gx, gh, v = product(x, p["weight_ih"], 0), product(h, p["weight_hh"], 0), p["bias"]
        return [pointwise(lambda b, j: te.sigmoid(gx[b, j] + gh[b, j] + v[0, j]) * 0.5 + h[b, j] * 0.25, h)]
""")
    output = run("tune", "--cell", f"{cell}:Own", *LAYER[2:], "--trials", "3")
    assert f"ecornn-compile --cell {cell}:Own" in output
    (path,) = folder.glob("*.jsonl")
    trials = read(path).trials()
    assert trials[0].workload.cell.startswith("own@") and all(t.check <= 1e-5 for t in trials if t.times)
    assert any(t.times for t in trials)


@pytest.mark.parametrize("sizes", [["--seq", "1000000"], ["--batch", "1000000", "--training"]])
def test_the_command_ends_for_sizes_of_a_million(tmp_path: Path, folder: Path, sizes: list[str]):
    """No record applies, and a million lines of something else are among the logs. It did not end: candidates had lists
    with T x B entries."""
    folder.mkdir()
    (folder / "junk.jsonl").write_bytes(b"junk\n" * 1_000_000)
    file = tmp_path / "gru.so"
    done = subprocess.run([sys.executable, "-c", "from ecornn.console import compile; compile()", "--cell", "gru",
                           "--hidden", "24", "--input", "8", "--target", "icelake-server", *sizes, "-o", str(file)],
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "no record applies" in done.stderr and file.exists() and "and 999999 more" in done.stderr


@pytest.mark.parametrize(("argument", "value", "allowed"), [
    ("cell", LSTM, r"an instance of the class, as LSTM\(\)"), ("cell", None, "a cell's name"), ("cell", 5, "a Cell"),
    ("target", 5, "an architecture"), ("schedule", 5, "a schedule's name"), ("config", "rows=3", "a dict"),
    ("config", ["rows=3"], "a dict")])
def test_an_argument_of_another_type_is_named(argument: str, value: Any, allowed: str):
    with pytest.raises(ArgumentError, match=rf"^{argument}=.*{allowed}"):
        ecornn.compile(**{"cell": "lstm", "hidden": 8, "schedule": "cpu_sequence", "target": "cpu", argument: value})


def test_a_data_type_that_a_device_does_not_have_is_named():
    for target, dtype, allowed in (("sm_90a", "float64", "float32, float16, bfloat16 on a GPU"),
                                   ("cpu", "bfloat16", "float32, float64 on a CPU")):
        with pytest.raises(DTypeError, match=f"^dtype='{dtype}' is not allowed; expected one of {allowed}$"):
            ecornn.compile("lstm", hidden=8, dtype=dtype, target=target)
    with pytest.raises(DTypeError, match=r"^weights='int16' is not allowed; expected None with dtype float64"):
        ecornn.compile("lstm", hidden=8, dtype="float64", weights="int16", target="cpu")

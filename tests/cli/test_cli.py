"""The command line: exit codes, JSON, help, and on the CPU the whole way from tuning to a timed module."""

import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import psutil
import pytest
import runtime_sample
from click.testing import CliRunner, Result
from events import all_end, until
from hypothesis import assume, given
from hypothesis import strategies as st
from rooms import ROOT
from test_records import trial

import ecornn
from ecornn import console, heartbeat
from ecornn.build import nvcc
from ecornn.cells import BUILTIN
from ecornn.cli import common, main
from ecornn.cli.common import folded
from ecornn.cli.compile_commands import briefly, knob
from ecornn.compiler import plan
from ecornn.errors import ArgumentError, DTypeError
from ecornn.schedules import all_schedules
from ecornn.tune.log import append, read
from ecornn.tune.lookup import said
from ecornn.tune.record import Finish

LAYER = ["--cell", "lstm", "--hidden", "24", "--batch", "3", "--seq", "12", "--target", "cpu"]


def every(group: click.Group, *names: str) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        yield (*names, name)
        if isinstance(command, click.Group):
            yield from every(command, *names, name)


COMMANDS = [(), *every(main)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ECORNN_TUNING_LOGS", str(tmp_path / "logs"))
    monkeypatch.setattr("ecornn.cli.torch_time.torch_us", lambda work, device: None)  # seconds for each search
    monkeypatch.chdir(tmp_path)
    return tmp_path / "logs"


def ended(*arguments: object, code: int = 0) -> Result:
    done = CliRunner().invoke(main, [*map(str, arguments)])
    assert done.exit_code == code, done.output + repr(done.exception)
    return done


def run(*arguments: object, code: int = 0) -> str:
    return ended(*arguments, code=code).output


def from_json(*arguments: object, code: int = 0) -> Any:
    return json.loads(ended(*arguments, "--json", code=code).stdout)


def test_help_is_fast_and_importing_the_tuner_imports_no_compiler():
    program = ("import ecornn.cli, sys; assert not {'tvm', 'numpy', 'torch', 'xgboost'} & {*sys.modules}; import "
               "ecornn.tune, ecornn.compiler, ecornn.worker; assert not {'tvm', 'torch', 'xgboost'} & {*sys.modules}")
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("names", [names for names in COMMANDS if names not in ((), ("log",), ("config",))])
def test_every_command_that_finds_something_has_json(names):
    assert "--json" in run(*names, "--help")


@given(st.sampled_from([*BUILTIN, *all_schedules()]), st.data())
def test_a_mistyped_name_is_offered_as_it_is_right(name: str, data: st.DataObject):
    at = data.draw(st.integers(0, len(name) - 1))
    wrong = name[:at] + data.draw(st.sampled_from(["", "q", "q" + name[at]])) + name[at + 1:]
    assume(wrong not in (*BUILTIN, *all_schedules()))
    asked = {"cell": wrong} if name in BUILTIN else {"cell": "lstm", "schedule": wrong}
    with pytest.raises(ArgumentError, match=rf"='{wrong}': did you mean \w+\? expected one of .*{name}"):
        plan(**asked, hidden=8, target="cpu")


def test_an_option_without_a_value_is_missing():
    said = run("compile", "--cell", "lstm", "--hidden", "8", code=2)
    assert said.startswith("error: --output is missing: expected a ")


@pytest.mark.parametrize("line, completed", [("ecornn co", ["compile", "config"]), ("ecornn log st", ["stats"]),
                                             ("ecornn tune --cel", ["--cell"])])
def test_a_shell_completes_commands_and_options(line: str, completed: list[str]):
    asked = os.environ | {"_ECORNN_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    done = subprocess.run([sys.executable, "-m", "ecornn"], env=asked, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"plain,{word}" for word in completed]


def test_exit_codes_of_the_reference():
    text = (ROOT / "docs/reference/commands.md").read_text()
    assert re.findall(r"^\| (\d+) ", text, re.MULTILINE) == ["0", "1", "2", "130"]


@pytest.mark.parametrize("arguments, said", [
    (["tune", "--cell", "lstn", "--hidden", "8"], "cell='lstn':"),
    (["tune", "--cell", "none.py:Cell", "--hidden", "8"], "does not exist"),
    (["tune", "--hidden", "8"], "Missing option '--cell'"),
    (["tune", "--cell", "lstm", "--cell", "nope", "--hidden", "8", "--target", "cpu"], "cell='nope'"),  # the last layer
    (["compile", "--cell", "lstm", "--hidden", "8", "--target", "sm_10", "-o", "x.so"], "target='sm_10'"),
    (["compile", "--cell", "lstm", "--hidden", "8"], "a file name"),
    (["compile", "--cell", "lstm", "--hidden", "8OO"], "'8OO' is not a valid"),
    (["compile", "--cell", "lstm", "--hidden", "8", "--emit", "tir", "--json"], "--emit-to"),  # on one output
    (["compile", *LAYER, "--layers", "2", "--overlap", "wavefront", "-o", "x.so"], "overlap='wavefront'"),
    (["compile", *LAYER, "--emit", "ptx", "-o", "x.so"], "tir, asm, object, archive for llvm"),
    (["compile", *LAYER[:-1], "sm_90a", "--emit", "asm", "-o", "x.so"], "cuda, tir, ptx for cuda"),
    (["compile", *LAYER, "-o", "x.so", "--schedule", "magic"], "schedule='magic'"),
    (["compile", *LAYER, "-o", "x.so", "--schedule", "cpu_sequence", "--config", "nope=1"], "a knob of"),
    (["explain", "--cell", "lstm", "--hidden", "8", "--tune"], "--tune"), (["nothing"], "nothing"),
    (["bench", "none.so"], "none.so"), (["bench", "junk"], "junk"), (["report", "junk"], "is not a tuning log"),
    (["log", "best", "junk"], "is not a tuning log"), (["log", "ls", "none.jsonl"], "cannot read"),
])
def test_code_2_is_one_message_of_what_cannot_be_done(arguments, said, tmp_path):
    (tmp_path / "junk").write_bytes(b"junk\n")
    done = ended(*arguments, code=2)
    assert said in done.stderr and not done.stdout and "Traceback" not in done.stderr
    assert len(re.findall(r"^error: |^Error: ", done.stderr, re.MULTILINE)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["junk"]


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


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("name", "target"), [("c++", "cpu"), ("nvcc", "sm_90a")])
def test_code_130_is_stopped_and_leaves_nothing_behind(tmp_path, which, name, target, start):
    """A compilation, while compilers run in other threads, which get no signals."""
    temporary, compiler = tmp_path / "temporary", tmp_path / name
    temporary.mkdir()
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] || exec sleep 1000\n')
    compiler.chmod(0o755)
    command = [sys.executable, "-m", "ecornn", "compile", *LAYER[:-1], target, "-o", str(tmp_path / "m.so")]
    found = {"CXX": str(compiler)} if name == "c++" else {
        nvcc.ENVIRONMENT: name, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    running = start(command, stderr=subprocess.PIPE, text=True, env={
        **os.environ, "TMPDIR": str(temporary), "ECORNN_CACHE": "off", **found})
    children = partial(psutil.Process(running.pid).children, recursive=True)
    until(lambda: running.poll() is not None or any(process.name() == "sleep" for process in children()))
    below = children()
    running.send_signal(which)
    said = running.communicate()[1]
    all_end(below)
    assert running.returncode == 130 and "Traceback" not in said and said.endswith("stopped\n")
    assert not list(temporary.iterdir()) and not (tmp_path / "m.so").exists()


@pytest.mark.parametrize("which", [
    signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
    pytest.param(signal.SIGHUP, marks=[pytest.mark.slow, pytest.mark.exhaustive])])
def test_stopping_a_search_keeps_the_trials_and_leaves_nothing_behind(which, folder, tmp_path, start):
    temporary, program = tmp_path / "temporary", "from ecornn.cli import tune; tune()"
    temporary.mkdir()
    process = start([sys.executable, "-c", program, *LAYER, "--trials", "100000", "--no-early-stop", "--no-torch"],
                    env={**os.environ, "TMPDIR": str(temporary)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                    text=True)
    until(lambda: process.poll() is not None or any(len(read(p).trials()) > 1 for p in folder.glob("*.jsonl")))
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(which)
    output, _ = process.communicate()
    assert process.returncode == 130 and "run the same command again" in output
    all_end(below)
    assert not list(temporary.iterdir())
    (path,) = folder.glob("*.jsonl")
    log = read(path)
    assert log.trials() and not log.problems and not any(isinstance(line.record, Finish) for line in log.lines)


def test_what_is_wrong_with_the_logs_is_said_once(folder, tmp_path, caplog):
    """A pipe and a link to a terminal were waited for, and nothing was said of the rest."""
    folder.mkdir()
    os.mkfifo(folder / "a.jsonl")
    (folder / "b.jsonl").symlink_to("/dev/stdin")
    (folder / "c.jsonl").symlink_to("nowhere")
    (folder / "d.jsonl").write_bytes(b"junk\n")
    (folder / "e.jsonl").write_bytes(b'{"kind":"trial"')  # cut off, as a run that was stopped leaves it
    plan("lstm", hidden=24, target="cpu")
    assert caplog.messages == [f"skipped a part of the tuning logs: {folder}/a.jsonl is not a regular file, "
                               "and 3 more problems (see `ecornn doctor`)"]
    said = run("doctor")
    for name, words in (("b", "is not a regular file"), ("c", "No such file"), ("d", "no JSON object")):
        assert re.search(rf"{name}\.jsonl.*{words}|{words}.*{name}\.jsonl", said)
    plan("lstm", hidden=24, target="cpu")
    assert len(caplog.messages) == 1


def test_a_folder_of_logs_that_is_a_file_is_said(folder, caplog):
    folder.write_text("")
    plan("lstm", hidden=24, target="cpu")
    assert caplog.messages == [f"skipped a part of the tuning logs: the folder of tuning logs {folder} cannot be read: "
                               "Not a directory"]
    assert "cannot be read: Not a directory" in run("doctor")


def test_doctor_says_what_there_is():
    output, found = ended("doctor").stdout, from_json("doctor")
    for word in ("CPU", "GPU", "CUDA compiler", "C++ compiler", "TVM", "XGBoost", "records"):
        assert re.search(rf"^{re.escape(word)} ", output, re.MULTILINE)
    assert {"CPU", "GPU", "TVM", "records", "build cache"} <= {*found["found"]} and len(found["logs"]) == 2


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "one.jsonl"
    append(path, trial(config={"blocks": 1}), trial(times=None, check=None, error="run: wrong output"))
    return path


def test_a_page_for_programs(log):
    found = from_json("report", log, "-o", "r.html")
    assert found["bytes"] == Path("r.html").stat().st_size and found["logs"] == [str(log)]


@pytest.mark.parametrize("arguments, said", [
    (["report", "one.jsonl"], "wrote report.html"), (["log", "merge", "one.jsonl", "-o", "b.jsonl"], "wrote 2 records"),
    (["log", "import", "one.jsonl"], "added 2 records"), (["log", "prune", "one.jsonl"], "kept 1 of 2 records"),
    (["compile", *LAYER, "-o", "m.so"], "wrote m.so"),
    (["log", "verify", "--target", "cpu", "one.jsonl"], "there are no records to measure again")])
def test_what_was_written_is_no_result(log, arguments, said):
    done = ended(*arguments)
    assert said in done.stderr and not done.stdout


def test_what_takes_long_is_said_meanwhile(monkeypatch, capfd):
    def heard(line: str) -> str:
        err = ""
        while err.count(line) < 2:
            time.sleep(0.01)
            found = capfd.readouterr()
            assert not found.out
            err += found.err
        return err

    monkeypatch.setattr(heartbeat, "EVERY", 0.05)
    with common.said_while("compiling") as told:
        err = heard("... compiling\n")
        told("linking")
        err += heard("... linking\n")
    with common.told_aloud() as told:
        told("gluing")
        assert heard("  still gluing, ").startswith("gluing\n  still gluing, ")
    with heartbeat.going("none yet") as told:
        heard("none yet, ")
        told("one of two")
        heard("one of two, ")
        told("two of two")
    assert capfd.readouterr().err.splitlines()[-1] == "two of two"
    with common.said_while("loading"), pytest.raises(KeyError):
        raise KeyError
    said = capfd.readouterr()
    assert "loading" not in err + said.err and not said.out


def test_from_tuning_to_a_timed_module(folder, tmp_path):
    command = ["tune", *LAYER, "--trials", "5", "--timeout", "60"]
    done = ended(*command)  # results on standard output, how it goes is none
    assert "trial 5/5" in done.stderr and "trial " not in done.stdout.split("log:")[0]
    assert "best:" in done.stdout and "best:" not in done.stderr
    found = re.search(r"^  ecornn compile (.*)$", done.stdout, re.MULTILINE)
    assert found, done.stdout
    (path,) = folder.glob("*.jsonl")
    trials = [t for t in read(path).trials() if t.stage == "search"]
    assert len(trials) == 5 and all(t.check <= 1e-5 for t in trials if t.times)
    before = path.read_bytes()
    assert "after 5 trials; for more" in run(*command) and path.read_bytes() == before

    finish = next(line.record for line in read(path).lines if isinstance(line.record, Finish))
    module, arguments = tmp_path / "lstm24.so", found[1].split()
    arguments[arguments.index("-o") + 1] = str(module)
    output = run("compile", "-v", *arguments)
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
    done = ended("log", "best", path)
    assert done.stdout and not done.stderr
    (best,) = from_json("log", "best", str(path))
    assert best["trial"]["times"]["median"] == pytest.approx(finish.best_us) and best["file"] == str(path)


def test_many_layers_in_one_session_each_with_its_log(folder):
    command = ["tune", "--cell", "lstm", "--cell", "rnn_tanh", "--hidden", "16", "--batch", "2", "--seq", "8",
               "--target", "cpu", "--trials", "3", "--weights", "int16", "--dtype", "float32", "--dtype", "float16"]
    output = run(*command, code=1)  # float16 layers have no rounded weights; the others are tuned all the same
    assert output.count("error: weights='int16':") == 2 and "2 of 4 layers were tuned" in output
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
    assert "--batch cannot be used with --workloads" in run("tune", "--workloads", str(listed), "--batch", "2", code=2)
    assert "Missing option '--hidden'" in run("tune", "--cell", "lstm", code=2)


@pytest.mark.parametrize("kind", ["tir", "asm"])
def test_emit_prints_the_code(kind):
    run("compile", *LAYER, "--emit", kind, "--emit-to", "code")
    assert len(Path("code").read_text()) > 200


@pytest.mark.parametrize("command", [["ecornn"], ["ecornn", "tune"], ["ecornn", "compile"]])
def test_every_program_says_its_version(command):
    asked = [sys.executable, "-m", *command, "--version"]
    said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    assert said.endswith(f"version {ecornn.__version__}")


def test_overlaps_are_chosen_said_and_explained():
    layer = ["compile", "--cell", "gru", "--hidden", "256", "--batch", "2", "--target", "sm_90a", "--emit", "tir"]
    assert "directions side by side" in run(*layer, "--bidirectional")
    said = run(*layer, "--layers", "4")
    assert "a wavefront of 4 layers in" in said and "on 33 of 132 multiprocessors" in said
    assert "wavefront" not in run(*layer, "--layers", "4", "--overlap", "none")


def test_tuning_a_cell_of_a_file(folder):
    cell = f"{ROOT / 'examples' / '02_own_cell.py'}:MinimalGatedUnit"
    assert f"ecornn compile --cell {cell}" in run("tune", "--cell", cell, *LAYER[2:], "--trials", "3")
    (path,) = folder.glob("*.jsonl")
    trials = read(path).trials()
    assert trials[0].workload.cell.startswith("mgu@") and all(t.check <= 1e-5 for t in trials if t.times)
    assert any(t.times for t in trials)


@pytest.mark.parametrize("sizes", [["--seq", "1000000"], ["--batch", "1000000", "--training"]])
def test_the_command_ends_for_sizes_of_a_million(tmp_path: Path, folder: Path, sizes: list[str]):
    """It did not end: candidates had lists with T x B entries. A million lines of something else are in the logs."""
    folder.mkdir()
    (folder / "junk.jsonl").write_bytes(b"junk\n" * 1_000_000)
    file = tmp_path / "gru.so"
    done = subprocess.run([sys.executable, "-c", "from ecornn.console import compile; compile()", "--cell", "gru",
                           "--hidden", "24", "--input", "8", "--target", "icelake-server", *sizes, "-o", str(file)],
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "no record applies" in done.stderr and file.exists() and "and 999999 more problems" in done.stderr


@pytest.mark.parametrize(("argument", "value", "allowed"), [
    ("target", 5, "an architecture"), ("schedule", 5, "a schedule's name"), ("config", "rows=3", "a dict"),
    ("config", ["rows=3"], "a dict")])
def test_an_argument_of_another_type_is_named(argument: str, value: Any, allowed: str):
    with pytest.raises(ArgumentError, match=rf"^{argument}=.*{allowed}"):
        ecornn.compile(**{"cell": "lstm", "hidden": 8, "schedule": "cpu_sequence", "target": "cpu", argument: value})


def test_a_data_type_that_a_device_does_not_have_is_named():
    with pytest.raises(DTypeError, match=r"^dtype='float64': expected one of float32, float16, bfloat16 on a GPU$"):
        ecornn.compile("lstm", hidden=8, dtype="float64", target="sm_90a")
    with pytest.raises(DTypeError, match=r"^weights='int16': expected None with dtype float64"):
        ecornn.compile("lstm", hidden=8, dtype="float64", weights="int16", target="cpu")


def help_of(names: tuple[str, ...], columns: int) -> str:
    done = CliRunner().invoke(main, [*names, "--help"], terminal_width=columns)
    assert done.exit_code == 0 and not done.stderr
    return done.stdout


def typed(text: str) -> list[list[str]]:
    """The commands in a help text, as a shell reads them; what stands behind one with a gap is left out."""
    lines = [re.split(r"(?<=\S) {2,}(?=\S)", line)[0] for line in re.sub(r" \\\n *", " ", text).splitlines()]
    return [shlex.split(line) for line in lines if re.match(r" +([A-Z_]+=\S+ )?(ecornn|python)[ -]", line)]


@pytest.mark.parametrize("names", COMMANDS, ids=" ".join)
def test_help_fits_its_terminal(names):
    for columns in (60, 80):
        for line in help_of(names, columns).splitlines():
            assert len(line) <= columns, line


@pytest.mark.parametrize("names", COMMANDS, ids=" ".join)
def test_every_command_is_shown_by_examples_or_has_few_options(names):
    text = help_of(names, 80)
    assert "Usage:" in text and (len(typed(text)) or len(re.findall(r"^  -", text, re.MULTILINE)) <= 5)


@pytest.mark.parametrize("name", ["tune", "compile", "bench", "explain"])
def test_options_stand_below_headings(name: str):
    heads = re.findall(r"^(\w+) options:$", help_of((name,), 80), re.MULTILINE)
    expected = {"tune": ["Search"], "bench": ["Comparison"]}.get(name, [])
    assert heads == ["Layer", *expected, "Output", "Machine", "Advanced", "Other"]
    rest = help_of((name,), 80).partition("\nOther options:\n")[2].partition("\n\n")[0]  # what GROUPS does not name
    assert not set(re.findall(r"--[\w-]+", rest)) - {"--help", "--version"}


@pytest.mark.parametrize("name", ["tune", "compile"])
def test_a_command_with_a_program_of_its_own_has_one_help_text(name: str, monkeypatch: pytest.MonkeyPatch,
                                                              capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", [f"ecornn-{name}", "-h"])
    monkeypatch.setenv("COLUMNS", "80")  # of which click takes two for a margin
    with pytest.raises(SystemExit, match="0"):
        getattr(console, name)()
    assert capsys.readouterr().out == help_of((name,), 78).replace("Usage: main", "Usage: ecornn")


def test_knobs_and_skipped_records_are_said_when_asked_for():
    layer = "--cell", "lstm", "--hidden", "48", "--batch", "2", "--target", "znver4"
    assert not re.search(r"^chosen: .*=", run("explain", *layer), re.MULTILINE)
    assert re.search(r"^chosen: cpu_sequence .*columns=\d", run("explain", *layer, "-v"), re.MULTILINE)
    why = "record a.jsonl:3 of 2026: this device" + said({"stale": 2, "with a wrong output": 1}) + "; of lstm"
    assert "2 records skipped (stale); 1 record skipped (" in why
    assert briefly(why) == "record a.jsonl:3 of 2026: this device; of lstm"


def test_commands_of_a_group_are_said_in_whole_sentences():
    for names, columns in itertools.product(((), ("log",)), (60, 80)):
        assert "..." not in help_of(names, columns).replace("[ARGS]...", "")


def test_examples_can_be_pasted_at_any_width():
    line = "  ecornn compile --cell 'lstm(peepholes, clip=3)' --hidden 8 --lengths -o out.so"
    for room in range(24, 90):
        out = "\n".join(folded(f"\b\nExamples:\n{line}    what it does, and in which order\n  ecornn doctor", room))
        (command,) = (text for text in typed(out) if text[1] == "compile")
        assert command == shlex.split(line) and "what it does" in " ".join(out.split()) and "\0" not in out
        assert all(len(part) <= max(room, 40) for part in out.splitlines())  # --cell has 40

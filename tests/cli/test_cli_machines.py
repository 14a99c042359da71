"""The command line for programs: JSON alone on standard output, all else on standard error, and each exit code that the
reference of commands has; and help of every command, which fits a narrow terminal and whose examples can be pasted."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import psutil
import pytest
import site_commands
from click.testing import CliRunner, Result
from events import all_end
from test_records import trial

from ecornn.build import nvcc
from ecornn.cli import common, main
from ecornn.cli.common import folded
from ecornn.tune.log import append
from ecornn.tune.record import Times

LAYER = ["--cell", "lstm", "--hidden", "24", "--batch", "3", "--seq", "12", "--target", "cpu"]


def every(group: click.Group, *names: str) -> Iterator[tuple[str, ...]]:
    """The names of each command, as they are typed."""
    for name, command in group.commands.items():
        yield (*names, name)
        if isinstance(command, click.Group):
            yield from every(command, *names, name)


COMMANDS = [(), *every(main)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder of logs, and the folder that commands run in."""
    monkeypatch.setenv("ECORNN_TUNING_LOGS", str(tmp_path / "logs"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "logs"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "one.jsonl"
    append(path, trial(times=Times.of([9.0]), config={"blocks": 1}))
    append(path, trial(times=Times.of([4.0]), config={"blocks": 2}))
    append(path, trial(times=None, check=None, error="run: wrong output"))
    return path


def run(*arguments: object, code: int = 0) -> Result:
    done = CliRunner().invoke(main, [*map(str, arguments)])
    assert done.exit_code == code, done.output + repr(done.exception)
    return done


def value(*arguments: object, code: int = 0):
    """The JSON of a command, which is all that it writes to standard output."""
    return json.loads(run(*arguments, "--json", code=code).stdout)


@pytest.mark.parametrize("names", [names for names in COMMANDS if names not in ((), ("log",), ("config",))],
                         ids=" ".join)
def test_every_command_that_finds_something_has_json(names):
    assert "--json" in run(*names, "--help").stdout


def test_logs_for_programs(log, folder, tmp_path):
    (listed,) = value("log", "ls", log)
    assert listed == {"file": str(log), "runs": 0, "finished": 0, "trials": 3, "failed": 1}
    (one,) = value("log", "stats", log)
    assert (one["trials"], one["failed"], one["failures"]) == (3, 1, {"run: wrong output": 1}) and one["gains"] is None
    merged = value("log", "merge", log, log, "-o", tmp_path / "merged.jsonl")
    assert merged == {"file": str(tmp_path / "merged.jsonl"), "records": 3, "newer": 0, "kept_out": []}
    assert value("log", "export", log, "--best", "-o", tmp_path / "best.jsonl")["records"] == 1
    assert value("log", "import", log) == {"file": str(folder / "imported.jsonl"), "added": 3, "records": 3,
                                           "kept_out": []}
    assert value("log", "import", log)["added"] == 0
    pruned = value("log", "prune", log, "--keep", 1, "-o", tmp_path / "pruned.jsonl")
    assert [(one["before"], one["records"]) for one in pruned] == [(3, 1)]
    assert [(one["file"], one["before"], one["records"]) for one in value("log", "prune", log, "--keep", 1)] == [
        (str(log), 3, 1)]
    found = value("log", "verify", log, "--target", "cpu")  # the records are a GPU's
    assert found["checks"] == [] and sum(found["left_out"].values()) == 1


def test_a_page_for_programs(log, tmp_path):
    found = value("report", log, "-o", tmp_path / "r.html")
    assert found["bytes"] == (tmp_path / "r.html").stat().st_size and found["logs"] == [str(log)]


@pytest.mark.parametrize("arguments, said", [
    (["report", "one.jsonl"], "wrote report.html"), (["log", "merge", "one.jsonl", "-o", "b.jsonl"], "wrote 3 records"),
    (["log", "import", "one.jsonl"], "3 records added"), (["log", "prune", "one.jsonl"], "2 of 3 records kept"),
    (["compile", *LAYER, "-o", "m.so"], "wrote m.so"), (["log", "verify", "--target", "cpu", "one.jsonl"], "nothing")])
def test_what_was_written_is_no_result(log, arguments, said):
    done = run(*arguments)
    assert said in done.stderr and not done.stdout


def test_what_takes_long_is_said_meanwhile(monkeypatch, capfd):
    def heard(line: str) -> str:
        """What is said until the line has come twice."""
        err = ""
        while err.count(line) < 2:
            time.sleep(0.01)
            found = capfd.readouterr()
            assert not found.out
            err += found.err
        return err

    monkeypatch.setattr(common, "EVERY", 0.05)
    with common.said_while("compiling") as told:
        err = heard("... compiling\n")
        told("linking")
        err += heard("... linking\n")
    with common.said_while("loading"), pytest.raises(KeyError):
        raise KeyError
    said = capfd.readouterr()
    assert "loading" not in err + said.err and not said.out


def test_exit_codes_of_the_reference():
    """Those that follow are all."""
    assert re.findall(r"^\| (\d+) ", site_commands.INTRO, re.MULTILINE) == ["0", "1", "2", "130"]


def test_code_0_is_done(log):
    assert run("log", "best", log).stdout and not run("log", "best", log).stderr
    assert run("doctor").stdout


def test_code_1_is_an_answer_that_is_no(tmp_path):
    cell = tmp_path / "crooked.py"
    cell.write_text("""
from ecornn import Cell, pointwise
from tvm import te

class Crooked(Cell):
    name, states = "crooked", ("h",)
    def parameters(self, input, hidden):
        return {"weight_ih": (1, hidden, input)}
    def step(self, x, states, parameters):
        (h,) = states
        return [pointwise(lambda b, j: te.erf(h[b, 0] + x[b, 0]) * parameters["weight_ih"][0, j, j], h)]
""")
    found = value("check-cell", f"{cell}:Crooked", "--hidden", 8, "--target", "cpu", code=1)
    assert found["analysis"]["result"] != "yes" and found["analysis"]["why"]


@pytest.mark.parametrize("arguments", [
    ["compile", "--cell", "lstn", "--hidden", "8", "-o", "x.so"], ["compile", "--cell", "lstm", "--hidden", "8OO"],
    ["tune", "--hidden", "8"], ["log", "best", "junk"], ["report", "junk"], ["bench", "junk"], ["nothing"],
    ["compile", *LAYER, "--emit", "ptx", "-o", "x.so"], ["explain", "--cell", "lstm", "--hidden", "8", "--tune"]])
def test_code_2_is_what_cannot_be_done(arguments, tmp_path):
    """And nothing on standard output, nothing written."""
    (tmp_path / "junk").write_bytes(b"junk\n")
    done = run(*arguments, code=2)
    assert not done.stdout and re.search(r"^error: |^Error: ", done.stderr, re.MULTILINE)
    assert [path.name for path in tmp_path.iterdir()] == ["junk"]


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
    below: list[psutil.Process] = []
    while not any(process.name() == "sleep" for process in below):
        assert running.poll() is None
        time.sleep(0.1)
        below = psutil.Process(running.pid).children(recursive=True)
    running.send_signal(which)
    said = running.communicate()[1]
    all_end(below)
    assert running.returncode == 130 and "Traceback" not in said and said.endswith("stopped\n")
    assert not list(temporary.iterdir()) and not (tmp_path / "m.so").exists()


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


def test_commands_of_a_group_are_said_in_whole_sentences():
    for columns in (60, 80):
        assert "..." not in help_of((), columns).replace("[ARGS]...", "")
        assert "..." not in help_of(("log",), columns).replace("[ARGS]...", "")


def test_examples_can_be_pasted_at_any_width():
    """A command that is folded is the same command to a shell."""
    line = "  ecornn compile --cell 'lstm(peepholes, clip=3)' --hidden 8 --lengths -o out.so"
    for room in range(24, 90):
        out = "\n".join(folded(f"\b\nExamples:\n{line}    what it does, and in which order\n  ecornn doctor", room))
        (command,) = (text for text in typed(out) if text[1] == "compile")
        assert command == shlex.split(line)
        assert "what it does" in " ".join(out.split()) and "\0" not in out
        assert all(len(part) <= max(room, 40) for part in out.splitlines())  # --cell has 40

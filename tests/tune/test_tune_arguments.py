"""What a search refuses before anything is started, and what it says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner
from events import all_end, until
from msgspec import structs
from test_cli import folder  # noqa: F401  (a user's folder of its own for each test)
from test_records import finish, start
from tune_fakes import DEVICE, ENTRIES, make

import ecornn
from ecornn.cells import get
from ecornn.cells.naming import load_cell
from ecornn.cli import main
from ecornn.errors import ArgumentError, BuildError, CellError, DeviceError, RecordError
from ecornn.targets import resolve
from ecornn.tune import Session, tune
from ecornn.tune.evaluate import ProcessEvaluator
from ecornn.tune.journal import Journal
from ecornn.tune.log import append, read
from ecornn.tune.record import encode
from ecornn.tune.remote import Tracker

LAYER = {"hidden": 8, "batch": 2, "seq": 5, "target": "cpu"}
CELL = '''
import ecornn
class Half(ecornn.Cell):
    name, states = "half", ("h",)
    def parameters(self, input, hidden):
        return {"w": (1, hidden, input)}
    def step(self, x, states, p):
        (h,), wx = states, ecornn.product(x, p["w"], 0)
        return [ecornn.pointwise(lambda b, j: 0.5 * h[b, j] + wx[b, j], h)]
'''


@pytest.mark.parametrize(("argument", "value"), [
    ("trials", 0), ("trials", -3), ("trials", 2.5), ("trials", "4"), ("trials", True), ("timeout", 0), ("timeout", "x"),
    ("timeout", float("nan")), ("timeout", None), ("time_limit", 0), ("time_limit", "3"), ("time_limit", float("inf")),
    ("seed", -1), ("seed", 1.5), ("seed", None), ("seed", 1 << 70), ("report", None), ("begin", 3), ("target", 5),
    ("tracker", "127.0.0.1:9190"), ("output", 5), ("cell", 5), ("cell", None)])
def test_a_bad_argument_is_named_and_nothing_is_written(argument, value, tmp_path, monkeypatch):
    monkeypatch.setenv("ECORNN_TUNING_LOGS", str(tmp_path))
    arguments = {"cell": "lstm", **LAYER, argument: value}
    with pytest.raises(ArgumentError, match=argument):
        tune(arguments.pop("cell"), **arguments)
    assert not list(tmp_path.iterdir())


def test_another_cpu_is_refused_at_once():
    other = "neoverse-v1" if resolve("cpu").arch != "neoverse-v1" else "znver4"
    with pytest.raises(DeviceError, match="must be in this machine"):
        Session(other)
    assert Session(resolve("cpu").arch).device == ecornn.targets.resolve("cpu")


def test_without_a_compiler_it_says_so_and_tries_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="no-such-compiler"):
        tune("lstm", **LAYER, output=tmp_path / "log.jsonl")
    assert not list(tmp_path.iterdir())


def test_a_run_in_which_nothing_ran_is_made_again(tmp_path):
    path = tmp_path / "log.jsonl"
    append(path, start("ab-1"), structs.replace(finish("ab-1"), best=None, best_us=None))
    assert Journal.open(path, "ab", True).run == "ab-2"
    append(path, start("ab-2"), finish("ab-2"))
    assert Journal.open(path, "ab", True).run == "ab-2" and Journal.open(path, "ab", False).run == "ab-3"


def test_one_run_is_for_one_process(tmp_path):
    path = tmp_path / "log.jsonl"
    with Journal.open(path, "ab", True).alone():
        with pytest.raises(RecordError, match="another process tunes this layer"), Journal.open(
                path, "ab", True).alone():
            pass
        with Journal.open(path, "cd", True).alone():  # another layer
            pass
    with Journal.open(path, "ab", True).alone():
        pass
    assert not list(tmp_path.iterdir())
    with pytest.raises(RecordError, match="folder"), Journal.open(Path("/proc/x.jsonl"), "ab", True).alone():
        pass


def test_a_file_that_is_no_log_is_not_written_to(tmp_path):
    path = tmp_path / "lstm.so"
    path.write_bytes(b"\x7fELF\n\x00\x01")
    with pytest.raises(RecordError, match="is no tuning log"):
        tune("lstm", **LAYER, output=path)
    assert path.read_bytes() == b"\x7fELF\n\x00\x01"


def test_a_run_that_was_killed_while_it_wrote_its_first_line_goes_on(tmp_path):
    path, whole = tmp_path / "log.jsonl", encode(start("ab-1"))
    for length in (1, 10, len(whole) // 2, len(whole) - 2):
        path.write_bytes(whole[:length])
        assert Journal.open(path, "ab", True).run == "ab-1"


def test_a_script_without_a_guard_is_told_what_to_do(tmp_path):
    (tmp_path / "script.py").write_text(CELL + "import ecornn.tune\necornn.tune.tune(Half(), hidden=8, target='cpu')\n")
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "RecursionError" not in done.stderr
    assert done.stderr.count("put the call under `if __name__") == 1


def test_a_cell_that_no_process_can_import_is_refused_at_once():
    code = CELL + "import ecornn.tune\necornn.tune.tune(Half(), hidden=8, target='cpu')\n"
    done = subprocess.run([sys.executable, "-"], input=code, capture_output=True, text=True, check=False)
    assert "CellError: cell 'half': define its class at the top level of a file" in done.stderr


@pytest.mark.parametrize(("text", "said"), [
    (CELL.replace('"half"', '"ha/lf"'), "letters, digits"), (CELL.replace('"half"', '"../half"'), "letters, digits"),
    (CELL.replace('{"w": (1, hidden, input)}', "7"), "must return names with shapes"),
    (CELL.replace('{"w": (1, hidden, input)}', '{"w": 7}'), "must return names with shapes"),
    (CELL + "    def __init__(self):\n        raise KeyError('no')\n", "KeyError: 'no'"),
    ("import sys\nsys.exit(3)\n", "SystemExit: 3")])
def test_a_cell_that_cannot_be_used_is_an_error_that_names_it(text, said, tmp_path):
    (tmp_path / "cells.py").write_text(text)
    with pytest.raises(CellError, match=said):
        load_cell(f"{tmp_path / 'cells.py'}:Half").identity()


def test_what_is_wrong_with_the_last_layer_is_said_before_the_first_is_tuned(folder):  # noqa: F811
    done = CliRunner().invoke(main, ["tune", "--cell", "lstm", "--cell", "nope", "--hidden", "8", "--target", "cpu"])
    assert done.exit_code == 2 and "cell='nope'" in done.output and not folder.exists()


def test_ipv6s_loopback_is_loopback():
    assert Tracker.parse("[::1]:9190", "k") == Tracker("::1", 9190, "k")


def test_ctrl_c_stops_what_a_process_does_before_anything_is_built(monkeypatch, tmp_path):
    """And the session starts other processes for its next run."""
    monkeypatch.setattr("ecornn.tune.session.present", lambda _: DEVICE)
    with Session("cpu", entries=ENTRIES) as session:
        first, begun = session.pool, tmp_path / "begun"
        with pytest.raises(KeyboardInterrupt), ProcessEvaluator(
                make(), "lstm", lambda _: first.builders[0].call("tune_fakes:sleep_on", str(begun), bool, 1e6), first,
                limit=1e6, seed=0):
            until(begun.exists)
            raise KeyboardInterrupt
        assert first.closed and session.pool is not first


@pytest.mark.slow
@pytest.mark.parametrize("which", [
    signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.exhaustive)])
def test_a_signal_that_ends_it_leaves_nothing_behind(which, tmp_path, start):
    log, temporary = tmp_path / "log.jsonl", tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-m", "ecornn", "tune", "--cell", "lstm", "--hidden", "64", "--target", "cpu"]
    running = start([*command, "--no-torch", "--output", str(log)], env={**os.environ, "TMPDIR": str(temporary)},
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not log.exists() or len(read(log).trials()) < 2:
        assert running.poll() is None
        time.sleep(0.1)
    below = psutil.Process(running.pid).children(recursive=True)
    running.send_signal(which)
    said = running.communicate()[0]
    assert running.returncode == 130 and "the same command goes on" in said
    all_end(below)
    assert not list(temporary.iterdir())


def test_built_in_cells_have_names_that_files_may_have():
    for name in ecornn.cells.BUILTIN:
        assert get(name).identity()

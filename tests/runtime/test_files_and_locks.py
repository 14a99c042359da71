"""Files on machines that go wrong: locks of stopped processes, file systems without locks, folders without room."""

import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tvm_ffi
from events import LIMIT, Clock
from msgspec.structs import replace

import ecornn
from ecornn import file_locks, temporary
from ecornn.build import cache, commands, link
from ecornn.compiler import generate, plan
from ecornn.errors import BuildError, EcornnError, ModuleError, RecordError
from ecornn.runtime.loader import from_bytes
from ecornn.tune import log
from ecornn.tune.pool import YOUNG, Scratch
from ecornn.tune.record import Finish

CACHE = """
from ecornn.build import cache
def make():
    print("holds", flush=True)
    input()
    return b"theirs"
cache.entry("cubin", ("a",), make)
"""
LOG = """
import sys
from filelock import FileLock
with FileLock(sys.argv[1] + ".lock"):
    print("holds", flush=True)
    input()
"""
pytestmark = pytest.mark.filterwarnings("ignore:flock not supported")  # filelock says so, and goes on
RECORD = Finish(run="a-1", time="2026-11-21T20:00:00Z", reason="trials", trials=0, seconds=1.0, best=None, best_us=None,
                default=None, default_us=None)


@contextmanager
def stopped(program: str, *words: object) -> Iterator[subprocess.Popen[str]]:
    """A process that is stopped as soon as it says that it holds the lock."""
    process = subprocess.Popen([sys.executable, "-c", program, *map(str, words)], text=True, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == "holds\n"
        process.send_signal(signal.SIGSTOP)
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(file_locks, "SAID", 0.05)
    monkeypatch.setattr(file_locks, "LOOK", 0.05)
    monkeypatch.setattr(file_locks, "time", Clock(tick=0.02))  # told of before it ends, however slowly that goes
    return tmp_path / "cache"


def test_what_a_stopped_process_compiles_is_compiled_here_too(root: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any):
    monkeypatch.setattr(cache, "LIMIT", 0.3)
    with stopped(CACHE) as other:
        assert cache.entry("cubin", ("a",), lambda: b"ours") == b"ours"
        said = [record.getMessage() for record in caplog.records if record.name == "ecornn"]
        assert said[0].startswith("waiting for another process that holds ")
        assert said[-1].startswith("waited ") and said[-1].endswith("compiles the same code itself")
        other.send_signal(signal.SIGCONT)  # what it makes takes the place of ours
        other.communicate("go on\n")
    assert cache.entry("cubin", ("a",), lambda: b"other") == b"theirs"


def test_who_waits_takes_what_a_third_process_has_made(root: Path, monkeypatch: pytest.MonkeyPatch):
    looks = threading.Event()
    monkeypatch.setattr(file_locks.logging.getLogger("ecornn"), "warning", lambda *_: looks.set())
    monkeypatch.setattr(cache, "LIMIT", float("inf"))
    found: list[bytes] = []
    with stopped(CACHE):
        waiting = threading.Thread(target=lambda: found.append(cache.entry("cubin", ("a",), lambda: b"ours")))
        waiting.start()
        assert looks.wait(LIMIT)
        with monkeypatch.context() as third:
            third.setattr(cache, "LIMIT", 0.0)
            assert cache.entry("cubin", ("a",), lambda: b"third") == b"third"
        waiting.join(LIMIT)
    assert found == [b"third"]


@pytest.mark.parametrize("write", [lambda path: log.append(path, RECORD), lambda path: log.rewrite(path, lambda _: [])])
def test_a_log_that_a_stopped_process_holds_is_an_error(write, root, monkeypatch):
    monkeypatch.setattr(log, "LIMIT", 0.3)
    path = root.parent / "log.jsonl"
    log.append(path, RECORD)
    with stopped(LOG, path), pytest.raises(RecordError, match=r"has held .*log.jsonl.lock for 0 s; it may be"):
        write(path)
    write(path)
    assert len(log.read(path).lines) in (0, 2)


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(file: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    monkeypatch.setattr(fcntl, "flock", missing)


def test_the_build_cache_keeps_what_was_made_without_locks(root: Path, without_locks: None):
    made = iter([b"code"])  # once
    assert [cache.entry("cubin", ("a",), made.__next__) for _ in range(2)] == [b"code"] * 2


def test_logs_are_written_without_locks(tmp_path: Path, without_locks: None):
    for run in ("a-1", "b-1"):
        log.append(tmp_path / "log.jsonl", replace(RECORD, run=run))
    assert len(log.read(tmp_path / "log.jsonl").lines) == 2


def test_a_living_run_keeps_its_folder_without_locks(tmp_path, without_locks, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    alive = Scratch()
    os.utime(alive.name, (time.time() - 2 * YOUNG,) * 2)
    last = Scratch()
    assert sorted(tmp_path.iterdir()) == sorted([Path(alive.name), Path(last.name)])
    for scratch in (alive, last):
        scratch.cleanup()
    assert not list(tmp_path.iterdir())


LIMITED = """
import resource, sys
import ecornn
from ecornn.errors import EcornnError
most = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
try:
    ecornn.compile("rnn_tanh", hidden=8, batch=1, target="cpu")
except EcornnError as error:
    print(type(error).__name__, error)
"""


def test_a_full_temporary_folder_is_an_error_that_can_be_caught(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    with pytest.raises(BuildError, match="less than 16 MiB left"):
        generate(plan("rnn_tanh", hidden=8, target="cpu"))


@pytest.mark.parametrize("most", [5, 4096])
def test_a_limit_of_file_sizes_is_named(most: int):
    """LLVM, and the linker, would be ended by it."""
    found = subprocess.run([sys.executable, "-c", LIMITED, str(most)], capture_output=True, text=True,
                           env={**os.environ, "ECORNN_CACHE": "off"})
    assert found.returncode == 0 and found.stdout.startswith("BuildError "), found.stderr
    if most > 100:  # of fewer bytes Python has no temporary folder
        assert f"may have at most {most} bytes: raise that limit (ulimit -f)" in found.stdout


def test_a_tool_that_a_limit_of_file_sizes_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "write.sh").write_text("ulimit -f 1; head -c 1000000 /dev/zero > made")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))  # as of this process, which has another
    with pytest.raises(BuildError, match=r"^sh failed:(.|\n)*at most 1024 bytes: raise that limit"):
        link.run_tool(["sh", "write.sh"], tmp_path)


@pytest.mark.parametrize("call", [
    lambda: ecornn.compile("rnn_tanh", hidden=8, target="cpu"), lambda: from_bytes("a.so", b""), Scratch,
    lambda: commands.run(["true"], 5)], ids=["compile", "load", "tune", "command"])
def test_without_a_temporary_folder_tmpdir_is_named(call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere", "/proc"])
    with pytest.raises(EcornnError, match=r"No usable temporary directory .* set TMPDIR to a folder where"):
        call()


def test_a_folder_that_is_mounted_noexec_is_named(monkeypatch: pytest.MonkeyPatch):
    """The dynamic loader says "failed to map segment from shared object"."""
    module = ecornn.compile("rnn_tanh", hidden=8, target="cpu")  # its file lives as long
    content = module.path.read_bytes()

    def refuse(path: str) -> None:
        raise RuntimeError(f"{path}: failed to map segment from shared object")
    monkeypatch.setattr("ecornn.runtime.library._modules", {})
    monkeypatch.setattr(tvm_ffi, "load_module", refuse)
    for flags, told in ((os.ST_NOEXEC, True), (0, False)):
        monkeypatch.setattr(os, "statvfs", lambda path, flags=flags: SimpleNamespace(f_flag=flags))
        with pytest.raises(ModuleError, match="failed to map segment") as error:
            from_bytes("layer.so", content)
        assert ("is mounted noexec: set TMPDIR to a folder from which" in str(error.value)) == told


def test_a_temporary_folder_goes_with_what_lives_in_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    owner: set[int] = temporary.lasting(lambda folder: (folder / "file").touch() or set())
    assert len([*tmp_path.glob("*/file")]) == 1
    del owner
    assert not [*tmp_path.iterdir()]
    with pytest.raises(BuildError, match="nothing"):
        temporary.lasting(lambda folder: (_ for _ in ()).throw(BuildError("nothing")))
    assert not [*tmp_path.iterdir()]

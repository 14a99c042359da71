"""Records for others and from them: a source is taken whole or not at all; a change of a repository of logs adds
records, or is refused."""

import hashlib
import lzma
import os
import random
import shutil
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs
from rooms import ROOT
from test_cli import folder, from_json, run  # noqa: F401  (a user's folder of its own for each test)
from test_log_commands import failed, lines, timed
from test_records import H100, finish, mutated, start

from ecornn.errors import ArgumentError, RecordError
from ecornn.tune.log import append, packed, parse, read
from ecornn.tune.record import encode
from ecornn.tune.selection import merge
from ecornn.tune.sharing import FOLDER, add, entries, faults, file_name
from ecornn.tune.sources import fetched

H200 = structs.replace(H100, name="NVIDIA H200")
NOW = {"persistent": 1}
AUTHOR = {f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER")
          for what, value in (("NAME", "A"), ("EMAIL", "a@example.org"))}
FEW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def log_of(*records: object) -> bytes:
    return b"".join(map(encode, records))


def silent(_: str) -> None:
    pass


@pytest.fixture(autouse=True)
def author(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in AUTHOR.items():
        monkeypatch.setenv(name, value)


def git(place: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", place, *arguments], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    place = tmp_path / "clone"
    git(tmp_path, "init", "--quiet", "--initial-branch=main", str(place))
    git(place, "commit", "--quiet", "--allow-empty", "--message=first")
    return place


# Changes of a repository of logs.

owned = st.lists(st.builds(
    timed, st.floats(1.0, 9.0), run=st.sampled_from(["ab-1", "ab-2"]), index=st.integers(0, 9),
    device=st.just(H100)) | st.builds(timed, st.floats(1.0, 9.0), run=st.just("cd-1"), index=st.integers(0, 9),
                                      device=st.just(H200)), min_size=1, max_size=6)


def added(place: Path, records: list) -> list[Path]:
    return [*add(place, merge(lines(records)).lines, NOW)]


@contextmanager
def twice(records: list) -> Iterator[tuple[Path, Path]]:
    """Gives two copies of a repository with these records: as it was before a change, and the one to change."""
    with TemporaryDirectory() as name:
        before, after = Path(name, "before"), Path(name, "after")
        before.mkdir()
        added(before, records)
        shutil.copytree(before, after)
        yield before, after


def records_of(place: Path) -> list:
    return merge(line for path in entries(place).values() if path.name.endswith(".xz")
                 for line in read(path).lines).records


@given(owned, owned)
@FEW
def test_what_is_pushed_keeps_the_rules_and_is_pushed_once(theirs, mine):
    with twice(theirs) as (before, after):
        added(after, mine)
        assert faults(before, after) == [] and added(after, mine) == []
        had = merge(lines(theirs)).records
        assert all(record in records_of(after) for record in had)


def changed_text(rng: random.Random, path: Path) -> None:
    path.write_bytes(packed(mutated(rng, lzma.decompress(path.read_bytes())), path))


def changed_file(rng: random.Random, path: Path) -> None:
    path.write_bytes(mutated(rng, path.read_bytes()))


def renamed(rng: random.Random, path: Path) -> None:
    path.rename(path.with_name(rng.choice(["a.jsonl.xz", path.name.upper(), f"x{path.name}", f"{path.name}.gz"])))


def moved(rng: random.Random, path: Path) -> None:
    path.rename(path.parent.parent / path.name)


def linked(rng: random.Random, path: Path) -> None:
    real = path.rename(path.parent.parent.parent / f"{rng.random()}")
    path.symlink_to(real)


def beside(rng: random.Random, path: Path) -> None:
    path.with_name(rng.choice(["conftest.py", "__init__.py", ".hidden", f"{path.name}.lock"])).write_bytes(b"")


def doubled(rng: random.Random, path: Path) -> None:
    """Another file whose name is right, with a record that contradicts one that is there."""
    trials = read(path).trials()
    other = structs.replace(trials[0], times=structs.replace(trials[0].times, p80=trials[0].times.p80, runs=(
        *trials[0].times.runs, trials[0].times.median * 1.5)))
    text = encode(other)
    place = path.with_name(file_name(path.name.rpartition("-")[0], text))
    place.write_bytes(packed(text, place))


CHANGES = changed_text, changed_text, changed_file, renamed, moved, linked, beside, doubled


@given(owned, owned, st.sampled_from(CHANGES), st.randoms(use_true_random=False))
@FEW
def test_a_change_that_is_damaged_is_refused_or_says_the_same(theirs, mine, change, rng):
    with twice(theirs) as (before, after):
        added(after, mine)
        good = records_of(after)
        change(rng, rng.choice([*(after / FOLDER).iterdir()]))
        found = faults(before, after)
        assert found or records_of(after) == good
        assert found or change in (changed_text, changed_file)


@given(owned, st.data())
@FEW
def test_a_file_that_goes_is_missed(theirs, data):
    with twice(theirs) as (before, after):
        data.draw(st.sampled_from([*(after / FOLDER).iterdir()])).unlink()
        (fault,) = faults(before, after)
        assert "is gone" in fault


def test_two_devices_in_one_file_are_refused(tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    text = log_of(timed(1.0, run="ab-1"), timed(1.0, run="cd-1", device=H200))
    path = after / FOLDER / file_name("nvidia-h200-sm-90a", text)
    path.parent.mkdir(parents=True)
    path.write_bytes(packed(text, path))
    assert "has records of 2 devices" in run("log", "check", after, "--base", before, code=1)
    assert from_json("log", "check", after, "--base", before, code=1)["faults"]
    assert "--base=" in run("log", "check", after, "--base", after, code=2)
    assert "FOLDER=" in run("log", "check", tmp_path / "none", "--base", before, code=2)


def test_a_damaged_line_is_refused_though_the_others_are_whole(tmp_path):
    (tmp_path / "before").mkdir()
    (path,) = added(tmp_path / "after", [timed(2.0)])
    assert faults(tmp_path / "before", tmp_path / "after") == []
    path.write_bytes(packed(lzma.decompress(path.read_bytes()) + b"not json\n", path))
    (fault,) = faults(tmp_path / "before", tmp_path / "after")
    assert f"{path.name}:2: no JSON object" in fault


def test_push_and_the_workflow_of_a_repository_of_logs(folder, clone, tmp_path, monkeypatch):  # noqa: F811
    """As on a server: the branch is merged, and what the workflow runs says yes; then no, of a branch that is wrong."""
    append(folder / "mine.jsonl", start(), timed(2.0), failed("run: /home/me/secret", index=1))  # it may go on
    append(folder / "imported.jsonl", timed(1.0, run="ef-1"))
    text = run("log", "push", clone, "--branch", "h100")
    assert "2 records of 1 layers" in text and "NVIDIA H100 80GB HBM3 (sm_90a)" in text and "tvm 0.27" in text
    assert git(clone, "status", "--short") == "" and not (clone / FOLDER).exists()  # what is checked out stays
    assert git(clone, "worktree", "list").count("\n") == 1
    assert git(clone, "log", "-1", "--format=%B", "h100").strip() in text
    assert "a branch named 'h100' already exists" in run("log", "push", clone, "--branch", "h100", code=2)
    assert "--branch='b' in FOLDER" in run("log", "push", tmp_path, "--branch", "b", code=2)

    workflow = yaml.safe_load((ROOT / "examples/logs_repository/.github/workflows/check.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"} and workflow[True].keys() == {"pull_request"}
    *_, check = workflow["jobs"]["check"]["steps"]

    def checked(name: str, branch: str) -> subprocess.CompletedProcess:
        place = tmp_path / name
        place.mkdir()
        git(place, "clone", "--quiet", "--no-local", str(clone), "after")
        git(place / "after", "merge", "--quiet", "--no-ff", "--no-edit", f"origin/{branch}")
        script = check["run"].replace("ecornn log", f"{sys.executable} -m ecornn log")
        return subprocess.run(["bash", "-e", "-c", script], cwd=place, capture_output=True, text=True)

    done = checked("good", "h100")
    assert done.returncode == 0 and "breaks no rule" in done.stdout, done.stderr
    git(clone, "switch", "--quiet", "h100")
    assert "already has all of these records" in run("log", "push", clone, code=2)
    (path,) = (clone / FOLDER).iterdir()
    assert b"secret" not in lzma.decompress(path.read_bytes())
    git(clone, "rm", "--quiet", str(path))
    git(clone, "commit", "--quiet", "--message=gone")
    git(clone, "branch", "--quiet", "wrong")
    git(clone, "switch", "--quiet", "main")
    git(clone, "merge", "--quiet", "h100~")
    git(clone, "commit", "--quiet", "--allow-empty", "--message=more")
    done = checked("bad", "wrong")
    assert done.returncode == 1 and f"{path.name} is gone" in done.stdout, done.stderr


def test_push_writes_into_a_folder(folder, tmp_path):  # noqa: F811
    append(folder / "mine.jsonl", timed(2.0), timed(3.0, run="cd-1", device=H200))
    shared = tmp_path / "shared"
    shared.mkdir()
    found = from_json("log", "push", shared, "--device", "h200")
    (name,) = found["files"]
    assert name.startswith(f"{FOLDER}/nvidia-h200-sm-90a-") and (found["records"], found["branch"]) == (1, None)
    assert "H200" in found["text"] and "H100" not in found["text"]
    assert len(from_json("log", "push", shared)["files"]) == 1  # the other device's
    assert sorted(p.name for p in shared.rglob("*")) == sorted([FOLDER, *(p.name for p in shared.glob("*/*.jsonl.xz"))])


# Sources.

def test_pull_says_what_would_change_and_changes_it(folder, clone, tmp_path):  # noqa: F811
    append(folder / "mine.jsonl", start(), timed(2.0, revision=now()), timed(5.0, index=1))
    theirs = clone / FOLDER / "theirs.jsonl"
    append(theirs, timed(1.0, run="cd-1", revision=now()), timed(7.0, index=1), timed(3.0, run="ef-1", device=H200),
           start())
    append(tmp_path / "secret.jsonl", start("ef-9"))
    theirs.with_name("link.jsonl").symlink_to(tmp_path / "secret.jsonl")
    (clone / "other.jsonl").write_bytes(theirs.read_bytes())  # the same again
    git(clone, "add", ".")
    git(clone, "commit", "--quiet", "--message=logs")
    url = f"file://{clone}"
    assert "link.jsonl:1: no JSON object" in run("log", "pull", url, code=2)
    assert not (folder / "imported.jsonl").exists()
    git(clone, "rm", "--quiet", f"{FOLDER}/link.jsonl")
    git(clone, "commit", "--quiet", "--message=without a link")
    found = from_json("log", "pull", url, "--dry-run")
    assert found["devices"] == {
        f"{H100.name} (sm_90a)": {"records": 1, "first": 0, "faster": 1, "contradictions": 2},
        "NVIDIA H200 (sm_90a)": {"records": 1, "first": 1, "faster": 0, "contradictions": 0}}
    assert found["dry_run"] and not (folder / "imported.jsonl").exists()
    said = run("log", "pull", url)
    assert "NVIDIA H200 (sm_90a): new records: 1; layers that had none: 1;" in said and "added 3 records" in said
    assert {line.record.run for line in read(folder / "imported.jsonl").lines} == {"ab-1", "cd-1", "ef-1"}
    for source in (clone, theirs):
        assert "added 0 records" in run("log", "pull", source)


def now() -> int:
    from ecornn.schedules import revisions

    return revisions()["persistent"]


@pytest.mark.parametrize("source, options, said", [
    ("none", (), "SOURCE='none': expected a log"),
    ("http://example.org/a.jsonl", (), "SOURCE='http://example.org/a.jsonl': expected"),
    ("ext::sh -c id", (), ": expected a log"), ("git://example.org/logs", (), ": expected a log"),
    (".", ("--sha256", "0" * 64), "of a SOURCE that is one file"), ("a.jsonl", ("--sha256", "12"), "64 hexadecimal"),
    ("a.jsonl", ("--sha256", "0" * 64), "it is another file"), ("file:///nowhere", (), "cannot clone SOURCE="),
    ("empty", (), "has no records"), ("empty.jsonl", (), "has no records")])
def test_sources_that_are_refused(source, options, said, folder, tmp_path):  # noqa: F811
    append(tmp_path / "a.jsonl", start())
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.jsonl").touch()
    assert said in run("log", "pull", source, *options, code=2) and not folder.exists()


def test_without_git_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RecordError, match="git is not installed"):
        fetched("file:///logs", 1 << 20, None, silent)


def fake_git(tmp_path: Path, script: str) -> str:
    place = tmp_path / "bin"
    place.mkdir()
    (place / "git").write_text(f"#!/bin/bash\n{script}\nexec sleep 1000\n")
    (place / "git").chmod(0o755)
    return f"{place}:{os.environ['PATH']}"


def test_a_repository_that_is_too_large_is_left(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", fake_git(tmp_path, 'mkdir "${@: -1}"; head -c 3000000 /dev/zero >"${@: -1}/pack"'))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "tmp").mkdir()
    with pytest.raises(RecordError, match="has more than 2 MiB; --max-size"):
        fetched("file:///logs", 2 << 20, None, silent)
    assert not [*(tmp_path / "tmp").iterdir()]
    monkeypatch.setattr("tempfile.tempdir", None)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_a_clone_and_changes_nothing(number, folder, tmp_path):  # noqa: F811
    append(folder / "imported.jsonl", start())
    before, temporary, mark = (folder / "imported.jsonl").read_bytes(), tmp_path / "tmp", tmp_path / "pid"
    temporary.mkdir()
    path = fake_git(tmp_path, f'mkdir "${{@: -1}}"; echo $$ >{mark}')
    process = subprocess.Popen([sys.executable, "-m", "ecornn", "log", "pull", "file:///logs"], stderr=subprocess.PIPE,
                               env=os.environ | {"PATH": path, "TMPDIR": str(temporary)})
    assert process.stderr is not None and any(b"so far" in line for line in process.stderr)
    process.send_signal(number)
    process.communicate()
    assert process.returncode == 130 and not [*temporary.iterdir()]
    assert not psutil.pid_exists(int(mark.read_text()))
    assert (folder / "imported.jsonl").read_bytes() == before


@given(st.randoms(use_true_random=False), st.sampled_from([".jsonl", ".jsonl.xz", ".jsonl.gz"]))
@FEW
def test_a_damaged_file_is_taken_whole_or_refused(rng, suffix):
    text = log_of(start(), timed(2.0), finish())
    with TemporaryDirectory() as name:
        path = Path(name, f"a{suffix}")
        path.write_bytes(packed(mutated(rng, text), path) if rng.random() < 0.5 else mutated(rng, packed(text, path)))
        try:
            log = fetched(str(path), 1 << 20, None, silent)
        except RecordError:
            return
        assert log.lines and len(log.problems) == len(log.newer)
        assert parse(log_of(*(line.record for line in log.lines)), path).problems == []


@dataclass
class Server:
    """An HTTPS server on this machine; ``answer`` writes what a request gets."""

    url: str = ""
    answer: Callable[[BaseHTTPRequestHandler], None] = field(default=lambda handler: None)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        # Python's standard library serves TLS but makes no certificates
        pytest.skip("openssl makes the certificate")
    place = tmp_path_factory.mktemp("certificate")
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                    "-keyout", place / "key.pem", "-out", place / "certificate.pem", "-days", "2", "-subj",
                    "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"], check=True, capture_output=True)
    return place


@pytest.fixture
def server(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    made = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            made.answer(self)
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:  # a client that trusts nobody hangs up
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "certificate.pem", certificate / "key.pem")
    with Quiet(("localhost", 0), Handler) as http:
        http.socket = context.wrap_socket(http.socket, server_side=True)
        threading.Thread(target=http.serve_forever, daemon=True).start()
        made.url = f"https://localhost:{http.server_address[1]}"
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate / "certificate.pem"))
        for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield made
        http.shutdown()


def sending(data: bytes, size: int | None = None, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(302 if "Location" in headers else 200)
        for name, value in ({} if size is None else {"Content-Length": str(size)} | headers).items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(data)
    return answer


def test_pull_from_an_address(server, folder, monkeypatch):  # noqa: F811
    data = packed(log_of(start(), timed(2.0), finish()), Path("a.jsonl.xz"))
    server.answer = sending(data, len(data))
    url, digest = f"{server.url}/some/a.jsonl.xz?raw=1", hashlib.sha256(data).hexdigest()
    assert "--sha256=" in run("log", "pull", url, "--sha256", "0" * 64, code=2) and not folder.exists()
    assert "added 3 records" in run("log", "pull", url, "--sha256", digest.upper())
    newer = log_of(start("ef-1")) + b'{"kind":"trial","v":9}\n'
    server.answer = sending(newer, len(newer))
    said = run("log", "pull", f"{server.url}/b.jsonl")
    assert "skipped b.jsonl:2: version 9" in said and "added 1 records" in said
    server.answer = sending(bytes(2 << 20), 2 << 20)
    assert "more than 1 MiB" in run("log", "pull", url, "--max-size", "1", code=2)
    server.answer = sending(b"", 0, Location=f"http://{server.url[8:]}/a.jsonl")
    assert "unknown url type: http" in run("log", "pull", url, code=2)
    server.answer = lambda handler: handler.send_error(404)
    assert "cannot download SOURCE=" in run("log", "pull", url, code=2)
    monkeypatch.delenv("SSL_CERT_FILE")
    assert "certificate verify failed" in run("log", "pull", url, code=2)


@given(st.data())
@FEW
def test_a_broken_download_changes_nothing(server, data):
    whole = log_of(start(), timed(2.0), finish())
    cut = data.draw(st.integers(0, len(whole) - 1))
    size = data.draw(st.sampled_from([None, len(whole)]))  # without a length the last line says that it is torn
    server.answer = sending(whole[:cut], size)
    try:
        log = fetched(f"{server.url}/a.jsonl", 1 << 20, None, silent)
    except RecordError:
        return
    ends = [place for place in range(len(whole)) if whole[place:place + 1] == b"\n"]
    assert size is None and (cut in ends or cut - 1 in ends)  # whole lines alone
    assert log.problems == []


def test_a_text_that_is_no_digest_is_refused_before_anything_is_asked_for():
    with pytest.raises(ArgumentError, match="--sha256"):
        fetched("https://localhost:1/a.jsonl", 1, "z" * 64, silent)

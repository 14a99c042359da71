"""Measuring through TVM's RPC: a tracker and servers on this machine, one of which is killed."""

import contextlib
import json
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import msgspec
import psutil
import pytest
from events import LIMIT, Clock, all_end, until
from refusals import refused
from rpc_servers import kill
from test_cli import folder, run  # noqa: F401  (a user's folder of its own for each test)
from tune_fakes import ENTRIES

from ecornn.errors import ArgumentError, DeviceError, ScheduleError, ServerError
from ecornn.tune import Session, pool, remote
from ecornn.tune.log import read
from ecornn.tune.pool import Pool
from ecornn.tune.remote import HANDSHAKE, WARM, NoServer, Tracker, outliving, require_loopback, start
from ecornn.tune.timing import Measure
from ecornn.worker import WorkerError

asked: list[str] = []  # in a worker process


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def tracker() -> Iterator[Tracker]:
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "tvm.exec.rpc_tracker", "--host", "127.0.0.1",
                                "--port", str(port), "--port-end", str(port + 1), "--silent"])
    try:
        until(lambda: listens(port))
        yield Tracker("127.0.0.1", port, "test")
    finally:
        kill(process)
        process.wait()


@contextlib.contextmanager
def servers(tracker: Tracker, count: int, target: str = "cpu") -> Iterator[list[subprocess.Popen]]:
    command = [sys.executable, "-m", "ecornn", "serve", "--tracker", str(tracker),
               "--key", tracker.key, "--target", target, "--json"]
    started = [subprocess.Popen([*command, "--port", str(free_port())], stdout=subprocess.PIPE, text=True)
               for _ in range(count)]
    try:
        until(lambda: tracker.servers() == count)
        yield started
    finally:
        for process in started:
            kill(process)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def until_it_serves(tracker: Tracker, *passing: type[Exception]) -> None:
    def serves() -> bool:
        with contextlib.suppress(*passing):
            return remote._describe(remote._request(tracker)).device.kind == "llvm"
        return False
    until(serves)


def the_child_of(process: psutil.Process) -> psutil.Process:
    until(lambda: len(process.children()) == 1)
    return process.children()[0]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_server_that_is_killed_costs_a_retry_and_nothing_else(target: str, tracker, tmp_path):
    path, killed = tmp_path / "log.jsonl", []
    with servers(tracker, 2, target) as running, Session(target, tracker=tracker) as session:

        def report(now) -> None:
            if now.done >= 3 and not killed:
                kill(running[0])  # as when the host goes down
                killed.append(now.done)
        result = session.tune("rnn_tanh", hidden=16, batch=3, seq=12, dtype="float32", trials=8, output=path,
                              report=report)
        assert len(session.pool.measurers) == 2 and not session.pool.local
    trials = [t for t in read(path).trials() if t.stage == "search"]
    assert killed and len(trials) == 8 and not result.failures and all(t.times and t.check <= 1e-5 for t in trials)
    assert result.finish.reason == "trials" and result.best is not None


@pytest.mark.slow
def test_the_command_line_and_a_server_without_its_parent(tracker, tmp_path):
    output = tmp_path / "log.jsonl"
    with servers(tracker, 1) as (server,):
        assert server.stdout is not None
        where = json.loads("".join(iter(server.stdout.readline, "}\n")) + "}")  # said once it listens
        assert where["key"] == tracker.key and where["tracker"] == str(tracker) and where["port"] > 0
        said = run("tune", "--cell", "rnn_tanh", "--hidden", "16", "--batch", "2", "--seq", "8", "--trials", "3",
                   "--tracker", tracker, "--key", tracker.key, "--output", output)
        trials = read(output).trials()
        assert "best: cpu_sequence" in said and len(trials) >= 3 and f"--target {trials[0].device.arch} -o" in said
        below = psutil.Process(server.pid).children(recursive=True)
        assert below
        server.kill()  # alone: the processes that it started notice
        server.wait()
        all_end(below)
        until(lambda: tracker.servers() == 0)


@pytest.mark.slow
def test_a_list_of_layers_is_shared_by_servers_goes_on_and_outlives_one(tracker, tmp_path, start):
    """Killed: a server once there are a few trials, and the command itself a little later."""
    listed, output, each = tmp_path / "layers.txt", tmp_path / "log.jsonl", 5
    listed.write_text("# two lines, three layers\n--cell lstm --hidden 16 --batch 2 --seq 8\n\n"
                      "--cell rnn_tanh --cell gru --hidden 16 --batch 2 --seq 8  # and one more\n")
    command = [sys.executable, "-m", "ecornn", "tune", "--workloads", str(listed), "--trials", str(each), "--output",
               str(output), "--tracker", str(tracker), "--key", tracker.key]
    def trials() -> list:
        return [t for t in read(output).trials() if t.stage == "search"] if output.exists() else []
    with servers(tracker, 2) as running:
        first = start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        until(lambda: len({t.run for t in trials()}) >= 2)  # at once, a server each
        kill(running[0])  # as when the host goes down
        until(lambda: len(trials()) >= 6)
        first.send_signal(signal.SIGINT)
        said, _ = first.communicate()
        assert first.returncode == 130 and "run the same command again" in said, said
        done = trials()
        again = subprocess.run([*command, "--json"], capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert "[3/3] " in again.stderr and "resuming: " in again.stderr
    results = json.loads(again.stdout)
    assert {one["workload"]["cell"] for one in results} == {"lstm", "rnn_tanh", "gru"}
    assert all(one["finish"]["best"] and not one["failures"] for one in results)
    found = trials()
    assert found[:len(done)] == done
    assert all(t.times and t.check <= 1e-5 for t in found)  # of those that the killed server was at, too
    assert sorted(Counter(t.run for t in found).values()) == [each] * 3


@pytest.mark.slow
def test_a_server_outlives_its_sessions_and_says_where_it_cannot_go_on(tracker):
    with servers(tracker, 1) as (server,):
        listening, session = the_child_of(psutil.Process(server.pid)), remote._request(tracker)
        with pytest.raises(AttributeError):  # of an older server
            session.get_function(WARM + "er")
        serving = the_child_of(listening)
        folder = Path(serving.cwd())
        serving.kill()  # as the system does where memory ends
        serving.wait()
        until_it_serves(tracker, remote.NoServer, remote.LostServer)
        del session
        assert not folder.exists()
        until(lambda: not listening.children())
        with socket.create_connection(("127.0.0.1", int(server.args[-1]))) as stranger:
            stranger.sendall(struct.pack("<ii", 0xFF271, 1) + b"\xff")  # no UTF-8: TVM's thread that listens fails
            assert server.wait(LIMIT) == 1
    assert tracker.servers() == 0


@pytest.mark.slow
def test_a_connection_that_says_nothing_keeps_a_server_for_a_few_seconds(tracker):
    """Its one thread that listens waited for it without end."""
    with servers(tracker, 1) as (server,):
        (port,) = {c.laddr.port for p in psutil.Process(server.pid).children(recursive=True)
                   for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        with socket.create_connection(("127.0.0.1", port)):
            until_it_serves(tracker, remote.NoServer)  # it is known anew once it has given up the silent one


def test_a_session_may_be_silent_for_longer():
    limits = list[float | None]()
    with socket.socket() as connection:
        connection.settimeout(HANDSHAKE)
        outliving(lambda given: limits.append(given.gettimeout()))(connection)
    assert limits == [None]


def test_without_a_server_or_a_tracker_it_says_what_to_start(tracker):
    with pytest.raises(DeviceError, match="ecornn serve --tracker"):
        Session("cpu", tracker=Tracker(tracker.host, tracker.port, "nobody"))
    nowhere = f"127.0.0.1:{free_port()}"
    assert "tvm.exec.rpc_tracker" in run("tune", "--cell", "lstm", "--hidden", "8", "--tracker", nowhere, code=2)


def says(*words: bytes) -> Callable[[socket.socket, Tracker], None]:
    return lambda connection, _: [connection.sendall(word) for word in words] and None  # type: ignore[func-returns-value]


def packed(value: object) -> bytes:
    text = json.dumps(value).encode()
    return struct.pack("<i", len(text)) + text


def sends_to_itself(connection: socket.socket, here: Tracker) -> None:
    if connection.recv(4) == MAGIC:
        asked, summary = b"", [0, {"server_info": [{"key": f"server:{here.key}"}]}]
        connection.sendall(MAGIC)
        while word := connection.recv(1024):
            asked += word
            if asked.endswith(b"]"):
                only = len(json.loads(asked[4:])) == 1
                connection.sendall(packed(summary if only else [0, [here.host, here.port, "k"]]))
                asked = b""


MAGIC = struct.pack("<i", 0x2F271)
STRANGE = {"silent": says(), "closes": lambda connection, _: connection.close(), "stops": says(MAGIC),
           "web": says(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "half": says(MAGIC, b"\x10\0\0\0["),
           "no JSON": says(MAGIC, b"\x01\0\0\0?"), "a server that is stopped": sends_to_itself,
           **{name: says(MAGIC, packed(answer)) for name, answer in (
               ("fails", [-1, "no"]), ("number", 7), ("none", [0, {}]), ("keyless", [0, {"server_info": [3]}]))}}


@pytest.mark.parametrize("kind", STRANGE)
def test_what_never_answers_is_not_waited_for(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote, "ANSWER", 0.3 if kind in ("silent", "stops", "half") else LIMIT)
    monkeypatch.setattr(remote, "START", 1.0)  # the server's, which says nothing
    monkeypatch.setattr(remote, "WAIT", LIMIT)
    open_: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        here = Tracker("127.0.0.1", listening.getsockname()[1], "key")
        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    open_.append(listening.accept()[0])
                    threading.Thread(target=quietly, args=(open_[-1],), daemon=True).start()

        def quietly(connection: socket.socket) -> None:
            with contextlib.suppress(OSError):
                STRANGE[kind](connection, here)
        threading.Thread(target=serve, daemon=True).start()
        wanted = "^key='key': .*has not answered for 1 s" if "server" in kind else f"^tracker='{here}':"
        refused(DeviceError, wanted, here.describe, "cpu")
        if "server" not in kind:
            assert "the address of a running tracker" in run("serve", "--target", "cpu", "--tracker", here, code=2)
        listening.shutdown(socket.SHUT_RDWR)
    for connection in open_:
        connection.close()


def nobody(_: object) -> bool:
    raise NoServer("no free server with the key h100 at 127.0.0.1:9")


def test_a_run_whose_servers_are_gone_for_good_says_so(monkeypatch):
    monkeypatch.setattr(pool, "REST", 0.01)
    monkeypatch.setattr(pool, "time", clock := Clock(tick=10.0))
    began = clock.now
    with Pool(replace(ENTRIES, measure="test_tune_remote:nobody"), 1, local=False) as workers:
        with pytest.raises(ServerError, match=r"^no free server with the key h100 at 127\.0\.0\.1:9, for 90 s; "):
            workers.measure(None, bool, LIMIT)
        assert 90 < clock.now - began <= 120


def busy_every_other_time(request: str) -> bool:
    asked.append(request)
    if len(asked) % 2:
        raise NoServer("no free server")
    if request == "hangs":
        raise ScheduleError("took longer than 1 s and was stopped")  # as a server says
    return True


def test_a_server_that_answered_with_errors_alone_was_there(monkeypatch):
    """However long that took: the time without a server begins anew."""
    monkeypatch.setattr(pool, "REST", 0.01)
    monkeypatch.setattr(pool, "time", clock := Clock())
    with Pool(replace(ENTRIES, measure="test_tune_remote:busy_every_other_time"), 1, local=False) as workers:
        refused(WorkerError, "took longer", workers.measure, "hangs", bool, LIMIT)
        clock.sleep(2 * pool.ABSENCE)
        assert workers.measure("is busy", bool, LIMIT)


def test_other_machines_need_an_explicit_flag(tracker):
    refused(ArgumentError, "allow-remote", Tracker.parse, "10.1.2.3:9190", "k")
    assert Tracker.parse("10.1.2.3:9190", "k", allow_remote=True).port == 9190
    assert Tracker.parse("[::1]:9190", "k") == Tracker("::1", 9190, "k")  # IPv6's loopback is loopback
    for address in ("9190", "host:", ":1", "host:0", "host:99999", "host:x"):
        refused(ArgumentError, "HOST:PORT", Tracker.parse, address, "k", allow_remote=True)
    require_loopback("host", "127.0.0.1", False)
    said = run("serve", "--tracker", tracker, "--host", "0.0.0.0", "--target", "cpu", code=2)
    assert "--allow-remote" in said and "run any code" in said


def test_an_address_or_port_where_nothing_can_listen_is_named(tracker):
    serve = ("serve", "--tracker", tracker, "--target", "cpu", "--allow-remote")
    for host in ("192.0.2.1", "no.such.host.invalid"):  # RFC 5737 and 2606: nobody's
        assert f"error: host='{host}':" in run(*serve, "--host", host, code=2)
    with contextlib.ExitStack() as stack:
        first = free_port() // 2
        for port in range(first, first + 100):
            taken = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                taken.bind(("127.0.0.1", port))
        assert f"error: port={first}:" in run(*serve, "--port", first, code=2)


def test_a_port_of_the_system_is_named(monkeypatch):
    # as TVM passes it on from the server's process
    monkeypatch.setattr("tvm.rpc.Server", Mock(side_effect=PermissionError("Traceback ...")))
    with pytest.raises(ArgumentError, match=r"^port=80: expected .* one of 80 to 179 free"):
        start("cpu", ("127.0.0.1", 9190), "k", port=80)


def test_files_outside_the_sessions_folder_are_refused(tmp_path):
    import tvm_ffi

    tvm_ffi.register_global_func("tvm.rpc.server.workpath", lambda name: str(tmp_path / name), override=True)
    for paths, answers in ((("../x.so",), "a.npz"), (("x.so",), "/etc/passwd"), ((str(Path("/x.so")),), "a.npz")):
        request = msgspec.json.encode(Measure(paths, answers, 1e-5, 3, 0)).decode()
        assert "outside" in json.loads(remote.measure_here(None, request, 1.0))["error"]

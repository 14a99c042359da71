"""The team of threads and the file of a CPU module: what it needs, and that it waits, ends and forks; and turns."""

import copy
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec.structs
import numpy as np
import pytest
import torch
from cpu_sample import Sample
from events import LIMIT, until
from exact import relative as error
from refusals import refused

import ecornn.torch
from ecornn import compiler, temporary
from ecornn.build import llvm
from ecornn.build.llvm import generate
from ecornn.compose import compose
from ecornn.errors import BuildError
from ecornn.host_cpu import detect
from ecornn.manifest import decode
from ecornn.numpy_reference import reference
from ecornn.program import Launch, Program
from ecornn.runtime import plan
from ecornn.runtime import turns as module
from ecornn.runtime.turns import CALLS, Turns
from ecornn.schedules.cpu.tiling import lanes_of


@pytest.fixture(scope="module", autouse=True)
def threads_of_ours() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ECORNN_OPENMP", "off")
        patch.setenv("ECORNN_CROWDED", "off")
        yield


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> Sample:
    return Sample(tmp_path_factory.mktemp("lstm"), "lstm", 32, 128, 4, 50)


def right(sample: Sample, seed: int = 0, threads: int = 2) -> bool:
    x, states = sample.inputs(20, 4, seed)
    y, _ = sample(x, states, threads=threads)
    weights = {f"{n}_l0": p.reshape(-1, *p.shape[2:]) for n, p in sample.parameters.items()}
    return error(y, reference("lstm", x, weights, states)[0]) < 1e-6


def tasks() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_needs_tvm_ffi_and_no_other_part_of_tvm(sample):
    undefined = subprocess.run(["nm", "-D", "--undefined-only", sample.file], capture_output=True,
                               text=True, check=True).stdout
    assert set(re.findall(r"\bTVM\w+", undefined)) == {
        "TVMFFIErrorSetRaisedFromCStr", "TVMFFIErrorSetRaisedFromCStrParts", "TVMFFIStringFromByteArray",
        "TVMFFIErrorMoveFromRaised", "TVMFFIObjectDecRef"}  # the last two: a C caller's error


def test_manifest(sample):
    manifest = decode(str(sample.module.manifest()))
    assert manifest.workload == sample.task.workload and manifest.device == detect()
    assert manifest.buffers == sample.program.buffers


@pytest.mark.parametrize("target", ["skylake-avx512", "znver4", "haswell", "znver3"])
@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh"])
def test_product_loops_keep_everything_in_registers(cell, target):
    planned = compiler.plan(cell, hidden=256, batch=20, seq=10, target=target, config={"pairs": 0, "project_pairs": 0})
    gates, config = {"lstm": 4, "gru": 3, "rnn_tanh": 1}[cell], planned.found.config
    _, *blocks = re.split(r"^(\.LBB\w+):.*$", compiler.generate(planned).emitted["asm"], flags=re.M)
    # what jumps to its own label, up to that jump
    loops = [body for label, text in zip(blocks[::2], blocks[1::2], strict=True)
             for body, *rest in [re.split(rf"^\tj\w+\t{re.escape(label)}$", text, maxsplit=1, flags=re.M)]
             if rest and "vfmadd" in body and "vbroadcastss\t" in body]
    # the hoisted product, that of a step, and its last rows where there are fewer, each with some gates at a time
    at_once = [config[knob] or gates for knob in ("project_gates", "gates")]
    project, step = (-(-gates // each) for each in at_once)
    assert len(loops) == project + step * (1 + bool(20 % config["rows"]))
    heights = {config["project_rows"], config["rows"], 20 % config["rows"]} - {0}
    widths = {config[columns] // gates * (min(each, gates - first))
              for columns, each in zip(("project_columns", "columns"), at_once, strict=True)
              for first in range(0, gates, each)}
    for body in loops:
        assert "rsp" not in body, "spilled"
        assert "gather" not in body
        fmas = len(re.findall(r"vfmadd.*%zmm" if lanes_of(planned.device) == 16 else r"vfmadd.*%ymm", body))
        states, weights = body.count("vbroadcastss\t"), body.count("vmovups\t")
        assert fmas % (min(at_once) * config["unroll"]) == 0
        # in each step every state meets all weights: none is loaded twice, however often LLVM unrolls the loop again
        assert states and weights
        assert any(states * width <= fmas and weights * height <= fmas for width in widths for height in heights)


def test_calls_from_several_threads_at_once(sample):
    with ThreadPoolExecutor(4) as workers:
        assert all(workers.map(lambda seed: all(right(sample, seed, threads=3) for _ in range(5)), range(4)))


def test_releases_the_gil(sample, monkeypatch):
    (x, states), run, span = sample.inputs(3000, 4), sample.module.run, list[float]()
    def timed(*arguments: int) -> None:
        span.append(time.perf_counter())
        run(*arguments)
        span.append(time.perf_counter())

    def most_within() -> int:
        span.clear()
        worker, seen = threading.Thread(target=lambda: sample(x, states, threads=1)), list[float]()
        worker.start()
        while worker.is_alive():
            seen.append(time.perf_counter())
            time.sleep(0.001)
        worker.join()
        begin, end = span
        return sum(begin < s < end for s in seen)

    monkeypatch.setattr(sample, "module", SimpleNamespace(run=timed))
    # never where the lock is held, and on a busy machine not in every call
    assert any(most_within() >= 5 for _ in range(100))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="has one processor only")
def test_a_thread_on_the_callers_processor_moves_away(sample):
    """Schedulers wake a thread beside its waker; a barrier then costs two context switches."""
    allowed, (first, *_) = os.sched_getaffinity(0), sorted(os.sched_getaffinity(0))
    x, states = sample.inputs(400, 4)
    sample(x, states, threads=2)
    others = {int(p.name) for p in Path("/proc/self/task").iterdir()} - {threading.get_native_id()}
    moved = 0
    try:
        os.sched_setaffinity(0, {first})  # of this thread only
        for _ in range(10):
            for tid in others:
                os.sched_setaffinity(tid, {first})  # brings the sleeping threads here
                os.sched_setaffinity(tid, allowed)
            sample(x, states, threads=2)
            places = {int(Path(f"/proc/self/task/{tid}/stat").read_text().rsplit(")", 1)[1].split()[36])
                      for tid in others}
            moved += places != {first}
            assert all(os.sched_getaffinity(tid) == allowed for tid in others)
    finally:
        os.sched_setaffinity(0, allowed)
    assert moved >= 8


def test_no_busy_threads_after_a_call(sample):
    assert right(sample, threads=4)
    others = [p for p in Path("/proc/self/task").iterdir() if p.name != str(threading.get_native_id())]
    assert len(others) >= 3
    until(lambda: all((p / "stat").read_text().rsplit(")", 1)[1].split()[0] == "S" for p in others if p.exists()))


def test_threads_end_with_the_module_and_several_share_them(tmp_path):
    program = "import sys; sys.path[:0] = sys.argv[2:]; import test_cpu_threads; test_cpu_threads.share(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path), *sys.path], capture_output=True, text=True,
                          env={**os.environ, "ECORNN_CROWDED": "off"}, check=False)
    assert done.returncode == 0, done.stderr


def share(folder: str) -> None:
    import tvm_ffi

    tvm_ffi.load_module = partial(tvm_ffi.load_module, keep_module_alive=False)
    def made(number: int) -> Any:
        (own := Path(folder, str(number))).mkdir()
        return Sample(own, "lstm", 32, 128, 4, 50, team=0)
    alone = made(0)
    x, states = alone.inputs(50, 4)
    before = tasks()
    alone(x, states, threads=4)
    assert tasks() == before + 3
    del alone
    gc.collect()
    assert tasks() <= before
    several = [made(1), made(2)]
    before = tasks()
    for one in several:
        one(x, states, threads=4)
    assert tasks() == before + 3
    with ThreadPoolExecutor(2) as pool:  # calls at the same time have a team each
        assert all(pool.map(lambda one: right(one, threads=4), several * 8))


@pytest.mark.parametrize("change, message", [
    ((0, 1, 0, 1), "positive"), ((1, 0, 0, 1), "positive"), ((1, 1, 0, 0), "threads"),
    ((1, 1, 0, 5000), "threads"), ((1, 1, 0), "number of arguments")])
def test_wrong_calls_are_refused(sample, change, message):
    refused((ValueError, TypeError), message, sample.module.run, *change, *[0] * len(sample.program.buffers))


def test_wrong_programs_are_refused(sample):
    unknown = msgspec.structs.replace(detect(), arch="pdp11")
    refused(BuildError, "pdp11", generate, sample.program, unknown)
    with pytest.raises(BuildError, match="Launch"):
        generate(Program.running({}, (), (Launch("f", 1, 32),)), detect())


def test_detect():
    found = detect()
    assert found.kind == "llvm" and found.arch not in ("", "native", "generic")
    assert found.arch == (os.environ.get("ECORNN_TEST_CPU") or found.arch)
    assert 1 <= found.cores <= len(os.sched_getaffinity(0)) and np.isfinite(found.l2) and found.memory > 1 << 28


def test_functions_compiled_apart_are_the_same_code():
    planned = compiler.plan("gru", hidden=9, input=5, batch=3, bidirectional=True, training=True)
    program = compose(planned.stack, planned.workload, planned.programs(), planned.overlap)
    together, apart = (llvm.generate(program, planned.device, apart=one) for one in (False, True))
    assert len(together.objects) == 1 and len(apart.objects) == len(program.functions) == 6
    def code(objects: dict[str, bytes], tmp: Path) -> dict[str, str]:
        """The instructions of each function, without addresses, targets of jumps, and the padding behind it."""
        found = {}
        for name, content in objects.items():
            (tmp / name).write_bytes(content)
            text = subprocess.run(["objdump", "-d", "--no-show-raw-insn", str(tmp / name)], capture_output=True,
                                  text=True, check=True).stdout
            for function, body in re.findall(r"<(\w+)>:\n((?:.+\n)+)", text):
                body = re.sub(r"^ *\w+:|\b[0-9a-f]+ <.*>|#.*|0x\w+\(%rip\)", "", body, flags=re.M)
                found[function] = re.sub(r"(\s+(data16|cs|nop[lw]?|xchg +%ax,%ax)\b.*)*\s*\Z", "", body)
        return found
    with temporary.folder() as folder:
        assert code(apart.objects, folder) == code(together.objects, folder)


@pytest.mark.parametrize(("nice", "expected"), [(0, 8), (10, 2)])
def test_a_process_that_others_go_before_compiles_less_at_once(nice, expected, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "nice", lambda _: nice)
    assert llvm.at_once() == expected


def come(turns: Turns, order: list[int], number: int) -> threading.Thread:
    def work() -> None:
        with turns:
            order.append(number)
    waiting, thread = len(turns._waiting), threading.Thread(target=work)
    thread.start()
    until(lambda: len(turns._waiting) == waiting + 1)
    return thread


def test_those_that_wait_come_in_their_order():
    turns, order = Turns(), list[int]()
    with turns:
        threads = [come(turns, order, number) for number in range(5)]
        assert not order
    for thread in threads:
        thread.join()
    assert order == [*range(5)] and not turns._inside and not turns._waiting


@pytest.mark.parametrize("places", [1, 2])
def test_no_more_at_once_than_there_are_places(places: int):
    turns, inside, most = Turns(places), list[int](), list[int]()
    def work(_: int) -> None:
        for _ in range(50):
            with turns:
                inside.append(0)
                most.append(len(inside))
                time.sleep(0.0001)
                inside.pop()

    with ThreadPoolExecutor(6) as threads:
        [*threads.map(work, range(6))]
    assert max(most) == places and len(most) == 300 and not turns._inside and not turns._waiting


def test_who_comes_again_soon_goes_on_for_a_few_calls(monkeypatch: pytest.MonkeyPatch):
    """And then waits for those that waited: in a turn that somebody waits for there are as many calls as may be."""
    monkeypatch.setattr(module, "SOON", LIMIT)
    monkeypatch.setattr(module, "PATIENCE", LIMIT)
    turns, order = Turns(), list[int]()
    with turns:
        pass
    with turns:  # this thread has come again
        other = come(turns, order, 1)
    for _ in range(CALLS):
        with turns:
            order.append(0)
    other.join()
    assert order == [0] * (CALLS - 2) + [1, 0, 0] and not turns._inside and not turns._waiting


@pytest.mark.parametrize("comes", ["nobody", "another"])
def test_nobody_waits_for_long_for_who_does_not_come_again(comes: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "SOON", LIMIT)
    monkeypatch.setattr(module, "PATIENCE", 0.05 if comes == "nobody" else 2 * LIMIT)
    turns, order = Turns(), list[int]()
    with turns:
        pass
    with turns:
        waits = come(turns, order, 1)
    if comes == "another":
        assert not order
        later = threading.Thread(target=lambda: order.append(2) if turns.__enter__() is None else None)
        later.start()
        later.join()
    waits.join(LIMIT)
    assert order == ([1] if comes == "nobody" else [1, 2])


def test_an_error_ends_a_turn():
    turns = Turns()
    with pytest.raises(KeyError), turns:
        raise KeyError
    with turns:
        pass


@pytest.fixture
def interruptible() -> Iterator[None]:
    def fail(*_: object) -> None:
        raise TimeoutError
    before = signal.signal(signal.SIGUSR1, fail)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_who_is_interrupted_does_not_keep_a_turn(interruptible: None):
    turns, order, leave = Turns(), list[int](), threading.Event()
    def hold() -> None:
        with turns:
            leave.wait()
    holder = threading.Thread(target=hold)
    holder.start()
    until(lambda: turns._inside)
    def interrupt() -> None:
        until(lambda: turns._waiting)
        os.kill(os.getpid(), signal.SIGUSR1)
    threading.Thread(target=interrupt).start()
    with pytest.raises(TimeoutError), turns:
        raise AssertionError("nobody has left")
    other = come(turns, order, 1)
    leave.set()
    holder.join()
    other.join()
    assert order == [1] and not turns._inside and not turns._waiting


def test_a_forked_child_begins_anew():
    turns = Turns()
    with turns:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(900)
            with turns:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_which_calls_take_turns(monkeypatch: pytest.MonkeyPatch):
    seen = list[object]()
    monkeypatch.setattr(plan, "in_turns", lambda function: lambda *given: seen.append(function(*given)))
    layer = torch.nn.RNN(7, 11)  # as other tests compile it
    theirs, model = copy.deepcopy(layer).double(), torch.nn.Sequential(layer)
    ecornn.torch.replace(model)
    for steps, taken in ((1, False), (1500, True), (5000, False)):
        x = torch.randn(steps, 1, 7)
        with torch.no_grad():
            wanted = theirs(x.double())[0]
            for _ in range(6):  # the short way is taken from the fourth on
                y = model(x)[0]
        assert bool(seen) is taken and float((y - wanted).norm()) <= 1e-5 * float(wanted.norm())
        seen.clear()

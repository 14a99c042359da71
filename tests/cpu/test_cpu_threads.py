"""The team of threads and the file of a CPU module: what it needs, and that it waits, ends and forks."""

import gc
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import msgspec.structs
import numpy as np
import pytest
from cpu_sample import Sample
from events import until
from limits import relative as error

from ecornn import compiler, temporary
from ecornn.build import llvm
from ecornn.build.llvm import generate
from ecornn.compose import compose
from ecornn.errors import BuildError
from ecornn.host_cpu import detect
from ecornn.manifest import decode
from ecornn.numpy_reference import reference
from ecornn.program import Launch, Program
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
    """All sleep at once sooner or later; one that spins never does."""
    assert right(sample, threads=4)
    others = [p for p in Path("/proc/self/task").iterdir() if p.name != str(threading.get_native_id())]
    assert len(others) >= 3
    until(lambda: all((p / "stat").read_text().rsplit(")", 1)[1].split()[0] == "S" for p in others if p.exists()))


def test_threads_end_with_the_module(tmp_path):
    import tvm_ffi

    before, made = tasks(), Sample(tmp_path, "rnn_tanh", 32, 128, 4, 50, team=0)
    other = shutil.copy(made.file, tmp_path / "other.so")  # tvm-ffi keeps the first one for good
    made.module = tvm_ffi.load_module(str(other), keep_module_alive=False)
    x, states = made.inputs(50, 4)
    made(x, states, threads=4)
    assert tasks() >= before + 3
    del made
    gc.collect()
    assert tasks() <= before


@pytest.mark.parametrize("change, message", [
    ((0, 1, 0, 1), "positive"), ((1, 0, 0, 1), "positive"), ((1, 1, 0, 0), "threads"),
    ((1, 1, 0, 5000), "threads"), ((1, 1, 0), "number of arguments")])
def test_wrong_calls_are_refused(sample, change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        sample.module.run(*change, *[0] * len(sample.program.buffers))


def test_wrong_programs_are_refused(sample):
    unknown = msgspec.structs.replace(detect(), arch="pdp11")
    with pytest.raises(BuildError, match="pdp11"):
        generate(sample.program, unknown)
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

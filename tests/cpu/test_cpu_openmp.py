"""Whose threads do a CPU module's work: those of the OpenMP runtime in the process, or ours; and how many."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cpu_sample import Sample

import ecornn

T, B, I, H = 50, 4, 32, 128

# What every program begins with: a layer, and its outputs on one thread.
PROGRAM = """
import ctypes, os, signal, sys, threading
from pathlib import Path
import numpy as np

signal.alarm(900)
sys.modules["torch"] = None  # tvm-ffi would import it

def openmp(name="libgomp.so.1", threads=3):
    "The runtime, after a region of so many threads."
    runtime = ctypes.CDLL(name)
    if hasattr(runtime, "GOMP_parallel"):
        runtime.GOMP_parallel(BODY(lambda _: None), None, threads, 0)
    return runtime

def tasks():
    return len(os.listdir("/proc/self/task"))

def layer(threads, size=(50, 4)):
    "A call, by a layer of so many threads."
    import ecornn
    bound = ecornn.load(sys.argv[1]).bind(dict(np.load(sys.argv[2])), threads=threads)
    x = np.random.default_rng(0).standard_normal((*size, 32), np.float32)
    return lambda: bound(x)[0]

def right(y):
    return np.array_equal(y, np.load(sys.argv[3]))

BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
"""


def made(folder: Path, team: int) -> list[str]:
    sample = Sample(folder, "lstm", I, H, B, T, team=team)
    weights = {f"{n}_l0": p.reshape(-1, *p.shape[2:]) for n, p in sample.parameters.items()}
    np.savez(folder / "weights.npz", **weights)
    x = np.random.default_rng(0).standard_normal((T, B, I), np.float32)
    y = ecornn.load(sample.file).bind(weights, threads=1)(x)[0]
    expected = ecornn.reference("lstm", x, weights)[0]
    assert np.linalg.norm(y - expected) < 1e-5 * np.linalg.norm(expected)
    np.save(folder / "y.npy", y)
    return [str(sample.file), str(folder / "weights.npz"), str(folder / "y.npy")]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[str]:
    return made(tmp_path_factory.mktemp("openmp"), 0)


def run(files: list[str], program: str, **environment: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM + program, *files], capture_output=True, text=True,
                          env={**os.environ, "ECORNN_CROWDED": "off", **environment}, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("mode", ["none", "gomp", "off"])
def test_whose_threads_work(files, mode):
    run(files, f"""
if {mode!r} != "none": openmp(threads=5).omp_set_num_threads(5)  # else a smaller region would end some of them
most = 1
for threads in (1, 2, 5, 3):
    call = layer(threads)
    before = tasks()
    assert right(call()) and right(call())
    wanted = 0 if {mode!r} == "gomp" else max(0, threads - most)
    assert tasks() - before == wanted, (threads, tasks() - before)
    most = max(most, threads)
""", **({"ECORNN_OPENMP": "off"} if mode == "off" else {}))


@pytest.mark.parametrize("wanted", ["", "off"])
def test_in_pytorchs_threads_with_nothing_set(files, wanted):
    """PyTorch's threads spin between its operations: a call's work is theirs. Else there are two more."""
    nothing_set = {name: value for name, value in os.environ.items()
                   if not name.startswith(("OMP_", "GOMP_", "KMP_", "MKL_", "ECORNN_"))}
    program = PROGRAM + f"""
del sys.modules["torch"]
import torch
torch.set_num_threads(3)
def operation():
    torch.full((1 << 20,), 2.0).sqrt_()
operation()
alone, call = tasks(), layer(3)
for _ in range(5):
    assert right(call())
    operation()
assert tasks() - alone == {2 if wanted else 0}, (alone, tasks())
"""
    done = subprocess.run([sys.executable, "-c", program, *files], capture_output=True, text=True, env={
        **nothing_set, **({"ECORNN_OPENMP": wanted, "ECORNN_CROWDED": "off"} if wanted else {})}, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_runtime_that_is_loaded_later_is_found(files):
    run(files, """
call = layer(3)
assert right(call())
openmp(threads=5)
before = tasks()
call = layer(5)  # with threads of ours there would be two more
assert right(call()) and tasks() == before
""")


def test_within_a_region(files):
    run(files, """
call, results = layer(3), []
runtime = openmp()
runtime.GOMP_parallel(BODY(lambda _: results.append(right(call()))), None, 3, 0)
assert results == [True] * 3, results
""")


def test_fewer_threads_than_asked_for(files):
    run(files, """
openmp(threads=2)
before = tasks()
assert right(layer(4)()) and tasks() == before
""", OMP_THREAD_LIMIT="2")


@pytest.mark.parametrize("loaded", ["before", "after"])
def test_a_forked_child(files, loaded):
    """GNU's runtime would wait for threads that the child has not, wherever the module was loaded."""
    run(files, f"""
openmp()
call = layer(3) if {loaded!r} == "before" else lambda: layer(3)()
if {loaded!r} == "before": assert right(call())
child = os.fork()
if child == 0:
    signal.alarm(900)
    os._exit(0 if right(call()) and tasks() == 3 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert right(call())
""")


@pytest.mark.parametrize("loaded", [True, False])
def test_calls_at_the_same_time(files, loaded):
    run(files, f"""
if {loaded}: openmp()
call, results = layer(3), []
def work():
    for _ in range(20): results.append(right(call()))
workers = [threading.Thread(target=work) for _ in range(5)]
for w in workers: w.start()
for w in workers: w.join()
assert results == [True] * 100
from ecornn.runtime import turns
assert turns._running.value == 0
""")


def test_calls_share_the_cores(files):
    run(files, """
import tvm_ffi
from ecornn.runtime import turns
call = layer(4)
turns._cores = lambda allowed: 4
turns.share_cores(tvm_ffi.load_module(sys.argv[1])["share"])
before = tasks()
for others, made in ((4, 0), (2, 0), (1, 1), (0, 3)):
    turns._running.value = others
    assert right(call()) and turns._running.value == others
    assert tasks() - before == made, (others, tasks() - before)
turns._running.value = 4
child = os.fork()
if child == 0:
    os._exit(0 if right(call()) and tasks() == 4 and turns._running.value == 0 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
turns._running.value = 0
assert right(call())
""")


def test_a_team_bounds_the_threads(tmp_path: Path):
    run(made(tmp_path, 1), """
before = tasks()
assert right(layer(3)()) and tasks() == before
""")


def test_one_thread_where_there_is_little_to_do(files):
    run(files, """
before = tasks()
call = layer(3, (1, 1))
call()
assert tasks() == before
""")


def test_one_thread_where_another_program_wants_the_core(files):
    """The second thread sleeps, once the first was put off its processor often enough."""
    run(files, """
import subprocess, time
call = layer(2)
assert right(call())
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
def ran():
    "Seconds of this thread, and of all."
    return np.array([time.thread_time(), time.process_time()])
other = subprocess.Popen([sys.executable, "-S", "-c", f"import os\\nwhile os.getppid() == {os.getpid()}: pass"])
for tid in map(int, os.listdir("/proc/self/task")):
    os.sched_setaffinity(tid, os.sched_getaffinity(0))
def until(own):
    "Calls, until this thread has run for so many more seconds."
    end = time.thread_time() + own
    while time.thread_time() < end: assert right(call())
def alone():
    before = ran()
    until(0.2)
    own, whole = ran() - before
    return whole - own < own / 2  # two that share the work run for as long as each other
found = any(alone() for _ in range(20))
other.kill()
assert found
""", ECORNN_CROWDED="")


STANDIN = r"""
#include <pthread.h>
#include <stdint.h>
static int wanted, size = 1;
static _Thread_local int number;
typedef void (*task_t)(int32_t *, int32_t *, void *);
struct job { task_t task; void *data; int number; };
int regions;
int omp_get_thread_num(void) { return number; }
int omp_get_num_threads(void) { return size; }
int omp_get_max_threads(void) { return 2; }
int32_t __kmpc_global_thread_num(void *place) { return number; }
void __kmpc_push_num_threads(void *place, int32_t thread, int32_t threads) { wanted = threads; }
static void *work(void *given) {
  struct job *job = given;
  int32_t thread = number = job->number;
  job->task(&thread, &thread, job->data);
  return 0;
}
void __kmpc_fork_call(void *place, int32_t count, task_t task, void *data) {
  pthread_t threads[64];
  struct job jobs[64];
  size = wanted;
  ++regions;
  for (int i = size - 1; i >= 0; --i) {
    jobs[i] = (struct job){task, data, i};
    if (i) pthread_create(&threads[i], 0, work, &jobs[i]);
    else work(&jobs[i]);
  }
  for (int i = 1; i < size; ++i) pthread_join(threads[i], 0);
  size = 1;
}
"""


def test_a_runtime_without_the_entry_points_of_gnus(files, tmp_path: Path):
    source, library = tmp_path / "omp.c", tmp_path / "libomp.so.5"
    source.write_text(STANDIN)
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-pthread", source, "-o", library], check=True)
    run(files, f"""
runtime = openmp({str(library)!r})
before = tasks()
for threads in (2, 4):
    assert right(layer(threads)()) and tasks() == before
assert ctypes.c_int.in_dll(runtime, "regions").value == 2
""")


def test_training_in_the_runtimes_threads(tmp_path: Path):
    ecornn.compile("gru", hidden=64, input=I, batch=B, seq=T, target="cpu", training=True).save(tmp_path / "gru.so")
    run([str(tmp_path / "gru.so")], """
import ecornn
openmp()
rng = np.random.default_rng(0)
module = ecornn.load(sys.argv[1])
weights = {p.name: rng.standard_normal(p.shape, np.float32) / 8 for p in module.manifest.parameters}
x, dy = (rng.standard_normal((50, 4, n), np.float32) for n in (32, 64))
def gradients(threads):
    bound = module.bind(weights, threads=threads)
    y, _, kept = bound.forward(x)
    found = bound.backward(kept, dy)
    return [y, found.x, *found.weights.values()]
one, before = gradients(1), tasks()
three = gradients(3)
assert tasks() == before
assert all(np.array_equal(a, b) for a, b in zip(one, three))
""")

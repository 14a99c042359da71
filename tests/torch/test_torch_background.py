"""Calls before their module is compiled: PyTorch's own layer computes them, forward and backward, and nobody waits."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
from refusals import refused
from torch.nn.utils.rnn import pack_sequence
from torch_values import BACKWARD, close, flat

import ecornn.torch
from ecornn import module_cache
from ecornn.errors import ArgumentError, ScheduleError, ShapeError
from ecornn.torch import by_address, compiling, snapshot
from ecornn.worker import IDLE, WorkerError


class Compilers:
    niceness = 0

    def __init__(self) -> None:
        self.asked: list[compiling.Job] = []
        self.fault: Exception | None = None

    def submit(self, job: compiling.Job) -> None:
        self.asked.append(job)

    def go(self) -> int:
        """Does all that was asked for, and says how much that was."""
        waiting = [job for job in self.asked if job.pending]
        for job in waiting:
            job.run(self)  # type: ignore[arg-type]
        return len(waiting)

    def call(self, function: str, argument: Any, kind: Any, limit: float) -> Any:
        name = function.removeprefix("ecornn.module_cache:")
        if self.fault is not None and name == "compile_for_another":
            raise self.fault
        return getattr(module_cache, name)(argument)


@pytest.fixture(autouse=True)
def compilers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compilers]:
    found = Compilers()
    monkeypatch.delenv("ECORNN_WAIT")
    monkeypatch.setattr(compiling, "_compilers", found)
    monkeypatch.setattr(compiling, "_jobs", {})
    monkeypatch.setattr(module_cache, "_told", set())
    compiling.outcomes.clear()
    yield found
    compiling.outcomes.clear()


def by_torch(call: Callable[[], Any]) -> bool:
    with contextlib.ExitStack() as patches:
        plain = [patches.enter_context(patch.object(kind, "forward", autospec=True, side_effect=kind.forward))
                 for kind in (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN, torch.nn.LSTMCell)]
        call()
    return any(one.called for one in plain)


def pair(kind: Any, *sizes: int, **options: Any) -> tuple[Any, Any]:
    theirs, ours = kind(*sizes, **options), kind(*sizes, **options)
    ours.load_state_dict(theirs.state_dict())
    assert ecornn.torch.replace(ours).swapped
    return theirs, ours


def gradients(layer: Any, *given: Any) -> list[torch.Tensor]:
    layer.zero_grad()
    y = flat(layer(*given))[0]
    y.square().sum().backward()
    return [y.detach(), *(p.grad for p in layer.parameters())]


CALLS = {"padded": lambda: torch.randn(5, 3, 6), "batch of none": lambda: torch.randn(5, 6),
         "packed": lambda: pack_sequence([torch.randn(n, 6) for n in (4, 2, 2)])}


@pytest.mark.parametrize("given", CALLS)
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "dropout": 0.0, "bidirectional": True}], ids=["one", "four"])
def test_pytorch_computes_until_the_module_is_there(given: str, options: dict[str, Any], compilers: Compilers):
    theirs, ours = pair(torch.nn.GRU, 6, 7, **options)
    x = CALLS[given]()
    def same() -> None:
        close(gradients(ours, x), gradients(theirs, x), BACKWARD)
        with torch.no_grad():
            close(ours(x), theirs(x))
    assert by_torch(lambda: gradients(ours, x)) and by_torch(lambda: ours(x))
    same()
    assert compilers.go() == 1  # with gradients, which serves calls without
    same()
    with torch.no_grad():
        assert not by_torch(lambda: ours(x))
    assert not by_torch(lambda: gradients(ours, x))


def test_a_cell_goes_over_within_a_sequence(compilers: Compilers):
    theirs, ours = pair(torch.nn.LSTMCell, 6, 7)
    inputs = torch.randn(4, 3, 6)
    def steps(cell: Any) -> list[torch.Tensor]:
        cell.zero_grad()
        state = None
        for number, x in enumerate(inputs):
            if cell is ours and number == 2:
                compilers.go()
            state = cell(x, state)
        state[0].square().sum().backward()
        return [state[0].detach(), *(p.grad for p in cell.parameters())]

    close(steps(ours), steps(theirs), BACKWARD)
    assert not by_torch(lambda: ours(inputs[0]))


def test_calls_that_one_module_serves_have_it_compiled_once(compilers: Compilers):
    _, ours = pair(torch.nn.GRU, 6, 7)
    with torch.no_grad():
        for steps, batch in ((3, 4), (9, 4), (2, 3), (5, 1)):
            assert by_torch(lambda steps=steps, batch=batch: ours(torch.randn(steps, batch, 6)))
        assert [job.spec.batch for job in compilers.asked] == [4]
        _, other = pair(torch.nn.GRU, 6, 7)
        other(torch.randn(3, 4, 6))
        assert len(compilers.asked) == 1
        # a larger batch has a module of its own; what fits in the one that is there does not wait for it
        compilers.go()
        assert by_torch(lambda: ours(torch.randn(3, 20, 6))) and not by_torch(lambda: ours(torch.randn(3, 2, 6)))
        assert [job.spec.batch for job in compilers.asked] == [4, 32]


def test_similar_lengths_share_a_module_also_across_programs(compilers: Compilers):
    """The T of the first call is rounded to a power of 2."""
    for steps in (100, 128, 180):
        compiling.outcomes.clear()
        _, ours = pair(torch.nn.GRU, 6, 7)
        ours(torch.randn(steps, 3, 6))
    assert {(job.spec.seq, job.spec.batch) for job in compilers.asked} == {(128, 3)}


def test_a_module_of_more_rows_stands_in_for_one_that_is_compiled(compilers: Compilers):
    theirs, ours = pair(torch.nn.GRU, 6, 7)
    x = torch.randn(3, 2, 6)
    def same() -> None:
        assert not by_torch(lambda: ours(x))
        close(ours(x), theirs(x))
    with torch.no_grad():
        ours(torch.randn(3, 12, 6))
        compilers.go()
        for _ in range(3):  # more than it takes to remember a call
            same()
        assert [job.spec.batch for job in compilers.asked] == [12, 2] and compilers.asked[-1].pending
        assert by_torch(lambda: ours(torch.randn(3, 20, 6)))  # there are none of so many rows
        compilers.go()
        for _ in range(3):
            same()
        engine = ecornn.torch.engine.engine_of(ours)
        (call,) = [call for call in engine.calls.values() if call is not None and call.one is not None]
        assert call.one.layer.manifest.workload.batch == 2  # remembered is the module that is right


def test_a_step_goes_back_by_the_module_that_it_went_forward_by(compilers: Compilers):
    """Though its own is there by then, and whatever that module's layer has packed in between."""
    theirs, ours = pair(torch.nn.GRU, 6, 7)
    gradients(ours, torch.randn(3, 12, 6))
    compilers.go()
    x, others = torch.randn(3, 2, 6), {name: torch.randn_like(p) for name, p in ours.named_parameters()}
    y = ours(x)[0]
    layer = y.grad_fn.passes.one.layer
    assert compilers.go() == 1 and (layer.manifest.workload.batch, compilers.asked[1].spec.batch) == (12, 2)
    torch.func.functional_call(ours, others, (torch.randn(3, 12, 6),))
    ours.zero_grad()
    back = by_address.LayerStep.backward
    with patch.object(by_address.LayerStep, "backward", autospec=True, side_effect=back) as used:
        y.square().sum().backward()
    assert used.call_args.args[0]._layer is layer
    close([p.grad for p in ours.parameters()], gradients(theirs, x)[1:], BACKWARD)


def test_on_a_cpu_a_module_that_trains_serves_evaluation(compilers: Compilers):
    """Also while it is compiled, and with one packing of the weights; not where it could not be compiled."""
    theirs, ours = pair(torch.nn.GRU, 6, 7)
    x = torch.randn(3, 2, 6)
    def evaluates() -> bool:
        with torch.no_grad():
            close(ours(x), theirs(x))
            return not by_torch(lambda: ours(x))
    gradients(ours, x)
    assert not evaluates()
    compilers.go()
    for _ in range(4):  # also by the short way of calls like earlier ones
        assert evaluates()
    gradients(ours, x)
    assert evaluates() and len(compilers.asked) == 1
    engine = ecornn.torch.engine.engine_of(ours)
    assert not engine.inference._bound or not any(engine.inference._bound.values())
    _, other = pair(torch.nn.GRU, 6, 13)
    compilers.fault = WorkerError("ScheduleError: no gradients", lost=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own layer trains
        gradients(other, x)
        compilers.go()
        compilers.fault = None
        with torch.no_grad():
            assert by_torch(lambda: other(x)) and compilers.go() == 1 and not by_torch(lambda: other(x))


def test_calls_like_a_pending_one_go_the_short_way(compilers: Compilers, monkeypatch: pytest.MonkeyPatch):
    """Only the first of its kind is looked at, until its module is there, or somebody watches, or wants to wait."""
    theirs, ours = pair(torch.nn.GRU, 6, 7)
    looked, kind = [], type(ours)
    long_way = kind._any_call
    monkeypatch.setattr(kind, "_any_call", lambda *given: (looked.append(1), long_way(*given))[1])
    def looks(steps: int, grad: bool = True) -> int:
        looked.clear()
        x = torch.randn(steps, 3, 6)
        with torch.set_grad_enabled(grad):
            for _ in range(3):
                close(ours(x), theirs(x))
        return len(looked)

    assert [looks(5), looks(5), looks(4), looks(5, grad=False), looks(5, grad=False)] == [1, 0, 1, 1, 0]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert looks(5) == 3
    ours.wait = True
    x = torch.randn(5, 3, 6)
    assert not by_torch(lambda: ours(x))
    del ours.wait
    compilers.go()
    assert not by_torch(lambda: ours(x))


def test_a_pending_step_of_training_changes_weights_that_are_bound(compilers, monkeypatch):
    """Fused optimizers leave no trace in tensors: layers without gradients, compiled before, must see their steps."""
    monkeypatch.setattr(snapshot.Sample, "holds", lambda _: True)  # as on a GPU, where no values are looked at
    monkeypatch.setattr(snapshot.Sample, "differs", lambda *_: False)
    theirs, ours = pair(torch.nn.GRU, 6, 7)
    x = torch.randn(4, 3, 6)
    with torch.no_grad():
        ours(x)
        compilers.go()
        ours(x)
    steps = [torch.optim.SGD(layer.parameters(), lr=0.5, fused=True) for layer in (theirs, ours)]
    for _ in range(3):
        close(gradients(ours, x), gradients(theirs, x), BACKWARD)
        assert compilers.asked[-1].pending
        for step in steps:
            step.step()
        with torch.no_grad():
            assert not by_torch(lambda: ours(x))
            close(ours(x), theirs(x))


def test_it_is_said_once(compilers: Compilers, caplog: pytest.LogCaptureFixture):
    _, ours = pair(torch.nn.GRU, 6, 11)
    compilers.fault = OSError()
    with caplog.at_level(logging.INFO, "ecornn"), torch.no_grad():
        for batch in (1, 1, 9):
            ours(torch.randn(3, batch, 6))
    assert compilers.go() == 2
    (said,) = caplog.messages
    assert "in the background, first gru T=4 B=1 I=6 H=11 float32;" in said and "prepare(model, *example)" in said


@pytest.mark.parametrize("how", ["wait", "ECORNN_WAIT", "ECORNN_STRICT", "ECORNN_CACHE", "deterministic", "own cell"])
def test_a_call_waits_where_that_is_asked_for(how: str, compilers: Compilers, monkeypatch: pytest.MonkeyPatch):
    layer = ecornn.torch.Recurrent("indrnn", 6, 7) if how == "own cell" else torch.nn.GRU(6, 7)
    if how != "own cell":
        ecornn.torch.replace(layer, wait=how == "wait")
    if how.startswith("ECORNN"):
        monkeypatch.setenv(how, "off" if how == "ECORNN_CACHE" else "1")
    if how == "deterministic":
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not by_torch(lambda: layer(torch.randn(3, 2, 6))) and not compilers.asked


def test_transforms_and_graphs_have_the_operator(compilers: Compilers):
    _, ours = pair(torch.nn.GRU, 6, 7)
    x = torch.randn(3, 2, 6)
    torch.func.grad(lambda x: ours(x)[0].sum())(x)
    assert "ecornn.recurrent" in str(torch.export.export(ours, (x,)).graph) and not compilers.asked


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("given", ["padded", "packed"])
def test_around_and_within_graphs_of_torch_compile(given: str, fullgraph: bool):
    theirs, ours = pair(torch.nn.GRU, 6, 7)
    ecornn.torch.restore(ours)
    ecornn.torch.replace(ours, fullgraph=fullgraph)
    torch._dynamo.reset()
    x = CALLS[given]()
    def of(layer: Any) -> Callable[[Any], torch.Tensor]:
        return (lambda x: layer(x)[0].data.sin()) if given == "packed" else lambda x: layer(x)[0].sin()
    fast = torch.compile(of(ours), backend="aot_eager")
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's compiler asks for gradients of rows that are no leaf
            torch.testing.assert_close(fast(x), of(theirs)(x))


def test_a_checkpoint_computes_the_same_again(compilers: Compilers):
    """The module would be there before the backward pass, in which PyTorch expects the first tensors."""
    from torch.utils.checkpoint import checkpoint

    theirs, ours = pair(torch.nn.GRU, 6, 7)
    x = torch.randn(3, 2, 6, requires_grad=True)
    y, wanted = (checkpoint(lambda x, layer=layer: layer(x)[0], x, use_reentrant=False) for layer in (ours, theirs))
    compilers.go()
    close(*(torch.autograd.grad(one.square().sum(), [x]) for one in (y, wanted)), BACKWARD)
    assert not compilers.asked


def test_prepare_compiles_first(compilers: Compilers):
    _, ours = pair(torch.nn.GRU, 6, 7)
    x = torch.randn(3, 2, 6)
    assert by_torch(lambda: gradients(ours, x))
    ecornn.torch.prepare(ours, x)
    _, other = pair(torch.nn.GRU, 6, 7)
    assert not by_torch(lambda: gradients(other, x))


@pytest.mark.parametrize("fault", [WorkerError("the process crashed with signal SIGKILL", lost=True),
                                   WorkerError("ScheduleError: no schedule serves this", lost=False),
                                   OSError("no space")], ids=["crash", "schedule", "disk"])
def test_what_cannot_be_compiled_stays_pytorchs_and_says_so_once(fault: Exception, compilers: Compilers):
    theirs, ours = pair(torch.nn.GRU, 6, 13)  # no other test has it compiled
    compilers.fault, x = fault, torch.randn(3, 2, 6)
    ours(x)
    compilers.go()
    with pytest.warns(UserWarning, match=f"PyTorch's own layer runs: .*{str(fault).rpartition(': ')[2]}") as said:
        for _ in range(3):
            assert by_torch(lambda: ours(x))
    assert len(said) == 1 and len(compilers.asked) == 1
    with torch.no_grad():
        torch.testing.assert_close(theirs(x)[0], ours(x)[0])


@pytest.mark.parametrize("shape", [(6,), (1, 2, 3, 6), (3, 2, 5), (0, 2, 6)])
def test_inputs_that_do_not_fit_are_refused_as_ever(shape: tuple[int, ...], compilers: Compilers):
    _, ours = pair(torch.nn.GRU, 6, 7)
    refused(ShapeError, r"input\.shape", ours, torch.zeros(shape))
    assert not compilers.asked


def test_an_argument_that_is_neither_is_refused():
    with pytest.raises(ArgumentError, match="wait=1: expected True or False"):
        ecornn.torch.replace(torch.nn.GRU(6, 7), wait=1)  # type: ignore[arg-type]
    layer = torch.nn.GRU(6, 7)
    ecornn.torch.replace(layer, wait=True)
    ecornn.torch.restore(layer)
    assert "wait" not in vars(layer)


# -- with processes -----------------------------------------------------------------------------
PROGRAM = """
import os, sys, threading, torch, ecornn.torch
from ecornn.torch import compiling
compiling.NICENESS = 1  # on a busy machine ten times as many would take minutes
layer, x = torch.nn.GRU(6, 7), torch.randn(3, 2, 6)
ecornn.torch.replace(layer)
def compiled():
    return "RecurrentForward" in type(layer(x)[0].grad_fn).__name__
assert not compiled()
(job,) = compiling._jobs.values()
"""


@pytest.fixture
def started(start: Any, tmp_path: Path) -> Callable[..., Any]:
    environment = {name: value for name, value in os.environ.items() if name != "ECORNN_WAIT"}
    return lambda more, *given: start([sys.executable, "-c", PROGRAM + more, *given], stdout=-1, stderr=-1, text=True,
                                      env=environment | {"ECORNN_CACHE": str(tmp_path / "cache")})


def test_a_worker_process_compiles_and_the_next_process_loads(started: Callable[..., Any]):
    """It starts no process, and imports little, or a program of a second would be over."""
    for tvm in (True, False):
        done = started(f"""
job.wait()
assert compiled(), job.error
process = compiling._compilers._workers[0].process
if {tvm}:
    assert os.getpriority(os.PRIO_PROCESS, process.pid) > os.getpriority(os.PRIO_PROCESS, 0)
else:
    assert process is None
assert not {{"tvm", "ecornn.analysis", "ecornn.tune", "ecornn.schedules"}} & {{*sys.modules}}
""")
        _, said = done.communicate()
        assert done.returncode == 0, said
        assert ("in the background" in said) is tvm and said.count("\n") == int(tvm)


def test_replace_gets_ready_what_the_first_call_would_take_longer_for():
    """And opens no GPU."""
    script = """if True:
        import sys, torch, ecornn.torch
        from ecornn import module_cache
        from ecornn.torch.kind import kind_of, text_of
        ecornn.torch.replace(layer := torch.nn.GRU(6, 7))
        before = set(sys.modules)
        assert module_cache.found(kind_of(text_of(layer)).spec(3, 16, "float32", "", None, None), "cpu") is None
        assert "tvm_ffi" in before and not set(sys.modules) - before and not torch.cuda.is_initialized()
        """
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_forked_child_goes_on_without_its_parents_worker(started: Callable[..., Any]):
    done = started("""
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    assert not compiled()
    (own,) = compiling._jobs.values()
    assert own is not job and own.pending
    own.wait()
    os._exit(0 if compiled() else 1)
assert os.waitpid(child, 0)[1] == 0
job.wait()
assert compiled()
""")
    _, said = done.communicate()
    assert done.returncode == 0, said


@pytest.mark.parametrize("how", ["ends", "SIGINT", "SIGKILL"])
def test_nothing_is_left_when_a_process_ends(how: str, tmp_path: Path, started: Callable[..., Any]):
    one = started("""
while compiling._compilers._workers[0].process is None:
    job.wait(0.01)
print(compiling._compilers._workers[0].process.pid, flush=True)
if sys.argv[1] != "ends":
    threading.Event().wait()
""", how)
    group = int(one.stdout.readline())
    if how != "ends":
        one.send_signal(getattr(signal, how))
    one.communicate()
    psutil.wait_procs([p for p in psutil.process_iter() if group_of(p) == group])
    assert not [p for p in psutil.process_iter() if group_of(p) == group]
    root = tmp_path / "cache"
    assert not [path for path in root.glob("??/*") if len(path.name) != 64]


def group_of(process: psutil.Process) -> int:
    try:
        return os.getpgid(process.pid) if process.status() != psutil.STATUS_ZOMBIE else 0
    except (ProcessLookupError, psutil.NoSuchProcess):
        return 0


@pytest.mark.gpu
def test_a_cuda_graph_keeps_what_ran_before_it(compilers: Compilers):
    """A graph that is captured before the module is there is PyTorch's; one captured later is the compiled layer's."""
    theirs, ours = (layer.cuda() for layer in pair(torch.nn.LSTM, 64, 64))
    x = torch.randn(16, 8, 64, device="cuda")
    with torch.no_grad():
        for module_is_there in (False, True):
            ours(x), theirs(x)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            warns: Any = contextlib.nullcontext() if module_is_there else pytest.warns(match="CUDA graph captured it")
            with warns, torch.cuda.graph(graph):
                y = ours(x)[0]
            graph.replay()
            close(y, theirs(x)[0])
            if not module_is_there:
                compilers.go()
                ours(x)


def test_schedule_errors_go_to_those_who_wait(compilers: Compilers):
    _, ours = pair(torch.nn.GRU, 7, 15)
    x = torch.randn(3, 2, 7)
    compilers.fault = WorkerError("ScheduleError: no schedule serves this", lost=False)
    with torch.no_grad():
        ours(x)
        compilers.go()
        ours.wait = True
        refused(ScheduleError, "no schedule serves this", ours, x)


def test_compilers_to_whom_others_leave_nothing_start_again_further_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    class Starved:
        niceness = IDLE

        def call(self, function: str, argument: Any, kind: Any, limit: float) -> str:
            if self.niceness == IDLE and limit < compiling.LIMIT:
                time.sleep(limit)
                raise WorkerError("took longer than that and was stopped", lost=True)
            if argument == "crash":
                raise WorkerError("crashed", lost=True)
            return f"{function} {argument} {self.niceness}"

    monkeypatch.setattr(compiling, "PATIENCE", 0.01)
    worker: Any = Starved()
    assert compiling.behind_others(worker, "f", "x") == "f x 19"
    with pytest.raises(WorkerError, match="crashed"):
        compiling.behind_others(worker, "f", "crash")


def test_what_a_compiler_that_stands_behind_raises_is_raised_at_once() -> None:
    class Raises:
        niceness = IDLE

        def call(self, *_: Any) -> str:
            raise WorkerError("ScheduleError: none", lost=False)

    worker: Any = Raises()
    with pytest.raises(WorkerError, match="none"):
        compiling.behind_others(worker, "f", "x")
    assert worker.niceness == IDLE

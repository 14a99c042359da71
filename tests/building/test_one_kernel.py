"""Launches that wait for nothing of each other as one kernel, emulated, and which launches are."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu import Emulated

from ecornn import compiler
from ecornn.build import cuda
from ecornn.build.cuda import lower, readable
from ecornn.build.host_cuda import Kernel
from ecornn.build.one_kernel import as_launched
from ecornn.program import BACKWARD, FORWARD, RUN, Buffer, Concurrent, Extent, Launch, Program, launches
from ecornn.schedules.builder import T
from ecornn.schedules.cuda.isa import sync_block

SIZE = 256


def turned(name: str, threads: int) -> Any:
    """``made``: each block's part of ``given`` in reverse, by way of shared memory; and the sum of it."""
    with T.kernel(name) as made:
        given, into = T.pointer("given", "float32"), T.pointer("into", "float32")
        T.device_entry()
        block, thread = T.block(SIZE // threads), T.thread(threads)
        memory = T.shared(threads)
        T.buffer_store(memory, given[block * threads + thread], [thread])
        sync_block()
        T.buffer_store(into, memory[threads - 1 - thread], [block * threads + thread])
    return made()


def launch(name: str, threads: int, given: str, into: str, **options: Any) -> Launch:
    return Launch(name, SIZE // threads, threads, threads * 4, names={"given": given, "into": into}, **options)


PARTS = (launch("few", 32, "a", "b"), launch("many", 64, "a", "c"), launch("few", 32, "e", "d"))
FUNCTIONS = {"few": turned("few", 32), "many": turned("many", 64)}
BUFFERS = tuple(Buffer(name, "workspace", "float32", Extent(SIZE)) for name in "abcde")


def program_of(*parts: Launch, one_kernel: bool = True, after: tuple[Launch, ...] = ()) -> Program:
    return Program.running(FUNCTIONS, BUFFERS, (Concurrent(tuple((p,) for p in parts), one_kernel), *after))


@pytest.mark.parametrize("after", [(), PARTS[:1]], ids=["all", "one alone"])
def test_launches_in_one_do_what_they_did(after: tuple[Launch, ...], tmp_path: Path):
    values, results = {n: np.random.default_rng(ord(n)).random(SIZE, np.float32) for n in "ae"}, []
    for one_kernel in (True, False):
        folder = tmp_path / str(one_kernel)
        folder.mkdir()
        emulated = Emulated(program_of(*PARTS, one_kernel=one_kernel, after=after), folder, "sm_90a")
        memory = {n: values[n].copy() if n in values else np.full(SIZE, np.nan, np.float32) for n in "abcde"}
        emulated.carry_out(memory, 1, 1)
        results.append(memory)
        count = sum(1 for _ in launches(emulated.program.calls))
        assert count == (1 if one_kernel else 3) + len(after)
        assert ("few" in emulated.kernels) == (not one_kernel or bool(after))
    for name in "bcd":
        assert np.array_equal(results[0][name], results[1][name]) and np.isfinite(results[0][name]).all()
    assert np.array_equal(results[0]["d"], values["e"].reshape(-1, 32)[:, ::-1].reshape(-1))


def test_a_part_that_nobody_wants_does_nothing_and_people_can_read_it():
    wanted = replace(PARTS[1], wanted=("into",))
    program = program_of(PARTS[0], wanted)
    assert "&& (p_1_into)" not in lower(program, "sm_90a")[1] and "if ((p_1_into)) " in lower(program, "sm_90a")[1]
    text = readable(program, "sm_90a")
    assert "few_with_many_kernel(" in text and "tvm_builtin" not in text


@pytest.mark.parametrize("other", [replace(PARTS[1], cooperative=True), replace(PARTS[1], cluster=4),
                                   replace(PARTS[1], early=True)], ids=["cooperative", "cluster", "early"])
def test_kernels_that_exchange_between_blocks_stay_apart(other: Launch):
    program = program_of(PARTS[0], other)
    assert as_launched(program) == (program, {})


@pytest.mark.parametrize("cell, dtype", [("lstm", "float16"), ("gru", "float32"), ("rnn_tanh", "bfloat16")])
def test_short_calls_have_few_launches(cell: str, dtype: str):
    planned = compiler.plan(cell, target="sm_90a", training=True, hidden=256, batch=16, seq=1, dtype=dtype)
    (program,) = planned.programs()
    launched, made = as_launched(program)
    counts = {name: sum(1 for _ in launches(entry.calls)) for name, entry in launched.entries.items()}
    assert counts[RUN] <= 2 and counts[FORWARD] <= 2 and counts[BACKWARD] <= 5 and made
    assert not any(isinstance(call, Concurrent) for entry in launched.entries.values() for call in entry.calls)


@pytest.mark.parametrize("sizes", [{}, {"layers": 2, "bidirectional": True}, {"lengths": True, "hidden": 96}], ids=str)
def test_each_kernel_is_in_its_image(sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    """A driver looks for a kernel in the cubin that the host's tables name."""
    known, host_program = dict[str, Kernel](), cuda.host_program
    monkeypatch.setattr(cuda, "compile_cubin", lambda text, arch: (text.encode(), {}))
    monkeypatch.setattr(cuda, "host_program", lambda program, kernels, arch: (
        known.update(kernels) or host_program(program, kernels, arch)))
    planned = compiler.plan("lstm", target="sm_90a", **{"hidden": 128, "batch": 32, "training": True} | sizes)
    made = compiler.generate(planned)
    assert len(made.binaries) >= 3, "several sources"
    for name, kernel in known.items():
        text = made.binaries[f"{cuda.CUBIN}{kernel.image}"].decode()
        assert re.search(rf"__global__ [^(]*(?:\([^)]*\) )?{kernel.symbol}\([^;]*\) \{{", text), name

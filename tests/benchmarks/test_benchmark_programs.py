"""The programs of the benchmarks as they run, with what they run, or times, made up; and calls that go on for hours."""

import argparse
import json
import math
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import compare_packed
import compare_programs
import compile_times
import cpu_in_programs
import numpy as np
import pytest
import run_all
import run_many_gpus
import serving
import soak
import torch
from cpu_floor import loops
from events import until
from rooms import ROOT
from run_many_gpus import BEGIN, BUCKET, END, NETWORKS, PAGE, Link, Model, Stack
from serving_load import Load

from ecornn.bench.grid import Case, Layer
from ecornn.bench.results import RowLog
from ecornn.bench.turns import FEWEST, take_turns
from ecornn.runtime.memory import HostMemory, Pool
from ecornn.targets import KNOWN

CPU = {"hidden": 8, "batch": 2, "seq": 3, "dtype": "float32", "target": "cpu"}
SMALL = [Layer(name=f"{cell} 3x2x8x8 float32", case=Case(cell=cell, input=8, **CPU)) for cell in ("rnn_tanh", "lstm")]


def made_by(folder: Path, program: str, *arguments: str) -> Any:
    output = folder / "output.json"
    done = subprocess.run([sys.executable, ROOT / "benchmarks" / program, *arguments, "--output", output], text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(output.read_text())


def test_seconds_end_a_row(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    def clock(run: Callable[[], object]) -> float:
        now[0] += 1
        return now[0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for most, seconds, count in ((30, 25.0, 13), (30, 0.0, FEWEST), (5, 1e9, 5)):
        times = take_turns(dict.fromkeys("ab", lambda: None), lambda: None, most, seconds, clock)
        assert len(times["a"]) == len(times["b"]) == count


def test_everything_is_measured_and_put_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls = []
    def fake(*arguments: object) -> bool:
        words = [*map(str, arguments)]
        calls.append(words)
        named = words[3] if words[:2] == ["-m", "ecornn"] else words[0]
        assert (run_all.HERE.parent / (words[4] if named == "--grid" else named)).is_file(), words
        if "--output" in words:
            Path(words[words.index("--output") + 1]).write_text(" ".join(words))
        return "variants" not in " ".join(words)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_all, "run", fake)
    monkeypatch.setattr(run_all.importlib.util, "find_spec", lambda name: name != "flashrnn")
    good = [run_all.measure(part, run_all.short_name(KNOWN["sm_90a"])) for part in run_all.GPU]
    assert good.count(False) == 1, "one of them failed"
    results = {path.name: path.read_text() for path in (tmp_path / "benchmarks" / "results").iterdir()}
    assert len(results) == len(run_all.GPU) - 2, "all but FlashRNN's"
    assert "grids/classes.toml" in results["h100_classes.jsonl"] and "compare_packed" in results["h100_packed.json"]
    assert not list((tmp_path / "build" / "bench").iterdir())
    said = [" ".join(words) for words in calls]
    assert "benchmarks/report.py benchmarks/results/h100_grid.jsonl --docs" in said
    assert [s for s in said if "why_above_floor" in s] and not [s for s in said if "report.py" in s and "reasons" in s]


def test_which_command_makes_which_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setattr(sys, "argv", ["run_all.py", "--list"])
    run_all.main()
    lines = capsys.readouterr().out.splitlines()
    every = [*run_all.GPU, *run_all.CPU, *run_all.NAMED]
    assert len(lines) == len(every) == len({part.name for part in every})
    grids = {path.stem for path in (run_all.HERE / "grids").glob("*.toml")}
    assert grids == {part.name for part in every if "--grid" in part.command}
    monkeypatch.setattr(sys, "argv", ["run_all.py", "nothing"])
    with pytest.raises(SystemExit):
        run_all.main()
    assert "PART: nothing; expected some of layers, grid" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_compile_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ECORNN_CACHE", "on")
    path = tmp_path / "times.jsonl"
    monkeypatch.setattr(sys, "argv", ["compile_times.py", "--target", "cpu", "--output", str(path)])
    for modules in (SMALL[:1], SMALL):
        monkeypatch.setattr(compile_times, "modules", lambda modules=modules: modules)
        with pytest.raises(SystemExit) as ended:
            compile_times.main()
        assert ended.value.code == 0
    rows = RowLog(path).rows
    assert [r["cell"] for r in rows] == ["rnn_tanh", "lstm"]
    assert all(r["build"] > 0.1 and r["imports"] > 0 and r["module_bytes"] > 1000 for r in rows)
    text = path.with_suffix(".md").read_text()
    assert "- `cpu_sequence`: 2 modules" in text and "| LSTM 3x2x8x8 | float32 | cpu_sequence |" in text


@pytest.mark.parametrize("name", compare_programs.PROGRAMS)
def test_every_program_runs(name: str):
    calls = [*compare_programs.PROGRAMS[name]("cpu")][1:]
    assert len(calls) >= 30 and all(math.isfinite(float(call().detach())) for call in calls[:2])


def test_rows_are_of_the_first_calls_the_longest_one_and_all_together(monkeypatch: pytest.MonkeyPatch):
    seconds = {"torch": [1.0] * 8, "cold": [3.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5], "warm": [0.5] * 8}
    def child(function: Any, name: str, device: str, side: str, cache: str) -> Any:
        assert (function, name, device) == (compare_programs.run, "policy", "cpu") and Path(cache).is_dir()
        part = {"seconds": seconds[side], "results": [1.0, 2.0, *[3.0] * 6]}
        then = {"seconds": [0.25 if side == "warm" else 1.0] * 8, "results": []}
        said = {"first": part, "then": then, "modules": 2, "errors": []}
        return said | {"first": part | {"results": [1.0, 2.2, *[3.0] * 6]}} if side == "warm" else said

    monkeypatch.setattr(compare_programs, "alone", child)
    row = compare_programs.measure("policy", "cpu", 3)
    assert row["cold"] == {"worst": 7 / 5, "all": 8.5 / 8, "longer_ms": 2000}
    assert row["warm"] == {"worst": 0.5, "all": 0.5, "longer_ms": -500}
    assert row["faster"] == 4 and row["modules"] == 2 and row["difference"] == pytest.approx(0.1)
    assert "| policy | 8 | 1.40x | 0.50x | +2000 ms | -500 ms | 4.00x as fast | 2 |" in compare_programs.table([row])


def test_the_model_of_the_issue(monkeypatch: pytest.MonkeyPatch):
    """pytorch#149194 at a small size on this CPU, and its row; times are made up, since events are a GPU's."""
    calls: list[str] = []
    def timed(sides: dict[str, Any], _: Any, repeats: int, steps: int, clock: Any) -> dict[str, float]:
        for name, call in sides.items():
            y = call()
            if name == "cudnn_padded":
                continue
            assert y.shape == (9, 4, 5 if name == "packing" else 6) and not y[-1, :3].any() and y[-1, 3].any()
            calls.append(name)
        assert repeats == 20 and steps == 18
        made = {"ecornn": 2.0, "cudnn": 8.0, "cudnn_padded": 1.0, "packing": 0.5}
        return {f"{name}_{end}": value for name, value in made.items() for end in ("us", "p20", "p80")}

    monkeypatch.setattr(compare_packed, "timed", timed)
    row = compare_packed.compare_issue(("lstm", 9, 4, 5, 6, 2, False), 20, "cpu")
    assert calls == ["ecornn", "cudnn", "packing"]
    assert (row["case"], row["T"], row["layers"], row["ratio"]) == ("pytorch#149194", 9, 2, 4.0)
    assert row["dtype"] == "float32"
    assert row["valid"] == 5 / 9 and 0 < row["error"] < 1e-6 and 0 < row["cudnn_error"] < 1e-6
    told = compare_packed.told(row)
    assert "case=pytorch#149194" in told and "valid=0.5556" in told and "ecornn_us=2 [2, 2]" in told


LOOP = "\n".join([
    ".LBB0_1:", *["\tvfmadd231ps\t%zmm1, %zmm2, %zmm3"] * 6, *["\tvfnmadd231ps\t%zmm1, %zmm2, %zmm4"] * 4,
    *["\tvaddps\t(%rax){1to16}, %zmm1, %zmm2"] * 3, *["\tvsubps\t%zmm5, %zmm1, %zmm2"] * 2,
    "\tvbroadcastss\t(%rdi), %zmm7", "\tvmovups\t64(%rsp), %zmm8", "\tincq\t%rax", "\tjne\t.LBB0_1", ""])


def test_loops_are_counted():
    (found,) = loops(LOOP)
    assert found == {"instructions": 19, "fma": 10, "additions": 5, "vector_arithmetic": 15, "broadcasts": 1,
                     "loads": 1, "spills": 1}
    assert not loops(LOOP.replace("jne\t.LBB0_1", "ret"))
    assert not loops(LOOP.replace("vfnmadd231ps", "vmulps")), "six are too few for a product"


def test_the_drop_in_in_programs():
    assert len(cpu_in_programs.suite_of("latency")) == 20 and len(cpu_in_programs.suite_of("grid")) == 24
    torch.manual_seed(0)
    with torch.no_grad():
        (row,) = cpu_in_programs.compare("gru", (4, 2, 5, 6), 0.01, [0], cpu_in_programs.Program.block)
        assert min(row["ecornn_calls"], row["torch_calls"]) >= 3 * cpu_in_programs.BLOCKS
        assert 0 < row["torch_ms"] <= row["torch_p99_ms"] <= row["torch_p99_both_ms"]
        assert row["ratio_ms"] == row["torch_ms"] / row["ecornn_ms"]
        assert cpu_in_programs.told({"mode": "turns", **row}).startswith("mode=turns cell=gru T=4 B=2 I=5 H=6 busy=0 ")
        (row,) = cpu_in_programs.compare("gru", (4, 2, 5, 6), 0.01, [0], cpu_in_programs.in_threads)
        assert row["torch_calls"] >= 3 * cpu_in_programs.BLOCKS * cpu_in_programs.REQUESTS


def test_a_row_of_two_services(monkeypatch: pytest.MonkeyPatch):
    """Ratios are of turns beside each other: the machine is slower in some, for both sides; the first warms up."""
    slower = {"ecornn": iter([9, 1, 2, 4]), "torch": iter([1, 1, 2, 4])}

    async def load(port: str, sessions: int, input: int, seconds: float) -> Load:
        times = {"ecornn": 0.010, "torch": 0.015}[port] * next(slower[port])
        return Load(seconds=[times] * 10, rate=sessions / times)

    monkeypatch.setattr(serving, "LOAD", load)
    monkeypatch.setattr(serving.SERVING, "check", lambda found, hidden, input: None)
    sizes = argparse.Namespace(turns=3, input=1, hidden=2, batch=3, seconds=1.0)
    row = serving.row_of(3, {"ecornn": "ecornn", "torch": "torch"}, sizes)
    assert row["ratio"] == 1.5 and row["sessions"] == 3 and row["ecornn"]["rate"] == 150 and row["torch"]["rate"] == 100
    assert row["torch"]["p50_ms"] == 30 and np.isclose(row["torch"]["p99_ms"], 60)


LINK = Link(20e-6, 300e9)
SPEECH = {"layers": 5, "bidirectional": True, "T": 300, "I": 101, "H": 800}
NETWORK = NETWORKS["8 adapters"]


def times(ms: float) -> dict[str, float]:
    return {"ms": ms, "p20": ms, "p80": ms, "runs": 5}


def results(cost: float) -> dict[str, Any]:
    """Results whose steps take as long as the model says, where hidden communication costs ``cost`` of its time."""
    stack, messages = Stack(**SPEECH), [1 << shift for shift in range(18, 29, 2)]
    alone = {rows: {"ecornn": 8.0 + 0.1 * rows, "torch": 30.0 + 0.2 * rows} for rows in (4, 8, 16, 32)}
    many = {}
    for rows in (4, 8, 16):
        whole = stack.communication(2, LINK, NETWORK)
        exposed = stack.exposed(0.6e-3 * alone[rows]["ecornn"], 2, LINK, NETWORK, by_layer=True)
        step = {"ecornn": exposed + cost * (whole - exposed), "torch": whole}
        many[str(rows)] = {f"{side}{end}": times(alone[rows][side] + (0 if end else 1e3 * step[side]))
                           for side in step for end in ("", "_alone")}
    ready = {how: {"buckets_ms": [1.0, 2.0], "backward_ms": 6.0, "alone_ms": 6.0}
             for how in ("layer_by_layer", "one_node")}
    overlap = dict.fromkeys(("layer_by_layer", "layer_by_layer_alone", "one_node", "one_node_alone", "all_reduce"),
                            times(10.0))
    one = {str(rows): {side: times(ms) for side, ms in by.items()} for rows, by in alone.items()}
    return {"speech": {"sizes": SPEECH, "one": one, "many": many},
            "data_parallel": {"messages": {str(m): 1e3 * LINK.all_reduce(m, 2, 0.0) for m in messages}, "ready": ready,
                              "overlap": overlap, "rows": 8,
                              "gradients": {"many": 1e-3, "one": 1e-3, "most_of_limit": 0.5}}}


def test_buckets_are_of_all_gradients_the_last_layers_first():
    stack = Stack(**SPEECH)
    assert stack.bytes == [4.0 * 2 * 3200 * (width + 800 + 2) for width in (101, 1600, 1600, 1600, 1600)]
    ready = stack.ready()
    assert sum(size for size, _ in ready) == pytest.approx(sum(stack.bytes))
    assert all(size == BUCKET for size, _ in ready[:-1])
    shares = [share for _, share in ready]
    assert shares == sorted(shares) and shares[:3] == [0.2, 0.2, 0.4] and shares[-1] == 1.0  # a layer is 2.3 buckets


@pytest.mark.parametrize("cost", [0.0, 0.35, 1.0])
def test_it_finds_what_its_own_steps_are_made_of(cost: float):
    model = Model(results(cost))
    assert model.link.latency == pytest.approx(LINK.latency) and model.link.bandwidth == pytest.approx(LINK.bandwidth)
    assert model.cost == pytest.approx(cost, abs=1e-9)
    for rows, many in results(cost)["speech"]["many"].items():
        for side in ("ecornn", "torch"):
            assert model.step("speech", side, int(rows), 2) == pytest.approx(many[side]["ms"] / 1e3)
    assert model.step("speech", "ecornn", 8, 1) == pytest.approx(8.8e-3)
    steps = [model.step("speech", "ecornn", 4, gpus, NETWORKS["1 adapter"]) for gpus in (2, 8, 16, 128)]
    assert steps == sorted(steps) and steps[2] > 1.5 * steps[1]  # one adapter is a tenth of what a host has within


def test_all_at_the_end_is_exposed_and_nothing_before_a_long_backward_pass_ends():
    stack = Stack(**SPEECH)
    whole, last = stack.communication(2, LINK, NETWORK), LINK.all_reduce(stack.ready()[-1][0], 2, NETWORK)
    assert stack.exposed(5e-3, 2, LINK, NETWORK, by_layer=False) == pytest.approx(whole)
    assert stack.exposed(5e-3, 2, LINK, NETWORK, by_layer=True) < whole / 2
    assert stack.exposed(10.0, 2, LINK, NETWORK, by_layer=True) >= last * (1 - 1e-9)
    assert LINK.all_reduce(1e9, 1, NETWORK) == 0.0


def test_the_page_has_what_the_results_say(tmp_path: Path):
    path = tmp_path / "made_up.json"
    data = {"environment": {"gpus": 2, "gpu": "A", "cores": 8, "torch": "2", "cuda": "13", "nccl": "2", "command": "c"},
            "parts": results(0.0)}
    path.write_text(json.dumps(data))
    text = run_many_gpus.section(path)
    assert "| speech | 8 | ecornn | 8.80" in text and "| 128 | 4 | " in text and "| 16 | 32 | " in text
    page = (ROOT / PAGE).read_text()
    shown = page.split(BEGIN)[1].split(END)[0]
    (name,) = {*re.findall(r"results/(\w+_many_gpus\.json)", page)}
    assert shown == run_many_gpus.section(ROOT / "benchmarks/results" / name)


def test_wrong_results_and_parts_that_hang_or_fail_are_said(tmp_path: Path):
    assert run_many_gpus.wrong("data_parallel", {"gradients": {"within": False}})
    run = {"failed": 0, "trials": 8, "wanted": 8}
    assert not run_many_gpus.wrong("tune", {"one": run, "many": run})
    assert "7 of 8 were made" in run_many_gpus.wrong("tune", {"one": run, "many": run, "killed": run | {"trials": 7}})
    sleeps, fails = (["-c", code] for code in ("import time; time.sleep(1e6)", "raise SystemExit('it is broken')"))
    assert "it is broken" in run_many_gpus.carry_out([(sleeps, {}), (fails, {})], 900.0, tmp_path)
    assert "took longer than 1 s" in run_many_gpus.carry_out([(sleeps, {})], 1.0, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_command_runs_on_a_cpu(tmp_path: Path):
    parts = made_by(tmp_path, "run_many_gpus.py", "--gpus", "2", "--seconds", "0.1", "--trials", "6", "--limit",
                    "600")["parts"]
    assert {*parts} == {*run_many_gpus.PARTS} and not any("fault" in part for part in parts.values())


@pytest.mark.slow
def test_sixteen_threads_on_busy_cores(tmp_path: Path):
    """Sharp only of wrong results and of threads that hang: memory is flat after minutes, not after seconds."""
    found = made_by(tmp_path, "soak.py", "1", "--few", "--each", "2", "--busy", "1", "--growth", "100")
    assert found["wrong"] == 0 and found["threads"] == 16
    assert all(kind["calls"] >= 2 for kind in found["kinds"].values())
    assert {kind.partition(": ")[2] for kind in found["kinds"]} == {
        "shared", "bound", "loaded", "called", "packed", "other weights", "trained", "copied"}


def soaked(monkeypatch: pytest.MonkeyPatch, cases: list[soak.Case], threads: int,
           seen: Callable[[soak.Soak], object]) -> soak.Soak:
    """A run whose waits between two looks wait until something is ``seen``; no time passes."""
    one = soak.Soak(cases, threads)
    monkeypatch.setattr(soak, "time", SimpleNamespace(
        monotonic=lambda: 0.0, sleep=lambda seconds: until(lambda: seen(one))))
    one.run(30)
    return one


def test_a_wrong_result_and_an_error_are_faults(monkeypatch: pytest.MonkeyPatch):
    right, wrong = (soak.Case("one", lambda found=found: [np.float32([found])], [np.float64([1.0])], 1e-5)
                    for found in (1.0, 1.01))
    one = soaked(monkeypatch, [right, wrong], 2, lambda one: one.faults)
    assert "an error of 0.01" in one.faults[0] and one.calls["one"] > 0
    one = soaked(monkeypatch, [soak.Case("other", lambda: [1 / 0], [])], 1, lambda one: one.faults)
    assert "ZeroDivisionError" in one.faults[0]


def test_threads_that_stand_still_are_a_fault(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(soak, "STILL", 0.2)
    go_on = threading.Event()
    waits = soak.Case("slow", lambda: go_on.wait() and [], [])
    one = soaked(monkeypatch, [waits], 1, lambda one: one.doing == ["slow"])
    go_on.set()
    assert one.faults == ["a thread has stood still for 0.2 seconds in slow"]


def measured(process: float = 600.0, given: float = 150.0, pieces: int = 16) -> soak.Memory:
    return soak.Memory(process, given, 10.0, pieces)


def test_memory_that_grows_is_a_fault():
    flat = [measured()] * 20
    assert not soak.not_flat(flat, 4, 16, True)
    more = [measured(process=600 + n) for n in range(20)]
    assert soak.not_flat(more, 4, 16, True) == ["memory has grown by 10.0 MB"] and not soak.not_flat(more, 4, 16, False)
    leaks = [measured(given=150 + n / 5) for n in range(20)]
    assert soak.not_flat(leaks, 4, 16, False) == ["what malloc() has given has grown by 2.0 MB"]
    assert soak.not_flat([*flat, measured(pieces=17)], 4, 16, True) == ["a layer keeps 17 workspaces"]


def test_what_is_kept_is_seen():
    """Memory of malloc() is counted without the workspaces of layers, which have a count of their own."""
    before = soak.Memory.now()
    pool, kept = Pool(), [HostMemory(3_000_000) for _ in range(25)]
    for memory in kept:
        pool.give("here", memory)
    after = soak.Memory.now()
    assert after.workspaces - before.workspaces == pytest.approx(75, abs=0.1) and after.pieces == 25
    assert abs(after.given - before.given) < 1
    for key in ("here",) * 25:
        pool.take(key, 0)
    assert soak.Memory.now().given - before.given == pytest.approx(75, abs=1) and len(kept) == 25


def test_no_number_is_an_error_and_growth_is_seen():
    assert soak.error([np.float32([np.nan])], [np.float64([1.0])]) == float("inf")
    assert soak.growth([10.0] * 20) == 0 and soak.growth([*range(20)]) == 10 and soak.growth([5.0]) == 0

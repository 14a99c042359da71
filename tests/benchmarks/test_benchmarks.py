"""All that benchmarks compute without a GPU: rows, floors, files of results, tables; grids in TOML and their runs."""

import json
import math
import sys
from pathlib import Path

import compare_flashrnn as flash
import compile_times
import measured_rows
import msgspec
import numpy as np
import pytest
import report
import torch
from click.testing import CliRunner, Result
from measured_rows import Results, Summary, mean, members, of_bench, read, singles
from refusals import refused
from rooms import ROOT
from search_tables import losses, worth
from side_by_side import CELLS, float64_forward

import ecornn
from ecornn import floor as floors
from ecornn.bench import turns
from ecornn.bench.grid import ALIKE, Case, Layer, Own, read_grid, selected
from ecornn.bench.results import Row, RowLog
from ecornn.bench.turns import Times
from ecornn.cells import get
from ecornn.cli import main
from ecornn.errors import ArgumentError, ScheduleError
from ecornn.report.measured import measured
from ecornn.schedules.rates import gpu_rates
from ecornn.tune.space import Candidate
from ecornn.workload import Workload

GRIDS = sorted((ROOT / "benchmarks" / "grids").glob("*.toml"))
ENVIRONMENT = {"gpu": "NVIDIA H100 80GB HBM3", "cuda": "13.0", "cudnn": 91900, "torch": "2.11.0",
               "device": "NVIDIA H100 80GB HBM3"}
FAILED = "rnn_tanh 300x20x800x800 float32"


def layers() -> list[Layer]:
    return read_grid(measured_rows.FILE).expanded("grid.toml")


def result(layer: Layer, us: float, ratio: float) -> Row:
    work = layer.case.layer().workload
    times = {side: Times(us * f, us * f - 0.01, us * f + 0.01, us * f, us * f, us * f, 9)
             for side, f in (("ecornn", 1.0), (layer.against[0], ratio))}
    return Row(case=layer.case, command="", device=ENVIRONMENT["gpu"], workload=work, seq=work.seq, batch=work.batch,
               schedule="persistent", config={"groups": 2}, provenance="record a.jsonl:1 of today: same",
               name=layer.name, us_per_step=times, ratios={layer.against[0]: ratio})


@pytest.fixture
def results(tmp_path: Path) -> Results:
    """Every row measured but one that failed; ratio 4 in float16, 2 in the others."""
    log = RowLog(tmp_path / "h100_grid.jsonl")
    log.begin(ENVIRONMENT)
    for one in layers():
        half = one.case.dtype == "float16"
        row = result(one, 1.0 + one.case.batch / 64, 4.0 if half else 2.0)
        log.add(one.name, Row(case=one.case, command="", failed="took longer") if one.name == FAILED else row)
    return read(log.path)


def test_the_grid():
    assert len(layers()) == len(members("")) == 115 and len(singles()) == 88, "the single layers of the grid"
    parts = {name for group in ("layers", "sizes", "scaling", "off", "up", "past") for name in members(group)}
    assert parts == {*members("")} and len(members("scaling")) == 7 and len(members("past")) == 6
    for off, up in zip(members("off"), members("up"), strict=True):
        (cell, small, *_), (other, large, *_) = off.split(), up.split()
        assert cell == other and [*map(int, small.split("x"))] < [*map(int, large.split("x"))]


@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in GRIDS])
def test_every_grid_names_layers_that_there_are(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    for one in read_grid(path).expanded(path.name):
        assert one.case.layer().training == one.case.training and one.against is not None
        for own in one.own.values():
            assert own.case(one.case).layer().hidden == one.case.hidden


def test_who_rounds_to_tf32():
    found = {one.name.split()[-1]: one for one in layers() if one.name.startswith("lstm 1024x16")}
    assert [(found[d].case.dtype, found[d].case.precision, found[d].against) for d in (
        "float32", "tf32", "tf32-both")] == [("float32", None, ("cudnn",)), ("float32", None, ("cudnn-tf32",)),
                                             ("float32", "tf32", ("cudnn",))]
    row = of_bench(json.loads(msgspec.json.encode(result(found["tf32"], 2.0, 3.0))))
    assert (row["dtype"], row["sides"], row["cudnn_us"], row["ratio"]) == ("tf32", ["ecornn", "cudnn"], 6.0, 3.0)


def test_sides_of_ours_are_compiled_otherwise():
    case = Case(cell="lstm", hidden=64, batch=4, seq=20, dtype="float16", target="sm_90a")
    plain = Own(schedule="layout_transform").planned(case).found
    turned = Own(schedule="layout_transform", config={"layout": "hidden"}).planned(case).found
    assert dict(turned.config) == dict(plain.config) | {"layout": "hidden"} != dict(plain.config)
    alike = Own(like="lstm", cell="lstm(peepholes)").planned(case)
    assert alike.workload.cell == "lstm(peepholes)"
    assert dict(alike.found.config) == dict(Own().planned(case).found.config)
    with pytest.raises(ScheduleError, match=ALIKE):
        Own(untuned=True).planned(Case(cell="lstm", hidden=77, batch=3, seq=20, dtype="float16", target="sm_90a"))


def test_a_floor_by_hand():
    """LSTM H=256 B=1 float16: 16 blocks of one cluster, one trip of 0.149 us, weights of 512 KB in registers."""
    found = floors.floor(floors.H100, "lstm", 1, 256, 256, "float16")
    assert (found.groups, found.blocks) == (1, 16) and found.exchange == pytest.approx(0.149 + 256 * 2 / 212e3)
    # 4 gates of 256x256, multiplied and added, with 8 columns of which one is used
    assert found.recurrent == pytest.approx(2 * 4 * 256 * 256 * 8 / (5917e3 * 16))
    assert found.projection == pytest.approx(2 * 4 * 256 * 256 / (5917e3 * 132))
    assert found.bytes == pytest.approx(2 * 256 * 2 / 3.0e6) and found.total == pytest.approx(0.1967, abs=1e-4)


def test_blocks_and_clusters():
    """Few clusters are on the chip at once: of 64 rows thirteen of 8, not eight of 16."""
    found = floors.floor(floors.H100, "lstm", 1, 64, 64, "float16")
    assert (found.blocks, found.exchange) == (1, 0.026)
    found = floors.floor(floors.H100, "lstm", 64, 256, 256, "float16")
    assert found.groups <= floors.H100.clusters(16) or found.blocks <= 8
    assert floors.polled(floors.H100, 1, 256, "float16", 1, 17) == dict(gpu_rates(floors.H100).bounds.exchange)[32]


def test_floors_grow():
    for layer in layers():
        work = layer.case.layer().workload
        least = floors.floor(floors.H100, work.cell, work.batch, work.input, work.hidden, work.arithmetic).total
        for more in ({"B": work.batch + 1}, {"I": work.input + 64}, {"H": work.hidden + 64}):
            size = {"B": work.batch, "I": work.input, "H": work.hidden} | more
            assert floors.floor(floors.H100, work.cell, **size, dtype=work.arithmetic).total >= least, (work, more)
    by_type = [floors.floor(floors.H100, "gru", 8, 512, 512, d).total for d in ("float16", "tf32", "float32")]
    assert by_type == sorted(by_type)


def test_weights_beyond_the_chip_are_fetched_each_step():
    """A vanilla layer of H=5632 in float16 has 63.4 MB, the chip's registers and shared memory 65.3."""
    fits, beyond = (floors.floor(floors.H100, "rnn_tanh", 1, H, H, "float16") for H in (5632, 8192))
    assert fits.bytes < 1.1, "from shared memory"
    assert beyond.bytes > (2 * 8192 ** 2 - 132 * (483 << 10)) / 3.0e6, "from device memory"


def test_no_floor_for_a_gpu_that_was_not_measured():
    assert [floors.measured(f"NVIDIA {name}") for name in ("A100-SXM4-80GB", "H100 PCIe", "H100 80GB HBM3")] == [
        None, None, floors.H100]


def test_summary(results: Results):
    rows, slow = {row["name"]: row for row in results.rows}, members("off")[0]
    rows[slow] |= {"ecornn_us": 3.0, "ratio": 0.5}
    s = Summary(rows.values(), ENVIRONMENT["gpu"])
    both, half, brain, tf32, _, single = s.groups()
    assert (half.mean, brain.mean, tf32.mean) == pytest.approx((4, 2, 2)) and both.mean == pytest.approx(math.sqrt(8))
    assert (len(both.rows), both.expected, len(single.rows), single.expected) == (70, 70, 5, 6)
    assert [r["name"] for r in s.failed] == [FAILED]
    pair = s.pairs()[0]
    assert pair.cliff == pytest.approx(3.0 / (1 + 20 / 64)) and pair.cliff > measured_rows.CLIFF
    assert all(p.cliff <= measured_rows.CLIFF for p in s.pairs()[1:]) and len(s.pairs()) == 8
    four = next(p for p in s.scaling() if p["B"] == 4)
    assert four["tflops"] == pytest.approx(2 * 1152 ** 2 * 4 / (1 + 4 / 64) / 1e6)
    assert four["share"] == pytest.approx(floors.floor(floors.H100, "rnn_tanh", 4, 1152, 1152, "float16").exchange
                                          / (1 + 4 / 64))
    assert all(r["over_floor"] == r["ecornn_us"] / r["floor_us"] > measured_rows.HIGH for r in s.high())


def test_tables(results: Results, monkeypatch: pytest.MonkeyPatch):
    short = report.short_grid(results)
    assert len(short) < 30 and "| float16 | 35 | 4.00x | 4.00x, LSTM 1024x16x768x768 | 0 |" in short
    assert "| float32 | 5 of 6 | 2.00x | 2.00x, LSTM 1024x16x768x768 | 0 |" in short
    assert f"1 rows failed: {FAILED}." in short
    monkeypatch.setattr(sys, "argv", ["report.py", str(results.path)])
    report.main()
    page = results.path.with_suffix(".md").read_text()
    assert page.count("| persistent | groups=2 | record a.jsonl |") == 114 and f"- {FAILED}: took longer" in page
    assert "| LSTM 256x1x256x256 | float16 | 1.02 [1.01, 1.03] | 1.3 | 4.00x |  | holds |" in page
    (group,) = report.groups_table(Results(results.path, ENVIRONMENT, [r | {"group": "a_b"} for r in results.good[:3]],
                                           None))[2:]
    assert group.startswith("| a b | 3 | 4.00x |") and mean([2.0, 8.0]) == pytest.approx(4.0)


def test_float64_forward_is_the_reference():
    """The check of the GPU benchmark against `ecornn.reference`, which was written apart from it."""
    torch.manual_seed(0)
    for cell, kind in CELLS.items():
        weights = {k: v.detach() for k, v in kind(5, 7).named_parameters()}
        x = torch.randn(6, 3, 5)
        expected = ecornn.reference(cell, x.numpy(), {k: v.numpy() for k, v in weights.items()})[0]
        # both are float64, in other orders of summation; 1e-12 is 4500 of its roundings
        np.testing.assert_allclose(float64_forward(cell, x, weights).numpy(), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("heads", [1, 3])
def test_the_slstm_beside_flashrnn(heads: int):
    cell, steps, batch, hidden = f"slstm(heads={heads})" if heads > 1 else "slstm", 5, 2, 6
    gates, weight = torch.randn(steps, batch, 4 * hidden), torch.randn(4 * hidden, hidden // heads)
    weights = {"weight_ih_l0": torch.eye(4 * hidden), "weight_hh_l0": weight, "bias_ih_l0": torch.zeros(4 * hidden)}
    y, _ = ecornn.reference(get(cell), gates.numpy(), {k: v.numpy() for k, v in weights.items()})
    found = float64_forward(cell, gates, weights)
    np.testing.assert_allclose(found.numpy(), y, rtol=1e-11, atol=1e-14)  # quotients of sums in other orders

    wx, r, b, states = flash.their_inputs(cell, gates, weight)
    own = hidden // heads
    assert states.shape == (4, 1, batch, heads, own) and b.shape == (heads, own, 4)
    h = torch.randn(batch, hidden)
    theirs = torch.einsum("bnp,ndgp->bndg", h.reshape(batch, heads, own), r) + wx[2]
    rh = torch.einsum("bnp,gndp->bndg", h.reshape(batch, heads, own), weight.reshape(4, heads, own, own))
    torch.testing.assert_close(theirs, rh + gates[2].reshape(batch, 4, heads, own).permute(0, 2, 3, 1))


@pytest.mark.parametrize("cell", ["lstm", "rnn_tanh"])
def test_gradients_beside_flashrnn(cell: str):
    """What FlashRNN's gradients are held against, in its layouts: those of a PyTorch layer that is given W x + b."""
    steps, batch, hidden = 5, 2, 6
    width = flash.described(cell)[1] * hidden
    gates, dh = torch.randn(steps, batch, width), torch.randn(steps, batch, hidden)
    layer, inputs = CELLS[cell](width, hidden).double(), gates.double().requires_grad_()
    with torch.no_grad():
        layer.weight_ih_l0.copy_(torch.eye(width))
        layer.bias_ih_l0.zero_()
    leaves = [inputs, layer.weight_hh_l0, layer.bias_hh_l0]
    dgates, dweight, dbias = torch.autograd.grad(layer(inputs)[0], leaves, dh.double())

    found = flash.exact_gradients(cell, gates, layer.weight_hh_l0.detach(), layer.bias_hh_l0.detach(), dh)
    wanted = [*flash.their_inputs(cell, dgates, dweight)[:2], dbias.reshape(-1, hidden).T[None]]
    for gradient, exact in zip(found, wanted, strict=True):
        # both are float64, in other orders of summation; sums of ten products may cancel
        torch.testing.assert_close(gradient, exact, rtol=1e-11, atol=1e-14)


def test_what_a_log_is_worth_elsewhere():
    here, other = (Workload("rnn_tanh", 64, 64, batch, 10, "float16") for batch in (4, 8))
    a, b, c = (Candidate.of("fused_step", {"units": units}) for units in (1, 2, 3))
    rows, unknown = worth({here: {a: 1.0, b: 2.0}, other: {c: 1.0}}, {here: {a: 3.0, b: 2.0, c: 4.0}, other: {a: 1.0}})
    assert unknown == 1  # nobody timed c there
    (row,) = rows
    assert (row["transferred_us"], row["best_us"], row["loss"]) == (3.0, 2.0, 1.5) and losses(rows)["worst_loss"] == 1.5


def test_compile_time_reads_nvccs_own_report(tmp_path: Path):
    times = tmp_path / "t.csv"
    assert compile_times.slowest(times) == {}
    line = "{} , {} , in , out , compute_90a , nvcc , {} , ms\n"
    times.write_text("source file name , phase name , phase input files , phase output file, arch, tool, metric, unit\n"
                     + line.format("a.cu", "gcc (preprocessing 1)", 20) + line.format("b.cu", "cicc", 400)
                     + line.format("a.cu", "cicc", 250.5) + line.format("b.cu", "ptxas", 100)
                     + line.format("", "nvcc (driver)", 9000))
    assert compile_times.slowest(times) == {"cicc": 0.4, "ptxas": 0.1}


SMALL = """
title = "Small layers"
against = ["torch", "loop"]
calls = 3
[sides.tall]
schedule = "cpu_steps"
[sides.relu]
cell = "rnn_relu"
[sides.other]
weights = "int16"
[all]
target = "cpu"
threads = 1
[[layers]]
group = "tiny"
cell = ["rnn_tanh", "gru"]
size = "4x2x8"
dtype = "float32"
at_most = 100.0
"""


def bench(*arguments: str, code: int = 0) -> Result:
    with pytest.MonkeyPatch.context() as patch:  # nothing waits until the machine is still
        patch.setattr(turns, "foreign", lambda: 0.0)
        patch.setattr(turns, "settle", lambda: None)
        result = CliRunner().invoke(main, ["bench", "--seconds", "0.02", *arguments])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


def grid_file(folder: Path, text: str) -> Path:
    path = folder / "grid.toml"
    path.write_text(text)
    return path


def test_lists_are_combinations_in_their_order(tmp_path: Path):
    grid = read_grid(grid_file(tmp_path, """
against = ["cudnn"]
[[layers]]
dtype = ["float16", "tf32", "tf32-both"]
cell = ["lstm", "gru"]
size = ["300x20x800", "1x5x100x300"]
[[layers]]
cell = "lstm"
size = "300x20x800"
dtype = "float16"
[[layers]]
cell = "tests/cells.py:Mine"
hidden = 8
layers = 2
training = true
against = ["none"]
sides.slow = {untuned = true}
at_least = 2
"""))
    layers = grid.expanded("grid.toml")
    assert [layer.name for layer in layers][:3] == ["lstm 300x20x800x800 float16", "lstm 1x5x100x300 float16",
                                                    "gru 300x20x800x800 float16"]
    assert len(layers) == 13, "a layer that is named twice is one"
    tf32, both = layers[4], layers[8]
    assert (tf32.against, tf32.case.dtype, tf32.case.precision) == (("cudnn-tf32",), "float32", None)
    assert (both.against, both.case.precision, both.name) == (("cudnn",), "tf32", "lstm 300x20x800x800 tf32-both")
    last = layers[-1]
    assert last.name == "Mine ?x?x8x8 2 layers training" and last.against == () and last.own["slow"].untuned
    assert last.at_least == 2 and [layer.name for layer in selected(layers, ["lstm 1x5", "Mine"])][-1] == last.name
    refused(ArgumentError, "--list shows the names", selected, layers, ["lstm gru"])


@pytest.mark.parametrize("text, said", [
    ("[[layers]]\ncel = 'lstm'\n", "cel"), ("[[layers]]\nsize = '300x20'\n", "300x20x800"), ("layers = 3", "array"),
    ("[[layers]]\ncell = 'lstm'\nhidden = 'x'\n", "hidden"), ("[[layers]\n", "TOML"), ("[sides.a]\nx = 1\n", "x")])
def test_what_is_no_grid_is_refused(text: str, said: str, tmp_path: Path):
    output = bench("--grid", str(grid_file(tmp_path, text)), code=2).output
    assert said in output and output.count("error: ") == 1


def test_sides_of_ours_and_a_file_that_goes_on(tmp_path: Path):
    grid, out = grid_file(tmp_path, SMALL), tmp_path / "rows.jsonl"
    listed = bench("--grid", str(grid), "--list").stdout.splitlines()
    assert listed == ["tiny rnn_tanh 4x2x8x8 float32 1 threads", "tiny gru 4x2x8x8 float32 1 threads"]
    said = bench("--grid", str(grid), "--only", "rnn_tanh", "--output", str(out))
    (row,) = RowLog(out).rows
    assert {*row["us_per_step"]} == {"ecornn", "relu", "other", "torch", "loop"} and row["name"] in listed[0]
    assert "cpu_steps" in row["left_out"]["tall"] and "leaving out tall" in said.stderr
    assert row["errors"]["relu"] < 1e-6 < row["errors"]["other"] < 1e-4 and row["calls"] == 3 and not row["wrong"]
    assert row["at_most"] == 100 and row["about"]["loop"].startswith("a loop over the step")
    said = bench("--grid", str(grid), "--output", str(out))
    assert "skipping 1 of 2 layers" in said.stderr and len(RowLog(out).rows) == 2
    whole = out.read_bytes()
    out.write_bytes(whole[:-5])  # as it is where a process was killed while it wrote
    assert [f"tiny {r['name']}" for r in RowLog(out).rows] == listed[:1]
    out.write_text("nothing\n")
    refused(ArgumentError, "a line of results", RowLog, out)
    out.write_bytes(whole)
    assert len(measured([out]).rows) == 2, "what `ecornn report --results` reads"


def test_rows_of_another_device_go_to_another_file(tmp_path: Path):
    RowLog(tmp_path / "rows.jsonl").begin({"gpu": "this"})
    with pytest.raises(ArgumentError, match="results of that; this one has results of this"):
        RowLog(tmp_path / "rows.jsonl").begin({"device": "that"})


@pytest.mark.slow
def test_layers_in_processes_of_their_own(tmp_path: Path):
    text = SMALL.replace('"gru"', '"lstm(nothing)"').replace('"torch", "loop"', '"none"')
    found = json.loads(bench("--grid", str(grid_file(tmp_path, text)), "--jobs", "1", "--longest", "600", "--json",
                           code=1).stdout)["rows"]
    assert not found[0]["failed"] and {*found[0]["us_per_step"]} == {"ecornn", "relu", "other"}
    assert "nothing" in found[1]["failed"]

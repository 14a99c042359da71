"""What the benchmarks compute without a GPU: rows, floors, files of results, tables."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import compile_phases
import grid
import grid_report
import grid_tables
import numpy as np
import pytest
from grid_log import GridLog
from grid_summary import Summary
from rooms import ROOT

from ecornn import floor as floors
from ecornn.schedules.rates import gpu_rates
from ecornn.targets import KNOWN

ENVIRONMENT = {"gpu": "NVIDIA H100 80GB HBM3", "cuda": "13.0", "cudnn": 91900, "torch": "2.11.0"}


def result(us: float, ratio: float) -> dict:
    """A measurement, as `compare` returns it."""
    return {"ecornn_us": us, "ecornn_p20": us - 0.01, "ecornn_p80": us + 0.01, "cudnn_us": us * ratio,
            "cudnn_p20": us * ratio, "cudnn_p80": us * ratio, "ratio": ratio, "error": 1e-4, "cudnn_error": 1e-4,
            "schedule": "persistent", "config": {"groups": 2}, "provenance": "record a.jsonl:1 of today: same",
            "repetitions": 9}


def with_floor(row: grid.Row, us: float, ratio: float) -> dict:
    least = floors.floor(floors.H100, row.cell, row.B, row.I, row.H, row.kind)
    return result(us, ratio) | {"floor_us": least.total, "floor": asdict(least), "over_floor": us / least.total}


@pytest.fixture
def log(tmp_path: Path) -> GridLog:
    """Every row measured; ratio 4 in float16, 2 in the others."""
    made = GridLog(tmp_path / "grid.jsonl")
    made.begin(ENVIRONMENT)
    for row in grid.rows():
        made.add(row, with_floor(row, 1.0 + row.B / 64, 4.0 if row.dtype == "float16" else 2.0))
    return made


def test_the_grid():
    rows = grid.rows()
    assert len(rows) == len(set(rows)) == 115
    assert len(set(grid.GRID)) == 88, "the single layers of the grid"
    pairs = {row for pair in grid.TILES for row in pair}
    assert set(rows) == {*grid.GRID, *grid.SCALING, *grid.MOST, *grid.PAST, *pairs}
    assert {p.dtype for p in grid.GRID} == {"float16", "bfloat16", "tf32", "tf32-both", "float32"}
    for off, up in grid.TILES:
        assert (off.B, off.H) < (up.B, up.H) and replace(off, B=up.B, I=up.I, H=up.H) == up


@pytest.mark.parametrize(("only", "count"), [
    (["lstm 1024x16x768x768 float16"], 1), (["gru tf32"], 2), (["tf32", "float32"], 14), (["x2816x2816"], 6),
    (["tf32-both"], 6), ([], 115)])
def test_filters(only: list[str], count: int):
    assert len(grid.select(only)) == count
    assert grid.select(only, 1) == grid.select(only)[:1]


def test_who_rounds_to_tf32():
    """A row of TF32 on both sides has a module, a floor and a plan of its own; the others share float32's."""
    exact, theirs, both = (grid.Row("lstm", 100, 4, 64, 64, d) for d in ("float32", "tf32", "tf32-both"))
    assert exact.file == theirs.file != both.file
    assert [r.kind for r in (exact, theirs, both)] == ["float32"] * 3
    assert [r.arithmetic for r in (exact, theirs, both)] == ["float32", "float32", "tf32"]
    assert [r.plan(KNOWN["sm_90a"]).workload.precision for r in (exact, theirs, both)] == [None, None, "tf32"]


def test_a_filter_without_rows_is_an_error():
    done = subprocess.run([sys.executable, ROOT / "benchmarks" / "compare_grid.py", "--list", "--only", "gru7"],
                          capture_output=True, text=True)
    assert done.returncode == 2 and "no row has 'gru7'" in done.stderr


def test_a_floor_by_hand():
    """LSTM H=256 B=1 float16: 16 blocks of one cluster, one trip of 0.149 us, weights of 512 KB in registers."""
    found = floors.floor(floors.H100, "lstm", 1, 256, 256, "float16")
    assert (found.groups, found.blocks) == (1, 16)
    assert found.exchange == pytest.approx(0.149 + 256 * 2 / 212e3)
    # 4 gates of 256x256, multiplied and added, with 8 columns of which one is used
    assert found.recurrent == pytest.approx(2 * 4 * 256 * 256 * 8 / (5917e3 * 16))
    assert found.projection == pytest.approx(2 * 4 * 256 * 256 / (5917e3 * 132))
    assert found.bytes == pytest.approx(2 * 256 * 2 / 3.0e6)
    assert found.total == pytest.approx(0.1967, abs=1e-4)


def test_one_block_exchanges_between_its_warps():
    found = floors.floor(floors.H100, "lstm", 1, 64, 64, "float16")
    assert (found.blocks, found.exchange) == (1, 0.026)


def test_few_clusters_are_on_the_chip_at_once():
    """64 rows: thirteen clusters of 8, not eight of 16. No group of 17 to 31 blocks is faster than one of 32."""
    found = floors.floor(floors.H100, "lstm", 64, 256, 256, "float16")
    assert found.groups <= floors.H100.clusters(16) or found.blocks <= 8
    assert floors.polled(floors.H100, 1, 256, "float16", 1, 17) == dict(gpu_rates(floors.H100).bounds.exchange)[32]


def test_floors_grow():
    """With the batch, the size and the data type, all else equal."""
    for row in grid.rows():
        least = floors.floor(floors.H100, row.cell, row.B, row.I, row.H, row.arithmetic).total
        for more in ({"B": row.B + 1}, {"I": row.I + 64}, {"H": row.H + 64}):
            size = {"B": row.B, "I": row.I, "H": row.H} | more
            assert floors.floor(floors.H100, row.cell, **size, dtype=row.arithmetic).total >= least, (row, more)
    by_type = [floors.floor(floors.H100, "gru", 8, 512, 512, d).total for d in ("float16", "tf32", "float32")]
    assert by_type == sorted(by_type)


def test_weights_beyond_the_chip_are_fetched_each_step():
    """A vanilla layer of H=5632 in float16 has 63.4 MB, the chip's registers and shared memory 65.3."""
    fits, not_any_more = (floors.floor(floors.H100, "rnn_tanh", 1, H, H, "float16") for H in (5632, 8192))
    assert fits.bytes < 1.1, "from shared memory"
    assert not_any_more.bytes > (2 * 8192 ** 2 - 132 * (483 << 10)) / 3.0e6, "from device memory"


def test_no_floor_for_a_gpu_that_was_not_measured():
    assert floors.measured("NVIDIA A100-SXM4-80GB") is None
    assert floors.measured("NVIDIA H100 PCIe") is None
    assert floors.measured("NVIDIA H100 80GB HBM3") is floors.H100


def test_an_interrupted_file_goes_on(tmp_path: Path):
    path = tmp_path / "grid.jsonl"
    first, second, third = grid.rows()[:3]
    begun = GridLog(path)
    begun.begin(ENVIRONMENT)
    begun.add(first, result(1.0, 2.0))
    begun.add(second, result(1.5, 2.0))
    path.write_bytes(path.read_bytes()[:-20])  # the last line was being written
    resumed = GridLog(path)
    assert resumed.of(first)["ecornn_us"] == 1.0
    assert resumed.of(second) is None
    resumed.begin(ENVIRONMENT | {"time": "later"})
    resumed.add(second, {"failed": "WrongResultError: error 1"})
    resumed.add(second, result(1.6, 2.0))
    resumed.add(third, {"failed": "nothing after 30 s"})
    read = GridLog(path)
    assert [r["name"] for r in read.rows] == [str(first), str(second), str(third)]
    assert read.of(second)["ecornn_us"] == 1.6
    assert read.of(third) is None, "it is measured again"
    assert read.environment["time"] == "later"
    assert all(json.loads(line) for line in path.read_text().splitlines())


@pytest.mark.parametrize("line", ["[]", "{}", '{"row": {}}', "nonsense", '{"row": 3}'])
def test_a_damaged_file_is_refused(tmp_path: Path, line: str):
    path = tmp_path / "grid.jsonl"
    path.write_text(f"{json.dumps({'environment': ENVIRONMENT})}\n{line}\n")
    with pytest.raises(ValueError, match=r"grid\.jsonl:2 is no line of results"):
        GridLog(path)


def test_rows_of_another_gpu_are_refused(log: GridLog):
    with pytest.raises(ValueError, match="H100"):
        GridLog(log.path).begin(ENVIRONMENT | {"gpu": "NVIDIA H200"})


def test_summary(log: GridLog):
    slow = grid.TILES[0][0]
    log.add(slow, with_floor(slow, 3.0, 0.5))
    log.add(grid.LAYERS[-1], {"failed": "nothing after 30 s"})
    s = Summary(log.rows)
    both, half, brain, tf32, _, single = s.groups()
    assert (half.mean, brain.mean, tf32.mean) == pytest.approx((4, 2, 2))
    assert both.mean == pytest.approx(math.sqrt(8))
    assert (len(both.rows), both.expected, len(single.rows), single.expected) == (70, 70, 5, 6)
    assert [r["name"] for r in s.failed] == [str(grid.LAYERS[-1])]
    pair = s.pairs()[0]
    assert pair.cliff == pytest.approx(3.0 / (1 + 20 / 64)) and not pair.good
    assert all(p.good for p in s.pairs()[1:])
    four = next(p for p in s.scaling() if p.B == 4)
    assert four.tflops == pytest.approx(2 * 1152 ** 2 * 4 / (1 + 4 / 64) / 1e6)
    assert four.share == pytest.approx(floors.floor(floors.H100, "rnn_tanh", 4, 1152, 1152, "float16").exchange
                                       / (1 + 4 / 64))
    assert {b.row["name"]: b.good for b in s.bounds()} == {
        str(row): most >= 1 + row.B / 64 for row, most in grid.MOST.items()}


def test_tables(log: GridLog, monkeypatch: pytest.MonkeyPatch):
    log.add(grid.LAYERS[-1], {"failed": "nothing after 30 s"})
    short = grid_tables.short(log.path, log)
    assert len(short) < 30 and "in rows `tf32-both` TF32 too" in short[-1]
    assert "| float16 | 35 | 4.00x | 4.00x, LSTM 1024x16x768x768 | 0 |" in short
    assert "| float32 | 5 of 6 | 2.00x | 2.00x, LSTM 1024x16x768x768 | 0 |" in short
    assert "1 rows failed: vanilla tanh 300x20x800x800 float32." in short
    monkeypatch.setattr(sys, "argv", ["grid_report.py", str(log.path)])
    monkeypatch.setattr(grid_report.importlib.util, "find_spec", lambda name: None)
    grid_report.main()
    long = log.path.with_suffix(".md").read_text()
    assert long.count("| persistent | groups=2 | record a.jsonl |") == 114
    with log.path.with_suffix(".csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 115 and rows[0]["config"] == "groups=2"
    assert float(rows[0]["floor_exchange"]) == pytest.approx(0.149 + 512 / 212e3)
    assert sum(bool(r["failed"]) for r in rows) == 1


def test_plots(log: GridLog):
    from grid_plots import plot_rows, plot_scaling

    for plot, name in ((plot_rows, "rows.png"), (plot_scaling, "scaling.png")):
        path = log.path.with_name(name)
        plot(log, path)
        assert path.read_bytes().startswith(b"\x89PNG")


def test_float64_forward_is_the_reference():
    """The check of the GPU benchmark against `ecornn.reference`, which was written apart from it."""
    import torch
    from side_by_side import CELLS, float64_forward

    import ecornn

    torch.manual_seed(0)
    for cell, kind in CELLS.items():
        weights = {k: v.detach() for k, v in kind(5, 7).named_parameters()}
        x = torch.randn(6, 3, 5)
        expected = ecornn.reference(cell, x.numpy(), {k: v.numpy() for k, v in weights.items()})[0]
        # both are float64, in other orders of summation; 1e-12 is 4500 of its roundings
        np.testing.assert_allclose(float64_forward(cell, x, weights).numpy(), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("heads", [1, 3])
def test_the_slstm_beside_flashrnn(heads: int):
    """What FlashRNN is given, in its layouts, and what is expected of it, against `ecornn.reference`."""
    import compare_flashrnn as flash
    import torch
    from side_by_side import float64_forward

    import ecornn
    from ecornn.cells import get

    cell, steps, batch, hidden = f"slstm(heads={heads})" if heads > 1 else "slstm", 5, 2, 6
    gates, weight = torch.randn(steps, batch, 4 * hidden), torch.randn(4 * hidden, hidden // heads)
    weights = {"weight_ih_l0": torch.eye(4 * hidden), "weight_hh_l0": weight, "bias_ih_l0": torch.zeros(4 * hidden)}
    y, _ = ecornn.reference(get(cell), gates.numpy(), {k: v.numpy() for k, v in weights.items()})
    matrix = flash.whole(cell, weight)
    found = float64_forward("slstm", gates, weights | {"weight_hh_l0": matrix, "bias_hh_l0": torch.zeros(4 * hidden)})
    np.testing.assert_allclose(found.numpy(), y, rtol=1e-11, atol=1e-14)  # quotients of sums in other orders

    wx, r, b, states = flash.their_inputs(cell, gates, weight)
    own = hidden // heads
    assert states.shape == (4, 1, batch, heads, own) and b.shape == (heads, own, 4)
    h = torch.randn(batch, hidden)
    theirs = torch.einsum("bnp,ndgp->bndg", h.reshape(batch, heads, own), r) + wx[2]
    ours = (h @ matrix.T + gates[2]).reshape(batch, 4, heads, own)
    torch.testing.assert_close(theirs, ours.permute(0, 2, 3, 1))


@pytest.mark.parametrize("cell", ["lstm", "rnn_tanh"])
def test_gradients_beside_flashrnn(cell: str):
    """What FlashRNN's gradients are held against, in its layouts: those of a PyTorch layer that is given W x + b."""
    import compare_flashrnn as flash
    import torch
    from flashrnn_training import exact_gradients
    from side_by_side import CELLS

    steps, batch, hidden = 5, 2, 6
    width = flash.described(cell)[1] * hidden
    gates, dh = torch.randn(steps, batch, width), torch.randn(steps, batch, hidden)
    layer, inputs = CELLS[cell](width, hidden).double(), gates.double().requires_grad_()
    with torch.no_grad():
        layer.weight_ih_l0.copy_(torch.eye(width))
        layer.bias_ih_l0.zero_()
    leaves = [inputs, layer.weight_hh_l0, layer.bias_hh_l0]
    dgates, dweight, dbias = torch.autograd.grad(layer(inputs)[0], leaves, dh.double())

    found = exact_gradients(cell, gates, layer.weight_hh_l0.detach(), layer.bias_hh_l0.detach(), dh)
    wanted = [*flash.their_inputs(cell, dgates, dweight)[:2], dbias.reshape(-1, hidden).T[None]]
    for gradient, exact in zip(found, wanted, strict=True):
        # both are float64, in other orders of summation; sums of ten products may cancel
        torch.testing.assert_close(gradient, exact, rtol=1e-11, atol=1e-14)


def test_what_a_log_is_worth_elsewhere():
    from compare_logs import summary, worth

    from ecornn.tune.space import Candidate
    from ecornn.workload import Workload

    here, other = (Workload("rnn_tanh", 64, 64, batch, 10, "float16") for batch in (4, 8))
    a, b, c = (Candidate.of("fused_step", {"units": units}) for units in (1, 2, 3))
    rows, unknown = worth({here: {a: 1.0, b: 2.0}, other: {c: 1.0}}, {here: {a: 3.0, b: 2.0, c: 4.0}, other: {a: 1.0}})
    assert unknown == 1  # nobody timed c there
    (row,) = rows
    assert (row["transferred_us"], row["best_us"], row["loss"]) == (3.0, 2.0, 1.5)
    assert summary(rows)["worst_loss"] == 1.5


def test_compile_time_reads_nvccs_own_report(tmp_path: Path):
    """Of two sources the one that took longest; lines of other phases and the head are left out."""
    times = tmp_path / "t.csv"
    assert compile_phases.slowest(times) == {}
    line = "{} , {} , in , out , compute_90a , nvcc , {} , ms\n"
    times.write_text("source file name , phase name , phase input files , phase output file, arch, tool, metric, unit\n"
                     + line.format("a.cu", "gcc (preprocessing 1)", 20) + line.format("b.cu", "cicc", 400)
                     + line.format("a.cu", "cicc", 250.5) + line.format("b.cu", "ptxas", 100)
                     + line.format("", "nvcc (driver)", 9000))
    assert compile_phases.slowest(times) == {"cicc": 0.4, "ptxas": 0.1}


def test_compile_time_rows_and_table():
    rows = compile_phases.layers("sm_90a", 16)
    assert 14 <= len(rows) <= 20 and len({json.dumps(r) for r in rows}) == len(rows)
    assert {r["dtype"] for r in rows} == {"float16", "bfloat16", "float32"}
    assert {"lstm", "gru", "rnn_tanh"} <= {r["cell"] for r in rows}
    seconds = dict.fromkeys(compile_phases.COLUMNS, 1.5)
    text = compile_phases.table([{"layer": rows[0], "schedule": "persistent", "bytes": 4096, **seconds}])
    assert text.splitlines()[2].endswith("| persistent |" + " 1.50 |" * 8 + " 4 |")

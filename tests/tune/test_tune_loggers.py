"""Loggers of a search: the rows of trials and results, and what TensorBoard and Weights & Biases are given."""

import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tune_fakes import DEVICE

from ecornn.cli.tune_command import tune as command
from ecornn.errors import MissingPackageError
from ecornn.tune import tune
from ecornn.tune.log import Gain
from ecornn.tune.loggers import TensorBoard, WandB, of_result, of_trial
from ecornn.tune.record import Choice, Finish, Times, Trial
from ecornn.tune.tuner import Progress
from ecornn.workload import Workload

LAYER = Workload("lstm", 8, 8, 1, 10)
BEST = Choice("cpu_sequence", {"rows": 4})
COMMAND = "--cell gru --hidden 8 --hidden 9 --batch 1 --seq 10 --trials 2 --target cpu --no-torch --tensorboard"
WRITERS = {"tensorboardX": "tensorboardX", "torch.utils.tensorboard": "tensorboard"}  # module -> package


class Run:
    """Stands in for a run of Weights & Biases: the two methods that are called of it."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.ended = False

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def finish(self) -> None:
        self.ended = True


def a_trial(us: float | None) -> Trial:
    return Trial(run="r-1", index=0, stage="search", workload=LAYER, device=DEVICE, schedule=BEST.schedule, revision=1,
                 generation=1, config=BEST.config, versions={}, seed=0, seconds=2.5,
                 times=Times.of([us]) if us else None, error=None if us else "it crashed")


def events(folder: Path) -> list[tuple[int, str, float | str]]:
    """(step, name, value) of all event files below a folder, as TFRecords hold them: length, sum, event, sum."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.rglob("*tfevents*")):
        data = path.read_bytes()
        while data:
            (length,), event = struct.unpack("<Q", data[:8]), Event()
            event.ParseFromString(data[12:12 + length])
            found += [(event.step, one.tag.removesuffix("/text_summary"), one.tensor.string_val[0].decode()
                       if one.HasField("tensor") else one.simple_value) for one in event.summary.value]
            data = data[16 + length:]
    return found


def test_rows_hold_what_is_known():
    first = of_trial(Progress(1, 4, a_trial(None), None, None), 1)
    assert first == {"layer": "lstm T=10 B=1 I=8 H=8 float32", "trial": 1, "failed": 1, "seconds": 2.5}
    assert of_trial(Progress(2, 4, a_trial(3.0), BEST, 3.0, 4.0), 1) == first | {
        "trial": 2, "time_us": 3.0, "best_us": 3.0, "default_us": 4.0}
    finish = Finish(run="r-1", reason="trials", trials=4, seconds=3.0, best=BEST, best_us=2.0, default=BEST,
                    default_us=4.0)
    assert of_result(LAYER, DEVICE, finish, Gain(2.0, 1.9, 2.1, True)) == {
        "layer": first["layer"], "trial": 4, "compared_best_us": 2.0, "compared_default_us": 4.0, "gain": 2.0,
        "reason": "trials", "configuration": "cpu_sequence rows=4", "device": "Test CPU"}


@pytest.mark.parametrize("writer", WRITERS)
def test_tensorboard_reads_every_row(writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip(WRITERS[writer], reason="the extra `test` has tensorboardX; tensorboard is much larger")
    for other in WRITERS.keys() - {writer}:
        monkeypatch.setitem(sys.modules, other, None)
    logger = TensorBoard(tmp_path)
    row = {"layer": "lstm T=10, backward", "trial": 3, "best_us": 2.5, "reason": "trials"}
    logger.log(row)
    monkeypatch.undo()
    logger.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["lstm_T=10_backward"]
    assert events(tmp_path) == [(3, key, value) for key, value in row.items()]


def test_without_a_writer_tensorboard_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in WRITERS:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingPackageError, match="pip install tensorboardX"):
        TensorBoard(tmp_path)


def test_weights_and_biases_has_a_section_for_each_layer():
    run = Run()
    logger = WandB(run)
    logger.log({"layer": "gru", "trial": 1, "time_us": 2.0})
    logger.finish()
    assert run.rows == [{"gru/layer": "gru", "gru/trial": 1, "gru/time_us": 2.0}] and run.ended


def test_a_search_logs_its_trials_and_its_result(tmp_path: Path):
    run, again = Run(), Run()
    options = {"hidden": 8, "batch": 1, "seq": 10, "target": "cpu", "trials": 3, "output": tmp_path / "log.jsonl"}
    result = tune("lstm", **options, logger=run)
    assert [row["trial"] for row in run.rows] == [1, 2, 3, 3] and not run.ended
    last = of_result(result.workload, result.device, result.finish, result.gain)
    assert run.rows[-1] == last and {row["layer"] for row in run.rows} == {str(result.workload)}
    assert [row["best_us"] for row in run.rows[:3]] == [best for *_, best in result.curve]
    tune("lstm", **options, logger=again)  # which was finished
    assert again.rows == [last]


def test_the_command_writes_for_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ECORNN_TUNING_LOGS", str(tmp_path / "logs"))
    result = CliRunner().invoke(command, [*COMMAND.split(), str(tmp_path / "runs")])
    assert result.exit_code == 0, result.output
    assert len([*(tmp_path / "runs").iterdir()]) == 2
    rows = events(tmp_path / "runs")
    assert [step for step, name, _ in rows if name == "time_us"] == [1, 2, 1, 2]
    assert sum(name == "configuration" for _, name, _ in rows) == 2

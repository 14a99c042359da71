"""Loggers of a search: after each trial, and with the result, a row of names and values goes to TensorBoard, to Weights
& Biases, or to any object with a method ``log``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ecornn.errors import MissingPackageError
from ecornn.schedules import config_text

if TYPE_CHECKING:
    from ecornn.device import Device
    from ecornn.tune.log import Gain
    from ecornn.tune.record import Finish
    from ecornn.tune.tuner import Progress
    from ecornn.workload import Workload

__all__ = ["Logger", "TensorBoard", "WandB"]

Row = dict[str, int | float | str]


class Logger(Protocol):
    """An object that ``tune(logger=...)`` takes. Every row has the ``layer`` as text and the number of a ``trial``."""

    def log(self, row: Row) -> object: ...


class TensorBoard:
    """Writes rows to event files below ``folder``, in a folder for each layer, which TensorBoard shows as a run.

    Raises :class:`~ecornn.errors.MissingPackageError` without PyTorch and tensorboard, and without tensorboardX."""

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError:
            try:
                from tensorboardX import SummaryWriter
            except ModuleNotFoundError as error:
                raise MissingPackageError("TensorBoard's files are written by PyTorch with tensorboard, or by "
                                          "tensorboardX, and neither is installed: pip install tensorboardX") from error
        self.folder, self.open = Path(folder), SummaryWriter
        self.writers: dict[str, Any] = {}

    def log(self, row: Row) -> None:
        name = re.sub(r"[^\w.=-]+", "_", str(row["layer"]))
        if name not in self.writers:
            self.writers[name] = self.open(str(self.folder / name), flush_secs=5)  # tensorboardX's flush waits for none
        writer = self.writers[name]
        for key, value in row.items():
            (writer.add_text if isinstance(value, str) else writer.add_scalar)(key, value, row["trial"])
        writer.flush()  # whoever watches sees each trial, also of a search that is stopped

    def finish(self) -> None:
        """Writes what is left, and closes the files."""
        for writer in self.writers.values():
            writer.close()


class WandB:
    """Logs rows to ``run``, which ``wandb.init()`` returned, with a section of charts for each layer."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def log(self, row: Row) -> None:
        self.run.log({f"{row['layer']}/{key}": value for key, value in row.items()})

    def finish(self) -> None:
        """Ends the run."""
        self.run.finish()


def of_trial(now: Progress, failed: int) -> Row:
    """The row of a trial: µs of a step, none of a trial that failed, and of the best and the default so far; the number
    of those that failed; seconds of the run."""
    times = now.trial.times
    return _row(layer=str(now.trial.workload), trial=now.done, time_us=times.median if times else None,
                best_us=now.best_us, default_us=now.default_us, failed=failed, seconds=now.trial.seconds)


def of_result(workload: Workload, device: Device, finish: Finish, gain: Gain | None) -> Row:
    """The row of a run's result, which has compared the fastest with the default once more: µs of a step of both, the
    gain, the reason for which the search ended, and the best configuration."""
    best = finish.best
    return _row(layer=str(workload), trial=finish.trials, compared_best_us=finish.best_us,
                compared_default_us=finish.default_us, gain=gain.ratio if gain else None,
                configuration=f"{best.schedule} {config_text(best.config)}" if best else None,
                reason=finish.reason, device=device.name)


def _row(**values: int | float | str | None) -> Row:
    return {name: value for name, value in values.items() if value is not None}

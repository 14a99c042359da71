"""The folders of tuning logs: the user's, then the one that ships with ecornn."""

from __future__ import annotations

import logging
import os
import re
import stat
from functools import lru_cache
from pathlib import Path

from ecornn.device import Device
from ecornn.errors import ArgumentError, RecordError
from ecornn.tune.log import SUFFIXES, TORN, Log, read
from ecornn.workload import Workload

VARIABLE = "ECORNN_TUNING_LOGS"
_told: set[tuple[str, ...]] = set()


def user_folder() -> Path:
    """The folder that tuning writes to: ``$ECORNN_TUNING_LOGS``, else one in the user's data folder. Raises
    :class:`ArgumentError` where the variable names no folder."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        try:
            return Path(chosen).expanduser()
        except RuntimeError as error:  # ~ of nobody
            raise ArgumentError(VARIABLE, chosen, "a folder") from error
    from platformdirs import user_data_dir

    return Path(user_data_dir("ecornn", appauthor=False)) / "tuning_logs"


def shipped_folder() -> Path:
    """The folder of the logs that ship with ecornn."""
    import ecornn.tuning_logs

    return Path(ecornn.tuning_logs.__path__[0])


def log_path(workload: Workload, device: Device) -> Path:
    """The user's log for a workload: one file for each workload and device."""
    device_name = re.sub(r"[^A-Za-z0-9]+", "-", f"{device.name} {device.arch}").strip("-").lower()
    cell, weights = workload.cell.replace("@", "-"), f"_w{workload.weights}" if workload.weights else ""
    precision = f"_{workload.precision}" if workload.precision else ""
    entry = "_backward" if workload.backward else ""
    return user_folder() / (f"{cell}_h{workload.hidden}_i{workload.input}_b{workload.batch}"
                            f"_t{workload.seq}_{workload.dtype}{weights}{precision}{entry}_{device_name}.jsonl")


@lru_cache(maxsize=4096)
def _read(path: Path, modified: int, size: int) -> Log:
    """The log at ``path`` when it was ``modified``, in ns: a session that tunes many workloads asks for it again."""
    return read(path)


def read_all(folders: list[Path] | None = None) -> Log:
    """The content of all logs, the user's first. Files that cannot be read are among the problems."""
    log = Log()
    for folder in folders if folders is not None else [user_folder(), shipped_folder()]:
        try:
            names = sorted(name for name in os.listdir(folder) if name.endswith(SUFFIXES))  # noqa: PTH208
        except FileNotFoundError:
            continue
        except OSError as error:
            log.problems.append(f"the folder of tuning logs {folder} cannot be read: {error.strerror}")
            continue
        for path in (folder / name for name in names):
            try:
                state = path.stat()
                if not stat.S_ISREG(state.st_mode):  # a pipe is waited for, as a link to a terminal is
                    raise RecordError(f"{path} is no regular file")
                log.extend(_read(path, state.st_mtime_ns, state.st_size))
            except (OSError, RecordError) as error:
                log.problems.append(str(error))
    return log


def warn(log: Log) -> None:
    """Warns once of problems in a log. A last line that was cut off is no surprise."""
    strange = tuple(problem for problem in log.problems if not problem.endswith(TORN))
    if strange and strange not in _told:
        _told.add(strange)
        more = f", and {len(strange) - 1} more, which `ecornn doctor` lists" if len(strange) > 1 else ""
        logging.getLogger("ecornn").warning("tuning logs: %s%s", strange[0], more)

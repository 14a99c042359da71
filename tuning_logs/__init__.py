"""The tuning logs that ship with ecornn: JSON lines, one trial a line (docs/TUNING_LOG_FORMAT.md).

The user's lie in another folder. Little is imported here, for programs that find their modules in the build cache.
"""

from __future__ import annotations

import os
from pathlib import Path

from ecornn.errors import ArgumentError

VARIABLE = "ECORNN_TUNING_LOGS"
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.xz")


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
    return Path(__path__[0])

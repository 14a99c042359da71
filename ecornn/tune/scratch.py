"""The folder of a run's temporary files; where the run is killed, a later one removes it."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from pathlib import Path

from ecornn import temporary

PREFIX, LOCK = "ecornn-tune-", "lock"
YOUNG = 60.0  # seconds since the folder last got a file: its owner may be about to take the lock


class Scratch:
    """A temporary folder, whose lock the operating system gives back when its owner dies."""

    def __init__(self) -> None:
        from filelock import FileLock

        with temporary.said():
            sweep()
            self.folder = tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)
        self.name = self.folder.name
        self.lock = FileLock(Path(self.name, LOCK), thread_local=False)  # whichever thread closes the pool
        with contextlib.suppress(OSError):  # without a lock nobody sweeps it
            self.lock.acquire(timeout=0)

    def cleanup(self) -> None:
        """Removes the folder with what is in it."""
        self.lock.release()
        self.folder.cleanup()


def sweep() -> None:
    """Removes the folders of runs that were killed."""
    from filelock import FileLock

    for folder in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        # OSError: of a run that lives (filelock's Timeout), another user's, or removed by another process.
        with contextlib.suppress(OSError):
            if (folder / LOCK).is_file() and time.time() - folder.stat().st_mtime > YOUNG:
                with FileLock(folder / LOCK, timeout=0):
                    shutil.rmtree(folder, ignore_errors=True)

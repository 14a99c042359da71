"""A file of results that survives an interruption: JSON lines, appended one at a time."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import IO

from grid import Row


class GridLog:
    """Rows that a file has, and more as they are measured.

    A line is ``{"environment": ...}``, which holds for what follows, or ``{"row": ...}``. A last line that was cut is
    measured again; anything else that is no such line raises ValueError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.environment: dict = {}
        self._rows: dict[str, dict] = {}
        self._end = 0
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True) if path.exists() else [], 1):
            if not line.endswith(b"\n"):
                break
            self._end += len(line)
            self._take(line, number)

    def _take(self, line: bytes, number: int) -> None:
        try:
            entry = json.loads(line)
            if "environment" in entry:
                self.environment = dict(entry["environment"])
            else:
                self._rows[entry["row"]["name"]] = entry["row"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{self.path}:{number} is no line of results: {line[:80]!r}") from None

    @property
    def rows(self) -> list[dict]:
        """The latest measurement of every row, in the order of the file."""
        return list(self._rows.values())

    def of(self, row: Row) -> dict | None:
        """What was measured of a row; None where nothing was, or where it failed."""
        found = self._rows.get(str(row))
        return None if found is None or "failed" in found else found

    def begin(self, environment: dict) -> None:
        """Appends where the rows to come are measured; refuses another GPU than the file's."""
        known = self.environment.get("gpu", environment["gpu"])
        if known != environment["gpu"]:
            raise ValueError(f"{self.path} has rows of {known}; write those of {environment['gpu']} to another file")
        self.environment = environment
        self._write({"environment": environment})

    def add(self, row: Row, result: dict) -> dict:
        """Appends what was measured of a row, and returns it as the file has it."""
        entry = asdict(row) | result | {"name": str(row), "dtype": row.dtype}
        self._rows[str(row)] = entry
        self._write({"row": entry})
        return entry

    def _write(self, entry: dict) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            self._append(file, json.dumps(entry).encode() + b"\n")

    def _append(self, file: IO[bytes], line: bytes) -> None:
        file.truncate(self._end)  # a line that was cut
        file.write(line)
        file.flush()
        os.fsync(file.fileno())
        self._end += len(line)

"""A file of results that survives an interruption: JSON lines, appended one at a time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from ecornn.errors import ArgumentError


class RowLog:
    """Rows that a file has, and more as they are measured.

    A line is ``{"environment": ...}``, which holds for what follows, or ``{"row": ...}``, of which ``name`` says what
    was measured. A last line that was cut is measured again; anything else that is no such line is an
    :class:`ArgumentError`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.environment: dict[str, Any] = {}
        self._rows: dict[str, dict[str, Any]] = {}
        self._end = 0
        self.fresh = True  # nothing was appended yet
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True) if path.exists() else [], 1):
            if not line.endswith(b"\n"):
                break
            self._end += len(line)
            self._take(line, number)

    def _take(self, line: bytes, number: int) -> None:
        try:
            entry: dict[str, Any] = msgspec.json.decode(line)
            if "environment" in entry:
                self.environment = dict(entry["environment"])
            else:
                self._rows[entry["row"]["name"]] = entry["row"]
        except (msgspec.DecodeError, KeyError, TypeError, ValueError):
            raise ArgumentError("file", f"{self.path}:{number}", f"a line of results, not {line[:80]!r}") from None

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The latest measurement of every row, in the order of the file."""
        return list(self._rows.values())

    def has(self, name: str) -> bool:
        """Tells whether a row was measured; one that failed was not."""
        return not self._rows.get(name, {"failed": True}).get("failed")

    def begin(self, environment: dict[str, Any]) -> None:
        """Appends where the rows to come are measured; refuses another device than the file's."""
        known, now = (of.get("gpu") or of.get("device") for of in (self.environment, environment))
        if known and now and known != now:
            raise ArgumentError("--output", str(self.path), f"a file with rows of {now}; this one has those of {known}")
        self.environment, self.fresh = environment, False
        self._write({"environment": environment})

    def add(self, name: str, row: Any) -> dict[str, Any]:
        """Appends a row, and returns it as the file has it."""
        entry: dict[str, Any] = msgspec.to_builtins(row) | {"name": name}
        self._rows[name] = entry
        self._write({"row": entry})
        return entry

    def _write(self, entry: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = msgspec.json.encode(entry) + b"\n"
        with self.path.open("ab") as file:
            file.truncate(self._end)  # a line that was cut
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._end += len(line)

"""Records for others: one's own, their files in a repository of logs, and the rules that a change of it must keep."""

from __future__ import annotations

import filecmp
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ecornn.device import Device
from ecornn.errors import RecordError
from ecornn.temporary import replacing
from ecornn.tune.log import Line, Log, is_trial, packed, read, read_all, slug
from ecornn.tune.record import encode
from ecornn.tune.selection import best_lines, event, merge, worth_keeping
from ecornn.tune.sources import FOLDER
from ecornn.tuning_logs import user_folder

IMPORTED = "imported.jsonl"  # the records of others, in the user's folder
KEEP = 16  # configurations of each layer and device that are shared, the fastest ones


def is_own(path: Path) -> bool:
    """Tells whether a log is of runs of this user."""
    return path.parent == user_folder() and path.name != IMPORTED


def devices(lines: Iterable[Line]) -> dict[tuple[Path, str], Device]:
    """The device of each run, by file and run."""
    return {(line.path, line.record.run): line.record.device for line in lines if hasattr(line.record, "device")}


def name_of(device: Device) -> str:
    return f"{device.name} ({device.arch})"


def runs_of(lines: Sequence[Line], device: str | None, since: str) -> list[Line]:
    """The lines of runs on a device with that text in its name or architecture, with records of that time or later;
    None, or an empty text: of any."""
    of = devices(lines)
    late = {(line.path, line.record.run) for line in lines if line.record.time >= since}
    fitting = {run for run, d in of.items() if (device or "").lower() in f"{d.name} {d.arch}".lower()}
    return [line for line in lines if (line.path, line.record.run) in late & fitting]


def news(before: Log, lines: Sequence[Line],
         revisions: Mapping[str, int]) -> tuple[list[Line], dict[str, Counter[str]]]:
    """The lines that ``before`` does not have alike, and for each device the number of new ``records``, of
    ``contradictions``, and of layers whose best record is a new one: the ``first`` of the layer, or a ``faster``."""
    of, known = devices(lines), {event(line.record): line.record for line in merge(before.lines).lines}
    found = {name_of(device): Counter(records=0, first=0, faster=0, contradictions=0) for device in of.values()}
    told = [line for line in lines if known.get(event(line.record)) != line.record]
    new = [line for line in merge(told).lines if event(line.record) not in known]
    fresh = {id(line) for line in new}
    for line in told:
        if (device := of.get((line.path, line.record.run))) is not None:
            found[name_of(device)]["contradictions"] += event(line.record) in known
            found[name_of(device)]["records"] += id(line) in fresh
    served = {(t.workload, t.device.identity) for t in (line.record for line in best_lines(before, revisions))}
    for line in best_lines(Log([*before.lines, *new]), revisions):
        if id(line) in fresh:
            trial = line.record
            kind = "faster" if (trial.workload, trial.device.identity) in served else "first"
            found[name_of(trial.device)][kind] += 1
    return told, found


def add(repository: Path, lines: Sequence[Line], revisions: Mapping[str, int]) -> dict[Path, list[Line]]:
    """Adds to a repository of logs what look-up could use of the lines and the repository has no record of: a file for
    each device, named by :func:`file_name`. Failures stay out, whose messages may name a user's files. Returns the
    lines of each file. Raises :class:`RecordError` where a file cannot be written."""
    of = devices(lines)
    known = {event(line.record) for line in read_all([repository, repository / FOLDER]).lines}
    new = [line for line in merge(worth_keeping(lines, revisions, KEEP)).lines
           if event(line.record) not in known and not (is_trial(line) and line.record.error)]
    runs = {line.record.run for line in new if is_trial(line)}
    split: dict[str, list[Line]] = {}
    for line in new:
        if line.record.run in runs:
            split.setdefault(slug(of[line.path, line.record.run]), []).append(line)
    written = {}
    for name, own in split.items():
        text = b"".join(encode(line.record) for line in own)
        path = repository / FOLDER / file_name(name, text)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as whole:
            whole.write_bytes(packed(text, path))
        written[path] = own
    return written


def file_name(device: str, text: bytes) -> str:
    """The name of a file in a repository of logs: its device and a digest of its text, so that files of several people
    never meet, and none can be changed under its name."""
    return f"{device}-{hashlib.sha256(text).hexdigest()[:12]}.jsonl.xz"


def request(files: Mapping[Path, Sequence[Line]]) -> str:
    """A text for whoever is asked to take these files: devices, layers, versions, and the commands that check them."""
    of = {path: [line.record for line in lines if is_trial(line)] for path, lines in files.items()}
    every = [trial for trials in of.values() for trial in trials]
    versions = sorted({f"{name} {version}" for trial in every for name, version in trial.versions.items()})
    cells = sorted({trial.workload.cell for trial in every})
    rows = [f"- {FOLDER}/{path.name}: {len(lines)} records of {len({t.workload for t in of[path]})} layers, "
            + " and ".join(sorted({name_of(d) for d in devices(lines).values()})) for path, lines in files.items()]
    return "\n".join([
        f"Tuning records of {', '.join(sorted({name_of(trial.device) for trial in every}))}", "", *rows,
        f"- cells: {', '.join(cells)}", f"- versions: {', '.join(versions)}", "",
        "On such a device these measure some of the records again:", "",
        *(f"    ecornn log verify {FOLDER}/{path.name}" for path in files), "",
        "This checks the change; BASE is a checkout of what was before:", "",
        "    ecornn log check . --base BASE", ""])


def faults(before: Path, after: Path) -> list[str]:
    """The rules that a change of a repository of logs breaks, a text each. It may add files to ``FOLDER``, and nothing
    else: each of records of one device, without a damaged line, named by :func:`file_name`; and no record may
    contradict another one. ``before`` and ``after`` are folders with the repository's files."""
    old, new, found = entries(before), entries(after), []
    for name, path in old.items():
        if name not in new:
            found.append(f"{name} is gone: only add files, and leave those that are there")
        elif not same(path, new[name]):
            found.append(f"{name} has changed: only add files, and leave those that are there")
    added: list[Line] = []
    for name in sorted(new.keys() - old):
        path = new[name]
        if path.is_symlink() or not path.is_file() or not name.endswith(".jsonl.xz"):
            found.append(f"{name} is no file *.jsonl.xz: add nothing but logs, as `ecornn log push` writes them")
            continue
        try:
            log = read(path)
        except RecordError as error:
            found.append(str(error))
            continue
        found += log.problems[:5]
        added += log.lines
        text, of = b"".join(encode(line.record) for line in log.lines), [*{*map(slug, devices(log.lines).values())}]
        if len(of) != 1:
            found.append(f"{name} has records of {len(of)} devices: make it a file for each device")
        elif name != (right := f"{FOLDER}/{file_name(of[0], text)}"):
            found.append(f"{name} is not named by its device and content: its name would be {right}")
    there = merge(read_all([before, before / FOLDER]).lines).lines
    return found + merge([*there, *added]).conflicts


def same(one: Path, other: Path) -> bool:
    """Tells whether two files have the same content, or two links lead to the same place."""
    if one.is_symlink() or other.is_symlink():
        return one.is_symlink() and other.is_symlink() and one.readlink() == other.readlink()
    return filecmp.cmp(one, other, shallow=False)


def entries(folder: Path) -> dict[str, Path]:
    """The files of a checkout and what else is no folder, by name, without what is Git's."""
    paths = {path.relative_to(folder): path for path in sorted(folder.rglob("*"))
             if path.is_symlink() or not path.is_dir()}
    return {name.as_posix(): path for name, path in paths.items() if name.parts[0] != ".git"}

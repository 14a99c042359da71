"""Compressed logs: read as their text is, written whole, and no room for a file that is larger than it looks."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path

import pytest
from test_records import trial

from ecornn.errors import RecordError
from ecornn.tune.journal import Journal
from ecornn.tune.log import MAX_FILE, Log, append, is_trial, parse, read, read_all, rewrite, shipped_folder
from ecornn.tune.record import Trial, encode

ENDS = {".gz": gzip.compress, ".xz": lzma.compress}
TEXT = encode(trial()) + b"junk\n" + encode(trial(index=2))


@pytest.fixture(params=ENDS)
def packed(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"log.jsonl{request.param}"
    path.write_bytes(ENDS[request.param](TEXT))
    return path


def test_a_folder_may_have_plain_and_compressed_logs(packed: Path):
    append(packed.with_name("mine.jsonl"), trial(index=7))
    log = read_all([packed.parent])
    assert [(line.place, line.record.index) for line in log.lines] == [
        (f"{packed.name}:1", 0), (f"{packed.name}:3", 2), ("mine.jsonl:1", 7)]
    assert log.problems == [f"{packed}:2: no JSON object"]


def test_several_streams_are_one_log(packed: Path):
    packed.write_bytes(packed.read_bytes() + ENDS[packed.suffix](encode(trial(index=3))))
    assert [t.index for t in read(packed).trials()] == [0, 2, 3]


def test_nothing_is_appended(packed: Path):
    before = packed.read_bytes()
    for action in (lambda: append(packed, trial()), lambda: Journal.open(packed, "ab", True)):
        with pytest.raises(RecordError, match=r"is compressed, so that nothing is appended to it; name a \.jsonl"):
            action()
    assert packed.read_bytes() == before and list(packed.parent.iterdir()) == [packed]


def test_a_log_is_rewritten_as_its_name_says(packed: Path):
    rewrite(packed, lambda log: [line.record for line in log.lines][::-1])
    assert packed.read_bytes()[:2] == {".gz": b"\x1f\x8b", ".xz": b"\xfd7"}[packed.suffix]
    assert [t.index for t in read(packed).trials()] == [2, 0] and not read(packed).problems


def test_damage_is_one_error_that_names_the_file(packed: Path):
    data = packed.read_bytes()
    for cut in range(1, len(data)):
        packed.write_bytes(data[:cut])
        with pytest.raises(RecordError, match=f"{packed} is damaged"):
            read(packed)
    for byte in range(0, len(data), 7):
        packed.write_bytes(data[:byte] + bytes([data[byte] ^ 0x40]) + data[byte + 1:])
        try:  # the file's time in gzip is nobody's
            assert b"junk\n".join(map(encode, read(packed).trials())) == TEXT and packed.suffix == ".gz"
        except RecordError as error:
            assert f"{packed} is damaged" in str(error)
    packed.write_bytes(b"")
    assert not read(packed).lines


def test_little_that_becomes_much_is_refused(packed: Path):
    packed.write_bytes(ENDS[packed.suffix](bytes(MAX_FILE + 1)))
    assert packed.stat().st_size < 1 << 20
    with pytest.raises(RecordError, match="larger than 64 MiB"):
        read(packed)


def test_xz_gets_no_more_memory_than_logs_need(tmp_path: Path):
    path = tmp_path / "log.jsonl.xz"
    path.write_bytes(lzma.compress(TEXT, filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 30}]))
    with pytest.raises(RecordError, match="damaged: Memory usage limit"):
        read(path)


def test_what_ships_is_whole():
    log = read_all([shipped_folder()])
    assert not log.problems and len({line.path for line in log.lines}) == 7 and len(log.lines) > 10_000


@pytest.mark.parametrize("hidden", [128, 800, 12])
def test_lines_of_other_sizes_are_passed_over(hidden: int):
    """Written in any way; what may be of this size is read as strictly as ever."""
    def trials(log: Log) -> list[tuple[str, Trial]]:
        return [(line.place, line.record) for line in filter(is_trial, log.lines)]

    log = read_all([shipped_folder()], hidden)
    assert trials(log) == [one for one in trials(read_all([shipped_folder()])) if one[1].workload.hidden == hidden]
    rows = [row % hidden for row in (b'{"hidden": %d, "nobody": 1}', b'{"hidden"\t:%d0}', b'{"hid": %d}', b"junk %d")]
    assert [problem.partition(" ")[0] for problem in parse(b"\n".join(rows), Path("log"), hidden).problems] == [
        "log:1:", "log:3:", "log:4:"]

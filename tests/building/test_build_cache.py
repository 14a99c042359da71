"""The build cache: made once, by one of many, and never believed when damaged."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ecornn.build import cache


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


class Maker:
    """Counts how often something is made."""

    def __init__(self, content: bytes = b"code") -> None:
        self.content, self.made = content, 0

    def __call__(self) -> bytes:
        self.made += 1
        return self.content


def test_an_entry_is_made_once_and_by_its_parts(root: Path):
    make, other = Maker(), Maker(b"other")
    assert [cache.entry("cubin", ("a", "b"), make) for _ in range(3)] == [b"code"] * 3 and make.made == 1
    assert cache.entry("cubin", ("ab", ""), other) == b"other"  # not the same parts
    assert cache.entry("object", ("a", "b"), other) == b"other" and other.made == 2
    assert len(cache.entries(root)) == 3


@pytest.mark.parametrize("damage", [lambda d: d[:-1], lambda d: d[:8], lambda d: b"", lambda d: d[:-1] + b"X"])
def test_a_damaged_entry_is_made_again(root: Path, damage):
    make = Maker()
    cache.entry("cubin", ("a",), make)
    ((_, _, path),) = cache.entries(root)
    path.write_bytes(damage(path.read_bytes()))
    assert cache.entry("cubin", ("a",), make) == b"code" and make.made == 2
    assert cache.entry("cubin", ("a",), make) == b"code" and make.made == 2


def test_many_that_want_one_entry_wait_for_the_one_that_makes_it(root: Path):
    make = Maker()
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(lambda _: cache.entry("cubin", ("a",), make), range(32))) == {b"code"}
    assert make.made == 1


def test_what_fails_is_not_kept(root: Path):
    def fail() -> bytes:
        raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError, match="no compiler"):
        cache.entry("cubin", ("a",), fail)
    assert not cache.entries(root) and cache.entry("cubin", ("a",), Maker()) == b"code"


def test_the_oldest_go_first(root: Path):
    for age, name in enumerate("abcdef"):
        cache.entry("cubin", (name,), Maker(name.encode() * 100))
        (new,) = [p for t, _, p in cache.entries(root) if t > 1e6]
        os.utime(new, (1000 - age, 1000 - age))
    size = sum(s for _, s, _ in cache.entries(root))
    cache.evict(root, size)
    assert len(cache.entries(root)) == 6
    cache.evict(root, size - 1)
    left = [p.read_bytes()[cache.DIGEST:][:1] for _, _, p in sorted(cache.entries(root), reverse=True)]
    assert left == [b"a", b"b", b"c", b"d"]  # at most ROOM of the cap
    make = Maker()
    cache.entry("cubin", ("f",), make)
    assert make.made == 1


def test_a_process_that_writes_much_evicts(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache, "CAP", 3000)
    monkeypatch.setattr(cache, "EVERY", 1)
    for number in range(10):
        cache.entry("cubin", (str(number),), Maker(b"x" * 1000))
    assert sum(size for _, size, _ in cache.entries(root)) <= 3000


def test_it_can_be_turned_off_and_does_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(cache.VARIABLE, cache.OFF)
    make = Maker()
    assert cache.folder() is None and [cache.entry("cubin", ("a",), make) for _ in range(2)] == [b"code"] * 2
    (tmp_path / "file").touch()
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "file" / "cache"))  # cannot be made
    assert cache.entry("cubin", ("a",), make) == b"code" and make.made == 3

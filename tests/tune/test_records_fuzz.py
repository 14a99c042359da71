"""Mutated lines: the parser returns a record or raises RecordError, and nothing else ever happens."""

from __future__ import annotations

import random
from pathlib import Path

from test_records import trial
from test_tune_merge import finish, start

from ecornn.errors import RecordError
from ecornn.tune.log import parse
from ecornn.tune.record import decode, encode

TOKENS = [b"null", b"true", b"-1", b"1e999", b"NaN", b"[]", b"{}", b'""', b"\\u0000", b"\\ud800", b"9" * 40,
          b"[" * 200, b'"' + b"x" * 300 + b'"', b"\xff\xfe", b",", b":", b"}", b'"kind":"start"', b"-0.0",
          b'"__import__(\'os\')"', b"1.5", b"\n", b"\r", b"\x00"]


def mutated(rng: random.Random, line: bytes) -> bytes:
    """A line with one to four mutations: bytes, tokens, cuts, repetitions, swapped fields."""
    data = bytearray(line)
    for _ in range(rng.randint(1, 4)):
        at, end = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
        kind = rng.randrange(6)
        if kind == 0 and data:
            data[at % len(data)] = rng.randrange(256)
        elif kind == 1:
            data[at:at] = rng.choice(TOKENS)
        elif kind == 2:
            del data[at:min(end, at + 40)]
        elif kind == 3:
            data[at:at] = data[at:min(end, at + 60)]
        elif kind == 4:
            data[at:at + rng.randint(1, 12)] = rng.choice(TOKENS)
        else:
            parts = bytes(data).split(b",")
            rng.shuffle(parts)
            data = bytearray(b",".join(parts))
    return bytes(data)


def fuzz(count: int, seed: int) -> tuple[int, int]:
    """How many of the mutated lines were accepted and refused."""
    rng = random.Random(seed)
    lines = [encode(r) for r in (trial(), trial(times=None, check=None, error="run: x"), start(), finish())]
    accepted = refused = 0
    for _ in range(count):
        line = mutated(rng, rng.choice(lines))
        try:
            record = decode(line)
        except RecordError as error:
            assert str(error)
            refused += 1
        else:
            assert decode(encode(record)) == record
            accepted += 1
    return accepted, refused


def test_a_hundred_thousand_mutated_lines():
    accepted, refused = fuzz(100_000, 0)
    assert accepted > 500 and refused > 50_000  # both sides are exercised


def test_a_mutated_file_gives_every_line_or_a_problem_that_names_it():
    rng = random.Random(2)
    good = [trial(index=i) for i in range(200)]
    rows = [encode(record) for record in good]
    for i in range(0, 200, 2):
        rows[i] = mutated(rng, rows[i]).replace(b"\n", b" ") + b"\n"
    log = parse(b"".join(rows), Path("x.jsonl"))
    assert len(log.lines) + len(log.problems) == sum(1 for row in rows if row.strip())
    kept = [line.record for line in log.lines]
    assert [r for r in kept if r.index % 2] == good[1::2] or len(kept) > 100
    assert all(problem.startswith("x.jsonl:") for problem in log.problems)

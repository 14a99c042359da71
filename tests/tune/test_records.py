"""The log's format: of any file records come out, or a problem that names the line; files are written whole."""

import gzip
import json
import lzma
import multiprocessing
import random
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecornn.errors import ArgumentError, RecordError
from ecornn.targets import KNOWN
from ecornn.tune.log import MAX_FILE, Journal, Log, append, is_trial, parse, read, read_all, rewrite, shipped_folder
from ecornn.tune.record import MAX_LINE, VERSION, Choice, Finish, Start, Times, Trial, decode, encode
from ecornn.workload import Workload

WORK = Workload("lstm", 800, 800, 20, 300, "bfloat16")
H100 = KNOWN["sm_90a"]
DAY = "2026-01-31T12:00:00Z"


def trial(**changes: object) -> Trial:
    fields = {"run": "ab-1", "index": 0, "stage": "search", "workload": WORK, "device": H100, "schedule": "persistent",
              "revision": 1, "generation": 2, "config": {"blocks": 100, "hidden": True, "m": "x"},
              "versions": {"tvm": "0.27"}, "seed": 0, "seconds": 1.5, "times": Times.of([3.0, 1.0, 2.0]), "check": 1e-3,
              "source": "00ff"}
    return Trial(**{**fields, **changes})


def start(run: str = "ab-1") -> Start:
    return Start(run=run, workload=WORK, device=H100, schedules={"persistent": 1}, trials=9, seed=0, versions={},
                 time=DAY)


def finish(run: str = "ab-1", us: float = 1.0) -> Finish:
    best = Choice("persistent", {"blocks": 100})
    return Finish(run=run, reason="trials", trials=2, seconds=3.0, best=best, best_us=us, default=best,
                  default_us=2.0, time=DAY)


TOKENS = [b"null", b"true", b"-1", b"1e999", b"NaN", b"[]", b"{}", b'""', b"\\u0000", b"\\ud800", b"9" * 40,
          b"[" * 200, b'"' + b"x" * 300 + b'"', b"\xff\xfe", b",", b":", b"}", b'"kind":"start"', b"-0.0",
          b'"__import__(\'os\')"', b"1.5", b"\n", b"\r", b"\x00"]


def mutated(rng: random.Random, line: bytes) -> bytes:
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


shown = st.characters(exclude_categories=("Cc", "Cf", "Cs", "Zl", "Zp"))
names = st.text(shown, min_size=1, max_size=20)
values = st.one_of(st.integers(-2**40, 2**40), st.booleans(), names)
micros = st.floats(1e-3, 1e6)
times = st.lists(micros, min_size=1, max_size=20).map(Times.of)
trials = st.builds(
    trial, run=names, schedule=names, config=st.dictionaries(names, values, max_size=8),
    times=times, check=st.none() | st.floats(0, 10), seed=st.integers(0, 2**31),
    workload=st.builds(Workload, cell=names, hidden=st.integers(1, 4096), input=st.integers(1, 4096),
                       batch=st.integers(1, 512), seq=st.integers(1, 4096)))
mutants = st.builds(mutated, st.randoms(use_true_random=False),
                    st.sampled_from([trial(), start(), finish()]).map(encode))


@given(st.lists(trials | mutants | st.binary(max_size=200), max_size=12))
def test_damaged_lines_cost_only_themselves(made):
    data = b"".join(encode(one) if isinstance(one, Trial) else one + b"\n" for one in made)
    log, rows = parse(data, Path("x.jsonl")), [row for row in data.split(b"\n") if row.strip()]
    kept = iter([line.record for line in log.lines])
    for one in made:
        if isinstance(one, Trial):
            assert one in kept, "in this order"
            assert encode(one)[:-1] in rows and len(encode(one)) <= MAX_LINE
    assert len(log.lines) + len(log.problems) == len(rows)
    assert all(problem.startswith("x.jsonl:") for problem in log.problems)


@given(trials, trials, st.integers(1, 10_000))
def test_a_torn_last_line_is_reported_and_the_rest_kept(first, last, cut):
    whole, torn = encode(first), encode(last)
    torn = torn[:min(cut, len(torn) - 2)]
    log = parse(whole + torn, Path("x.jsonl"))
    assert [line.record for line in log.lines] == [first] and log.problems == ["x.jsonl:2: torn last line"]


@settings(max_examples=300)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
                    lambda inner: (st.lists(inner, max_size=4)
                                   | st.dictionaries(st.text(), inner, max_size=4))),
       st.sampled_from(sorted(msgspec.to_builtins(trial()))))
def test_any_value_in_any_field_is_accepted_whole_or_refused(value, field):
    data = msgspec.to_builtins(trial())
    data[field] = value
    try:
        record = decode(json.dumps(data).encode("utf-8", "surrogatepass"))
    except RecordError:
        return
    assert decode(encode(record)) == record


@pytest.mark.parametrize("change, word", [
    ({"extra": 1}, "unknown field"), ({"v": -1}, "version -1"),
    ({"v": VERSION + 1}, f"version {VERSION + 1} of the format; this program reads versions up to {VERSION}"),
    ({"v": VERSION + 1, "of_the_future": 1}, f"version {VERSION + 1}"), ({"generation": -1}, ">= 0"),
    ({"clocks": {"cores": -1, "memory": 0}}, ">= 0"), ({"noisy": 1}, "bool"), ({"kind": "code"}, "code"),
    ({"stage": "third"}, "third"), ({"schedule": "x" * 129}, "length <= 128"), ({"check": -1.0}, ">= 0"),
    ({"error": "failed"}, "either times or an error"), ({"times": None}, "either times or an error"),
    ({"config": {"k": 1.5}}, "config"), ({"config": {"k": 1 << 70}}, "config"),
    ({"config": {str(i): i for i in range(65)}}, "length <= 64"),
    *(({"times": {"median": median, "p20": p20, "p80": p80, "runs": [1.0]}}, word) for median, p20, p80, word in (
        (0.0, 0.0, 1.0, "> 0"), (3.0, 4.0, 5.0, "p20"), (3.0, 3.0, 3.0, "within the runs"))),
    *(({"time": time}, "time") for time in (
        "yesterday", "2026-01-31T12:00:00Z\n", "9999-99-99T99:99:99Z", "2026-13-30T12:00:00Z", "2026-12-30T24:00:00Z",
        "2026-02-29T12:00:00Z", "0000-01-01T00:00:00Z", "\u0662026-01-01T00:00:00Z")),
    *(({field: f"a{mark}b"}, "control") for field in ("run", "schedule", "source")
      for mark in ("\n", "\x1b]0;title\x07", "\x7f", "\x9b", "\u2028")),
    ({"config": {"k\n": 1}}, "control"), ({"config": {"k": "\x1b[2J"}}, "control"),
    ({"versions": {"tvm": "\r"}}, "control"),
    *(({"device": {**msgspec.to_builtins(H100), **change}}, word) for change, word in (
        ({"cores": 0}, "cores"), ({"cores": 1 << 70}, "cores"), ({"l2": -1}, "l2"), ({"kind": "quantum"}, "kind"),
        ({"name": "x" * 129}, "name"), ({"name": "a\nb"}, "control"), ({"features": ["\x1b[m"]}, "control"),
        ({"arch": ""}, "arch"), ({"features": ["x"] * 257}, "features"))),
    *(({"workload": {**msgspec.to_builtins(WORK), **change}}, word) for change, word in (
        ({"cell": ""}, "cell"), ({"cell": "a\u202eb"}, "control"),
        *(({"entry": entry}, r"workload\.entry") for entry in ("run", None, 1)))),
    *(({"kind": "finish", **change}, word) for change, word in (
        ({"reason": "because"}, "because"), ({"best": None}, "best_us"), ({"best_us": None}, "best_us"),
        ({"default": None}, "default_us"))),
])
def test_what_the_format_refuses(change, word):
    data = {"kind": "trial", **msgspec.to_builtins(finish() if "finish" in change.values() else trial()), **change}
    with pytest.raises(RecordError, match=word):
        decode(json.dumps(data).encode())


def test_a_line_that_would_not_fit_when_it_is_written_again_is_refused_at_once():
    long = Times(1e11, 1e11, 1e11, (1e11,) * 256)
    data = {**msgspec.to_builtins(trial(times=long, config={f"{n:02}": "x" * 128 for n in range(64)},
                                        versions={f"{n:02}": "x" * 128 for n in range(32)})), "kind": "trial"}
    line = json.dumps(data, separators=(",", ":")).replace("100000000000.0", "1e11").encode()
    assert MAX_LINE - 3000 < len(line) < MAX_LINE
    with pytest.raises(RecordError, match="when it is written again"):
        decode(line)


def test_what_is_wrong_with_a_whole_last_line_is_said():
    for line, said in ((b'{"kind":"trial","v":9}', "version 9"), (b'{"kind":"code"}', "code"),
                       (b"\x7fELF", "no JSON object")):
        (problem,) = parse(line, Path("x.jsonl")).problems
        assert said in problem and "torn" not in problem


def test_a_million_lines_of_something_else_are_soon_told(monkeypatch: pytest.MonkeyPatch):
    """Since none of them is decoded: they took 17 s."""
    decoded = list[bytes]()
    monkeypatch.setattr("ecornn.tune.log.decode", lambda row: (decoded.append(row), decode(row))[1])
    log = parse(b"junk\n" * 1_000_000 + encode(trial()), Path("x.jsonl"))
    assert len(decoded) == len(log.lines) == 1
    assert len(log.problems) == 1_000_000 and log.problems[-1] == "x.jsonl:1000000: no JSON object"


def test_a_link_stays_a_link_and_a_file_keeps_its_mode(tmp_path):
    real, link = tmp_path / "real.jsonl", tmp_path / "link.jsonl"
    append(real, trial())
    real.chmod(0o600)
    link.symlink_to(real.name)
    rewrite(link, lambda there: [*(line.record for line in there.lines), trial(index=1)])
    assert link.is_symlink() and len(read(real).lines) == 2 and real.stat().st_mode & 0o777 == 0o600


def test_a_file_that_cannot_be_read_or_written_is_an_error_and_not_waited_for(tmp_path):
    with pytest.raises(RecordError, match="cannot read"):
        read(tmp_path / "none.jsonl")
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot append"):
        append(tmp_path / "file" / "log.jsonl", trial())
    for write in (lambda path: append(path, trial()), lambda path: rewrite(path, lambda _: [])):
        with pytest.raises(RecordError, match=r"/proc/x\.jsonl"):
            write(Path("/proc/x.jsonl"))


def test_an_entry_is_written_where_it_is_not_the_layers_own_pass():
    """So that what is written of other workloads, and a digest of it, is what it was before there were entries."""
    own, adjoint = trial(), trial(workload=WORK.adjoint)
    assert b"entry" not in encode(own) and b'"entry":"backward"' in encode(adjoint)
    assert decode(encode(adjoint)) == adjoint != own
    work = b'{"cell":"lstm","hidden":512,"input":256,"batch":4,"seq":100,"dtype":"bfloat16","weights":null,'
    assert msgspec.json.encode(Workload("lstm", 512, 256, 4, dtype="bfloat16")) == work + b'"precision":null}'
    made = Workload("lstm", 512, 256, 4).adjoint
    assert (made.backward, made.input, made.adjoint) == (True, 512, made) and str(made).endswith("float32, backward")
    with pytest.raises(ArgumentError, match="entry='forward': expected backward"):
        Workload("lstm", 8, 8, entry="forward")


def test_what_a_device_was_is_in_every_trial():
    from ecornn.tune.choose import environment

    here = environment(msgspec.structs.replace(H100, kind="llvm"))
    assert {"ecornn", "tvm", "tvm_ffi"} <= set(here.versions) and here.clocks.cores > 100
    record = trial(versions=here.versions, clocks=here.clocks)
    assert decode(encode(record)) == record


def test_all_kinds_round_trip(tmp_path):
    records = [start(), trial(), trial(times=None, check=None, error="run: first\n\tsecond \x1b[31mred\x1b[m"),
               finish()]
    path = tmp_path / "folder" / "log.jsonl"
    for record in records:
        append(path, record)
    log = read(path)
    assert [line.record for line in log.lines] == records and not log.problems
    assert [line.number for line in log.lines] == [1, 2, 3, 4]


def test_a_torn_line_does_not_swallow_the_next_and_a_mark_of_utf_8_is_no_damage(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + encode(trial()) + encode(trial())[:50])
    append(path, trial(index=2))
    log = read(path)
    assert [line.record.index for line in log.lines] == [0, 2]
    assert len(log.problems) == 1 and f"{path}:2: " in log.problems[0]


def test_lines_and_files_have_a_largest_size(tmp_path):
    with pytest.raises(RecordError, match="at most 16384"):
        decode(b" " * (MAX_LINE + 1))
    config = {f"{i:0120}": "y" * 128 for i in range(64)}
    with pytest.raises(RecordError, match="at most 16384"):
        append(tmp_path / "log.jsonl", trial(config=config))
    assert not (tmp_path / "log.jsonl").exists()
    large = tmp_path / "large.jsonl"
    with large.open("wb") as file:
        file.truncate(MAX_FILE)  # sparse
    with pytest.raises(RecordError, match="64 MiB"):
        append(large, trial())
    with large.open("ab") as file:
        file.write(b"\n")
    with pytest.raises(RecordError, match="larger than 64 MiB"):
        read(large)


def _append_many(path: Path, run: str) -> None:
    for index in range(25):
        append(path, trial(run=run, index=index))


def test_eight_processes_append_and_one_rewrites_and_nothing_is_lost(tmp_path):
    """Whatever way leads to the log: half of them, and the one that rewrites, have a link in another folder."""
    folder = tmp_path / "there"
    folder.mkdir()
    real, link = folder / "real.jsonl", tmp_path / "link.jsonl"
    real.touch()
    link.symlink_to(real)
    context, runs = multiprocessing.get_context("spawn"), [f"writer-{n}" for n in range(8)]
    writers = [context.Process(target=_append_many, args=(path, run))
               for path, run in zip((real, link) * 4, runs, strict=True)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        rewrite(link, lambda log: [line.record for line in log.lines])
        time.sleep(0.05)
    assert all(writer.exitcode == 0 for writer in writers)
    log = read(real)
    assert not log.problems
    for run in runs:
        assert [line.record.index for line in log.lines if line.record.run == run] == list(range(25))
    assert not list(tmp_path.glob("*.lock"))  # a lock beside the link would say nothing to who knows no link


def test_one_run_is_for_one_process_whatever_link_leads_to_its_log(tmp_path):
    path, link = tmp_path / "log.jsonl", tmp_path / "link.jsonl"
    link.symlink_to(path.name)
    with Journal.open(path, "ab", True).alone():
        for other in (path, link):
            with pytest.raises(RecordError, match="another process is tuning this layer"), Journal.open(
                    other, "ab", True).alone():
                pass
        with Journal.open(path, "cd", True).alone():  # another layer
            pass
    with Journal.open(path, "ab", True).alone():
        pass
    assert list(tmp_path.iterdir()) == [link]
    with pytest.raises(RecordError, match="folder"), Journal.open(Path("/proc/x.jsonl"), "ab", True).alone():
        pass


def test_a_run_in_which_nothing_ran_is_made_again(tmp_path):
    path = tmp_path / "log.jsonl"
    append(path, start("ab-1"), msgspec.structs.replace(finish("ab-1"), best=None, best_us=None))
    assert Journal.open(path, "ab", True).run == "ab-2"
    append(path, start("ab-2"), finish("ab-2"))
    assert Journal.open(path, "ab", True).run == "ab-2" and Journal.open(path, "ab", False).run == "ab-3"


def test_a_run_that_was_killed_while_it_wrote_its_first_line_goes_on(tmp_path):
    path, whole = tmp_path / "log.jsonl", encode(start("ab-1"))
    for length in (1, 10, len(whole) // 2, len(whole) - 2):
        path.write_bytes(whole[:length])
        assert Journal.open(path, "ab", True).run == "ab-1"


@given(st.lists(micros, min_size=1, max_size=60))
def test_percentiles_are_numpys(runs):
    import numpy as np

    found = Times.of(runs)
    assert [found.p20, found.median, found.p80] == pytest.approx(np.percentile(runs, [20, 50, 80]).tolist(), rel=1e-4)


def test_a_hundred_thousand_mutated_lines():
    rng = random.Random(0)
    lines = [encode(r) for r in (trial(), trial(times=None, check=None, error="run: x"), start(), finish())]
    accepted = refused = 0
    for _ in range(100_000):
        try:
            record = decode(mutated(rng, rng.choice(lines)))
        except RecordError as error:
            assert str(error)
            refused += 1
        else:
            assert decode(encode(record)) == record
            accepted += 1
    assert accepted > 500 and refused > 50_000  # both sides are exercised


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
        with pytest.raises(RecordError, match=r"is compressed, and ecornn appends only to plain files; name a \.jsonl"):
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
    def trials(log: Log) -> list[tuple[str, Trial]]:
        return [(line.place, line.record) for line in filter(is_trial, log.lines)]
    log = read_all([shipped_folder()], hidden)
    assert trials(log) == [one for one in trials(read_all([shipped_folder()])) if one[1].workload.hidden == hidden]
    rows = [row % hidden for row in (b'{"hidden": %d, "nobody": 1}', b'{"hidden"\t:%d0}', b'{"hid": %d}', b"junk %d")]
    assert [problem.partition(" ")[0] for problem in parse(b"\n".join(rows), Path("log"), hidden).problems] == [
        "log:1:", "log:3:", "log:4:"]

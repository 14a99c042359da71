"""The first ten minutes: pages of what was carried out, and what those in docs must show."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import first_minutes
import pytest
from first_minutes import Step
from rooms import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("FIRST_MINUTES_*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_first_result_comes_within_three_minutes_and_nothing_is_silent(page: Path):
    text = page.read_text()
    (seconds,) = re.findall(r"to the first checked result it takes (\d+) s", text)
    assert int(seconds) < 180
    told = re.findall(r"^[\d.]+ s(?:, exit code \d)?; silent for ([\d.]+) s at most\.$", text, re.M)
    silent = list(map(float, told))
    assert len(silent) == len(re.findall(r"^\$ ", text, re.M)) > 8 and max(silent) <= 10
    assert "relative error of y" in text and "Traceback" not in text


def test_commands_are_told_as_they_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What they print, in order, their codes, how long they said nothing; and the page."""
    looks = itertools.chain((0.0, 1.0, 31.0), itertools.count(32.0))  # at the begin, at each line, and at the end
    monkeypatch.setattr(first_minutes, "time", SimpleNamespace(monotonic=lambda: next(looks)))
    steps = [Step("One:", "echo begun; echo relative error of y 1e-7; echo on stderr >&2"),
             Step("Two:", "exit 3", 3), Step("Three:", "pwd; cat leaky.py | head -1")]
    (tmp_path / "work").mkdir()
    done = list(first_minutes.done(steps, tmp_path / "work", in_place=True))
    assert [ran.code for _, ran in done] == [0, 3, 0] and (done[0][1].silence, done[0][1].seconds) == (30.0, 33.0)
    assert done[0][1].quiet == "begun" and done[2][1].output.startswith("/tmp/first\nfrom ecornn import")
    text = first_minutes.page("on a machine", True, done)
    assert "$ exit 3\n```\n" in text and ", exit code 3; silent for" in text and "Installing is not among it" in text
    assert "it takes 33 s." in text
    assert "Installing" not in first_minutes.page("on a machine", False, done)


def test_a_user_has_nothing_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ECORNN_TUNING_LOGS", "/somewhere")
    monkeypatch.setenv("PYTHONPATH", "/packages")
    new = first_minutes.environment_of(tmp_path, in_place=False)
    assert "ECORNN_TUNING_LOGS" not in new and "PYTHONPATH" not in new and new["HOME"] == str(tmp_path)
    own = first_minutes.environment_of(tmp_path, in_place=True)
    assert "ECORNN_TUNING_LOGS" not in own and own["PYTHONPATH"].split(":")[1:] == ["/packages"]

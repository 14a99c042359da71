"""README and docs are plain English: no page uses the phrases of an older, telegraphic style."""

import re
from pathlib import Path

import figures
import pytest
from rooms import ROOT

# Phrases of the old style, which plain sentences do not need. benchmarks/notes/words.md has an example of each.
MARKS = (r"\bnobody\b", r"\bis not allowed; expected\b", r"\bdid not settle\b", r"\bthat there (?:are|is)[.,:;)]",
         r"\b(?<!each )(?<!one )(?<!both )(?<!some )(?<!all )(?<!none )(?<!most )(?<!any )(?<!\d, )of which\b",
         r"(?<=[.|] )(?-i:Of) (?:an?|what|larger|somewhat)\b", r"[;:] of (?:one|several|two|both|larger ones) the\b",
         r"\bthat [\w.]+ has not[.,;]", r"\b(?:says?|tells?) nothing(?! about)\b",
         r"\bwhat (?:travels|takes the time)\b", r"\bstands? beside\b", r"\bheld against\b", r"\bmakes of an?\b",
         r"\bin turns\b", r"\banew\b", r"\bas ever\b", r"\bcommand goes on\b", r"\bso the row says\b",
         r"\bleaves over\b", r"\bsays? of (?:it|them)(?:sel\w+)?\b", r"\b(?:an? state|states?|sums) travels?\b",
         r"\brows are apart\b", r"\bExit code \d+ where\b", r"(?<=[.|] )(?-i:Made by|Where nothing)\b",
         r"\bwhen all is there\b", r"\b(?-i:Of) equally\b", r"\bstepped together\b", r"\bsays of every\b")
GENERATED = r"^<!-- ([\w-]+): (?:begin|written by [^>]+) -->$.*?^<!-- \1: end -->$"
CODE = r"^```.*?^```|^ {4}[^\n]*$|`[^`\n]+`"
WORDS = (ROOT / "benchmarks" / "notes" / "words.md").read_text()


def prose(text: str) -> str:
    """A page without its code and its generated parts, on one line."""
    return " ".join(re.sub(CODE, "", re.sub(GENERATED, "", text, flags=re.S | re.M), flags=re.S | re.M).split())


def found(text: str) -> list[str]:
    return [hit[0] for mark in MARKS for hit in re.finditer(mark, prose(text), re.IGNORECASE)]


@pytest.mark.parametrize("page", figures.pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_are_plain_english(page: Path):
    if not page.stem.startswith("FIRST_MINUTES"):  # what commands printed
        assert found(page.read_text()) == []


def test_the_examples_have_the_marks_before_and_none_after():
    before, after = zip(*re.findall(r"^\| (.+) \| (.+) \|$", WORDS, re.MULTILINE)[1:], strict=True)
    assert len(before) >= 20 and found("\n".join(after)) == []
    assert [mark for mark in MARKS if not re.search(mark, "| " + " | ".join(before), re.IGNORECASE)] == []


def test_code_and_generated_parts_are_left_out():
    text = "one\n```\nnobody\n```\n<!-- rows: begin -->\nnobody\n<!-- rows: end -->\n`nobody` each of which\nNobody"
    assert prose(text) == "one each of which Nobody" and found(text) == ["Nobody"]

"""What README and docs say in figures is what the files of results say: tables, the plot, and figures in sentences."""

from __future__ import annotations

import re
from pathlib import Path

import figures
import pytest
import report
from measured_rows import read
from rooms import ROOT

RESULTS = ROOT / "benchmarks" / "results"
TABLES = ("h100.json", "h100_grid.jsonl", "h100_flashrnn.json", "h100_flashrnn_training.json", "h100_stacks.json",
          "cpu_skylake.json", "h100_published.jsonl", "h100_heads.jsonl", "h100_classes.jsonl",
          "h100_integer_weights.jsonl")
PAGES = [pytest.param(page, id=page.relative_to(ROOT).as_posix()) for page in figures.pages()]
SLOW = "search."  # figures of whole searches take ten seconds to read


def test_tables():
    """Every file of these has its place in the pages, and the tables there are those of the files."""
    text = "".join((ROOT / page).read_text() for page in report.PAGES)
    marks = set(re.findall(r"<!-- (measured[\w-]*): begin -->", text))
    for name in TABLES:
        mark, lines = report.section((RESULTS / name).relative_to(ROOT))
        assert text.count("\n".join([f"<!-- {mark}: begin -->", "", *lines, "", f"<!-- {mark}: end -->"])) == 1, mark
        marks.remove(mark)
    assert not marks, "tables of no file"


def test_the_plot():
    log = read(RESULTS / "h100_grid.jsonl")
    picture = report.svg(log)
    assert (ROOT / "docs" / "images" / "speed.svg").read_text() == picture
    assert picture.count("<title>") == 88, "a dot for each layer of the grid"
    log.rows[0]["ratio"] = 0.9
    assert ": 0.90x" in report.svg(log) and ": 0.90x" not in picture


@pytest.mark.parametrize("page", PAGES)
def test_sentences(page: Path):
    text = page.read_text()
    marked = [(name, " ".join(has.split())) for _, name, has, _ in figures.MARKED.findall(text)]
    assert text.count("<!-- figure:") == len(marked), "a mark that is not closed"
    quick = [one for one in marked if not one[0].startswith(SLOW)]
    assert quick == [(name, figures.FIGURES[name]()) for name, _ in quick]


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", PAGES)
def test_sentences_on_searches(page: Path):
    assert figures.differences(page.read_text()) == []


def test_a_figure_that_is_not_that_of_the_results():
    text = "<!-- figure: grid.rows16 -->71<!-- / --> layers"
    assert figures.differences(text) == [("grid.rows16", "71", "70")]
    assert figures.differences(figures.written(text)) == []
    with pytest.raises(KeyError):
        figures.differences("<!-- figure: nothing -->1<!-- / -->")


def test_in_programs_no_layer_is_slower_than_what_it_replaces():
    """In turns with PyTorch's operations, and under 2 to 4 times the load of the cores."""
    assert min(figures.in_programs("turns", "ms")) >= 1
    assert figures.geometric(figures.in_programs("turns", "ms")) >= 1.5
    assert min(figures.in_programs("busy", "ms") + figures.in_programs("busy", "p99_ms")) >= 1
    assert {r["busy"] for r in figures.rows("cpu_in_programs.json") if r["mode"] == "busy"} == {2, 4}


def test_every_figure_is_in_some_page():
    text = "".join(page.read_text() for page in figures.pages())
    assert set(figures.FIGURES) == {name for _, name, *_ in figures.MARKED.findall(text)}

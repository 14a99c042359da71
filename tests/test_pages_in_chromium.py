"""The report and the site as Chromium lays them out, where one is installed: no page scrolls sideways on a phone, words
of pictures can be read and stay within them."""

from __future__ import annotations

from pathlib import Path

import chromium
import pytest
from test_report import shipped  # noqa: F401  (a fixture)

from ecornn.report import page
from ecornn.tune.log import Log

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("index", "GETTING_STARTED", "CONCEPTS", "FIRST_MINUTES_CPU", "PERFORMANCE", "TRAINING", "COMPARISON",
         "reference/commands", "reference/api", "reference/knobs", "tutorials/pytorch")

pytestmark = pytest.mark.skipif(chromium.program() is None, reason="no Chromium is installed")


def fits(found: list[dict]) -> None:
    """Fails where a page is wider than its window, or a picture's words are too small or leave it."""
    for one in found:
        assert one["text"] > 200, f"{one['page']} is empty"
        assert one["scroll"] <= one["client"], one
        assert not one["small"] and not one["outside"], one


def test_the_report(shipped: Log, tmp_path: Path):  # noqa: F811
    (tmp_path / "report.html").write_text(page.render(shipped, most=4))
    for theme in chromium.THEMES:
        found = chromium.looked(tmp_path, ["report.html"], theme)
        assert {one["width"] for one in found} == set(chromium.WIDTHS)
        fits(found)


def test_a_page_that_is_too_wide_is_seen(tmp_path: Path):
    words = "a page with enough words to be one " * 20
    (tmp_path / "wide.html").write_text(f"<!doctype html><p>{words}<pre>{'x' * 900}</pre>")
    with pytest.raises(AssertionError, match=r"wide\.html"):
        fits(chromium.looked(tmp_path, ["wide.html"]))


@pytest.mark.slow
def test_the_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    build = pytest.importorskip("mkdocs.commands.build")
    from mkdocs.config import load_config

    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    build.build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site")))
    fits(chromium.looked(tmp_path / "site", [f"{page}.html" for page in PAGES]))

"""The report as Chromium lays it out, where one is installed: no page scrolls sideways on a phone, words of pictures
can be read and stay within them. The site is looked at where it is built, in test_docs.py."""

from __future__ import annotations

from pathlib import Path

import chromium
import pytest
from test_report import shipped  # noqa: F401  (a fixture)

from ecornn.report import page
from ecornn.tune.log import Log

pytestmark = pytest.mark.skipif(chromium.program() is None, reason=(
    "no Chromium is installed: neither the report nor the site is laid out"))


def test_the_report(shipped: Log, tmp_path: Path):  # noqa: F811
    (tmp_path / "report.html").write_text(page.render(shipped, most=4))
    found = chromium.looked(tmp_path, ["report.html"])
    assert {one["width"] for one in found} == set(chromium.WIDTHS)
    chromium.fits(found)


def test_a_page_that_is_too_wide_is_seen(tmp_path: Path):
    words = "a page with enough words to be one " * 20
    (tmp_path / "wide.html").write_text(f"<!doctype html><p>{words}<pre>{'x' * 900}</pre>")
    with pytest.raises(AssertionError, match=r"wide\.html"):
        chromium.fits(chromium.looked(tmp_path, ["wide.html"]))

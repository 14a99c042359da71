"""The pictures of docs/EXAMPLES.md: those that their script draws, small, and readable on a light and a dark page."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import site_gallery
from rooms import ROOT

MOST = 15_000  # bytes


def classes(rules: list[tuple[str, str]]) -> set[str]:
    return {name for of, _ in rules for name in re.findall(r"\.(\w+)", of)}


LIGHT, DARK = (re.findall(r"([^{}]+){([^{}]*)}", part) for part in site_gallery.STYLE.split("scheme: dark) {"))


@pytest.mark.parametrize("name", site_gallery.PICTURES)
def test_a_picture(name: str):
    """Run docs/site/site_gallery.py where this fails."""
    text = (site_gallery.IMAGES / f"{name}.svg").read_text(encoding="utf-8")
    assert text == site_gallery.PICTURES[name]() and len(text) <= MOST and site_gallery.STYLE in text
    names = {one for element in ET.fromstring(text).iter() for one in element.get("class", "").split()}
    assert {"page", "tick"} <= names <= classes(LIGHT)


def test_every_colour_has_another_one_on_a_dark_page():
    coloured = [(of, has) for of, has in LIGHT if "#" in has]
    assert len(coloured) > 6 and classes(coloured) == classes(DARK)
    assert not {*re.findall("#[0-9a-f]+", str(coloured))} & {*re.findall("#[0-9a-f]+", str(DARK))}


def test_each_is_shown_beside_its_example():
    page = (ROOT / "docs" / "EXAMPLES.md").read_text(encoding="utf-8")
    shown = re.findall(r"\]\(images/examples/(\w+)\.svg\)", page)
    assert sorted(shown) == sorted(site_gallery.PICTURES) == sorted(p.stem for p in site_gallery.IMAGES.iterdir())
    for part in re.split(r"^- ", page, flags=re.MULTILINE):
        assert all(Path(link).stem == picture for link in re.findall(r"\]\(\.\./examples/(\w+\.\w+)\)", part)
                   for picture in re.findall(r"images/examples/(\w+)\.svg", part))
    examples = {path.name for path in (ROOT / "examples").iterdir() if re.match(r"\d\d_", path.name)}
    assert examples == set(re.findall(r"\]\(\.\./examples/(\d\d_[\w.]+)\)", page))

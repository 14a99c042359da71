"""The pictures of the report: words that can be read on a phone, within the picture and not one on another, colours
that can be told from the paper; and that they show what schedules say. Chromium, where one is installed, lays the
report out; the site it lays out where that is built, in test_docs.py."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import chromium
import msgspec
import pytest
from test_report import logged, shipped, trial  # noqa: F401  (a fixture)

from ecornn.device import Device
from ecornn.report import page, svg
from ecornn.report.layers import cut_of, marked, stages_of, task_of
from ecornn.report.page import TERMS, chip_map, chip_words, rooflines
from ecornn.report.searches import searches
from ecornn.schedules import all_schedules
from ecornn.schedules.base import Cut
from ecornn.tune.log import Log
from ecornn.tune.lookup import up_to_date

STYLE = (Path(page.__file__).with_name("page.html")).read_text()
PHONE = 390 - 2 * (10 + 11 + 1)  # px of a picture on a phone: paddings of page and section, and a border
FONT = 12  # of the page's svg rule
LETTER = 0.56  # of the font's size, in the mean: Segoe, Roboto, SF and Helvetica have 0.5 to 0.55

laid_out = pytest.mark.skipif(chromium.program() is None, reason=(
    "no Chromium is installed: neither the report nor the site is laid out"))


def boxes(picture: str) -> Iterator[tuple[str, float, float, float, float]]:
    """Each text with the box that it takes, as (words, left, top, right, bottom); but for what is turned."""
    for one in ET.fromstring(picture).iter("text"):
        if one.get("x") is not None:
            x, y, words = float(one.get("x", 0)), float(one.get("y", 0)), one.text or ""
            width = LETTER * FONT * len(words)
            left = x - width * {"start": 0, "middle": 0.5, "end": 1}[one.get("text-anchor", "start")]
            yield words, left, y - 0.75 * FONT, left + width, y + 0.2 * FONT


def read(picture: str) -> None:
    """Fails where words leave the picture or cover others."""
    _, _, width, height = map(float, ET.fromstring(picture).get("viewBox", "").split())
    found = list(boxes(picture))
    for words, left, top, right, bottom in found:
        assert left >= -1 and top >= -1 and right <= width + 1 and bottom <= height + 1, f"{words} leaves the picture"
    for n, (words, left, top, right, bottom) in enumerate(found):
        for other, a, b, c, d in found[:n]:
            assert right <= a or c <= left or bottom <= b or d <= top, f"{words!r} covers {other!r}"


def test_words_can_be_read_on_a_phone(shipped):  # noqa: F811
    assert f"font: {FONT}px" in STYLE.split("\nsvg {")[1].split("}")[0]
    assert FONT * PHONE / svg.WIDTH >= 10  # px there
    pictures = re.findall(r"<svg.*?</svg>", page.render(shipped, most=5), re.DOTALL)
    assert len(pictures) > 30
    for picture in pictures:
        read(picture)


def test_words_that_leave_a_picture_or_cover_others_are_seen():
    for words in (svg.text(2, 50, "far to the left", "", "end"), svg.text(9, 50, "a") + svg.text(12, 52, "b")):
        with pytest.raises(AssertionError, match=r"leaves|covers"):
            read(svg.figure([words], ""))


def luminance(colour: str) -> float:
    """Of #rrggbb or #rgb, relative, by WCAG 2."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
    parts = [int(digits[n:n + 2], 16) / 255 for n in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_can_be_told_from_the_paper(theme):
    """WCAG 2: 4.5 for words, which names of lines are, too."""
    light, dark = STYLE.split("@media (prefers-color-scheme: dark)")
    of = dict(re.findall(r"--(\w+): (#\w+)", light if theme == "light" else dark.split("} }")[0]))
    for paper in ("paper", "card"):
        for name in ("ink", "soft", "blue", "orange", *(f"c{n}" for n in range(6))):
            bright, dim = sorted((luminance(of[paper]), luminance(of[name])), reverse=True)
            assert (bright + 0.05) / (dim + 0.05) >= 4.5, (name, paper)


def test_stages_are_those_of_the_estimate(shipped):  # noqa: F811
    """Their sum is the estimate, where nothing runs beside the recurrence; all of a search's configurations."""
    seen = set()
    for run in searches(shipped):
        task = task_of(run.search[0])
        for one in run.search:
            schedule = all_schedules()[one.schedule]
            stages = stages_of(one, task)
            if stages and "hoisted" in one.config and one.config.get("ahead", 100) == 100:
                assert set(stages) <= set(TERMS) and all(us >= 0 for us in stages.values())
                more = schedule.features(task, schedule.plan(task, one.config))["estimate"] / 1e3
                gained = sum(stages.values()) - more  # by hoisted values of 16 bits, which the estimate takes off
                if one.config["hoisted"] == "float32":
                    assert sum(stages.values()) == pytest.approx(more, rel=1e-9), one
                    seen.add((one.schedule, one.config.get("carrier")))
                else:
                    assert gained >= -1e-9
    assert {name for name, _ in seen} >= {"persistent"} and ("persistent", "cluster") in seen


def test_a_map_has_each_multiprocessor_once(shipped):  # noqa: F811
    """Of every persistent layer that ships: blocks, workers and idle ones are all there are, weights are all."""
    maps = 0
    for run in searches(shipped):
        task, best = task_of(run.best), run.best
        cut = cut_of(best, task)
        if cut is None:
            continue
        maps += 1
        picture = chip_map(cut, best.device)
        kinds = [one.get("class") for one in ET.fromstring(picture).iter("rect")]
        assert len(kinds) == best.device.cores
        assert sum(kind.startswith("fill") for kind in kinds) == cut.groups * cut.blocks
        assert cut.groups // cut.heads * cut.rows >= best.workload.batch
        whole = task.workload.hidden ** 2 * {"float32": 4}.get(task.workload.dtype, 2)  # rnn_tanh: one matrix
        assert whole <= cut.blocks * sum(cut.held.values()) < 2 * whole + cut.blocks * 16 * 1024
        assert f"{cut.rows} row" in chip_words(cut, best.device)
    assert maps > 20


def test_lines_of_code_are_marked_by_the_knobs_that_make_them(shipped):  # noqa: F811
    """What a knob does not make is in the code with its other value, too, in the same order."""
    run = next(run for run in searches(shipped) if run.best and run.best.schedule == "persistent")
    task, schedule = task_of(run.best), all_schedules()["persistent"]
    found = marked(run.best, task)
    config = up_to_date(run.best, schedule, task).config
    functions = schedule.program(task, schedule.plan(task, config)).functions
    assert "\n".join(text for text, _ in found.lines) == functions[found.name].script()
    assert set(found.others) | set(found.alone) == set(config) and {"units", "warps"} <= set(found.others)
    for knob, value in found.others.items():
        functions = schedule.program(task, schedule.plan(task, {**config, knob: value})).functions
        other = functions[found.name].script().splitlines()
        rest = iter(line.strip() for line in other)
        kept = [text.strip() for text, knobs in found.lines if knob not in knobs]
        assert all(line in rest for line in kept) and len(kept) > 20
    assert any("units" in knobs for _, knobs in found.lines)
    assert marked(msgspec.structs.replace(run.best, schedule="no_more"), task) is None


def test_words_of_a_map():
    device = Device("cuda", "sm_90a", "NVIDIA H100 80GB HBM3", 132)
    cut = Cut(1, 130, 8, 1, "L2", {"registers": 2048, "shared memory": 0}, workers=1)
    said = chip_words(cut, device)
    assert "1 row of" in said and "the 129 others" in said and "1 blocks multiply x" in said and "1 idle" in said
    assert "2 KiB in registers." in said and "shared memory" not in said
    alone = chip_words(Cut(4, 1, 8, 2, "cluster", {"registers": 1024}), device)
    assert "No block waits" in alone and "4 groups" in alone


def test_rooflines_are_of_gpus_whose_rates_are_known(shipped):  # noqa: F811
    from ecornn.report.layers import layers

    pictures = dict(rooflines(layers(shipped)))
    assert any(name.startswith("bfloat16 on NVIDIA H100") for name in pictures)
    assert all("tensor cores" in picture and "TFLOP/s" in picture for picture in pictures.values())
    assert rooflines(layers(logged(trial(0, 4.0, schedule="cpu_sequence")))) == [] == rooflines(layers(Log()))


@laid_out
def test_the_report(shipped: Log, tmp_path: Path):  # noqa: F811
    """No page scrolls sideways on a phone."""
    (tmp_path / "report.html").write_text(page.render(shipped, most=4))
    found = chromium.looked(tmp_path, ["report.html"])
    assert {one["width"] for one in found} == set(chromium.WIDTHS)
    chromium.fits(found)


@laid_out
def test_a_page_that_is_too_wide_is_seen(tmp_path: Path):
    words = "a page with enough words to be one " * 20
    (tmp_path / "wide.html").write_text(f"<!doctype html><p>{words}<pre>{'x' * 900}</pre>")
    with pytest.raises(AssertionError, match=r"wide\.html"):
        chromium.fits(chromium.looked(tmp_path, ["wide.html"]))

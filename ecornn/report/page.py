"""The page itself, by a template of Jinja that escapes all that it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ecornn.errors import MissingPackageError
from ecornn.explain import FloorTerms, StepSummary
from ecornn.report import chip_map, step_picture, svg
from ecornn.report.code import MarkedCode, marked
from ecornn.report.effects import Effect, effects
from ecornn.report.layers import (
    Layer,
    chip,
    cut_of,
    floor_of,
    layers,
    roles_of,
    stages_of,
    step_of,
    task_of,
    teraflops,
)
from ecornn.report.measured import NOTHING, Measured
from ecornn.report.rooflines import rooflines
from ecornn.report.searches import SearchRun, searches
from ecornn.tune.journal import words
from ecornn.tune.log import Log

SEARCHES, LAYERS = 12, 200  # shown of each, the latest and the first
CODES = 2  # searches whose code is shown, the latest
TERMS = {"exchange": "fill0", "products": "fill1", "product of x": "fill2", "bytes": "fill3", "gates": "fill4",
         "recurrence": "fill5", "memory": "fill3"}  # memory is to a step what bytes are to the floor
SERIES, LINES = 3, 4  # sizes that make a line, and lines of a picture, those of most sizes
FEW = 24  # layers in a table that is open
NAMES = {"cudnn": "cuDNN", "torch": "PyTorch", "onnxruntime": "ONNX Runtime"}


@dataclass(frozen=True)
class Section:
    """A search with all that is drawn of it; pictures are SVG."""

    run: SearchRun
    title: str
    gain: str
    peers: dict[str, float]
    curve: str
    effects: list[tuple[Effect, str]]
    step: StepSummary | None
    teraflops: float | None
    chip: dict[str, float]
    map: str
    map_words: str
    roles: str
    floor: FloorTerms | None
    stages: dict[str, float]
    left_out: dict[str, float]
    time_picture: str
    code: MarkedCode | None


def render(log: Log, *, most: int = SEARCHES, title: str = "ecornn tuning report", results: Measured = NOTHING,
           told: Callable[[str], None] = lambda text: None) -> str:
    """One HTML page, all of it in the text: no script, nothing that is loaded.

    ``most``: searches that have a section, the latest ones; all of them count in the table of layers. ``results``: what
    was measured beside them. ``told`` is called with what goes on. Raises
    :class:`~ecornn.errors.MissingPackageError` without Jinja.
    """
    try:
        import jinja2
    except ImportError as error:
        raise MissingPackageError("jinja2 is not installed, by which pages are written: pip install 'jinja2>=3.1'"
                                  ) from error
    runs, found = searches(log), layers(log)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
                                     lstrip_blocks=True)
    environment.filters["us"] = lambda value: f"{value:.4g}"
    template = environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    sections = []
    for number, run in enumerate(runs[:most]):
        told(f"search {number + 1}/{min(most, len(runs))}")
        sections.append(section(run, number < CODES, results))
    told("pictures of all layers")
    return template.render(title=title, version=version("ecornn"), sections=sections,
                           searches=len(runs), trials=sum(len(r.search) for r in runs), layers=found[:LAYERS],
                           more_layers=max(0, len(found) - LAYERS), plots=plots(found, results), roofs=rooflines(found),
                           problems=log.problems, results=results.files, names=NAMES, few=FEW)


def section(run: SearchRun, code: bool = False, results: Measured = NOTHING) -> Section:
    """The page's section on one search. ``code``: True adds the generated code and the picture of a step."""
    best, default, gain = run.best, run.default, run.gain
    assert best is not None and best.times is not None
    task = task_of(best)
    floor, step = floor_of(best), step_of(task)
    cut, stages, left_out = cut_of(best, task), stages_of(best, task), results.stages(best)
    kernel = roles_of(best, task) if code and cut else None
    shown = [(one, svg.ranges([(str(v.value), v.fastest, v.median, v.chosen) for v in one.values[:24]], "µs"))
             for one in effects(run, task)]
    default_us = default.times.median if default is not None and default.times else None
    return Section(run, str(best.workload), words(gain, default_us) if gain and default_us else "",
                   results.peers(best),
                   svg.curve(run.curve(), default_us), shown, step, teraflops(best, step), chip(best, task),
                   chip_map.picture(cut, best.device) if cut else "", chip_map.words(cut, best.device) if cut else "",
                   step_picture.picture(kernel) if kernel else "",
                   floor, stages, left_out, time_picture(floor, stages, left_out, best.times.median),
                   marked(best, task) if code else None)


def time_picture(floor: FloorTerms | None, stages: dict[str, float], left_out: dict[str, float],
                 measured: float) -> str:
    """The floor, the estimate by its stages, these as measured, and the whole, µs, on one scale; nothing where the
    whole is all there is."""
    rows: list[Any] = []
    if floor is not None:
        rows.append(("floor", [
            (TERMS["exchange"], "exchange", floor.exchange_us), (TERMS["products"], "products", floor.products_us),
            (TERMS["product of x"], "product of x", floor.hoisted_us), (TERMS["bytes"], "bytes", floor.bytes_us)]))
    if stages:
        rows.append(("estimate", terms(stages)))
    if left_out:
        rows.append(("stages", terms(left_out)))
    return svg.stacked([*rows, ("measured", [("measured", "measured", measured)])], "µs") if rows else ""


def terms(stages: dict[str, float]) -> list[tuple[str, str, float]]:
    """Of a row of a picture, in the order of all of them."""
    return [(TERMS[name], name, stages[name]) for name in TERMS if name in stages]


def plots(found: list[Layer], results: Measured = NOTHING) -> list[tuple[str, str]]:
    """µs a step against H, a line for each B, beside the floor and the fastest other library; one picture for each
    device, cell and type that has lines."""
    groups: dict[str, dict[int, dict[int, Layer]]] = {}
    for one in found:
        work = one.trial.workload
        if work.input == work.hidden and not work.backward and one.trial.times:
            of = " ".join(filter(None, (work.cell, work.dtype, work.precision, work.weights)))
            sizes = groups.setdefault(f"{of} on {one.trial.device.name}", {}).setdefault(work.batch, {})
            other = sizes.get(work.hidden)  # of several T the longest is nearest to a step of many
            if other is None or other.trial.workload.seq < work.seq:
                sizes[work.hidden] = one
    pictures = []
    for name, batches in groups.items():
        series: list[Any] = []
        for batch, sizes in sorted(batches.items()):
            points = [(float(h), one.trial.times.median) for h, one in sorted(sizes.items()) if one.trial.times]
            floors = [(float(h), one.floor.total_us) for h, one in sorted(sizes.items()) if one.floor]
            others = [(float(h), min(peers.values())) for h, one in sorted(sizes.items())
                      if (peers := results.peers(one.trial))]
            if len(points) >= SERIES:
                series.append((f"B={batch}", points, floors, others))
        if series:
            most = sorted(series, key=lambda one: -len(one[1]))[:LINES]
            pictures.append((name, svg.lines([one for one in series if one in most])))
    return pictures

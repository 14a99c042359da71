"""The page itself, by a template of Jinja that escapes all that it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from ecornn.errors import MissingPackageError
from ecornn.explain import FloorTerms, StepSummary
from ecornn.report import step_picture, svg
from ecornn.report.code import MarkedCode, marked
from ecornn.report.effects import Effect, effects
from ecornn.report.layers import chip, cut_of, floor_of, layers, roles_of, stages_of, step_of, task_of, teraflops
from ecornn.report.measured import NOTHING, Measured
from ecornn.report.pictures import chip_map, chip_words, plots, rooflines, time_picture
from ecornn.report.searches import SearchRun, searches
from ecornn.tune.journal import words
from ecornn.tune.log import Log

SEARCHES, LAYERS = 12, 200  # shown of each, the latest and the first
CODES = 2  # searches whose code is shown, the latest
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

    ``most``: searches that have a section, the latest ones; all of them count in the table of layers. ``results``:
    times of other libraries and of stages. ``told`` is called with the section or picture at hand. Raises
    :class:`~ecornn.errors.MissingPackageError` without Jinja.
    """
    try:
        import jinja2
    except ImportError as error:
        raise MissingPackageError("jinja2 is not installed, by which pages are written: pip install 'jinja2>=3.1'"
                                  ) from error
    runs, best = searches(log), layers(log)
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
                           searches=len(runs), trials=sum(len(r.search) for r in runs), layers=best[:LAYERS],
                           more_layers=max(0, len(best) - LAYERS), plots=plots(best, results), roofs=rooflines(best),
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
                   chip_map(cut, best.device) if cut else "", chip_words(cut, best.device) if cut else "",
                   step_picture.picture(kernel) if kernel else "",
                   floor, stages, left_out, time_picture(floor, stages, left_out, best.times.median),
                   marked(best, task) if code else None)

"""The page itself, by a template of Jinja that escapes all that it is given, and its pictures of what the log and the
schedules say: layers on a chip, times of a step, lines by size, rooflines."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from ecornn import svg
from ecornn.device import Device
from ecornn.errors import MissingPackageError
from ecornn.explain import FloorTerms, summary
from ecornn.floor import SLOWER, measured
from ecornn.report import of_log
from ecornn.report.measured import NOTHING, Measured
from ecornn.report.of_log import Layer, SearchRun, effects, searches
from ecornn.report.roles import picture
from ecornn.schedules.base import Cut
from ecornn.schedules.rates import gpu_rates
from ecornn.tune.log import Log, gain_of, words

COLOURS = 6  # of groups; a seventh has that of the first
LEAST = 3  # different operations a byte that make a roofline
TERMS = {"exchange": "fill0", "products": "fill1", "product of x": "fill2", "bytes": "fill3", "gates": "fill4",
         "recurrence": "fill5", "memory": "fill3"}  # memory is to a step what bytes are to the floor
SERIES, LINES = 3, 4  # sizes that make a line, and lines of a picture, those of most sizes
SEARCHES, LAYERS = 12, 200  # shown of each, the latest and the first
CODES = 2  # searches whose code is shown, the latest
FEW = 24  # layers in a table that is open
NAMES = {"cudnn": "cuDNN", "torch": "PyTorch", "onnxruntime": "ONNX Runtime"}


def chip_map(cut: Cut, device: Device) -> str:
    """A square for each multiprocessor, in the order of blocks, which the GPU places as it likes."""
    squares = []
    for group, block in product(range(cut.groups), range(cut.blocks)):
        first = block // cut.parts * cut.units
        part = f", part {block % cut.parts + 1} of {cut.parts} of K" if cut.parts > 1 else ""
        squares.append((f"fill{group % COLOURS}",
                        f"group {group}, block {block}: units {first} to {first + cut.units - 1}{part}"))
    squares += [("worker", f"worker {worker}: products of x") for worker in range(cut.workers)]
    return svg.squares(squares + [("idle", "idle")] * (device.cores - len(squares)))


def chip_words(cut: Cut, device: Device) -> str:
    idle = device.cores - cut.groups * cut.blocks - cut.workers
    heads = f", for one of {cut.heads} heads" if cut.heads > 1 else ""
    several = f"{cut.groups} groups (a colour each)" if cut.groups > 1 else "One group"
    owner = "a block" if cut.parts == 1 else f"a set of {cut.parts} blocks, each with its part of K,"
    waits = (f"In every step a block waits for the state of the {cut.blocks - 1} others of its group, through "
             f"{'L2' if cut.by == 'L2' else 'the shared memory of their cluster'}" if cut.blocks > 1 else
             "No block waits for another one")
    places = ", ".join(f"{size / 1024:,.0f} KiB in {where}" for where, size in cut.held.items() if size)
    beside = (f"; {cut.workers} blocks multiply x (outlined)" if cut.workers else "") + (
        f"; {idle} idle (grey)" if idle else "")
    return (f"{several} of {cut.blocks} blocks, each group with all recurrent weights{heads} and {cut.rows} "
            f"row{'s' * (cut.rows != 1)} of the batch; {owner} owns {cut.units} hidden units{beside}. {waits}. "
            f"Weights of a block: {places}.")


def time_picture(floor: FloorTerms | None, stages: dict[str, float], left_out: dict[str, float], whole: float) -> str:
    """The floor, the estimate by its stages, these as measured, and the whole, µs, on one scale; nothing where the
    whole is all there is."""
    least = {} if floor is None else {"exchange": floor.exchange_us, "products": floor.products_us,
                                      "product of x": floor.hoisted_us, "bytes": floor.bytes_us}
    rows = [(row, [(TERMS[name], name, parts[name]) for name in TERMS if name in parts])
            for row, parts in (("floor", least), ("estimate", stages), ("stages", left_out)) if parts]
    return svg.stacked([*rows, ("measured", [("measured", "measured", whole)])], "µs") if rows else ""


def plots(best: list[Layer], results: Measured = NOTHING) -> list[tuple[str, str]]:
    """µs a step against H by B, with floors and the fastest other library; a picture for each device, cell and type."""
    groups: dict[str, dict[int, dict[int, Layer]]] = {}
    for one in best:
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
        for batch, unsorted in sorted(batches.items()):
            best_of = sorted(unsorted.items())
            points = [(float(h), one.trial.times.median) for h, one in best_of if one.trial.times]
            floors = [(float(h), one.floor.total_us) for h, one in best_of if one.floor]
            others = [(float(h), min(peers.values())) for h, one in best_of if (peers := results.peers(one.trial))]
            if len(points) >= SERIES:
                series.append((f"B={batch}", points, floors, others))
        if series:
            most = sorted(series, key=lambda one: -len(one[1]))[:LINES]
            pictures.append((name, svg.lines([one for one in series if one in most])))
    return pictures


def rooflines(best: list[Layer]) -> list[tuple[str, str]]:
    """A picture for each device of known rates and arithmetic with a few layers. Operations a byte are of recurrent
    weights: a kernel that reads these in every step cannot be above the line of the memory that they come from."""
    groups: dict[tuple[str, str], list[tuple[float, float, str]]] = {}
    for one in best:
        trial, work = one.trial, one.trial.workload
        arithmetic = "tf32" if work.precision == "tf32" else work.dtype
        if measured(trial.device.name) is None or arithmetic not in SLOWER:
            continue
        task = of_log.task_of(trial)
        step = summary(task) if task is not None else None
        rate = of_log.teraflops(trial, step)
        if step is not None and rate is not None and step.weight_bytes:
            assert trial.times is not None
            groups.setdefault((trial.device.name, arithmetic), []).append((
                2 * step.multiplications / step.weight_bytes, rate,
                f"{work}: {rate:.3g} TFLOP/s, {trial.times.median:.4g} µs"))
    pictures = []
    for (device, arithmetic), points in sorted(groups.items()):
        if (gpu := measured(device)) and len({x for x, _, _ in points}) >= LEAST:
            bounds = gpu_rates(gpu).bounds
            slopes = [("L2", bounds.l2 / 1e3), ("memory", bounds.memory / 1e3)]
            pictures.append((f"{arithmetic} on {device}",
                             svg.roofline(points, slopes, bounds.tensor * gpu.cores / SLOWER[arithmetic] / 1e3)))
    return pictures


def bottom_line(runs: list[SearchRun], results: Measured = NOTHING) -> str:
    """The gain of all searches against the untuned defaults, and of their best against other libraries' fastest; for
    several searches geometric means. Searches that were stopped, or lack a time, do not count."""
    gains = [1.0 if run.finish.best == run.finish.default else gain.ratio if (gain := gain_of(run)) else None
             for run in runs if run.finish is not None]
    others = [min(peers.values()) / run.best.times.median for run in runs
              if run.best is not None and run.best.times and (peers := results.peers(run.best))]
    known = {"the untuned default": [one for one in gains if one is not None], "the fastest other library": others}
    return " and ".join(f"{_ratio(ratios)} as fast as {what}" for what, ratios in known.items() if ratios)


def _ratio(ratios: list[float]) -> str:
    if len(ratios) == 1:
        return f"{ratios[0]:.2f} times"
    least, most = min(ratios), max(ratios)
    return f"{geometric_mean(ratios):.2f} times (geometric mean of {len(ratios)}, {least:.2f} to {most:.2f})"


def render(log: Log, *, most: int = SEARCHES, title: str = "ecornn tuning report", results: Measured = NOTHING,
           told: Callable[[str], None] = lambda text: None) -> str:
    """One HTML page, with no script and nothing that is loaded. ``most``: searches with a section, the latest; all
    count in the table of layers. ``results``: times of other libraries and of stages. ``told`` is called with the part
    at hand. Raises :class:`~ecornn.errors.MissingPackageError` without Jinja."""
    try:
        import jinja2
    except ImportError as error:
        raise MissingPackageError("jinja2 is not installed, by which pages are written: pip install 'jinja2>=3.1'"
                                  ) from error
    runs, best = searches(log), of_log.layers(log)
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
                           bottom_line=bottom_line(runs, results),
                           more_layers=max(0, len(best) - LAYERS), plots=plots(best, results), roofs=rooflines(best),
                           problems=log.problems, results=results.files, names=NAMES, few=FEW)


def section(run: SearchRun, code: bool = False, results: Measured = NOTHING) -> dict[str, Any]:
    """A search's section, as the template reads it. ``code``: True adds generated code and the picture of a step."""
    best, default, gain = run.best, run.default, gain_of(run)
    assert best is not None and best.times is not None
    task = of_log.task_of(best)
    floor, step = of_log.floor_of(best), summary(task) if task is not None else None
    cut, stages, left_out = of_log.cut_of(best, task), of_log.stages_of(best, task), results.stages(best)
    kernel = of_log.roles_of(best, task) if code and cut else None
    default_us = default.times.median if default is not None and default.times else None
    return {
        "run": run, "title": str(best.workload), "gain": words(gain, default_us) if gain and default_us else "",
        "peers": results.peers(best), "curve": svg.curve(run.curve(), default_us),
        "effects": [(one, svg.ranges([(str(v.value), v.fastest, v.median, v.chosen) for v in one.values[:24]], "µs"))
                    for one in effects(run, task)],
        "step": step, "teraflops": of_log.teraflops(best, step), "chip": of_log.chip(best, task),
        "map": chip_map(cut, best.device) if cut else "", "map_words": chip_words(cut, best.device) if cut else "",
        "roles": picture(kernel) if kernel else "", "floor": floor, "stages": stages, "left_out": left_out,
        "time_picture": time_picture(floor, stages, left_out, best.times.median),
        "code": of_log.marked(best, task) if code else None}

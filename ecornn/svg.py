"""Pictures as inline SVG, coloured by the page's style, light and dark. All text goes through :func:`text`, which
escapes it: names in a log are anybody's. Pictures are as wide as a phone; elsewhere the page enlarges them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

Points = Sequence[tuple[float, float]]
WIDTH, HEIGHT = 400, 250
LEFT, RIGHT, TOP, BOTTOM = 60, 10, 12, 40
TICKS, ACROSS = 6, 22  # numbers of an axis, and squares in a row
NAMES, VALUES, ROW = 84, 66, 22  # of pictures that have a row for each name: columns for names and values, height


@dataclass(frozen=True)
class Axis:
    """Values to pixels from ``begin`` to ``end``; on a log scale ``low`` is positive."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    @classmethod
    def of(cls, values: Sequence[float], begin: float, end: float, log: bool = False) -> Axis:
        """An axis around the values, with a little room."""
        low, high = min(values), max(values)
        if log:
            room = max((high / low) ** 0.06, 1.02)
            return cls(low / room, high * room, begin, end, True)
        room = 0.04 * (high - low) or 0.5
        return cls(low - room, high + room, begin, end)

    def __call__(self, value: float) -> float:
        a, b, v = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        return round(self.begin + (v - a) / (b - a) * (self.end - self.begin), 1)

    def ticks(self) -> list[float]:
        """Round values within, :data:`TICKS` of them or a few more."""
        if self.log:
            for steps in ((1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
                decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
                values = [s * 10.0 ** d for d in decades for s in steps if self.low <= s * 10.0 ** d <= self.high]
                if len(values) <= TICKS + 2:
                    break
            if len(values) >= 2:
                return values
        span = (self.high - self.low) / TICKS
        unit = 10.0 ** math.floor(math.log10(span))
        step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= span)
        return [n * step for n in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]

    def apart(self, values: Iterable[float], gap: float) -> list[float]:
        """Values to mark, in order, each more than ``gap`` pixels from the one before."""
        marks: list[float] = []
        for value in sorted({*values}):
            if not marks or self(value) - self(marks[-1]) > gap:
                marks.append(value)
        return marks


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> str:
    """Words at a place; ``kind`` is a class of the page's style."""
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def figure(parts: Iterable[str], label: str, height: float = HEIGHT) -> str:
    """The whole picture, as wide as there is room; ``label`` is read out to people who do not see it."""
    return (f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label, quote=True)}">'
            + "".join(parts) + "</svg>")


def path(kind: str, points: Points) -> str:
    return f'<path class="{kind}" d="M{"L".join(f"{x} {y}" for x, y in points)}"/>'


def dot(kind: str, x: float, y: float, title: str) -> str:
    return f'<circle class="{kind}" cx="{x}" cy="{y}" r="3"><title>{escape(title)}</title></circle>'


def grid(x: Axis, y: Axis, across: str, up: str, marks: Sequence[float] | None = None) -> Iterator[str]:
    """Lines, numbers and names of both axes; ``marks``: of the horizontal one."""
    for value in y.ticks():
        yield f'<line class="grid" x1="{x.begin}" x2="{x.end}" y1="{y(value)}" y2="{y(value)}"/>'
        yield text(x.begin - 6, y(value) + 4, f"{value:.6g}", "tick", "end")
    for value in marks if marks is not None else x.ticks():
        yield text(x(value), y.begin + 16, f"{value:.6g}", "tick")
    yield text((x.begin + x.end) / 2, y.begin + 33, across, "name")
    yield (f'<text class="name" text-anchor="middle" transform="translate(11 {(y.begin + y.end) / 2}) rotate(-90)">'
           f"{escape(up)}</text>")


def curve(points: Sequence[tuple[int, float, float]], default: float | None) -> str:
    """A search: a dot for each trial (number, µs, best until then), steps for the best so far, the default dashed."""
    ys = [us for _, us, _ in points] + ([default] if default else [])
    x, y = Axis.of([n for n, _, _ in points], LEFT, WIDTH - RIGHT), Axis.of(ys, HEIGHT - BOTTOM, TOP, log=True)
    parts = list(grid(x, y, "trial", "µs a step", [n for n in x.ticks() if n == int(n)]))  # there is no half trial
    if default:
        parts.append(f'<line class="default" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(default)}" y2="{y(default)}"/>')
    parts += [dot("trial", x(n), y(us), f"trial {n}: {us:.5g} µs") for n, us, _ in points]
    steps = [(x(points[0][0]), y(points[0][2]))]
    for n, _, best in points[1:]:
        steps += [(x(n), steps[-1][1]), (x(n), y(best))]
    parts.append(path("best", steps))
    if default:
        parts.append(text(WIDTH - RIGHT - 4, y(default) - 6, "untuned default", "halo tick", "end"))
    return figure(parts, f"time of a step by trial; best {points[-1][2]:.4g} µs")


def ranges(rows: Sequence[tuple[str, float, float, bool]], unit: str) -> str:
    """A row for each (name, fastest, median, chosen): a dot at the fastest, a mark at the median, a line between."""
    x = Axis.of([value for _, fast, median, _ in rows for value in (fast, median)], NAMES, WIDTH - VALUES - 6, log=True)
    parts = []
    for number, (name, fast, median, chosen) in enumerate(rows):
        middle = number * ROW + ROW / 2
        kind = "chosen" if chosen else "tick"
        parts += [f'<line class="grid" x1="{x.begin}" x2="{x.end}" y1="{middle}" y2="{middle}"/>',
                  f'<line class="range" x1="{x(fast)}" x2="{x(median)}" y1="{middle}" y2="{middle}"/>',
                  f'<line class="median" x1="{x(median)}" x2="{x(median)}" y1="{middle - 6}" y2="{middle + 6}"/>',
                  f'<circle class="{"dot chosen" if chosen else "dot"}" cx="{x(fast)}" cy="{middle}" r="5"/>',
                  text(NAMES - 8, middle + 4, name, kind, "end"),
                  text(WIDTH - 2, middle + 4, f"{fast:.4g} {unit}", kind, "end")]
    return figure(parts, "fastest and median by value", len(rows) * ROW)


def stacked(rows: Sequence[tuple[str, Sequence[tuple[str, str, float]]]], unit: str) -> str:
    """A row for each name, of terms (class, name, value), on one scale; terms that have values are explained below."""
    most = max(sum(value for _, _, value in terms) for _, terms in rows)
    x, parts = Axis(0.0, most, NAMES, WIDTH - VALUES), []
    for number, (name, terms) in enumerate(rows):
        top, at = number * (ROW + 6), 0.0
        parts.append(text(NAMES - 8, top + 17, name, "tick", "end"))
        for kind, said, value in terms:
            width = max(0.0, x(at + value) - x(at))
            parts.append(f'<rect class="{kind}" x="{x(at)}" y="{top + 4}" width="{width:.1f}" height="18"><title>'
                         f'{escape(said)}: {value:.3g} {unit}</title></rect>')
            at += value
        parts.append(text(WIDTH - 2, top + 17, f"{at:.3g} {unit}", "tick", "end"))
    legend = dict.fromkeys((kind, said) for _, terms in rows if len(terms) > 1 for kind, said, _ in terms)
    place, top = 2.0, len(rows) * (ROW + 6) + 8
    for kind, said in legend:
        width = 26 + 6.8 * len(said)
        if place + width > WIDTH:
            place, top = 2.0, top + 18
        parts.append(f'<rect class="{kind}" x="{place}" y="{top}" width="10" height="10"/>')
        parts.append(text(place + 14, top + 9, said, "tick", "start"))
        place += width
    return figure(parts, "; ".join(f"{name} {sum(v for _, _, v in terms):.3g} {unit}" for name, terms in rows),
                  top + 16)


def squares(cells: Sequence[tuple[str, str]]) -> str:
    """A square for each (class, title), :data:`ACROSS` beside each other."""
    size = WIDTH / ACROSS
    parts = [f'<rect class="{kind}" x="{number % ACROSS * size + 1:.1f}" y="{number // ACROSS * size + 1:.1f}" '
             f'width="{size - 2:.1f}" height="{size - 2:.1f}" rx="2"><title>{escape(title)}</title></rect>'
             for number, (kind, title) in enumerate(cells)]
    return figure(parts, f"{len(cells)} multiprocessors", -(-len(cells) // ACROSS) * size)


def roofline(points: Sequence[tuple[float, float, str]], slopes: Sequence[tuple[str, float]], roof: float) -> str:
    """Points (operations a byte, TFLOP/s, title) below a ``roof`` and lines of TB/s, on logarithmic axes."""
    least = min(rate for _, rate, _ in points)
    x = Axis.of([i for i, _, _ in points], LEFT, WIDTH - RIGHT - 80, log=True)
    y = Axis.of([least, roof], HEIGHT - BOTTOM, TOP + 8, log=True)
    marks = x.apart([i for i, _, _ in points], 26)
    parts = [*grid(x, y, "operations a byte of recurrent weights", "TFLOP/s", marks),
             f'<line class="default" x1="{x.begin}" x2="{x.end}" y1="{y(roof)}" y2="{y(roof)}"/>',
             *(dot("layer", x(i), y(rate), title) for i, rate, title in points)]
    ends = [("tensor cores", (x.end, y(roof)))]
    for name, rate in slopes:
        first, last = max(x.low, y.low / rate), min(roof / rate, x.high)
        if first < last:
            parts.append(path("slope", [(x(i), y(i * rate)) for i in (first, last)]))
            ends.append((name, (x(last), y(last * rate))))
    for (name, end), place in zip(ends, beside([end[1] for _, end in ends]), strict=True):
        parts += [path("grid", [end, (x.end + 6, place - 4)]),
                  text(x.end + 8, place, name, "tick", "start")]
    return figure(parts, "operations a second by operations a byte")


def lines(series: Sequence[tuple[str, Points, Points, Points]]) -> str:
    """Lines of (name, points (H, µs), floors, others), both axes logarithmic; floors dashed, others open dots."""
    every = [p for _, *several in series for points in several for p in points]
    x = Axis.of([h for h, _ in every], LEFT, WIDTH - RIGHT - 46, log=True)
    y = Axis.of([us for _, us in every], HEIGHT - BOTTOM, TOP, log=True)
    parts = list(grid(x, y, "hidden units H", "µs a step", x.apart([h for h, _ in every], 34)))
    places = beside([y(points[-1][1]) for _, points, *_ in series])
    for number, (name, points, floors, others) in enumerate(series):
        kind, (right, height) = f"series{number % 6}", (x(points[-1][0]), y(points[-1][1]))
        parts += [path(f"{kind} floor", [(x(h), y(us)) for h, us in floors])] if len(floors) > 1 else []
        parts += [*(dot(f"{kind} other", x(h), y(us), f"{name} H={h:g}, another library: {us:.4g} µs")
                    for h, us in others),
                  path(kind, [(x(h), y(us)) for h, us in points]),
                  *(dot(kind, x(h), y(us), f"{name} H={h:g}: {us:.4g} µs") for h, us in points),
                  path("grid", [(right + 5, height), (x.end + 8, places[number] - 4)]),
                  text(x.end + 10, places[number], name, f"tick {kind}", "start")]
    return figure(parts, "time of a step by hidden size and batch")


def beside(ends: Sequence[float], gap: float = 14) -> list[float]:
    """Places for names of lines that end at these heights: near them, none on another, all within the picture."""
    order, places = sorted(range(len(ends)), key=ends.__getitem__), [0.0] * len(ends)
    low, high = TOP + 8.0, HEIGHT - BOTTOM + 4.0
    for i in order:
        places[i] = max(ends[i] + 4, low)
        low = places[i] + gap
    for i in reversed(order):
        places[i] = round(min(places[i], high), 1)
        high = places[i] - gap
    return places

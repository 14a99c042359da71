"""Pictures as inline SVG, coloured by the page's style, so that they follow light and dark.

All text goes through :func:`text`, which escapes it: names in a log are anybody's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 40


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
        """Around the values, with a little room."""
        low, high = min(values), max(values)
        if log:
            room = max((high / low) ** 0.06, 1.02)
            return cls(low / room, high * room, begin, end, True)
        room = 0.04 * (high - low) or 0.5
        return cls(low - room, high + room, begin, end)

    def __call__(self, value: float) -> float:
        """Pixels of a value, with one decimal."""
        a, b, v = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        return round(self.begin + (v - a) / (b - a) * (self.end - self.begin), 1)

    def ticks(self, most: int = 6) -> list[float]:
        """Round values within, ``most`` of them or a few more."""
        if self.log:
            for steps in ((1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
                decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
                found = [s * 10.0 ** d for d in decades for s in steps if self.low <= s * 10.0 ** d <= self.high]
                if len(found) <= most + 2:
                    break
            if len(found) >= 2:
                return found
        span = (self.high - self.low) / most
        unit = 10.0 ** math.floor(math.log10(span))
        step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= span)
        first = math.ceil(self.low / step)
        return [n * step for n in range(first, math.floor(self.high / step) + 1)]


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> str:
    """Words at a place; ``kind`` is a class of the page's style."""
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def figure(parts: Iterator[str] | Sequence[str], label: str, height: float = HEIGHT) -> str:
    """The whole, as wide as there is room; ``label`` is read out by who does not see it."""
    return (f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label, quote=True)}">'
            + "".join(parts) + "</svg>")


def path(points: Sequence[tuple[float, float]]) -> str:
    """A line through points of pixels."""
    return "M" + "L".join(f"{x} {y}" for x, y in points)


def grid(x: Axis, y: Axis, across: str, up: str, marks: Sequence[float] | None = None) -> Iterator[str]:
    """Lines, numbers and names of both axes; ``marks``: of the horizontal one."""
    for value in y.ticks():
        yield f'<line class="grid" x1="{x.begin}" x2="{x.end}" y1="{y(value)}" y2="{y(value)}"/>'
        yield text(x.begin - 6, y(value) + 4, f"{value:.6g}", "tick", "end")
    for value in marks if marks is not None else x.ticks():
        yield text(x(value), y.begin + 16, f"{value:.6g}", "tick")
    yield text((x.begin + x.end) / 2, y.begin + 33, across, "name")
    yield (f'<text class="name" text-anchor="middle" transform="translate(14 {(y.begin + y.end) / 2}) rotate(-90)">'
           f"{escape(up)}</text>")


def curve(points: Sequence[tuple[int, float, float]], default: float | None) -> str:
    """A search: a dot for each trial (number, µs, best until then), the best so far as a line of steps, the default
    dashed."""
    ys = [us for _, us, _ in points] + ([default] if default else [])
    x, y = Axis.of([n for n, _, _ in points], LEFT, WIDTH - RIGHT), Axis.of(ys, HEIGHT - BOTTOM, TOP, log=True)
    parts = list(grid(x, y, "trial", "µs a step"))
    if default:
        parts.append(f'<line class="default" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(default)}" y2="{y(default)}"/>')
        parts.append(text(WIDTH - RIGHT - 4, y(default) - 5, "untuned default", "tick", "end"))
    parts += [f'<circle class="trial" cx="{x(n)}" cy="{y(us)}" r="3"><title>trial {n}: {us:.5g} µs</title></circle>'
              for n, us, _ in points]
    steps = [(x(points[0][0]), y(points[0][2]))]
    for n, _, best in points[1:]:
        steps += [(x(n), steps[-1][1]), (x(n), y(best))]
    parts.append(f'<path class="best" d="{path(steps)}"/>')
    return figure(parts, f"time of a step by trial; best {points[-1][2]:.4g} µs")


def bars(rows: Sequence[tuple[str, float, float, bool]], unit: str) -> str:
    """A row for each (name, fastest, median, chosen): a bar to the fastest, a tick at the median, from the least."""
    height, least = 22, min(fast for _, fast, _, _ in rows)
    x = Axis(0.0, max(max(median, fast) for _, fast, median, _ in rows) / least * 1.02, 120, WIDTH - 96)
    parts = []
    for number, (name, fast, median, chosen) in enumerate(rows):
        top = number * height
        parts.append(text(112, top + 15, name, "chosen" if chosen else "tick", "end"))
        parts.append(f'<rect class="{"bar chosen" if chosen else "bar"}" x="120" y="{top + 4}" '
                     f'width="{max(1.0, x(fast / least) - 120):.1f}" height="{height - 8}"/>')
        parts.append(f'<line class="median" x1="{x(median / least)}" x2="{x(median / least)}" y1="{top + 2}" '
                     f'y2="{top + height - 2}"/>')
        parts.append(text(WIDTH - 4, top + 15, f"{fast:.4g} {unit}", "tick", "end"))
    return figure(parts, "fastest and median by value", len(rows) * height)


def stacked(terms: Sequence[tuple[str, float]], measured: float) -> str:
    """The terms of a floor beside each other, above the measured time, on one scale."""
    x = Axis(0.0, max(measured, sum(v for _, v in terms)), 90, WIDTH - 70)
    parts, at = [text(84, 19, "floor", "tick", "end"), text(84, 47, "measured", "tick", "end")], 0.0
    for number, (name, value) in enumerate(terms):
        parts.append(f'<rect class="term{number}" x="{x(at)}" y="6" width="{max(0.0, x(at + value) - x(at)):.1f}" '
                     f'height="18"><title>{escape(name)}: {value:.3g} µs</title></rect>')
        at += value
    parts.append(text(x(at) + 5, 19, f"{at:.3g} µs", "tick", "start"))
    parts.append(f'<rect class="bar chosen" x="90" y="34" width="{x(measured) - 90:.1f}" height="18"/>')
    parts.append(text(x(measured) + 5, 47, f"{measured:.4g} µs", "tick", "start"))
    place = 90
    for number, (name, value) in enumerate(terms):
        said = f"{name} {value:.2g}"
        parts.append(f'<rect class="term{number}" x="{place}" y="66" width="10" height="10"/>')
        parts.append(text(place + 14, 75, said, "tick", "start"))
        place += 24 + 8 * len(said)
    return figure(parts, f"floor {at:.3g} µs of {measured:.4g} µs measured", 82)


def lines(series: Sequence[tuple[str, Sequence[tuple[float, float]], Sequence[tuple[float, float]]]]) -> str:
    """Lines of (name, points (H, µs), floors (H, µs)), both axes logarithmic; floors dashed."""
    every = [p for _, points, floors in series for p in (*points, *floors)]
    x = Axis.of([h for h, _ in every], LEFT, WIDTH - RIGHT - 70, log=True)
    y = Axis.of([us for _, us in every], HEIGHT - BOTTOM, TOP, log=True)
    marks: list[float] = []
    for h in sorted({h for h, _ in every}):
        if not marks or x(h) - x(marks[-1]) > 34:
            marks.append(h)
    parts, places = list(grid(x, y, "hidden units H", "µs a step", marks)), beside([y(p[-1][1]) for _, p, _ in series])
    for number, (name, points, floors) in enumerate(series):
        kind = f"series{number % 6}"
        if len(floors) > 1:
            parts.append(f'<path class="{kind} floor" d="{path([(x(h), y(us)) for h, us in floors])}"/>')
        parts.append(f'<path class="{kind}" d="{path([(x(h), y(us)) for h, us in points])}"/>')
        parts += [f'<circle class="{kind}" cx="{x(h)}" cy="{y(us)}" r="3"><title>{escape(name)} H={h:g}: {us:.4g} µs'
                  f"</title></circle>" for h, us in points]
        end = x(points[-1][0]), y(points[-1][1])
        parts.append(f'<path class="grid" d="{path([(end[0] + 5, end[1]), (x.end + 8, places[number] - 4)])}"/>')
        parts.append(text(x.end + 10, places[number], name, f"tick {kind}", "start"))
    return figure(parts, "time of a step by hidden size and batch")


def beside(ends: Sequence[float], gap: float = 14) -> list[float]:
    """Places for names of lines that end at these heights: near them, none on another, all within the picture."""
    order = sorted(range(len(ends)), key=lambda i: ends[i])
    places = [0.0] * len(ends)
    low = TOP + 8.0
    for i in order:
        places[i] = max(ends[i] + 4, low)
        low = places[i] + gap
    high = HEIGHT - BOTTOM + 4.0
    for i in reversed(order):
        places[i] = round(min(places[i], high), 1)
        high = places[i] - gap
    return places

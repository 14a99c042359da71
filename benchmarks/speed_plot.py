"""The plot of the README: how many times as fast as cuDNN each row of the grid is, as an SVG.

    python benchmarks/speed_plot.py benchmarks/results/h100_grid.jsonl docs/images/speed.svg

Written without a plotting library, so that the same results give the same bytes, and colours follow a light or dark
page.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from pathlib import Path

from grid_summary import Summary, singles
from measured_rows import Results, read
from report import layer

WIDTH, HEIGHT = 520, 340  # words can still be read where a phone shows it
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 62, 44
MOST = 16.0  # ratio at the upper end
KINDS = {"16 bits": ("float16", "bfloat16"), "TF32 on both sides": ("tf32-both",),
         "float32, cuDNN in TF32": ("tf32",), "float32": ("float32",)}
STYLE = """
  .page { fill: #fff }
  text { font: 13px system-ui, sans-serif; fill: #24292f }
  .line { stroke: #8c959f; stroke-opacity: .35 } .one { stroke: #cf222e; stroke-opacity: 1; stroke-width: 1.5 }
  .k0 { fill: #0969da } .k1 { fill: #8250df } .k2 { fill: #bc4c00 } .k3 { fill: #1a7f37 }
  circle { fill-opacity: .7 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #161b22 }
    text { fill: #c9d1d9 } .one { stroke: #ff7b72 }
    .k0 { fill: #58a6ff } .k1 { fill: #bc8cff } .k2 { fill: #f0883e } .k3 { fill: #3fb950 }
  }
"""


def height(ratio: float) -> float:
    """Where a ratio lies, on a logarithmic scale from 1/2 up."""
    share = math.log(2 * ratio) / math.log(2 * MOST)
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def dots(rows: Iterable[dict], sizes: list[int]) -> list[str]:
    """A dot for each row, in the column of its H; those of a column lie beside each other by kind and order."""
    lines, step = [], (WIDTH - LEFT - RIGHT) / len(sizes)
    for number, size in enumerate(sizes):
        column = sorted((r for r in rows if r["H"] == size), key=lambda r: (r["ratio"], r["name"]))
        for place, row in enumerate(column):
            kind = next(i for i, of in enumerate(KINDS.values()) if row["dtype"] in of)
            x = LEFT + step * (number + 0.5 + 0.6 * ((place * 0.618) % 1 - 0.5))  # spread, and the same every time
            lines.append(f'<circle class="k{kind}" cx="{x:.1f}" cy="{height(row["ratio"]):.1f}" r="4"><title>'
                         f'{layer(row)} {row["dtype"]}: {row["ratio"]:.2f}x</title></circle>')
        lines.append(f'<text x="{LEFT + step * (number + 0.5):.1f}" y="{HEIGHT - BOTTOM + 18}" '
                     f'text-anchor="middle">{size}</text>')
    return lines


def svg(log: Results) -> str:
    """The whole picture of the rows that were measured."""
    rows = Summary(log.rows).measured(singles())
    sizes = sorted({r["H"] for r in rows})
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
             f'height="{HEIGHT}" role="img" aria-label="Times as fast as cuDNN, by hidden size">',
             f"<style>{STYLE}</style>", f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="8"/>']
    for ratio in (0.5, 1, 2, 4, 8, 16):
        y = height(ratio)
        lines.append(f'<line class="line{" one" if ratio == 1 else ""}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" '
                     f'y2="{y:.1f}"/><text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{ratio:g}x</text>')
    lines += dots(rows, sizes)
    lines.append(f'<text x="{LEFT + 4}" y="{height(1) + 16:.1f}">below this line cuDNN is faster</text>')
    for number, name in enumerate(KINDS):
        x, y = LEFT + 220 * (number % 2), 16 + 20 * (number // 2)
        lines.append(f'<circle class="k{number}" cx="{x + 6}" cy="{y}" r="5"/>'
                     f'<text x="{x + 16}" y="{y + 4}">{name}</text>')
    lines.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">hidden size H; {len(rows)} layers on '
                 f'{log.environment["gpu"]}</text>')
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    path = Path(sys.argv[2])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg(read(Path(sys.argv[1]))))


if __name__ == "__main__":
    main()

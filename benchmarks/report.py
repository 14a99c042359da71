"""Tables of files of results: each file's page beside it, and its part of docs.

    python benchmarks/report.py benchmarks/results/h100_classes.jsonl         # writes h100_classes.md
    python benchmarks/report.py benchmarks/results/h100_classes.jsonl --docs  # and the table of docs/PERFORMANCE.md
    python benchmarks/report.py benchmarks/results/h100_grid.jsonl --plot docs/images/speed.svg

Rows are those of a grid (benchmarks/grids/) that `ecornn bench --grid` measured, or of compare_flashrnn.py.
"""

from __future__ import annotations

import argparse
import ast
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from measured_rows import CLIFF, HIGH, Results, Row, Summary, mean, name_of, read, singles, size

PAGES = (Path("docs/PERFORMANCE.md"), Path("docs/PERFORMANCE_CPU.md"), Path("docs/CELLS.md"))  # from the checkout
NAMES = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "vanilla tanh", "rnn_relu": "vanilla relu", "slstm": "sLSTM",
         "slstm(heads=8)": "sLSTM with 8 heads,", "slstm8": "sLSTM", "block_gru8": "block GRU"}
WIDTH, HEIGHT = 520, 340  # words can still be read where a phone shows it
LEFT, RIGHT, TOP, BOTTOM = 62, 10, 62, 44
MOST = 16.0  # ratio at the upper end
DOTS = {"16 bits": ("float16", "bfloat16"), "TF32 on both sides": ("tf32-both",),
         "float32, cuDNN in TF32": ("tf32",), "float32": ("float32",)}
CELLS = {"LSTM": ("lstm",), "GRU": ("gru",), "vanilla RNN, tanh": ("rnn_tanh",), "vanilla RNN, relu": ("rnn_relu",)}
SUITES = ("layers", "latency", "grid")  # of a CPU: single layers
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


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a Markdown table."""
    return [f"| {' | '.join(map(str, cells))} |" for cells in (heads, ["---"] * len(heads), *rows)]


def layer(r: Row) -> str:
    """A row's layer, as tables name it."""
    more = [f"{r.get('layers')} layers" * ((r.get("layers") or 1) > 1),
            "both directions" * bool(r.get("bidirectional"))]
    return ", ".join(filter(None, [f"{NAMES.get(r['cell'], r['cell'])} {size(r)}", *more]))


def times(r: Row, side: str) -> str:
    """Median [p20, p80]."""
    return f"{r[f'{side}_us']:.2f} [{r[f'{side}_p20']:.2f}, {r[f'{side}_p80']:.2f}]"


def sides_of(rows: Iterable[Row]) -> list[str]:
    """All sides of rows, ours first."""
    return list(dict.fromkeys(side for row in rows for side in row["sides"]))


def cell(r: Row, side: str, base: str) -> str:
    """A side's time, and how many times as long as ``base`` it takes."""
    if f"{side}_us" not in r:
        return ""
    return times(r, side) + ("" if side == base or f"{base}_us" not in r else
                             f", {r[f'{side}_us'] / r[f'{base}_us']:.2f}x")


def rows_table(rows: Sequence[Row]) -> list[str]:
    """A line for each layer, a column for each side."""
    sides = sides_of(rows)
    base = sides[0] if sides[0] == "ecornn" else sides[-1]
    return table(("layer, T x B x I x H", "dtype", *sides),
                 ((layer(r), r["dtype"], *(cell(r, side, base) for side in sides)) for r in rows))


def groups_table(results: Results) -> list[str]:
    """A line for each group: geometric means of how many times as long each side takes as ours, and the worst row."""
    rows, sides = results.good, sides_of(results.good)
    base = "ecornn" if "ecornn" in sides else sides[-1]
    sides.remove(base)
    expected = [one.group for one in results.grid.expanded("grid")] if results.grid is not None else []
    lines = []
    for group in dict.fromkeys(r["group"] for r in rows):
        of = [r for r in rows if r["group"] == group]
        means = [[r[f"{side}_us"] / r[f"{base}_us"] for r in of if f"{side}_us" in r and f"{base}_us" in r]
                 for side in sides]
        rated = [r for r in of if "ratio" in r]
        least = min(rated, key=lambda r: r["ratio"]) if rated else None
        count = len(of) if not expected or len(of) == expected.count(group) else f"{len(of)} of {expected.count(group)}"
        bound = results.grid.means.get(group) if results.grid is not None else None
        lines.append((group.replace("_", " "), count, *(f"{mean(m):.2f}x" if m else "" for m in means),
                      f"{least['ratio']:.2f}x, {layer(least)} {least['dtype']}" if least else "",
                      sum(r["ratio"] < 1 for r in rated), "" if bound is None else f"{bound}x " + (
                          "holds" if mean(r["ratio"] for r in rated) >= bound else "**missed**")))
    heads = ("layers", "rows", *(f"{side}, geometric mean" for side in sides), "least ratio", "below 1x", "at least")
    return table(heads, lines) if any(line[-1] for line in lines) else table(heads[:-1], (ln[:-1] for ln in lines))


def whole(results: Results) -> list[str]:
    """The page: what was measured, groups, every row with its configuration and bounds, and what is missing."""
    grid = results.grid
    lines = [f"# {grid.title if grid else results.path.stem}", "", *((grid.about.strip(), "") if grid else ()),
             results.source, ""]
    groups = list(dict.fromkeys(r["group"] for r in results.good))
    if any(groups):
        lines += [*groups_table(results), ""]
    for group in groups:
        rows = [r for r in results.good if r["group"] == group]
        lines += [f"## {group.replace('_', ' ')}", ""] if any(groups) else []
        lines += [*rows_table(rows), ""]
    bounds = {one.name: one for one in grid.expanded("grid") if one.at_most or one.at_least} if grid else {}
    if bounds:
        lines += ["## Bounds", "", *table(("layer", "dtype", "ours", "at most", "ratio", "at least", ""), (
            bound_line(r, bounds[name]) for r in results.good if (name := f"{r['cell']} {size(r)} {r['dtype']}")
            in bounds)), ""]
    lines += ["## Configurations", "", *table(("layer", "dtype", "schedule", "knobs", "from"), (
        (layer(r), r["dtype"], r["schedule"], " ".join(f"{k}={v}" for k, v in r.get("config", {}).items()),
         r.get("provenance", "").split(":")[0]) for r in results.good if r.get("schedule"))), "",
              "## Not measured or not right", ""]
    missing = [f"- {r['name']}: {r['failed']}" for r in results.rows if r.get("failed")]
    missing += [f"- {r['name']}, {side}: {why}" for r in results.good for side, why in r.get("missing", {}).items()]
    return [*lines, *(missing or ["None."]), ""]


def bound_line(r: Row, bound: Any) -> tuple[object, ...]:
    """A row that must be fast enough."""
    good = (bound.at_most is None or r["ecornn_us"] <= bound.at_most) and (
        bound.at_least is None or r["ratio"] >= bound.at_least)
    return (layer(r), r["dtype"], times(r, "ecornn"), bound.at_most or "", f"{r['ratio']:.2f}x", bound.at_least or "",
            "holds" if good else "**missed**")


def of_grid(results: Results) -> list[str]:
    """The rest of the grid's page: floors, scaling, cliffs."""
    s = Summary(results.rows, results.environment.get("gpu", ""))
    lines = ["## Floors", "", "What `ecornn/floor.py` computes: exchange, products and bytes of the best cut.", "",
             *table(("layer", "dtype", "ecornn", "floor", "times the floor"), (
                 (layer(r), r["dtype"], times(r, "ecornn"), f"{r['floor_us']:.2f}", f"{r['over_floor']:.2f}")
                 for r in s.rows.values() if "floor_us" in r))]
    lines += ["", f"Above {HIGH} times the floor: " + (", ".join(
        f"{layer(r)} {r['dtype']} ({r['over_floor']:.2f})" for r in s.high()) or "none") + ".",
        "`benchmarks/why_above_floor.py` says which stage of a step is the reason."]
    lines += ["", "## Vanilla tanh, H = 1152, float16 (Persistent RNNs)", "",
              "TFLOP/s are those of the recurrent product alone, over the time of the whole layer.", "",
              *table(("B", "ecornn", "cuDNN", "TFLOP/s", "exchange floor / time"), (
                  (p["B"], f"{p['ecornn_us']:.2f}", f"{p['cudnn_us']:.2f}", f"{p['tflops']:.2f}",
                   "" if p["share"] is None else f"{p['share']:.0%}") for p in s.scaling()))]
    return [*lines, "", "## Off every tile", "", *table(("layer", "ecornn", "next tile up", "ecornn", "cliff", ""), (
        (layer(p.off), times(p.off, "ecornn"), layer(p.up), times(p.up, "ecornn"), f"{p.cliff:.2f}",
         "holds" if p.cliff <= CLIFF else f"**above {CLIFF}**") for p in s.pairs())), ""]


def short_grid(results: Results) -> list[str]:
    """The grid for docs: means by data type, the worst rows, cliffs."""
    s = Summary(results.rows, results.environment.get("gpu", ""))
    lines = table(("single layers against cuDNN", "rows", "geometric mean", "least", "below 1x"), (
        (g.dtype, len(g.rows) if len(g.rows) == g.expected else f"{len(g.rows)} of {g.expected}", f"{g.mean:.2f}x",
         f"{g.least['ratio']:.2f}x, {layer(g.least)}", g.below) for g in s.groups()))
    lines += ["", "The rows with the least ratio:", "", *table(
        ("layer, T x B x I x H", "dtype", "ecornn", "cuDNN", "ratio", "floor", "times the floor"), (
            (layer(r), r["dtype"], times(r, "ecornn"), times(r, "cudnn"), f"{r['ratio']:.2f}x",
             f"{r.get('floor_us', 0):.2f}", f"{r.get('over_floor', 0):.2f}") for r in s.worst(6))), ""]
    if pairs := s.pairs():
        worst = max(pairs, key=lambda p: p.cliff)
        lines.append(f"Sizes off every tile take at most {worst.cliff:.2f} times as long as the next tile up "
                     f"({layer(worst.off)} against {layer(worst.up)}; {len(pairs)} pairs).")
    if s.failed:
        lines.append(f"{len(s.failed)} rows failed: " + "; ".join(r["name"] for r in s.failed) + ".")
    return lines


def cpu_table(results: Results) -> list[str]:
    """A CPU's layers one by one, but for its grid, of which a line says what it comes to."""
    single = [r for r in results.good if r["group"] != "grid"]
    lines = []
    for group in dict.fromkeys(r["group"] for r in single):
        lines += [f"{group.capitalize()}:", "", *rows_table([r for r in single if r["group"] == group]), ""]
    rounded = {side: [r["errors"][side] for r in single if f"{side}_us" in r] for side in sides_of(single)
               if side.startswith(("int", "bfloat"))}  # against float64 with weights that are not rounded
    lines += ["Errors of rounded weights, at most: " + ", ".join(
        f"{side} {max(errors):.1e}" for side, errors in rounded.items()) + ".", ""] if rounded else []
    return [*lines, *groups_table(results)]


def published_table(results: Results) -> list[str]:
    """Published cells with where they are from."""
    return table(("cell", "what it is", "schedule", "ecornn", "PyTorch's loop", "ratio"), (
        (f"`{r['cell']}`", r.get("source") or described(r["cell"]), r["schedule"], times(r, "ecornn"),
         times(r, "loop") + f" ({r.get('torch_dtype')})" * (r.get("torch_dtype", r["dtype"]) != r["dtype"]),
         f"{r['ratio']:.0f}x") for r in results.good))


def described(name: str) -> str:
    """The docstring of a cell of tests/published, up to who published it."""
    files = Path(__file__).parent.parent.joinpath("tests/published").glob("*.py")
    texts = [" ".join((ast.get_docstring(node) or "").split()) for path in files
             for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef) and node.name == name]
    return re.match(r"[^)]*\)?", texts[0])[0] if texts else ""


def flashrnn_table(results: Results) -> list[str]:
    """Results of ``compare_flashrnn.py``, forward or in training: ours and cuDNN's are the whole layer, FlashRNN has
    W x + b."""
    env, lines = results.environment, []
    training = "cudnn" in results.rows[0]["sides"]
    for r in results.rows:
        theirs = min((s for s in ("flashrnn", "flashrnn_triton") if f"{s}_us" in r), key=lambda s: r[f"{s}_us"])
        ours = ("ecornn", "cudnn") if training else ("ecornn_recurrence", "ecornn")
        ratio = [f"{r['ratio']:.2f}x", f"{r['ratio_flashrnn']:.2f}x"] if training else [f"{r['ratio_recurrence']:.2f}x"]
        lines.append((layer(r), *(times(r, side) for side in ours),
                      times(r, theirs) + " (Triton)" * (theirs == "flashrnn_triton"), *ratio))
    heads = ("ecornn", "cuDNN", "FlashRNN, recurrence", "to cuDNN", "to FlashRNN") if training else (
        "ecornn, recurrence", "ecornn, whole layer", "FlashRNN, recurrence", "ratio")
    return [*table((f"bfloat16{', forward and backward' * training}, µs/step [p20, p80]", *heads), lines), "",
            f"FlashRNN {env['flashrnn']} through its own API, its launches queued behind a kernel that waits. "
            f"{env['recurrence']}"]


SECTIONS = {"grid": short_grid, "cpu": cpu_table, "published": published_table, "classes": groups_table,
            "flashrnn": flashrnn_table, "flashrnn_training": flashrnn_table}


def section(path: Path) -> tuple[str, list[str]]:
    """The name of the part of ``PAGES`` that a file belongs to, and its lines."""
    results = read(path)
    name = name_of(path)
    lines = SECTIONS.get(name, lambda results: rows_table(results.good))(results)
    if (page := path.with_suffix(".md")).exists():
        lines = [*lines, "", f"Every row, with its configuration: [{page.as_posix()}](../{page.as_posix()})."]
    mark = "measured" if name == "layers" else f"measured-{name.replace('flashrnn_', 'flashrnn-')}"
    return mark, [*lines, "", results.source]


def height(ratio: float) -> float:
    """Where a ratio lies, on a logarithmic scale from 1/2 up."""
    share = math.log(2 * ratio) / math.log(2 * MOST)
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def dots(rows: Iterable[dict], sizes: list[int], kind_of: Callable[[dict], int]) -> list[str]:
    """A dot for each row, in the column of its H; those of a column lie beside each other by kind and order."""
    lines, step = [], (WIDTH - LEFT - RIGHT) / len(sizes)
    for number, hidden in enumerate(sizes):
        column = sorted((r for r in rows if r["H"] == hidden), key=lambda r: (r["ratio"], r["name"]))
        for place, row in enumerate(column):
            x = LEFT + step * (number + 0.5 + 0.6 * ((place * 0.618) % 1 - 0.5))  # spread, and the same every time
            lines.append(f'<circle class="k{kind_of(row)}" cx="{x:.1f}" cy="{height(row["ratio"]):.1f}" r="4"><title>'
                         f'{layer(row)} {row["dtype"]}: {row["ratio"]:.2f}x</title></circle>')
        lines.append(f'<text x="{LEFT + step * (number + 0.5):.1f}" y="{HEIGHT - BOTTOM + 18}" '
                     f'text-anchor="middle">{hidden}</text>')
    return lines


def svg(log: Results) -> str:
    """A plot of the README: how many times as fast as cuDNN each row of the grid is, or as the faster of PyTorch and
    ONNX Runtime each layer on a CPU. Without a plotting library, so that the same results give the same bytes, and
    colours follow a light or dark page."""
    if "gpu" in log.environment:
        rows, kinds, key = Summary(log.rows).measured(singles()), DOTS, "dtype"
        where, what, other = log.environment["gpu"], "cuDNN", "cuDNN is"
    else:
        rows, kinds, key = [r for r in log.rows if r["suite"] in SUITES], CELLS, "cell"
        where, what, other = log.environment["cpu"].partition(" @")[0], "PyTorch or ONNX Runtime", "they are"
    title = f"times as fast as {what}"
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
             f'height="{HEIGHT}" role="img" aria-label="{title[0].upper()}{title[1:]}, by hidden size">',
             f"<style>{STYLE}</style>", f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="8"/>']
    for ratio in (0.5, 1, 2, 4, 8, 16):
        y = height(ratio)
        lines.append(f'<line class="line{" one" if ratio == 1 else ""}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" '
                     f'y2="{y:.1f}"/><text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{ratio:g}x</text>')
    lines += dots(rows, sorted({r["H"] for r in rows}),
                  lambda row: next(i for i, of in enumerate(kinds.values()) if row[key] in of))
    lines.append(f'<text x="{LEFT + 4}" y="{height(1) + 16:.1f}">below this line {other} faster</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    lines.append(f'<text x="12" y="{middle}" text-anchor="middle" transform="rotate(-90 12 {middle})">{title}</text>')
    for number, name in enumerate(kinds):
        x, y = LEFT + 220 * (number % 2), 16 + 20 * (number // 2)
        lines.append(f'<circle class="k{number}" cx="{x + 6}" cy="{y}" r="5"/>'
                     f'<text x="{x + 16}" y="{y + 4}">{name}</text>')
    lines.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">hidden size H; {len(rows)} layers on '
                 f'{where}</text>')
    return "\n".join([*lines, "</svg>", ""])


def write_docs(path: Path) -> None:
    """The file's table, in the page that has a place for it."""
    mark, lines = section(path)
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    (page,) = (page for page in PAGES if begin in page.read_text())
    text = page.read_text()
    page.write_text(text.split(begin)[0] + "\n".join([begin, "", *lines, "", end]) + text.split(end)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="of the results, from the checkout")
    parser.add_argument("--docs", action="store_true", help="write the table into docs")
    parser.add_argument("--plot", type=Path, metavar="SVG", help="draw the grid there instead")
    arguments = parser.parse_args()
    if not arguments.path.is_file():
        sys.exit(f"{arguments.path} is missing; python benchmarks/run_all.py {name_of(arguments.path)} measures it")
    path, results = arguments.path, read(arguments.path)
    if not results.good:
        sys.exit(f"no row of {path} was measured")
    if arguments.plot:
        arguments.plot.parent.mkdir(parents=True, exist_ok=True)
        arguments.plot.write_text(svg(results))
        return
    if path.suffix == ".jsonl":
        lines = whole(results) + (of_grid(results) if name_of(path) == "grid" else [])
        path.with_suffix(".md").write_text("\n".join(lines))
    if arguments.docs:
        write_docs(path)


if __name__ == "__main__":
    main()

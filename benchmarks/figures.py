"""The figures within the sentences of README and docs, computed from files of results.

    python benchmarks/figures.py            says which figures of which page are not those of the results
    python benchmarks/figures.py --write    writes them

In a page a figure stands between two comments, ``<!-- figure: NAME -->`` and ``<!-- / -->``; NAME is one of
``FIGURES``. A comment never begins a line: it would make HTML of it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

from measured_rows import Group, Summary, members, read
from measured_rows import mean as geometric
from search_quality import NEAR, lives, medians, tables_of, until

from ecornn.tune import log

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MARKED = re.compile(r"(<!-- figure: ([\w.]+) -->)(.*?)(<!-- / -->)", re.DOTALL)


def pages() -> list[Path]:
    """Every page that may hold figures."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@cache
def rows(name: str) -> list[dict[str, Any]]:
    """The rows of a file of results."""
    return read(RESULTS / name).rows


@cache
def grid() -> Summary:
    return Summary(rows("h100_grid.jsonl"))


@cache
def group(dtype: str) -> Group:
    return next(g for g in grid().groups() if g.dtype == dtype)


def span(values: Iterable[float], form: str = "{:.1f}", between: str = " to ") -> str:
    """The least and the largest value."""
    found = sorted(values)
    return between.join((form.format(found[0]), form.format(found[-1])))


def language(way: str) -> str:
    """How many times as fast as with torch.nn's layers the language model trains."""
    (found,) = (r["ratio"] for r in rows("h100_language_model.json") if r["way"] == way)
    return f"{found:.2f}"


def memory(keep: str) -> str:
    """The peak of a training step, of cuDNN's in bfloat16 and in float16."""
    found = [r for r in rows("h100_training_memory.json") if r["keep"] == keep]
    return " and ".join(f"{r['ecornn_mib'] / r['cudnn_mib']:.2f}" for r in sorted(found, key=lambda r: r["dtype"]))


def cpu(suite: str) -> list[dict[str, Any]]:
    return [r for r in rows("cpu_skylake.json") if r["group"] == suite]


def in_programs(mode: str, ratio: str) -> list[float]:
    """Times of torch.nn over those of the drop-in, of one mode of cpu_in_programs.py."""
    return [r[f"ratio_{ratio}"] for r in rows("cpu_in_programs.json") if r["mode"] == mode]


def rates(*dtypes: str) -> str:
    """Of the hoisted projection, as shares of cuBLAS's."""
    return span((r["rate"] for r in rows("h100_projection.jsonl") if r["dtype"] in dtypes), "{:.0%}")


def packed(case: str, fits: Callable[[dict[str, Any]], bool] = lambda r: True) -> str:
    """How many times as long PyTorch takes for packed sequences."""
    return span(r["ratio"] for r in rows("h100_packed.json") if r["case"] == case and fits(r))


def variants(word: str, of: tuple[str, ...], sizes: tuple[int, ...] = (256, 1024)) -> list[float]:
    """Times of variants of a cell over those of the plain one, of those that a regular expression finds."""
    return [r["ecornn_us"] / r["plain_us"] for r in rows("h100_variants.jsonl") if re.search(word, r["cell"])
            and r["group"] in of and r["H"] in sizes]


def cost(values: Iterable[float]) -> str:
    """Of variants, in percent."""
    return span((100 * (v - 1) for v in values), "{:.0f}") + "%"


@cache
def live(records: str) -> list[Any]:
    """The live searches of the H100 that knew these records."""
    reports = [RESULTS / f"search_live_{name}_h100.json" for name in ("quarter", "none")]
    return [one for one in lives([(tables_of([RESULTS / "search_fastest_h100.jsonl.xz"]), reports)])
            if one.records == records]


def searched(records: str, trials: int) -> list[float]:
    """Of each layer the median run's best so far, over the best of the table."""
    return [middle for middle, _ in medians(live(records), trials).values()]


@cache
def again(records: str) -> list[float]:
    """As :func:`searched`, at the end, where the best was measured once more beside the default; in order."""
    return sorted(median(one.ratio for one in live(records) if one.workload == workload)
                  for workload in {one.workload for one in live(records)})


def random_near() -> str:
    """Layers that random search has within 5% after 128 trials, in the median of its seeds."""
    of = [r["median"] for r in rows("search_quality_h200.json") if (r["search"], r["trials"]) == ("random", 128)]
    return f"{sum(m <= 1.05 for m in of)} of the {len(of)}"


def workloads(*names: str) -> str:
    """How many workloads logs that ship have trials of."""
    return str(len({trial.workload for name in names for trial in log.read(ROOT / "tuning_logs" / name).trials()}))


def served(sessions: int, side: str) -> str:
    """Requests a second of a service, and the 50th and 99th percentile of one."""
    (row,) = (r[side] for r in rows("serving_cpu.json") if r["sessions"] == sessions)
    return f"{row['rate']:.0f}, {row['p50_ms']:.1f}, {row['p99_ms']:.1f}"


def step(hidden: int) -> str:
    """Microseconds of a step that C calls, of an LSTM with one input."""
    (row,) = (r for r in rows("real_time.json") if (r["cell"], r["H"], r["I"]) == ("lstm", hidden, 1))
    return f"{row['step_ns'] / 1000:.2f}"


LITTLE = "clip|zoneout|peepholes|coupled|heads"
# What is said of them, a line each; a figure that a page does not have is not missed.
FIGURES: dict[str, Callable[[], str]] = {
    "grid.rows16": lambda: str(len(group("float16 and bfloat16").rows)),
    "grid.mean16": lambda: f"{group('float16 and bfloat16').mean:.1f}",
    "grid.least16": lambda: f"{group('float16 and bfloat16').least['ratio']:.2f}",
    "grid.least_tf32": lambda: f"{group('tf32').least['ratio']:.2f}",
    "grid.past": lambda: span(grid().rows[name]["ratio"] for name in members("past")),
    "cpu.layers": lambda: span((r["ratio"] for s in ("layers", "stacks", "latency") for r in cpu(s)), "{:.2f}"),
    "cpu.grid_rows": lambda: str(len(cpu("grid"))),
    "cpu.grid_mean": lambda: f"{geometric(r['ratio'] for r in cpu('grid')):.2f}x",
    "cpu.grid_least": lambda: f"{min(r['ratio'] for r in cpu('grid')):.2f}x",
    "cpu.grid_below": lambda: str(sum(r["ratio"] < 1 for r in cpu("grid"))),
    "cpu.int21_least": lambda: f"{min(r['ratio'] * r['ecornn_us'] / r['int21_us'] for r in cpu('latency')):.1f}",
    "programs.turns_rows": lambda: str(len(in_programs("turns", "ms"))),
    "programs.turns_mean": lambda: f"{geometric(in_programs('turns', 'ms')):.1f}",
    "programs.turns_least": lambda: f"{min(in_programs('turns', 'ms')):.2f}",
    "programs.busy_rows": lambda: str(len(in_programs("busy", "ms"))),
    "programs.busy": lambda: span(in_programs("busy", "ms"), "{:.1f}"),
    "programs.busy_p99": lambda: span(in_programs("busy", "p99_ms"), "{:.1f}"),
    "programs.service": lambda: span(in_programs("service", "ms"), "{:.2f}"),
    "programs.service_p99": lambda: span(in_programs("service", "p99_ms"), "{:.2f}"),
    "projection.half": lambda: rates("float16", "bfloat16"),
    "projection.tf32": lambda: rates("tf32-both"),
    "projection.float32": lambda: rates("float32"),
    "packed.uniform": lambda: packed("uniform"),
    "packed.issue64": lambda: packed("pytorch#149194", lambda r: r["H"] == 64 and r["T"] >= 500),
    "packed.issue256": lambda: packed("pytorch#149194", lambda r: r["H"] == 256 and r["T"] >= 500),
    "packed.issue100": lambda: packed("pytorch#149194", lambda r: r["T"] == 100),
    "packed.training64": lambda: span(r["ratio"] for r in rows("h100_packed_training.json") if r["H"] == 64),
    "padded.training64": lambda: span(r["packing_costs"] for r in rows("h100_packed_training.json") if r["H"] == 64),
    "columns.more": lambda: f"{max(1 / s - 1 for r in rows('h100_columns.json') for s in r['share']):.0%}",
    "variants.little": lambda: f"{max(variants(LITTLE, ('lstm', 'gru'))) - 1:.0%}",
    "variants.vanilla256": lambda: cost(variants(LITTLE, ("rnn_tanh",), (256,))),
    "variants.dependent": lambda: cost(variants("projection|reset_before", ("lstm", "gru"))),
    "variants.layer_norm": lambda: span(variants("layer_norm", ("lstm", "gru"))),
    "stacks.all": lambda: span((r["ratio"] for r in rows("h100_stacks.json")), "{:.2f}x"),
    "flashrnn.all": lambda: span((r["ratio_recurrence"] for r in rows("h100_flashrnn.json")), "{:.2f}x"),
    "training.h100": lambda: span((r["cudnn_us"] / r["ecornn_us"] for r in rows("h100_training.json")
                                   if "cudnn_us" in r and "ecornn_us" in r), "{:.2f}x"),
    "training.language": lambda: language("compiled graph"),
    "training.language_plain": lambda: language("graph"),
    "training.memory_states": lambda: memory("states"),
    "training.memory_gates": lambda: memory("gates"),
    "records.h100": lambda: workloads("h100.jsonl.xz", "h100-rows.jsonl.xz"),
    "records.h200": lambda: workloads("h200.jsonl.xz", "h200-random.jsonl.xz"),
    "search.none128": lambda: f"{geometric(searched('none', 128)):.3f}",
    "search.none128_worst": lambda: f"{max(searched('none', 128)):.3f}",
    "search.others32": lambda: f"{geometric(searched('others', 32)):.3f}",
    "search.others32_worst": lambda: f"{max(searched('others', 32)):.3f}",
    "search.none_again": lambda: f"{geometric(again('none')):.3f}",
    "search.none_again_worst": lambda: f"{again('none')[-1]:.3f}",
    "search.others_again": lambda: f"{geometric(again('others')):.3f}",
    "search.others_again_worst": lambda: f"{again('others')[-1]:.3f}",
    "search.others_again_next": lambda: f"{again('others')[-2]:.3f}",
    "search.random_near": random_near,
    "search.others_until": lambda: f"{until(live('others'), NEAR)[0]:g}",
    "search.none_until": lambda: f"{until(live('none'), NEAR)[0]:g}",
} | {f"served.{side}{sessions}": partial(served, sessions, side) for side in ("ecornn", "torch")
     for sessions in (1, 100, 1000)} | {f"steps.lstm{hidden}": partial(step, hidden) for hidden in (16, 40, 64)}


def differences(text: str) -> list[tuple[str, str, str]]:
    """(name, what the page has, what the results say) of each figure that is not theirs. A name that is not of
    ``FIGURES`` is a KeyError."""
    found = [(name, " ".join(has.split()), FIGURES[name]()) for _, name, has, _ in MARKED.findall(text)]
    return [one for one in found if one[1] != one[2]]


def written(text: str) -> str:
    """The page with the figures of the results."""
    return MARKED.sub(lambda m: m[1] + FIGURES[m[2]]() + m[4], text)


def main() -> None:
    wrong = [(page, *one) for page in pages() for one in differences(page.read_text())]
    for page, name, has, says in wrong:
        print(f"{page.relative_to(ROOT)}: {name} is {says}, not {has}")
    if "--write" not in sys.argv:
        sys.exit(bool(wrong))
    for page in {page for page, *_ in wrong}:
        page.write_text(written(page.read_text()))


if __name__ == "__main__":
    main()

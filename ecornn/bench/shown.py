"""A row of results in words."""

from __future__ import annotations

from msgspec import structs

from ecornn.bench.results import OURS, Row

SETTLED = 1.2  # p80 / p20, up to which a ratio of medians is worth its digits


def shown(row: Row) -> list[str]:
    """The lines for people."""
    if row.failed:
        return [f"{' '.join(row.command.split()[2:])}: {row.failed}"]
    assert row.workload is not None and row.stack is not None
    work = structs.replace(row.workload, seq=row.seq, batch=row.batch)
    stack = structs.replace(row.stack, keep=None)
    words = [str(work), str(stack), "forward and backward" if row.case.training else ""]
    lines = [f"{', '.join(filter(None, words))} on {row.device}, {row.schedule}"]
    for name in row.about:
        if name in row.wrong:
            lines.append(f"{name:11} wrong, not timed: {row.wrong[name]}")
        if name not in row.us_per_step:
            continue
        t, error = row.us_per_step[name], row.errors[name]
        lines.append(f"{name:11} {t.median:10.4g} µs/step  p20 {t.p20:.4g}  p80 {t.p80:.4g}  p95 {t.p95:.4g}  "
                     f"p99 {t.p99:.4g}  {t.median * row.seq / 1e3:.4g} ms in all, {t.runs} runs, "
                     + (f"error {error:.1e}" if error is not None else "not checked"))
    if row.disturbed:
        lines.append(f"{row.disturbed} rounds were made again: other processes used the processors")
    lines += [f"{name} ({row.about[name]}) takes {compared(row, name)}" for name in row.ratios]
    lines += [f"{name} took {before:.4g} µs/step then, {row.us_per_step[name].median / before:.2f} times as long now"
              for name, before in row.earlier.items() if name in row.us_per_step]
    return lines


def compared(row: Row, name: str) -> str:
    """How many times as long a side takes as ours: the ratio where the times of both settled, otherwise its range."""
    ours, other = row.us_per_step[OURS], row.us_per_step[name]
    if all(t.p80 <= SETTLED * t.p20 for t in (ours, other)):
        return f"{row.ratios[name]:.2f} times as long as ecornn"
    low, high = other.p20 / ours.p80, other.p80 / ours.p20
    return f"{low:.2f} to {high:.2f} times as long as ecornn; times did not settle"

"""The service of examples/12_serving.py with a compiled module and with torch.nn.LSTM, under the load of many sessions.

    python benchmarks/serving.py --output benchmarks/results/serving_cpu.json

Each side is a process of its own, both are under load in turns, --seconds each, the first of which warms up; clients
are one process more, on the same machine, and a session's answers are compared with float64. A row has, of both sides,
the median of turns' requests a second with their 20th and 80th percentile, the 50th and 99th percentile of all requests
in milliseconds, and `ratio`, the median of turns' ratios of requests a second, above 1 where more are served than with
PyTorch.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
from side_by_side import environment, options, told, write

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
SERVING = importlib.import_module("12_serving")
LOAD = importlib.import_module("serving_load").load


def row_of(sessions: int, ports: dict[str, int], arguments: argparse.Namespace) -> dict[str, Any]:
    """So many sessions, on both sides in turns."""
    found: dict[str, list[Any]] = {side: [] for side in ports}
    for turn in range(arguments.turns + 1):
        for side in [*ports][::1 if turn % 2 else -1]:
            found[side].append(asyncio.run(LOAD(ports[side], sessions, arguments.input, arguments.seconds)))
            SERVING.check(found[side][-1], arguments.hidden, arguments.input)
    row: dict[str, Any] = {"sessions": sessions, "H": arguments.hidden, "I": arguments.input, "batch": arguments.batch}
    for side, (_, *turns) in found.items():
        low, rate, high = np.percentile([turn.rate for turn in turns], [20, 50, 80])
        p50, p99 = np.percentile([s for turn in turns for s in turn.seconds], [50, 99]) * 1e3
        row[side] = {"rate": round(rate, 1), "rate_p20": round(low, 1), "rate_p80": round(high, 1),
                     "p50_ms": round(p50, 3), "p99_ms": round(p99, 3)}
    ratios = [a.rate / b.rate for a, b in zip(found["ecornn"][1:], found["torch"][1:], strict=True)]
    row["ratio"] = round(float(np.median(ratios)), 3)
    print(told(row), flush=True)
    return row


def main() -> None:
    parser = options(__doc__, hidden=(512, "H"), input=(128, "I"), batch=(64, "steps of a call at most"),
                     seconds=(2.0, "of each turn"), turns=(9, "of each side"))
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 100, 1000], help="[%(default)s]")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        ports = {side: stack.enter_context(SERVING.service(side, arguments)) for side in SERVING.SIDES}
        rows = [row_of(sessions, ports, arguments) for sessions in arguments.sessions]
    write(arguments.output, environment(cpu=True), rows)


if __name__ == "__main__":
    main()

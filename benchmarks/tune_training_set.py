"""Searches the recurrences of the backward passes of the layers of ``grids/training.toml``, on the GPU at hand.

    python benchmarks/tune_training_set.py --time-limit 240 --log h100-training.jsonl
    python benchmarks/tune_training_set.py --time-limit 60 --log h100-training.jsonl --only "lstm 1024x16x768"
    python benchmarks/tune_training_set.py --time-limit 60 --log h100-training.jsonl --only "both ways"

Several layers are searched at once, in the order of the rows, so that the GPU need not wait for builds. What is
left of the time when a layer begins is its limit; then the fastest of each are measured once more beside its default.
Every trial is in the log as soon as it is done: the same command again goes on, with more --trials too. For each layer
it prints the microseconds a step of the default and of the best; `ecornn log export --best` takes what is to ship.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING

from msgspec import structs
from search_tables import in_threads

from ecornn.bench.grid import Layer, read_grid
from ecornn.errors import EcornnError
from ecornn.layer_spec import LayerSpec
from ecornn.workload import Workload

if TYPE_CHECKING:
    from ecornn.device import Device
    from ecornn.tune.session import Result, Session

# Recurrences, each with the first row that has it: layers of a stack, both directions and all I share one.
Wanted = dict[Workload, tuple[Layer, LayerSpec]]
FILE = Path(__file__).parent / "grids" / "training.toml"
ROWS = [layer for layer in read_grid(FILE).expanded(FILE.name) if not layer.group]
LEAST = 5.0  # seconds: with less no layer begins
WON = 1.02


def layers(only: Sequence[str], device: Device) -> dict[int, Wanted]:
    """The recurrences by the multiprocessors that they have: two directions may run side by side."""
    from ecornn.compiler import plan_layer

    found: dict[int, Wanted] = {}
    for row in ROWS:
        if not only or any(part in row.name for part in only):
            layer = row.case.layer()
            both = row.case.bidirectional
            cores = plan_layer(layer, target=device).task.device.cores if both else device.cores
            found.setdefault(cores, {}).setdefault(layer.workload.adjoint, (row, layer))
    return found


def spent(log: Path, device: Device) -> dict[Workload, float]:
    """Seconds of the runs that the log has, on a device."""
    from ecornn.tune.log import read

    found: dict[Workload, float] = {}
    for trial in read(log).trials() if log.exists() else []:
        if trial.device.identity == device.identity:
            found[trial.workload] = max(found.get(trial.workload, 0.0), trial.seconds)
    return found


def search(session: Session, wanted: Wanted, log: Path, trials: int, limit: float,
           at_once: int) -> dict[Workload, Result | str]:
    """What was found of each, or why nothing was; of those that the time did not suffice for nothing."""
    begin, earlier, found = time.monotonic(), spent(log, session.device), dict[Workload, "Result | str"]()

    def note(work: Workload, result: Result | EcornnError) -> None:
        found[work] = str(result) if isinstance(result, EcornnError) else result
        print(f"{time.monotonic() - begin:6.1f} s  {line(wanted[work][0], found[work])}", flush=True)

    def tune(work: Workload) -> None:
        left = limit - (time.monotonic() - begin)
        if left >= LEAST:
            note(work, session.tune_workload(wanted[work][1], work, trials=trials, output=log, early_stop=False,
                                             time_limit=left + earlier.get(work, 0.0)))

    in_threads(session, tune, note, wanted, at_once)
    return found


def line(row: Layer, result: Result | str) -> str:
    """A layer for people: the default and the best, and in which knobs they differ."""
    if isinstance(result, str):
        return f"{row.name:40} {result}"
    finish, why = result.finish, "".join(f"; {count} failed: {reason}" for reason, count in result.failures.items())
    default, best = finish.default, finish.best
    if best is None or finish.best_us is None or default is None:
        return f"{row.name:40} none ran of {finish.trials}{why}"
    of_default = f"{finish.default_us:7.3f}" if finish.default_us else " failed"
    changed = " ".join(f"{k}={v}" for k, v in best.config.items()
                       if best.schedule != default.schedule or v != default.config[k])
    gain = f"{finish.default_us / finish.best_us:5.3f}x" if finish.default_us else ""
    return (f"{row.name:40} default {of_default} best {finish.best_us:7.3f} us/step {gain} of {finish.trials:3} trials"
            f"  {best.schedule} {changed or '(the default)'}{why}")


def report(wanted: Wanted, found: dict[Workload, Result | str]) -> str:
    """All rows in their order, and what was gained."""
    rows = [line(row, found.get(work, "not begun: the time had passed")) for work, (row, _) in wanted.items()]
    gains = [r.finish.default_us / r.finish.best_us for r in found.values()
             if not isinstance(r, str) and r.finish.best_us and r.finish.default_us]
    total = f"{len(gains)} of {len(wanted)} searched"
    if gains:
        total += (f", geometric mean {geometric_mean(gains):.3f}x, {sum(g > WON for g in gains)} faster by more than "
                  f"{WON - 1:.0%}, most {max(gains):.2f}x")
    return "\n".join([*rows, total])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, required=True, help="the tuning log to write, or to go on with")
    parser.add_argument("--time-limit", type=float, default=240.0, help="seconds in all [%(default)s]")
    parser.add_argument("--trials", type=int, default=8, help="of each layer, its default among them [%(default)s]")
    parser.add_argument("--only", action="append", default=[], help="rows whose name has this; may repeat")
    parser.add_argument("--at-once", type=int, default=8, help="layers at a time [%(default)s]")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds of a build or measurement [%(default)s]")
    arguments = parser.parse_args()
    from ecornn.quick_tvm import import_tvm

    import_tvm()
    from ecornn.tune.choose import present
    from ecornn.tune.session import Session

    begin, device = time.monotonic(), present("cuda")
    reports = []
    for cores, wanted in sorted(layers(arguments.only, device).items(), reverse=True):
        with Session(structs.replace(device, cores=cores), timeout=arguments.timeout) as session:
            head = f"{len(wanted)} recurrences on {cores} multiprocessors of {device.name}"
            print(head, flush=True)
            left = arguments.time_limit - (time.monotonic() - begin)
            found = search(session, wanted, arguments.log, arguments.trials, left, arguments.at_once)
            reports.append(f"\n{head}\n{report(wanted, found)}")
    print("\n".join(reports) + f"\n{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()

"""Trials a second through RPC servers, all on this machine: against their number, and on several GPUs.

    python benchmarks/rpc_servers.py --servers 1 2 4 --output benchmarks/results/rpc_servers_cpu.json
    python benchmarks/rpc_servers.py --target cuda --hidden 256 --trials 96 --output rpc_servers_h100.json
    python benchmarks/rpc_servers.py --target cuda --gpus 4 --servers 1 2 4 --hidden 256 --trials 512
    python benchmarks/rpc_servers.py --layers --gpus 2 --trials 64 --seconds 300 --output FILE   # of run_many_gpus.py

Starts a TVM RPC tracker and servers on loopback, and `ecornn tune --workloads` into a log and a build cache of its own.
What is timed is the search from its first trial to its last, on cores that builds and all servers share. Servers of one
GPU disturb one another; how many times did not settle, and what was the fastest, is reported beside. With ``--gpus``
each server has a GPU of its own, as long as there are enough of them.

With ``--layers`` a list of layers is tuned instead of a small one: through a server of one GPU, then through a server
for each GPU, both on all cores; then a shorter list, while one of the servers is killed: no trial may fail, nor be
missing. Last one server on its GPU's share of the cores. Each is written as it ends; one that is not expected to end
within ``--seconds`` is left out. On a machine without a GPU servers measure on the CPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from side_by_side import options

from ecornn.errors import DeviceError
from ecornn.targets import default_target, resolve
from ecornn.tune.log import read
from ecornn.tune.remote import Tracker

Process = subprocess.Popen[bytes]
LISTS = {"cuda": ["--cell lstm --hidden 512 --batch 16 --seq 300", "--cell gru --hidden 512 --batch 16 --seq 300",
                  "--cell lstm --hidden 800 --batch 16 --seq 300", "--cell gru --hidden 800 --batch 16 --seq 300"],
         "cpu": ["--cell rnn_tanh --hidden 16 --batch 2 --seq 8", "--cell gru --hidden 16 --batch 2 --seq 8"]}
KILLED_AFTER = 6  # trials
CORES = sorted(os.sched_getaffinity(0))
SEARCHED = b'"stage":"search"'  # in a record of a trial


def kill(process: Process) -> None:
    """Ends a process and those that it started."""
    for each in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.kill()
    process.wait()


@contextlib.contextmanager
def served(target: str, **gpus: Sequence[int | None]) -> Iterator[tuple[dict[str, Tracker], list[Process]]]:
    """A tracker, under each key one server for each of these GPUs (None: whatever it sees), and their processes, the
    tracker's first."""
    port, started = free_port(), list[Process]()
    trackers = {key: Tracker("127.0.0.1", port, key) for key in gpus}
    with contextlib.ExitStack() as stack:
        def start(*command: str, **more: str) -> None:
            started.append(subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.DEVNULL,
                                            env=os.environ | more))
            stack.callback(kill, started[-1])

        start("tvm.exec.rpc_tracker", "--host", "127.0.0.1", "--port", str(port), "--port-end", str(port + 1),
              "--silent")
        for tracker in trackers.values():
            wait(tracker, 0, started)
        for key, gpu in ((key, gpu) for key, each in gpus.items() for gpu in each):
            start("ecornn", "serve", "--tracker", str(trackers[key]), "--key", key, "--target", target, "--port",
                  str(free_port()), **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}))
        for key, each in gpus.items():
            wait(trackers[key], len(each), started)
        yield trackers, started


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1] % 30_000 + 20_000


def wait(tracker: Tracker, count: int, processes: Sequence[Process]) -> None:
    """Returns once the tracker has so many servers; ends the program where it has not within a minute, or one of the
    ``processes`` is gone."""
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(DeviceError):  # it is still starting
            if tracker.servers() == count:
                return
        if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
            raise SystemExit("the tracker or a server did not start")
        time.sleep(0.2)


def tuned(log: Path, tracker: Tracker, target: str, layers: list[str], trials: int, cores: list[int],
          killed: Process | None = None) -> dict[str, Any]:
    """One run of the list through the servers of the tracker; ``killed``: a server to kill in the midst of it."""
    listed = log.with_suffix(".txt")
    listed.write_text("\n".join(layers) + "\n")
    command = [sys.executable, "-m", "ecornn", "tune", "--workloads", str(listed), "--trials", str(trials),
               "--no-early-stop", "--tracker", f"{tracker.host}:{tracker.port}", "--key", tracker.key, "--output",
               str(log), "--target", target, "--json"]
    begun, times = time.monotonic(), list[float]()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                               env=os.environ | {"ECORNN_CACHE": str(log.with_suffix(".cache"))},
                               preexec_fn=lambda: os.sched_setaffinity(0, cores))
    while process.poll() is None:
        time.sleep(0.02)  # records have the time to a second
        if log.exists():
            times += [time.monotonic()] * (log.read_bytes().count(SEARCHED) - len(times))
        if killed is not None and len(times) >= KILLED_AFTER:
            kill(killed)
            killed = None
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}")
    results = json.loads(process.communicate()[0])
    return {"servers": tracker.servers(), "cores": len(cores), "trials": len(times), "wanted": trials * len(layers),
            "failed": sum(sum(one["failures"].values()) for one in results), "seconds": time.monotonic() - begun,
            "first": times[0] - begun, "each_second": [sum(second <= t - times[0] < second + 1 for t in times)
                                                       for second in range(int(times[-1] - times[0]) + 1)],
            "trials_per_minute": 60 * (len(times) - 1) / (times[-1] - times[0]),
            "best_us": {f"{one['workload']['cell']} {one['workload']['hidden']}": one["finish"]["best_us"]
                        for one in results}}


def one_against_many(count: int, trials: int, path: Path, seconds: float, folder: Path) -> None:
    """``--layers``, with ``count`` GPUs."""
    end, target = time.monotonic() + seconds, "cuda" if default_target() == "cuda" else "cpu"
    layers = LISTS[target]
    found: dict[str, Any] = {"device": resolve(target).name, "trials": trials, "layers": layers}
    numbers = [*range(count)] if target == "cuda" else [None] * count
    with served(target, one=numbers[:1], many=numbers) as (trackers, started):
        runs = {"one": ("one", layers, trials, CORES), "many": ("many", layers, trials, CORES),
                "killed": ("many", layers[:2], max(8, trials // 8), CORES, started[-1]),
                "share": ("one", layers, trials, CORES[:max(1, len(CORES) // count)])}
        for name, (key, *run) in runs.items():
            longest = max((of["seconds"] for of in map(found.get, runs) if of), default=0.0)
            if time.monotonic() + 1.1 * longest > end or (name == "killed" and count == 1):
                continue
            found[name] = tuned(folder / f"{name}.jsonl", trackers[key], target, *run)
            for gain, over in (("gain", "one"), ("gain_of_share", "share")):
                if over in found and "many" in found:
                    found[gain] = found["many"]["trials_per_minute"] / found[over]["trials_per_minute"]
            if name == "many" and "one" in found:
                best = found["many"]["best_us"]
                found["best_to_one"] = {layer: best[layer] / us for layer, us in found["one"]["best_us"].items()}
            path.write_text(json.dumps(found))


def main() -> None:
    parser = options(__doc__, trials=(32, ""), hidden=(32, ""), seconds=(float("inf"), "for --layers"),
                     gpus=(0, "of this machine, for the servers; 0: those they see"))
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--target", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--layers", action="store_true", help="one server against one for each of --gpus")
    given = parser.parse_args()
    if given.layers and not (given.output and given.gpus):
        parser.error("--layers needs --output and --gpus")
    with tempfile.TemporaryDirectory(prefix="ecornn-") as folder:
        if given.layers:
            return one_against_many(given.gpus, given.trials, given.output, given.seconds, Path(folder))
        rows, layer = [], f"--cell lstm --hidden {given.hidden} --batch 4 --seq 50"
        for count in given.servers:
            log, gpus = Path(folder, f"{count}.jsonl"), [n % given.gpus if given.gpus else None for n in range(count)]
            with served(given.target, bench=gpus) as (trackers, _):
                found = tuned(log, trackers["bench"], given.target, [layer], given.trials, CORES)
            rows.append({"servers": count, "trials": found["trials"], "failed": found["failed"],
                         "noisy": sum(trial.noisy for trial in read(log).trials()),
                         "best_us": min(found["best_us"].values()),
                         "trials_per_second": found["trials_per_minute"] / 60})
            print(rows[-1], flush=True)
            if given.output:  # after each, so that what a limit cuts off is not lost
                given.output.write_text(json.dumps({
                    "device": resolve(given.target).name, "processors": len(CORES), "rows": rows,
                    "command": "python benchmarks/rpc_servers.py " + " ".join(sys.argv[1:])}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Trials a second against the number of RPC servers, all on this machine.

    python benchmarks/rpc_servers.py --servers 1 2 4 --output benchmarks/results/rpc_servers_cpu.json
    python benchmarks/rpc_servers.py --target cuda --hidden 256 --trials 96 --output rpc_servers_h100.json
    python benchmarks/rpc_servers.py --target cuda --gpus 4 --servers 1 2 4 --hidden 256 --trials 512

Starts a TVM RPC tracker and servers on loopback, and tunes one small layer through each number of them
into a log of its own, with a build cache of its own. What is timed is the search from its first trial to its
last: builds and measurements of all servers share this machine's cores, so on few cores more servers cannot help.
Servers of one GPU disturb one another; how many times did not settle, and what was the fastest, is reported beside.
With ``--gpus`` each server has a GPU of its own, as long as there are enough of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from ecornn.errors import DeviceError
from ecornn.targets import resolve
from ecornn.tune import Session
from ecornn.tune.remote import Tracker


@contextlib.contextmanager
def running(*command: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process, ended with the context, as are those that it started."""
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL, env={**os.environ, **environment})
    try:
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        process.kill()
        process.wait()


def measure(count: int, port: int, target: str, trials: int, hidden: int, gpus: int) -> dict[str, object]:
    """One row: a search through ``count`` servers, which take turns with the ``gpus``."""
    tracker, times = Tracker("127.0.0.1", port, "bench"), []
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(running("-m", "tvm.exec.rpc_tracker", "--host", "127.0.0.1", "--port", str(port),
                                               "--port-end", str(port + 1), "--silent"))]
        wait(lambda: servers(tracker) == 0, started)
        for number in range(count):
            started.append(stack.enter_context(running(
                "-m", "ecornn.cli", "serve", "--tracker", str(tracker), "--key", tracker.key, "--target", target,
                "--port", str(port + 100 + 10 * number),
                **({"CUDA_VISIBLE_DEVICES": str(number % gpus)} if gpus else {}))))
        wait(lambda: servers(tracker) == count, started)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        os.environ["ECORNN_CACHE"] = str(Path(folder, "cache"))
        session = stack.enter_context(Session(target, tracker=tracker))
        result = session.tune("lstm", hidden=hidden, batch=4, seq=50, trials=trials, early_stop=False,
                              output=Path(folder, "log.jsonl"), report=lambda _: times.append(time.monotonic()))
    return {"servers": count, "trials": len(times), "failed": sum(result.failures.values()), "noisy": result.noisy,
            "best_us": result.finish.best_us, "trials_per_second": (len(times) - 1) / (times[-1] - times[0])}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1] % 30_000 + 20_000


def servers(tracker: Tracker) -> int | None:
    """Servers that are there; None while the tracker is still starting."""
    try:
        return tracker.servers()
    except DeviceError:
        return None


def wait(condition: Callable[[], bool], processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Returns once the condition holds; ends the program where it does not within a minute, or one of the
    ``processes`` is gone."""
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
            raise SystemExit("the tracker or a server did not start")
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--trials", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--target", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--gpus", type=int, default=0, help="of this machine, for the servers [those they see]")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows, device = [], resolve(arguments.target)
    for count in arguments.servers:
        rows.append(measure(count, free_port(), arguments.target, arguments.trials, arguments.hidden,
                            arguments.gpus))
        print(rows[-1], flush=True)
        if arguments.output:  # after each, so that what a limit cuts off is not lost
            arguments.output.write_text(json.dumps({
                "device": device.name, "processors": len(os.sched_getaffinity(0)), "rows": rows,
                "command": "python benchmarks/rpc_servers.py " + " ".join(sys.argv[1:])}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Tuning on several GPUs through a tracker, for ``run_many_gpus.py``.

    python benchmarks/many_gpus_tuning.py COUNT TRIALS FILE SECONDS

A list of layers is tuned by `ecornn tune --workloads`: through a server of one GPU, then through COUNT servers, one for
each GPU, both on all cores; into logs and a build cache of their own. Trials a minute are those from the first one to
the last. Then a shorter list, while one of the servers is killed: no trial may fail, nor be missing. Last one server on
one COUNTth of the cores, as a host with that GPU alone has them. Each is written as it ends; one that is not expected
to end within SECONDS is left out. On a machine without a GPU servers measure on the CPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from rpc_servers import free_port, running, servers, wait

from ecornn.device import Device
from ecornn.targets import resolve
from ecornn.tune.choose import default_target
from ecornn.tune.remote import Tracker

LISTS = {"cuda": ["--cell lstm --hidden 512 --batch 16 --seq 300", "--cell gru --hidden 512 --batch 16 --seq 300",
                  "--cell lstm --hidden 800 --batch 16 --seq 300", "--cell gru --hidden 800 --batch 16 --seq 300"],
         "cpu": ["--cell rnn_tanh --hidden 16 --batch 2 --seq 8", "--cell gru --hidden 16 --batch 2 --seq 8"]}
KILLED_AFTER = 6  # trials
RUNS = ("one", "many", "killed", "share")
SEARCHED = b'"stage":"search"'  # in a record of a trial


def main() -> None:
    count, trials, path = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    end = time.monotonic() + float(sys.argv[4])
    target = default_target()
    kind = "cuda" if target == "cuda" else "cpu"
    device: Device = resolve(target)
    found: dict[str, Any] = {"device": device.name, "trials": trials, "layers": LISTS[kind]}
    port = free_port()
    one, many = (Tracker("127.0.0.1", port, key) for key in ("one", "many"))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ecornn-")))
        started = [stack.enter_context(running("-m", "tvm.exec.rpc_tracker", "--host", "127.0.0.1", "--port", str(port),
                                               "--port-end", str(port + 1), "--silent"))]
        wait(lambda: servers(one) == 0, started)

        def serve(key: str, gpu: int) -> subprocess.Popen[bytes]:
            shown = {"CUDA_VISIBLE_DEVICES": str(gpu)} if kind == "cuda" else {}
            return stack.enter_context(running("-m", "ecornn", "serve", "--tracker", str(one), "--key", key, "--target",
                                               kind, "--port", str(free_port()), **shown))

        started += [serve("one", 0), *(serve("many", gpu) for gpu in range(count))]
        wait(lambda: servers(one) == 1 and servers(many) == count, started)
        cores = sorted(os.sched_getaffinity(0))
        share = cores[:max(1, len(cores) // count)]

        def add(name: str, *run: Any) -> None:
            longest = max((of["seconds"] for of in map(found.get, RUNS) if of), default=0.0)
            if time.monotonic() + 1.1 * longest > end:
                return
            found[name] = tuned(name, *run)
            for gain, over in (("gain", "one"), ("gain_of_share", "share")):
                if over in found and "many" in found:
                    found[gain] = found["many"]["trials_per_minute"] / found[over]["trials_per_minute"]
            if "one" in found and "many" in found:
                best, of_one = found["many"]["best_us"], found["one"]["best_us"]
                found["best_to_one"] = {layer: best[layer] / of_one[layer] for layer in of_one}
            path.write_text(json.dumps(found))

        add("one", one, LISTS[kind], trials, folder, cores)
        add("many", many, LISTS[kind], trials, folder, cores)
        if count > 1:
            add("killed", many, LISTS[kind][:2], max(8, trials // 8), folder, cores, started[-1])
        add("share", one, LISTS[kind], trials, folder, share)


def tuned(name: str, tracker: Tracker, layers: list[str], trials: int, folder: Path, cores: list[int],
          killed: subprocess.Popen[bytes] | None = None) -> dict[str, Any]:
    """One run of the list through the servers of the tracker; ``killed``: a server to kill in the midst of it."""
    listed, log = folder / f"{name}.txt", folder / f"{name}.jsonl"
    listed.write_text("\n".join(layers) + "\n")
    command = [sys.executable, "-m", "ecornn", "tune", "--workloads", str(listed), "--trials", str(trials),
               "--no-early-stop", "--tracker", f"{tracker.host}:{tracker.port}", "--key", tracker.key, "--output",
               str(log), "--json"]
    environment = os.environ | {"ECORNN_CACHE": str(folder / f"{name}_cache")}
    begun, times, victim = time.monotonic(), list[float](), killed
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment,
                               preexec_fn=lambda: os.sched_setaffinity(0, cores))
    while process.poll() is None:
        time.sleep(0.02)  # records have the time to a second
        if log.exists():
            times += [time.monotonic()] * (log.read_bytes().count(SEARCHED) - len(times))
        if victim is not None and len(times) >= KILLED_AFTER:
            for each in [*psutil.Process(victim.pid).children(recursive=True), victim]:
                each.kill()
            victim = None
    assert process.stdout is not None
    output = process.stdout.read()
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}")
    results = json.loads(output)
    return {"servers": tracker.servers(), "cores": len(cores), "trials": len(times), "wanted": trials * len(layers),
            "failed": sum(sum(one["failures"].values()) for one in results), "seconds": time.monotonic() - begun,
            "first": times[0] - begun, "each_second": [sum(second <= t - times[0] < second + 1 for t in times)
                                                       for second in range(int(times[-1] - times[0]) + 1)],
            "trials_per_minute": 60 * (len(times) - 1) / (times[-1] - times[0]),
            "best_us": {f"{one['workload']['cell']} {one['workload']['hidden']}": one["finish"]["best_us"]
                        for one in results}}


if __name__ == "__main__":
    main()

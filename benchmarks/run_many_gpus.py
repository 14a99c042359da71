"""What several GPUs of one machine gain: training, tuning and inference on all of them, in one command.

    python benchmarks/run_many_gpus.py                       # on the GPUs that are there
    python benchmarks/run_many_gpus.py --only speech --only tune --seconds 2
    python benchmarks/run_many_gpus.py --gpus 2              # on a CPU: two processes, small sizes, to try the script

Parts, each in processes of its own with a time limit, so that none takes the others with it; in seconds what each takes
on two GPUs with 32 cores, about:

build (60)          compiles all modules of the next parts, at the same time
speech (35)         a training step of five layers of LSTM 800 in both directions with CTC, of 4 to 32 rows a GPU, on
                    one GPU and on all under DistributedDataParallel, against torch.nn's; also without communication
data_parallel (40)  gradients of all GPUs against one with the whole batch; when they leave, layer by layer and as one
                    node; what that gains; how fast all-reduces are; FSDP2
deep (30)           as speech, seven layers of LSTM 768 in one direction
tune (230)          `ecornn tune --workloads` through a tracker, with a server of one GPU, with one for each GPU, and
                    with one that is killed, on all cores; and with one GPU on its share of them
inference (15)      calls of a stack on all GPUs by a thread each, and all by all in turns

Weights and gradients are float32, products bfloat16 by autocast. Times are medians with 20th and 80th percentiles in
milliseconds a step, both sides in turns, of the slowest process. Results go to benchmarks/results, named after the GPU,
after each part; parts that are there already stay unless they are measured again. `scaling_model.py` prints them, and
makes docs/SCALING.md's tables of them. Exits with 1 where a part failed, or its results are wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rpc_servers import free_port

HERE = Path(__file__).resolve().parent
# seconds at most: others of a part are stopped, and what it had found until then counts
PARTS = {"build": 120.0, "speech": 90.0, "data_parallel": 90.0, "deep": 80.0, "tune": 300.0, "inference": 45.0}
TUNED = ("one", "many", "share")
TRAINING = ("speech", "data_parallel", "deep")


class Failed(Exception):
    """A part did not come to its end."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=[*PARTS], help="parts; may repeat [all]")
    parser.add_argument("--seconds", type=float, default=1.0, help="of timing, for each point")
    parser.add_argument("--limit", type=float, default=500.0, help="seconds for everything: later parts are left out")
    parser.add_argument("--trials", type=int, default=64, help="for each layer that is tuned")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--output", type=Path, help="JSON file of results")
    arguments = parser.parse_args()
    name = short_name()
    output = arguments.output or HERE / "results" / f"{name}_many_gpus.json"
    end = time.monotonic() + arguments.limit
    before = json.loads(output.read_text()) if output.exists() else {"environment": {}, "parts": {}}
    parts: dict[str, Any] = before["parts"]
    known = before["environment"]  # of the first run, whose parts may stay
    faults = []
    with tempfile.TemporaryDirectory(prefix="ecornn-") as folder:
        for part in arguments.only or PARTS:
            left, begun = min(PARTS[part], end - time.monotonic()), time.monotonic()
            if left < 10:
                faults.append(f"{part}: no time was left for it")
                print(faults[-1], flush=True)
                continue
            print(f"{part}: ", end="", flush=True)
            result, fault = Path(folder, f"{part}.json"), ""
            try:
                carry_out(commands(part, arguments, result), left, Path(folder))
            except Failed as error:
                fault = str(error)
            found = json.loads(result.read_text()) if result.exists() else {}
            fault = fault or wrong(part, found)
            faults += [f"{part}: {fault}"] if fault else []
            where = environment(arguments.gpus)
            parts[part] = found | {"took": time.monotonic() - begun} | ({"fault": fault} if fault else {})
            parts[part] |= {"command": where["command"], "time": where["time"]}
            print(f"{parts[part]['took']:.0f} s", *([fault] if fault else []), sep="\n  ", flush=True)
            output.parent.mkdir(parents=True, exist_ok=True)
            whole = {"environment": where | {name: known[name] for name in ("command", "time") if name in known},
                     "parts": parts}
            output.write_text(json.dumps(whole, indent=1) + "\n")
    sys.exit("\n".join(faults) if faults else 0)


def commands(part: str, arguments: argparse.Namespace, result: Path) -> list[tuple[list[str], dict[str, str]]]:
    """What a part runs at the same time: commands with their variables."""
    gpus, seconds = str(arguments.gpus), str(arguments.seconds)
    if part == "tune":
        limit = str(min(PARTS[part], arguments.limit))
        return [([str(HERE / "rpc_servers.py"), "--layers", "--gpus", gpus, "--trials", str(arguments.trials),
                  "--seconds", limit, "--output", str(result)], {})]
    command, shared = [str(HERE / "many_gpus.py"), part, seconds, str(result)], {"WORLD_SIZE": gpus}
    if part not in TRAINING:
        return [(command, shared)]
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {} if torch.cuda.is_available() else {"GLOO_SOCKET_IFNAME": "lo"}
    return [(command, shared | {"RANK": str(rank)}) for rank in range(arguments.gpus)]


def carry_out(what: Sequence[tuple[list[str], Mapping[str, str]]], limit: float, folder: Path) -> None:
    """Runs commands to their ends; once one fails, or after ``limit`` seconds, ends all with what they started, and
    raises :class:`Failed`."""
    logs = [folder / f"{n}.log" for n in range(len(what))]
    end, running = time.monotonic() + limit, []
    try:
        for (command, more), log in zip(what, logs, strict=True):
            with log.open("w") as to:
                strict = os.environ | {"ECORNN_STRICT": "1", **more}
                running.append(subprocess.Popen([sys.executable, "-W", "ignore", *command], stdout=to, stderr=to,
                                                env=strict, start_new_session=True))
        while any(process.poll() is None for process in running):
            bad = [n for n, process in enumerate(running) if process.poll()]
            if bad or time.monotonic() > end:
                raise Failed(f"took longer than {limit:.0f} s\n{tail(logs[0])}" if not bad else tail(logs[bad[0]]))
            time.sleep(0.1)
        if bad := [n for n, process in enumerate(running) if process.returncode]:
            raise Failed(tail(logs[bad[0]]))
    finally:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def tail(log: Path) -> str:
    """The last lines of what a command said."""
    return "\n".join(log.read_text(errors="replace").strip().splitlines()[-25:]) or "it said nothing"


def wrong(part: str, found: Mapping[str, Any]) -> str:
    """What is wrong with a part's results; empty: nothing."""
    if part == "data_parallel" and not found["gradients"]["within"]:
        return "gradients of several processes are not those of one"
    if part == "tune":
        for run in (found[name] for name in (*TUNED, "killed") if name in found):
            if run["failed"] or run["trials"] != run["wanted"]:
                return f"{run['failed']} trials failed, {run['trials']} of {run['wanted']} were made"
    return ""


def short_name() -> str:
    """``h100`` of NVIDIA H100 80GB HBM3; ``cpu``."""
    if not torch.cuda.is_available():
        return "cpu"
    return torch.cuda.get_device_name(0).removeprefix("NVIDIA ").split()[0].lower()


def environment(gpus: int) -> dict[str, Any]:
    """What the file of results says of where they come from."""
    import importlib.metadata

    import ecornn

    there = torch.cuda.is_available()
    return {"gpus": gpus, "gpu": torch.cuda.get_device_name(0) if there else platform.processor() or "CPU",
            "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__, "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if there else None,
            "python": platform.python_version(), "cudnn": torch.backends.cudnn.version(),
            "tvm": importlib.metadata.version("apache-tvm"),
            "ecornn": ecornn.__version__, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": " ".join(["python", "benchmarks/run_many_gpus.py", *sys.argv[1:]])}


if __name__ == "__main__":
    main()

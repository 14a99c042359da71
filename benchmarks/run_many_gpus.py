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
after each part; parts that are there already stay unless they are measured again. `scaling_model.py` makes
docs/SCALING.md's tables of them. Exits with 1 where a part failed, or its results are wrong.
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
from collections.abc import Callable, Mapping, Sequence
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
            said = [f"{parts[part]['took']:.0f} s", *lines(part, found), *([fault] if fault else [])]
            print(*said, sep="\n  ", flush=True)
            output.parent.mkdir(parents=True, exist_ok=True)
            whole = {"environment": where | {name: known[name] for name in ("command", "time") if name in known},
                     "parts": parts}
            output.write_text(json.dumps(whole, indent=1) + "\n")
    sys.exit("\n".join(faults) if faults else 0)


def commands(part: str, arguments: argparse.Namespace, result: Path) -> list[tuple[list[str], dict[str, str]]]:
    """What a part runs at the same time: commands with their variables."""
    gpus, seconds = str(arguments.gpus), str(arguments.seconds)
    if part == "build":
        return [([str(HERE / "many_gpus_build.py"), str(result)], {})]
    if part == "tune":
        limit = str(min(PARTS[part], arguments.limit))
        return [([str(HERE / "many_gpus_tuning.py"), gpus, str(arguments.trials), str(result), limit], {})]
    if part == "inference":
        return [([str(HERE / "many_gpus_inference.py"), gpus, seconds, str(result)], {})]
    shared = {"WORLD_SIZE": gpus, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {} if torch.cuda.is_available() else {"GLOO_SOCKET_IFNAME": "lo"}
    return [([str(HERE / "many_gpus_training.py"), part, seconds, str(result)], shared | {"RANK": str(rank)})
            for rank in range(arguments.gpus)]


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


def lines(part: str, found: Mapping[str, Any]) -> list[str]:
    """A part's results for people, as far as they came."""
    shown: dict[str, Callable[[Mapping[str, Any]], list[str]]] = {
        "data_parallel": data_parallel_lines, "tune": tune_lines, "inference": inference_lines,
        **dict.fromkeys(("speech", "deep"), scaling_lines)}
    try:
        return shown[part](found) if part in shown else []
    except KeyError as missing:
        return [f"without {missing}"]


def scaling_lines(found: Mapping[str, Any]) -> list[str]:
    rows = []
    for count, times in found["one"].items():
        text = f"{count:>3} rows  1 GPU: ecornn {times['ecornn']['ms']:7.2f} ms, torch {times['torch']['ms']:7.2f} ms"
        if many := found.get("many", {}).get(count):
            for side in ("ecornn", "torch"):
                share = 1 - many[f"{side}_alone"]["ms"] / many[side]["ms"]
                text += f";  all, {side} {many[side]['ms']:7.2f} ms, communication {share:.1%}"
        rows.append(text)
    return rows


def data_parallel_lines(found: Mapping[str, Any]) -> list[str]:
    gradients, overlap = found["gradients"], found["overlap"]
    rows = [f"gradients: error {gradients['many']:.2e}, of one process {gradients['one']:.2e}, same bits everywhere: "
            f"{gradients['same_bits_everywhere']}"]
    for how, ready in found["ready"].items():
        rows.append(f"{how}: {len(ready['buckets_ms'])} buckets leave from {ready['buckets_ms'][0]:.2f} to "
                    f"{ready['buckets_ms'][-1]:.2f} ms of a backward pass of {ready['backward_ms']:.2f} ms; step "
                    f"{overlap[how]['ms']:.2f} ms, without communication {overlap[f'{how}_alone']['ms']:.2f} ms")
    rows.append(f"all-reduce of {found['gradient_bytes'] / 1e6:.0f} MB alone {overlap['all_reduce']['ms']:.2f} ms")
    if "fault" not in (few := found.get("few_blocks", {"fault": ""})):
        rows.append(f"with few blocks of NCCL's: step {few['layer_by_layer']['ms']:.2f} ms, with all "
                    f"{few['all_blocks']['ms']:.2f} ms; all-reduce alone {few['all_reduce']['ms']:.2f} ms")
    sharded = found["sharded"]
    rows.append(f"FSDP2: {sharded['fault']}" if "fault" in sharded else
                f"FSDP2: step {sharded['step']['ms']:.2f} ms, {sharded['held']:.0%} of the weights held between calls, "
                f"gradients differ by {sharded['largest_difference']:.1e}")
    return rows


def tune_lines(found: Mapping[str, Any]) -> list[str]:
    rows = [f"{run['servers']} server(s), {run['cores']} cores: {run['trials']} trials, {run['failed']} failed, "
            f"{run['trials_per_minute']:.0f} a minute, best {run['best_us']}" for run in map(found.get, TUNED) if run]
    if "killed" in found:
        run = found["killed"]
        rows.append(f"with a server killed: {run['trials']} of {run['wanted']} trials, {run['failed']} failed")
    for name, over in (("gain", "all cores"), ("gain_of_share", "its share of the cores")):
        if name in found:
            rows.append(f"gain {found[name]:.2f}x over one server with {over}")
    if "best_to_one" in found:
        ratios = found["best_to_one"].values()
        rows.append(f"best found {min(ratios):.3f} to {max(ratios):.3f} of one server's")
    return rows


def inference_lines(found: Mapping[str, Any]) -> list[str]:
    return [f"one {found['one']:.0f}, all {found['all']:.0f} calls a second, {found['gain']:.2f}x; in turns the same "
            f"bits: {found['same_bits']}"]


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

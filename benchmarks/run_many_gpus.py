"""What several GPUs of one machine gain: training, tuning and inference on all of them, in one command.

    python benchmarks/run_many_gpus.py                       # on the GPUs that are there
    python benchmarks/run_many_gpus.py --only speech --only tune --seconds 2
    python benchmarks/run_many_gpus.py --gpus 2              # on a CPU: two processes, small sizes, to try the script
    python benchmarks/run_many_gpus.py --tables benchmarks/results/h200_many_gpus.json --write   # into docs/SCALING.md

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
after each part; parts that are there already stay unless they are measured again. Exits with 1 where a part failed, or
its results are wrong.

The tables hold the model of more GPUs that docs/SCALING.md describes against what was measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import side_by_side
import torch
from rpc_servers import free_port
from run_all import short_name

from ecornn.targets import resolve

HERE = Path(__file__).resolve().parent
# seconds at most: others of a part are stopped, and what it had found until then counts
PARTS = {"build": 120.0, "speech": 90.0, "data_parallel": 90.0, "deep": 80.0, "tune": 300.0, "inference": 45.0}
TRAINING = ("speech", "data_parallel", "deep")
PAGE = Path("docs/SCALING.md")  # from the checkout
BEGIN, END = "<!-- measured: begin -->\n", "<!-- measured: end -->\n"
BUCKET = 25 * 2**20  # bytes, DistributedDataParallel's default
HOST = 8  # GPUs of one host, behind switches that give each its full bandwidth to any other
# bytes a second in and out of a host, of InfiniBand at 400 Gb/s of which four fifths are reached: an adapter for each
# GPU, and one in all
NETWORKS = {"8 adapters": 8 * 50e9 * 0.8, "1 adapter": 50e9 * 0.8}
interval = "{ms:.2f} [{p20:.2f}, {p80:.2f}]".format_map
GPUS = (1, 2, 4, 8, 16, 32, 64, 128)
TITLES = {"speech": "five layers of LSTM 800 in both directions", "deep": "seven layers of LSTM 768 in one direction"}


def main() -> None:
    parser = side_by_side.options(
        __doc__, seconds=(1.0, "of timing, for each point"), trials=(64, "for each layer that is tuned"),
        limit=(500.0, "seconds for everything: later parts are left out"), gpus=(torch.cuda.device_count() or 2, ""))
    parser.add_argument("--only", action="append", choices=[*PARTS], help="parts; may repeat [all]")
    parser.add_argument("--tables", type=Path, metavar="FILE", help="print those of a file's results; nothing is run")
    parser.add_argument("--write", action="store_true", help=f"write the tables into {PAGE}")
    arguments = parser.parse_args()
    if arguments.tables:
        text = section(arguments.tables)
        if arguments.write:
            before, rest = PAGE.read_text().split(BEGIN)
            PAGE.write_text(before + BEGIN + text + END + rest.split(END)[1])
        else:
            print(text, end="")
        return
    name = short_name(resolve("cuda")) if torch.cuda.is_available() else "cpu"
    output = arguments.output or HERE / "results" / f"{name}_many_gpus.json"
    end = time.monotonic() + arguments.limit
    whole: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {"environment": {}, "parts": {}}
    known, faults = whole["environment"], []  # of the first run, whose parts may stay
    with tempfile.TemporaryDirectory(prefix="ecornn-") as folder:
        for part in arguments.only or PARTS:
            left, begun = min(PARTS[part], end - time.monotonic()), time.monotonic()
            if left < 10:
                faults.append(f"{part}: no time was left for it")
                print(faults[-1], flush=True)
                continue
            print(f"{part}: ", end="", flush=True)
            result, where = Path(folder, f"{part}.json"), environment(arguments.gpus)
            fault = carry_out(commands(part, arguments, result), left, Path(folder))
            found = json.loads(result.read_text()) if result.exists() else {}
            fault = fault or wrong(part, found)
            found |= {"took": time.monotonic() - begun, "command": where["command"], "time": where["time"]}
            if fault:
                found["fault"] = fault
                faults.append(f"{part}: {fault}")
            print(f"{found['took']:.0f} s", *([fault] if fault else []), sep="\n  ", flush=True)
            whole["environment"] = where | {name: known[name] for name in ("command", "time") if name in known}
            whole["parts"][part] = found
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(whole, indent=1) + "\n")
    sys.exit("\n".join(faults) or None)


def commands(part: str, arguments: argparse.Namespace, result: Path) -> list[tuple[list[str], dict[str, str]]]:
    """What a part runs at the same time: commands with their variables."""
    gpus = str(arguments.gpus)
    if part == "tune":
        limit = str(min(PARTS[part], arguments.limit))
        return [([str(HERE / "rpc_servers.py"), "--layers", "--gpus", gpus, "--trials", str(arguments.trials),
                  "--seconds", limit, "--output", str(result)], {})]
    shared = {"WORLD_SIZE": gpus, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if not torch.cuda.is_available():
        shared["GLOO_SOCKET_IFNAME"] = "lo"
    return [([str(HERE / "many_gpus.py"), part, str(arguments.seconds), str(result)], shared | {"RANK": str(rank)})
            for rank in range(arguments.gpus if part in TRAINING else 1)]


def carry_out(what: Sequence[tuple[list[str], Mapping[str, str]]], limit: float, folder: Path) -> str:
    """Runs commands to their ends; once one fails, or after ``limit`` seconds, ends all with what they started. What
    went wrong; empty: nothing."""
    end, running = time.monotonic() + limit, dict[Path, subprocess.Popen[bytes]]()
    try:
        for n, (command, more) in enumerate(what):
            with (log := folder / f"{n}.log").open("w") as to:
                strict = os.environ | {"ECORNN_STRICT": "1", **more}
                running[log] = subprocess.Popen([sys.executable, "-W", "ignore", *command], stdout=to, stderr=to,
                                                env=strict, start_new_session=True)
        while going := [log for log, process in running.items() if process.poll() != 0]:
            if bad := [log for log in going if running[log].returncode]:
                return tail(bad[0])
            if time.monotonic() > end:
                return f"took longer than {limit:.0f} s\n{tail(going[0])}"
            time.sleep(0.1)
        return ""
    finally:
        for process in running.values():
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
        for run in (found[name] for name in ("one", "many", "share", "killed") if name in found):
            if run["failed"] or run["trials"] != run["wanted"]:
                return f"{run['failed']} trials failed, {run['trials']} of {run['wanted']} were made"
    return ""


def environment(gpus: int) -> dict[str, Any]:
    """The origin of the results, as the file says it."""
    there = torch.cuda.is_available()
    return {"gpu": platform.processor() or "CPU", "cuda": None, "cudnn": None} | side_by_side.environment(
        cpu=not there) | {"gpus": gpus, "cores": len(os.sched_getaffinity(0)), "python": platform.python_version(),
                          "nccl": ".".join(map(str, torch.cuda.nccl.version())) if there else None}


@dataclass(frozen=True)
class Link:
    """What carries gradients: seconds of latency of an all-reduce over two GPUs, and bytes a second, as measured."""

    latency: float
    bandwidth: float

    @classmethod
    def fitted(cls, messages: Mapping[str, float]) -> Link:
        """The least relative squares of ``latency + bytes / bandwidth`` over all-reduces of two GPUs, in milliseconds
        by bytes."""
        size, seconds = np.array([(float(size), ms * 1e-3) for size, ms in messages.items()]).T
        rows = np.stack([np.ones_like(size), size], 1) / seconds[:, None]
        latency, slope = np.linalg.lstsq(rows, np.ones_like(size), rcond=None)[0]
        return cls(max(float(latency), 0.0), 1 / float(slope))

    def all_reduce(self, count: float, gpus: int, network: float) -> float:
        """Seconds for so many bytes; ``network``: bytes a second of a host, which more than one have between them."""
        if gpus == 1:
            return 0.0
        bandwidth = self.bandwidth if gpus <= HOST else min(self.bandwidth, network)
        return self.latency * math.log2(gpus) + count * 2 * (gpus - 1) / gpus / bandwidth


@dataclass(frozen=True)
class Stack:
    """A model as results have it."""

    layers: int
    bidirectional: bool
    T: int
    I: int
    H: int

    @property
    def bytes(self) -> list[float]:
        """Of the gradients of each layer, float32."""
        D = 1 + self.bidirectional
        return [4.0 * D * 4 * self.H * ((D * self.H if layer else self.I) + self.H + 2) for layer in range(self.layers)]

    def ready(self) -> list[tuple[float, float]]:
        """The buckets in the order in which they leave: bytes, and the share of backward after which they are ready."""
        ends = np.cumsum(self.bytes[::-1])
        last = [*np.arange(BUCKET, ends[-1], BUCKET), float(ends[-1])]  # where each ends
        return [(size, (int(np.searchsorted(ends, end * (1 - 1e-9))) + 1) / self.layers)
                for size, end in zip(np.diff(last, prepend=0.0).tolist(), last, strict=True)]

    def communication(self, gpus: int, link: Link, network: float) -> float:
        """Seconds of all buckets."""
        return sum(link.all_reduce(size, gpus, network) for size, _ in self.ready())

    def exposed(self, backward: float, gpus: int, link: Link, network: float, by_layer: bool) -> float:
        """Seconds of these after a backward pass of so many seconds."""
        end = 0.0
        for size, share in self.ready():
            end = max(end, backward * (share if by_layer else 1.0)) + link.all_reduce(size, gpus, network)
        return max(0.0, end - backward)


class Model:
    """The model of a file of results."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        parallel = parts["data_parallel"]
        self.link = Link.fitted(parallel["messages"])
        self.share = (parallel["ready"]["layer_by_layer"]["alone_ms"]
                      / parallel["overlap"]["layer_by_layer_alone"]["ms"])
        self.parts = {name: parts[name] for name in ("speech", "deep") if "many" in parts.get(name, {})}
        self.stacks = {name: Stack(**part["sizes"]) for name, part in self.parts.items()}
        self.cost = 0.0
        hidden, missing = np.array([
            (self.times(name, int(rows), 2)[1], times["ecornn"]["ms"] / 1e3 - self.step(name, "ecornn", int(rows), 2))
            for name, part in self.parts.items() for rows, times in part["many"].items()]).reshape(-1, 2).T
        if hidden.any():
            self.cost = float(np.clip(hidden @ missing / (hidden @ hidden), 0.0, 1.0))

    def alone(self, name: str, side: str, rows: int) -> float:
        """Seconds of a step without communication: of the layers as several GPUs run them, or of one GPU."""
        if times := self.parts[name]["many"].get(str(rows)):
            return times[f"{side}_alone"]["ms"] / 1e3
        return self.parts[name]["one"][str(rows)][side]["ms"] / 1e3

    def times(self, name: str, rows: int, gpus: int, network: float = NETWORKS["8 adapters"],
              side: str = "ecornn") -> tuple[float, float]:
        """Seconds of communication that are exposed, and those that are hidden."""
        stack, backward = self.stacks[name], self.share * self.alone(name, side, rows)
        exposed = stack.exposed(backward, gpus, self.link, network, side == "ecornn")
        return exposed, stack.communication(gpus, self.link, network) - exposed

    def step(self, name: str, side: str, rows: int, gpus: int, network: float = NETWORKS["8 adapters"]) -> float:
        """Seconds."""
        if gpus == 1:
            return self.parts[name]["one"][str(rows)][side]["ms"] / 1e3
        exposed, hidden = self.times(name, rows, gpus, network, side)
        return self.alone(name, side, rows) + exposed + self.cost * hidden


def measured(model: Model, gpus: int) -> list[str]:
    """Steps of the same global batch on one GPU and on all, with the model's error."""
    lines = [f"| model | batch | side | 1 GPU, ms [p20, p80] | {gpus} GPUs, ms [p20, p80] | gain | communication | "
             "model, ms | error |", "|---|---|---|---|---|---|---|---|---|"]
    for name, part in model.parts.items():
        for rows, times in part["many"].items():
            batch = int(rows) * gpus
            for side in ("ecornn", "torch") if str(batch) in part["one"] else ():
                one, many, alone = part["one"][str(batch)][side], times[side], times[f"{side}_alone"]
                step = 1e3 * model.step(name, side, int(rows), gpus)
                lines.append(
                    f"| {name} | {batch} | {'torch.nn' if side == 'torch' else side} | {interval(one)} | "
                    f"{interval(many)} | {one['ms'] / many['ms']:.2f}x | {1 - alone['ms'] / many['ms']:.0%} | "
                    f"{step:.2f} | {step / many['ms'] - 1:+.0%} |")
    return lines


def projected(model: Model, name: str) -> list[str]:
    """A step of the same global batch on up to 128 GPUs, down to the fewest rows that were measured."""
    part, fewest = model.parts[name], min(map(int, model.parts[name]["one"]))
    batch, most = fewest * GPUS[-1], max(map(int, part["one"]))
    lines = [f"| GPUs | rows a GPU | ecornn, ms, {' / '.join(NETWORKS)} | gain over {batch // most} | torch.nn, ms | "
             "ecornn against torch.nn |", "|---|---|---|---|---|---|"]
    first = None
    for gpus, rows in ((n, batch // n) for n in GPUS if batch // n <= most):
        steps = [1e3 * model.step(name, "ecornn", rows, gpus, network) for network in NETWORKS.values()]
        theirs = 1e3 * model.step(name, "torch", rows, gpus)
        first = first or steps[0]
        lines.append(f"| {gpus} | {rows} | {' / '.join(f'{s:.2f}' for s in steps)} | {first / steps[0]:.2f}x | "
                     f"{theirs:.2f} | {theirs / steps[0]:.2f}x |")
    return lines


def section(path: Path) -> str:
    """All of it as Markdown."""
    data = json.loads(path.read_text())
    parts, env = data["parts"], data["environment"]
    model, gpus = Model(parts), env["gpus"]
    parallel, lines = parts["data_parallel"], measured(model, gpus)
    ready, overlap, gradients = parallel["ready"], parallel["overlap"], parallel["gradients"]
    lines += ["", f"Data: `benchmarks/results/{path.name}`, {gpus} {env['gpu']}, {env['cores']} cores, PyTorch "
              f"{env['torch']}, CUDA {env['cuda']}, NCCL {env['nccl']}; `{env['command']}`.", "",
              f"Of the model: latency {model.link.latency * 1e6:.0f} µs and {model.link.bandwidth / 1e9:.0f} GB/s "
              f"between two GPUs, backward {model.share:.0%} of a step, cost of what is hidden {model.cost:.2f}.", ""]
    for how, text in (("layer_by_layer", "layer by layer"), ("one_node", "as one node")):
        exposed = overlap[how]["ms"] - overlap[f"{how}_alone"]["ms"]
        leave = ready[how]["buckets_ms"]
        lines.append(f"- Speech, {parallel['rows']} rows a GPU, {text}: {len(leave)} buckets leave from {leave[0]:.1f} "
                     f"to {leave[-1]:.1f} ms of a backward pass, which alone takes {ready[how]['alone_ms']:.1f} ms; "
                     f"the step takes {overlap[how]['ms']:.2f} ms, {exposed:.2f} ms more than without communication, "
                     f"which takes {overlap['all_reduce']['ms']:.2f} ms alone.")
    if "layer_by_layer" in (few := parallel.get("few_blocks", {})):
        lines.append(f"- With NCCL's kernels held to four blocks: {few['layer_by_layer']['ms']:.2f} ms against "
                     f"{few['all_blocks']['ms']:.2f} ms.")
    lines.append(f"- Gradients of {gpus} processes: error {gradients['many']:.1e} against float64, of one process with "
                 f"the whole batch {gradients['one']:.1e}; each by itself is at most {gradients['most_of_limit']:.2f} "
                 "times twice the error of one process that takes the parts of all in turns.")
    if "step" in (sharded := parallel.get("sharded", {})):
        lines.append(f"- FSDP2: {sharded['step']['ms']:.2f} ms a step, {sharded['held']:.0%} of the weights on each "
                     f"GPU between calls.")
    if "many" in (tune := parts.get("tune", {})):
        gains = [f"{tune[gain]:.2f}x with {cores}" for gain, cores in (
            ("gain", "all cores for either"), ("gain_of_share", "as many cores for each GPU")) if gain in tune]
        lines.append("- Tuning, trials a minute: " + ", ".join(
            f"{run['trials_per_minute']:.0f} through {run['servers']} server(s) on {run['cores']} cores"
            for run in (tune[name] for name in ("one", "share", "many") if name in tune))
            + f". {', '.join(gains)}; `{tune['command']}`.")
    if "gain" in (inference := parts.get("inference", {})):
        lines.append(f"- Inference: {inference['one']:.0f} calls a second on one GPU, {inference['all']:.0f} on "
                     f"{inference['gpus']} from as many threads, {inference['gain']:.2f}x.")
    for name in model.parts:
        lines += ["", f"### {name}: {TITLES[name]}, by the model", "", *projected(model, name)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

"""Tables of docs/SCALING.md: what ``run_many_gpus.py`` measured, and a model of more GPUs that is held against it.

    python benchmarks/scaling_model.py benchmarks/results/h200_many_gpus.json            # prints them
    python benchmarks/scaling_model.py benchmarks/results/h200_many_gpus.json --write    # into docs/SCALING.md

The model, of a step with n rows on each of N GPUs:

    step(n, N) = alone(n) + exposed(n, N)

``alone`` is measured, on the GPUs at hand without communication. Gradients leave in buckets of 25 MB, the last layer's
first. Backward takes a measured share of a step, each of its layers the same; a bucket is ready with the layer that its
last byte is of. All-reduces follow one another, each takes ``latency`` log2(N) and its bytes times 2 (N-1) / N by the
bandwidth; what of them ends after the backward pass is exposed. What is hidden costs something, too, since kernels that
add up take multiprocessors and memory from those that compute: a share of it, ``cost``, the only number that is fitted
to steps that were measured. torch.nn's stack is one node, whose gradients are all ready at its end.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PAGE = Path("docs/SCALING.md")  # from the checkout
BEGIN, END = "<!-- measured: begin -->\n", "<!-- measured: end -->\n"
BUCKET = 25 * 2**20  # bytes, DistributedDataParallel's default
HOST = 8  # GPUs of one host, behind switches that give each its full bandwidth to any other
# bytes a second in and out of a host, of InfiniBand at 400 Gb/s of which four fifths are reached: an adapter for each
# GPU, and one in all
NETWORKS = {"8 adapters": 8 * 50e9 * 0.8, "1 adapter": 50e9 * 0.8}
GPUS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Link:
    """What carries gradients: seconds of latency of an all-reduce over two GPUs, and bytes a second, as measured."""

    latency: float
    bandwidth: float

    @classmethod
    def fitted(cls, messages: Mapping[str, float]) -> Link:
        """The least relative squares of ``latency + bytes / bandwidth`` over all-reduces of two GPUs, in milliseconds
        by bytes."""
        size, times = (np.array([*map(float, of)]) for of in (messages, messages.values()))
        seconds = times * 1e-3
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
        total, found, at = float(ends[-1]), [], 0.0
        while at < total:
            size = min(BUCKET, total - at)
            at += size
            found.append((size, (int(np.searchsorted(ends, at * (1 - 1e-9))) + 1) / self.layers))
        return found

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
        pairs = [(*self.times(name, int(rows), 2), self.step(name, "ecornn", int(rows), 2), times["ecornn"]["ms"] / 1e3)
                 for name, part in self.parts.items() for rows, times in part["many"].items()]
        hidden = np.array([communication - exposed for exposed, communication, *_ in pairs])
        missing = np.array([found - step for *_, step, found in pairs])
        if hidden.any():
            self.cost = float(np.clip(hidden @ missing / (hidden @ hidden), 0.0, 1.0))

    def alone(self, name: str, side: str, rows: int) -> float:
        """Seconds of a step without communication: of the layers as several GPUs run them, or of one GPU."""
        part = self.parts[name]
        if str(rows) in part["many"]:
            return part["many"][str(rows)][f"{side}_alone"]["ms"] / 1e3
        return part["one"][str(rows)][side]["ms"] / 1e3

    def times(self, name: str, rows: int, gpus: int, network: float = NETWORKS["8 adapters"],
              side: str = "ecornn") -> tuple[float, float]:
        """Seconds that are exposed, but for ``cost``, and those of all communication."""
        stack, backward = self.stacks[name], self.share * self.alone(name, side, rows)
        return (stack.exposed(backward, gpus, self.link, network, side == "ecornn"),
                stack.communication(gpus, self.link, network))

    def step(self, name: str, side: str, rows: int, gpus: int, network: float = NETWORKS["8 adapters"]) -> float:
        """Seconds."""
        if gpus == 1:
            return self.parts[name]["one"][str(rows)][side]["ms"] / 1e3
        exposed, communication = self.times(name, rows, gpus, network, side)
        return self.alone(name, side, rows) + exposed + self.cost * (communication - exposed)


TITLES = {"speech": "five layers of LSTM 800 in both directions", "deep": "seven layers of LSTM 768 in one direction"}


def measured(model: Model, gpus: int) -> list[str]:
    """Steps of the same global batch on one GPU and on all, with the model's error."""
    lines = [f"| model | batch | side | 1 GPU, ms [p20, p80] | {gpus} GPUs, ms [p20, p80] | gain | communication | "
             "model, ms | error |", "|---|---|---|---|---|---|---|---|---|"]
    for name, part in model.parts.items():
        for rows, times in part["many"].items():
            batch = int(rows) * gpus
            for side in ("ecornn", "torch"):
                if str(batch) not in part["one"]:
                    continue
                one, many, alone = part["one"][str(batch)][side], times[side], times[f"{side}_alone"]
                step = 1e3 * model.step(name, side, int(rows), gpus)
                lines.append(
                    f"| {name} | {batch} | {'torch.nn' if side == 'torch' else side} | {interval(one)} | "
                    f"{interval(many)} | {one['ms'] / many['ms']:.2f}x | {1 - alone['ms'] / many['ms']:.0%} | "
                    f"{step:.2f} | {step / many['ms'] - 1:+.0%} |")
    return lines


def interval(times: Mapping[str, float]) -> str:
    return f"{times['ms']:.2f} [{times['p20']:.2f}, {times['p80']:.2f}]"


def projected(model: Model, name: str) -> list[str]:
    """A step of the same global batch on up to 128 GPUs, down to the fewest rows that were measured."""
    part, fewest = model.parts[name], min(map(int, model.parts[name]["one"]))
    batch, most = fewest * GPUS[-1], max(map(int, part["one"]))
    lines = [f"| GPUs | rows a GPU | ecornn, ms, {' / '.join(NETWORKS)} | gain over {batch // most} | torch.nn, ms | "
             "ecornn against torch.nn |", "|---|---|---|---|---|---|"]
    first = None
    for gpus in GPUS:
        rows = batch // gpus
        if rows > most:
            continue
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
    ready, overlap, sharded = parallel["ready"], parallel["overlap"], parallel.get("sharded", {})
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
    few = parallel.get("few_blocks", {})
    if "layer_by_layer" in few:
        lines.append(f"- With NCCL's kernels held to four blocks: {few['layer_by_layer']['ms']:.2f} ms against "
                     f"{few['all_blocks']['ms']:.2f} ms.")
    gradients = parallel["gradients"]
    lines.append(f"- Gradients of {gpus} processes: error {gradients['many']:.1e} against float64, of one process with "
                 f"the whole batch {gradients['one']:.1e}; each by itself is at most {gradients['most_of_limit']:.2f} "
                 "times twice the error of one process that takes the parts of all in turns.")
    if "step" in sharded:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--write", action="store_true", help=f"into {PAGE}")
    arguments = parser.parse_args()
    text = section(arguments.results)
    if not arguments.write:
        print(text, end="")
        return
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + text + END + rest.split(END)[1])


if __name__ == "__main__":
    main()

"""Code for every architecture, held against the limits of its chip by ptxas' report; no GPU is needed.

    python tests/architectures.py            compiles all layers for all architectures, writes what it finds into
                                             benchmarks/results/architectures.json and docs/COMPATIBILITY.md
    python tests/architectures.py sm_120     the same for some, and the others' results are kept

A layer has the schedule and configuration that ``ecornn compile`` chooses, from records of other GPUs too."""

import json
import sys
import traceback
from typing import Any

import rooms  # before what follows: makes the modules of all rooms importable

from ecornn.build import Generated, cuda
from ecornn.build.one_kernel import as_launched
from ecornn.chips import ARCHITECTURES, PRODUCTS
from ecornn.compiler import plan
from ecornn.compose import compose
from ecornn.device import Device
from ecornn.program import Launch, Program, launches
from ecornn.targets import KNOWN

FILE = rooms.ROOT / "benchmarks/results/architectures.json"
PAGE = rooms.ROOT / "docs/COMPATIBILITY.md"
BEGIN, END = "<!-- architectures: begin -->", "<!-- architectures: end -->"
TESTED = ("h100", "h200")  # products on which `pytest -m gpu` and benchmarks ran
WARP, REGISTERS_OF_A_WARP = 32, 256  # threads; registers are given to a warp in whole multiples of so many
RESERVED = 1 << 10  # bytes of shared memory that CUDA takes for each block that a multiprocessor holds

# One for each architecture in `make test`, all for all of them in the exhaustive run
LAYERS: list[dict[str, Any]] = [
    {"cell": "lstm", "hidden": 512, "batch": 16, "dtype": "bfloat16"},
    {"cell": "gru", "hidden": 128, "batch": 8, "dtype": "float32"},
    {"cell": "rnn_tanh", "hidden": 96, "batch": 1, "dtype": "float16"},
    {"cell": "lstm", "hidden": 1024, "batch": 64, "dtype": "float16"},
    {"cell": "lstm", "hidden": 256, "batch": 128, "dtype": "float16"},
    {"cell": "rnn_tanh", "hidden": 128, "batch": 8, "dtype": "bfloat16", "training": True},
    {"cell": "lstm", "hidden": 512, "batch": 16, "dtype": "float16", "seq": 1},
    {"cell": "lstm", "hidden": 64, "batch": 64, "dtype": "float32", "precision": "tf32"},
    {"cell": "indrnn", "hidden": 256, "batch": 16, "dtype": "float16"},
    {"cell": "lstm", "hidden": 256, "batch": 32, "dtype": "float16"},
    {"cell": "lstm", "hidden": 2048, "batch": 1, "dtype": "bfloat16"},
    {"cell": "gru", "hidden": 256, "batch": 16, "dtype": "bfloat16", "training": True},
    {"cell": "gru", "hidden": 2816, "batch": 32, "dtype": "float16"},
    {"cell": "lstm", "hidden": 800, "batch": 20, "dtype": "float32", "training": True},
    {"cell": "gru_reset_before", "hidden": 300, "batch": 12, "dtype": "float32"},
    {"cell": "slstm", "hidden": 256, "batch": 8, "dtype": "bfloat16", "training": True},
    {"cell": "lstm(layer_norm)", "hidden": 256, "batch": 16, "dtype": "float16"},
    {"cell": "rnn_relu", "hidden": 512, "batch": 256, "dtype": "bfloat16", "training": True},
    {"cell": "lstm", "hidden": 512, "batch": 16, "dtype": "float16", "weights": "int8"},
]


def compiled(target: str | Device, **layer: Any) -> tuple[Program, Generated]:
    planned = plan(**layer, target=target)
    program = compose(planned.stack, planned.workload, planned.programs(), planned.overlap)
    return program, cuda.generate(program, planned.device)


def blocks_at_once(device: Device, launch: Launch, used: dict[str, int]) -> int:
    """Blocks of a kernel that a multiprocessor holds; 0 where one does not fit."""
    limits, warps = ARCHITECTURES[device.arch], -(-launch.threads // WARP)
    of_warp = -(-used["registers"] * WARP // REGISTERS_OF_A_WARP) * REGISTERS_OF_A_WARP
    shared = launch.shared + used["shared"]
    if shared > device.shared or used["registers"] > 255 or launch.threads > 1024:
        return 0
    return min(device.registers // (of_warp * warps), limits.threads // (WARP * warps),
               limits.shared_of_multiprocessor // (shared + RESERVED))


def check(device: Device, program: Program, generated: Generated) -> None:
    """AssertionError unless every launch of the program fits the chip, at once with others where it has to."""
    every = {launch.function: launch for entry in as_launched(program)[0].entries.values()
             for launch in launches(entry.calls)}
    assert every and set(every) <= set(generated.resources)
    for name, launch in every.items():
        at_once = blocks_at_once(device, launch, generated.resources[name])
        assert at_once > 0, f"a block of {name} does not fit: {launch}, {generated.resources[name]}"
        assert launch.cluster <= device.can.cluster and launch.grid % launch.cluster == 0
        if launch.cooperative:
            assert launch.grid <= at_once * device.cores, f"{name}: {launch.grid} blocks, {at_once} of them at once"


def row_of(arch: str) -> dict[str, Any]:
    """The counts of an architecture: layers, those that fail with the reason, kernels and their most of each."""
    failed, used = {}, list[dict[str, int]]()
    for layer in LAYERS:
        name = " ".join(str(value) for value in layer.values())
        print(arch, name, flush=True)
        try:
            program, generated = compiled(arch, **layer)
            check(KNOWN[arch], program, generated)
            used += generated.resources.values()
        except Exception as error:
            traceback.print_exc()
            failed[name] = f"{type(error).__name__}: {error}"[:200]
    return {"device": KNOWN[arch].name, "layers": len(LAYERS), "failed": failed, "kernels": len(used),
            "kernels_that_spill": sum(one["spill_stores"] > 0 for one in used),
            **{f"most_{what}": max(one[what] for one in used) for what in ("registers", "spill_stores")}}


def table() -> str:
    """The page's table: what was measured on a GPU, and what was compiled alone."""
    rows, lines = json.loads(FILE.read_text()), ["| architecture | products | shared memory of a block | blocks of a "
                                                 "cluster | measured | compiled |", "|---|---|---|---|---|---|"]
    for arch, limits in ARCHITECTURES.items():
        products, row = [product.short for product in PRODUCTS if product.arch == arch], rows.get(arch)
        measured = ", ".join(f"`{name}`" for name in products if name in TESTED) or "no"
        compiled = f"{row['layers'] - len(row['failed'])} of {row['layers']} layers" if row else "no"
        lines.append(" | ".join((f"| `{arch}`", ", ".join(f"`{name}`" for name in products),
                                 f"{limits.shared >> 10} KiB", str(limits.cluster), measured, f"{compiled} |")))
    return "\n".join(lines)


def main() -> None:
    rows = json.loads(FILE.read_text()) if FILE.exists() else {}
    for arch in sys.argv[1:] or ARCHITECTURES:
        rows[arch] = row_of(arch)
        FILE.write_text(json.dumps({name: rows[name] for name in ARCHITECTURES if name in rows}, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}")
    sys.exit(any(row["failed"] for row in rows.values()))


if __name__ == "__main__":
    main()

"""Memcheck and racecheck of compute-sanitizer over small layers of every schedule, on the GPU at hand.

    python tests/sanitize.py [--output checks.txt] [--jobs 8] [--only persistent]

Modules are compiled first; each check is a process of its own that loads one, runs it once and compares it with
float64. Exits with 1 where anything is reported, wrong or missing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

TOOLS = {"memcheck": ["--tool", "memcheck"], "racecheck": ["--tool", "racecheck", "--racecheck-report", "all"]}
CLEAN = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "RACECHECK SUMMARY: 0 hazards displayed"}
SECONDS = 300


def case(schedule: str, cell: str, dtype: str, sizes: tuple[int, int, int, int], config: dict[str, Any] | None = None,
         **stack: Any) -> dict[str, Any]:
    """One layer: sizes T, B, I, H; a configuration is completed by the schedule's default."""
    return {"schedule": schedule, "cell": cell, "dtype": dtype, "sizes": sizes, "config": config or {}, "stack": stack}


def persistent(cell: str, dtype: str, sizes: tuple[int, int, int, int], cut: tuple[int, int, int, int],
               chains: int, registers: int, interleave: int, ahead: int, math: str, fences: str = "products",
               carrier: str = "l2", hoisted: str = "float32") -> dict[str, Any]:
    """A configuration of `persistent`; ``cut``: groups, units, warps, gate warps."""
    names = ("groups", "units", "warps", "gate_warps")
    return case("persistent", cell, dtype, sizes, {
        **dict(zip(names, cut, strict=True)), "chains": chains, "registers": registers, "interleave": interleave,
        "ahead": ahead, "fences": fences, "carrier": carrier, "hoisted": hoisted, "math": math})


def block(cell: str, dtype: str, sizes: tuple[int, int, int, int], products: str, rows: int, units: int, lanes: int,
          registers: int, math: str, hoisted: str = "float32", cluster: int = 1, heads: int = 1) -> dict[str, Any]:
    """A configuration of `persistent_block`."""
    return case("persistent_block", cell, dtype, sizes, ({"heads": heads} if "heads" in cell else {}) | {
        "products": products, "rows": rows, "units": units, "lanes": lanes, "registers": registers, "resident": 1,
        "cluster": cluster, "hoisted": hoisted, "math": math})


def wide(cell: str, dtype: str, sizes: tuple[int, int, int, int], groups: int, units: int, registers: int,
         parts: int = 1, row_teams: int = 1, hoisted: str = "float32", **streamed: int) -> dict[str, Any]:
    """A configuration of `persistent_wide`."""
    return case("persistent_wide", cell, dtype, sizes, {
        "groups": groups, "units": units, "parts": parts, "row_teams": row_teams, "registers": registers,
        **streamed, "hoisted": hoisted, "math": "fast"})


ALL = {"layers": 2, "bidirectional": True, "lengths": True, "resets": True}
CASES = {
    # projection before (mma, wgmma), half beside, all beside; registers, shared memory; two exchanges a step; float32.
    "plain": persistent("lstm", "float16", (10, 9, 17, 48), (2, 10, 1, 2), 2, 25, 0, 100, "exact", "every"),
    # four states, of which two are computed after the operands are sent
    "slstm": persistent("slstm", "float16", (10, 9, 17, 48), (2, 10, 1, 2), 1, 25, 0, 100, "fast", "every"),
    "slstm_cluster": case("persistent", "slstm", "bfloat16", (12, 16, 64, 64), {"carrier": "cluster"}),
    "default": persistent("lstm", "bfloat16", (12, 16, 64, 64), (2, 16, 2, 4), 1, 100, 0, 100, "fast"),
    "wgmma": persistent("gru", "bfloat16", (9, 20, 64, 48), (2, 16, 2, 5), 1, 100, 4, 100, "approx"),
    "half": persistent("lstm", "float16", (20, 9, 24, 64), (2, 14, 1, 3), 1, 25, 0, 50, "exact"),
    "beside": persistent("lstm", "bfloat16", (10, 9, 24, 64), (1, 10, 2, 3), 2, 100, 0, 0, "approx"),
    "two": persistent("gru_reset_before", "float32", (9, 3, 8, 24), (1, 16, 1, 2), 2, 50, 0, 100, "exact"),
    "f32": persistent("lstm", "float32", (9, 5, 13, 40), (1, 8, 3, 2), 1, 100, 0, 100, "exact"),
    "rare": persistent("lstm", "bfloat16", (40, 9, 64, 128), (1, 16, 4, 4), 1, 100, 0, 100, "fast", "rare"),
    "rare two": persistent("gru_reset_before", "float16", (40, 3, 8, 72), (1, 8, 3, 1), 1, 100, 0, 100, "fast", "rare"),
    # groups that are clusters, of five and sixteen blocks; two exchanges a step; weights in shared memory
    "cluster": persistent("lstm", "float16", (12, 9, 17, 48), (2, 10, 1, 2), 2, 25, 0, 100, "exact", "rare", "cluster"),
    "cluster of 16": persistent("gru", "bfloat16", (20, 9, 64, 256), (1, 16, 4, 5), 1, 100, 0, 100, "fast", "rare",
                                "cluster"),
    "cluster two": persistent("gru_reset_before", "float32", (9, 3, 8, 24), (1, 8, 2, 1), 2, 50, 0, 100, "exact",
                              "rare", "cluster"),
    # a layer in a block: by multiply-adds with lanes that halve and add, and weights in shared memory; by mma, two
    # phases and tiles; by warpgroups, rows that repeat; columns of sequences, blocks in turns
    "block": block("lstm", "float32", (20, 9, 17, 64), "fma", 6, 1, 2, 50, "relative"),
    "block mma": block("gru_reset_before", "float16", (12, 13, 24, 40), "mma", 12, 1, 1, 100, "fast", "same"),
    "block wgmma": block("lstm", "bfloat16", (12, 5, 64, 128), "wgmma", 2, 2, 1, 100, "approx", "same"),
    "block cluster": block("lstm", "float16", (12, 20, 24, 64), "mma", 12, 1, 1, 50, "fast", "same", cluster=2),
    "block cluster f32": block("gru", "float32", (9, 9, 13, 64), "mma", 8, 2, 1, 100, "exact", cluster=4),
    # heads: two of a block, one of a cluster
    "block heads mma": block("slstm(heads=2)", "float16", (12, 5, 17, 96), "mma", 1, 2, 1, 100, "fast", heads=2),
    "block heads wgmma": block("slstm(heads=2)", "bfloat16", (12, 5, 17, 96), "wgmma", 2, 2, 1, 100, "fast", heads=2),
    "block heads cluster": block("slstm(heads=2)", "float16", (12, 9, 17, 64), "mma", 6, 1, 1, 100, "fast", cluster=2),
    "block masks": block("gru", "float32", (20, 9, 17, 33), "fma", 2, 1, 2, 100, "exact") | {"stack": ALL},
    # weights from L2, as if there were less shared memory: rings of two slots, and of three in each of two phases
    "streamed": persistent("lstm", "float16", (7, 9, 24, 300), (1, 60, 2, 6), 1, 0, 0, 100, "fast") | {"shared": 136},
    "streamed two": persistent("gru_reset_before", "bfloat16", (6, 5, 24, 260), (1, 56, 2, 2), 1, 0, 0, 100, "fast") | {
        "shared": 92},
    # chunks with and without padding, one group and two, weights in registers, shared memory, both; rows of x for
    # 8-byte and 4-byte copies
    "wide groups": wide("rnn_tanh", "float16", (12, 23, 31, 300), 2, 64, 100),
    "wide short": wide("rnn_tanh", "float16", (9, 23, 31, 300), 1, 64, 100),
    "wide whole": wide("rnn_tanh", "float16", (12, 23, 31, 256), 2, 64, 100),
    "wide shared": wide("gru", "bfloat16", (9, 20, 64, 300), 1, 24, 0),
    "wide both": wide("lstm", "bfloat16", (9, 23, 60, 140), 1, 28, 50),
    # warpgroups with rows of their own, two and three; blocks that share K, with less to do in the last one
    "wide rows": wide("lstm", "float16", (9, 9, 31, 130), 1, 34, 50, row_teams=2),
    "wide parts": wide("gru", "float16", (12, 9, 64, 256), 1, 64, 50, parts=3, row_teams=3),
    "wide four parts": wide("rnn_tanh", "bfloat16", (12, 23, 31, 300), 2, 104, 100, parts=4, row_teams=2),
    "wide two parts": wide("lstm", "bfloat16", (9, 23, 66, 140), 1, 48, 0, parts=2, row_teams=3),
    # weights read in every step, as on a GPU of few multiprocessors: three slots for five chunks of a ring
    "wide past": wide("lstm", "float16", (9, 9, 31, 592), 1, 60, 0, streamed=90, ahead=16, lasting=50) | {"cores": 10},
    "wide past rows": wide("gru", "bfloat16", (9, 12, 64, 520), 1, 88, 25, row_teams=2, streamed=50) | {"cores": 6},
    # statistics of hidden units: beside a product and after it, through L2 and in a cluster; row by row
    "sums": persistent("blend", "float16", (30, 9, 17, 48), (2, 16, 2, 2), 1, 100, 0, 100, "fast", "rare"),
    "sums cluster": persistent("blend", "bfloat16", (12, 9, 64, 80), (2, 16, 2, 2), 1, 100, 0, 100, "fast", "rare",
                               "cluster", "same"),
    "sums twice": persistent("lstm(layer_norm)", "float16", (40, 9, 17, 48), (1, 8, 2, 3), 1, 100, 0, 100, "fast",
                             "rare", hoisted="same"),
    "sums of warps": persistent("gru(layer_norm)", "bfloat16", (12, 9, 24, 80), (2, 40, 2, 6), 1, 0, 0, 100, "fast"),
    "sums twice cluster": persistent("lstm(layer_norm)", "float32", (12, 9, 64, 80), (2, 16, 2, 3), 1, 100, 0, 100,
                                     "exact", "rare", "cluster"),
    "sums pairs cluster": persistent("gru(layer_norm)", "float16", (12, 9, 64, 80), (2, 16, 2, 3), 1, 100, 0, 100,
                                     "fast", "rare", "cluster", "same"),
    "sums layout": case("layout_transform", "blend", "bfloat16", (6, 17, 33, 65)),
    "sums fused": case("fused_step", "blend", "float32", (5, 3, 13, 40)),
    "layout": case("layout_transform", "gru", "bfloat16", (6, 17, 33, 65)),
    "layout f32": case("layout_transform", "gru_reset_before", "float32", (5, 3, 13, 40)),
    # around the ring of inputs, wide and narrow copies, and a rest
    "elementwise": case("elementwise", "indrnn", "bfloat16", (37, 5, 24, 72), {"units": 4, "prefetch": 16}),
    "elementwise masks": case("elementwise", "indrnn", "float32", (37, 5, 24, 71), {"prefetch": 8, "group": 4},
                              lengths=True, resets=True),
    # hoisted values in 16 bits: odd H, projections before (mma, wgmma) and beside, and every schedule that reads them
    "same": persistent("lstm", "float16", (12, 9, 17, 47), (2, 10, 1, 2), 2, 25, 0, 100, "fast", hoisted="same"),
    "same wgmma": persistent("gru", "bfloat16", (9, 20, 64, 47), (2, 16, 2, 5), 1, 100, 4, 100, "approx",
                              hoisted="same"),
    "same beside": persistent("gru", "float16", (20, 9, 24, 61), (1, 8, 2, 3), 1, 100, 0, 0, "fast", hoisted="same"),
    "same tanh": persistent("rnn_tanh", "bfloat16", (20, 9, 24, 61), (1, 16, 2, 2), 1, 100, 0, 50, "fast",
                            hoisted="same"),
    "same wide": wide("lstm", "bfloat16", (9, 23, 64, 139), 1, 28, 50, hoisted="same"),
    "same wide parts": wide("gru", "float16", (12, 9, 64, 255), 1, 64, 50, parts=3, row_teams=3, hoisted="same"),
    "same layout": case("layout_transform", "gru", "bfloat16", (6, 17, 33, 65), {"hoisted": "same"}),
    "same elementwise": case("elementwise", "indrnn", "bfloat16", (37, 5, 24, 72),
                             {"units": 4, "prefetch": 16, "hoisted": "same"}),
    # a call of one step and of several, loads behind products and all at once, rows that are not aligned
    "whole": case("whole_step", "lstm", "float16", (1, 9, 24, 72)),
    "whole steps": case("whole_step", "gru", "bfloat16", (5, 17, 33, 65), {"warps": 2, "ahead": 1}),
    "whole cluster": case("whole_step", "lstm", "bfloat16", (2, 9, 40, 72), {"units": 8, "cluster": 2}),
    "whole f32": case("whole_step", "gru", "float32", (3, 3, 13, 40), {"chained": False}),
    "stack whole": case("whole_step", "lstm", "float16", (2, 5, 24, 72), overlap="none", **ALL),
    "fused": case("fused_step", "lstm", "float16", (5, 9, 17, 48)),
    "fused f32": case("fused_step", "gru", "float32", (5, 3, 13, 40)),
    **{f"stack {schedule}": case(schedule, "lstm", "float16", (9, 5, 24, 72), overlap="none", **ALL)
       for schedule in ("persistent", "persistent_wide", "layout_transform", "fused_step")},
    "directions": case("persistent", "lstm", "float16", (9, 5, 24, 72), overlap="directions", **ALL),
    "sequences": persistent("lstm", "float16", (24, 9, 24, 64), (2, 14, 1, 3), 1, 25, 0, 50, "exact") | {
        "stack": {"sequences": True}},
    "sequences cluster": persistent("gru", "bfloat16", (20, 9, 64, 256), (1, 16, 4, 5), 1, 100, 0, 100, "fast", "rare",
                                    "cluster", "same") | {"stack": {"sequences": True}},
    "sequences wide": case("persistent_wide", "gru", "bfloat16", (20, 9, 24, 72), sequences=True, layers=2,
                           bidirectional=True),
    "wavefront": case("persistent", "gru", "bfloat16", (40, 5, 24, 72), overlap="wavefront", layers=3, lengths=True),
    "wavefront wide": case("persistent_wide", "lstm", "float16", (40, 5, 24, 72), overlap="wavefront", layers=2),
    # training steps: gradients of everything, by each schedule's forward
    "training": case("persistent", "lstm", "bfloat16", (12, 9, 24, 72), training=True, lengths=True),
    "training f32": case("persistent", "gru", "float32", (9, 5, 13, 40), training=True, resets=True),
    "training f16": case("persistent", "rnn_tanh", "float16", (20, 16, 64, 128), training=True),
    "training wide": case("persistent_wide", "lstm", "float16", (9, 23, 64, 136), training=True),
    "training layout": case("layout_transform", "gru_reset_before", "float32", (5, 3, 13, 40), training=True),
    "training norm": case("persistent", "lstm(layer_norm)", "float32", (6, 5, 13, 40), training=True, lengths=True),
    "training columns": case("persistent", "lstm", "float16", (24, 9, 24, 64), training=True, sequences=True),
    "training columns stack": case("persistent_wide", "gru", "bfloat16", (20, 9, 24, 72), training=True, sequences=True,
                                   layers=2, bidirectional=True),
    "training stack": case("persistent", "lstm", "float16", (9, 5, 24, 72), training=True, **ALL),
    "training gates": case("persistent", "lstm", "bfloat16", (12, 9, 24, 72), training=True, keep="gates",
                           lengths=True),
    "training gates layout": case("layout_transform", "gru_reset_before", "float32", (5, 3, 13, 40), training=True,
                                  keep="gates"),
    # products with heads; maxima and softmaxes of units, of a cell whose values grow
    "heads": case("persistent", "block_4", "bfloat16", (12, 9, 24, 128)),
    "heads layout": case("layout_transform", "block_4", "float16", (6, 9, 24, 128)),
    "maxima": case("persistent", "peaks", "float16", (4, 9, 17, 48)),
    "maxima layout": case("layout_transform", "peaks", "float32", (6, 9, 17, 48)),
    "training heads": case("persistent", "block_2", "float16", (9, 5, 24, 128), training=True, keep="gates"),
    # adjoints of fused_step: units that see each other by statistics alone, conditions as numbers, products of products
    "training fused drift": case("fused_step", "drift", "float32", (6, 5, 13, 40), training=True),
    "training fused level": case("fused_step", "level", "float32", (6, 5, 13, 40), training=True, keep="states"),
    "training fused reset": case("fused_step", "reset", "float32", (6, 5, 13, 40), training=True),
    "training fused detour": case("fused_step", "detour", "float32", (6, 5, 13, 40), training=True),
    "training block reset": case("persistent_block", "reset", "float32", (6, 5, 13, 40), training=True),
    "training maxima": case("persistent", "peaks", "float32", (6, 5, 13, 40), training=True),
}


def cell_of(name: str) -> Any:
    """A cell by its name, also of those that only tests have."""
    import exact
    import maximum_cells
    import test_bare_steps_emulated
    import test_heads

    from ecornn.cells import get

    more = (maximum_cells.Peaks(), test_heads.BlockRNN(4), test_heads.BlockRNN(2),
            *test_bare_steps_emulated.BARE.values())
    exact.ALL_CELLS.update((c.name, c) for c in more)
    return exact.ALL_CELLS.get(name) or get(name)


def build(name: str, folder: str) -> None:
    """Compiles a case into ``folder``. Where that fails, its runs find no file and say so."""
    from msgspec.structs import replace

    import ecornn
    from ecornn.targets import resolve

    of, device = CASES[name], resolve("cuda")
    T, B, I, H = of["sizes"]
    target = replace(device, shared=of["shared"] << 10) if "shared" in of else device
    target = replace(target, cores=of["cores"]) if "cores" in of else target
    ecornn.compile(cell_of(of["cell"]), hidden=H, input=I, batch=B, seq=T, dtype=of["dtype"], target=target,
                   schedule=of["schedule"], config=of["config"] or None, **of["stack"]).save(file_of(name, folder))


def file_of(name: str, folder: str) -> str:
    """A case's module file."""
    return str(Path(folder, name.replace(" ", "_") + ".so"))


def once(name: str, folder: str) -> tuple[float, float]:
    """Runs a compiled case; the relative error of y, and what it may be."""
    import torch
    from limits import relative

    import ecornn

    of, rng = CASES[name], np.random.default_rng(0)
    (T, B, I, _), stack, kind = of["sizes"], of["stack"], getattr(torch, of["dtype"])
    drawn = weights_of(of, rng)
    weights = {k: torch.tensor(v).to(kind).float().numpy() for k, v in drawn.items()}
    layer = ecornn.load(file_of(name, folder)).bind(weights)
    if stack.get("sequences") and stack.get("training"):
        from column_gradients import errors_of

        return max(errors_of(layer, of["cell"], weights, rng).values()), GRADIENTS[of["dtype"]]
    if stack.get("sequences"):
        return laid(layer, rng, kind, weights)
    if stack.get("training"):
        return trained(layer, of, rng, kind, weights)
    x = torch.tensor(rng.standard_normal((T, B, I))).to(kind)
    call: dict[str, Any] = {}
    if stack.get("lengths"):
        call["lengths"] = rng.integers(1, T + 1, B).astype(np.int32)
    if stack.get("resets"):
        call["resets"] = rng.random((T, B)) < 0.2
    y, _ = layer(x.cuda(), **{k: torch.tensor(v).cuda() for k, v in call.items()})
    wanted = wanted_of(layer, x, weights, call)
    return relative(y.double().cpu().numpy(), wanted.y), wanted.limit


def wanted_of(layer: Any, x: Any, weights: dict[str, Any], masks: dict[str, Any]) -> Any:
    """What ``layer`` computes from states of zeros, and how near to it y must be."""
    from exact import of_stack
    from limits import Wanted

    work, stack = layer.manifest.workload, layer.manifest.stack
    name = work.cell.partition("@")[0]  # of a cell that only tests have
    size = (x.shape[1], work.hidden) if stack.count == 1 else (stack.count, x.shape[1], work.hidden)
    states = [np.zeros(size)] * len(cell_of(name).states)
    return Wanted(work.arithmetic, lambda forward: of_stack(
        name, stack, x.double().numpy(), states, weights, masks, forward))


def weights_of(of: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Random weights of a case, by the names that ``bind`` takes."""
    from ecornn.numpy_reference import NORMALIZED, STEPS, random_weights

    (_, _, I, H), stack = of["sizes"], of["stack"]
    if of["cell"] in STEPS or of["cell"] in NORMALIZED:
        return random_weights(of["cell"], I, H, 1, stack.get("layers", 1), 1 + stack.get("bidirectional", False))
    return {f"{n}_l0": rng.uniform(-1, 1, (s[0] * s[1], *s[2:])) * H ** -0.5
            for n, s in cell_of(of["cell"]).parameters(I, H).items()}


def laid(layer: Any, rng: np.random.Generator, kind: Any, weights: Any) -> tuple[float, float]:
    """The same for more than twice as many sequences as there are columns; some wrap around."""
    import torch
    from limits import relative

    import ecornn

    w = layer.manifest.workload
    rows = torch.tensor(rng.standard_normal((w.seq, 2 * w.batch + 1, w.input))).to(kind)
    lengths = rng.integers(w.seq // 2, w.seq + 1, 2 * w.batch + 1)
    columns = ecornn.Columns.of(lengths, w.batch, layer.together)
    assert columns.wrapped.size
    y = layer(rows[columns.inside, columns.table].cuda(), sequences=columns)[0].double().cpu().numpy()
    wanted = wanted_of(layer, rows, weights, {"lengths": lengths})
    found = np.zeros_like(wanted.y)
    for s, n in enumerate(lengths):
        found[:n, s] = y.reshape(-1, y.shape[2])[columns.of_sequence(s)]
    return relative(found, wanted.y), wanted.limit


GRADIENTS = {"float32": 2e-5, "float16": 8 * 2.0 ** -11, "bfloat16": 8 * 2.0 ** -8}


def trained(layer: Any, of: dict[str, Any], rng: np.random.Generator, kind: Any, weights: Any) -> tuple[float, float]:
    """The largest error of a gradient, and what it may be."""
    import torch
    from limits import relative

    (T, B, I, H), stack = of["sizes"], layer.manifest.stack

    def drawn(*shape: int) -> Any:
        return torch.tensor(rng.standard_normal(shape)).to(kind)

    x, dy = drawn(T, B, I), drawn(T, B, H * stack.directions)
    shape = (B, H) if stack.count == 1 else (stack.count, B, H)
    states, dstates = ([drawn(*shape) for _ in layer.manifest.states] for _ in range(2))
    masks: dict[str, Any] = {}
    if stack.lengths:
        masks["lengths"] = rng.integers(0, T + 1, B).astype(np.int32)
    if stack.resets:
        masks["resets"] = rng.random((T, B)) < 0.2
    _, _, kept = layer.forward(x.cuda(), [s.cuda() for s in states],
                               **{k: torch.tensor(v).cuda() for k, v in masks.items()})
    found = layer.backward(kept, dy.cuda(), [s.cuda() for s in dstates])
    dx, dweights, before = gradients_of(
        of["cell"], x.double().numpy(), weights, [s.double().numpy() for s in states], dy.double().numpy(),
        [s.double().numpy() for s in dstates], masks)
    pairs = [(found.x, dx), *((found.weights[n], g) for n, g in dweights.items())]
    pairs += [(a, b.reshape(a.shape)) for a, b in zip(found.state, before, strict=True)]
    return max(relative(a.double().cpu().numpy(), b) for a, b in pairs), GRADIENTS[of["dtype"]]


def gradients_of(name: str, x: Any, weights: dict[str, Any], states: list[Any], dy: Any, dstates: list[Any],
                 masks: dict[str, Any]) -> tuple[Any, dict[str, Any], Any]:
    """Those of x, weights by ``bind``'s names and first states, in float64. Of cells without a formula in NumPy it is
    the adjoint that is compiled: tests have their numbers, and here an error would be of a kernel."""
    import ecornn
    from ecornn.analysis import analyse
    from ecornn.analysis.adjoint import adjoint
    from ecornn.analysis.backpropagation import backpropagate
    from ecornn.numpy_reference import NORMALIZED, STEPS

    if name in STEPS or name in NORMALIZED:
        return ecornn.reference_gradients(name, x, weights, states, dy=dy, dstate=dstates, **masks)
    cell, I, H = cell_of(name), x.shape[2], dy.shape[2]
    parameters = {n: weights[f"{n}_l0"].reshape(s) for n, s in cell.parameters(I, H).items()}
    dx, found, before = backpropagate(adjoint(analyse(cell, I, H), H), x, parameters, states, dy, dstates)
    return dx, {f"{n}_l0": g.reshape(weights[f"{n}_l0"].shape) for n, g in found.items()}, before


def checked(name: str, tool: str, folder: str) -> tuple[bool, str]:
    """Whether a case is clean, and what there is to say."""
    command = ["compute-sanitizer", *TOOLS[tool], sys.executable, __file__, "--once", name, "--folder", folder]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return False, f"no end within {SECONDS} s"
    text = (done.stdout + done.stderr).splitlines()
    lines = [line for line in text if line.startswith(("error ", "=========", "Trace"))]
    good = done.returncode == 0 and any(CLEAN[tool] in line for line in lines)
    said = [line.removeprefix("========= ") for line in lines if "SUMMARY" in line or line.startswith("error ")]
    return good, "; ".join(said) if good else "\n".join([*lines[:20], done.stderr[-1500:]])


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="also write the report there")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=cores, help="processes at once [%(default)s]")
    parser.add_argument("--only", default="", help="cases whose name or schedule has this in it")
    parser.add_argument("--once", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        error, limit = once(args.once, args.folder)
        print(f"error {error:.1e}, limit {limit:.1e}", flush=True)
        return int(not error <= limit)
    names = [n for n, of in CASES.items() if args.only in n or args.only in of["schedule"]]
    report, failed = [], 0
    with tempfile.TemporaryDirectory(prefix="ecornn-sanitize-") as folder:
        with ProcessPoolExecutor(args.jobs, get_context("spawn")) as builders:
            for name, built in [(n, builders.submit(build, n, folder)) for n in names]:
                if (error := built.exception()) is not None:
                    print(f"FAILED to build {name}: {error}", flush=True)
        with ThreadPoolExecutor(args.jobs) as threads:
            runs = [(n, t, threads.submit(checked, n, t, folder)) for n in names for t in TOOLS]
            for name, tool, run in runs:
                good, said = run.result()
                failed += not good
                what = {k: v for k, v in CASES[name].items() if v}
                report.append(f"{'clean' if good else 'FAILED'} {tool} {name}: {said}\n    {json.dumps(what)}")
                print(report[-1], flush=True)
    report.append(f"{len(runs)} runs, {failed} not clean")
    print(report[-1])
    if args.output:
        args.output.write_text("\n".join(report) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

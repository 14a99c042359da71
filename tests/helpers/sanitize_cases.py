"""The layers that tests/sanitize.py runs: of every schedule, cut in several ways."""

from typing import Any


def case(schedule: str, cell: str, dtype: str, sizes: tuple[int, int, int, int], config: dict[str, Any] | None = None,
         **stack: Any) -> dict[str, Any]:
    """One layer: sizes T, B, I, H; a configuration is completed by the schedule's default."""
    return {"schedule": schedule, "cell": cell, "dtype": dtype, "sizes": sizes, "config": config or {}, "stack": stack}


def persistent(cell: str, dtype: str, sizes: tuple[int, int, int, int], cut: tuple[int, int, int, int],
               chains: int, registers: int, interleave: int, ahead: int, math: str, fences: str = "products",
               carrier: str = "l2", hoisted: str = "float32") -> dict[str, Any]:
    names = ("groups", "units", "warps", "gate_warps")
    return case("persistent", cell, dtype, sizes, {
        **dict(zip(names, cut, strict=True)), "chains": chains, "registers": registers, "interleave": interleave,
        "ahead": ahead, "fences": fences, "carrier": carrier, "hoisted": hoisted, "math": math})


def block(cell: str, dtype: str, sizes: tuple[int, int, int, int], products: str, rows: int, units: int, lanes: int,
          registers: int, math: str, hoisted: str = "float32", cluster: int = 1, heads: int = 1) -> dict[str, Any]:
    return case("persistent_block", cell, dtype, sizes, ({"heads": heads} if "heads" in cell else {}) | {
        "products": products, "rows": rows, "units": units, "lanes": lanes, "registers": registers, "resident": 1,
        "cluster": cluster, "hoisted": hoisted, "math": math})


def wide(cell: str, dtype: str, sizes: tuple[int, int, int, int], groups: int, units: int, registers: int,
         parts: int = 1, row_teams: int = 1, hoisted: str = "float32", **streamed: int) -> dict[str, Any]:
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
    "scan": case("scan", "leaky", "bfloat16", (37, 5, 24, 24), {"units": 4, "prefetch": 16, "chunks": 8}),
    "scan masks": case("scan", "decay", "float32", (37, 5, 24, 71), {"prefetch": 8, "group": 4, "chunks": 4},
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

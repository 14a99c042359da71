"""The block kernel, emulated on the CPU: every way in which a layer can be cut."""

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from cuda_on_cpu import Emulated, Fault, inputs
from emulated import check_numbers, known_by_name, task_of
from exact import relative
from msgspec.structs import replace
from published.heads import BlockGRU
from smaller_matrices import BlockRNN

from ecornn.schedules.persistent_block import PersistentBlock
from ecornn.targets import KNOWN
from ecornn.workload import ALONE, Traversal

SMALL = replace(KNOWN["sm_90a"], cores=6)
CUT = {"products": "fma", "rows": 1, "units": 1, "lanes": 2, "registers": 100, "resident": 1, "cluster": 1,
       "hoisted": "float32", "math": "exact"}
MMA, WGMMA = {"products": "mma", "lanes": 1}, {"products": "wgmma", "lanes": 1}

CASES: list[Any] = [  # cell, sizes, data type, changed knobs
    ("lstm", (5, 1, 24, 64), "float32", {"math": "relative"}),
    ("lstm", (7, 3, 5, 17), "float32", {"lanes": 4, "rows": 3}),  # three rows that all lanes add
    ("lstm", (4, 70, 6, 5), "float16", {"rows": 8}),  # blocks in turns, the last one of six rows
    ("lstm", (3, 13, 6, 20), "tf32", {"rows": 6, "lanes": 4, "units": 2, "registers": 50}),
    ("gru", (4, 4, 3, 40), "bfloat16", {"rows": 2, "lanes": 8, "registers": 0}),
    ("rnn_tanh", (1, 3, 9, 33), "float32", {"rows": 3, "lanes": 1}),  # one sum a thread, in chains
    ("rnn_relu", (1, 1, 1, 1), "float16", {"lanes": 1}),
    ("gru_reset_before", (4, 5, 9, 20), "float32", {"rows": 4, "units": 4, "lanes": 4}),  # two phases
    ("pair", (4, 3, 24, 40), "bfloat16", {"rows": 2}),  # products of two operands
    ("slstm", (5, 3, 24, 40), "float16", {"math": "fast"}),
    ("lstm", (5, 1, 24, 64), "float16", MMA | {"units": 2, "hoisted": "same"}),  # a row in all columns
    ("lstm", (7, 3, 5, 17), "bfloat16", MMA | {"rows": 2, "math": "approx"}),
    ("lstm", (4, 70, 6, 5), "tf32", MMA | {"rows": 12}),  # two tiles, blocks in turns
    ("gru", (4, 7, 3, 40), "float16", MMA | {"rows": 7, "hoisted": "same"}),  # one tile, three products; odd values
    ("gru", (3, 3, 3, 40), "float16", MMA | {"rows": 3, "units": 4, "registers": 50}),
    ("lstm", (4, 4, 9, 20), "float32", MMA | {"rows": 4}),
    ("rnn_tanh", (6, 9, 5, 24), "bfloat16", MMA | {"rows": 9, "registers": 0}),
    ("gru_reset_before", (4, 5, 9, 20), "float16", MMA | {"rows": 1, "units": 2}),
    ("pair", (4, 3, 24, 40), "bfloat16", MMA | {"rows": 2}),
    ("lstm", (5, 1, 24, 64), "float16", WGMMA | {"units": 2}),
    ("gru", (7, 3, 5, 17), "bfloat16", WGMMA | {"rows": 3, "units": 2}),
    ("lstm", (4, 13, 5, 40), "float16", WGMMA | {"rows": 13, "hoisted": "same"}),
    ("pair", (4, 3, 24, 40), "bfloat16", WGMMA | {"rows": 2}),
    ("gru_reset_before", (3, 6, 5, 20), "bfloat16", WGMMA | {"rows": 6}),
    ("lstm", (5, 9, 6, 32), "float16", MMA | {"rows": 9, "cluster": 2, "hoisted": "same"}),  # two units a word
    ("lstm", (3, 6, 5, 32), "float32", MMA | {"rows": 6, "cluster": 4}),  # a unit a word
]
TRAVERSALS: list[Any] = [
    ("lstm", (7, 5, 9, 17), "float32", {"rows": 2}, Traversal(True, 2, True, True)),
    ("lstm", (7, 5, 9, 17), "float16", {"rows": 2}, Traversal(False, 1, True, True)),
    ("gru", (7, 5, 17, 24), "bfloat16", MMA | {"rows": 5}, Traversal(False, 2, True, True)),
    ("gru_reset_before", (6, 10, 9, 20), "float16", MMA | {"rows": 4}, Traversal(True, resets=True)),
    ("lstm", (12, 9, 7, 20), "float16", {"rows": 3, "hoisted": "same"}, Traversal(sequences=True)),
    ("gru", (12, 9, 7, 20), "bfloat16", MMA | {"rows": 6, "hoisted": "same"}, Traversal(True, 2, sequences=True)),
    ("gru", (12, 9, 7, 32), "float16", MMA | {"rows": 9, "cluster": 2}, Traversal(sequences=True)),
    # a head a block, or several; of any number of units by multiply-adds, of whole eights on tensor cores
    ("slstm(heads=2)", (5, 3, 9, 64), "float16", {"rows": 1, "math": "fast", "hoisted": "same"}, ALONE),
    ("block_4", (4, 5, 4, 52), "float32", {"rows": 2, "heads": 2, "lanes": 4}, ALONE),  # two phases; idle threads
    ("block_2", (4, 5, 5, 48), "float16", MMA | {"rows": 2, "heads": 2}, ALONE),
    ("slstm(heads=2)", (4, 3, 9, 96), "float16", WGMMA | {"rows": 2, "heads": 2, "units": 2}, ALONE),  # 3 of 4 warps
    ("slstm(heads=2)", (7, 5, 9, 32), "bfloat16", MMA | {"rows": 2, "heads": 2}, Traversal(False, 2, True, True)),
    ("slstm(heads=2)", (4, 9, 9, 32), "float16", MMA | {"rows": 5, "cluster": 2}, ALONE),
]
MORE = [pytest.param(*case, marks=pytest.mark.exhaustive) for case in (
    ("gru", (4, 30, 5, 48), "bfloat16", MMA | {"rows": 12, "cluster": 3, "units": 2, "registers": 0}, ALONE),
    ("rnn_tanh", (1, 5, 3, 16), "tf32", MMA | {"rows": 5, "cluster": 2}, ALONE),
    ("lstm", (7, 13, 9, 32), "bfloat16", MMA | {"rows": 7, "cluster": 2}, Traversal(True, 2, True, True)),
    ("slstm(heads=3)", (4, 5, 6, 42), "tf32", {"rows": 3, "heads": 3, "lanes": 1, "units": 2, "registers": 25}, ALONE),
    ("block_3", (4, 3, 5, 30), "bfloat16", {"rows": 2, "heads": 1}, ALONE),
    ("block_4", (4, 3, 4, 96), "float16", MMA | {"rows": 1, "heads": 2, "hoisted": "same"}, ALONE),
    ("block_2", (3, 11, 4, 128), "bfloat16", MMA | {"rows": 9, "registers": 50}, ALONE),
    ("block_3", (4, 3, 5, 24), "float32", MMA | {"rows": 3, "heads": 3}, ALONE),
    ("block_2", (4, 10, 5, 48), "bfloat16", WGMMA | {"rows": 10, "heads": 1}, ALONE),
    ("block_2", (7, 5, 4, 30), "float16", {"rows": 2, "hoisted": "same"}, Traversal(True, 2, True, True)),
    ("slstm(heads=3)", (12, 9, 7, 21), "float16", {"rows": 3, "heads": 3}, Traversal(sequences=True)),
    ("slstm(heads=2)", (12, 9, 7, 32), "float16", MMA | {"rows": 4}, Traversal(True, sequences=True)),
    ("block_gru", (4, 11, 5, 64), "bfloat16", MMA | {"rows": 6, "cluster": 2, "hoisted": "same"}, ALONE),
    ("block_gru", (4, 7, 5, 64), "float32", MMA | {"rows": 5, "cluster": 2}, Traversal(True, 2, True, True)))]


BLOCKS = (*map(BlockRNN, (2, 3, 4)), BlockRNN(3, whole=True), BlockGRU())
known = known_by_name({cell.name: cell for cell in BLOCKS})


@pytest.mark.parametrize(("cell", "sizes", "dtype", "change", "traversal"), [
    *((*case, ALONE) for case in CASES), *TRAVERSALS, *MORE], ids=str)
def test_matches_float64(tmp_path, cell, sizes, dtype, change, traversal):
    check_numbers(tmp_path, PersistentBlock(), task_of(cell, sizes, dtype, SMALL, traversal), CUT | change)


@pytest.mark.parametrize(("cell", "sizes", "change", "traversal"), [
    ("lstm", (5, 9, 7, 17), {"rows": 2}, Traversal(True, 2, True, True, keep="gates")),
    ("block_gru", (5, 9, 7, 32), {"rows": 2, "heads": 2}, Traversal(keep="gates"))], ids=str)
def test_fewer_rows_than_compiled_and_what_is_kept(tmp_path, cell, sizes, change, traversal):
    check_numbers(tmp_path, PersistentBlock(), task_of(cell, sizes, "float16", SMALL, traversal), CUT | change, batch=3)


def test_another_batch():
    schedule, device = PersistentBlock(), KNOWN["sm_90a"]
    config = CUT | {"rows": 4, "resident": 2, "math": "relative"}
    for batch, expected in ((3, (3, 1)), (500, (4, 1)), (2000, (4, 2))):
        task = task_of("lstm", (9, batch, 64, 64), "float32", device)
        found = schedule.rebatched(config, 1000, task)
        assert (found["rows"], found["resident"]) == expected and schedule.check(task, found) is None


@pytest.mark.parametrize("products", ["fma", *(pytest.param(kind, marks=pytest.mark.exhaustive)
                                              for kind in ("mma", "wgmma"))])
def test_every_barrier_is_missed(tmp_path, products):
    """The one behind zeros, that behind the first state, and the step's; of warpgroups the fence before it, too."""
    task, count = task_of("lstm", (4, 3, 5, 24), "float16", SMALL), 5 if products == "wgmma" else 3
    config = CUT | {"products": products, "rows": 3, "lanes": 2 if products == "fma" else 1}
    assert PersistentBlock().check(task, config) is None
    program = PersistentBlock().program(task, PersistentBlock().plan(task, config))
    given = inputs("lstm", (4, 3, 5, 24), "float16", task.graph.parameters, tuple(task.graph.states))
    def run(dropped: int | None) -> Any:
        def change(text: str) -> str:
            sites = [*SITE.finditer(text, text.rindex('extern "C" __global__'))]
            assert len(sites) == count, [s[0] for s in sites]
            place = 0 if dropped is None else sites[dropped].start(1)
            return text if dropped is None else f"{text[:place]}//{text[place:]}"

        own = Path(tempfile.mkdtemp(dir=tmp_path))
        return Emulated(program, own, ordered=products == "wgmma", change=change).run(*given)[0]

    right = run(None).astype("float64")
    for dropped in range(count):
        try:
            y = run(dropped)
        except Fault:
            continue
        assert not relative(y, right) < 0.01, dropped


SITE = re.compile(r"^ *(\S*(?:cta_sync|__syncthreads|fence_proxy)\w*\()", re.M)


def test_what_does_not_fit_is_refused():
    schedule, device = PersistentBlock(), KNOWN["sm_90a"]
    for cell, sizes, dtype, why in (
            ("indrnn", (9, 3, 64, 64), "float16", "no recurrent product"),
            ("lstm(layer_norm)", (9, 3, 64, 64), "float16", "statistics"),
            ("lstm", (9, 3, 64, 256), "float16", "do not fit"), ("lstm", (9, 3, 64, 200), "float32", "do not fit"),
            ("block_3_whole", (9, 3, 4, 96), "float16", "different numbers of heads"),
            ("slstm(heads=8)", (9, 3, 64, 2048), "float16", "do not fit")):
        assert why in str(schedule.serves(task_of(cell, sizes, dtype, device)))
    of_heads = task_of("slstm(heads=8)", (9, 3, 64, 96), "float16", device)
    assert next(k.values for k in schedule.knobs(of_heads) if k.name == "heads") == (1, 2, 4, 8)
    assert "do not divide a head of 12" in str(schedule.check(of_heads, CUT | MMA))
    for hidden, dtype in ((64, "float32"), (128, "float16"), (128, "bfloat16"), (96, "tf32")):
        assert schedule.serves(task_of("lstm", (9, 3, 64, hidden), dtype, device)) is None
    task = task_of("lstm", (9, 32, 64, 64), "float32", device)
    knobs = {knob.name: knob.values for knob in schedule.knobs(task)}
    assert knobs["products"] == ("fma", "mma") and knobs["rows"] == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    assert schedule.check(task, CUT) is None
    for change, why in (({"products": "mma"}, "products=fma"), ({"lanes": 1}, "registers per"),
                        ({"resident": 2}, "resident=2 is of no use"), ({"lanes": 32}, "part of K"),
                        ({"rows": 32, "lanes": 1}, "items"),
                        ({"registers": 75, "lanes": 16, "units": 4, "rows": 1}, "into registers")):
        assert why in str(schedule.check(task, CUT | change))
    other = task_of("rnn_tanh", (9, 3, 64, 100), "float32", device)
    assert "1600 threads" in str(schedule.check(other, CUT | {"lanes": 16}))

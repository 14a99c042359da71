"""The persistent schedule's layouts, by doing in NumPy what the tensor cores do with them."""

from __future__ import annotations

import numpy as np
import pytest

from ecornn.analysis import analyse
from ecornn.cells import BUILTIN
from ecornn.schedules.base import Task
from ecornn.schedules.cuda.isa.tensor_core import per_word
from ecornn.schedules.persistent import Persistent
from ecornn.schedules.persistent.exchange import word_of
from ecornn.schedules.persistent.plan import packing_of
from ecornn.targets import resolve
from ecornn.workload import Workload


def pack(packing, parameters):
    """Packing as program.py defines it, in float64."""
    stacked = np.stack([parameters[name][gate] if name else np.zeros_like(next(iter(parameters.values()))[0])
                        for name, gate in packing.sources])
    full = np.zeros(packing.pad)
    full[tuple(slice(0, s) for s in stacked.shape)] = stacked
    return full.reshape(packing.split).transpose(packing.order).copy()


def task_of(cell, hidden, batch, dtype):
    return Task(Workload(cell, hidden, hidden, batch, 4, dtype), analyse(BUILTIN[cell], hidden, hidden),
                resolve("sm_90a"))


# 13 and 65 are off every tile, 40 leaves the last block without all of its units
@pytest.mark.parametrize("hidden,batch", [(13, 3), (40, 9), (65, 20)])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("cell", ["lstm", "gru", "gru_reset_before", "rnn_tanh"])
def test_fragments_multiply_to_the_product(cell, dtype, hidden, batch):
    rng = np.random.default_rng(hidden)
    task = task_of(cell, hidden, batch, dtype)
    plan = Persistent().plan(task, Persistent().default(task))
    parameters = {n: rng.standard_normal(s) for n, s in task.graph.parameters.items()}
    n = per_word(dtype)
    for index, phase in enumerate(plan.phases):
        rows = task.graph.phases[index].products
        h = rng.standard_normal((plan.groups * plan.columns, hidden))
        expected = np.einsum("bk,gjk->bgj", h, np.stack([parameters[r.term.parameter][r.term.gate] for r in rows]))
        exchange = np.zeros((plan.groups, plan.slot_words(phase), n))
        for group in range(plan.groups):
            for column in range(plan.columns):
                for unit in range(hidden):
                    word = word_of(plan, phase, 0, unit - unit % n, column)
                    exchange[group, word, unit % n] = h[group * plan.columns + column, unit]
        words = exchange.reshape(plan.groups, phase.operands, plan.warps, phase.warp_pairs, plan.tiles, 8, 4, 4, n)
        octets = phase.octets(plan.units)
        weights = pack(packing_of(task, plan, index), parameters).reshape(
            plan.blocks, plan.warps, phase.operands, phase.warp_pairs, octets, 8, 4, 4, n)
        # lane (row or column, quarter) and its four words: the sum over a fragment is over quarter, word, value
        product = np.einsum("bwopvrqcn,gowptmqcn->gtmbvr", weights, words)
        product = product.reshape(plan.groups * plan.columns, plan.blocks, octets, 8)
        e = phase.interleave
        for g in range(len(rows)):
            for unit in range(hidden):
                block, local = divmod(unit, plan.units)
                row = (g // e * plan.units * e + local // (8 // e) * 8 + local % (8 // e) * e + g % e)
                found = product[:, block, row // 8, row % 8]
                # the same float64 terms in another order: a word in the wrong place is off by whole terms
                np.testing.assert_allclose(found, expected[:, g, unit], rtol=1e-12, atol=1e-12)


def test_every_word_has_one_place():
    task = task_of("lstm", 65, 20, "float16")
    plan = Persistent().plan(task, Persistent().default(task))
    places = [word_of(plan, plan.phases[0], 0, unit, column)
              for unit in range(0, 65, 2) for column in range(plan.columns)]
    assert len(set(places)) == len(places)
    assert min(places) >= 0 and max(places) < plan.slot_words(plan.phases[0])


@pytest.mark.parametrize("cell,hidden,batch,dtype", [
    ("lstm", 2048, 1, "bfloat16"),  # 33.6 MB of the 63 MB on chip
    ("gru", 1536, 16, "float16"), ("lstm", 800, 20, "float32"), ("rnn_tanh", 1, 1, "float16")])
def test_default_configuration_is_valid(cell, hidden, batch, dtype):
    task = task_of(cell, hidden, batch, dtype)
    schedule = Persistent()
    assert schedule.serves(task) is None
    assert schedule.check(task, schedule.default(task)) is None


def test_weights_beyond_the_chip_are_refused_with_a_reason():
    reason = Persistent().serves(task_of("lstm", 4096, 1, "bfloat16"))
    assert reason is not None and "do not fit" in reason


@pytest.mark.parametrize("change,reason", [
    ({"units": 2}, "blocks on"),
    ({"units": 21}, "multiple of")])
def test_impossible_configurations_are_named(change, reason):
    task = task_of("lstm", 800, 20, "bfloat16")
    schedule = Persistent()
    found = schedule.check(task, {**schedule.default(task), **change})
    assert found is not None and reason in found

"""Products of pairs on CPUs: values against float64 for every cell and kind of row, and what is packed for them."""

import msgspec.structs
import numpy as np
import pytest
from cpu_sample import ALL_GATES, Sample, rows_that_fit
from exact import relative as error
from numpy_packing import pack
from pairwise import halved
from rooms import ROOT
from step_cells import Chain, Residual
from test_cpu import LIMIT, SIZES, compare
from test_cpu_weights import needs_vnni

import ecornn
from ecornn.errors import NotFiniteError
from ecornn.numpy_reference import STEPS
from ecornn.program import Packing
from ecornn.schedules.cpu import CPUSequence
from ecornn.targets import resolve
from ecornn.task import make_task
from ecornn.tune.choose import choose
from ecornn.tune.log import read
from ecornn.workload import Workload

BOTH = [(3, 3), (4, 4), (0, 3), (3, 0)]


def small(gates: int, rows: int = 2, **more: int) -> dict[str, int]:
    return {"rows": rows_that_fit(rows, gates, pairs=3), "columns": gates,
            "project_rows": rows_that_fit(2, gates, pairs=3), "project_columns": gates, **ALL_GATES, **more}


def gates(cell: str) -> int:
    return {"lstm": 4, "slstm": 4, "gru": 3, "gru_reset_before": 3}.get(cell, 1)


@pytest.mark.parametrize(("cell", "size"), halved(list(STEPS), SIZES))
def test_cells(cell, size, tmp_path):
    if cell == "indrnn":
        sample = Sample(tmp_path, cell, *size, project_rows=2, project_columns=1, project_pairs=3)
    else:
        sample = Sample(tmp_path, cell, *size, **small(gates(cell), 1 + size[2] // 2, pairs=3, project_pairs=4))
    compare(sample, size[3], size[2])


@pytest.mark.parametrize(("pairs", "project_pairs"), BOTH)
@pytest.mark.parametrize("cell", ["gru", "rnn_tanh"])
def test_either_product(cell, pairs, project_pairs, tmp_path):
    sample = Sample(tmp_path, cell, 70, 130, 5, 9,
                    **small(gates(cell), pairs=pairs, project_pairs=project_pairs, chunk=4))
    for steps, batch, threads in ((9, 5, 2), (1, 1, 1), (6, 3, 3)):
        compare(sample, steps, batch, threads=threads)


@pytest.mark.parametrize(("cell", "rows", "columns"), [("lstm", 1, 4), ("gru", 1, 3), ("rnn_tanh", 3, 2)])
def test_vectors_of_256_bits(cell, rows, columns, tmp_path):
    sample = Sample(tmp_path, cell, 33, 101, 4, 6, features=("avx", "avx2", "fma"), pairs=3, project_pairs=4,
                    rows=rows, columns=columns, project_rows=rows, project_columns=columns)
    compare(sample, 6, 4)


@pytest.mark.parametrize("cell", [Chain(), Residual()], ids=lambda c: c.name)
def test_cells_of_a_user(cell, tmp_path):
    compare(Sample(tmp_path, cell, 32, 32, 3, 4, pairs=3, project_pairs=3, rows=2, columns=1, project_rows=2,
                   project_columns=1), 4, 3)


def product_of(folder, x: np.ndarray, hidden: int, scale: float = 1.0,
               **config: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """W x as computed, for rows x (B, I), and in float64, and W: a relu layer on one step, twice, for either sign."""
    folder = folder / "-".join(map(str, config.values()))  # two files of one name would be one module
    folder.mkdir()
    sample = Sample(folder, "rnn_relu", x.shape[1], hidden, x.shape[0], 1, rows=2, columns=1, project_rows=2,
                    project_columns=1, **config)
    for value in sample.parameters.values():
        if value.ndim == 2:
            value[...] = 0  # biases
    weights = next(v[0] for v in sample.parameters.values() if v.ndim == 3)
    weights *= np.float32(scale)
    zeros = [np.zeros((x.shape[0], hidden), np.float32)]
    found = sample(x[None], zeros)[0][0] - sample(-x[None], zeros)[0][0]
    return found, x.astype(np.float64) @ weights.astype(np.float64).T, weights


def norm(rows: np.ndarray) -> np.ndarray:
    return np.linalg.norm(rows.astype(np.float64), axis=1)


K = 501


def rows_of(kind: str) -> np.ndarray:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((4, K))
    return {"normal": x, "with a mean": x + 3, "positive": np.abs(x), "uniform": rng.random((4, K)), "tiny": x * 1e-20,
            "huge": x * 1e20, "of all sizes": x * np.array([[1e-15], [1e-3], [1.0], [1e12]]),
            "half zeros": np.maximum(x, 0), "one hot": np.eye(4, K), "one large value": x + 500 * np.eye(4, K),
            "zeros": x * 0, "constant": np.ones((4, K))}[kind].astype(np.float32)


@pytest.mark.parametrize("pairs", [3, 4])
@pytest.mark.parametrize("kind", ["normal", "with a mean", "positive", "uniform", "tiny", "huge", "of all sizes",
                                  "half zeros", "one hot", "one large value", "zeros", "constant"])
def test_error_of_a_product(kind, pairs, tmp_path):
    """Relative to the norms of a row and of the weights; rows of few large values are multiplied in the plain way."""
    x = rows_of(kind)
    found, expected, weights = product_of(tmp_path, x, 40, project_pairs=pairs)
    sparse = kind in ("one hot", "one large value", "zeros")
    size = norm(expected) if sparse else norm(x) * np.linalg.norm(weights) / np.sqrt(K)
    assert (norm(found - expected) <= LIMIT * size).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_spoils_no_other(bad, tmp_path):
    x = rows_of("normal")
    x[1, 5] = bad
    found, expected, _ = product_of(tmp_path, x, 40, project_pairs=3)
    plain = product_of(tmp_path, x, 40, project_pairs=0)[0]
    np.testing.assert_array_equal(found[1], plain[1])  # as without pairs: infinities keep their signs
    fine = [0, 2, 3]
    assert error(found[fine], expected[fine]) < LIMIT


@pytest.mark.parametrize("scale", [1e-40, 1e-37, 1e-33, 1e-20, 1e20, 1e33, 1e36])
def test_weights_of_all_sizes(scale, tmp_path):
    """Unless they are scaled, their pairs' products leave the range of floats."""
    x = rows_of("normal")
    found, expected, weights = product_of(tmp_path, x, 40, scale, project_pairs=3)
    size = norm(x) * np.linalg.norm(weights.astype(np.float64)) / np.sqrt(K)
    assert (norm(found - expected) <= LIMIT * size + 1e-43 * np.sqrt(K)).all()


@pytest.mark.parametrize("weights", [None, pytest.param("int8", marks=needs_vnni), "int16", "int21"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, 1e39])
def test_infinite_weights_are_refused_where_they_would_make_nan(weights, value):
    """An input gate that an infinite weight closes is 0; NaN remains NaN, of its own unit."""
    module = ecornn.compile("gru", hidden=24, input=10, weights=weights, batch=2, seq=3, target="cpu",
                            config=None if weights else small(3, pairs=3, project_pairs=3))
    given = {p.name: np.full(p.shape, 0.1) for p in module.manifest.parameters}
    given["bias_ih_l0"][0] = value
    module.bind(given)  # biases are not multiplied
    for name in ("weight_ih_l0", "weight_hh_l0"):
        given[name][5, 3] = value
        with pytest.raises(NotFiniteError, match=rf"weights\['{name}'\]"):
            module.bind(given)
        given[name][5, 3] = np.nan
    y = module.bind(given)(np.ones((1, 2, 10), np.float32))[0]
    assert np.isnan(y[..., 5]).all() and np.isfinite(np.delete(y, 5, 2))[..., 1:].all()


def test_result_does_not_depend_on_threads(tmp_path):
    sample = Sample(tmp_path, "lstm", 30, 70, 4, 6, **small(4, pairs=3, project_pairs=3))
    x, states = sample.inputs(6, 4)
    first = sample(x, states, threads=1)[0]
    for threads in (2, 5):
        np.testing.assert_array_equal(sample(x, states, threads=threads)[0], first)


def test_packed_sums_and_powers():
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((1, 3, 12)).astype(np.float32) * np.array([1e-6, 1, 1e5], np.float32)[:, None]
    weights[0, 1] = 0
    sources, pad = (("w", 0),), (1, 3, 12)
    def made(dtype: str, split: tuple[int, ...]) -> np.ndarray:
        return pack(Packing(sources, pad, split, tuple(range(len(split))), dtype), {"w": weights})
    powers, balanced = made("balance", pad), made("balanced", pad)
    np.testing.assert_array_equal(balanced * powers[..., None], weights)
    np.testing.assert_array_equal(np.frexp(powers)[0], 0.5)
    mean = np.abs(balanced).mean(-1)[0]
    assert mean[1] == 0 and powers[0, 1] == 1 and ((mean[[0, 2]] >= 1) & (mean[[0, 2]] < 2)).all()
    sections, signs = balanced.reshape(1, 3, 3, 4).astype(np.float64), np.array([-1, 1, -1, 1])
    np.testing.assert_allclose(made("pairs", (1, 3, 3, 4)), (sections[..., 0, :] * sections[..., 1, :] * signs).sum(-1),
                               rtol=1e-6)


def test_what_pairs_are_for():
    work = Workload("gru", 800, 800, 20, 30)
    zen, other = resolve("znver4"), resolve("sapphirerapids")
    schedule, cell = CPUSequence(), ecornn.cells.get("gru")
    assert schedule.default(make_task(cell, work, zen))["pairs"]
    one = schedule.default(make_task(cell, msgspec.structs.replace(work, batch=1), zen))
    assert not one["pairs"] and not one["project_pairs"], "one batch row is bound by bytes"
    assert not schedule.default(make_task(cell, work, other))["pairs"]
    rounded = make_task(cell, msgspec.structs.replace(work, weights="bfloat16"), zen)
    config = schedule.default(rounded)
    assert not config["pairs"] and not config["project_pairs"]
    assert "float32 weights" in schedule.check(rounded, {**config, **small(3, pairs=3)})


def test_stack_with_lengths():
    module = ecornn.compile("lstm", hidden=24, input=10, layers=2, bidirectional=True, lengths=True, batch=5, seq=6,
                            target="cpu", config=small(4, pairs=3, project_pairs=4, unroll=2, chunk=4))
    rng = np.random.default_rng(0)
    weights = {p.name: rng.uniform(-0.3, 0.3, p.shape).astype(np.float32) for p in module.manifest.parameters}
    x, lengths = rng.standard_normal((6, 5, 10)).astype(np.float32), [6, 1, 3, 0, 5]
    y, states = module.bind(weights)(x, lengths=lengths)
    wanted, last = ecornn.reference("lstm", x, weights, lengths=lengths)
    assert error(y, wanted) < LIMIT
    for found, state in zip(states, last, strict=True):
        assert error(found, state) < LIMIT


def test_records_from_before_pairs_count():
    """They ship, and lack the knobs: the code with these off is the code that was measured."""
    log = read(ROOT / "tuning_logs" / "epyc-znver4.jsonl.xz")
    task = make_task(ecornn.cells.get("gru"), Workload("gru", 512, 512, 16, 100), log.trials()[0].device)
    found = choose(task, None, None, log)
    assert found.provenance.startswith("record epyc-znver4.jsonl.xz")
    assert {found.config[knob] for knob in ("pairs", "project_pairs", "team")} == {0}

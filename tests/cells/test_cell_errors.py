"""Errors in a user's cell point at the user's line."""

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import step_cells
from refusals import refused
from step_cells import Given
from tvm import te, tirx, topi

import ecornn
from ecornn.analysis import analyse
from ecornn.bench.step_loop import torch_step
from ecornn.cells import Cell, get, pointwise, product
from ecornn.cli.step_text import step_text
from ecornn.compiler import plan_layer
from ecornn.errors import CellError
from ecornn.interpreter import interpret
from ecornn.layer_spec import LayerSpec
from ecornn.workload import SINGLE, Workload

DEEP = r"cell 'faulty.*: its step is a longer chain.*sys\.setrecursionlimit"


def faulty(step: Any) -> Given:
    return Given(step, lambda input, hidden: {"W": (1, hidden, input), "R": (1, hidden, hidden), "b": (1, hidden)},
                 name="faulty", unread=("W", "R", "b"))


def over(size: int, value: Any, reduce: Any = te.sum, **options: Any) -> Any:
    k = te.reduce_axis((0, size), "k")
    return reduce(value(k), axis=k, **options)


def less(h: Any, number: Any, row: Any = lambda b: b) -> Any:
    return [pointwise(lambda b, j: h[b, j] - number[row(b)], h)]


def neighbour(x: Any, h: Any, p: Any) -> Any:
    good = product(h, p["R"], 0)
    bad = pointwise(lambda b, j: h[b, 0], h)  # here
    return [pointwise(lambda b, j: good[b, j] + bad[b, j], h)]


def residual(x: Any, h: Any, p: Any) -> Any:
    return [te.compute(h.shape, lambda b, j: h[b, j] + x[b, j])]  # here


def narrow_value(x: Any, h: Any, p: Any) -> Any:
    narrow = te.compute((h.shape[0], 4), lambda b, j: te.tanh(h[b, j]), name="narrow")
    return [pointwise(lambda b, j: h[b, j] + narrow[b, j], h)]  # here


def extern(x: Any, h: Any, p: Any) -> Any:
    made = te.extern(h.shape, [h], lambda i, o: tirx.call_packed("own", i[0], o[0]), name="made")  # here
    return [pointwise(lambda b, j: te.tanh(made[b, j]), h)]


def scanned(x: Any, h: Any, p: Any) -> Any:
    before = te.placeholder(h.shape, "float32")
    first = te.compute((1, h.shape[1]), lambda _, j: te.const(0.0, "float32"))
    return [te.scan(first, te.compute(h.shape, lambda t, j: before[t - 1, j]), before, name="made")]  # here


WRONG: dict[str, tuple[Any, str]] = {
    "unknown": (lambda x, h, p: [pointwise(lambda b, j: h[b, j] + p["weights"][0, j], h)],  # here
                "KeyError: 'weights'"),
    "wide": (lambda x, h, p: [te.compute((h.shape[0], 2), lambda b, j: h[b, j])],  # here
             "expected (B, H)"),
    "wrong_weight": (lambda x, h, p: [product(h, p["W"], 0)],  # here
                     "sums 6 terms of h, which has 6 values per row, with W, whose rows have 4"),
    "no_such_gate": (lambda x, h, p: [product(h, p["R"], 3)],  # here
                     "there is no gate 3 of R, which has 1"),
    "no_such_vector": (lambda x, h, p: [te.compute(h.shape, lambda b, j: h[b, j] + p["b"][1, j])],  # here
                       "there is no gate 1 of b, which has 1"),
    "condition": (lambda x, h, p: [pointwise(lambda b, j: h[b, j] > 0.0, h)],  # here
                  "new state 'h' is a condition; expected a value, such as tirx.Select"),
    "constant": (lambda x, h, p: [pointwise(lambda b, j: 0.5, h)],  # here
                 "'h' is a constant"),
    "no_number": (lambda x, h, p: [product(h, p["R"], 0.5)],  # here
                  "gates=0.5): gates must be an integer, or a sequence of integers"),
    "one_index": (lambda x, h, p: [pointwise(lambda b, j: h[b], h)],  # here
                  "Need to provide 2 index in tensor but 1 was provided"),
    "by_topi": (lambda x, h, p: [topi.matmul(h, p["R"])],  # here
                "Tensor dimension mismatch"),
    "no_gates": (lambda x, h, p: [product(h, p["R"], ())],  # here
                 "at least one gate is needed"),
    "started": (lambda x, h, p: [te.compute(h.shape, lambda b, j: over(  # here
        6, lambda k: h[b, k] * p["R"][0, j, k], init=te.const(1.0, "float32")))], "is neither a product"),
    "largest_product": (lambda x, h, p: [te.compute(h.shape, lambda b, j: over(  # here
        6, lambda k: h[b, k] * p["R"][0, j, k], te.max))], "is neither a product"),
    "transposed": (lambda x, h, p: [te.compute(h.shape, lambda b, j: over(  # here
        6, lambda k: h[b, k] * p["R"][0, k, j]))], "is neither a product"),
    "constant_in_a_product": (lambda x, h, p: [te.compute(h.shape, lambda b, j: over(  # here
        6, lambda k: 2.0 * h[b, k] * p["R"][0, j, k]))], "is neither a product sum_k source[b, k] * weight[gate"),
    "part_of_a_row": (lambda x, h, p: [te.compute(h.shape, lambda b, j: over(  # here
        3, lambda k: h[b, k] * p["R"][0, j, k]))],
        "sums 3 terms of h, which has 6 values per row, with R, whose rows have 6"),
    "wide_operand": (lambda x, h, p: [te.compute(h.shape, lambda b, j: over(  # here
        12, lambda k: te.compute((h.shape[0], 12), lambda b, j: h[b, j])[b, k] * p["R"][0, j, k]))],
        "sums 12 terms of compute, which has 12 values per row, with R, whose rows have 6"),
    "smallest": (lambda x, h, p: less(h, te.compute(h.shape[:1], lambda b: over(6, lambda k: h[b, k], te.min))),  # here
                 "is neither a sum"),
    "half": (lambda x, h, p: less(h, te.compute(h.shape[:1], lambda b: over(3, lambda k: h[b, k]))),  # here
             "is neither a sum"),
    "other_row": (lambda x, h, p: less(h, te.compute(h.shape[:1], lambda b: over(6, lambda k: h[b, k])),  # here
                                       lambda b: 0), "is neither a sum"),
    "of_parameters": (lambda x, h, p: less(h, te.compute(h.shape[:1], lambda b: over(  # here
        6, lambda k: p["b"][0, k]))), "neither x nor a state"),
    "constant_in_a_sum": (lambda x, h, p: less(h, te.compute(h.shape[:1], lambda b: over(  # here
        6, lambda k: te.const(1.0, "float32")), name="count")), "the sum 'count' has a term that is a constant"),
    "remainder": (lambda x, h, p: [pointwise(lambda b, j: tirx.Cast("float32", tirx.truncmod(  # here
        tirx.Cast("int32", h[b, j]), 3)), h)], "Mod, which cannot be scheduled"),
    "no_value": (lambda x, h, p: [pointwise(lambda b, j: None, h)],  # here
                 "function(b, j) returned None; expected one or several values, such as h[b, j]"),
    "constant_operand": (lambda x, h, p: [product(pointwise(  # here
        lambda b, j: te.const(0.5, "float32"), h), p["R"], 0)], "the factor pointwise of a product is a constant"),
    "narrow_operand": (lambda x, h, p: [product(te.compute((3, 4), lambda b, j: te.tanh(h[b, j])), p["W"], 0)],  # here
                       "h[b, j] is combined with 4 values per row; values narrower than H can only"),
    "no_such_part": (lambda x, h, p: [pointwise(lambda b, j: te.compute(  # here
        (3, 2, 6), lambda b, g, j: h[b, j], name="parts")[b, 2, j], h)],
        "there is no parts[b, 2, j]; its shape is (3, 2, 6)"),
    "own_placeholder": (lambda x, h, p: [pointwise(lambda b, j: te.placeholder(  # here
        h.shape, "float32", name="other")[b, j] + h[b, j], h)], "other is not an argument of step()"),
    "computed_weight": (lambda x, h, p: [product(h, te.compute(  # here
        p["R"].shape, lambda g, j, k: p["R"][g, j, k] - p["R"][g, k, j]), 0)],
        "The weight must be a parameter itself; compute others in derived()")}


@pytest.mark.parametrize(("step", "words"), [
    *(pytest.param(*case, id=name) for name, case in WRONG.items()),
    (extern, "made is a ExternOp; only te.compute is supported"),
    (scanned, "made is a ScanOp; only te.compute is supported"), (narrow_value, "narrow has 4 values per row"),
    (residual, "outside a product needs I = H; here I = 4 and H = 6"), (neighbour, "must be read at [b, j]")])
def test_errors_point_at_the_line(step: Any, words: str):
    with pytest.raises(CellError) as caught:
        analyse(faulty(step), 4, 6)
    assert caught.value.at is not None and words in str(caught.value)
    file, line = caught.value.at
    source = Path(__file__).read_text().splitlines()
    assert Path(file) == Path(__file__) and source[line - 1].endswith("# here")
    assert f"{file}:{line}: {source[line - 1].strip()}" in str(caught.value)


def test_a_cell_that_reads_x_needs_an_input_of_its_own_size():
    cell = faulty(residual)
    ecornn.compile(cell, hidden=6, layers=2, target="cpu")
    refused(CellError, "I = 4 and H = 6", ecornn.compile, cell, hidden=6, input=4, target="cpu")
    with pytest.raises(CellError, match="I = 12 and H = 6"):  # the second layer's
        ecornn.compile(cell, hidden=6, layers=2, bidirectional=True, target="cpu")


def test_a_state_that_is_no_tensor():
    for made, words in ([3], "not a tensor: 3"), (None, "not a tensor: None"), ({"h": 1}, "not a tensor: {'h': 1}"), (
            [1, 2], "returned 2 tensors for 1 states"):
        with pytest.raises(CellError, match=words) as caught:
            analyse(faulty(lambda x, h, p, made=made: made), 4, 6)
        assert caught.value.at == (step_cells.__file__, Given.step.__code__.co_firstlineno)


def test_a_profiler_that_was_there_stays():
    def profiler(*_: Any) -> None:
        pass
    sys.setprofile(profiler)
    try:
        analyse(get("lstm"), 4, 6)
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)


def test_a_program_that_is_profiled_compiles_and_is_profiled_on():
    """A profiler of C cannot be set again: nothing is noted beside it."""
    import cProfile

    profile = cProfile.Profile()
    profile.enable()
    try:
        analyse(get("lstm"), 8, 8)
        with pytest.raises(CellError, match="must be read at"):
            analyse(faulty(neighbour), 8, 8)
    finally:
        profile.disable()
    assert any("analyse" in str(entry.code) for entry in profile.getstats())


def computed(value: Any) -> Any:
    def step(x: Any, h: Any, p: Any) -> Any:
        wx, rh, v = product(x, p["W"], 0), product(h, p["R"], 0), p["b"]
        return [pointwise(lambda b, j: value(wx[b, j] + rh[b, j] + v[0, j], b, j), h)]  # here
    return step


@pytest.mark.parametrize(("value", "words"), [
    (lambda v, b, j: te.fmod(v, te.const(2.0, "float32")), "uses fmod, which cannot be scheduled; use one of Add"),
    (lambda v, b, j: tirx.Select(te.isnan(v), v * v, v), "uses isnan, which cannot be scheduled"),
    (lambda v, b, j: v + tirx.Cast("float32", j), "computes with the index j"),
    (lambda v, b, j: tirx.Select(j < 2, v, v * v), "computes with the index j"),
    (lambda v, b, j: v * tirx.Cast("float32", b), "computes with the index b"),
    (lambda v, b, j: tirx.Cast("int32", v), "is int32; the values of a step must be float32"),
    (lambda v, b, j: v * te.const(2.0, "float64"), "is float64; the values of a step must be float32")])
def test_values_that_cannot_be_computed_point_at_the_line(value: Any, words: str):
    test_errors_point_at_the_line(computed(value), words)


@pytest.mark.parametrize(("changes", "words"), [
    ({"states": ()}, "states is (); expected a tuple of at least one name"),
    ({"states": "h"}, "states is 'h'; expected a tuple"),
    ({"states": ("my h",)}, "state 'my h': the name of a state has letters, digits and underscores"),
    ({"states": (3,)}, "state 3: the name"), ({"states": ("h", "h")}, "not all different"),
    ({"parameters": lambda input, hidden: {"W": (0, hidden, input)}}, "with G >= 1"),
    *(({"name": name}, f"cell {name!r}: a name has letters") for name in (None, "", "a-b", 3))])
def test_a_cell_and_states_have_names_and_parameters_a_gate(changes: dict[str, Any], words: str):
    cell = faulty(lambda x, h, p: [h] * len(cell.states))
    vars(cell).update(changes)
    refused(CellError, re.escape(words), analyse, cell, 4, 6)


def test_what_parameters_raises_is_an_error_of_the_cell():
    cell = faulty(lambda x, h, p: [h])
    cell.parameters = lambda input, hidden: {"R": (hidden // (hidden - 6), hidden, hidden)}
    with pytest.raises(CellError, match=r"parameters\(\) failed: ZeroDivisionError") as caught:
        analyse(cell, 4, 6)
    assert caught.value.at is not None


def test_a_function_of_a_unit_may_have_default_arguments():
    def step(x: Any, h: Any, p: Any) -> Any:
        made = product(h, p["R"], 0)
        return [pointwise(lambda b, j, made=made: te.tanh(made[b, j]), h)]
    assert len(analyse(faulty(step), 4, 6).phases) == 1


def test_a_cell_with_heads_has_an_identity():
    def parameters(input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        if hidden % 8:
            raise ValueError("H must be a multiple of 8")
        return {"R": (1, hidden, hidden)}
    cells = [faulty(lambda x, h, p: [product(h, p["R"], 0)]), faulty(lambda x, h, p: [product(h, p["R"], -1)]),
             faulty(lambda x, h, p: [pointwise(lambda b, j: te.tanh(h[b, j]), h)])]
    for cell in cells:
        cell.parameters = parameters
    first, same, other = (cell.identity() for cell in cells)
    assert first == same != other
    cells[0].parameters = lambda input, hidden: parameters(input, 3)
    with pytest.raises(CellError, match="H must be a multiple of 8"):
        cells[0].identity()


class Unread(Cell):
    name, states = "unread", ("h",)

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"W": (3, hidden, input),  # W
                "R": (1, hidden, hidden),
                "g": (1, hidden)}  # g

    def step(self, x: Any, states: Any, p: Any) -> Any:
        (h,) = states
        a, b, r = product(x, p["W"], 1), product(x, p["W"], 1), product(h, p["R"], 0)
        return [pointwise(lambda i, j: te.tanh(a[i, j] + b[i, j] * r[i, j]), h)]


@pytest.mark.parametrize(("unread", "words", "mark"), [
    (("g",), "step() does not read gates 0, 2 of parameter 'W', of shape (3, 6, 4)", "# W"),
    (("W",), "step() does not read parameter 'g', of shape (1, 6)", "# g")])
def test_parameters_that_are_not_read_are_named(unread: Any, words: str, mark: str):
    cell = Unread()
    cell.unread = unread
    with pytest.raises(CellError, match=re.escape(words)) as caught:
        analyse(cell, 4, 6)
    assert caught.value.at is not None
    file, line = caught.value.at
    assert Path(file) == Path(__file__) and Path(file).read_text().splitlines()[line - 1].endswith(mark)
    cell.unread = ("W", "g")
    assert analyse(cell, 4, 6)


def test_cells_that_differ_where_h_is_large_have_identities_of_their_own():
    def cell(most: int) -> Cell:
        return faulty(lambda x, h, p: [product(h if h.shape[1] < most else pointwise(
            lambda b, j: te.tanh(h[b, j]), h), p["R"], 0)])
    plain, same, wide, wider = (cell(most).identity() for most in (1 << 30, 1 << 29, 1000, 3000))
    assert plain == same and len({plain, wide, wider}) == 3


def in_one_expression(depth: int) -> Any:
    def step(x: Any, h: Any, p: Any) -> Any:
        def value(b: Any, j: Any) -> Any:
            made = h[b, j]
            for _ in range(depth):
                made = te.tanh(made)
            return made
        return [pointwise(value, h)]
    return step


def in_tensors(depth: int) -> Any:
    def step(x: Any, h: Any, p: Any) -> Any:
        for _ in range(depth):
            h = pointwise(lambda b, j, h=h: te.tanh(h[b, j]), h)
        return [h]
    return step


@pytest.mark.parametrize("behind_one_another", [in_one_expression, in_tensors])
def test_more_operators_than_pythons_stack_has_room_for(behind_one_another: Any):
    with pytest.raises(CellError, match=DEEP):
        analyse(faulty(behind_one_another(2000)), 3, 4)


@pytest.mark.parametrize("behind_one_another", [in_one_expression, in_tensors])
def test_the_deepest_step_that_is_analysed(behind_one_another: Any):
    """Whatever else walks it needs less of Python's stack, or says what analysis says of a deeper one."""
    fits, not_any_more = 1, 2000
    while not_any_more - fits > 1:
        depth = (fits + not_any_more) // 2
        try:
            analyse(faulty(behind_one_another(depth)), 4, 4)
            fits = depth
        except CellError:
            not_any_more = depth
    cell = faulty(behind_one_another(fits - 8))  # as many as their callers have frames more
    weights = {name: np.zeros(shape) for name, shape in cell.parameters(4, 4).items()}
    interpret(cell, np.zeros((2, 3, 4)), weights, [np.ones((3, 4))])
    work = Workload(cell="faulty", seq=2, batch=3, input=4, hidden=4, dtype="float32")
    assert cell.identity() and torch_step(cell, 4, 4, 3) and step_text(analyse(cell, 4, 4), work, SINGLE)
    layer = LayerSpec(cell=cell, hidden=4, batch=3, seq=2, training=True)
    for target in ("cpu", "sm_90a"):
        try:
            assert plan_layer(layer, target=target).programs()
        except CellError as error:
            assert re.search(DEEP, str(error))

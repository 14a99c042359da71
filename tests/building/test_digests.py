"""Generated code is what it was; where it is meant to change, ``python tests/digests.py --renew`` and say why."""

from __future__ import annotations

import digests
import pytest

LAYERS = {str(layer): layer for layer in digests.layers()}


@pytest.mark.parametrize("name", LAYERS)
def test_generated_code_is_unchanged(name: str):
    assert digests.digests_of(LAYERS[name]) == digests.kept()[name]


def test_the_file_has_these_layers_alone():
    assert len(LAYERS) == len(list(digests.layers())) and list(digests.kept()) == list(LAYERS)


def test_structure_ignores_names_alone():
    code = "float gate_3 = __expf(x[0]); y[i] = gate_3 + x[1];"
    renamed = code.replace("gate_3", "input_gate").replace("x[", "values[")
    assert digests.structure_of(code) == digests.structure_of(renamed)
    for other in (code.replace("x[1]", "x[0]"), code.replace("+", "-"), code.replace("= gate_3", "= i"),
                  code.replace("__expf", "__logf"), code.replace("float", "double")):
        assert digests.structure_of(code) != digests.structure_of(other)

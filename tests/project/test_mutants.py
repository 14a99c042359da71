"""The faults of ``mutants.py``: each is of a line that is there."""

from __future__ import annotations

import pytest
from mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_its_line_stands_once(mutant: Mutant):
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1 and mutant.old != mutant.new

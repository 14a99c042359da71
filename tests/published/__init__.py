"""Published cells as a user would write them, each with its formula in NumPy float64, apart from the te step.

By family: ``additive`` ones have no product of a state, ``continuous`` ones are steps of differential equations,
``attention`` has softmaxes over units. Parameters that a paper has as one scalar are vectors here."""

from published import additive, attention, continuous, grus, heads, lstms, memories, multiplicative, spiking
from published.base import Published

FAMILIES = (lstms, grus, multiplicative, additive, continuous, memories, attention, spiking, heads)
CELLS: dict[str, Published] = {
    kind.name: kind() for family in FAMILIES for kind in vars(family).values()
    if isinstance(kind, type) and issubclass(kind, Published) and kind.__module__ == family.__name__ and "name" in vars(
        kind)}

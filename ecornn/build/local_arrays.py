"""Large local arrays of CUDA source, as single variables.

TVM keeps accumulators and fragments in arrays, which end up in registers because every index is a constant. Finding
that out costs nvcc's optimiser the size of an array times the number of its uses, or the square of that number: most of
the time of a kernel with many products. Variables are registers from the start. Of some kernels ptxas then makes code
that differs in the order and choice of registers; so what compiles fast is left as it is.
"""

from __future__ import annotations

import re
from collections import Counter

WORK = 500_000  # sizes times uses, of all arrays of a source: a second of nvcc's time
EACH = 100_000  # of an array that counts
MANY = 4_500  # uses of one array: more than a second of it, too
_ARRAY = r"\w*_ptr(?:_\d+)?"
_DECLARED = re.compile(rf"^( *)alignas\(64\) (\w+) ({_ARRAY})\[(\d+)\];$", re.MULTILINE)
_USED = re.compile(rf"\b({_ARRAY})\[(\d+)\]")
_ELSE = re.compile(rf"&\(*({_ARRAY})\b|\b({_ARRAY})\b(?!\[\d+\])")  # an address, or another index than a constant


def as_variables(source: str) -> str:
    """``source`` with a variable for each element of the arrays that would cost nvcc most, if these cost much."""
    uses = Counter(match[1] for match in _USED.finditer(source))
    work = {match[3]: int(match[4]) * uses[match[3]] for match in _DECLARED.finditer(source)}
    least = EACH if sum(work.values()) >= WORK else WORK
    chosen = {name for name, of in work.items() if of >= least or uses[name] >= MANY}
    if not chosen:
        return source
    chosen -= {name for match in _ELSE.finditer(source) for name in match.groups()}

    def declare(match: re.Match[str]) -> str:
        indent, kind, name, size = match.groups()
        return f"{indent}{kind} {', '.join(f'{name}_e{i}' for i in range(int(size)))};" if name in chosen else match[0]

    source = _DECLARED.sub(declare, source)
    return _USED.sub(lambda match: f"{match[1]}_e{match[2]}" if match[1] in chosen else match[0], source)

"""The README's table of what works where, asked of the schedules themselves.

    python docs/site/site_support.py     writes it between the README's marks
"""

from __future__ import annotations

from pathlib import Path

from ecornn.chips import ARCHITECTURES
from ecornn.errors import EcornnError

ROOT = Path(__file__).resolve().parent.parent.parent
BEGIN, END = "<!-- support: begin -->", "<!-- support: end -->"
CELLS = ("lstm", "gru", "gru_reset_before", "rnn_tanh", "rnn_relu", "indrnn", "slstm")
GPUS = tuple(ARCHITECTURES)
# (what it is called, the targets that stand for it, of which all must give the same answers)
TARGETS = (("GPU: " + ", ".join(GPUS), GPUS), ("x86-64 CPU", ("haswell", "skylake-avx512", "znver4")),
           ("arm64 CPU, as an object file", ("neoverse-v1",)))
VNNI = "znver4"  # int8 needs its instructions
HEADS = ("cells", "target", "forward", "backward", "weights may be rounded to")


def served(cell: str, target: str, training: bool, dtype: str, weights: str | None = None) -> bool:
    """Whether some schedule serves a layer, and, where it trains, its backward pass."""
    from ecornn.layer_spec import LayerSpec
    from ecornn.targets import resolve
    from ecornn.task import adjoint_task, make_task, tunes_backward
    from ecornn.tune.choose import serving

    layer = LayerSpec(cell, 128, batch=4, dtype=dtype, weights=weights, training=training)
    task = make_task(layer.loaded, layer.workload, resolve(target), layer.stack.parts(layer.workload)[0].traversal)
    try:
        serving(task)
        if tunes_backward(task):
            serving(adjoint_task(task))
    except EcornnError:
        return False
    return True


def recurrent(cell: str) -> bool:
    """Whether its step has matrices of states."""
    from ecornn.analysis import analyse
    from ecornn.cells import get

    return bool(analyse(get(cell), 128, 128).product_phases)


def row(cell: str, targets: tuple[str, ...]) -> tuple[str, ...]:
    """Data types that work forward and backward, and what weights may be rounded to. Targets of one kind that differ
    are an AssertionError: the table has one row for all."""
    from ecornn.dtypes import SERVED
    from ecornn.targets import resolve
    from ecornn.workload import WEIGHTS

    kind = resolve(targets[0]).kind

    def alike(training: bool, dtype: str, weights: str | None = None, of: tuple[str, ...] = targets) -> bool:
        answers = {served(cell, target, training, dtype, weights) for target in of}
        assert len(answers) == 1, f"{cell} in {weights or dtype} is not the same on {of}"
        return answers.pop()

    passes = [", ".join(d for d in SERVED[kind] if alike(training, d)) or "no" for training in (False, True)]
    rounded = [w for w in WEIGHTS if w not in ("float32", "int8") and alike(False, "float32", w)]
    if VNNI in targets and alike(False, "float32", "int8", (VNNI,)):
        rounded.append("int8 (with VNNI)")
    if kind == "cuda" and (not recurrent(cell) or all(alike(False, dtype, "int8") for dtype in SERVED[kind][1:])):
        rounded.append("int8 (recurrent matrices of 16-bit layers)")
    return *passes, ", ".join(rounded) or "no"


def support() -> list[str]:
    """The table's lines; cells of equal rows share one."""
    lines = ["| " + " | ".join(HEADS) + " |", "|" + "---|" * len(HEADS)]
    for name, targets in TARGETS:
        rows: dict[tuple[str, ...], list[str]] = {}
        for cell in CELLS:
            rows.setdefault(row(cell, targets), []).append(f"`{cell}`")
        for of, cells in rows.items():
            every = len(cells) == len(CELLS)
            lines.append("| " + " | ".join(("all, and your own" if every else ", ".join(cells), name, *of)) + " |")
    return lines


def main() -> None:
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    readme.write_text("\n".join([before + BEGIN, "", *support(), "", END + after]))


if __name__ == "__main__":
    main()

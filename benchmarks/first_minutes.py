"""The first ten minutes with ecornn as text: commands and what they print, from a clone and a new environment.

    python benchmarks/first_minutes.py             # writes docs/FIRST_MINUTES_CPU.md, or _GPU.md where there is a GPU
    python benchmarks/first_minutes.py --torch     # with PyTorch, a large download: replace() and a comparison

Everything is done in a temporary home: no log, module or compiled code of before is found there. Of each command it is
said how long it took, and how long it was silent at most. Ends with 1 where a command ended otherwise than it should.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ecornn.targets import resolve
from ecornn.tune.choose import default_target

ROOT = Path(__file__).resolve().parent.parent
CLONE = 'git clone --quiet "$ECORNN" ecornn'
CELL = """from ecornn import Cell, pointwise, product
from tvm import te

class Leaky(Cell):  # h' = h + a (tanh(W x + R h) - h), with a between 0 and 1
    name, states = "leaky", ("h",)

    def parameters(self, input, hidden):
        return {"weight_ih": (1, hidden, input), "weight_hh": (1, hidden, hidden), "leak": (1, hidden)}

    def step(self, x, states, parameters):
        (h,), leak = states, parameters["leak"]
        wx, rh = product(x, parameters["weight_ih"]), product(h, parameters["weight_hh"])
        new = pointwise(lambda b, j: te.tanh(wx[b, 0, j] + rh[b, 0, j]), h)
        return [pointwise(lambda b, j: h[b, j] + te.sigmoid(leak[0, j]) * (new[b, j] - h[b, j]), h)]
"""


@dataclass(frozen=True)
class Step:
    """A command in the clone, why one gives it, and the exit code that it should have."""

    why: str
    command: str
    code: int = 0


FIRST = [
    Step("Search an LSTM of 800 units for a minute and a half, compile what was found, run it and check the result:",
         "make run"),
    Step("What there is here:", ".venv/bin/ecornn doctor"),
    Step("Why that module, and what to expect of it:", ".venv/bin/ecornn explain --cell lstm --hidden 800"),
    Step("How fast:", ".venv/bin/ecornn bench build/lstm800.so"),
    Step("What the search left, and what ships:", ".venv/bin/ecornn log ls"),
    Step("What was searched as a page, `report.html`:",
         ".venv/bin/python -m pip --quiet install jinja2 && .venv/bin/ecornn report"),
    Step("A cell of one's own, in `leaky.py`: what serves it, and whether its results and gradients are right:",
         ".venv/bin/ecornn check-cell leaky.py:Leaky"),
    Step("As a module:",
         ".venv/bin/ecornn compile --cell leaky.py:Leaky --hidden 256 --batch 4 -o leaky.so"),
    Step("A mistake:", ".venv/bin/ecornn compile --cell lstn --hidden 800 -o x.so", 2),
    Step("And another:", ".venv/bin/ecornn tune --cell lstm --hidden 8OO", 2),
]
TORCH = [
    Step("PyTorch, for what follows:", "make examples"),
    Step("Models whose layers are replaced:", ".venv/bin/python examples/04_replace.py"),
    Step("The module against PyTorch:", ".venv/bin/ecornn bench build/lstm800.so"),
]


@dataclass(frozen=True)
class Ran:
    """What a command printed, on both outputs as it came, and how long it took, seconds; ``quiet``: the line after
    which it said nothing for longest."""

    output: str
    code: int
    seconds: float
    silence: float
    quiet: str


def carry_out(command: str, folder: Path, environment: dict[str, str]) -> Ran:
    """Runs a command of the shell."""
    began = last = time.monotonic()
    lines, silence, before, quiet = [], 0.0, "", ""
    with subprocess.Popen(["bash", "-c", command], cwd=folder, env=environment, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors="replace") as running:
        assert running.stdout is not None
        for line in running.stdout:
            now = time.monotonic()
            if now - last > silence:
                silence, quiet = now - last, before
            last, before = now, line
            lines.append(line)
    end = time.monotonic()
    if end - last > silence:
        silence, quiet = end - last, before
    return Ran("".join(lines), running.returncode, end - began, silence, quiet.strip())


def shown(step: Step, ran: Ran) -> Iterator[str]:
    """A step as Markdown."""
    ended = "" if step.code == 0 else f", exit code {ran.code}"
    text = f"$ {step.command}\n{ran.output}".rstrip()
    yield f"{step.why}\n\n```text\n{text}\n```\n"
    yield f"{ran.seconds:.1f} s{ended}; silent for {ran.silence:.1f} s at most.\n"


def environment_of(home: Path) -> dict[str, str]:
    """A user's who has nothing of ecornn yet. Pip says errors alone: what else it says is of the index that it uses."""
    gone = ("ECORNN", "PYTHON", "VIRTUAL_ENV", "XDG")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(gone)}
    return kept | {"HOME": str(home), "ECORNN": str(ROOT), "PIP_QUIET": "2", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def page(steps: list[Step], title: str, note: str, folder: Path) -> tuple[str, bool]:
    """The page, and whether all went as it should."""
    home = folder / "home"
    home.mkdir()
    environment, good, to_result = environment_of(home), True, 0.0
    text = []
    for step in [Step("A clone:", CLONE), *steps]:
        within = folder if step.command == CLONE else folder / "ecornn"
        ran = carry_out(step.command, within, environment)
        print(f"{ran.seconds:6.1f} s, silent {ran.silence:4.1f} s after {ran.quiet[:40]!r}, code {ran.code}: "
              f"{step.command}", flush=True)
        good &= ran.code == step.code
        if step.command == CLONE and ran.code == 0:
            (folder / "ecornn" / "leaky.py").write_text(CELL)
        if step.command in (CLONE, "make run"):
            to_result += ran.seconds
        text += shown(step, ran)
    head = (f"# The first ten minutes, {title}\n\nMade by `python benchmarks/first_minutes.py`: commands and what they "
            f"print, unedited. From the clone to the first checked result it takes {to_result:.0f} s."
            f"{' ' + note if note else ''}\n")
    return "\n".join([head, *text]), good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", action="store_true", help="install PyTorch, too")
    parser.add_argument("--note", default="", help="a sentence to say at the top, as of a machine that is not quiet")
    parser.add_argument("--output", type=Path, help="[docs/FIRST_MINUTES_CPU.md or _GPU.md]")
    arguments = parser.parse_args()
    target = default_target()
    device = resolve(target)
    cores = len(os.sched_getaffinity(0))
    title = f"on {device.name}" + ("" if target == "cuda" else f", {cores} cores")
    folder = Path(tempfile.mkdtemp(prefix="first-minutes-"))
    try:
        text, good = page(FIRST + (TORCH if arguments.torch else []), title, arguments.note, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    text = text.replace(str(folder), "/tmp/first")  # where it was done is of no interest
    kind = "GPU" if target == "cuda" else "CPU"
    (arguments.output or ROOT / "docs" / f"FIRST_MINUTES_{kind}.md").write_text(text)
    sys.exit(not good)


if __name__ == "__main__":
    main()

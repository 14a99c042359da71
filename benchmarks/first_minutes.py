"""The first ten minutes with ecornn as text: commands and what they print, from a clone and a new environment.

    python benchmarks/first_minutes.py             # writes docs/FIRST_MINUTES_CPU.md, or _GPU.md where there is a GPU
    python benchmarks/first_minutes.py --in-place  # by this interpreter, where pip has nothing to install from

Everything is done in a temporary home: no log, module or compiled code of before is found there. Of each command it is
said how long it took, and how long it was silent at most. Ends with 1 where a command ended otherwise than it should.
"""

from __future__ import annotations

import argparse
import os
import shlex
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from operator import itemgetter, sub
from pathlib import Path

from ecornn.targets import default_target, resolve

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
    Step("Install it beside PyTorch:", "make setup 'EXTRA=[tune,torch]'"),
    Step("The first program of the README, before and after:", ".venv/bin/python first.py"),
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
    Step("As a module:", ".venv/bin/ecornn compile --cell leaky.py:Leaky --hidden 256 --batch 4 -o leaky.so"),
    Step("A mistake:", ".venv/bin/ecornn compile --cell lstn --hidden 800 -o x.so", 2),
    Step("And another:", ".venv/bin/ecornn tune --cell lstm --hidden 8OO", 2),
]

# Of the tree itself, by PYTHONPATH. What is installed is this interpreter's.
RUN = "python -m ecornn"
IN_PLACE = [
    Step("What there is here:", f"{RUN} doctor"),
    Step("The first program of the README on the GPU, before and after:",
         """python -c 'import torch; torch.set_default_device("cuda"); exec(open("first.py").read())'"""),
    Step("Search an LSTM of 800 units for a minute:", f"{RUN} tune --cell lstm --hidden 800 --time-limit 60"),
    Step("Compile what was found:", f"{RUN} compile --cell lstm --hidden 800 -o lstm800.so"),
    Step("Run it and check the result:", 'python "$ECORNN"/examples/00_first_run.py lstm800.so'),
    Step("How fast:", f"{RUN} bench lstm800.so"),
    Step("Why that module, and what to expect of it:", f"{RUN} explain --cell lstm --hidden 800"),
    Step("What was searched as a page, `report.html`:", f"{RUN} report"),
    Step("Another layer, which nobody has searched here; records that ship serve it:",
         f"{RUN} bench --cell gru --hidden 512 --batch 16 --dtype float16 --against cudnn,torch"),
    Step("A cell of one's own, in `leaky.py`, as a module:",
         f"{RUN} compile --cell leaky.py:Leaky --hidden 256 --batch 4 -o leaky.so"),
    Step("A mistake:", f"{RUN} compile --cell lstn --hidden 800 -o x.so", 2),
]
FIRSTS = {"the first printed gain": "as fast", "the first checked result": "relative error of y"}  # and what says so


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
    lines, times = [""], [time.monotonic()]
    with subprocess.Popen(["bash", "-c", command], cwd=folder, env=environment, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors="replace") as running:
        assert running.stdout is not None
        for line in running.stdout:
            times.append(time.monotonic())
            lines.append(line)
    end = time.monotonic()
    silence, quiet = max(zip(map(sub, [*times[1:], end], times), lines, strict=True), key=itemgetter(0))
    return Ran("".join(lines), running.returncode, end - times[0], silence, quiet.strip())


def environment_of(home: Path, in_place: bool) -> dict[str, str]:
    """A user's who has nothing of ecornn yet; ``in_place``: but this interpreter's packages. Pip says errors alone:
    what else it says is of the index that it uses."""
    gone = ("ECORNN", "VIRTUAL_ENV", "XDG") + (() if in_place else ("PYTHON",))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(gone)}
    if in_place:
        (home / "bin").mkdir()
        python = home / "bin" / "python"
        python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')  # a link would lose its packages
        python.chmod(0o755)
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        kept |= {"PYTHONPATH": path, "PYTHONUSERBASE": site.getuserbase(),
                 "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    return kept | {"HOME": str(home), "ECORNN": str(ROOT), "PIP_QUIET": "2", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def done(steps: list[Step], folder: Path, in_place: bool) -> Iterator[tuple[Step, Ran]]:
    """The steps, one after the other; a line on each."""
    within, home = folder, folder / "home"
    home.mkdir()
    environment = environment_of(home, in_place)
    files = {"leaky.py": CELL, "first.py": (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]}
    for name, text in files.items():
        (folder / name).write_text(text)
    for step in steps:
        ran = carry_out(step.command, within, environment)
        print(f"{ran.seconds:6.1f} s, silent {ran.silence:4.1f} s after {ran.quiet[:40]!r}, code {ran.code}: "
              f"{step.command}", flush=True)
        if step.command == CLONE:
            within = folder / "ecornn"
            for name in files:
                (folder / name).rename(within / name)
        yield step, Ran(*(v.replace(str(folder), "/tmp/first").replace(str(ROOT), "/tmp/ecornn")  # of no interest
                          if isinstance(v, str) else v for v in astuple(ran)))


def page(title: str, in_place: bool, steps: list[tuple[Step, Ran]]) -> str:
    """The page of what was done on such a machine."""
    takes = [f"to {what} it takes {sum(ran.seconds for _, ran in steps[:until]):.0f} s" for what, said in FIRSTS.items()
             for until in [n for n, (_, ran) in enumerate(steps, 1) if said in ran.output][:1]]
    began = "From the clone" if not in_place else (
        "Installing is not among it: pip had nothing to install from on that machine, so that the clone itself is run, "
        "by `PYTHONPATH`, with a Python that has what it requires. From `doctor`")
    text = [f"# The first ten minutes, {title}\n", "Made by `python benchmarks/first_minutes.py"
            + " --in-place" * in_place + "`: commands and what they print, unedited. "
            f"{began} {', '.join(takes)}.\n"]
    for step, ran in steps:
        ended, shown = f", exit code {ran.code}" if step.code else "", f"$ {step.command}\n{ran.output}".rstrip()
        text += [f"{step.why}\n\n```text\n{shown}\n```\n",
                 f"{ran.seconds:.1f} s{ended}; silent for {ran.silence:.1f} s at most.\n"]
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-place", action="store_true", help="install nothing, run the tree by this interpreter")
    parser.add_argument("--output", type=Path, help="[docs/FIRST_MINUTES_CPU.md or _GPU.md]")
    arguments = parser.parse_args()
    device, in_place = resolve(default_target()), arguments.in_place
    gpu = device.kind == "cuda"
    title = f"on {device.name}" + ("" if gpu else f", {len(os.sched_getaffinity(0))} cores")
    steps = IN_PLACE if in_place else [Step("A clone:", CLONE), *FIRST]
    with tempfile.TemporaryDirectory(prefix="first-minutes-", ignore_cleanup_errors=True) as folder:
        found = list(done(steps, Path(folder), in_place))
    output = arguments.output or ROOT / "docs" / f"FIRST_MINUTES_{'GPU' if gpu else 'CPU'}.md"
    output.write_text(page(title, in_place, found))
    sys.exit(not all(ran.code == step.code for step, ran in found))


if __name__ == "__main__":
    main()

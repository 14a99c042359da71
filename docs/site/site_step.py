"""The picture of a step in docs/CONCEPTS.md, from the code of a kernel.

    python docs/site/site_step.py     writes docs/images/step.svg
"""

from __future__ import annotations

from html import escape
from pathlib import Path

IMAGE = Path(__file__).resolve().parent.parent / "images" / "step.svg"
WIDTH, MARGIN, LETTER = 760, 20, 7.0  # px; LETTER: of a font of 13 px, in the mean
STYLE = """
  .page { fill: #fff } text { font: 13px system-ui, sans-serif; fill: #24292f } .tick, .note { fill: #59636e }
  .chosen { font-weight: 600 } .grid { stroke: #d0d7de } .phase { fill: #f6f8fa; stroke: #d0d7de }
  .beyond { fill: none; stroke: #8c959f; stroke-dasharray: 4 4 } .wait { fill: #bc4c00 } .multiply { fill: #0969da }
  .copy { fill: #1a7f37 } .send { fill: #8250df } .meets { stroke: #bc4c00; stroke-width: 2; stroke-dasharray: 2 3 }
  .sent { stroke: #8250df; stroke-width: 2; fill: none }
  @media (prefers-color-scheme: dark) {
    .page { fill: #161b22 } text { fill: #c9d1d9 } .tick, .note { fill: #8b949e } .grid { stroke: #30363d }
    .phase { fill: #1c2128; stroke: #30363d } .beyond { stroke: #6e7681 } .wait { fill: #f0883e }
    .multiply { fill: #58a6ff } .copy { fill: #3fb950 } .send { fill: #bc8cff } .meets { stroke: #f0883e }
    .sent { stroke: #bc8cff }
  }
"""


def picture() -> str:
    """That of an LSTM on an H100 by the default of ``persistent``."""
    from ecornn.layer_spec import LayerSpec
    from ecornn.report.roles import drawn, kernel_of, label
    from ecornn.schedules import all_schedules
    from ecornn.targets import resolve
    from ecornn.task import make_task

    layer = LayerSpec("lstm", 800, batch=20, seq=300, dtype="float16")
    task, schedule = make_task(layer.loaded, layer.workload, resolve("sm_90a")), all_schedules()["persistent"]
    kernel = kernel_of(schedule.program(task, schedule.plan(task, schedule.default(task))).functions)
    assert kernel is not None
    parts, height = drawn(kernel, WIDTH - 2 * MARGIN, LETTER, [f"{layer.workload} by {schedule.name}: one launch"])
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height + 2 * MARGIN}" width="{WIDTH}" '
            f'height="{height + 2 * MARGIN}" role="img" aria-label="{escape(label(kernel))}">\n'
            f'<style>{STYLE}</style>\n<rect class="page" width="{WIDTH}" height="{height + 2 * MARGIN}" rx="8"/>\n'
            f'<g transform="translate({MARGIN} {MARGIN})">\n' + "\n".join(parts) + "\n</g>\n</svg>\n")


if __name__ == "__main__":
    IMAGE.write_text(picture(), encoding="utf-8")
    print(f"wrote {IMAGE.name}")

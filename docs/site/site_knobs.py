"""Writes the reference of schedules and their knobs, from the docstrings and knobs of the schedules."""

from __future__ import annotations

import inspect
from functools import cache

from site_docstrings import markdown

# Example layers. Some schedules have a knob only for some layers; its values are those of the first layer with it.
ASKED = (("lstm", 800, 20, 300, "float16", "sm_90a"), ("lstm", 1024, 128, 300, "bfloat16", "sm_90a"),
         ("gru", 512, 8, 300, "float32", "sm_80"), ("indrnn", 512, 16, 300, "float16", "sm_90a"),
         ("lstm", 1024, 16, 1, "float16", "sm_90a"), ("gru", 512, 8, 300, "float32", "znver4"),
         ("lstm", 512, 1, 300, "float32", "skylake-avx512"),
         ("lstm", 64, 32, 300, "float16", "sm_90a"))


@cache
def tasks() -> list:
    from ecornn.layer_spec import LayerSpec
    from ecornn.targets import resolve
    from ecornn.task import adjoint_task, make_task

    made = []
    for cell, hidden, batch, seq, dtype, target in ASKED:
        layer = LayerSpec(cell, hidden, batch=batch, seq=seq, dtype=dtype)
        made.append(make_task(layer.loaded, layer.workload, resolve(target)))
    return [*made, *map(adjoint_task, made[3:4])]  # that of indrnn is affine in its past


def page() -> str:
    """The page as Markdown."""
    from ecornn.schedules import all_schedules

    out = ["# Schedules and knobs\n", "A schedule is a template for code that runs a layer. A search chooses the "
           "values of its knobs. `ecornn explain` says which schedule a layer gets and why, `--schedule NAME --config "
           "KNOB=VALUE` sets it by hand, and `ecornn tune` searches all schedules. The values below are those of "
           "example layers; the allowed values depend on cell, sizes, data type and device.\n"]
    for name, schedule in all_schedules().items():
        kind = "CUDA GPUs" if schedule.kind == "cuda" else "CPUs"
        out += [f"## {name}\n", f"For {kind}; revision {schedule.revision}"
                + ("; also runs backward passes" if schedule.backward else "") + ".\n"]
        out.append(markdown(inspect.getdoc(type(schedule)) or "") + "\n")
        seen: dict[str, str] = {}
        layers = []
        for task in tasks():
            if task.device.kind == schedule.kind and schedule.serves(task) is None:
                new = [knob for knob in schedule.knobs(task) if knob.name not in seen]
                layers += [f"{task.workload}"] if new else []
                for knob in new:
                    seen[knob.name] = f"| `{knob.name}` | {knob.trades} | {', '.join(f'`{v}`' for v in knob.values)} |"
        assert seen, f"no layer of ASKED is served by {name}"
        out += [f"Values for {' and '.join(layers)}:\n", "| knob | meaning and effect | values |", "|---|---|---|",
                *seen.values(), ""]
    return "\n".join(out)

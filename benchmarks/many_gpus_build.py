"""Compiles what ``run_many_gpus.py`` needs into the build cache, in as many processes as there are cores.

    python benchmarks/many_gpus_build.py FILE
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from many_gpus_models import GPU, modules

from ecornn.torch.preparing import compile_all


def main() -> None:
    begun, wanted = time.perf_counter(), [*modules()]
    compile_all([(spec, "cuda" if GPU else "cpu") for spec in wanted], len(os.sched_getaffinity(0)))
    Path(sys.argv[1]).write_text(json.dumps({"modules": len(wanted), "seconds": time.perf_counter() - begun}))


if __name__ == "__main__":
    main()

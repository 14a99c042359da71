"""Tables, CSV and plots of the rows that ``compare_grid.py`` measured.

    python benchmarks/grid_report.py benchmarks/results/h100_grid.jsonl

writes h100_grid.csv, .md, .png and h100_grid_scaling.png beside the file; plots need matplotlib.
``docs_tables.py`` puts the short form into docs/PERFORMANCE.md.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import sys
from pathlib import Path

from grid_log import GridLog
from grid_summary import Summary
from grid_tables import knobs, long

COLUMNS = ("cell", "T", "B", "I", "H", "dtype", "ecornn_us", "ecornn_p20", "ecornn_p80", "cudnn_us", "cudnn_p20",
           "cudnn_p80", "ratio", "floor_us", "over_floor", "floor_exchange", "floor_recurrent", "floor_projection",
           "floor_bytes", "floor_groups", "floor_blocks", "error", "cudnn_error", "repetitions", "compile_seconds",
           "module_bytes", "schedule", "config", "provenance", "failed")


def write_csv(path: Path, log: GridLog) -> None:
    """Every row, failed ones too."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        for row in log.rows:
            terms = {f"floor_{name}": value for name, value in row.get("floor", {}).items()}
            writer.writerow(row | terms | {"config": knobs(row.get("config", {}))})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    path = parser.parse_args().path
    if not path.is_file():
        sys.exit(f"{path} is missing; compare_grid.py --output {path} measures it")
    try:
        log = GridLog(path)
    except ValueError as error:
        sys.exit(str(error))
    if not Summary(log.rows).rows:
        sys.exit(f"no row of {path} was measured")
    path.with_suffix(".md").write_text("\n".join(long(path, log)))
    write_csv(path.with_suffix(".csv"), log)
    if importlib.util.find_spec("matplotlib"):
        from grid_plots import plot_rows, plot_scaling

        plot_rows(log, path.with_suffix(".png"))
        plot_scaling(log, path.with_name(f"{path.stem}_scaling.png"))
    else:
        print("no plots: they need matplotlib, which is not installed (pip install matplotlib)", file=sys.stderr)


if __name__ == "__main__":
    main()

"""The command line: ``ecornn`` with a command for each task, two also as ``ecornn-tune``, ``ecornn-compile``."""

from __future__ import annotations

import click

from ecornn.cli.bench_command import bench
from ecornn.cli.check_cell_command import check_cell
from ecornn.cli.common import Commands
from ecornn.cli.compile_commands import compile, explain, onnx_rewrite
from ecornn.cli.log_commands import log, report
from ecornn.cli.machine_commands import config, doctor, serve
from ecornn.cli.share_commands import check, export, import_files, pull, push
from ecornn.cli.tune_command import tune

__all__ = ["compile", "main", "tune"]

EPILOG = """\b
A first session:
  ecornn doctor                            shows what this machine can do
  ecornn tune --cell lstm --hidden 800     finds the fastest schedule
  ecornn compile --cell lstm --hidden 800 --batch 20 -o lstm800.so
  ecornn explain --cell lstm --hidden 800  explains what was compiled
  ecornn bench lstm800.so                  times it against PyTorch
  ecornn report                            writes a page of your searches
  ecornn check-cell mine.py:Mine           checks a cell of your own
"""


@click.group(cls=Commands, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ecornn")
def main() -> None:
    """Compiles recurrent layers (LSTM, GRU, your own cell) with TVM, for CUDA GPUs and CPUs."""


for command in (tune, compile, explain, check_cell, bench, onnx_rewrite, report, log, serve, doctor, config):
    main.add_command(command)
for command in (export, import_files, pull, push, check):
    log.add_command(command)

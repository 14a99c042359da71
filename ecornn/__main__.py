"""``python -m ecornn``: the command line where no script is installed."""

from ecornn.cli import main

main(prog_name="ecornn")

"""``python -m ecornn``: the command line where no script is installed."""

from ecornn.console import main

main()

"""The folders of tests, whose modules are importable by their names once this is imported."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent  # of the checkout
APART = ("packages", "published")  # a suite of its own, and a package

sys.path[:0] = sorted(str(room) for room in TESTS.iterdir() if room.name not in APART and any(room.glob("*.py")))

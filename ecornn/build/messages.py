"""What compilers say, in short."""

from __future__ import annotations


def first_lines(text: str, lines: int = 12) -> str:
    """The start of a compiler's message: what follows the first errors seldom helps."""
    every = [line.rstrip("\0") for line in text.strip().splitlines()]
    rest = len(every) - lines
    return "\n".join([*every[:lines], f"... {rest} more lines"] if rest > 0 else every)

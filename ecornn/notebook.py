"""Tables and pictures for notebooks, as HTML without scripts or a style sheet, and a line that changes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

# Classes of pictures by svg.py, as a notebook draws them on a page of any colour
STYLES = {"grid": "stroke: currentColor; opacity: .15", "tick": "opacity: .7", "name": "opacity: .7",
          "halo tick": "opacity: .7", "trial": "opacity: .4", "best": "stroke: #2a78e4; stroke-width: 2; fill: none",
          "default": "stroke: #d9622b; stroke-dasharray: 6 4"}


def table(rows: Iterable[Sequence[object]], head: Sequence[object] = ()) -> str:
    """A table as HTML; everything in it is escaped. Without a ``head`` the first of each row is the row's name, and
    long paths break where a column is narrow."""
    wraps = "" if head else "; overflow-wrap: anywhere"

    def cells(row: Sequence[object], names: int) -> str:
        tags = ("th" if number < names else "td" for number, _ in enumerate(row))
        return "<tr>" + "".join(f'<{tag} style="text-align: left{wraps * (tag == "td")}">{escape(str(value))}</{tag}>'
                                for tag, value in zip(tags, row, strict=True)) + "</tr>"

    return "<table>" + (cells(head, len(head)) if head else "") + "".join(
        cells(row, 0 if head else 1) for row in rows) + "</table>"


def beside(words: str, picture: str) -> str:
    """HTML with a picture by svg.py on its right, which needs no style sheet then: a notebook may drop those."""
    styled = re.sub(r'class="([^"]*)"', lambda match: f'style="{STYLES.get(match[1], "")}"', picture)
    return ('<div style="display: flex; flex-wrap: wrap; gap: 2em; align-items: start">'
            f'<div style="flex: 0 1 500px">{words}</div>'
            f'<div style="width: 400px; font: 12px sans-serif; fill: currentColor">{styled}</div></div>')


class Line:
    """A line that changes, on standard error where there is no notebook that could change it."""

    def __init__(self) -> None:
        self.changes = in_notebook()
        self._shown: Any = None

    def __call__(self, text: str) -> None:
        if not self.changes:
            print(text, file=sys.stderr)
        elif self._shown is None:
            from IPython.display import display

            self._shown = display({"text/plain": text}, raw=True, display_id=True)
        else:
            self._shown.update({"text/plain": text}, raw=True)


def in_notebook() -> bool:
    """True in a notebook, or whatever else is in front of a Jupyter kernel."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")

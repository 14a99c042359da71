"""Docstrings as Markdown, for the pages of reference: underlined sections, ``name : what``, and roles."""

from __future__ import annotations

import re
from collections.abc import Callable
from textwrap import dedent
from typing import Any

import griffe

# what a docstring has -> as Markdown
RULES: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"(?<=\n\n)(?: {4}.*(?:\n|\Z)|\n(?= {4}))+", lambda block: f"```python\n{dedent(block[0]).rstrip()}\n```\n"),
    (r"^(.+)\n-{3,}$", r"**\1**\n"),
    (r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*) : ", r"- `\1`: "),
    (r":(?:class|func|meth|mod|data|attr):`(?:[^`<]*<)?~?(.+?)>?`", r"`\1`"),
    (r"(`+.+?`+)|(?<=\w)\*(?=\w)", lambda found: found[1] or r"\*"))  # a product, not the beginning of emphasis


def markdown(docstring: str) -> str:
    for pattern, instead in RULES:
        docstring = re.sub(pattern, instead, docstring, flags=re.MULTILINE)
    return docstring


class Docstrings(griffe.Extension):
    """Changes the docstrings that Griffe has read. Of special methods a reader needs ``__call__`` alone."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.is_function and obj.is_special and obj.name not in ("__call__", "__init__"):
            obj.docstring = None  # so that it is left out
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)

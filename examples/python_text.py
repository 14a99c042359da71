"""English text that every Python has: the reference of the language, and the docstrings of the standard library."""

from __future__ import annotations

import ast
import re
import sysconfig
from collections import Counter
from pathlib import Path
from pydoc_data import topics

import torch

OTHERS = {"dist-packages", "idlelib", "lib2to3", "site-packages", "test", "tests"}  # folders outside of the library
UNKNOWN = "<unk>"


def reference() -> str:
    """The language reference, which ``help("topics")`` shows: half a million characters."""
    return "\n".join(topics.topics[name] for name in sorted(topics.topics))


def docstrings() -> str:
    """The docstrings of the standard library's modules, classes and functions; collecting them takes seconds."""
    root, found = Path(sysconfig.get_path("stdlib")), []
    for path in sorted(root.rglob("*.py")):
        if OTHERS.isdisjoint(path.relative_to(root).parts):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                    found.append(ast.get_docstring(node) or "")
    return "\n".join(found)


def words(text: str) -> list[str]:
    """The words, numbers and punctuation marks of a text, in lower case."""
    return re.findall(r"[a-z]+|[0-9]+|[^\sa-z0-9]", text.lower())


def numbered(tokens: list[str], most: int) -> tuple[torch.Tensor, list[str]]:
    """The tokens as numbers (N,), and the token of each number: the ``most`` - 1 frequent ones; 0 is all others."""
    names = [UNKNOWN, *(token for token, _ in Counter(tokens).most_common(most - 1))]
    numbers = {name: number for number, name in enumerate(names)}
    return torch.tensor([numbers.get(token, 0) for token in tokens]), names


def in_columns(tokens: torch.Tensor, batch: int) -> torch.Tensor:
    """The tokens (N,) as ``batch`` columns (N // B, B) that are read side by side."""
    return tokens[:len(tokens) // batch * batch].view(batch, -1).T.contiguous()

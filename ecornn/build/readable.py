"""Generated CUDA source for people (``--emit cuda``): notes as comments, the parentheses that say something, and lines
that fit on a screen. It does what is compiled (tests/building/test_readable.py)."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from ecornn.build.parentheses import TOKEN, clear

WIDTH = 120
_KERNELS = 'extern "C" __global__'  # behind what TVM puts first
# what T.note leaves (schedules/builder.py)
_NOTE = re.compile(r'^( *)ecornn_note\("(.*)"\);\n', re.MULTILINE)
_ENDED = re.compile(r"^}(?=\S)", re.MULTILINE)  # a function, with the next one in the same line
_STRING = re.compile(r'"([^"\\]{81,})"')  # of a PTX instruction with many operands
_FLOAT = re.compile(r"\b(0x[\da-f.]+p[-+]\d+)(f?)/\*.*?\*/")
_UNSIGNED = re.compile(r"\(uint\)(\d+)\b(?!\.)")
_WIDE = re.compile(r"( [-+*/%&|^] )\(int64_t\)(\d{1,9})\b")  # the other operand is as wide
_INDENTED = re.compile(r"^  ( *)(\w+ v_(?:_\d+)? = )", re.MULTILINE)  # what TVM reads as another type
_BEFORE = {"+", "-", "*", "/", "%", "&&", "||", "?", ":", "<", ">", "<=", ">=", "==", "!=", "|", "^", "<<", ">>"}


def without_notes(source: str) -> str:
    """``source`` as it is compiled."""
    return _NOTE.sub("", source)


def readable_text(source: str) -> str:
    """``source``, as TVM prints it, for people."""
    first, mark, kernels = _ENDED.sub("}\n", source.replace("tvm_builtin_", "")).partition(_KERNELS)
    kernels = _INDENTED.sub(r"\1\2", _FLOAT.sub(_decimal, _NOTE.sub(r"\1// \2\n", mark + kernels)))
    kernels = _WIDE.sub(r"\1\2", _UNSIGNED.sub(r"\1u", kernels))
    lines = [*first.split("\n")[:-1], *map(clear, kernels.split("\n"))]
    return "\n".join(part for line in lines for part in wrapped(line))


def _decimal(match: re.Match[str]) -> str:
    """A number, shortest in decimal, that is read as the same."""
    value = float.fromhex(match[1])
    return f"{np.float32(value)}f" if match[2] else repr(value)


def wrapped(line: str) -> Iterator[str]:
    """``line`` in lines of ``WIDTH`` that end behind commas and before operators, where parentheses are least deep."""
    indent = len(line) - len(line.lstrip())
    if len(line) <= WIDTH or line.lstrip().startswith(("#", "//")) or line.endswith("\\"):
        yield line
        return
    inner, line = " " * (indent + 4), _STRING.sub(_in_pieces, line)
    while len(line) > WIDTH:
        end = _end(line)
        yield line[:end].rstrip().replace('" "', "")
        line = inner + line[end:].lstrip()
    if line.strip():
        yield line


def _in_pieces(match: re.Match[str]) -> str:
    """A string as several that follow each other."""
    return " ".join(f'"{part}"' for part in re.findall(r".{1,80}(?: |$)|\S+ ?", match[1]))


def _end(line: str) -> int:
    """The number of characters of ``line`` that its first line takes."""
    best, depth, string = (99, 0), 0, False
    indent = len(line) - len(line.lstrip())
    for token in TOKEN.finditer(line):
        word, place = token[0], token.start()
        depth -= word in (")", "]")
        if not ((word in _BEFORE and line[place - 1] == " ") or (string and word[0] == '"')):
            place = token.end()
        depth += word in ("(", "[")
        string = word[0] == '"'
        if indent < place < token.end() or word in (",", "("):
            if place > WIDTH and best[1]:
                break
            best = min(best, (depth, -place))
    return -best[1] or len(line)

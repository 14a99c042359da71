"""Generated CUDA source for people (``--emit cuda``): notes as comments, the parentheses that say something, and lines
that fit on a screen. It does the same as the source that is compiled (tests/building/test_readable.py)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

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


# Parentheses, of which TVM prints a pair around every operator.
TOKEN = re.compile(
    r'"(?:[^"\\]|\\.)*"|[A-Za-z_]\w*|(?:\d|\.\d)(?:[eE][-+]|[\w.])*|<<|>>|<=|>=|==|!=|&&|\|\||->|[-+]=|\S')
_LEVELS = ("? :", "||", "&&", "|", "^", "&", "== !=", "< > <= >=", "<< >>", "+ -", "* / %")
_LEVEL = {operator: level for level, operators in enumerate(_LEVELS, 1) for operator in operators.split()}
_CHOICE, _TIGHT = 1, len(_LEVELS) + 1  # of an expression with ?: and of one without binary operators
_ALONE = {"|", "^", "&", "<<", ">>", "/", "%"}  # operators that nobody knows the levels of
_TYPE = re.compile(r"(?:const|unsigned|signed|void|bool|float\d?|double|half2?|nv_bfloat16\d*|u?int|u?char|u?short|"
                   r"long|u?int\d+_t|\*)(?: (?:const|unsigned|int|long|char|short|\*))*")
_CLOSED = {"", "(", "[", ",", ";", "{", "=", "+=", "return", ")", "]"}  # what ends an expression


@dataclass
class _Pair:
    """A pair of parentheses: the place of its first one among the tokens, and the weakest operators inside."""

    place: int
    level: int = _TIGHT
    operators: set[str] = field(default_factory=set)

    def add(self, level: int, operators: set[str]) -> None:
        if level < self.level:
            self.level, self.operators = level, set()
        if level == self.level:
            self.operators |= operators


def clear(line: str) -> str:
    """``line`` of C without the parentheses that neither the compiler needs nor a reader."""
    if line.lstrip().startswith(("#", "//", "extern")) or '"' in line:
        return line
    tokens = list(TOKEN.finditer(line))
    words, gone, casts = [token[0] for token in tokens], set[int](), set[int]()
    pairs = [_Pair(-1)]
    for place, word in enumerate(words):
        if word in "([":
            pairs.append(_Pair(place))
        elif word in ")]":
            pair = pairs.pop()
            if word == ")" and _TYPE.fullmatch(" ".join(words[pair.place + 1:place])):
                casts.add(place)
            elif word == ")" and _needless(words, pair, place, gone, casts):
                gone |= {pair.place, place}
                pairs[-1].add(pair.level, pair.operators)
        elif word in _LEVEL and _binary(words, place, casts):
            pairs[-1].add(_LEVEL[word], {word})
    return "".join(line[before:tokens[at].start()] + tokens[at][0] * (at not in gone)
                   for at, before in enumerate([0, *(token.end() for token in tokens[:-1])])) if tokens else line


def _binary(words: list[str], place: int, casts: set[int]) -> bool:
    """True if the operator there has an operand before it."""
    before = place - 1
    return place > 0 and before not in casts and (words[before] in ")]" or words[before][0].isalnum()
                                                  or words[before][0] in "_.") and words[before] != "return"


def _needless(words: list[str], pair: _Pair, end: int, gone: set[int], casts: set[int]) -> bool:
    """True if an expression means the same, as plainly, without the parentheses around it."""
    left, right = pair.place - 1, end + 1
    while left in gone:
        left -= 1
    while right in gone:
        right += 1
    before, after = words[left] if left >= 0 else "", words[right] if right < len(words) else ""
    around: set[str] = set()
    if before in _LEVEL and _binary(words, left, casts):
        if pair.level <= _LEVEL[before]:
            return False
        around.add(before)
    elif before in ("!", "-", "&", "*", "~") or left in casts:
        if pair.level < _TIGHT or words[pair.place + 1] in ("-", "&", "*"):
            return False
    elif before not in _CLOSED or before in (")", "]"):
        return False  # a call
    if after in _LEVEL:
        if pair.level < _LEVEL[after] or pair.level == _CHOICE:
            return False
        around.add(after)
    elif after not in _CLOSED or after in ("(", "["):
        return False
    every = (around - {"?", ":"}) | pair.operators
    return len(every) < 2 or not (every & _ALONE or {"&&", "||"} <= every or (around and "?" in pair.operators))

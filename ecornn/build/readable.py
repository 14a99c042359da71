"""Generated CUDA source for people (``--emit cuda``): names where TVM's passes put expressions, and nothing that is not
used; notes as comments, the parentheses that say something, and lines that fit on a screen. It does the same as the
source that is compiled (tests/building/test_readable.py)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

MADE = "cse_v"  # begins the names that TVM makes up
LARGE = 6  # operations of an expression that is worth such a name
# calls that TVM takes to have effects, but that may go with their values
VALUES = {"tirx.cuda.__shfl_sync", "tirx.cuda.cvta_generic_to_shared"}
PURE, READS = 1, 2  # TVM's CallEffectKind: calls that depend on their arguments alone; on memory, too


def simplified(code: Any) -> Any:
    return code.with_body(_needed(_named(code.body, {}), Counter()))


def _named(statement: Any, known: dict[Any, Any]) -> Any:
    """``statement`` with a variable for each expression that one in scope is bound to. ``known``: structure of an
    expression -> that variable; variables that ``statement`` binds are added."""
    import tvm_ffi
    from tvm import ir, tirx

    structure: Any = tvm_ffi.StructuralKey  # whose annotations have one argument more than it takes

    def name(value: Any) -> Any:
        constant = isinstance(value, (tirx.IntImm, tirx.FloatImm, ir.StringImm))
        return value if constant else known.get(structure(value), value)

    def with_names(part: Any) -> Any:
        return tvm_ffi.structural_map(part, (ir.Expr, name), order="pre") if known else part

    if isinstance(statement, tirx.SeqStmt):
        return tirx.SeqStmt([_named(one, known) for one in statement.seq])
    if not isinstance(statement, tirx.Bind):
        return _rebuilt(statement, with_names, lambda body: _named(body, dict(known)))
    key = structure(statement.value)
    if key in known and known[key].name.startswith(MADE) and not statement.var.name.startswith(MADE):
        del known[key]  # this name is better
    named = tirx.Bind(statement.var, with_names(statement.value))
    if key not in known and _may_stand_for(statement):
        known[key] = statement.var
    return named


def _may_stand_for(bound: Any) -> bool:
    """True if the variable may be written for its value anywhere: the value is the same at any time."""
    import tvm_ffi
    from tvm import ir, tirx

    if isinstance(bound.value, tirx.Var):
        return bool(bound.value.name.startswith(("threadIdx", "blockIdx")))
    counts: Counter[str] = Counter()

    def look(value: Any) -> None:
        if isinstance(value, ir.Call):
            counts["changes"] += _effect(value) > PURE
        elif isinstance(value, ir.TensorLoad):
            counts["changes"] += 1
        elif not isinstance(value, (tirx.Var, tirx.IntImm, tirx.FloatImm, ir.StringImm)):
            counts["operations"] += 1

    tvm_ffi.structural_walk(bound.value, (ir.Expr, look))
    return not counts["changes"] and counts["operations"] >= (LARGE if bound.var.name.startswith(MADE) else 1)


def _needed(statement: Any, uses: Counter[Any]) -> Any:
    """``statement`` without what nothing uses, or None; ``uses``: counts of what follows, to which it adds its own."""
    import tvm_ffi
    from tvm import tirx

    def count(part: Any) -> Any:
        tvm_ffi.structural_walk(part, (), (tirx.Var, lambda var, kind: uses.update([var] if kind == 0 else [])))
        return part

    if isinstance(statement, tirx.SeqStmt):
        left = [one for each in reversed(statement.seq) if (one := _needed(each, uses)) is not None]
        return tirx.SeqStmt(left[::-1]) if len(left) > 1 else left[0] if left else None
    if isinstance(statement, tirx.Bind) and not uses[statement.var] and _may_go(statement.value):
        return None
    if isinstance(statement, (tirx.AllocBuffer, tirx.DeclBuffer)) and not uses[statement.buffer]:
        return None
    return _rebuilt(statement, count, lambda body: _needed(body, uses) or tirx.Evaluate(0))


def _may_go(value: Any) -> bool:
    """True if an expression may be left out when nobody reads it."""
    import tvm_ffi
    from tvm import ir

    effects = []
    tvm_ffi.structural_walk(value, (ir.Call, lambda call: effects.append(_effect(call))))
    return all(effect <= READS for effect in effects)


def _effect(call: Any) -> int:
    """TVM's CallEffectKind of a call; of one to a device function, which TVM does not look into, by its source."""
    name = getattr(call.op, "name", "")
    value = name == "tirx.cuda.func_call" and "volatile" not in call.args[-1].value
    return READS if value or name in VALUES else int(call.op.get_attr("TCallEffectKind") or 0) if name else READS + 1


def _rebuilt(statement: Any, of_expression: Callable[[Any], Any], of_statement: Callable[[Any], Any]) -> Any:
    """``statement`` with the results for its parts: statements inside first, from the last to the first."""
    from tvm import tirx

    one = statement
    if isinstance(one, tirx.IfThenElse):
        other = None if one.else_case is None else of_statement(one.else_case)
        return tirx.IfThenElse(of_expression(one.condition), of_statement(one.then_case), other)
    if isinstance(one, tirx.For):
        body = of_statement(one.body)
        return tirx.For(one.loop_var, of_expression(one.min), of_expression(one.extent), one.kind, body,
                        one.thread_binding, one.annotations, one.step)
    if isinstance(one, tirx.While):
        return tirx.While(of_expression(one.condition), of_statement(one.body))
    if isinstance(one, tirx.AttrStmt):
        return tirx.AttrStmt(one.node, one.attr_key, one.value, of_statement(one.body))
    return of_expression(one)


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
    import numpy as np

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

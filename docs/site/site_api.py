"""The reference of the Python interface, from signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

PACKAGES = ("ecornn", "ecornn.torch", "ecornn.onnx", "ecornn.onnxruntime", "ecornn.tune")
ROLE = re.compile(r":(?:class|func|meth|mod|data|attr):`(?:[^`<]*<)?[~]?(.+?)>?`")
FIELD = re.compile(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*) : (.*)$")


def inline(text: str) -> str:
    """Roles and double backticks as Markdown's code."""
    return re.sub(r"``(.+?)``", r"`\1`", ROLE.sub(r"`\1`", text))


def markdown(docstring: str) -> str:
    """A docstring as Markdown: sections that are underlined, ``name : what`` as lists, indented blocks as code."""
    lines, out = inspect.cleandoc(docstring).splitlines(), []
    code = field = False
    for number, line in enumerate(lines):
        after = lines[number + 1] if number + 1 < len(lines) else ""
        if re.fullmatch(r"-{3,}", line):
            continue
        indented = line.startswith("    ")
        if code and line.strip() and not indented:
            out.append("```\n")
            code = False
        if re.fullmatch(r"-{3,}", after):
            out += ["", f"**{line}**", ""]
            field = False
        elif match := FIELD.match(line):
            out.append(f"- `{match[1]}`: {inline(match[2])}")
            field = True
        elif indented and not field and not code and (not out or not out[-1].strip()):
            out += ["```python", line[4:]]
            code = True
        elif code:
            out.append(line[4:])
        else:
            field = field and bool(line.strip())
            out.append(f"  {inline(line.strip())}" if field and indented else inline(line))
    return "\n".join([*out, *(["```"] if code else [])])


def signature(thing: Any) -> str:
    """As it is written; empty where there is none."""
    try:
        found = str(inspect.signature(thing))
    except (TypeError, ValueError):
        return ""
    found = re.sub(r"(: |-> )'([^']*)'", r"\1\2", found)  # annotations are texts, as defaults may be
    return re.sub(r"\b(?:[a-z_]\w*\.)+(\w+)", r"\1", found)


def wrapped(head: str, found: str) -> str:
    """A call in lines of 100 characters, a parameter or more in each."""
    if len(head + found) <= 100:
        return head + found
    inside, result = found[1:].rsplit(")", 1)
    lines, depth, part = [""], 0, ""
    for piece in re.split(r"(, )", inside):
        depth += piece.count("[") + piece.count("(") - piece.count("]") - piece.count(")")
        part += piece
        if piece == ", " and not depth:
            lines.append("") if len(lines[-1] + part) > 90 else None
            lines[-1] += part
            part = ""
    lines.append("") if len(lines[-1] + part) > 90 else None
    lines[-1] += part
    return f"{head}(\n" + "\n".join(f"    {line.rstrip()}" for line in lines if line) + f"\n){result}"


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties with docstrings, in the order of the source; ecornn's own ones."""
    known = {name: value for of in reversed(kind.__mro__) if of.__module__.startswith("ecornn")
             for name, value in vars(of).items()}
    for name, value in known.items():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if (not name.startswith("_") or name == "__call__") and getattr(function, "__doc__", None) and (
                inspect.isfunction(function) or isinstance(value, property)):
            yield name, value


def described(package: str, name: str, thing: Any) -> Iterator[str]:
    """A section for one public name."""
    kind = "class " if inspect.isclass(thing) else ""
    yield f"### {name} {{ #{package}.{name} }}\n"
    plain = inspect.isclass(thing) and thing.__init__ is object.__init__
    yield f"```python\n{wrapped(f'{kind}{package}.{name}', '' if plain else signature(thing))}\n```\n"
    if thing.__doc__:
        yield markdown(thing.__doc__) + "\n"
    if inspect.isclass(thing):
        for member, value in members(thing):
            is_property = isinstance(value, property)
            head = wrapped(f"{name}.{member}", "" if is_property else signature(getattr(value, "__func__", value)))
            anchor = f"{package}.{name}.{member.strip('_')}"
            yield f"#### `{name}.{member}` {{ #{anchor} }}\n\n```python\n{head}\n```\n"
            yield markdown((value.fget if is_property else value).__doc__ or "") + "\n"


def page() -> str:
    """The page as Markdown."""
    out = ["# Python\n", "What is listed here is the public interface; [Compatibility](../COMPATIBILITY.md) says what "
           "that promises. Errors are on [their own page](errors.md).\n"]
    for package in PACKAGES:
        module = import_module(package)
        out.append(f"## {package}\n")
        if module.__doc__:
            out.append(markdown(module.__doc__) + "\n")
        for name in sorted(module.__all__, key=lambda n: (n.lower(), n)):
            thing = getattr(module, name)
            if not isinstance(thing, (ModuleType, str)):
                out += described(package, name, thing)
    return "\n".join(out)


def errors_page() -> str:
    """Every error that a user can cause."""
    from ecornn import errors

    lines = ["# Errors\n", markdown(errors.__doc__ or "") + "\n"]
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and issubclass(kind, Exception) and kind.__module__ == errors.__name__:
            first = inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0]
            bases = ", ".join(f"`{b.__name__}`" for b in kind.__bases__)
            lines.append(f"`{name}`, also {bases}\n:   {inline(' '.join(first.split()))}\n")
    return "\n".join([*lines, ""])

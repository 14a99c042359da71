"""The tables of files in docs/ARCHITECTURE.md, from the first sentence that each file says of itself.

    python docs/site/site_architecture.py            exit code 1, and what differs, where they are not up to date
    python docs/site/site_architecture.py --write    writes them anew
"""

from __future__ import annotations

import ast
import difflib
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "ARCHITECTURE.md"
BEGIN = "<!-- files: written by docs/site/site_architecture.py -->\n"
END = "<!-- files: end -->\n"

FOLDERS = "ecornn", "schedules", "tuning_logs", "benchmarks", "docs/site", "tests"
LEFT_OUT = "tests/data", "tests/packages", "tests/published"  # what tests read, and test cases of their own
LANGUAGES = ".py", ".cc", ".h", ".hpp", ".cu", ".c"
ROLE = re.compile(r":\w+:`~?(?:[\w.]+\.)?(\w+)`")
COMMENT = re.compile(r"\A\s*(?:/\*(?P<block>.*?)\*/|(?P<lines>(?://[^\n]*\n)+))", re.DOTALL)
SENTENCE = re.compile(r"(?<=\.)\s+(?=[A-Z`])")


@cache
def said(path: Path) -> str:
    """The text at the top of a file: its docstring, or its first comment in C, C++ and CUDA."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return ast.get_docstring(ast.parse(text)) or ""
    found = COMMENT.match(text)
    if found is None:
        return ""
    if found["block"]:
        return re.sub(r"^ ?\*? ?", "", found["block"], flags=re.MULTILINE).strip()
    return re.sub(r"^// ?", "", found["lines"], flags=re.MULTILINE).strip()


def first_sentence(text: str) -> str:
    """The first sentence of a docstring as a cell of a Markdown table: one line, without a full stop."""
    words = " ".join(text.split("\n\n")[0].split())
    return ROLE.sub(r"`\1`", SENTENCE.split(words)[0]).replace("``", "`").replace("|", "\\|").removesuffix(".")


def listed(folder: Path) -> list[Path]:
    """The files of a folder that the tables have: of tests what several tests share, not the tests themselves, nor the
    texts that generated code is held against."""
    return [path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix in LANGUAGES
            and path.name not in ("__init__.py", "conftest.py")
            and not (folder.is_relative_to(ROOT / "tests") and (path.name.startswith("test_") or path.suffix == ".cu"))]


def folders() -> Iterator[Path]:
    """The folders, in order. A link, such as those that a checkout may have in ``ecornn/``, is no folder of its own."""
    for name in FOLDERS:
        waiting = [ROOT / name]
        while waiting:
            folder = waiting.pop(0)
            if listed(folder) or (folder / "__init__.py").exists():
                yield folder
            waiting[:0] = [p for p in sorted(folder.iterdir()) if p.is_dir() and not p.is_symlink()
                           and p.relative_to(ROOT).as_posix() not in LEFT_OUT]


def tables() -> str:
    """A heading for each folder, with what its ``__init__.py`` says, and a table of its files."""
    parts = []
    for folder in folders():
        parts.append(f"### {folder.relative_to(ROOT)}/\n")
        if (folder / "__init__.py").exists():
            parts.append(f"{first_sentence(said(folder / '__init__.py'))}.\n")
        rows = [f"| `{path.name}` | {first_sentence(said(path))} |\n" for path in listed(folder)]
        if rows:
            parts.append("| file | what it holds |\n|---|---|\n" + "".join(rows))
    return "\n".join(parts)


def prose(text: str) -> str:
    """The page without its tables."""
    before, rest = text.split(BEGIN)
    return before + rest.split(END)[1]


def written(text: str) -> str:
    """The page with tables of the files as they are."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{tables()}\n{END}{rest.split(END)[1]}"


def differences(text: str) -> list[str]:
    """The lines in which the page's tables differ from the files."""
    lines = difflib.unified_diff(text.splitlines(), written(text).splitlines(), n=0, lineterm="")
    return [line for line in lines if line[0] in "+-" and not line.startswith(("+++", "---"))]


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    wrong = differences(text)
    print("\n".join(wrong) or "docs/ARCHITECTURE.md lists the files as they are")
    if "--write" in sys.argv:
        PAGE.write_text(written(text), encoding="utf-8")
    sys.exit(bool(wrong) and "--write" not in sys.argv)


if __name__ == "__main__":
    main()

"""Pages of the repository as pages of the site: where each lies there, and links between them.

README is the first page, docs/ keeps its paths, and any other file that a page links to comes along below ``source/``:
Markdown as a page, a program as a page that shows it, other files as they are. Links to folders become plain text.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s#]*)(#[^()\s]*)?\)")
MARK = re.compile(r"<!-- (?:figure: [\w.]+|/) -->")  # around figures; not for readers
FENCE = re.compile(r"^(```.*?^```[^\n]*$)", re.DOTALL | re.MULTILINE)
SHOWN = {".py": "python", ".cu": "cuda", ".cc": "cpp", ".h": "cpp"}  # programs, and their languages


def place(source: str) -> str:
    """Where a file of the repository is in the site, both as paths from their roots."""
    if source == "README.md":
        return "index.md"
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    return f"source/{source}" + (".md" if Path(source).suffix in SHOWN else "")


def target(source: str, link: str) -> str | None:
    """The path in the repository that a link of the page ``source`` means; None: it leaves the repository, or stays in
    the page."""
    if not link or "://" in link or link.startswith("mailto:"):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """The text with what is outside of code blocks changed."""
    return "".join(part if part.startswith("```") else change(part) for part in FENCE.split(text))


def links(source: str, text: str) -> Iterator[str]:
    """The files of the repository that a page links to; a missing one is a ValueError."""
    for part in FENCE.split(text):
        for _, _, link, _ in LINK.findall("" if part.startswith("```") else part):
            found = target(source, link)
            if found is not None and found != "docs/reference/knobs.md":  # which is made
                if not (ROOT / found).exists():
                    raise ValueError(f"{source} links to {link}, which is not there")
                yield found


def rewritten(source: str, text: str) -> str:
    """The page with its links as they are in the site."""
    here = posixpath.dirname(place(source))

    def one(match: re.Match[str]) -> str:
        mark, label, link, anchor = match.groups()
        found = target(source, link)
        if found is None:
            return match[0]
        if (ROOT / found).is_dir():
            return label
        return f"{mark}[{label}]({posixpath.relpath(place(found), here or '.')}{anchor or ''})"

    return outside_code(MARK.sub("", text), lambda part: LINK.sub(one, part))


def shown(source: str) -> str:
    """The page of a program."""
    text = (ROOT / source).read_text()
    fence = "`" * 4
    return f"# {source}\n\n{fence}{SHOWN[Path(source).suffix]}\n{text}{fence}\n"


def closure() -> list[str]:
    """README, and what it and the pages of docs/ link to, and so on, that is outside of docs/: paths in the
    repository, files alone."""
    pages = [os.fspath(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").rglob("*.md"))]
    found, todo = {"README.md"}, ["README.md", *pages]
    while todo:
        source = todo.pop()
        for link in links(source, (ROOT / source).read_text()):
            if link not in found and not link.startswith("docs/") and (ROOT / link).is_file():
                found.add(link)
                if link.endswith(".md"):
                    todo.append(link)
    return sorted(found)

"""MkDocs calls these hooks when it builds the site: they make files, rewrite links, and keep pages out of search."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import click
import site_knobs
from mkdocs.structure.files import File, Files
from site_links import ROOT, SHOWN, closure, place, rewritten, shown

UNSEARCHED = "source/CHANGELOG.md", "source/benchmarks/"  # they name everything, and explain nothing


def on_startup(**_: Any) -> None:
    """Makes the examples of commands part of their help, which is what mkdocs-click shows."""
    from ecornn.cli import main

    waiting: list[click.Command] = [main]
    for command in waiting:
        if command.epilog:
            command.help = f"{inspect.cleandoc(command.help or '')}\n\n```text\n{command.epilog.strip()}\n```"
        waiting += getattr(command, "commands", {}).values()


def on_files(files: Files, config: Any) -> Files:
    """Adds the page of knobs, and what pages link to outside of docs/."""
    files.append(File.generated(config, "reference/knobs.md", content=site_knobs.page()))
    for source in closure():
        if source.endswith(".md"):
            content: str | bytes = rewritten(source, (ROOT / source).read_text())
        else:
            content = shown(source) if Path(source).suffix in SHOWN else (ROOT / source).read_bytes()
        files.append(File.generated(config, place(source), content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links of the pages of docs/, which are written as they are in the repository; and whether a search finds it,
    sources after all that explains."""
    made, uri = page.file.generated_by is not None, page.file.src_uri
    page.meta["search"] = {"exclude": uri.startswith(UNSEARCHED), "boost": 0.2 if uri.startswith("source/") else 1}
    return markdown if made else rewritten(f"docs/{page.file.src_uri}", markdown)

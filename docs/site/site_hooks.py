"""What MkDocs asks when it builds the site: files that are made, and links as they are there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import site_api
import site_commands
import site_knobs
from mkdocs.structure.files import File, Files
from site_links import ROOT, SHOWN, closure, place, rewritten, shown

MADE = {"reference/commands.md": site_commands.page, "reference/api.md": site_api.page,
        "reference/errors.md": site_api.errors_page, "reference/knobs.md": site_knobs.page}


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages of reference, and what pages link to outside of docs/."""
    for name, page in MADE.items():
        files.append(File.generated(config, name, content=page()))
    for source in closure():
        if source.endswith(".md"):
            content: str | bytes = rewritten(source, (ROOT / source).read_text())
        else:
            content = shown(source) if Path(source).suffix in SHOWN else (ROOT / source).read_bytes()
        files.append(File.generated(config, place(source), content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links of the pages of docs/, which are written as they are in the repository."""
    made = page.file.generated_by is not None
    return markdown if made else rewritten(f"docs/{page.file.src_uri}", markdown)

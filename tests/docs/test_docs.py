"""README and docs: code that runs as it stands, commands that are right, variables that are all there, links that lead
somewhere; and the first ten minutes: pages of what was carried out, and what those in docs must show."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import chromium
import click
import figures
import first_minutes
import pytest
import site_links
import site_support
from first_minutes import Step
from rooms import ROOT

PAGES = figures.pages()
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
BLOCK = re.compile(r"((?:<!-- not run: [^>]+ -->\n)?)^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
RUN = ["README.md", "docs/GETTING_STARTED.md", "docs/EXPORT.md",
       *(name for name in NAMES if name.startswith("docs/tutorials/"))]
RUN = [name for name in RUN if "```python" in (ROOT / name).read_text()]

# Pages of the site whose layout is looked at: each has what others have not.
LAID_OUT = ("index", "CONCEPTS", "FIRST_MINUTES_CPU", "PERFORMANCE", "reference/commands", "reference/api")


def blocks(name: str, language: str) -> list[str]:
    """The code of a page in that language, but for what says that it is not run, and why."""
    return [code for skipped, of, code in BLOCK.findall((ROOT / name).read_text()) if of == language and not skipped]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_code_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The Python of a page, one block after the other, in one file that a cell's source can be read of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ECORNN_TUNING_LOGS", str(tmp_path / "logs"))
    found = blocks(name, "python")
    assert found
    file = tmp_path / "page.py"
    file.write_text("\n".join(found))
    exec(compile(file.read_text(), file, "exec"), {"__name__": "page"})


def commands(name: str) -> list[list[str]]:
    """The commands of ecornn in a page's shell blocks, as words."""
    lines = "".join(blocks(name, "sh"))
    words = [shlex.split(line, comments=True) for line in lines.replace("\\\n", " ").splitlines()]
    return [w for w in words if w and w[0].startswith("ecornn")]


@pytest.mark.parametrize("name", [name for name in NAMES if commands(name)])
def test_commands_parse(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every command and option is there and takes what it is given; nothing is carried out."""
    from ecornn.cli import main

    monkeypatch.chdir(tmp_path)
    for word in commands(name):
        first, *rest = word
        command: click.Command = main
        rest = [*first.split("-")[1:], *rest]  # ecornn-tune is ecornn tune
        context = click.Context(main, info_name="ecornn")
        while isinstance(command, click.Group):
            found = command.get_command(context, rest.pop(0))
            assert found is not None, word
            command = found
        command.make_context(command.name, rest, parent=context)


def test_a_wrong_option_is_seen():
    from ecornn.cli import compile

    with pytest.raises(click.UsageError):
        compile.make_context("compile", ["--cell", "lstm", "--hiden", "8"])


@pytest.mark.parametrize("name", NAMES)
def test_links(name: str):
    text = (ROOT / name).read_text()
    for _ in site_links.links(name, text):
        pass  # a missing file raises
    # there a comment would make a line of HTML of what follows
    assert not re.search(r"^<!-- (figure:|/)", text, re.MULTILINE)


def test_a_missing_link_is_seen():
    with pytest.raises(ValueError, match=r"nothing\.md"):
        list(site_links.links("docs/FAQ.md", "see [it](nothing.md), and ```[this](no.md)```"))


def test_every_environment_variable_is_listed():
    read = re.compile(r"""["'](ECORNN_[A-Z_]+)["']""")
    files = [ROOT / "setup.py", *(path for folder in ("ecornn", "schedules", "tests", "benchmarks")
                                  for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".h", ".cc"))]
    found = {name for path in files for name in read.findall(path.read_text())}
    listed = set(re.findall(r"`(ECORNN_[A-Z_]+)\b", (ROOT / "docs" / "ENVIRONMENT.md").read_text()))
    assert {"ECORNN_CACHE", "ECORNN_OPENMP", "ECORNN_TUNING_LOGS"} <= found
    assert found == listed


def test_what_works_where():
    """The README's table is what the schedules say."""
    text = (ROOT / "README.md").read_text()
    there = text.split(site_support.BEGIN)[1].split(site_support.END)[0].split()
    assert there == " ".join(site_support.support()).split()


def test_nothing_is_installed_by_a_name_that_no_index_has():
    """Of ecornn there are checkouts and wheel files; a package of that name on an index would be somebody else's."""
    folders = [ROOT / name for name in ("benchmarks", "docs", "ecornn", "examples")]
    files = [*ROOT.glob("*.md"), ROOT / "Makefile",
             *(path for folder in folders for path in folder.rglob("*") if path.suffix in (".md", ".py"))]
    found = {path.name for path in files if re.search(r"pip install (-\S+ )*['\"]?ecornn(?!-\d)", path.read_text())}
    assert len(files) > 200 and not found


def test_the_readme_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 110
    assert {"make run", "make test"} <= {line.split("  ")[0] for line in lines}


def test_the_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """It builds without warnings, no page asks a network for anything, and none scrolls sideways on a phone."""
    build = pytest.importorskip("mkdocs.commands.build")
    from mkdocs.config import load_config

    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site"), strict=True)
    with caplog.at_level("WARNING", "mkdocs"):
        build.build(config)
    assert not caplog.records
    pages = list((tmp_path / "site").rglob("*.html"))
    assert {"index.html", "commands.html", "knobs.html", "api.html"} <= {page.name for page in pages}
    for page in pages:
        fetched = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(?:https?:)?//[^>]*>|"
                             r"<link\b[^>]*\bhref=\"?(?:https?:)?//[^>]*>", page.read_text())
        assert not fetched, page
    knobs = (tmp_path / "site" / "reference" / "knobs.html").read_text()
    assert "more product warps: less work each" in knobs
    if chromium.program() is not None:
        chromium.fits(chromium.looked(tmp_path / "site", [f"{page}.html" for page in LAID_OUT]))


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("FIRST_MINUTES_*.md")), ids=lambda page: page.stem)
def test_the_first_result_comes_within_three_minutes_and_nothing_is_silent(page: Path):
    text = page.read_text()
    (seconds,) = re.findall(r"to the first checked result it takes (\d+) s", text)
    assert int(seconds) < 180
    told = re.findall(r"^[\d.]+ s(?:, exit code \d)?; silent for ([\d.]+) s at most\.$", text, re.M)
    silent = list(map(float, told))
    assert len(silent) == len(re.findall(r"^\$ ", text, re.M)) > 8 and max(silent) <= 10
    assert "relative error of y" in text and "Traceback" not in text


def test_commands_are_told_as_they_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What they print, in order, their codes, how long they said nothing; and the page."""
    looks = itertools.chain((0.0, 1.0, 31.0), itertools.count(32.0))  # at the begin, at each line, and at the end
    monkeypatch.setattr(first_minutes, "time", SimpleNamespace(monotonic=lambda: next(looks)))
    steps = [Step("One:", "echo begun; echo relative error of y 1e-7; echo on stderr >&2"),
             Step("Two:", "exit 3", 3), Step("Three:", "pwd; cat leaky.py | head -1")]
    (tmp_path / "work").mkdir()
    done = list(first_minutes.done(steps, tmp_path / "work", in_place=True))
    assert [ran.code for _, ran in done] == [0, 3, 0] and (done[0][1].silence, done[0][1].seconds) == (30.0, 33.0)
    assert done[0][1].quiet == "begun" and done[2][1].output.startswith("/tmp/first\nfrom ecornn import")
    text = first_minutes.page("on a machine", True, done)
    assert "$ exit 3\n```\n" in text and ", exit code 3; silent for" in text and "Installing is not among it" in text
    assert "it takes 33 s." in text
    assert "Installing" not in first_minutes.page("on a machine", False, done)


def test_a_user_has_nothing_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ECORNN_TUNING_LOGS", "/somewhere")
    monkeypatch.setenv("PYTHONPATH", "/packages")
    new = first_minutes.environment_of(tmp_path, in_place=False)
    assert "ECORNN_TUNING_LOGS" not in new and "PYTHONPATH" not in new and new["HOME"] == str(tmp_path)
    own = first_minutes.environment_of(tmp_path, in_place=True)
    assert "ECORNN_TUNING_LOGS" not in own and own["PYTHONPATH"].split(":")[1:] == ["/packages"]

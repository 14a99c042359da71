"""README and docs: code and commands that run, links, first minutes, figures of the files of results, CELLS.md."""

import inspect
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import chromium
import click
import figures
import first_minutes
import numpy as np
import pytest
import report
import site_links
import site_support
from first_minutes import Step
from measured_rows import read
from published import CELLS
from rooms import ROOT
from test_cli import COMMANDS
from test_published_cells import LIMIT, drawn, flat, formula
from tvm import te, tirx

import ecornn
from ecornn import cli
from ecornn.analysis import analyse
from ecornn.cells import Cell, pointwise, product
from ecornn.cli.cell_checks import Checks
from ecornn.errors import CellError
from ecornn.host_cpu import detect
from ecornn.schedules import all_schedules
from ecornn.schedules.cpu import CPUSequence
from ecornn.tune.oracle import relative_error

NAMES = [page.relative_to(ROOT).as_posix() for page in figures.pages()]
BLOCK = re.compile(r"((?:<!-- not run: [^>]+ -->\n)?)^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
RUN = ["README.md", "docs/GAINS.md", "docs/GETTING_STARTED.md", "docs/EXPORT.md",
       *(name for name in NAMES if name.startswith("docs/tutorials/"))]
RUN = [name for name in RUN if "```python" in (ROOT / name).read_text()]

# Pages of the site whose layout is looked at: each has what others have not.
LAID_OUT = ("index", "CONCEPTS", "EXAMPLES", "FIRST_MINUTES_CPU", "GAINS", "PERFORMANCE", "reference/commands",
            "reference/api")


def blocks(name: str, language: str) -> list[str]:
    return [code for skipped, of, code in BLOCK.findall((ROOT / name).read_text()) if of == language and not skipped]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by PyTorch's own forward derivatives
@pytest.mark.parametrize("name", RUN)
def test_code_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ECORNN_TUNING_LOGS", str(tmp_path / "logs"))
    found = blocks(name, "python")
    assert found
    file = tmp_path / "page.py"
    file.write_text("\n".join(found))
    exec(compile(file.read_text(), file, "exec"), {"__name__": "page"})


def commands(name: str) -> list[list[str]]:
    lines = "".join(blocks(name, "sh"))
    words = [shlex.split(line, comments=True) for line in lines.replace("\\\n", " ").splitlines()]
    return [w for w in words if w and w[0].startswith("ecornn")]


@pytest.mark.parametrize("name", [name for name in NAMES if commands(name)])
def test_commands_parse(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for word in commands(name):
        first, *rest = word
        command: click.Command = cli.main
        rest = [*first.split("-")[1:], *rest]  # ecornn-tune is ecornn tune
        context = click.Context(cli.main, info_name="ecornn")
        while isinstance(command, click.Group):
            found = command.get_command(context, rest.pop(0))
            assert found is not None, word
            command = found
        command.make_context(command.name, rest, parent=context)


@pytest.mark.parametrize("name", NAMES)
def test_links(name: str):
    text = (ROOT / name).read_text()
    for _ in site_links.links(name, text):
        pass  # a missing file raises
    # there a comment would make a line of HTML of what follows
    assert not re.search(r"^<!-- (figure:|/)", text, re.MULTILINE)


@pytest.mark.parametrize("name", [*NAMES, "CONTRIBUTING.md"])
def test_files_that_it_names_are_there(name: str):
    text = (ROOT / name).read_text()
    files = set(re.findall(r"`((?:ecornn|schedules|tests|benchmarks|examples|docs)/[\w/.-]+\.\w+)`", text))
    assert not {file for file in files if not (ROOT / file).exists()}


def test_every_environment_variable_is_listed():
    files = [ROOT / "setup.py", *(path for folder in ("ecornn", "schedules", "tests", "benchmarks")
                                  for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".h", ".cc"))]
    found = {name for path in files for name in re.findall(r"""["'](ECORNN_[A-Z_]+)["']""", path.read_text())}
    listed = set(re.findall(r"`(ECORNN_[A-Z_]+)\b", (ROOT / "docs" / "ENVIRONMENT.md").read_text()))
    assert {"ECORNN_CACHE", "ECORNN_OPENMP", "ECORNN_TUNING_LOGS"} <= found and found == listed


def test_what_works_where():
    there = (ROOT / "README.md").read_text().split(site_support.BEGIN)[1].split(site_support.END)[0].split()
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
    assert len(lines) <= 110 and {"make run", "make test"} <= {line.split("  ")[0] for line in lines}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site; of a process without PyTorch, where a warning is an error."""
    pytest.importorskip("mkdocs_click")
    folder = tmp_path_factory.mktemp("docs") / "site"
    code = "import sys; sys.modules['torch'] = None; from mkdocs.__main__ import cli; cli()"
    subprocess.run([sys.executable, "-c", code, "build", "--strict", "--quiet", "--site-dir", folder], cwd=ROOT,
                   env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True)
    return folder


def test_the_site_needs_no_network(site: Path):
    pages = list(site.rglob("*.html"))
    assert {"index.html", "commands.html", "knobs.html", "api.html"} <= {page.name for page in pages}
    for page in pages:
        fetched = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(?:https?:)?//[^>]*>|"
                             r"<link\b[^>]*\bhref=\"?(?:https?:)?//[^>]*>", page.read_text())
        assert not fetched, page
    if chromium.program() is not None:
        chromium.fits(chromium.looked(site, [f"{page}.html" for page in LAID_OUT]))


def test_pages_have_a_switch_to_dark_and_a_next_one(site: Path):
    found = (site / "index.html").read_text()
    assert re.findall(r'data-md-color-media="([^"]*)"', found) == [
        "(prefers-color-scheme)", "(prefers-color-scheme: light)", "(prefers-color-scheme: dark)"]
    assert 'href="GETTING_STARTED.html" class="md-footer__link' in found


def documented_names(package: ModuleType) -> Iterator[str]:
    """Yields the public names of a package, and the methods of its classes that have docstrings."""
    for name in package.__all__:
        yield f"{package.__name__}.{name}"
        for kind in getattr(getattr(package, name), "__mro__", ()):
            for member, value in vars(kind).items() if kind.__module__.startswith("ecornn") else ():
                if inspect.isfunction(value) and value.__doc__ and (member[0] != "_" or member == "__call__"):
                    yield f"{package.__name__}.{name}.{member}"


def test_the_reference_is_complete(site: Path):
    """A name without a docstring has no heading there."""
    pages = {page.stem: page.read_text() for page in (site / "reference").iterdir()}
    headings = set(re.findall(r'<h\d id="([^"]+)"', "".join(pages.values())))
    packages = re.findall(r"^::: (.+)$", (ROOT / "docs/reference/api.md").read_text(), re.MULTILINE)
    names = {name for package in packages for name in documented_names(import_module(package))}
    names |= {f"ecornn.errors.{name}" for name in vars(ecornn.errors) if name.endswith("Error")}
    commands = {"-".join(("ecornn", *command)) for command in COMMANDS}
    assert names - headings == {"ecornn.__version__", "ecornn.errors"} and commands <= headings
    assert "ecornn check-cell mine.py:Mine" in pages["commands"]  # an example
    assert set(all_schedules()) <= headings and "warps that multiply. More: less work for each" in pages["knobs"]


def test_a_search_finds_words_of_pages_and_nothing_of_notes_and_changes(site: Path):
    found = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    words = {name: (ROOT / name).read_text().lower() for name in NAMES}
    for word in ("docker", "lightning", "notebook", "quantize", "surrogate"):
        there = any(word in text for text in words.values())
        assert there == any(word in (part["title"] + part["text"]).lower() for part in found), word
    left_out = re.compile(r"source/(CHANGELOG|benchmarks)")
    assert len(found) > 200 and not [part for part in found if left_out.match(part["location"])]
    sources = [part for part in found if part["location"].startswith("source/")]
    assert sources and all(part["boost"] < 1 for part in sources)


@pytest.mark.parametrize(("word", "wanted"), [("docker", "tutorials/deploying"), ("notebook", "EXAMPLES"),
                                              ("quantize", "TRAINING"), ("surrogate", "CELLS")])
def test_the_search_of_a_page_in_a_folder_shows(site: Path, word: str, wanted: str):
    if chromium.program() is None:
        # optional: the test before it reads the search's index without a browser
        pytest.skip("there is no Chromium here, and only a browser runs the search's JavaScript")
    page = chromium.run("--virtual-time-budget=20000", "--dump-dom", f"{(site / 'index.html').as_uri()}?q={word}")
    shown = re.findall(r'<a href="([^"]*)" class="md-search-result__link', page)
    assert any(f"/{wanted}.html" in link for link in shown) and "/source/" not in shown[0]


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("FIRST_MINUTES_*.md")), ids=lambda page: page.stem)
def test_the_first_gain_comes_within_two_minutes_and_nothing_is_silent(page: Path):
    text = page.read_text()
    (seconds,) = re.findall(r"to the first checked result it takes (\d+) s", text)
    (gain,) = re.findall(r"to the first printed gain it takes (\d+) s", text)
    assert int(seconds) < 300 and int(gain) < 120
    silent = list(map(float, re.findall(r"^[\d.]+ s(?:, exit code \d)?; silent for ([\d.]+) s at most\.$", text, re.M)))
    assert len(silent) == len(re.findall(r"^\$ ", text, re.M)) > 8 and max(silent) <= 10
    assert "relative error of y" in text and "Traceback" not in text


def test_commands_are_told_as_they_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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
    assert "it takes 33 s." in text and "Installing" not in first_minutes.page("on a machine", False, done)


def test_a_user_has_nothing_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ECORNN_TUNING_LOGS", "/somewhere")
    monkeypatch.setenv("PYTHONPATH", "/packages")
    new = first_minutes.environment_of(tmp_path, in_place=False)
    assert "ECORNN_TUNING_LOGS" not in new and "PYTHONPATH" not in new and new["HOME"] == str(tmp_path)
    own = first_minutes.environment_of(tmp_path, in_place=True)
    assert "ECORNN_TUNING_LOGS" not in own and own["PYTHONPATH"].split(":")[1:] == ["/packages"]


RESULTS = ROOT / "benchmarks" / "results"
TABLES = ("h100.json", "h100_grid.jsonl", "h100_flashrnn.json", "h100_flashrnn_training.json", "h100_stacks.json",
          "cpu_skylake.json", "h100_published.jsonl", "h100_heads.jsonl", "h100_classes.jsonl",
          "h100_integer_weights.jsonl")
SLOW = "search."  # figures of whole searches take ten seconds to read


def test_tables():
    text = "".join((ROOT / page).read_text() for page in report.PAGES)
    marks = set(re.findall(r"<!-- (measured[\w-]*): begin -->", text))
    for name in TABLES:
        mark, lines = report.section((RESULTS / name).relative_to(ROOT))
        assert text.count("\n".join([f"<!-- {mark}: begin -->", "", *lines, "", f"<!-- {mark}: end -->"])) == 1, mark
        marks.remove(mark)
    assert not marks, "tables of no file"


def test_the_plot():
    log = read(RESULTS / "h100_grid.jsonl")
    picture = report.svg(log)
    assert (ROOT / "docs" / "images" / "speed.svg").read_text() == picture
    assert picture.count("<title>") == 88, "a dot for each layer of the grid"
    on_cpu = report.svg(read(RESULTS / "cpu_skylake.json"))
    assert (ROOT / "docs" / "images" / "speed_cpu.svg").read_text() == on_cpu and on_cpu.count("<title>") == 48
    log.rows[0]["ratio"] = 0.9
    assert ": 0.90x" in report.svg(log) and ": 0.90x" not in picture


@pytest.mark.parametrize("name", NAMES)
def test_sentences(name: str):
    text = (ROOT / name).read_text()
    marked = [(of, " ".join(has.split())) for _, of, has, _ in figures.MARKED.findall(text)]
    assert text.count("<!-- figure:") == len(marked), "a mark that is not closed"
    quick = [one for one in marked if not one[0].startswith(SLOW)]
    assert quick == [(of, figures.FIGURES[of]()) for of, _ in quick]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_sentences_on_searches(name: str):
    assert figures.differences((ROOT / name).read_text()) == []


def test_a_figure_that_is_not_that_of_the_results():
    text = "<!-- figure: grid.rows16 -->71<!-- / --> layers"
    assert figures.differences(text) == [("grid.rows16", "71", "70")]
    assert figures.differences(figures.written(text)) == []
    with pytest.raises(KeyError):
        figures.differences("<!-- figure: nothing -->1<!-- / -->")


def test_in_programs_no_layer_is_slower_than_what_it_replaces():
    assert min(figures.in_programs("turns", "ms")) >= 1 and figures.geometric(figures.in_programs("turns", "ms")) >= 1.5
    assert min(figures.in_programs("busy", "ms") + figures.in_programs("busy", "p99_ms")) >= 1
    assert {r["busy"] for r in figures.rows("cpu_in_programs.json") if r["mode"] == "busy"} == {2, 4}


def test_every_figure_is_in_some_page():
    text = "".join(page.read_text() for page in figures.pages())
    assert set(figures.FIGURES) == {name for _, name, *_ in figures.MARKED.findall(text)}


CELLS_PAGE = (ROOT / "docs" / "CELLS.md").read_text()
CELL_BLOCKS = [block for block in re.findall(r"```python\n(.*?)```", CELLS_PAGE, re.DOTALL)
               if block.startswith(("from", "import", "class"))]  # the others are parts of a step
TOLD_ERRORS = [re.findall(r"`([^`]*)`", line)[:2]
               for line in CELLS_PAGE.partition("## Errors you may meet")[2].splitlines() if line.startswith("| `")]
OWN_NAMES = {"ugrnn": {"weight_ih": "W", "weight_hh": "R", "bias": "b"}}  # of the documentation's cell -> ours


@pytest.fixture(scope="module")
def documented() -> dict[str, Cell]:
    known: dict[str, Any] = {"__name__": "cells_of_the_documentation"}
    for block in CELL_BLOCKS:
        exec(compile(block, "CELLS.md", "exec"), known)
    own = [v for v in known.values() if isinstance(v, type) and issubclass(v, Cell) and v is not Cell]
    return {v.name: v() for v in own} | {"of PyTorch": known["cell"]}


def test_there_are_ten_cells_and_six_errors(documented: dict[str, Cell]):
    assert len(TOLD_ERRORS) >= 6 and len(documented) >= 11 and documented.keys() <= CELLS.keys() | {"of PyTorch"}
    assert "module = ecornn.compile(UGRNN()" in CELL_BLOCKS[0]  # so that it was compiled, too


@pytest.mark.parametrize("name", re.findall(r"^    name(?:, \w+)* = \"(\w+)\"", CELLS_PAGE, re.MULTILINE))
def test_its_cells_are_their_formulas(documented: dict[str, Cell], name: str):
    ours, cell = CELLS[name], documented[name]
    x, parameters, states = drawn(ours)
    wanted, last = formula(ours, x, parameters, states)
    names = {theirs: n for n, theirs in OWN_NAMES.get(name, {}).items()}
    y, after = ecornn.reference(cell, x, flat(ours, {names.get(n, n): v for n, v in parameters.items()}), states)
    assert cell.states == ours.states
    for got, want in zip((y, *after), (wanted, *last), strict=True):
        assert relative_error(got, want) <= LIMIT
    assert cell.output_names() == ours.output_names()


def test_its_neurons_train_on_a_cpu(documented: dict[str, Cell]):
    checks = Checks(documented["lif"], 5, 8, 3)
    assert checks.derivative().result == "right"
    forward, gradients = checks.run_one(detect(), CPUSequence(), "float32", None)
    assert (forward.result, gradients.result) == ("right", "right"), gradients.why


def test_a_stack_of_the_first_one_is_its_reference(documented: dict[str, Cell]):
    cell, rng = documented["ugrnn"], np.random.default_rng(0)
    module = ecornn.compile(cell, hidden=8, batch=3, layers=2, bidirectional=True, lengths=True, target="cpu")
    weights = {p.name: rng.uniform(-1, 1, p.shape).astype(np.float32) for p in module.manifest.parameters}
    x, lengths = rng.normal(size=(5, 3, 8)).astype(np.float32), np.array([5, 0, 3])
    y, (last,) = module.bind(weights)(x, lengths=lengths)
    wanted, (end,) = ecornn.reference(cell, x, weights, lengths=lengths)
    assert relative_error(y, wanted) <= LIMIT and relative_error(last, end) <= LIMIT


def test_the_step_of_pytorch_is_the_first_cell(documented: dict[str, Cell]):
    cell, rng = documented["of PyTorch"], np.random.default_rng(0)
    weights = {n: w.double().numpy() for n, w in cell.weights().items()}
    x = rng.normal(size=(5, 3, 6))
    names = {"weight_ih_l0": "x_weight_l0", "weight_hh_l0": "h_weight_l0"}
    other = {n: weights[w] for n, w in names.items()} | {"bias_l0": weights["x_bias_l0"] + weights["h_bias_l0"]}
    y, _ = ecornn.reference(cell, x, weights)
    # both are float64, in other orders of summation; 1e-12 is 4500 of its roundings
    np.testing.assert_allclose(y, ecornn.reference(documented["ugrnn"], x, other)[0], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("written", "message"), TOLD_ERRORS)
def test_errors_are_those_that_are_told(written: str, message: str):
    class Mine(Cell):
        name, states = "mine", ("h",)

        def parameters(self, input, hidden):
            return {"W": (2, hidden, input), "R": (1, hidden, hidden), "v": (1, hidden)}

        def step(self, x, states, p):
            (h,), W, R, v = states, p["W"], p["R"], p["v"]
            known = {"x": x, "h": h, "W": W, "R": R, "v": v, "wx": product(x, W), "te": te, "tirx": tirx,
                     "product": product, "pointwise": pointwise}
            return [pointwise(eval(f"lambda b, j: {written}", known), h)]

    with pytest.raises(CellError) as caught:
        analyse(Mine(), 8, 12)
    assert message in str(caught.value)

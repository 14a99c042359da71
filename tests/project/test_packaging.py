"""The wheel, and the archive of sources that it is made from: all is inside, and works where the checkout is not."""

import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from rooms import ROOT
from wheels import BESIDE, PLACES, environment, install, run

QUICK = ["-q", "-n", "0", "-p", "no:cacheprovider", "tests/tune/test_records.py::test_what_ships_is_whole",
         "tests/tune/test_records.py::test_nothing_is_appended", "tests/cli/test_layer_spec.py"]
RESOURCES = (".py", ".xz", ".cc", ".cu", ".h", ".hpp", ".html", ".json", ".typed", ".cmake", ".pc")


def test_every_extra_is_explained_and_all_has_those_of_users():
    text = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    extras = set(re.findall(r"^(\w+) = ", text, re.MULTILINE))
    table = (ROOT / "docs/GETTING_STARTED.md").read_text().split("| extra | for |")[1].split("\n\n")[0]
    assert extras == {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split(" | ")[0])}
    (everything,) = re.findall(r'^all = \["ecornn\[(.+)\]"\]', text, re.MULTILINE)
    assert extras - {*everything.split(",")} == {"all", "bench", "examples", "docs", "test", "packages", "lint"}


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment") / "venv"
    # A .pth file in site/ adds a folder behind site/, whose own .pth files (the checkout's editable
    # installation among them) are not read: ecornn is the wheel's, all else this environment's.
    others = "\n".join({*map(sysconfig.get_path, ("purelib", "platlib"))}) + "\n"
    (environment(folder) / "dependencies.pth").write_text(others)
    install(wheel, folder)
    return folder / "bin" / "python"


def test_the_wheel_holds_every_file_and_nothing_else(wheel: Path):
    inside = set(zipfile.ZipFile(wheel).namelist())
    expected = {f"{to}/{path.relative_to(ROOT / place).as_posix()}" for place, to in PLACES.items()
                for path in (ROOT / place).rglob("*") if path.suffix in RESOURCES or path.name == "py.typed"}
    assert {"ecornn/program.py", "ecornn/schedules/base.py", "ecornn/py.typed"} <= expected
    missing = sorted(expected - inside)
    assert not missing, f"not in the wheel (see [tool.setuptools] in pyproject.toml): {missing}"
    stray = [name for name in inside if not name.startswith("ecornn/") and ".dist-info/" not in name]
    assert not stray, "one top-level package only"


def read_of(wheel: Path, end: str) -> str:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(end))
    return archive.read(name).decode()


def test_commands_are_declared(wheel: Path):
    text = read_of(wheel, "entry_points.txt")
    assert all(f"{command} = ecornn.console:" in text for command in ("ecornn", "ecornn-tune", "ecornn-compile"))


def test_every_file_says_the_same_version():
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    (line,) = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert line == version
    (date,) = re.findall(r"^date-released: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    newest = re.findall(r"^## \[(.+)\] - (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert newest == (version, date)
    for path, says in (("ecornn-config-version.cmake", f"set(PACKAGE_VERSION {version})\n"),
                       ("ecornn.pc", f"Version: {version}\n")):
        assert says in (ROOT / "ecornn" / "include" / path).read_text()
    pages = {path.name: set(re.findall(r"ecornn-(\d[\w.]*)-py3", path.read_text()))
             for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]}
    assert {page for page, named in pages.items() if named} >= {"GETTING_STARTED.md", "deploying.md"}
    assert not {page: named for page, named in pages.items() if named - {version}}


def test_links_of_the_packages_page_lead_somewhere(wheel: Path, monkeypatch: pytest.MonkeyPatch):
    text = read_of(wheel, "/METADATA")
    assert "Description-Content-Type: text/markdown" in text and "## Tuning" in text and "<!--" not in text
    targets = re.findall(r"\]\(([^()\s]*)\)", text)
    assert targets and all(target.startswith("https://") for target in targets), targets
    monkeypatch.syspath_prepend(ROOT)
    from setup import page

    text = page((ROOT / "README.md").read_text(), "https://example.org/ecornn/blob/main")
    assert "](https://example.org/ecornn/blob/main/docs/CONCEPTS.md)" in text
    assert "![Times" in text and not re.search(r"\]\((?!https://)", text)


@pytest.mark.slow
def test_the_archive_passes_its_own_tests(wheel: Path, installed: Path, tmp_path: Path):
    """A few of them, with the wheel that was made from it."""
    (archive,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(tmp_path)
    (source,) = tmp_path.iterdir()
    for place in (*PLACES, *BESIDE):
        expected = {p.relative_to(ROOT) for p in (ROOT / place).rglob("*")
                    if p.is_file() and not {"__pycache__", ".pytest_cache"} & set(p.parts) and p.suffix != ".so"}
        missing = [str(p) for p in expected if not (source / p).is_file()]
        assert expected and not missing, f"not in the archive (see MANIFEST.in): {missing}"
    assert all((source / name).is_file() for name in ("Makefile", "mkdocs.yml", "CHANGELOG.md", "CITATION.cff",
                                                       "CONTRIBUTING.md", "SECURITY.md"))
    code = f"import pytest, sys; sys.path.remove(''); sys.exit(pytest.main({QUICK}))"
    assert re.search(r"\d+ passed", run(installed, "-c", code, cwd=source, PYTHONPATH=""))


CHECK_LAYOUT = """
import importlib.metadata, pathlib, sys
import ecornn, ecornn.schedules, ecornn.tuning_logs
home = pathlib.Path(sys.prefix)
for module in (ecornn, ecornn.schedules, ecornn.tuning_logs):
    assert home in pathlib.Path(module.__file__).parents, module.__file__
assert ecornn.__version__ == importlib.metadata.version("ecornn")
assert ecornn.schedules.all_schedules()
for log in pathlib.Path(ecornn.tuning_logs.__file__).parent.glob("*.jsonl.xz"):
    print(log.name)
"""

CHECK_PATH = """
import numpy as np
import ecornn
from ecornn.numpy_reference import random_weights
module = ecornn.compile("lstm", hidden=9, input=5, batch=3, seq=4, dtype="float32", target="cpu",
                        out="built.so")  # a relative path: the linker runs in another folder
module.save("tiny.so")
weights = random_weights("lstm", 5, 9)
x = np.random.default_rng(0).standard_normal((4, 3, 5)).astype("float32")
y, state = ecornn.load("tiny.so").bind(weights)(x)
expected, after = ecornn.reference("lstm", x, weights)
for got, want in zip((y, *state), (expected, *after)):
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert error <= 1e-5, error
"""


def test_installed_layout(installed: Path, tmp_path: Path):
    listed = set(run(installed, "-c", CHECK_LAYOUT, cwd=tmp_path, PYTHONPATH="").split())
    assert listed == {path.name for path in (ROOT / "tuning_logs").glob("*.jsonl.xz")}


@pytest.mark.slow
def test_installed_compiles_and_runs(installed: Path, tmp_path: Path):
    run(installed, "-c", CHECK_PATH, cwd=tmp_path, PYTHONPATH="", ECORNN_TUNING_LOGS=str(tmp_path / "logs"))


def test_an_editable_installation_has_the_same_layout(tmp_path: Path):
    """This environment's: ecornn.schedules is schedules/, with no stray top-level name."""
    code = "import ecornn.schedules, ecornn.tuning_logs; print(ecornn.schedules.__file__)"
    file = Path(run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH="").strip())
    assert file.name == "__init__.py" and file.parent.name == "schedules"
    assert file.read_bytes() == (ROOT / "schedules" / "__init__.py").read_bytes()


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_without_its_package_a_front_end_says_what_to_install(name: str):
    code = f"import sys; sys.modules[{name!r}] = None; import ecornn.{name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"MissingPackageError: ecornn.{name} needs {name}, which is not installed: pip install {name}" in done.stderr

"""Installations that run module files: the image of examples/docker/, and programs by CMake and pkg-config."""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import c_abi_sample as sample
import numpy as np
import pytest
import safetensors.numpy
import wheels
from rooms import ROOT

import ecornn

DOCKERFILE = ROOT / "examples" / "docker" / "Dockerfile"
NOBODY: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": []}
USER = NOBODY if os.getuid() == 0 else {}  # of what runs
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "ld", "as")


def instructions() -> list[list[tuple[str, str]]]:
    """Returns the instructions of each stage of the Dockerfile: keywords, and their arguments."""
    lines = re.sub(r"\\\n", "", re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)).splitlines()
    every = [(word, rest) for word, _, rest in (line.partition(" ") for line in lines if line)]
    begin = [n for n, (word, _) in enumerate(every) if word == "FROM"]
    return [every[first:last] for first, last in zip(begin, [*begin[1:], None], strict=True)]


def of(stage: list[tuple[str, str]], keyword: str) -> list[str]:
    return [rest for word, rest in stage if word == keyword]


def packages(text: str) -> set[str]:
    """Returns the packages that the first pip command of a text installs."""
    (words,) = re.findall(r"^pip install ((?:(?!--no-deps)[^&\n])+)", text, re.MULTILINE)
    return {word for word in shlex.split(words) if not word.startswith("-")}


def python_of(user: dict[str, Any]) -> str | None:
    """An interpreter of this version that the user can run."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for found in (sys.executable, *filter(None, (shutil.which(name, path=folder) for folder in os.defpath.split(":")))):
        with contextlib.suppress(PermissionError):
            if subprocess.run([found, "-c", ""], cwd="/", capture_output=True, **user).returncode == 0:
                return found
    return None


@pytest.fixture(scope="module")
def runtime(wheel: Path) -> Iterator[Path]:
    """A new environment with the packages of the image, in a folder that every user can read."""
    with tempfile.TemporaryDirectory(prefix="deploy") as made:
        folder = Path(made)
        folder.chmod(0o755)
        site = wheels.environment(folder / "venv", python_of(USER) or sys.executable)
        wheels.copy((name.partition("==")[0] for name in packages(of(instructions()[1], "RUN")[0])), site)
        wheels.install(wheel, folder / "venv")
        yield folder


def test_packages_are_those_of_the_page():
    page = packages((ROOT / "docs" / "tutorials" / "deploying.md").read_text())
    makefile = re.search(r"^RUNTIME := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert makefile is not None and page <= {*shlex.split(makefile[1])}
    assert packages(of(instructions()[1], "RUN")[0]) == page | {"safetensors"}


def test_the_image_in_substance(runtime: Path):
    """Its stages without Docker: the build stage's command here, what the other has in an environment, as its user."""
    if USER and python_of(USER) is None:
        # the test needs an interpreter that another user may execute, and root's home is closed to others
        pytest.skip("root has the only Python of this version, which no other user can run")
    build, image = instructions()
    for copied in of(build, "COPY"):
        assert all((ROOT / source).exists() for source in copied.split()[:-1]), copied
    home = runtime / "app"
    home.mkdir()
    for source in (of(build, "COPY")[-1], of(image, "COPY")[-1]):
        shutil.copy(ROOT / source.split()[0], home)
    (command,) = (line for line in of(build, "RUN") if line.startswith("ecornn "))
    wheels.run(sys.executable, "-m", *shlex.split(command.replace("$TARGET", "cpu")), cwd=home, PYTHONPATH=str(ROOT))
    before = {path.name for path in home.iterdir()}
    for path in (home, *home.iterdir()):
        path.chmod(0o555)

    (user,), (started,) = of(image, "USER"), of(image, "CMD")
    assert f"useradd --no-create-home --home-dir {of(image, 'WORKDIR')[0]} {user}" in of(image, "RUN")
    inside = os.environ | {"PATH": str(runtime / "venv" / "bin"), "HOME": str(home), "PYTHONPATH": ""}
    assert not any(shutil.which(name, path=inside["PATH"]) for name in COMPILERS)

    def start(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=home, env=inside, capture_output=True, text=True, **USER)

    said = start(*re.findall(r'"([^"]*)"', started))
    assert said.returncode == 0 and re.match("a 5; relative difference", said.stdout), said.stdout + said.stderr
    assert {path.name for path in home.iterdir()} == before
    assert "Permission denied" in start("python", "-c", "open('written', 'w')").stderr
    refused = start("python", "-c", "import ecornn; ecornn.compile('gru', hidden=8)")
    assert refused.returncode == 1 and "MissingPackageError" in refused.stderr, refused.stderr
    assert "this installation can only run module files" in start("ecornn", "doctor").stderr


@pytest.mark.slow
def test_the_build_stage_makes_the_same_wheel(wheel: Path, tmp_path: Path):
    """Of what it copies into its folder /ecornn."""
    for copied in of(instructions()[0], "COPY"):
        *sources, to = copied.split()
        for source in sources if to.startswith("/ecornn") else ():
            place = tmp_path / to.lstrip("/")
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place)
            else:
                place.mkdir(exist_ok=True)
                shutil.copy(ROOT / source, place)
    wheels.run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir",
               tmp_path, tmp_path / "ecornn", cwd=tmp_path)
    first, second = ({info.filename for info in zipfile.ZipFile(file).infolist()}
                     for file in (wheel, tmp_path / wheel.name))
    assert first == second


@pytest.mark.slow
def test_the_image(tmp_path: Path):
    if not shutil.which("docker") or subprocess.run(["docker", "info"], capture_output=True).returncode != 0:
        # without a daemon nothing can be built; test_the_image_in_substance carries out the same stages
        pytest.skip("no Docker runs here")
    wheels.run("docker", "build", "--file", DOCKERFILE, "--iidfile", tmp_path / "image", ROOT, cwd=tmp_path)
    image = (tmp_path / "image").read_text()
    assert "a 5; " in wheels.run("docker", "run", "--rm", "--read-only", "--network=none", image, cwd=tmp_path)
    assert wheels.run("docker", "run", "--rm", image, "id", "-u", cwd=tmp_path).strip() != "0"


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of docs/C.md, and the files that they take."""
    folder = tmp_path_factory.mktemp("programs")
    for name, language in (("main.c", "c"), ("main.cc", "cpp"), ("CMakeLists.txt", "cmake")):
        (folder / name).write_text(sample.documented(language))
    module = ecornn.compile("lstm", hidden=64, input=8, batch=1, target="cpu", out=folder / "lstm64.so")
    safetensors.numpy.save_file(sample.weights_of(module), folder / "lstm64.safetensors")
    return folder


def places(runtime: Path, editable: bool) -> tuple[str, Path]:
    """Returns the folder with the files for CMake and pkg-config, of the installed wheel or of the checkout, and the
    folder of tvm_ffi, which users of a checkout name."""
    from tvm_ffi import libinfo

    (site,) = (runtime / "venv" / "lib").glob("python*/site-packages")
    found = sample.flags("--folder")[0] if editable else str(site / "ecornn" / "include")
    return found, Path(libinfo.find_libtvm_ffi()).parent.parent


@pytest.mark.skipif(not shutil.which("cmake"), reason="no CMake")
@pytest.mark.parametrize("editable", [False, True])
def test_cmake_finds_the_package(runtime: Path, programs: Path, tmp_path: Path, editable: bool):
    found, ffi = places(runtime, editable)
    more = [f"-DCMAKE_PREFIX_PATH={ffi}"] if editable else []
    wheels.run("cmake", "-S", programs, "-B", tmp_path, f"-Decornn_DIR={found}", *more, cwd=tmp_path)
    wheels.run("cmake", "--build", tmp_path, cwd=tmp_path)
    weights = safetensors.numpy.load_file(programs / "lstm64.safetensors")
    y, _ = ecornn.reference("lstm", np.ones((10, 1, 8), np.float32), weights)
    said = wheels.run(tmp_path / "main", cwd=programs)
    np.testing.assert_allclose(float(said.removeprefix("y[T-1][0] = ")), y[-1, 0, 0], rtol=1e-5)


@pytest.mark.skipif(not shutil.which("cmake"), reason="no CMake")
def test_cmake_says_what_is_not_there(programs: Path, tmp_path: Path):
    folder = shutil.copytree(ROOT / "ecornn" / "include", tmp_path / "ecornn" / "include")
    for version, words in (("0.2", "CMAKE_PREFIX_PATH must name the folder"), ("99", 'requested version "99"')):
        text = (programs / "CMakeLists.txt").read_text().replace("ecornn 0.2 ", f"ecornn {version} ")
        source = tmp_path / version
        source.mkdir()
        (source / "CMakeLists.txt").write_text(text)
        (source / "main.cc").touch()
        done = subprocess.run(["cmake", "-S", source, "-B", source / "build", f"-Decornn_DIR={folder}"],
                              capture_output=True, text=True)
        assert done.returncode == 1 and words in " ".join(done.stderr.split()), done.stderr


@pytest.mark.skipif(not shutil.which("pkg-config"), reason="no pkg-config")
@pytest.mark.parametrize("editable", [False, True])
def test_pkg_config_finds_the_package(runtime: Path, programs: Path, tmp_path: Path, editable: bool):
    found, ffi = places(runtime, editable)
    more = [f"--define-variable=tvm_ffi={ffi}"] if editable else []
    flags = shlex.split(wheels.run("pkg-config", "--cflags", "--libs", *more, "ecornn", cwd=tmp_path,
                                   PKG_CONFIG_PATH=found))
    wheels.run("cc", programs / "main.c", *flags, "-o", tmp_path / "main", cwd=tmp_path)
    assert wheels.run(tmp_path / "main", "lstm64.so", cwd=programs).count("step ") == 3
    assert wheels.run("pkg-config", "--modversion", "ecornn", cwd=tmp_path,
                      PKG_CONFIG_PATH=found).strip() == ecornn.__version__

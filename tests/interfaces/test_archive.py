"""Static libraries: two of them in one program of C++, which needs nothing but the C and C++ libraries."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from c_abi_sample import HERE, STRICT, close, flags, run
from click.testing import CliRunner
from rooms import ROOT

import ecornn
from ecornn.build import module
from ecornn.cli import main
from ecornn.errors import ArgumentError, BuildError

LAYERS = {"lstm12": ("lstm", 12, 5), "gru9": ("gru", 9, 4)}
T, B = 7, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With lstm12.a, libgru9.a and their headers."""
    found = tmp_path_factory.mktemp("archives")
    for name, (cell, hidden, input) in LAYERS.items():
        file = found / f"{'lib' if cell == 'gru' else ''}{name}.a"
        sizes = ["--hidden", str(hidden), "--input", str(input), "--batch", str(B)]
        said = CliRunner().invoke(main, ["compile", "--cell", cell, *sizes, "--target", "cpu", "--emit", "archive",
                                         "--emit-to", str(file)])
        assert said.exit_code == 0 and f"wrote {file} and {found / name}.h" in said.output, said.output
    return found


def test_the_program_of_the_documentation(folder: Path):
    text = (ROOT / "docs" / "C.md").read_text()
    (found,) = (code for code in re.findall(r"```cpp\n(.*?)```", text, re.DOTALL) if "lstm64_open" in code)
    (folder / "main.cc").write_text(found.replace("lstm64", "lstm12"))
    subprocess.run(["c++", "-std=c++17", *STRICT, str(folder / "main.cc"), *flags("--cflags"), str(folder / "lstm12.a"),
                    "-pthread", "-ldl", "-o", str(folder / "main")], check=True)
    assert run(folder / "main") == "lstm: 5 inputs, 12 units, 4 weights\n"


def test_two_layers_in_one_program(folder: Path):
    program = folder / "program"
    subprocess.run(["c++", "-std=c++17", "-pthread", *STRICT, f"-I{folder}", str(HERE / "archive_program.cc"),
                    *flags("--cflags"), str(folder / "lstm12.a"), f"-L{folder}", "-lgru9", "-ldl", "-o", str(program)],
                   check=True)
    needed = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=True).stdout
    assert "tvm" not in needed and "libstdc++" in needed
    lines = run(program).splitlines()
    assert len(lines) == 2 * (T + 1)
    for number, (cell, hidden, input) in enumerate(LAYERS.values()):
        mine = lines[number * (T + 1):][:T + 1]
        gates = {"lstm": 4, "gru": 3}[cell]
        shapes = {"weight_ih_l0": (gates * hidden, input), "weight_hh_l0": (gates * hidden, hidden),
                  "bias_ih_l0": (gates * hidden,), "bias_hh_l0": (gates * hidden,)}
        weights = {name: np.full(shape, 0.1, np.float32) for name, shape in shapes.items()}
        y, _ = ecornn.reference(cell, np.ones((T, B, input), np.float32), weights)
        found = np.array([line.split() for line in mine[:-1]], np.float64)
        close(found, np.stack([y[:, 0, 0], y[:, 1, -1]], axis=1))
        assert mine[-1].startswith(f"2 x has shape (7, 3, {input}); expected (T, B, {input})"), mine[-1]


def test_errors_without_libtvm_ffi(tmp_path: Path):
    """What a function of a module says of its error, until it was read, is that of the thread."""
    source = tmp_path / "errors.cc"
    source.write_text('''#include "standalone.cc"
#include <string>
#include <thread>
static std::string Taken() {
  TVMFFIObjectHandle raised;
  TVMFFIErrorMoveFromRaised(&raised);
  if (!raised) return "none";
  const TVMFFIByteArray text = TVMFFIErrorGetCellPtr(raised)->message;
  return std::string(text.data, text.size) + (TVMFFIObjectDecRef(raised) ? "!" : "");
}
int main() {
  const char* parts[] = {"T is ", nullptr, "0"};
  const std::string all(2000, 'x');
  TVMFFIErrorSetRaisedFromCStrParts("ValueError", parts, 3);
  std::thread([] { puts(Taken().c_str()); }).join();
  puts(Taken().c_str());
  puts(Taken().c_str());
  TVMFFIErrorSetRaisedFromCStr("ValueError", all.c_str());
  printf("%zu\\n", Taken().size());
}''')
    build = Path(module.__file__).parent
    subprocess.run(["c++", "-std=c++17", "-pthread", *STRICT, f"-I{build}", *flags("--cflags"), str(source), "-o",
                    str(tmp_path / "errors")], check=True)
    assert run(tmp_path / "errors").split("\n") == ["none", "T is 0", "none", "511", ""]


def test_one_symbol_is_global(folder: Path):
    text = subprocess.run(["nm", "--extern-only", "--defined-only", str(folder / "lstm12.a")], capture_output=True,
                          text=True, check=True).stdout
    assert [line.split()[2] for line in text.splitlines() if len(line.split()) == 3] == ["lstm12_module_api"]


@pytest.mark.parametrize("name", ["layer.so", "64.a", "my-layer.a", "lib.a"])
def test_names_that_are_no_functions(name: str, tmp_path: Path):
    with pytest.raises(ArgumentError, match=r"letters, digits and _ that ends with \.a"):
        module.name_of(tmp_path / name)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(BuildError, match="no objcopy; install binutils"):
        module._tool("objcopy")


def test_the_command_asks_for_a_file_and_a_cpu(tmp_path: Path):
    command = ["compile", "--cell", "gru", "--hidden", "8", "--emit", "archive"]
    said = CliRunner().invoke(main, [*command, "--target", "cpu"])
    assert said.exit_code != 0 and "a static library is not text" in said.output
    said = CliRunner().invoke(main, [*command, "--target", "sm_90a", "--emit-to", str(tmp_path / "gru.a")])
    assert said.exit_code != 0 and "one of step, cuda, tir, ptx for cuda" in said.output and not [*tmp_path.iterdir()]

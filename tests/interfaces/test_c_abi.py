"""Modules called from C and C++: results, refusals, sanitizers, calls without memory or locks."""

import ctypes
import platform
import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import c_abi_sample as sample
import cuda_on_cpu
import ml_dtypes
import numpy as np
import onnx
import pytest
import safetensors.numpy
import torch
from c_abi_sample import check_gradients, close, compiled, drawn, read, run, training_arrays, weights_of, write
from click.testing import CliRunner
from cuda_as_cpp import translate
from onnxruntime_sample import model_of
from refusals import refused

import ecornn
from ecornn import checksum, compiler, host_cpu
from ecornn.analysis import analyse
from ecornn.build import build_module, c_tables, cuda, module
from ecornn.build.generated import Generated
from ecornn.build.link import link
from ecornn.cells import get
from ecornn.cli import main
from ecornn.errors import ArgumentError, BuildError, DeviceError
from ecornn.host_gpu import detect
from ecornn.layer_spec import LayerSpec
from ecornn.numpy_reference import random_weights
from ecornn.runtime.loader import Module
from ecornn.schedules.base import Task
from ecornn.task import make_manifest
from ecornn.workload import Workload

T, B, I, H = 9, 3, 5, 12
# what c_program.c asks for: its code in ecornn.h, and a word of the message
REFUSED = {
    "shape": (2, "expected (T, B, 5)"), "memory": (1, "x has no memory"),
    "dtype": (3, "x is of float64; expected float32"),
    "alignment": (4, "16 bytes"), "strides": (4, "not contiguous"), "device": (5, "x is on DLPack's device (2, 0)"),
    "no x": (1, "x is NULL"), "workspace": (8, "workspace has 16 bytes"), "threads": (1, "threads is 2000"),
    "size": (11, "size is 3"), "newer program": (11, "too old"), "too few weights": (6, "is missing"),
    "weight's name": (6, "weight_of_another is no parameter of lstm"), "weight's dtype": (3, "is of int32"),
    "weight's shape": (2, "expected (48, 5)"), "GPU": (5, "device is 1; expected 0"),
    "no module": (10, "is no module file")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("c")


@pytest.fixture(scope="module")
def generated(folder: Path) -> Generated:
    layer = LayerSpec("lstm", hidden=H, input=I, batch=B, seq=T, training=True)
    return compiler.build(compiler.plan_layer(layer, target="cpu"), folder / "lstm.so")


@pytest.fixture(scope="module")
def lstm(folder: Path, generated: Generated) -> Module:
    return ecornn.load(folder / "lstm.so")


@pytest.fixture(scope="module")
def documented(folder: Path) -> Module:
    return ecornn.compile("lstm", hidden=64, input=8, batch=1, target="cpu", out=folder / "lstm64.so")


@pytest.fixture(scope="module")
def program(folder: Path) -> Path:
    return compiled(sample.HERE / "c_program.c", folder / "c_program")


OPENS = """#include <ecornn.h>
int main(int count, char** paths) {
  for (int n = 1; n < count; ++n) {
    ecornn_error error = {0, ""};
    ecornn_module module;
    int32_t code = ecornn_open(paths[n], &module, &error);
    printf("%d %s\\n", code, error.message);
    ecornn_close(&module);
  }
  return 0;
}
"""


def test_a_file_whose_bytes_have_changed_is_refused_from_c(folder: Path, lstm: Module):
    """And contents of each length to two blocks of SHA-256, with Python's digest behind them, reach the loader."""
    (folder / "opens.c").write_text(OPENS)
    whole, rng = lstm.path.read_bytes(), np.random.default_rng(9)
    places = [0, len(whole) // 2, len(whole) - checksum.SIZE - 1, len(whole) - checksum.SIZE, len(whole) - 17]
    damaged, sound = [folder / f"changed{at}.so" for at in places], [folder / f"sound{size}" for size in range(130)]
    for at, path in zip(places, damaged, strict=True):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1:])
    for size, path in enumerate(sound):
        path.write_bytes(rng.bytes(size))
        checksum.append(path)
    first, *lines = run(compiled(folder / "opens.c", folder / "opens"), lstm.path, *damaged, *sound).splitlines()
    assert first == "0 " and len(lines) == len(damaged) + len(sound)
    for line in lines[:len(damaged)]:
        assert line.startswith("10 ") and "has changed since it was written" in line
    for line in lines[len(damaged):]:  # the loader's own word: no shared library
        assert line.startswith("10 ") and "has changed" not in line and "no module file" not in line, line


@pytest.mark.parametrize("threads", [1, 2])
def test_a_layer_from_c(folder: Path, lstm: Module, program: Path, threads: int):
    here, weights, given = folder / "of_lstm", weights_of(lstm), drawn(x=(T, B, I), h_in=(B, H), c_in=(B, H))
    write(here, weights | given)
    said = run(program, lstm.path, here, T, B, threads)
    x, *before = given.values()
    y, states = ecornn.reference("lstm", x, weights, before)
    close(read(here, "y", T, B, H), y)
    for name, state in zip("hc", states, strict=True):
        close(read(here, f"{name}_out", B, H), state)
    y, _ = ecornn.reference("lstm", x, weights)
    close(read(here, "y_from_zeros", T, B, H), y)
    lines = dict(line.split(": ", 1) for line in said.splitlines())
    assert lines.keys() == REFUSED.keys()
    for what, (code, words) in REFUSED.items():
        assert lines[what].startswith(f"{code} ") and words in lines[what], f"{what}: {lines[what]}"


def test_a_stack_in_both_directions_with_lengths_from_c(folder: Path, program: Path):
    gru = ecornn.compile("gru", hidden=H, input=I, batch=B, seq=T, target="cpu", layers=2, bidirectional=True,
                         lengths=True, out=folder / "gru.so")
    here, weights, given = folder / "of_gru", weights_of(gru), drawn(x=(T, B, I), h_in=(4, B, H))
    lengths = np.array([4, 7, 0], np.int32)
    write(here, weights | given | {"lengths": lengths})
    assert "is no parameter of gru" in run(program, gru.path, here, T, B, 1)
    y, (state,) = ecornn.reference("gru", given["x"], weights, (given["h_in"],), lengths=lengths)
    close(read(here, "y", T, B, 2 * H), y)
    close(read(here, "h_out", 4, B, H), state)


def test_threads_and_a_training_step_from_cpp(folder: Path, lstm: Module):
    here, arrays = folder / "training", training_arrays(lstm)
    write(here, arrays)
    run(compiled(sample.HERE / "cpp_program.cc", folder / "cpp_program"), lstm.path, here, T, B)
    check_gradients(here, arrays, lstm)


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_under_sanitizers(folder, lstm, generated, monkeypatch, sanitizer):
    here, flags = folder / sanitizer[:4], (f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-g")
    write(here, training_arrays(lstm))
    monkeypatch.setenv("CXX", " ".join(("c++", *flags)))
    link(generated, here / "module.so")
    program = compiled(sample.HERE / "cpp_program.cc", here / "program", *flags)
    # TSan's shadow memory wants an address space that is not laid out at random
    before = ["setarch", platform.machine(), "-R"] if shutil.which("setarch") else []
    run(*before, program, here / "module.so", here, T, B)


def test_the_program_of_the_documentation(folder: Path, documented: Module):
    (folder / "documented.c").write_text(sample.documented("c"))
    said = run(compiled(folder / "documented.c", folder / "documented"), documented.path)
    weights = {p.name: np.zeros(p.shape) for p in documented.manifest.parameters}
    for value in weights.values():
        value.reshape(-1)[:len(value)] = 0.1
    x = np.zeros((3, 1, documented.manifest.workload.input))
    x[:, 0, 0] = range(3)
    wanted = ecornn.reference("lstm", x, weights)[0][:, 0, 0]
    printed = [float(v) for v in re.findall(r"= (\S+)", said)]
    np.testing.assert_allclose(printed, wanted, atol=6e-7)  # 5e-7 is half of the sixth decimal, 1e-7 float32's rounding


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_weights_of_a_file_in_cpp_and_in_python(folder: Path, documented: Module, dtype, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    weights = {name: value.astype(dtype) for name, value in weights_of(documented).items()}
    safetensors.numpy.save_file(weights | {"other": np.zeros((2, 2, 2, 2))}, "lstm64.safetensors")
    (folder / "documented.cc").write_text(sample.documented("cpp"))
    program = compiled(folder / "documented.cc", folder / "documented_cpp")
    exec(sample.documented("python"), {})
    numbers = [float(said.removeprefix("y[T-1][0] = ")) for said in (run(program), capsys.readouterr().out)]
    y, _ = ecornn.reference("lstm", np.ones((10, 1, 8)), {n: w.astype(np.float64) for n, w in weights.items()})
    np.testing.assert_allclose(numbers, y[-1, 0, 0], rtol=1e-5)  # six digits are printed


def test_weights_that_a_file_does_not_have(folder: Path, documented: Module):
    (folder / "documented.cc").write_text(sample.documented("cpp"))
    program, file = compiled(folder / "documented.cc", folder / "refusing"), folder / "wrong.safetensors"
    whole = weights_of(documented)
    for weights, code, words in ((None, 10, "cannot be read"), ({"other": whole["bias_ih_l0"]}, 6, "it has other"),
                                 (whole | {"bias_hh_l0": np.zeros((1, 1, 1, 256))}, 2, "4 axes; expected 3 at most"),
                                 (whole | {"bias_hh_l0": np.zeros(255)}, 2, "has shape (255); expected (256)"),
                                 (whole | {"bias_hh_l0": np.zeros(256, np.int64)}, 3, "is of int64")):
        if weights is not None:
            safetensors.numpy.save_file(weights, file)
        done = subprocess.run([program, documented.path, file], capture_output=True, text=True, check=False)
        assert done.returncode == 1 and done.stderr.startswith(f"{code}: ") and words in done.stderr, done.stderr


def test_versions(folder: Path, lstm: Module, program: Path):
    function = ctypes.CDLL(str(lstm.path)).ecornn_module_api
    function.restype = ctypes.POINTER(ctypes.c_int32 * 2)
    assert not function(2) and not function(0) and function(1).contents[0] == 1
    older = folder / "older.so"
    subprocess.run(["c++", "-shared", "-fPIC", "-x", "c++", "-", "-o", older], input="int before;", text=True,
                   check=True)
    checksum.append(older)
    result = subprocess.run([program, older, folder, "1", "1", "1"], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "open: 11 " in result.stderr and "before modules had a C interface" in result.stderr


def test_the_module_asks_for_instructions_in_any_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its C++ code does, besides ecornn.load(), which reads the manifest."""
    planned, out = compiler.plan("rnn_tanh", hidden=8, target="cpu"), tmp_path / "asks.so"
    feature = planned.device.features[0]
    flag = next(name for name, of in host_cpu.FLAGS.items() if of == feature)
    for spelled, there in (("-".join(flag.upper()), True), (f"{flag}_2", False)):
        monkeypatch.setattr(c_tables, "FLAGS", {flag: of for flag, of in host_cpu.FLAGS.items() if of != feature} | {
            spelled: feature})
        compiler.build(planned, out)
        built = ecornn.load(out)
        if there:
            built.bind(weights_of(built))
        else:
            refused(DeviceError, f"uses {spelled}, which this CPU lacks", built.bind, weights_of(built))


def test_what_version_1_of_the_interface_stays(folder: Path):
    """Places of members, sizes and numbers that programs and module files of this version have in them."""
    run(compiled(sample.HERE / "c_version1.c", folder / "c_version1"))


def test_steps_allocate_nothing_and_take_no_lock(folder: Path, lstm: Module):
    program = compiled(sample.HERE / "real_time_program.c", folder / "real_time", "-rdynamic")
    assert re.findall(r"\d+", run(program, lstm.path, 200)) == ["0"] * 3  # allocated, freed, locked


@pytest.mark.skipif(detect() is not None, reason="the driver without a GPU serves modules for sm_90a")
@pytest.mark.parametrize("packs", [False, True])
def test_a_layer_on_a_gpu_from_c(tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch, packs: bool):
    """With weights from the host and from the GPU, packed there where the module has the kernel for it."""
    from test_stacks_cuda import SCHEDULES, TINY, B, H, I, T

    if not packs:
        for builder in (cuda, c_tables):
            monkeypatch.setattr(builder, "packs", lambda program: False)
    task = Task(Workload("gru", H, I, B, T), analyse(get("gru"), I, H), TINY)
    schedule, folder = SCHEDULES["layout_transform"], tmp_path / "arrays"
    program = schedule.program(task, schedule.plan(task, config := schedule.default(task)))
    kernels, source = cuda.lower(program, "sm_90a")
    texts, names = [source], [kernel.symbol for kernel in kernels.values()]
    if packs:
        texts.append(resources.files("ecornn.build").joinpath("pack_weights.cu").read_text())
        names.append(cuda.PACK_SYMBOL)
    cuda_on_cpu.compiled(translate("\n".join(texts)), names, tmp_path)
    build_module(program, make_manifest(get("gru"), task, schedule, config, program, "by a test"), tmp_path / "gru.so")
    weights = weights_of(ecornn.load(tmp_path / "gru.so"))
    x, h = (given := drawn(x=(T, B, I), h_in=(B, H))).values()
    write(folder, weights | given)
    environment = {"FAKE_KERNELS": str(tmp_path / "kernels.so"), "LD_LIBRARY_PATH": str(fake)}
    _, notes = sample.run_both(compiled(sample.HERE / "c_program.c", tmp_path / "c_program"), tmp_path / "gru.so",
                               folder, T, B, 0, **environment)
    y, (state,) = ecornn.reference("gru", x, weights, (h,))
    close(read(folder, "y", T, B, H), y)
    close(read(folder, "h_out", B, H), state)
    for name, sign in (("y_from_zeros", 1), ("y_of_there", 1), ("y_of_negated", -1)):
        signed = {parameter: sign * value for parameter, value in weights.items()}
        close(read(folder, name, T, B, H), ecornn.reference("gru", x, signed)[0])
    assert {*re.findall(r"Launch.* stream=(\d+)", notes)} == {"7"}
    assert notes.count("cuMemAlloc ") == notes.count("cuMemFree ") > 3
    _, bound, *again = notes.partition("repacked")[0].split(" there\n")
    for asked in (bound, *again):
        assert asked.count(f"cuLaunchKernelEx {cuda.PACK_SYMBOL} ") == packs
    for asked in again if packs else []:  # nothing is allocated, copied or waited for
        assert not re.search("cuMem|Synchronize", asked)


LAYERS = {"lstm12": ("lstm", 12, 5), "gru9": ("gru", 9, 4)}


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("archives")
    for name, (cell, hidden, input) in LAYERS.items():
        file = found / f"{'lib' if cell == 'gru' else ''}{name}.a"
        sizes = ["--hidden", str(hidden), "--input", str(input), "--batch", "2"]
        said = CliRunner().invoke(main, ["compile", "--cell", cell, *sizes, "--target", "cpu", "--emit", "archive",
                                         "--emit-to", str(file)])
        assert said.exit_code == 0 and f"wrote {file} and {found / name}.h" in said.output, said.output
    return found


def test_the_program_of_the_documentation_of_archives(archives: Path):
    (archives / "main.cc").write_text(sample.documented("cpp", "lstm64_open").replace("lstm64", "lstm12"))
    program = compiled(archives / "main.cc", archives / "main", last=[archives / "lstm12.a", "-ldl"], alone=True)
    assert run(program) == "lstm: 5 inputs, 12 units, 4 weights\n"


def test_two_layers_in_one_program(archives: Path):
    program = compiled(sample.HERE / "archive_program.cc", archives / "program", f"-I{archives}", alone=True,
                       last=[archives / "lstm12.a", f"-L{archives}", "-lgru9", "-ldl"])
    needed = run("ldd", program)
    assert "tvm" not in needed and "libstdc++" in needed
    lines, steps = run(program).splitlines(), 7
    assert len(lines) == 2 * (steps + 1)
    for number, (cell, hidden, input) in enumerate(LAYERS.values()):
        mine = lines[number * (steps + 1):][:steps + 1]
        weights = {name: np.full_like(w, 0.1) for name, w in random_weights(cell, input, hidden).items()}
        y, _ = ecornn.reference(cell, np.ones((steps, 2, input), np.float32), weights)
        close(np.array([line.split() for line in mine[:-1]], np.float64), np.stack([y[:, 0, 0], y[:, 1, -1]], axis=1))
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
    errors = compiled(source, tmp_path / "errors", f"-I{Path(module.__file__).parent}", alone=True)
    assert run(errors).split("\n") == ["none", "T is 0", "none", "511", ""]


OF_C = """#include "lstm12.h"
int main(void) {
  ecornn_error error = {0, ""};
  ecornn_module module;
  ecornn_layer* layer = NULL;
  int32_t code = lstm12_open(&module, &error) || lstm12_bind(&module, NULL, &layer, &error);
  printf("%d %s\\n", code, error.message);
  ecornn_release(layer);
  return code;
}
"""


def library_with_weights(folder: Path, *given: str | Path) -> list[str | Path]:
    """Makes lstm12.a; returns what is linked with it."""
    said = CliRunner().invoke(main, ["compile", *map(str, given), "--batch", "1", "--target", "cpu", "--embed",
                                     "--emit", "archive", "--emit-to", str(folder / "lstm12.a")])
    assert said.exit_code == 0, said.output
    return [folder / "lstm12.a", "-ldl", "-lstdc++", "-pthread"]


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_a_library_with_weights(kind: str, tmp_path: Path):
    """The library embeds float16 weights from a safetensors file and bfloat16 weights from a checkpoint."""
    lstm = torch.nn.LSTM(5, 12, dtype=torch.float16 if kind == "safetensors" else torch.bfloat16)
    weights, file = {name: value.detach() for name, value in lstm.named_parameters()}, tmp_path / f"weights.{kind}"
    if kind == "safetensors":
        safetensors.numpy.save_file({f"encoder.{name}": value.numpy() for name, value in weights.items()}, file)
    else:
        torch.save({f"encoder.{name}": value for name, value in weights.items()}, file)
    last = library_with_weights(tmp_path, "--cell", "lstm", "--weights-from", file, "--prefix", "encoder.")
    (tmp_path / "main.cc").write_text(sample.documented("cpp", "lstm64_bind").replace("lstm64", "lstm12"))
    number = run(compiled(tmp_path / "main.cc", tmp_path / "main", last=last, alone=True)).removeprefix("y[0] = ")
    y, _ = ecornn.reference("lstm", np.ones((1, 1, 5)), {n: w.double().numpy() for n, w in weights.items()})
    np.testing.assert_allclose(float(number), y[0, 0, 0], rtol=1e-5)


def test_a_library_with_the_weights_of_a_node_in_c(tmp_path: Path):
    onnx.save(model_of("LSTM"), tmp_path / "model.onnx")
    last = library_with_weights(tmp_path, tmp_path / "model.onnx")
    (tmp_path / "main.c").write_text(OF_C)
    assert run(compiled(tmp_path / "main.c", tmp_path / "main", last=last, alone=True)) == "0 \n"


def test_weights_that_cannot_be_in_a_library(tmp_path: Path):
    whole, file = random_weights("lstm", 5, 12), tmp_path / "weights.safetensors"
    stack = ["compile", "--cell", "lstm", "--weights-from", str(file), "--target", "cpu"]
    archive = ["--emit", "archive", "--emit-to", str(tmp_path / "lstm12.a")]
    second = {f"{name[:-1]}1": value for name, value in random_weights("lstm", 12, 12).items() if "bias" not in name}
    for weights, words in ((whole | second, "bias_ih_l1 of the weights is missing; expected shape (48,)"),
                           (whole | second | {"bias_ih_l1": whole["bias_ih_l0"][:3]}, "has shape (3,)")):
        safetensors.numpy.save_file(weights, file)
        said = CliRunner().invoke(main, [*stack, *archive, "--embed"])
        assert said.exit_code != 0 and words in " ".join(said.output.split()), said.output
    for more in (["--output", str(tmp_path / "lstm.so")], ["--emit", "step"]):
        said = CliRunner().invoke(main, [*stack, *more, "--embed"])
        assert said.exit_code != 0 and "--emit archive, and --weights-from or MODEL.onnx" in said.output
    said = CliRunner().invoke(main, [*stack[:3], "--hidden", "8", *archive, "--embed"])
    assert said.exit_code != 0 and "--emit archive, and --weights-from" in said.output
    assert [*tmp_path.iterdir()] == [file]


def test_one_symbol_is_global(archives: Path):
    text = run("nm", "--extern-only", "--defined-only", archives / "lstm12.a")
    assert [line.split()[2] for line in text.splitlines() if len(line.split()) == 3] == ["lstm12_module_api"]


@pytest.mark.parametrize("name", ["layer.so", "64.a", "my-layer.a", "lib.a"])
def test_names_that_are_no_functions(name: str, tmp_path: Path):
    refused(ArgumentError, r"letters, digits and _ that ends with \.a", module.name_of, tmp_path / name)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    refused(BuildError, "objcopy was not found; install binutils", module._tool, "objcopy")


def test_the_command_asks_for_a_file_and_a_cpu(tmp_path: Path):
    command = ["compile", "--cell", "gru", "--hidden", "8", "--emit", "archive"]
    said = CliRunner().invoke(main, [*command, "--target", "cpu"])
    assert said.exit_code != 0 and "a static library is not text" in said.output
    said = CliRunner().invoke(main, [*command, "--target", "sm_90a", "--emit-to", str(tmp_path / "gru.a")])
    assert said.exit_code != 0 and "one of step, cuda, tir, ptx for cuda" in said.output and not [*tmp_path.iterdir()]

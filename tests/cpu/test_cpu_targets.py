"""Which instructions the code for a CPU uses: those that the module names; and CPUs that are not at hand."""

import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import msgspec.structs
import numpy as np
import pytest
from click.testing import CliRunner

import ecornn
from ecornn.cli import main
from ecornn.compiler import generate, plan
from ecornn.device import Device
from ecornn.errors import BuildError, DeviceError
from ecornn.host_cpu import FLAGS, detect, machine_of, promised
from ecornn.targets import resolve

X86 = machine_of(detect()) == "x86_64"


def asm(device: Device, **options: str) -> str:
    return generate(plan("gru", hidden=48, batch=4, target=device, **options)).emitted["asm"]


@pytest.mark.skipif(not X86, reason="reads x86-64 assembly")
def test_nothing_is_used_that_is_not_named():
    whole = detect()
    narrow = msgspec.structs.replace(whole, features=tuple(f for f in whole.features if "avx512" not in f))
    assert "zmm" not in asm(narrow) and "%k1" not in asm(narrow)
    assert not re.search(r"\bv[a-z]+ps\b|ymm", asm(msgspec.structs.replace(whole, features=("sse3", "ssse3"))))


@pytest.mark.skipif(not X86, reason="names of x86-64 CPUs")
def test_features_are_those_that_llvm_uses():
    assert promised(detect().arch, "x86_64-linux-gnu") - set(detect().features) == set()
    skylake = resolve("skylake-avx512")
    assert {"avx512f", "fma", "bmi2"} <= set(skylake.features) and "avx512vnni" not in skylake.features
    assert set(skylake.features) <= set(FLAGS.values())


@pytest.mark.skipif(not X86, reason="names of x86-64 CPUs")
@pytest.mark.parametrize("target", ["x86-64", "haswell", "skylake-avx512"])
def test_a_module_for_an_older_cpu_runs_here(target):
    if missing := set(resolve(target).features) - set(detect().features):
        pytest.skip(f"this CPU is older than {target}: it lacks {', '.join(sorted(missing))}")
    module = ecornn.compile("lstm", hidden=40, input=9, batch=3, target=target)
    generator = np.random.default_rng(0)
    weights = {p.name: generator.uniform(-0.3, 0.3, p.shape).astype(np.float32) for p in module.manifest.parameters}
    x = generator.standard_normal((5, 3, 9), np.float32)
    y_ref = ecornn.reference("lstm", x, weights)[0]
    assert np.linalg.norm(module.bind(weights)(x)[0] - y_ref) < 1e-6 * np.linalg.norm(y_ref)


@pytest.mark.skipif(not X86, reason="crosses from x86-64")
@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_an_object_for_arm(weights, tmp_path):
    file = tmp_path / "lstm.o"
    arguments = ["compile", "--cell", "lstm", "--hidden", "40", "--target", "neoverse-n1", "--weights", weights]
    result = CliRunner().invoke(main, [*arguments, "--emit", "object", "--emit-to", str(file)])
    assert result.exit_code == 0, result.output
    code = file.read_bytes()
    assert code[:4] == b"\x7fELF" and struct.unpack_from("<H", code, 18) == (183,)  # EM_AARCH64
    assert b"__tvm_ffi_worker" in code and b"ecornn_barrier" in code
    assert len(re.findall(r"\tfmla\tv\d+\.4s", asm(resolve("neoverse-n1"), weights=weights))) >= 16
    with pytest.raises(BuildError, match="linked on an aarch64 machine"):
        ecornn.compile("lstm", hidden=40, target="neoverse-n1", out=tmp_path / "lstm.so")
    assert not (tmp_path / "lstm.so").exists()


@pytest.mark.skipif(not X86, reason="crosses from x86-64")
def test_an_object_of_a_stack(tmp_path):
    file = tmp_path / "stack.o"
    result = CliRunner().invoke(main, [
        "compile", "--cell", "gru", "--hidden", "16", "--input", "5", "--layers", "2", "--bidirectional", "--target",
        "neoverse-n1", "--weights", "bfloat16", "--emit", "object", "--emit-to", str(file)])
    assert result.exit_code == 0, result.output
    assert "bfloat16 weights, 2 layers, bidirectional" in result.output
    for end in ("", "_v1", "_v2", "_v3"):
        assert b"__tvm_ffi_worker" + end.encode() + b"\0" in file.read_bytes()


@pytest.mark.skipif(not X86, reason="names of x86-64 CPUs")
def test_tests_can_take_this_cpu_for_another():
    def asked(name: str) -> tuple[int, str]:
        test = f"{Path(__file__).with_name('test_cpu_threads.py')}::test_detect"
        found = subprocess.run([sys.executable, "-m", "pytest", test],
                               env=os.environ | {"ECORNN_TEST_CPU": name}, capture_output=True, text=True, check=False)
        return found.returncode, found.stdout + found.stderr

    status, told = asked("x86-64")
    assert status == 0 and "CPU: taken for x86-64" in told
    status, told = asked("neoverse-v1")
    assert status == pytest.ExitCode.USAGE_ERROR and "lacks" in told and "neon" in told


def test_names_that_llvm_does_not_know():
    with pytest.raises(DeviceError, match=r"target='pdp11':.*neoverse-v1"):
        resolve("pdp11")
    arguments = ["compile", "--cell", "gru", "--hidden", "8", "--target", "cpu", "--emit", "object"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2 and "not text" in result.output


EVERY_NAME = """
import os, sys
from tvm.script import tirx as T
from tvm.target import Target, codegen
from ecornn.build import llvm
from ecornn.compiler import generate, plan
from ecornn.host_cpu import TRIPLES, named

@T.prim_func
def doubled(rows: T.handle):
    values = T.match_buffer(rows, (16,), "float32")
    for n in T.serial(16):
        values[n] = values[n] * T.float32(2)

def compiled(device):
    if sys.argv[1] == "layer":
        return generate(plan("lstm", hidden=24, input=5, batch=3, target=device)).objects["worker.o"]
    return llvm._object(llvm._module({"doubled": doubled}, device))

names = [(triple, str(name)) for triple in TRIPLES
         for name in codegen.llvm_get_cpu_archlist(Target({"kind": "llvm", "mtriple": triple}))]
number = 0
while number < len(names):  # a child goes on until it is ended
    ended, told = os.pipe()
    if not (child := os.fork()):
        for triple, name in names[number:]:
            device = named(name)
            assert device is None or compiled(device)[:4] == b"\\x7fELF"
            os.write(told, b"0" if device is None else b"1")
        os._exit(0)
    os.close(told)
    found = open(ended, "rb").read().decode()
    for (triple, name), one in zip(names[number:], found + "x"):
        print(triple, name, one)
    number += len(found) + 1
    os.waitpid(child, 0)
"""


@pytest.mark.parametrize("what", ["function", pytest.param("layer", marks=pytest.mark.exhaustive)])
def test_llvm_ends_no_process_for_a_name_that_it_knows(what: str, tmp_path: Path):
    (program := tmp_path / "every_name.py").write_text(EVERY_NAME)  # TVM reads its text
    done = subprocess.run([sys.executable, program, what], capture_output=True, text=True, check=True)
    found = {(triple, name): one for triple, name, one in map(str.split, done.stdout.splitlines())}
    assert len(found) > 150 and not [key for key, one in found.items() if one == "x"], done.stderr
    refused = {name for (_, name), one in found.items() if one == "0"}
    assert {"pentium", "i386", "yonah", "athlon"} <= refused
    assert not refused & {"x86-64", "nocona", "core2", "k8", "znver5", "generic", "neoverse-v1"}


@pytest.mark.parametrize("target", ["pentium", "i686", "", "help", "x86-64,+avx", "sm_1", "a\0b"])
def test_a_cpu_that_cannot_be_compiled_for_is_named(target: str):
    with pytest.raises(DeviceError, match=r": .*LLVM's name of a 64-bit CPU"):
        resolve(target)


def test_a_device_that_llvm_would_not_take():
    whole = Device("llvm", "x86-64", "a CPU", 2)
    with pytest.raises(BuildError, match="a 64-bit CPU 'pentium' of x86_64-linux-gnu"):
        asm(msgspec.structs.replace(whole, arch="pentium"))
    with pytest.raises(BuildError, match="these features of 'x86-64' for x86_64-linux-gnu: sve2, wings"):
        asm(msgspec.structs.replace(whole, features=("avx", "sve2", "wings")))


@pytest.mark.skipif(not X86, reason="reads x86-64 assembly")
@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_features_go_with_those_that_they_need(weights: str):
    """Without "fma" LLVM would take "avx512f" away, by which the schedule goes, and end the process."""
    server = resolve("sapphirerapids")
    left = tuple(set(server.features) - {"fma", "sse4.2"})
    assert "zmm" in asm(msgspec.structs.replace(server, features=left), weights=weights)

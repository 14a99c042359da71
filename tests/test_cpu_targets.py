"""Which instructions the code for a CPU uses: those that the module names; and CPUs that are not at hand."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

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
    """Every instruction set that the CPU's name lets LLVM use, of those it uses of its own accord, is named."""
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
    """One file, whatever the number of functions: layers of other widths and both directions are apart."""
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
    with pytest.raises(DeviceError, match=r"target='pdp11' is not allowed.*neoverse-v1"):
        resolve("pdp11")
    arguments = ["compile", "--cell", "gru", "--hidden", "8", "--target", "cpu", "--emit", "object"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2 and "not text" in result.output


def test_a_full_temporary_folder_is_an_error_that_can_be_caught(monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    with pytest.raises(BuildError, match="less than 16 MiB left"):
        generate(plan("rnn_tanh", hidden=8, target="cpu"))

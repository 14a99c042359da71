"""Compilers of a CUDA module: nvcc, NVRTC, the host's C++ compiler, what they say; and the cache of what they made."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cuda_sample
import psutil
import pytest
from events import LIMIT, until
from refusals import refused

import ecornn.compiler
from ecornn.build import cache, nvcc, nvrtc
from ecornn.build import link as linking
from ecornn.build.commands import at_the_same_time
from ecornn.build.cuda import lower
from ecornn.build.generated import Generated
from ecornn.build.link import link
from ecornn.compiler import plan
from ecornn.errors import ArgumentError, BuildError, DeviceError
from ecornn.host_gpu import architecture
from ecornn.layer_spec import LayerSpec


@pytest.fixture
def real_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    if nvcc.find_nvcc() is None:
        pytest.skip("nvcc is optional, and this is about the real one; NVRTC has tests of its own")
    monkeypatch.setenv(nvcc.ENVIRONMENT, "nvcc")


def test_nvcc_and_its_errors(real_nvcc: None):
    with pytest.raises(BuildError, match=r"(?s)nvcc failed for sm_90a.*kernels\.cu\(2\).*nonsense"):
        nvcc.compile_cubin("// first line\nnonsense", "sm_90a")
    assert ".target sm_90a" in nvcc.ptx('extern "C" __global__ void empty() {}', "sm_90a")


@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.exhaustive), "sm_90a"])
def test_short_headers_make_the_same_code(real_nvcc: None, arch: str):
    plans = [plan("slstm", hidden=64, batch=3, dtype=dtype, precision=precision, target=arch, schedule=schedule)
             for schedule, dtype, precision in (("persistent", "float16", None), ("layout_transform", "bfloat16", None),
                                                ("persistent", "float32", "exact"), ("persistent", "float32", "tf32"))]
    # rows and columns beyond x are constants of 16 bits
    plans.append(plan("lstm", hidden=130, input=65, batch=20, dtype="float16", target=arch, schedule="persistent"))
    for program in (cuda_sample.program(), *(made.programs()[0] for made in plans)):
        source = lower(program, arch)[1]
        short = nvcc.short(source)
        assert short is not None and "#include <" not in short
        code = [b"".join(nvcc._nvcc(str(nvcc.find_nvcc()), text, arch, "ptx", defines)[0].split())
                for text, defines in ((source, ()), (short, nvcc.DEFINES))]
        assert code[0] == code[1]


def test_what_short_headers_lack_is_compiled_with_all(monkeypatch: pytest.MonkeyPatch):
    source = lower(plan("rnn_tanh", hidden=64, dtype="bfloat16", target="sm_90a").programs()[0], "sm_90a")[1]
    tried: list[str] = []
    def compile(_: str, text: str, *rest: object) -> tuple[bytes, str]:
        tried.append(text)
        if "__hadd" in text and text != source:
            raise BuildError("nvcc failed for sm_90a with status 1:\n"
                             'kernels.cu(9): error: identifier "__hadd" is undefined')
        return b"cubin", ""

    monkeypatch.setattr(nvcc, "chosen_nvcc", lambda: "nvcc")
    monkeypatch.setattr(nvcc, "_nvcc", compile)
    assert nvcc._compile(source, "sm_90a", "cubin")[0] == b"cubin" and tried == [nvcc.short(source)]
    tried.clear()
    source += "\n// __hadd\n"
    assert nvcc._compile(source, "sm_90a", "cubin")[0] == b"cubin" and tried == [nvcc.short(source), source]
    # a name that only CUDA's headers define would choose another branch, and is no error
    assert nvcc.short(source + "#if CUDART_VERSION > 12000\n#endif\n") is None
    assert nvcc.short("int another_source;") is None


@pytest.mark.parametrize(("says", "ends", "message", "calls"), [
    ("ptxas error   : Entry function 'f' uses too much shared data (0x61a80 bytes, 0x38c00 max)", "exit 255",
     "status 255:\nptxas error", 1),
    ("ptxas /tmp/kernels.ptx, line 26; error   : Not a name of any known instruction: 'x'", "exit 255", "line 26", 1),
    ("", "kill -9 $$", "status -9", 1),
    ('kernels.cu(7): error: identifier "erfcf" is undefined', "exit 1", "erfcf", 2),
    ("kernels.cu:3:10: fatal error: crt/host_defines.h: No such file or directory", "exit 1", "host_defines", 2)])
def test_only_what_headers_can_mend_is_compiled_again(monkeypatch, tmp_path, says, ends, message, calls):
    """A program in nvcc's place that fails once: a second attempt would succeed, and must not be made for others."""
    fake, noted, said = (tmp_path / name for name in ("nvcc", "noted", "said"))
    said.write_text(says)
    fake.write_text(f'#!/bin/sh\necho called >> {noted}\n'
                    f'[ $(wc -l < {noted}) = 1 ] && {{ cat {said} >&2; {ends}; }}\n'
                    'while [ "$1" != -o ]; do shift; done\nprintf cubin > "$2"\n')
    fake.chmod(0o755)
    monkeypatch.setattr(nvcc, "chosen_nvcc", lambda: str(fake))
    source = lower(plan("rnn_tanh", hidden=64, dtype="bfloat16", target="sm_90a").programs()[0], "sm_90a")[1]
    assert nvcc.short(source) is not None
    if calls == 1:
        refused(BuildError, message, nvcc._compile, source, "sm_90a", "cubin")
    else:
        assert nvcc._compile(source, "sm_90a", "cubin") == (b"cubin", "")
    assert len(noted.read_text().splitlines()) == calls


def test_a_missing_cuda_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nvcc, "find_nvcc", lambda: None)
    monkeypatch.setattr(nvrtc, "available", lambda: False)
    for choice in ("", "nvcc", "nvrtc"):
        monkeypatch.setenv(nvcc.ENVIRONMENT, choice)
        refused(BuildError, r"pip install '\.\[cuda\]'", nvcc.compile_cubin, "", "sm_90a")
    monkeypatch.setenv(nvcc.ENVIRONMENT, "clang")
    refused(ArgumentError, nvcc.ENVIRONMENT, nvcc.compile_cubin, "", "sm_90a")


def test_resources_are_those_of_the_entry():
    log = ("ptxas info    : Compiling entry function 'a' for 'sm_90a'\n"
           "ptxas info    : Function properties for a\n"
           "    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n"
           "ptxas info    : Used 60 registers, used 1 barriers, 24832 bytes smem, 400 bytes cmem[0]\n"
           "ptxas info    : Function properties for helper\n"
           "    99 bytes stack frame, 99 bytes spill stores, 99 bytes spill loads\n"
           "ptxas info    : Compiling entry function 'b' for 'sm_90a'\n"
           "ptxas info    : Used 9 registers, used 0 barriers\n")
    assert nvcc.parse_resources(log) == {
        "a": {"registers": 60, "stack": 8, "spill_stores": 4, "spill_loads": 12, "shared": 24832},
        "b": {"registers": 9, "stack": 0, "spill_stores": 0, "spill_loads": 0, "shared": 0}}


def test_nvrtc_does_the_same(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(nvcc.ENVIRONMENT, "nvrtc")
    source = lower(cuda_sample.program(), "sm_90a")[1]
    assert all(f"#include <{name}.h>" in source for name in ("cuda_fp16", "cuda_bf16"))
    cubin, resources = nvcc.compile_cubin(source, "sm_90a")
    assert cubin[:4] == b"\x7fELF" and set(resources) == {"total_kernel", "step_kernel", "last_kernel"}
    assert all(r["registers"] > 0 and r["spill_stores"] == 0 for r in resources.values())
    assert ".target sm_90a" in nvcc.ptx(source, "sm_90a")
    refused(BuildError, r"(?s)NVRTC failed for sm_90a.*nonsense", nvcc.compile_cubin, "nonsense", "sm_90a")


def test_a_failed_link_leaves_all_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "module.so"
    out.write_text("the one before")
    for source in ("nonsense;", "void nonsense(); void* p = (void*)nonsense;"):  # compiler, linker
        with pytest.raises(BuildError, match="nonsense"):
            link(Generated({"bad.cc": source}), out)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"install g\+\+ or clang"):
        link(Generated({"good.cc": ""}), out)
    monkeypatch.setenv("CXX", "my-compiler -m64")
    with pytest.raises(BuildError, match="CXX='my-compiler -m64', but 'my-compiler' was not found"):
        link(Generated({"good.cc": ""}), out)
    assert [p.name for p in tmp_path.iterdir()] == ["module.so"] and out.read_text() == "the one before"


def test_architectures():
    found = [architecture(*c, "") for c in ((8, 0), (8, 6), (9, 0), (10, 0), (12, 0), (13, 0))]
    assert found == ["sm_80", "sm_86", "sm_90a", "sm_100a", "sm_120", "sm_130"]
    refused(DeviceError, r"not 7\.5", architecture, 7, 5, "Tesla T4")


def compiler_of(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    (folder / "c++").write_text(program)
    (folder / "c++").chmod(0o755)
    monkeypatch.setenv("CXX", str(folder / "c++"))


@pytest.mark.parametrize("hangs, limit", [("--version", "ANSWER"), ("-fPIC", "WORK")])
def test_a_compiler_that_hangs_is_stopped_with_all_that_it_has_started(hangs, limit, tmp_path, monkeypatch):
    compiler_of(tmp_path, monkeypatch, f'#!/bin/sh\ncase "$*" in *{hangs}*) sleep 6100 & wait;; esac\n')
    monkeypatch.setenv("ECORNN_CACHE", "off")
    for name in ("ANSWER", "WORK"):
        monkeypatch.setattr(linking, name, 0.5 if name == limit else LIMIT)
    with pytest.raises(BuildError, match=r"c\+\+ did not end in 0.5 s and was stopped"):
        link(Generated({"a.cc": f"int a; // {hangs}"}, {}, {}), tmp_path / "m.so")
    assert not [p for p in psutil.Process().children(recursive=True) if "6100" in p.cmdline()]


def test_a_compiler_that_is_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compiler_of(tmp_path, monkeypatch, "\x7fELF")
    with pytest.raises(BuildError, match="cannot be started: Exec format error"):
        link(Generated({"a.cc": "int b;"}, {}, {}), tmp_path / "m.so")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


class Maker:
    def __init__(self, content: bytes = b"code") -> None:
        self.content, self.made = content, 0

    def __call__(self) -> bytes:
        self.made += 1
        return self.content


def test_an_entry_is_made_once_and_by_its_parts(root: Path):
    make, other = Maker(), Maker(b"other")
    assert [cache.entry("cubin", ("a", "b"), make) for _ in range(3)] == [b"code"] * 3 and make.made == 1
    assert cache.entry("cubin", ("ab", ""), other) == b"other"  # not the same parts
    assert cache.entry("object", ("a", "b"), other) == b"other" and other.made == 2 and len(cache.entries(root)) == 3


@pytest.mark.parametrize("damage", [lambda d: d[:-1], lambda d: d[:8], lambda d: b"", lambda d: d[:-1] + b"X"])
def test_a_damaged_entry_is_made_again(root: Path, damage: Callable[[bytes], bytes]):
    make = Maker()
    cache.entry("cubin", ("a",), make)
    ((_, _, path),) = cache.entries(root)
    path.write_bytes(damage(path.read_bytes()))
    assert cache.entry("cubin", ("a",), make) == b"code" and make.made == 2
    assert cache.entry("cubin", ("a",), make) == b"code" and make.made == 2


def test_many_that_want_one_entry_wait_for_the_one_that_makes_it(root: Path):
    make = Maker()
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(lambda _: cache.entry("cubin", ("a",), make), range(32))) == {b"code"}
    assert make.made == 1


def test_what_fails_is_not_kept(root: Path):
    def fail() -> bytes:
        raise RuntimeError("no compiler")
    refused(RuntimeError, "no compiler", cache.entry, "cubin", ("a",), fail)
    assert not cache.entries(root) and cache.entry("cubin", ("a",), Maker()) == b"code"


def test_the_oldest_go_first(root: Path):
    for age, name in enumerate("abcdef"):
        cache.entry("cubin", (name,), Maker(name.encode() * 100))
        (new,) = [p for t, _, p in cache.entries(root) if t > 1e6]
        os.utime(new, (1000 - age, 1000 - age))
    size = sum(s for _, s, _ in cache.entries(root))
    cache.evict(root, size)
    assert len(cache.entries(root)) == 6
    cache.evict(root, size - 1)
    left = [p.read_bytes()[cache.DIGEST:][:1] for _, _, p in sorted(cache.entries(root), reverse=True)]
    assert left == [b"a", b"b", b"c", b"d"]  # at most ROOM of the cap
    make = Maker()
    cache.entry("cubin", ("f",), make)
    assert make.made == 1


def test_a_process_that_writes_much_evicts(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache, "CAP", 3000)
    monkeypatch.setattr(cache, "EVERY", 1)
    for number in range(10):
        cache.entry("cubin", (str(number),), Maker(b"x" * 1000))
    assert sum(size for _, size, _ in cache.entries(root)) <= 3000


def test_it_can_be_turned_off_and_does_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(cache.VARIABLE, cache.OFF)
    make = Maker()
    assert cache.folder() is None and [cache.entry("cubin", ("a",), make) for _ in range(2)] == [b"code"] * 2
    (tmp_path / "file").touch()
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "file" / "cache"))  # cannot be made
    assert cache.entry("cubin", ("a",), make) == b"code" and make.made == 3


def test_what_waits_for_another_process_ends_with_its_pool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    with cache._alone(tmp_path, f"cubin-{cache._name('cubin', ['text'])[:3]}", lambda: False):
        with pytest.raises(KeyboardInterrupt), at_the_same_time(1) as threads:
            waits = threads.submit(cache.entry, "cubin", ["text"], lambda: b"made")
            while not waits.running():
                pass
            raise KeyboardInterrupt
        refused(BuildError, "stopped", waits.result)


def test_host_code_is_compiled_before_tvm_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    called = tmp_path / "called"
    compiler_of(tmp_path, monkeypatch, f'#!/bin/sh\necho "$@" >> {called}\nfor last; do :; done\necho > "$last"\n')
    monkeypatch.setenv("ECORNN_CACHE", str(tmp_path / "cache"))
    code = ("import sys; from ecornn.compiler import host_code_for\nwith host_code_for('sm_90a'): pass\n"
            "print(*{'tvm', 'tvm_ffi', 'torch', 'numpy'} & {*sys.modules})")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == "\n"
    *_, linked = commands = called.read_text().splitlines()
    assert "-shared" in linked
    assert all(any(f"-c {name}.cc" in one for one in commands) for name in ("host_cuda", "c_api"))


@pytest.mark.parametrize("wrong", [{"cell": "lstn"}, {"hidden": 0}, {"schedule": "persistant"}], ids=str)
def test_errors_of_arguments_end_the_compiler(wrong: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The compiler hangs; for an unknown schedule, compile_layer() within compile() waits for the same code, too."""
    started, layer_spec = tmp_path / "started", ecornn.compiler.LayerSpec

    def checked(*properties: Any) -> LayerSpec:
        until(started.exists)
        return layer_spec(*properties)

    compiler_of(tmp_path, monkeypatch, '#!/bin/sh\ncase "$*" in *--version*) echo none;;\n'
                f'*) touch {started}; sleep 6200 & wait;; esac\n')
    monkeypatch.setenv("ECORNN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(ecornn.compiler, "LayerSpec", checked)
    begun = time.monotonic()
    with pytest.raises(ArgumentError, match=f"^{next(iter(wrong))}="):
        ecornn.compile(**{"cell": "lstm", "hidden": 64, "target": "sm_90a"} | wrong)
    assert time.monotonic() - begun < LIMIT  # WORK is longer
    assert not [p for p in psutil.Process().children(recursive=True) if "6200" in p.cmdline()]

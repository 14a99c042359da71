"""What all tests share: tests marked ``gpu`` are skipped, with the reason, where there is no GPU; a build cache
that is empty at first; and another CPU to take this one for, where ECORNN_TEST_CPU names it."""

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import rooms
from hypothesis import settings

# What torch.compile kept of another version of an operator would be run in place of this one's: torch's cache goes by
# the arguments of operators, not by what they do.
INDUCTOR = tempfile.TemporaryDirectory(prefix="inductor-")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = INDUCTOR.name
# Tests call compiled layers, from the first call on: torch/test_torch_background.py tests the calls before that.
os.environ["ECORNN_WAIT"] = "1"

settings.register_profile("any machine", deadline=None)  # a busy one is no failure
settings.load_profile("any machine")


# Under python -O, too, what these assert is held: pytest writes their assertions anew, as it does those of tests.
pytest.register_assert_rewrite(*(path.stem for path in rooms.TESTS.rglob("*.py")
                                  if path.stem not in ("conftest", "rooms")))

collect_ignore = ["packages"]  # unless asked for: make test-packages

ANOTHER_CPU = os.environ.get("ECORNN_TEST_CPU", "")


def take_this_cpu_for(name: str) -> None:
    """Makes this process find a CPU by LLVM's name such as ``znver3``, with the instruction sets that LLVM uses for it
    and the cores and caches that are here; before any test is imported. Processes that tests start find the true CPU,
    which runs all that is compiled for the other one."""
    from ecornn import host_cpu

    here, info = host_cpu.detect(), host_cpu.cpuinfo()
    found = host_cpu.named(name)
    if found is None or (lacking := set(found.features) - set(here.features)):
        why = "LLVM knows none of this name" if found is None else f"{here.arch} lacks {', '.join(sorted(lacking))}"
        raise pytest.UsageError(f"ECORNN_TEST_CPU={name!r} is not a CPU whose code runs here: {why}")
    flags = " ".join(flag for flag, feature in host_cpu.FLAGS.items() if feature in found.features)
    host_cpu.cpuinfo = lambda: info | {"flags": flags, "model name": name}
    host_cpu.llvm_name = lambda features: name


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--renew", action="store_true", help="write files that generated texts are held against anew")
    parser.addoption("--first", action="store_true", help="of each test's cases the first, in most the smallest, alone")


def pytest_report_header() -> str | None:
    return f"CPU: taken for {ANOTHER_CPU}, as ECORNN_TEST_CPU says" if ANOTHER_CPU else None


def pytest_configure(config: pytest.Config) -> None:
    if ANOTHER_CPU:
        take_this_cpu_for(ANOTHER_CPU)
    if not hasattr(config, "workerinput"):  # worker processes of a parallel run share its cache
        folder = tempfile.TemporaryDirectory(prefix="ecornn-test-cache-", ignore_cleanup_errors=True)
        os.environ["ECORNN_CACHE"] = folder.name
        config.add_cleanup(folder.cleanup)


def no_gpu() -> str | None:
    """None, or why CUDA cannot be used; asks the driver itself, so that a fault in ecornn shows."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no CUDA driver (libcuda.so.1) on this machine"
    count = ctypes.c_int(0)
    if (status := driver.cuInit(0)) or (status := driver.cuDeviceGetCount(ctypes.byref(count))):
        return f"the CUDA driver reports error {status}"
    return None if count.value else "the CUDA driver sees no GPU"


@pytest.hookimpl(trylast=True)  # of what -m leaves
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--first"):
        first = {item.nodeid.partition("[")[0]: item for item in reversed(items)}.values()
        config.hook.pytest_deselected(items=[item for item in items if item not in first])
        items[:] = reversed(first)
    # What takes longest first, so that no process is left with it at the end.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and (reason := no_gpu()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _exact_products(request: pytest.FixtureRequest) -> Iterator[None]:
    """PyTorch's default for cuDNN's RNNs is TF32: tests on a GPU have exact products, unless they say otherwise."""
    torch = sys.modules.get("torch")
    if torch is None or request.node.get_closest_marker("gpu") is None:
        yield
        return
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


Start = Callable[..., "subprocess.Popen[Any]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes, as ``subprocess.Popen``, to which signals do what they do by default, also where the suite is
    started with some of them ignored, as by ``nohup``. With the test they end, and all that they started."""
    mark, made = f"ECORNN_TEST_STARTED_{secrets.token_hex(8)}", list["subprocess.Popen[Any]"]()
    def popen(*arguments: Any, **options: Any) -> subprocess.Popen[Any]:
        options["env"] = {**(options.get("env") or os.environ), mark: "1"}
        ignored = [s for s in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(s) is signal.SIG_IGN]
        for which in ignored:  # a program that is started inherits what is ignored, not what a function handles
            signal.signal(which, lambda *_: None)
        try:
            made.append(subprocess.Popen(*arguments, **options))
        finally:
            for which in ignored:
                signal.signal(which, signal.SIG_IGN)
        return made[-1]

    yield popen
    for process in psutil.process_iter(["environ"]):  # whatever has become of the process between
        if mark in (process.info["environ"] or ()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    for one in made:
        one.wait()
        for pipe in filter(None, (one.stdin, one.stdout, one.stderr)):
            pipe.close()


@pytest.fixture
def short_if_endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers' calls that never end have a hundredth of the limit that a run sets; others may be slow."""
    from events import endless

    from ecornn.worker import Worker

    call = Worker.call
    monkeypatch.setattr(Worker, "call", lambda self, function, argument, kind, limit: call(
        self, function, argument, kind, limit / 100 if endless(argument) else limit))


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from small_tiles import take_small_tiles

    take_small_tiles(monkeypatch.setattr)


@pytest.fixture
def same_as_file(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    def hold(name: str, text: str) -> None:
        file = request.path.with_name(name)
        if request.config.getoption("--renew"):
            file.write_text(text)
        assert text == file.read_text()
    return hold


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler, "these tests need a C compiler"
    subprocess.run([compiler, "-shared", "-fPIC", "-std=gnu11", str(rooms.TESTS / "emulator" / "fake_driver.c"), "-o",
                    str(folder / "libcuda.so.1")], check=True)
    return folder


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For layers of PyTorch models: the same numbers each time, and no fallback unless a test asks for it; one thread,
    since on a busy machine those of a team wait for each other, and 500 steps take minutes."""
    import torch

    torch.manual_seed(0)
    monkeypatch.setenv("ECORNN_STRICT", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The calls that took the short way, see ecornn/torch/like_before.py."""
    import torch

    from ecornn.torch import like_before

    torch.manual_seed(0)
    found, call = list[Any](), like_before.Call.__call__
    monkeypatch.setattr(like_before.Call, "__call__", lambda *args: (found.append(args[0]), call(*args))[1])
    with torch.no_grad():
        yield found

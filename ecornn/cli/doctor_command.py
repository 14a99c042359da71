"""``ecornn doctor``."""

from __future__ import annotations

from collections.abc import Callable

import click

from ecornn.cli.common import JSON, as_json, plain_errors, said_while
from ecornn.device import Device
from ecornn.errors import EcornnError


@click.command()
@JSON
@plain_errors
def doctor(json: bool) -> None:
    """Says what this machine can compile for, tune and run, and what to install for the rest."""
    from ecornn.tune.log import read_all, shipped_folder, user_folder
    from ecornn.tune.record import Trial

    said: dict[str, str] = {}
    missing: list[str] = []
    with said_while("looking at what is here"):
        for name, examine in EXAMINED.items():
            try:
                said[name], advice = examine()
            except EcornnError as error:
                said[name], advice = "unusable", str(error)
            if advice:
                missing.append(f"{name}: {advice}")
        said["build cache"] = cached()
        log = read_all()
        mine = {(d.kind, d.arch) for d in devices()}
    trials = [line.record for line in log.lines if isinstance(line.record, Trial)]
    apply = {t.workload for t in trials if (t.device.kind, t.device.arch) in mine and t.times}
    said["records"] = f"{len(trials)} trials; {len(apply)} workloads tuned for this machine's devices"
    missing += [f"records: skipped {problem}" for problem in log.problems]
    if json:
        as_json({"found": said, "to_do": missing, "logs": [str(user_folder()), str(shipped_folder())]})
        return
    click.echo("\n".join(f"{name:14}{found}" for name, found in said.items()))
    click.echo(f"{'':14}yours: {user_folder()}\n{'':14}shipped: {shipped_folder()}")
    click.echo("\n".join(["", "to do:", *(f"  {m}" for m in missing)]) if missing else "nothing is missing")


def cached() -> str:
    """The folder of the build cache, and its size."""
    from ecornn.build import cache

    folder = cache.folder()
    if folder is None:
        return f"off, by {cache.VARIABLE}={cache.OFF}"
    every = cache.entries(folder)
    return (f"{folder}: {len(every)} entries, {sum(size for _, size, _ in every) / 1e6:.0f} MB of at most "
            f"{cache.CAP / 1e6:.0f}; {cache.VARIABLE}=FOLDER moves it, {cache.VARIABLE}={cache.OFF} does without")


def devices() -> list[Device]:
    """This machine's devices."""
    from ecornn.host_gpu import detect
    from ecornn.targets import resolve

    here = [resolve("cpu")]
    try:
        gpu = detect()
    except EcornnError:
        gpu = None
    return here + ([gpu] if gpu else [])


Finding = tuple[str, str | None]  # what there is, and what to do about it


def examine_cpu() -> Finding:
    """The CPU as schedules see it."""
    from ecornn.targets import resolve

    cpu = resolve("cpu")
    return f"{cpu.name} ({cpu.arch}), {cpu.cores} cores", None


def examine_gpu() -> Finding:
    """GPU and driver."""
    from ecornn.host_gpu import detect, driver_version

    driver, gpu = driver_version(), detect()
    if gpu is None:
        what = "none" if driver is None else f"none (driver {driver})"
        return what, ("no CUDA driver; modules can be built for one (--target sm_90a), not run or tuned"
                      if driver is None else "the driver is there, but it shows no GPU")
    return f"{gpu.name} ({gpu.arch}), {gpu.cores} multiprocessors, driver {driver}", None


def examine_cuda() -> Finding:
    """The CUDA compiler."""
    from ecornn.build.nvcc import INSTALL
    from ecornn.tune.choose import cuda_compiler

    compiler = cuda_compiler()
    return compiler or "none", None if compiler else f"to build for GPUs, {INSTALL}"


def examine_cxx() -> Finding:
    """The host's C++ compiler."""
    from ecornn.build.link import find_compiler

    return " ".join(find_compiler()), None


def examine_package(name: str, use: str) -> Callable[[], Finding]:
    """A function that finds the version of a Python package; ``use`` says how to install it and what for."""

    def examine() -> Finding:
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version(name), None
        except PackageNotFoundError:
            return "none", use

    return examine


EXAMINED: dict[str, Callable[[], Finding]] = {
    "CPU": examine_cpu,
    "GPU": examine_gpu,
    "CUDA compiler": examine_cuda,
    "C++ compiler": examine_cxx,
    "TVM": examine_package("apache-tvm", "pip install apache-tvm: needed to compile and tune"),
    "tvm-ffi": examine_package("apache-tvm-ffi", "pip install apache-tvm-ffi: needed to run modules"),
    "XGBoost": examine_package("xgboost-cpu", "pip install xgboost-cpu: needed to tune"),
    "tornado": examine_package("tornado", "pip install tornado cloudpickle: optional; `ecornn serve` and TVM's RPC "
                               "tracker measure with it on other machines' devices"),
    "PyTorch": examine_package("torch", "pip install torch: optional; `ecornn bench` compares with it, "
                               "and tuning for a GPU times with its CUDA events"),
}

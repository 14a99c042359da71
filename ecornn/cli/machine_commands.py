"""``ecornn doctor``, ``ecornn serve`` and ``ecornn config``: this machine, what it has, and what it does for others."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click

from ecornn.cli.common import as_json, plain_errors, said_while, with_json
from ecornn.errors import EcornnError
from ecornn.interrupts import ENDING, safe_interrupts
from ecornn.targets import resolve
from ecornn.tuning_logs import shipped_folder, user_folder


@click.command()
@with_json
def doctor(json: bool) -> None:
    """Shows what this machine can compile for, tune and run, and how to install what is missing."""
    from ecornn.host_gpu import detect
    from ecornn.tune.log import read_all

    said: dict[str, str] = {}
    missing: list[str] = []
    with said_while("examining this machine"):
        for name, examine in examined().items():
            try:
                said[name], advice = examine()
            except EcornnError as error:
                said[name], advice = "unusable", str(error)
            if advice:
                missing.append(f"{name}: {advice}")
        said["build cache"] = cached()
        log = read_all()
        here = [resolve("cpu")]
        with contextlib.suppress(EcornnError):
            here += filter(None, [detect()])
    trials, mine = log.trials(), {(device.kind, device.arch) for device in here}
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

    if (folder := cache.folder()) is None:
        return f"off, because {cache.VARIABLE}={cache.OFF} is set"
    every = cache.entries(folder)
    return (f"{folder}: {len(every)} entries, {sum(size for _, size, _ in every) / 1e6:.0f} MB of at most "
            f"{cache.CAP / 1e6:.0f}; {cache.VARIABLE}=FOLDER moves it, {cache.VARIABLE}={cache.OFF} turns it off")


Finding = tuple[str, str | None]  # what there is, and what to do about it


def examined() -> dict[str, Callable[[], Finding]]:
    """Functions that look at the machine, by what each looks for. They raise :class:`EcornnError`."""
    from ecornn.build.link import find_compiler
    from ecornn.build.nvcc import INSTALL
    from ecornn.host_gpu import detect, driver_version
    from ecornn.tune.choose import cuda_compiler

    def cpu() -> Finding:
        found = resolve("cpu")
        return f"{found.name} ({found.arch}), {found.cores} cores", None

    def gpu() -> Finding:
        driver, found = driver_version(), detect()
        if found is not None:
            return f"{found.name} ({found.arch}), {found.cores} multiprocessors, driver {driver}", None
        if driver is not None:
            return f"none (driver {driver})", "the driver is installed but finds no GPU"
        return "none", "no CUDA driver. Modules can be compiled for a GPU (--target sm_90a), but not run or tuned here"

    def cuda() -> Finding:
        compiler = cuda_compiler()
        return compiler or "none", None if compiler else f"to build for GPUs, {INSTALL}"

    def package(names: str, use: str) -> Finding:
        """``names``: of packages, any of which will do; ``use`` says how to install it, and what for."""
        for name in names.split():
            with contextlib.suppress(PackageNotFoundError):
                return version(name), None
        return "none", f"pip install {use}"

    return {
        "CPU": cpu, "GPU": gpu, "CUDA compiler": cuda, "C++ compiler": lambda: (" ".join(find_compiler()), None),
        "TVM": partial(package, "apache-tvm", "apache-tvm: needed to compile and tune"),
        "tvm-ffi": partial(package, "apache-tvm-ffi", "apache-tvm-ffi: needed to run modules"),
        "XGBoost": partial(package, "xgboost-cpu xgboost", "xgboost-cpu: optional; `ecornn tune` ranks candidates with "
                           "it"),
        "tornado": partial(package, "tornado", "tornado cloudpickle: optional; `ecornn serve` and TVM's RPC tracker "
                           "need it to measure on other machines"),
        "PyTorch": partial(package, "torch", "torch: optional; `ecornn bench` compares with it, and tuning for a GPU "
                           "takes times with its CUDA events")}


SERVING = """\
Start one tracker, a server for each GPU or CPU, and a tuner, which uses all servers of its key until it ends:

\b
  python -m tvm.exec.rpc_tracker --host 127.0.0.1 --port 9190
  CUDA_VISIBLE_DEVICES=0 ecornn serve --tracker 127.0.0.1:9190 --key h100
  CUDA_VISIBLE_DEVICES=1 ecornn serve --tracker 127.0.0.1:9190 --key h100
  ecornn tune --cell lstm --hidden 800 --tracker 127.0.0.1:9190 --key h100

Between machines, use SSH tunnels (ssh -L and -R), which keep all ports on loopback. Use --host and --allow-remote only
on a network where everybody may run any program on these machines.
"""


@click.command(epilog=SERVING)
@click.option("--tracker", required=True, metavar="HOST:PORT", help="The TVM RPC tracker to register at.")
@click.option("--key", default="ecornn", show_default=True,
              help="Key by which tuners choose servers. Servers with the same key must have equal devices.")
@click.option("--target", type=click.Choice(["cuda", "cpu"]),
              help="Device to measure on.  [default: cuda if there is a GPU, else cpu]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", type=click.IntRange(1, 65_000), default=9200, show_default=True,
              help="First of the 100 ports to try.")
@click.option("--address", help="Address to which tuners connect, if it is not --host.")
@click.option("--allow-remote", is_flag=True,
              help="Allow addresses that other machines reach. Whoever reaches them can run any code here.")
@with_json
def serve(tracker: str, key: str, target: str | None, host: str, port: int, address: str | None,
          allow_remote: bool, json: bool) -> None:
    """Measures candidates for tuners elsewhere, through TVM's RPC. Ctrl-C ends it."""
    from ecornn.targets import default_target
    from ecornn.tune.choose import present
    from ecornn.tune.remote import Tracker, is_loopback, require_loopback, start

    registry = Tracker.parse(tracker, key, allow_remote)
    for name, value in (("host", host), ("address", address)):
        if value is not None:
            require_loopback(name, value, allow_remote)
    if not is_loopback(host):
        click.echo(f"warning: whoever reaches {host} can run any program on this machine as this user", err=True)
    chosen = target or default_target()
    device = present(chosen)
    registry.servers()  # or say at once that there is no tracker
    server = start(chosen, (registry.host, registry.port), key, host, port, address)
    try:
        with safe_interrupts(*ENDING):
            if json:
                as_json({"device": device.name, "arch": device.arch, "host": host, "port": server.port, "key": key,
                         "tracker": str(registry)})
            else:
                click.echo(f"serving {device.name} ({device.arch}) at {host}:{server.port}, key {key}, tracker "
                           f"{registry}; Ctrl-C ends it")
            while server.proc.is_alive():
                time.sleep(0.5)
        click.echo("error: the server process ended unexpectedly", err=True)
        raise SystemExit(1)
    except KeyboardInterrupt:
        click.echo("stopped", err=True)
    finally:
        server.terminate()


@click.command()
@click.option("--cflags", is_flag=True, help="Print the compiler flags for ecornn.h, ecornn.hpp and DLPack's header.")
@click.option("--libs", is_flag=True, help="Print the linker flags for libtvm_ffi and its place at run time.")
@click.option("--folder", is_flag=True, help="Print the headers' folder, for CMake's ecornn_DIR and PKG_CONFIG_PATH.")
@plain_errors
def config(cflags: bool, libs: bool, folder: bool) -> None:
    """Prints the flags with which C and C++ programs that open module files are compiled and linked, or the
    folder where CMake and pkg-config find them.

    \b
      cc main.c $(ecornn config --cflags --libs) -o main
      cmake -B build -Decornn_DIR=$(ecornn config --folder)
      PKG_CONFIG_PATH=$(ecornn config --folder) pkg-config --cflags --libs ecornn
    """
    if not (cflags or libs or folder):
        raise click.UsageError("give --cflags, --libs or both, or --folder")
    from ecornn.build.link import libinfo

    headers = Path(str(resources.files("ecornn"))) / "include"
    flags = [str(headers)] if folder else []
    if cflags:
        flags += [f"-I{headers}", f"-I{libinfo().find_dlpack_include_path()}"]
    if libs:
        library = Path(libinfo().find_libtvm_ffi())
        # the module needs it, the program does not: the linker must keep it all the same
        flags += [f"-L{library.parent}", f"-Wl,-rpath,{library.parent}", "-Wl,--no-as-needed", "-ltvm_ffi",
                  "-Wl,--as-needed", "-ldl"]
    click.echo(" ".join(flags))

"""Modules into the build cache, ahead of the run that measures them: here or on another machine, with or without a GPU.

    python benchmarks/prebuilding.py key                      # equal on two machines: modules of one serve the other
    python benchmarks/prebuilding.py pack cache.tar.xz        # what modules the cache has, in pieces of at most 45 MB
    python benchmarks/prebuilding.py unpack cache.tar.xz*     # into the cache

`tune_h100_set.py build` fills the cache (`ECORNN_CACHE`). A module is found by what it is
made of: workload, device, schedule and configuration, the sources of ecornn that make modules, and the versions of TVM
and of the CUDA compiler. Packed are whole modules; the cubins and objects in them need not travel.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import lzma
import os
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from ecornn.build import cache
from ecornn.build.nvcc import identity
from ecornn.device import Device
from ecornn.tune.building import Build, own_code
from ecornn.tune.pool import Entries, Pool
from ecornn.tune.space import Candidate
from ecornn.worker import WorkerError
from ecornn.workload import Workload

LIMIT = 300.0  # seconds of a build
PIECE = 45 << 20  # bytes
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 96 << 20}]  # modules have much in common


def nothing(_: None) -> bool:
    """In place of what a process that measures imports."""
    return True


@contextlib.contextmanager
def builders(processes: int) -> Iterator[Pool]:
    """Build processes, and none that measures."""
    with Pool(Entries(measure_ready="prebuilding:nothing"), processes) as pool:
        yield pool


def request(cell: str, work: Workload, device: Device, candidate: Candidate) -> Build:
    """What a run asks for when it builds the candidate, but for the file."""
    return Build(cell, work, device, candidate.schedule, candidate.config, os.devnull)


def prebuild(pool: Pool, every: Sequence[Build], seconds: float) -> int:
    """Builds what the cache lacks, in that order, until ``seconds`` have passed; returns how many there are now."""
    begin, failed, done = time.monotonic(), 0, 0

    def build(one: Build) -> bool | None:
        if time.monotonic() - begin > seconds:
            return None
        try:
            with pool.one_of(pool.idle_builders) as worker:
                worker.call("ecornn.tune.building:build", one, str, LIMIT)
        except WorkerError as error:
            pool.must_be_open()
            print(f"{one.workload} {one.schedule} {one.config}: {error}"[:500], flush=True)
            return False
        return True

    try:
        for made in pool.building.map(build, every):
            if made is None:
                break
            done, failed = done + made, failed + (not made)
            if (done + failed) % 50 == 0:
                print(f"{done} of {len(every)} modules, {failed} failed, {time.monotonic() - begin:.0f} s", flush=True)
    finally:
        pool.building.shutdown(wait=False, cancel_futures=True)
    print(f"{done} of {len(every)} modules, {failed} failed, {time.monotonic() - begin:.0f} s")
    return done


def key() -> str:
    """Of this machine's sources, TVM and CUDA compiler."""
    return hashlib.sha256(f"{own_code()} {identity()}".encode()).hexdigest()[:16]


def modules(root: Path) -> list[Path]:
    """The entries of a cache that are whole modules."""
    decoder, found = msgspec.msgpack.Decoder(tuple[str, bytes]), []
    for _, _, path in sorted(cache.entries(root)):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            decoder.decode(path.read_bytes()[cache.DIGEST:])
            found.append(path)
    return found


def pack(root: Path, out: Path, piece: int = PIECE) -> list[Path]:
    """Writes the modules of a cache to ``out``, ``out.1``, ...: each an archive of its own of about ``piece`` bytes."""
    waiting, pieces = modules(root), []
    print(f"{len(waiting)} modules")
    while waiting:
        target = Path(f"{out}.{len(pieces)}") if pieces else out
        with target.open("wb") as raw, lzma.LZMAFile(raw, "wb", filters=FILTERS) as packed, \
                tarfile.open(fileobj=packed, mode="w|") as archive:
            packed_now = 0
            while packed_now < len(waiting) and raw.tell() <= piece:
                path = waiting[packed_now]
                archive.add(path, path.relative_to(root).as_posix())
                packed_now += 1
        waiting = waiting[packed_now:]
        pieces.append(target)
        print(f"{target}: {packed_now} modules, {target.stat().st_size} bytes", flush=True)
    return pieces


def unpack(root: Path, pieces: Sequence[Path]) -> int:
    """Puts packed modules into a cache; returns how many."""
    count = 0
    for piece in pieces:
        with tarfile.open(piece, "r:xz") as archive:
            root.mkdir(parents=True, exist_ok=True)
            archive.extractall(root, filter="data")
            count += len(archive.getmembers())
    return count


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("key", "pack", "unpack"))
    parser.add_argument("files", type=Path, nargs="*")
    args = parser.parse_args()
    root = cache.folder()
    if args.action == "key":
        print(key())
    elif root is None or not args.files:
        parser.error("a file is needed, and a cache: ECORNN_CACHE is off" if root is None else "which file?")
    elif args.action == "pack":
        pack(root, args.files[0])
    else:
        print(f"{unpack(root, args.files)} modules")


if __name__ == "__main__":
    main()

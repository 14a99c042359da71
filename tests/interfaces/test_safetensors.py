"""Weights that programs in C++ read from safetensors files, damaged ones among them: as the Python package does."""

import json
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from c_abi_sample import HERE, compiled

TYPES = {"F64": (2, 64), "F32": (2, 32), "F16": (2, 16), "BF16": (4, 16), "I64": (0, 64), "U8": (1, 8), "BOOL": (6, 8)}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(HERE / "safetensors_program.cc", tmp_path_factory.mktemp("reader") / "program", "-g",
                    "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def contents() -> bytes:
    rng = np.random.default_rng(4)
    shapes = {"weight_ih_l0": (3, 2), "encoder.bias": (5,), "none": (0, 4), "scalar": (),
              "naïve \"q\"\n\U0001d11e": (1,)}
    types = [np.float32, np.float16, ml_dtypes.bfloat16, np.float64, np.int64]
    arrays = {name: rng.standard_normal(shape).astype(dtype)
              for (name, shape), dtype in zip(shapes.items(), types, strict=True)}
    return safetensors.numpy.save(arrays, {"written by": "a \\ \"test\"\t\u0001"})


def split(whole: bytes) -> tuple[str, bytes]:
    (size,) = struct.unpack("<Q", whole[:8])
    return whole[8:8 + size].decode(), whole[8 + size:]


def joined(header: str | bytes, data: bytes) -> bytes:
    text = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(text)) + text + data


def cut(whole: bytes) -> Iterator[bytes]:
    """Every shorter file, and some that are longer."""
    yield from (whole[:size] for size in range(len(whole)))
    yield from (whole + bytes(more) for more in (1, 8, 64))


def flipped(whole: bytes) -> Iterator[bytes]:
    """Another bit anywhere in the header's length or text."""
    for at in range(len(whole) - len(split(whole)[1])):
        yield from (whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1:] for bit in range(8))


def lengths(whole: bytes) -> Iterator[bytes]:
    """A header of another length."""
    yield from (struct.pack("<Q", size % 2**64) + whole[8:] for size in
                (*range(len(whole) + 9), -1, 2**63 - 1, 2**63, 2**63 + 8, 2**32, 100000001))


def moved(whole: bytes) -> Iterator[bytes]:
    """Each begin, end and size of each tensor as another: holes, overlaps, beyond the end, backwards, no number."""
    text, data = split(whole)
    header = json.loads(text)
    numbers = [(name, member, n) for name, entry in header.items() if name != "__metadata__"
               for member in ("data_offsets", "shape") for n in range(len(entry[member]))]
    for name, member, n in numbers:
        was = header[name][member][n]
        for now in (*range(was - 9, was + 10), len(data), 2 * len(data), 2**31, 2**62, 2**63 - 1, 2**63, 2**64, 10**40,
                    1.5, -0.0, 1e3, None, "1", [1]):
            header[name][member][n] = now
            yield joined(json.dumps(header), data)
        header[name][member][n] = was
    names = [name for name in header if name != "__metadata__"]
    for one in names:  # the places of another: overlaps whose every tensor is within the data
        for other in names:
            changed = header | {one: header[one] | {"data_offsets": header[other]["data_offsets"]}}
            yield joined(json.dumps(changed), data)
            yield joined(json.dumps(header | {one: header[other]}), data)


def rewritten(whole: bytes) -> Iterator[bytes]:
    """Parts of the header's text left out, put twice, or elsewhere, and what JSON or the format does not have."""
    text, data = split(whole)
    rng = np.random.default_rng(8)
    for _ in range(3000):
        a, b, c = sorted(rng.integers(0, len(text) + 1, 3))
        parts = text[:a], text[a:b], text[b:c], text[c:]
        for order in ((0, 2, 3), (0, 1, 1, 2, 3), (0, 2, 1, 3)):
            yield joined("".join(parts[n] for n in order), data)
    for escape in (r"\u00e4", r"\ud834\udd1e", r"\ud834", r"\ud834\u0041", r"\udd1e\ud834", r"\ud834A", r"\u12",
                   r"\x41", r"\u00E4\/\b"):
        yield joined(text.replace("scalar", escape), data)
    yield from (joined(text.replace("[0,", f"[{zero},"), data) for zero in ("00", "-0", "+0", "0.0", "0x0", ""))
    for member in ("dtype", "shape", "data_offsets"):
        yield joined(text.replace(f'"{member}"', '"other"', 1), data)
        yield joined(text.replace(f'"{member}"', f'"{member}":0,"{member}"', 1), data)
    yield from (joined(before + text + behind, data) for before, behind in (
        (" ", ""), ("", "  \n"), ("", "x"), ("", "\0"), ("\ufeff", ""), ("[", "]"), ("{", "}"), ("[" * 100000, "")))
    yield from (joined(text.encode().replace(b"scalar", bytes(made)), data) for made in (
        (0xC0, 0x80), (0xE0, 0x80, 0x80), (0xED, 0xA0, 0x80), (0xF0, 0x80, 0x80, 0x80), (0xF4, 0x90, 0x80, 0x80),
        (0xF5, 0x80, 0x80, 0x80), (0xC3,), (0x80,), (0xF0, 0x9D, 0x84, 0x9E)))
    yield joined("", b"")
    yield joined("{}", data)
    yield joined("{}", b"")


def read(program: Path, files: list[bytes], folder: Path) -> list[str]:
    paths = [folder / str(n) for n in range(len(files))]
    for path, content in zip(paths, files, strict=True):
        path.write_bytes(content)
    done = subprocess.run([program], input="".join(f"{path}\n" for path in paths).encode(), capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    lines = done.stdout.split(b"\0")[:-1]
    return [line.decode(errors="replace").replace(f"{path} ", "") for line, path in zip(lines, paths, strict=True)]


class Loose(ValueError):
    """The package reads what the format does not have: a name twice, another member, a size over 63 bits."""


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs) or ("dtype" in made and made.keys() != {"dtype", "shape", "data_offsets"}):
        raise Loose
    if any(isinstance(size, int) and size >= 2**63 for size in made.get("shape", ())):
        raise Loose
    return made


def by_the_package(content: bytes) -> str | None:
    """The same line of what the package reads, or None where it refuses, or takes what the format does not have."""
    try:
        tensors = sorted(safetensors.deserialize(content), key=lambda named: named[0].encode())
        json.loads(split(content)[0], object_pairs_hook=once)
    except (safetensors.SafetensorError, Loose):
        return None
    line = ""
    for name, tensor in tensors:
        numbers = [list(name.encode()), TYPES[tensor["dtype"]], tensor["shape"], list(tensor["data"])]
        line += " |".join(" ".join(["", *map(str, part)]) for part in numbers).removeprefix(" ") + ";"
    return f"0 {line}"


def test_a_file_is_read_as_the_package_reads_it(program: Path, tmp_path: Path):
    whole = contents()
    (line,) = read(program, [whole], tmp_path)
    assert line == by_the_package(whole) and len(line.split(";")) == 6


@pytest.mark.parametrize("damage", [cut, flipped, lengths, moved, rewritten])
def test_damaged_files(program: Path, tmp_path: Path, damage):
    """Our reader refuses what the package refuses, and reads alike what that reads: files whose damage is to a name."""
    whole = contents()
    files = [made for made in damage(whole) if made != whole]
    lines, read_alike, refused = read(program, files, tmp_path), 0, 0
    for content, line in zip(files, lines, strict=True):
        wanted = by_the_package(content)
        if wanted is None:
            assert line.startswith("10 is no safetensors file, or a damaged one: "), (content, line)
            refused += 1
        else:
            assert line == wanted, content
            read_alike += 1
    assert refused > 50 and (read_alike > 0 or damage in (cut, lengths)), (refused, read_alike)

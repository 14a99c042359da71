"""Products by the matrix unit of a CPU, Intel's AMX: the sums of 16 rows and 16 units are one of eight tile registers.

    for each 32 values of k: load 16 rows of the operand, for each row tile
                             load the weights of 16 units, for each column; multiply both, for each row tile

The operand is bfloat16, in rows of whole parts of 32 values, zeros behind the last. Weights are packed as for products
in vector registers: 16 pairs of k of a column of units are a tile, whose rows are a row of columns apart."""

from __future__ import annotations

from collections.abc import Sequence

from ecornn.device import Device
from ecornn.schedules.builder import Expr, TirBuffer
from ecornn.schedules.cpu.emit import Emitter

FEATURES = {"amx-tile", "amx-bf16", "avx512f"}
ROWS, UNITS, DEPTH = 16, 16, 32  # of a tile of sums, and the values of k of an instruction
REGISTERS = 8


def available(device: Device, dtype: str) -> bool:
    return dtype == "bfloat16" and set(device.features) >= FEATURES


def registers(rows: int, columns: int) -> int:
    """Tile registers of the product loop: sums, a part of each row tile of the operand, and weights."""
    return rows // ROWS * (columns + 1) + 1


def width(k: int) -> int:
    """Elements from one row of an operand to the next. Not whole pages, whose lines would share places in L1."""
    return -(-k // DEPTH) * DEPTH + DEPTH


def configure(e: Emitter) -> None:
    """Makes all registers whole tiles, for the thread until :func:`release`."""
    columns, rows = bytes([4 * UNITS, 0] * REGISTERS), bytes([ROWS] * REGISTERS)
    layout = bytes([1]) + bytes(15) + columns + bytes(16) + rows + bytes(8)
    place = e.local("tile_layout", "uint64", size=8)
    for word in range(8):
        e.store(place, word, e.tirx.const(int.from_bytes(layout[8 * word:][:8], "little"), "uint64"))
    _call(e, "ldtilecfg", e.tirx.address_of(e.load(place, 0)))


def release(e: Emitter) -> None:
    _call(e, "tilerelease")


def clear(e: Emitter, rows: int, columns: int) -> None:
    for register in range(rows // ROWS * columns):
        _call(e, "tilezero", _number(e, register))


def multiply(e: Emitter, columns: int, operand: TirBuffer, starts: Sequence[Expr], stride: int, weights: TirBuffer,
             weight_start: Expr, blocks: Expr | int, advance: int = DEPTH) -> None:
    """Adds products over ``blocks`` of 32 values; ``starts``: of the row tiles in ``operand``, whose rows are
    ``stride`` apart, and parts of a row ``advance``."""
    first, of_rows = len(starts) * columns, e.index(2 * stride)
    free = range(first + len(starts), REGISTERS)  # registers of weights take turns
    with e.loop("k", blocks) as block:
        for r, start in enumerate(starts):
            place = e.tirx.BufferLoad(operand, [start + block * advance])
            _call(e, "tileloadd64", _number(e, first + r), e.tirx.address_of(place), of_rows)
        for n in range(columns):
            register = _number(e, free[n % len(free)])
            place = e.load(weights, weight_start + (block * (DEPTH // 2) * columns + n) * UNITS)
            _call(e, "tileloadd64", register, e.tirx.address_of(place), e.index(4 * UNITS * columns))
            for r in range(len(starts)):
                _call(e, "tdpbf16ps", _number(e, r * columns + n), _number(e, first + r), register)


def keep(e: Emitter, into: TirBuffer, rows: int, columns: int) -> None:
    """Stores the sums: (row, column, unit)."""
    for r in range(rows // ROWS):
        for n in range(columns):
            place = e.tirx.address_of(e.load(into, (r * ROWS * columns + n) * UNITS))
            _call(e, "tilestored64", _number(e, r * columns + n), place, e.index(4 * UNITS * columns))


def _number(e: Emitter, register: int) -> Expr:
    return e.tirx.const(register, "int8")


def _call(e: Emitter, instruction: str, *operands: Expr) -> None:
    e.add(e.tirx.Evaluate(e.tirx.call_llvm_intrin("void", f"llvm.x86.{instruction}", *operands)))

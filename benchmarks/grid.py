"""The layers that the GPU benchmark measures, most telling first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ecornn.compiler import LayerPlan
    from ecornn.device import Device


@dataclass(frozen=True)
class Row:
    """One layer. ``tf32``: cuDNN may round to TF32, ecornn computes float32; ``tf32-both``: both round."""

    cell: str
    T: int
    B: int
    I: int
    H: int
    dtype: str

    @property
    def kind(self) -> str:
        """The data type of the tensors."""
        return "float32" if self.dtype.startswith("tf32") else self.dtype

    @property
    def arithmetic(self) -> str:
        """What ecornn rounds the factors of products to."""
        return "tf32" if self.dtype == "tf32-both" else self.kind

    @property
    def file(self) -> str:
        """The name of its module's file; rows that differ in cuDNN's precision alone share one."""
        kind = self.dtype if self.dtype == "tf32-both" else self.kind
        return f"{self.cell}_{self.T}x{self.B}x{self.I}x{self.H}_{kind}.so"

    def plan(self, device: Device) -> LayerPlan:
        """The best known configuration."""
        from ecornn.compiler import plan

        return plan(self.cell, hidden=self.H, input=self.I, batch=self.B, seq=self.T, dtype=self.kind,
                    precision="tf32" if self.arithmetic == "tf32" else None, target=device)

    def __str__(self) -> str:
        return f"{self.cell} {self.T}x{self.B}x{self.I}x{self.H} {self.dtype}"


def _square(cell: str, T: int, B: int, H: int, dtype: str = "float16") -> Row:
    return Row(cell, T, B, H, H, dtype)


# Deep Speech 2's layer and FlashRNN's size, in every data type
LAYERS = [_square(cell, T, B, H, dtype) for dtype in ("float16", "bfloat16", "tf32", "tf32-both", "float32")
          for cell in ("lstm", "gru", "rnn_tanh") for T, B, H in ((1024, 16, 768), (300, 20, 800))]

# One row of the batch, weights that barely fit, large batches: both 16-bit types
SIZES = [_square(cell, T, B, H, dtype) for dtype in ("float16", "bfloat16") for cell, T, B, hs in (
    ("lstm", 256, 1, (256, 512, 1024, 2048)), ("gru", 256, 32, (2816,)), ("rnn_tanh", 512, 4, (1152,)),
    ("lstm", 512, 4, (1152,)), ("lstm", 256, 64, (256, 512, 1024, 1536, 2048)), ("lstm", 256, 1, (128, 1536)),
    ("gru", 256, 1, (512, 1024, 1536, 2048, 2816)), ("gru", 256, 32, (512, 1024, 1536, 2048)),
    ("rnn_tanh", 256, 1, (512, 1760, 2560)), ("rnn_tanh", 256, 32, (512, 1760, 2560))) for H in hs]

# The grid that geometric means are of
GRID = [*LAYERS, *SIZES]

# Persistent RNNs (Diamos et al. 2016): vanilla, H = 1152
SCALING = [_square("rnn_tanh", 512, B, 1152) for B in (1, 2, 4, 8, 16, 32, 64)]

# Off every tile, and the next tile up
TILES = [*((_square("lstm", 300, 20, H), _square("lstm", 300, 20, up)) for H, up in
           ((650, 656), (1500, 1504), (1760, 1792))),
         (_square("gru", 300, 20, 1760), _square("gru", 300, 20, 1792)),
         *((_square("lstm", 300, B, 800), _square("lstm", 300, up, 800)) for B, up in
           ((3, 4), (7, 8), (20, 24), (33, 40)))]

# More weights than fit in registers and shared memory beside the rest: some come from L2 in every step
PAST = [_square("lstm", 256, 1, 2816), _square("lstm", 256, 8, 2816), _square("lstm", 256, 1, 2560),
        _square("rnn_tanh", 256, 1, 5120), _square("gru", 256, 1, 2048, "float32"),
        _square("lstm", 256, 1, 2048, "float32")]

# Outside that grid, what compare_classes.py compares: layers in daily use for which the usual schedules are not made.
# Some of their sizes are on tiles, some off
CLASSES = {
    "small": [*(_square("lstm", 300, B, 64, "float32") for B in (1, 32, 132)), _square("lstm", 300, 16, 40, "float32"),
              _square("lstm", 300, 8, 100, "float32"), _square("gru", 300, 32, 64, "float32"),
              _square("rnn_tanh", 300, 32, 128, "float32"), _square("lstm", 300, 32, 64),
              _square("lstm", 300, 1, 64, "bfloat16"), _square("lstm", 300, 32, 128),
              _square("lstm", 300, 1, 128, "bfloat16"), _square("gru", 300, 1, 128), _square("gru", 300, 20, 90),
              _square("rnn_tanh", 300, 4, 50, "bfloat16")],
    "one_step": [*(_square("lstm", 1, 16, 1024, dtype) for dtype in ("float16", "bfloat16", "float32")),
                 _square("gru", 1, 64, 512), _square("gru", 1, 1, 2816), _square("lstm", 1, 1, 256, "float32"),
                 Row("gru", 1, 5, 100, 300, "float32"), _square("lstm", 1, 20, 650), _square("rnn_tanh", 1, 8, 1024),
                 *(_square("lstm", T, 16, 1024) for T in (2, 8)), _square("gru", 2, 64, 512),
                 _square("lstm", 4, 32, 512, "bfloat16"), Row("gru", 4, 5, 100, 300, "float32"),
                 _square("lstm", 8, 1, 256, "float32")],
    "past_chip": [_square("gru", 128, 64, 3072), _square("gru", 128, 16, 3072, "bfloat16"),
                  _square("lstm", 128, 32, 2816), _square("lstm", 128, 16, 4096),
                  _square("lstm", 128, 20, 3000, "bfloat16"), _square("rnn_tanh", 128, 32, 6144),
                  _square("gru", 128, 32, 2048, "float32"), _square("gru", 128, 17, 3333)],
    "many_rows": [_square("lstm", 300, 512, 256), _square("lstm", 300, 480, 256, "bfloat16"),
                  *(_square("gru", 300, 2048, 128, dtype) for dtype in ("float16", "bfloat16")),
                  _square("lstm", 300, 384, 384), _square("gru", 300, 256, 512), _square("lstm", 300, 1056, 128),
                  _square("lstm", 300, 700, 200), _square("gru", 300, 300, 300, "bfloat16"),
                  _square("lstm", 32, 65536, 64), _square("gru", 100, 4096, 64, "float32"),
                  _square("lstm", 100, 1000, 100, "float32"), _square("rnn_tanh", 100, 256, 512, "float32"),
                  _square("gru", 100, 512, 256, "float32")],
    "forecasting": [_square("gru", 300, 200, 100, "float32"), Row("gru", 64, 200, 20, 100, "float32")],
}

CLIFF = 1.3  # how much longer the smaller one of a pair may take

# µs a step that a layer must stay under, and how many times as fast as cuDNN it must be at least
MOST = {_square("lstm", 256, 1, 256): 1.3, _square("lstm", 256, 1, 512): 1.5, _square("lstm", 256, 1, 1024): 1.8,
        _square("lstm", 256, 1, 2048): 3.0, _square("gru", 256, 32, 2816): 8.0, _square("lstm", 1024, 16, 768): 1.55}
LEAST = {_square("lstm", 1024, 16, 768): 1.3}


def rows() -> list[Row]:
    """Every row once: the 16-bit ones of the grid, scaling and tiles, then float32, and weights past the chip."""
    half = [row for row in GRID if row.kind != "float32"]
    first = [*MOST, *half[:12], *SCALING, *(row for pair in TILES for row in pair)]
    return list(dict.fromkeys([*first, *half, *GRID, *PAST]))


def select(only: Sequence[str], limit: int | None = None) -> list[Row]:
    """The rows of which one of ``only`` is a part of the name (all without any), the first ``limit`` of them.

    Words of a filter may stand apart: ``lstm float16`` is every LSTM in float16.
    """
    def matches(row: Row) -> Iterator[bool]:
        for text in only:
            yield all(word in str(row).split() or word in str(row).split()[1] for word in text.split())

    found = [row for row in rows() if not only or any(matches(row))]
    return found if limit is None else found[:limit]

"""The layers whose training is held against cuDNN's, most used first, by T, B, I, H."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A layer, or a stack of ``layers``, to be trained in ``kind``: f16, bf16, tf32 or f32."""

    cell: str
    T: int
    B: int
    I: int
    H: int
    kind: str
    layers: int = 1
    bidirectional: bool = False

    @property
    def properties(self) -> dict[str, object]:
        """What ``ecornn.compile`` is asked for."""
        dtype = {"f16": "float16", "bf16": "bfloat16"}.get(self.kind, "float32")
        return {"hidden": self.H, "input": self.I, "batch": self.B, "seq": self.T, "dtype": dtype,
                "precision": "tf32" if self.kind == "tf32" else None, "layers": self.layers,
                "bidirectional": self.bidirectional}

    def __str__(self) -> str:
        stack = f" {self.layers} layers" * (self.layers > 1) + " both ways" * self.bidirectional
        return f"{self.cell} {self.T}x{self.B}x{self.I}x{self.H} {self.kind}{stack}"


def _rows(cell: str, sizes: tuple[int, ...], kinds: str, layers: int = 1, bidirectional: bool = False) -> list[Row]:
    T, B, *rest = sizes
    return [Row(cell, T, B, rest[0], rest[-1], kind, layers, bidirectional) for kind in kinds.split()]


ROWS: list[Row] = [
    *_rows("lstm", (1024, 16, 768), "bf16 f16 tf32"), *_rows("lstm", (300, 20, 800), "bf16 f16 tf32 f32"),
    *_rows("gru", (1024, 16, 768), "bf16 f16 tf32"), *_rows("gru", (300, 20, 800), "bf16 f16 tf32 f32"),
    *_rows("rnn_tanh", (1024, 16, 768), "bf16 f16 tf32"), *_rows("rnn_tanh", (300, 20, 800), "bf16 f16 tf32 f32"),
    *_rows("lstm", (1024, 16, 1024), "bf16 f16"),
    *(row for H in (256, 512, 1024, 1536, 2048) for row in _rows("lstm", (256, 64, H), "bf16 f16")),
    *(row for H in (512, 1024, 1536, 2048, 2816) for row in _rows("gru", (256, 32, H), "bf16 f16")),
    *(row for H in (512, 1760, 2560) for row in _rows("rnn_tanh", (256, 32, H), "f16")),
    *_rows("rnn_tanh", (512, 4, 1152), "f16"), *_rows("lstm", (512, 4, 1152), "f16 bf16"),
    *_rows("lstm", (365, 256, 30, 256), "f32 tf32 bf16"), *_rows("lstm", (128, 512, 256), "f32 tf32 bf16"),
    *_rows("lstm", (128, 1024, 128), "f32"), *_rows("lstm", (35, 32, 650), "f16 bf16", 2),
    *_rows("lstm", (35, 20, 1500), "f16", 2), *_rows("lstm", (70, 80, 1150), "f16 bf16", 3),
    *_rows("lstm", (300, 20, 800), "f16 bf16", 5, True), *_rows("gru", (300, 20, 800), "f16 bf16", 5, True),
    *_rows("lstm", (256, 16, 512), "f16", 4), *_rows("lstm", (256, 64, 1024), "bf16", 4)]

# One layer at every batch: how much throughput a row of the batch has where there are few.
CURVE: list[Row] = [row for B in (1, 2, 4, 8, 16, 32, 64, 128) for row in _rows("lstm", (256, B, 768), "bf16")]

"""Many batch rows on a GPU: as many elements as a call may have, more bytes than 32 bits count, against float64."""

from __future__ import annotations

import pytest
import torch
from limits import relative

import ecornn

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:RNN module weights")]
LIBRARY = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn_tanh": torch.nn.RNN}


@pytest.mark.parametrize(("cell", "T", "B", "H"), [
    ("lstm", 100, 65536, 64),  # many blocks in turns
    ("gru", 80, 65536, 128),
    ("rnn_tanh", 4000, 2048, 256),  # groups of blocks
    ("lstm", 2000, 512, 512),
])
def test_the_longest_call(cell: str, T: int, B: int, H: int):
    """Rows do not depend on each other, so that a few tell whether offsets are right: the first, the last, some
    between, in all steps."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 48 << 30:
        pytest.skip("needs 48 GiB of GPU memory")
    torch.manual_seed(0)
    library = LIBRARY[cell](H, H).cuda().half()
    module = ecornn.compile(cell, hidden=H, batch=B, seq=T, dtype="float16", target="cuda")
    layer = module.bind({k: v.detach() for k, v in library.named_parameters()})
    T = module.manifest.longest
    assert max(b.extent.at(T) for b in module.manifest.buffers) > (1 << 31) * 0.95
    x = torch.randn(T, B, H, device="cuda", dtype=torch.float16)
    y = torch.full_like(x, float("nan"))
    rows = torch.tensor([0, 1, B // 3, B // 2, B - 9, B - 2, B - 1], device="cuda")
    with torch.no_grad():
        layer(x, out=y)
        some, found = x[:, rows].contiguous(), y[:, rows].double().cpu().numpy()
        rounded = library(some)[0].double().cpu().numpy()
        expected = library.double()(some.double())[0].cpu().numpy()
    assert torch.isfinite(y[-1]).all()
    assert relative(found, expected) <= 2 * relative(rounded, expected) + 1e-6

"""What the CPU benchmarks compare and count."""

from __future__ import annotations

from cpu_floor import loops

LOOP = "\n".join([
    ".LBB0_1:", *["\tvfmadd231ps\t%zmm1, %zmm2, %zmm3"] * 6, *["\tvfnmadd231ps\t%zmm1, %zmm2, %zmm4"] * 4,
    *["\tvaddps\t(%rax){1to16}, %zmm1, %zmm2"] * 3, *["\tvsubps\t%zmm5, %zmm1, %zmm2"] * 2,
    "\tvbroadcastss\t(%rdi), %zmm7", "\tvmovups\t64(%rsp), %zmm8", "\tincq\t%rax", "\tjne\t.LBB0_1", ""])


def test_loops_are_counted():
    """Negated multiply-adds are multiply-adds, as in loops of pairs."""
    (found,) = loops(LOOP)
    assert found == {"instructions": 19, "fma": 10, "additions": 5, "vector_arithmetic": 15, "broadcasts": 1,
                     "loads": 1, "spills": 1}
    assert not loops(LOOP.replace("jne\t.LBB0_1", "ret"))
    assert not loops(LOOP.replace("vfnmadd231ps", "vmulps")), "six are too few for a product"


def test_the_drop_in_in_programs():
    """Both sides are called, in turns and in threads; a row has percentiles of the calls and of the operations."""
    import cpu_in_programs
    import torch

    assert len(cpu_in_programs.suite_of("latency")) == 20 and len(cpu_in_programs.suite_of("grid")) == 24
    torch.manual_seed(0)
    with torch.no_grad():
        (row,) = cpu_in_programs.compare("gru", (4, 2, 5, 6), 0.01, [0], cpu_in_programs.Program.block)
        assert min(row["ecornn_calls"], row["torch_calls"]) >= 3 * cpu_in_programs.BLOCKS
        assert 0 < row["torch_ms"] <= row["torch_p99_ms"] <= row["torch_p99_both_ms"]
        assert row["ratio_ms"] == row["torch_ms"] / row["ecornn_ms"]
        assert cpu_in_programs.told({"mode": "turns", **row}).startswith("mode=turns cell=gru T=4 B=2 I=5 H=6 busy=0 ")
        (row,) = cpu_in_programs.compare("gru", (4, 2, 5, 6), 0.01, [0], cpu_in_programs.in_threads)
        assert row["torch_calls"] >= 3 * cpu_in_programs.BLOCKS * cpu_in_programs.REQUESTS

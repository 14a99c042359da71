"""The table of rates: whose row a device gets, and that estimates read it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from emulated import task_of

from ecornn.device import Device
from ecornn.overlap import wave_time
from ecornn.schedules import all_schedules, rates
from ecornn.schedules.rates import H100, PLAIN_CORE, ZEN, cpu_rates, gpu_rates
from ecornn.targets import KNOWN


def test_rows():
    own = replace(H100, clock=2.0)
    assert all(gpu_rates(device) is H100 for device in KNOWN.values())
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(rates.GPUS, "sm_80", own)
        patch.setitem(rates.GPUS, KNOWN["sm_86"].name, own)
        assert [gpu_rates(KNOWN[arch]) is own for arch in ("sm_80", "sm_86", "sm_89")] == [True, True, False]
    assert [cpu_rates(Device("llvm", arch, arch, 4)) for arch in ("znver4", "skylake-avx512", "neoverse-v1")] == [
        ZEN, PLAIN_CORE, PLAIN_CORE]
    assert PLAIN_CORE.slow_l3 and not ZEN.slow_l3


@pytest.mark.parametrize(("cell", "sizes", "schedules"), [
    ("lstm", (50, 16, 256, 256), ("persistent", "persistent_wide", "layout_transform", "fused_step")),
    ("lstm", (50, 16, 64, 64), ("persistent_block",)),
    ("indrnn", (50, 16, 256, 256), ("elementwise",))])
def test_estimates_read_the_row(monkeypatch: pytest.MonkeyPatch, cell: str, sizes: tuple[int, int, int, int],
                                schedules: tuple[str, ...]):
    """Each estimate is larger where rates are halved and times are doubled."""
    task = task_of(cell, sizes, "float16", KNOWN["sm_90a"])
    configs = {name: all_schedules()[name].default(task) for name in schedules}

    def estimates() -> list[float]:
        of = {all_schedules()[name]: config for name, config in configs.items()}
        return [one.features(task, one.plan(task, config))["estimate"] for one, config in of.items()]

    fast = estimates()
    times = ("launch", "tensor_launch", "l2_exchange", "cluster_exchange", "l2_counted", "memory_latency")
    slower = replace(H100, **{name: 2 * getattr(H100, name) for name in times}, memory=H100.memory / 2,
                     mma_gemm=H100.mma_gemm / 2, wgmma_gemm=H100.wgmma_gemm / 2)
    monkeypatch.setitem(rates.GPUS, task.device.name, slower)
    assert all(a < b for a, b in zip(fast, estimates(), strict=True))


def test_waves_read_the_row():
    assert wave_time(10, 1, 1, 100.0, replace(H100, sequence=5.0)) == 1005.0

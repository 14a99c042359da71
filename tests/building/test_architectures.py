"""Targets by name, and code for every architecture: compiled, and within the limits of its chip as ptxas reports it."""

import re
from typing import Any

import pytest
from architectures import BEGIN, END, LAYERS, PAGE, blocks_at_once, check, compiled, table
from emulated import check_numbers, task_of
from msgspec.structs import replace
from test_persistent_emulated import cut

from ecornn.build import nvcc
from ecornn.chips import ARCHITECTURES, PRODUCTS
from ecornn.compiler import plan
from ecornn.device import capabilities
from ecornn.errors import BuildError, DeviceError
from ecornn.floor import floor
from ecornn.program import Launch
from ecornn.schedules import all_schedules
from ecornn.schedules.rates import GPUS, gpu_rates
from ecornn.targets import BY_NAME, KNOWN, resolve

ALL = [(arch, layer) for arch in ARCHITECTURES for layer in LAYERS]
FEW = list(zip(ARCHITECTURES, LAYERS, strict=False))


def name_of(value: Any) -> str:
    return value if isinstance(value, str) else "-".join(str(v) for v in value.values())


def skip_unknown(arch: str) -> None:
    try:
        nvcc.compile_cubin("", arch)
    except BuildError as error:
        if "does not know" not in str(error):
            raise
        pytest.skip(str(error))  # a toolkit that is older than the architecture cannot compile for it


@pytest.mark.parametrize(("arch", "layer"), FEW, ids=name_of)
def test_code_fits_the_chip(arch: str, layer: dict[str, Any]):
    skip_unknown(arch)
    check(KNOWN[arch], *compiled(arch, **layer))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("arch", "layer"), [one for one in ALL if one not in FEW], ids=name_of)
def test_all_code_fits_all_chips(arch: str, layer: dict[str, Any]):
    skip_unknown(arch)
    check(KNOWN[arch], *compiled(arch, **layer))


def test_a_launch_that_does_not_fit_is_found():
    launch, used = Launch("f", 4, 512, 90 << 10), {"registers": 64, "shared": 0}
    ada, hopper = KNOWN["sm_89"], KNOWN["sm_90a"]
    assert [blocks_at_once(device, launch, used) for device in (ada, hopper)] == [1, 2]
    assert blocks_at_once(ada, launch, used | {"shared": 10 << 10}) == 0
    assert blocks_at_once(ada, launch, used | {"registers": 129}) == 0


@pytest.mark.parametrize(("target", "arch", "name"), [
    ("RTX 5090", "sm_120", "NVIDIA GeForce RTX 5090"), ("b200", "sm_100a", "NVIDIA B200"),
    ("L4", "sm_89", "NVIDIA L4"), ("GeForce RTX 4090", "sm_89", "NVIDIA GeForce RTX 4090"),
    ("A100-40GB", "sm_80", "NVIDIA A100-SXM4-40GB"), ("Jetson Orin", "sm_87", "Orin"),
    ("GH200", "sm_90a", "NVIDIA GH200 480GB"), ("sm_90", "sm_90a", "NVIDIA H100 80GB HBM3"),
    *((form, "sm_100a", "NVIDIA B200") for form in ("sm_100", "sm_100a", "sm_100f")),
    *((form, "sm_120", "NVIDIA GeForce RTX 5090") for form in ("sm_120", "sm_120a", "sm_120f"))])
def test_targets_by_name(target: str, arch: str, name: str):
    device = resolve(target)
    assert (device.arch, device.name) == (arch, name) and device.shared == ARCHITECTURES[arch].shared


def test_names_are_their_own():
    for product in PRODUCTS:
        assert resolve(product.short) is resolve(product.name) is BY_NAME[product.short]
        assert re.fullmatch(r"[a-z0-9-]+", product.short) and product.arch in ARCHITECTURES
    assert len(BY_NAME) == len(PRODUCTS) == len({product.name for product in PRODUCTS})
    assert {product.name for product in PRODUCTS if product.measured} == set(GPUS)


@pytest.mark.parametrize(("target", "said"), [
    ("RTX 509", "did you mean rtx-5090"), ("sm_121a0", "did you mean sm_121"), ("sm_75", "8.0 or newer"),
    ("sm_80a", "did you mean sm_80"), ("sm_90f", "did you mean sm_90a"), ("sm_130", "'cuda'")])
def test_names_that_nothing_has(target: str, said: str):
    with pytest.raises(DeviceError, match=said):
        resolve(target)


def test_capabilities():
    assert {arch for arch in ARCHITECTURES if capabilities(arch).warpgroups} == {"sm_90a"}
    assert {arch for arch in ARCHITECTURES if capabilities(arch).cluster == 1} == {"sm_80", "sm_86", "sm_87", "sm_89"}
    assert {arch for arch in ARCHITECTURES if capabilities(arch).multicast} == {
        "sm_90a", "sm_100a", "sm_103a", "sm_110a"}
    assert capabilities("sm_130") == capabilities("sm_121") and not capabilities("sm_90").warpgroups


def test_a_newer_chip_is_served_by_its_capabilities():
    newer = replace(KNOWN["sm_120"], arch="sm_130", name="a newer one", cores=200, shared=150 << 10)
    found = plan("lstm", hidden=256, batch=4, dtype="float16", target=newer)
    assert found.device is newer and gpu_rates(newer) is GPUS["NVIDIA H100 80GB HBM3"]
    code, resources = nvcc.compile_cubin('extern "C" __global__ void f() {}', "sm_130")
    assert code.startswith(b"//") and code.endswith(b"\0") and resources == {}
    (of,) = re.findall(rb"\.target sm_(\d+)\n", code)
    assert 80 <= int(of) < 130 and b".entry f" in code  # no architecture with a letter, whose PTX is its own alone
    with pytest.raises(BuildError, match="does not know sm_130: it needs a newer CUDA toolkit"):
        nvcc.ptx("", "sm_130")


def test_rates_and_floors_scale_with_the_chip():
    slow, fast = (gpu_rates(BY_NAME[name]) for name in ("rtx-5070", "rtx-5090"))
    assert fast.memory_beside > 2 * slow.memory_beside and fast.threads == 1536 and fast.mma > 4
    def least(name: str) -> float:
        return floor(BY_NAME[name], "lstm", 64, 1024, 1024, "float16").total
    assert least("b200") < least("h100") < least("a100") < least("l4") < least("jetson-orin")


@pytest.mark.parametrize(("arch", "schedule", "cell", "sizes", "dtype"), [
    ("sm_120", "layout_transform", "gru", (3, 5, 7, 40), "bfloat16"),  # a stage of its 99 KB
    ("sm_120", "persistent_block", "lstm", (3, 9, 16, 64), "float16"),
    ("sm_121", "whole_step", "lstm", (2, 5, 32, 64), "float16"),  # without multicast
    ("sm_87", "persistent", "lstm", (4, 5, 33, 65), "float16")])
def test_emulated_with_the_limits_of_a_chip(tmp_path, arch, schedule, cell, sizes, dtype):
    task, found = task_of(cell, sizes, dtype, replace(KNOWN[arch], cores=6)), all_schedules()[schedule]
    check_numbers(tmp_path, found, task, found.default(task))


def test_clusters_of_the_chip_alone_are_offered(tmp_path):
    schedule, found = all_schedules()["persistent"], {}
    for arch, hidden in (("sm_120", 64), ("sm_120", 128), ("sm_100a", 128), ("sm_89", 64)):
        task = task_of("lstm", (3, 3, 24, hidden), "float16", KNOWN[arch])
        knobs = {k.name: k.values for k in schedule.knobs(task)}
        config = cut(task, carrier="cluster", units=8, fences="rare")
        found[arch, hidden] = "cluster" in knobs["carrier"], schedule.check(task, config)
        if arch == "sm_120" and hidden == 64:
            check_numbers(tmp_path, schedule, task, config)
    assert [offered for offered, _ in found.values()] == [True, True, True, False]
    assert found["sm_120", 64][1] is found["sm_100a", 128][1] is None
    assert "1 clusters of 16 blocks, but 0 fit" in found["sm_120", 128][1]
    assert "but 0 fit" in found["sm_89", 64][1]


def test_multicast_is_offered_where_it_is_fast():
    def clusters(arch: str) -> tuple[int, ...]:
        knobs = all_schedules()["whole_step"].knobs(task_of("lstm", (2, 8, 64, 64), "float16", KNOWN[arch]))
        return next(k.values for k in knobs if k.name == "cluster")
    assert clusters("sm_120") == clusters("sm_89") == (1,) and clusters("sm_100a") == clusters("sm_90a") == (1, 2, 4, 8)


def test_the_page_is_of_the_results():
    """Run tests/architectures.py where this fails."""
    assert PAGE.read_text().split(BEGIN)[1].split(END)[0].strip() == table()

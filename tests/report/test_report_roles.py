"""The picture of a step by roles of warps: it says what the kernel's code says, no more and no less."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
import site_step
from test_readable import CASES, kernels, made, notes, text_of
from test_report_pictures import read

from ecornn.report.roles import Kernel, kernel_of, picture

PERSISTENT = [name for name, case in CASES.items() if case[0].startswith("persistent")]
ROLES = {"persistent": {"MMA warps", "gate warps", "projection CTAs"}, "persistent_block": {"all warps"},
         "persistent_wide": {"producer", "MMA warpgroups"}}


def kernel(name: str) -> Kernel:
    found = kernel_of(made(name)[1].functions)
    assert found is not None
    return found


def words(picture: str) -> str:
    return " ".join(text.text or "" for text in ET.fromstring(picture).iter("text"))


@pytest.mark.parametrize("name", PERSISTENT)
def test_each_note_of_a_step_is_in_the_picture(name: str):
    """The notes of the text that people read, at the indentation of the loop over steps and deeper; and as words that
    can be read."""
    own, drawn = kernel(name), picture(kernel(name))
    read(drawn)
    assert {role.name for role in own.roles} <= ROLES[own.name]
    (text,) = (text for function, text in kernels(text_of(name)).items() if function == own.name)
    for note in notes(text):
        if "no thread leaves" not in note:  # behind the last step
            said = re.sub(r"^[\w ]+?(, \w+)?: ", "", note)
            assert said in words(drawn), note


def test_roles_are_those_of_the_plan():
    own = {role.name: role for role in kernel("workers").roles}
    text = kernels(text_of("workers"))["persistent"]
    bounds = [int(n) for n in re.findall(r"if \(thread < (\d+)\) \{", text)]
    assert own["MMA warps"].threads == bounds[0]
    assert own["MMA warps"].threads + own["gate warps"].threads == bounds[1]
    blocks = int(re.findall(r"if \(block < (\d+)\)", text)[0])
    assert own["gate warps"].blocks == own["MMA warps"].blocks == blocks
    assert own["projection CTAs"].blocks == kernel("workers").blocks - blocks > 0


def acts(name: str, role: str) -> list[tuple[str, str]]:
    (own,) = (one for one in kernel(name).roles if one.name == role)
    return [(act.kind, act.words) for phase in own.steps for act in phase.acts if act.kind != "note"]


def test_what_warps_wait_for_and_send():
    barrier = ("wait", "named barrier of 128 threads")
    assert acts("l2", "MMA warps") == [("wait", "polls exchange_0 in L2"), ("multiply", "mma m16n8k16"), barrier]
    assert acts("l2", "gate warps") == [barrier, ("send", "to exchange_0 in L2")]
    assert acts("cluster", "gate warps") == [barrier, ("send", "to the shared memory of the cluster's CTAs")]
    assert acts("workers", "gate warps")[-1] == ("wait", "polls ready in L2")
    assert ("wait", "polls counters in L2") in acts("wide", "producer")
    assert ("send", "counts in counters in L2") in acts("wide", "MMA warpgroups")
    for name in PERSISTENT:  # as often as the text has it
        text = kernels(text_of(name))[kernel(name).name]
        phases = [phase for role in kernel(name).roles for phase in role.phases]
        waits = [act for phase in phases for act in phase.acts if act.kind == "wait"]
        assert any("named barrier" in act.words for act in waits) == ("ptx_bar_sync" in text)
        assert any("polls" in act.words for act in waits) == bool(re.search("ptx_ld_.*(relaxed|acquire)", text))
        assert any("mbarrier" in act.words for act in waits) == ("ecornn_mbarrier_wait" in text)


def test_lanes_meet_and_what_is_sent_arrives():
    drawn = picture(kernel("statistics"))
    meets = {float(d) for d in re.findall(r'class="meets" d="M0 ([\d.]+)H', drawn)}
    assert len(meets) == 2 and drawn.count('class="sent"') == 1
    assert picture(kernel("l2")).count('class="meets"') == 1
    assert 'class="meets"' not in picture(kernel("mma"))  # one role


@pytest.mark.parametrize("name", ["elementwise", "fused_step", "whole_step"])
def test_where_each_step_is_a_launch_there_is_none(name: str):
    assert kernel_of(made(name)[1].functions) is None


def test_the_picture_of_the_docs_is_that_of_the_code():
    """``python docs/site/site_step.py`` writes it."""
    assert site_step.IMAGE.read_text(encoding="utf-8") == site_step.picture()

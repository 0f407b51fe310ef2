"""One made-up machine in every form in which a person may describe it: each is read as the same machine."""

import io
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st
from machine_support import Plan, facts_of, facts_of_plan, files_of, packed, plans, unpacked, xml_of

from topoalign.machines.lstopo import read_lstopo
from topoalign.machines.sysfs_archive import read_archive
from topoalign.machines.sysfs_machine import read_sysfs


@settings(max_examples=60)
@given(plans(), st.sampled_from(["2.0", "3.0"]))
def test_the_xml_of_hwloc_2_and_3_is_read_as_the_machine_that_it_describes(plan: Plan, version: str) -> None:
    assert facts_of_plan(plan) == facts_of(read_lstopo(io.BytesIO(xml_of(plan, version))))


@settings(max_examples=60)
@given(plans(), st.booleans())
def test_a_packed_sysfs_tree_is_read_as_the_machine_that_it_describes(plan: Plan, masks: bool) -> None:
    assert facts_of_plan(plan) == facts_of(read_archive(packed(*files_of(plan, masks))))


@settings(max_examples=15)
@given(plans(), st.booleans())
def test_a_folder_of_sysfs_is_read_as_the_machine_that_it_describes(plan: Plan, masks: bool) -> None:
    with TemporaryDirectory() as folder:
        topology = read_sysfs(unpacked(Path(folder), *files_of(plan, masks)))

    assert facts_of_plan(plan) == facts_of(topology)

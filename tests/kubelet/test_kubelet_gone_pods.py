"""What the kubelet's files list for pods that are gone counts as free, as it will when the next pod comes."""

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from decision_support import GIB, admitted, container, machine, node, pod
from hypothesis import given
from hypothesis import strategies as st
from kubelet_files_support import VOLUME, write_files

from topoalign.core.admission.admit import admit
from topoalign.core.model.errors import StateFault
from topoalign.core.model.events import MemoryUse
from topoalign.core.model.ids import GPU, MEMORY, NIC
from topoalign.core.model.requests import AdmissionRules, Mode, Policy
from topoalign.core.state.fold import NodeState
from topoalign.kubelet.files import checkpoint, cpu_checkpoint, device_checkpoint, memory_checkpoint
from topoalign.kubelet.files.device_checkpoint import CheckpointData
from topoalign.kubelet.files.node_state import KubeletNode, node_state
from topoalign.kubelet.files.pod_directories import ListedPods
from topoalign.testing.fake_kubelet.files import cpu_file, machine_state, memory_file

RULES = AdmissionRules(
    mode=Mode.KUBELET, policy=Policy.SINGLE_NUMA_NODE, reserved_cpus="0", reserved_memory={0: {MEMORY: GIB}}
)
EMPTY = node(machine())
FULL = pod(container("main", gpus=2, cpus=7, gib=62), name="uid-1")


def holding(*pods: Any) -> NodeState:
    state = EMPTY
    for each in pods:
        for allocation in admitted(admit(state, each, RULES)).values():
            state = state.holding(allocation)
    return state


def read(root: Path) -> KubeletNode:
    assert EMPTY.topology is not None and EMPTY.health is not None
    return node_state(EMPTY.topology, EMPTY.health, root, RULES)


def removed(root: Path) -> None:
    shutil.rmtree(root / "pods/uid-1")


def torn_down(root: Path) -> None:
    (root / "pods/uid-1" / VOLUME).rmdir()


def without_volumes(root: Path) -> None:
    (root / "pods/uid-1" / VOLUME).rmdir()
    (root / "pods/uid-1" / VOLUME).parent.rmdir()


def without_directories(root: Path) -> None:
    shutil.rmtree(root / "pods")


def a_file(root: Path) -> None:
    shutil.rmtree(root / "pods")
    (root / "pods").write_text("")


@pytest.mark.parametrize("end", [removed, torn_down])
def test_what_a_pod_that_is_gone_had_is_free_and_the_answer_names_the_pod(
    tmp_path: Path, end: Callable[[Path], None]
) -> None:
    """One that runs on the other NUMA node keeps what it has."""
    write_files(tmp_path, holding(FULL, pod(container("main", gpus=1, cpus=4, gib=8), name="uid-2")), RULES)
    end(tmp_path)

    found = read(tmp_path)

    assert {"uid-2"} == {held.owner.pod for held in found.state.allocations.values() if held.owner is not None}
    assert [1] == list(found.state.memory)
    (note,) = found.findings
    assert "'uid-1'" in note and "counts as free" in note and "uid-2" not in note
    again = admitted(admit(found.state, FULL, RULES))["main"]
    assert admitted(admit(EMPTY, FULL, RULES))["main"] == again


@pytest.mark.parametrize(
    ("end", "note"),
    [
        (without_volumes, "pods without a mounted volume may have ended"),
        (without_directories, "there is no "),
        (a_file, "there is no "),
    ],
)
def test_without_usable_directories_all_counts_as_held_and_a_note_tells(
    tmp_path: Path, end: Callable[[Path], None], note: str
) -> None:
    """Where the directories of pods cannot tell, everything counts as held, and a note says so."""
    held = holding(FULL)
    write_files(tmp_path, held, RULES)
    end(tmp_path)

    found = read(tmp_path)

    assert (held.ownership.cpus_in_use, held.ownership.holders.keys(), held.memory) == (
        found.state.ownership.cpus_in_use,
        found.state.ownership.holders.keys(),
        found.state.memory,
    )
    assert found.findings[0].startswith(note)


def test_directories_that_cannot_be_read_change_nothing_and_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(root: Path) -> None:
        raise StateFault("pods cannot be read: Permission denied", "")

    write_files(tmp_path, holding(FULL), RULES)
    removed(tmp_path)
    monkeypatch.setattr("topoalign.kubelet.files.pod_directories.read_pod_directories", refused)

    found = read(tmp_path)

    assert 2 == len(found.state.ownership.holders)
    assert "pods cannot be read: Permission denied: pods that are gone count as holding" in found.findings[0]


def test_a_pod_newer_than_the_directory_listing_is_not_taken_for_gone(tmp_path: Path) -> None:
    """
    A pod that came after the directories were read is not taken for gone. The files are read one after the other: what
    the last one lists may have begun after the first was judged.
    """
    (tmp_path / "pods/uid-1" / VOLUME).mkdir(parents=True)
    pods = ListedPods(tmp_path)

    before = pods.is_gone("uid-1")
    (tmp_path / "pods/uid-2/volumes").mkdir(parents=True)

    assert [False, False, True] == [before, pods.is_gone("uid-2"), pods.is_gone("uid-3")]


def test_files_are_checked_before_anything_is_dropped(tmp_path: Path) -> None:
    """CPUs that the shared pool and a pod that is gone both have are damage, and not free."""
    write_files(tmp_path, holding(FULL), RULES)
    (tmp_path / cpu_checkpoint.NAME).write_bytes(cpu_file("static", "0-15", {"gone": {"main": "3"}}))

    with pytest.raises(StateFault, match="are in the shared pool and belong to a container"):
        read(tmp_path)


def test_an_unlisted_resource_that_only_gone_pods_have_is_ignored(tmp_path: Path) -> None:
    """
    A resource that no plugin lists and only pods that are gone have is ignored. The kubelet does not know it any more
    once it has dropped them.
    """
    write_files(tmp_path, holding(FULL), RULES)
    plugins = tmp_path / "device-plugins"
    data = device_checkpoint.load_devices(plugins)
    assert data is not None
    device_checkpoint.store(plugins, CheckpointData(data.pod_device_entries, {NIC: []}))

    before = read(tmp_path).registered
    removed(tmp_path)
    after = read(tmp_path).registered

    assert {GPU: frozenset(), NIC: frozenset()} == before
    assert {NIC: frozenset()} == after


def memory_node(reserved: int, assignments: int, cells: list[int]) -> dict[str, Any]:
    table = {"total": 64, "systemReserved": 0, "allocatable": 64, "reserved": reserved, "free": 64 - reserved}
    return {"numberOfAssignments": assignments, "memoryMap": {"memory": table, "hugepages-2Mi": table}, "cells": cells}


def naive_release(nodes: dict[int, Any], blocks: list[tuple[str, tuple[int, ...], int]]) -> dict[int, Any]:
    """RemoveContainer of the memory manager's static policy, statement by statement."""
    state = {
        i: [each["numberOfAssignments"], list(each["cells"]), {n: dict(t) for n, t in each["memoryMap"].items()}]
        for i, each in nodes.items()
    }
    for kind, group, size in blocks:
        for i in group:
            state[i][0] -= 1
            if state[i][0] == 0:
                state[i][1] = [i]
            if size == 0:
                continue
            table = state[i][2][kind]
            if table["reserved"] == 0:
                continue
            if size > table["reserved"]:
                size -= table["reserved"]
                table["free"] += table["reserved"]
                table["reserved"] = 0
                continue
            table["reserved"] -= size
            table["free"] += size
            size = 0
    return {
        i: (count, cells, {n: (t["reserved"], t["free"]) for n, t in m.items()})
        for i, (count, cells, m) in state.items()
    }


GROUPS: list[list[tuple[int, ...]]] = [
    [(0, 1), (2, 3)],
    [(0, 1, 2), (3,)],
    [(0,), (1,), (2,), (3,)],
    [(0, 1), (1,), (2, 3)],
]


@given(st.integers(0, 10**9))
def test_memory_of_gone_pods_goes_back_as_the_memory_manager_releases_it(seed: int) -> None:
    """Nodes 0 to 3 in groups as they come; blocks of memory and hugepages, also empty ones."""
    chance = Random(seed)
    groups = chance.choice(GROUPS)
    entries: dict[str, dict[str, list[Any]]] = {}
    reserved = {(i, kind): 0 for i in range(4) for kind in ("memory", "hugepages-2Mi")}
    assignments = [0] * 4
    for uid in ("uid-a", "uid-b", "uid-c"):
        for name in ("init", "main")[: chance.randint(0, 2)]:
            group = chance.choice(groups)
            for kind in ("memory", "hugepages-2Mi")[: chance.randint(1, 2)]:
                size = chance.choice([0, 1, 3, 7])
                entries.setdefault(uid, {}).setdefault(name, []).append(
                    {"numaAffinity": list(group), "type": kind, "size": size}
                )
                rest = size
                for i in group:
                    part = rest if i == group[-1] else chance.randint(0, rest)
                    reserved[i, kind] += part
                    assignments[i] += 1
                    rest -= part
    nodes = {}
    for i in range(4):
        cells = list(next(group for group in groups if i in group)) if assignments[i] else [i]
        nodes[i] = memory_node(reserved[i, "memory"], assignments[i], cells)
        pages = nodes[i]["memoryMap"]["memory"] | {
            "reserved": reserved[i, "hugepages-2Mi"],
            "free": 64 - reserved[i, "hugepages-2Mi"],
        }
        nodes[i]["memoryMap"] = nodes[i]["memoryMap"] | {"hugepages-2Mi": pages}
    gone = {uid for uid in entries if chance.random() < 0.6}
    blocks = [
        (block["type"], tuple(block["numaAffinity"]), block["size"])
        for uid in sorted(gone)
        for name in sorted(entries[uid])
        for block in entries[uid][name]
    ]

    left = memory_checkpoint.decode_memory_checkpoint(memory_file("Static", nodes, entries)).without(gone)

    assert naive_release(nodes, blocks) == {
        i: (
            each.number_of_assignments,
            each.cells,
            {name: (table.reserved, table.free) for name, table in each.memory_map.items()},
        )
        for i, each in left.nodes.items()
    }
    assert entries.keys() - gone == (left.entries or {}).keys()


SHARED = [cpu_file("static", pool, {"u": {"c": "3"}}) for pool in ("0-15", "0-2,4-15")]
"""While the CPU manager gives CPU 3 away, and when it has."""


def test_cpus_read_between_two_writes_of_their_manager_are_read_again(tmp_path: Path) -> None:
    """CPUs that are read between two writes of their manager are read again."""
    file, waits = tmp_path / cpu_checkpoint.NAME, []
    file.write_bytes(SHARED[0])

    def load() -> object:
        state = cpu_checkpoint.load_cpu_state(tmp_path)
        assert state is not None
        cpu_checkpoint.check_cpu_state(state, machine(), RULES)
        return state.exclusive

    def wait(seconds: float) -> None:
        waits.append(seconds)
        file.write_bytes(SHARED[1])

    assert {("u", "c"): frozenset({3})} == checkpoint.load_settled(load, wait)
    assert [checkpoint.BETWEEN_READS] == waits


def test_a_file_that_never_holds_is_read_four_times_and_then_refused() -> None:
    tries: list[str] = []

    def load() -> None:
        tries.append("read")
        raise StateFault("damaged", "")

    with pytest.raises(StateFault, match="damaged"):
        checkpoint.load_settled(load, lambda seconds: tries.append("wait"))

    assert ["read", "wait"] * 3 + ["read"] == tries


@pytest.mark.parametrize("name", [cpu_checkpoint.NAME, memory_checkpoint.NAME])
def test_the_node_is_read_with_the_second_reading(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path, holding(FULL), RULES)
    sound, reads = (tmp_path / name).read_bytes(), []
    read_once = checkpoint.read_checkpoint_file

    def read_between(path: Path) -> bytes | None:
        if path.name == name:
            reads.append(name)
            path.write_bytes(sound if len(reads) > 1 else b"{}")
        return read_once(path)

    monkeypatch.setattr(checkpoint, "read_checkpoint_file", read_between)
    monkeypatch.setattr(checkpoint, "BETWEEN_READS", 0.0)

    assert 2 == len(read(tmp_path).state.ownership.holders)
    assert [name] * 2 == reads


def test_memory_that_the_kubelet_lost_counts_as_given_with_a_note(tmp_path: Path) -> None:
    """
    Memory that the kubelet has lost counts as given away, and a note tells how much. The kubelet released a group of
    NUMA nodes of which one was used alone as well (`MemoryManagerState.lost`). Its file says so from then on, and is
    read as it is.
    """
    write_files(tmp_path, EMPTY, RULES)
    nodes = machine_state(EMPTY.hardware, RULES, {1: MemoryUse(reserved={MEMORY: GIB})})
    (tmp_path / "memory_manager_state").write_bytes(memory_file("Static", nodes, {}))
    found = read(tmp_path)

    assert {1: GIB} == {node: use.reserved[MEMORY] for node, use in found.state.memory.items()}
    assert [f"the kubelet's memory manager counts {GIB} bytes of memory as given away that no container has"] == [
        finding for finding in found.findings if "memory manager" in finding
    ]

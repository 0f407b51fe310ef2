"""Machines whose NUMA nodes are odd, from the files of /sys to what a pod gets there."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from decision_support import GIB, admitted, container, node, pod, refused
from nvml_support import link, put, uuid

from topoalign.core.admission.admit import admit
from topoalign.core.model.decisions import Admission, Decision, Explanation
from topoalign.core.model.hints import HintRule, Hints
from topoalign.core.model.ids import GPU
from topoalign.core.model.requests import AdmissionRules, Mode, Policy
from topoalign.core.model.topology.bitmask import nodes_of
from topoalign.core.model.topology.cpuset import format_cpuset, parse_cpuset
from topoalign.core.model.topology.model import Topology
from topoalign.machines.sysfs_files import Tree
from topoalign.machines.sysfs_machine import read_sysfs


class Machine(NamedTuple):
    """NUMA node -> its CPUs, the node of each GPU (-1: the kernel does not know), and what else is odd."""

    nodes: Mapping[int, Sequence[int]]
    gpus: Sequence[int]
    offline: frozenset[int] = frozenset()
    distances: bool = True


def blocks(nodes: Sequence[int], each: int = 4) -> dict[int, Sequence[int]]:
    return {name: range(place * each, place * each + each) for place, name in enumerate(nodes)}


MACHINES = {
    "a GPU whose node is not known": Machine(blocks([0, 1]), (-1, 0, 1, -1)),
    "ids 0, 8 and 252, the last without CPUs": Machine({**blocks([0, 8]), 252: ()}, (0, 0, 8, 8)),
    "34 nodes, two with CPUs": Machine({**blocks([0, 1], 16), **dict.fromkeys(range(2, 34), ())}, (0, 0, 1, 1)),
    "64 nodes": Machine(blocks(range(64)), (0, 21, 42, 63)),
    "a GPU on a node without CPUs": Machine({**blocks([0, 1]), 2: (), 3: ()}, (0, 1, 2, 3)),
    "no distance files": Machine(blocks([0, 1, 2, 3]), (0, 1, 2, 3), distances=False),
    "interleaved CPUs": Machine({0: range(0, 16, 2), 1: range(1, 16, 2)}, (0, 0, 1, 1)),
    "cpu0 is offline": Machine(blocks([0, 1]), (0, 0, 1, 1), offline=frozenset({0})),
}


def tree(root: Path, machine: Machine) -> Topology:
    """What the kernel would show of it, read as a node agent reads it."""
    cpus = sorted(cpu for of_node in machine.nodes.values() for cpu in of_node)
    online = [cpu for cpu in cpus if cpu not in machine.offline]
    system = "sys/devices/system"
    put(root, f"{system}/cpu/online", format_cpuset(online))
    put(root, f"{system}/node/online", format_cpuset(machine.nodes))
    for name, of_node in machine.nodes.items():
        put(root, f"{system}/node/node{name}/cpulist", format_cpuset(set(of_node) & set(online)))
        put(root, f"{system}/node/node{name}/meminfo", f"Node {name} MemTotal: {4 << 20} kB")
        row = " ".join("10" if name == other else "21" for other in machine.nodes)
        if machine.distances:
            put(root, f"{system}/node/node{name}/distance", row)
        for cpu in set(of_node) & set(online):
            put(root, f"{system}/cpu/cpu{cpu}/topology/physical_package_id", str(name))
            put(root, f"{system}/cpu/cpu{cpu}/topology/core_cpus_list", str(cpu))
    for index, near in enumerate(machine.gpus):
        address = f"0000:{index + 1:02x}:00.0"
        folder = f"sys/devices/pci0000:{index:02x}/0000:{index:02x}:01.0/{address}"
        for file, text in {"class": "0x030200", "vendor": "0x10de", "numa_node": str(near)}.items():
            put(root, f"{folder}/{file}", text)
        link(root, f"sys/bus/pci/devices/{address}", folder)
        put(root, f"proc/driver/nvidia/gpus/{address}/information", f"GPU UUID: {uuid(index)}")
    return read_sysfs(Tree(root))


def decide(
    machine: Topology, mode: Mode, policy: Policy = Policy.RESTRICTED, *, gpus: int = 1, nodes: int = 64
) -> Decision:
    rules = AdmissionRules(policy=policy, mode=mode, max_allowable_numa_nodes=nodes)
    return admit(node(machine), pod(container(gpus=gpus, cpus=2, gib=1)), rules)


def named_nodes(explanation: Explanation, *providers: str) -> set[int]:
    """All NUMA nodes that any hint of these providers names."""
    return {
        each
        for alignment in explanation.alignments
        for resources in (alignment.hints[provider] for provider in providers)
        for hints in (resources or {}).values()
        for each in nodes_in(hints)
    }


def nodes_in(hints: Hints) -> set[int]:
    if hints is None:
        return set()
    if isinstance(hints, HintRule):
        return {each for mask in (hints.nodes, *hints.besides) for each in nodes_of(mask)}
    return {each for hint in hints if hint.affinity is not None for each in nodes_of(hint.affinity)}


@pytest.mark.parametrize("name", MACHINES)
def test_c22_a_pod_is_near_its_gpu_and_cpuless_nodes_give_no_hints(name: str, tmp_path: Path) -> None:
    """A pod gets CPUs and memory near its GPU, and nodes without CPUs give no CPU hints."""
    machine = tree(tmp_path, MACHINES[name])
    with_cpus = set(machine.cpus_by_node)

    decision = decide(machine, Mode.BEST)

    (got,) = admitted(decision).values()
    (gpu,) = got.devices[GPU]
    near = machine.gpu_by_id[gpu].numa_affinity
    cpus = parse_cpuset(got.cpus)
    assert 2 == len(cpus) and cpus <= {cpu.id for cpu in machine.cpus}
    if near and near[0] in with_cpus:
        assert cpus <= machine.cpus_by_node[near[0]]
        assert [near] == [block.nodes for block in got.memory]
    assert isinstance(decision, Admission)
    assert named_nodes(decision.explanation, "cpu", "memory") <= with_cpus
    assert (
        named_nodes(decision.explanation, "device")
        <= {each for gpu in machine.gpus for each in gpu.numa_affinity} | with_cpus
    )


@pytest.mark.parametrize("name", MACHINES)
def test_c22_every_gpu_of_an_odd_machine_can_be_used(name: str, tmp_path: Path) -> None:
    machine = tree(tmp_path, MACHINES[name])

    (got,) = admitted(decide(machine, Mode.BEST, Policy.BEST_EFFORT, gpus=4)).values()

    assert {uuid(i) for i in range(4)} == set(got.devices[GPU])


def test_c22_what_the_files_say_is_what_is_known(tmp_path: Path) -> None:
    """Not known is not node 0 and no distance, and what is offline is not there."""
    known = {name: tree(tmp_path / str(place), machine) for place, (name, machine) in enumerate(MACHINES.items())}

    assert [(), (0,), (1,), ()] == [gpu.numa_affinity for gpu in known["a GPU whose node is not known"].gpus]
    assert (0, 8, 252) == known["ids 0, 8 and 252, the last without CPUs"].node_ids
    assert [34, 64] == [len(known[name].nodes) for name in ("34 nodes, two with CPUs", "64 nodes")]
    assert known["no distance files"].distances is None
    assert frozenset(range(1, 16, 2)) == known["interleaved CPUs"].cpus_by_node[1]
    assert {1, 2, 3} == known["cpu0 is offline"].cpus_by_node[0]


@pytest.mark.parametrize("name", MACHINES)
def test_c22_in_mode_kubelet_it_is_as_upstream(name: str, tmp_path: Path) -> None:
    """
    Which refuses more than eight nodes, unless told otherwise, and ids that its masks cannot hold; a device whose node is
    not known fits everywhere, and nodes without CPUs take part (kubelet v1.36.3, topologymanager).
    """
    machine = tree(tmp_path, MACHINES[name])
    ids = machine.node_ids
    if len(ids) > 8 or ids[-1] > 63:
        assert "TooManyNumaNodes" == refused(decide(machine, Mode.KUBELET, nodes=8)).code
    if ids[-1] > 63 or len(ids) > 12:
        return
    (got,) = admitted(decide(machine, Mode.KUBELET)).values()
    near = machine.gpu_by_id[got.devices[GPU][0]].numa_affinity
    if near and near[0] in machine.cpus_by_node:
        assert parse_cpuset(got.cpus) <= machine.cpus_by_node[near[0]]
    assert GIB == sum(block.size for block in got.memory)

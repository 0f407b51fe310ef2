"""The sets of devices that were not chosen, as `explain` shows them: compared with all sets, or with all neighbours."""

from collections.abc import Sequence
from itertools import combinations
from random import Random

import pytest
from decision_support import container, node, pod
from hypothesis import given
from hypothesis import strategies as st
from seam_reference import naive_rank

from topoalign.core.admission.admit import admit
from topoalign.core.admission.alternatives import rank_alternatives
from topoalign.core.model.decisions import Considered, PreferenceQuestion
from topoalign.core.model.ids import GPU, NIC, ContainerName, DeviceID, ResourceName
from topoalign.core.model.requests import AdmissionRules, Mode, Placement, Policy
from topoalign.core.model.topology.device_links import Link, PcieClass
from topoalign.core.model.topology.model import Gpu, Nic, PluginDevice, Topology
from topoalign.core.model.topology.queries import connection_score
from topoalign.core.placement.preference import prefer
from topoalign.machines import load_machine


def machine(seed: int, gpus: int, nics: int) -> Topology:
    """Every pair is linked somehow."""
    chance = Random(seed)
    ids = [DeviceID(f"GPU-{i:02}") for i in range(gpus)] + [DeviceID(f"mlx5_{i:02}") for i in range(nics)]
    links = tuple(
        Link(a=a, b=b, pcie=chance.choice([*PcieClass]), fabric_links=chance.choice([0, 0, 2]) if b < "m" else 0)
        for a, b in combinations(ids, 2)
    )
    return Topology(
        gpus=tuple(Gpu(id=id, index=i) for i, id in enumerate(ids[:gpus])),
        nics=tuple(Nic(id=id, index=i) for i, id in enumerate(ids[gpus:])),
        links=links,
    )


def told(topology: Topology, chosen: Sequence[DeviceID]) -> tuple[Considered, ...]:
    every = tuple(topology.devices[GPU])
    asked = PreferenceQuestion(
        resource=GPU, available=every, must_include=(), size=len(chosen), container=ContainerName("c")
    )
    return rank_alternatives(topology, GPU, every, asked, chosen, (), "simple")


def links(topology: Topology, members: Sequence[DeviceID]) -> int:
    return sum(connection_score(topology, a, b) for a, b in combinations(members, 2))


@given(st.integers(0, 999), st.integers(1, 4), st.booleans())
def test_the_best_five_other_sets_are_shown_with_their_scores(seed: int, size: int, large: bool) -> None:
    """Of up to 256 sets all are compared, of more those that differ in one device; of equals the first are shown."""
    most = 13 if large else 7
    topology = machine(seed, most, 1)
    every = tuple(topology.gpu_by_id)
    chosen = tuple(sorted(Random(seed).sample(every, size)))
    table = [[0 if a == b else connection_score(topology, a, b) for b in every] for a in every]

    def rank(members: Sequence[DeviceID]) -> tuple[object, ...]:
        return naive_rank(table, table, [every.index(gpu) for gpu in members], range(most))

    mine, *others = told(topology, chosen)

    sets = [each for each in combinations(every, size) if each != chosen]
    if len(sets) + 1 > 256:
        sets = [each for each in sets if len({*each} & {*chosen}) == size - 1]
    best = sorted(sets, key=rank)[:5]
    assert (chosen, links(topology, chosen), True) == (mine.devices, mine.score, mine.chosen)
    assert best == [each.devices for each in others]
    assert [links(topology, each) for each in best] == [each.score for each in others]
    assert all(each.seam for each in others)
    assert not any(each.chosen for each in others)


@pytest.mark.parametrize(
    ("chosen", "other", "why"),
    [
        ((0, 1), (0, 2), "scores 50 less"),
        ((0, 2), (0, 1), "scores 50 more by itself"),
        ((0, 2), (1, 2), "scores the same by itself"),
    ],
)
def test_why_another_set_lost_is_told_by_the_difference(
    chosen: tuple[int, int], other: tuple[int, int], why: str
) -> None:
    """GPU 0 and 1 are a pair, GPU 2 is far from both."""
    ids = [DeviceID(f"GPU-{i}") for i in range(3)]
    links = (
        Link(a=ids[0], b=ids[1], pcie=PcieClass.PSB),
        *(Link(a=each, b=ids[2], pcie=PcieClass.SYS) for each in ids[:2]),
    )
    linked = Topology(gpus=tuple(Gpu(id=id, index=i) for i, id in enumerate(ids)), links=links)

    sets = {each.devices: each for each in told(linked, [ids[i] for i in chosen])}

    assert sets[tuple(ids[i] for i in other)].why.startswith(why)
    assert "preferred by device policy simple" == sets[tuple(ids[i] for i in chosen)].why


def test_of_sets_that_were_not_offered_that_is_said() -> None:
    """Nothing was asked of the device policy where all that was offered was taken."""
    topology = machine(1, 4, 3)
    every = tuple(topology.gpu_by_id)

    won, *lost = rank_alternatives(topology, GPU, every, None, every[:2], (), "simple")

    assert won.why.startswith("all that can be had on the NUMA nodes")
    assert {"not all on the NUMA nodes it is aligned to"} == {each.why for each in lost}


@pytest.mark.parametrize(("near", "why"), [(1, "nearest to the container's GPUs"), (0, "lowest index")])
def test_nics_are_chosen_near_gpus_or_by_index(near: int, why: str) -> None:
    topology = machine(2, 2, 4)
    nics = tuple(topology.nic_by_id)
    asked = PreferenceQuestion(resource=NIC, available=nics, must_include=(), size=1, container=ContainerName("c"))

    gpus = tuple(topology.gpu_by_id)[:near]

    (won,) = rank_alternatives(topology, NIC, nics, asked, nics[:1], gpus, "simple")

    assert why == won.why
    assert sum(connection_score(topology, nics[0], gpu) for gpu in gpus) == won.score


def test_of_other_devices_and_of_none_nothing_is_told() -> None:
    resource = ResourceName("example.com/x")
    devices = tuple(DeviceID(f"x-{i}") for i in range(2))
    plain = Topology(others=tuple(PluginDevice(id=each, resource=resource, nodes=None) for each in devices))

    assert () == rank_alternatives(plain, resource, devices, None, devices[:1], (), "simple")
    assert () == rank_alternatives(machine(3, 2, 2), GPU, (), None, (), (), "simple")


def weighed(links: tuple[Link, ...], gpus: int = 4) -> list[str]:
    """Why each set of two GPUs won or lost under policy `topology`."""
    of = Topology(gpus=tuple(Gpu(id=DeviceID(f"GPU-{i}"), index=i) for i in range(gpus)), links=links)
    every = tuple(of.gpu_by_id)
    asked = PreferenceQuestion(resource=GPU, available=every, must_include=(), size=2, container=ContainerName("c"))
    chosen = prefer(of, GPU, every, (), 2, Placement.TOPOLOGY)
    return [each.why for each in rank_alternatives(of, GPU, every, asked, chosen, (), Placement.TOPOLOGY)]


def test_policy_topology_names_what_another_set_lost_by() -> None:
    """Two linked pairs, and GPUs of different pairs have no NVLink."""
    pairs = tuple(
        Link(a=DeviceID(a), b=DeviceID(b), fabric_links=4) for a, b in (("GPU-0", "GPU-1"), ("GPU-2", "GPU-3"))
    )

    won, other_pair, *across = weighed(pairs)

    assert "preferred by device policy topology" == won
    assert "equal, with higher indexes" == other_pair
    assert {"its seam is PCIe across sockets, not 4 NVLinks"} == {*across}


def test_what_an_alignment_costs_is_named() -> None:
    """A B200 board whose GPU 0 is off the fabric: the four GPUs of NUMA node 0 are connected by PCIe alone."""
    board = on_numa_nodes(off=0)
    every = tuple(board.gpu_by_id)

    slow, *others = rank_alternatives(board, GPU, every, None, every[:4], (), Placement.TOPOLOGY, aligned=True)
    fast, *_ = rank_alternatives(board, GPU, every, None, every[4:], (), Placement.TOPOLOGY, aligned=True)
    taken_over, *_ = rank_alternatives(board, GPU, every, None, every[:4], (), Placement.TOPOLOGY, aligned=False)

    assert ("PCIe within a NUMA node", "without the alignment: 18 NVLinks, 722 GB/s") == (
        slow.seam,
        slow.alignment_cost,
    )
    assert {""} == {each.alignment_cost for each in (*others, fast, taken_over)}


def on_numa_nodes(off: int) -> Topology:
    """Eight B200 at an NVSwitch, four on each of two NUMA nodes, of which one has lost its NVLinks."""
    gpus = tuple(
        Gpu(
            id=DeviceID(f"GPU-{i}"),
            index=i,
            name="NVIDIA B200",
            numa_affinity=(i // 4,),
            switch_links=0 if i == off else 18,
        )
        for i in range(8)
    )
    pairs = [(a, b) for a, b in combinations(gpus, 2) if off not in (a.index, b.index)]
    return Topology(gpus=gpus, links=tuple(Link(a=a.id, b=b.id, fabric_links=18) for a, b in pairs))


@pytest.mark.parametrize(
    ("policy", "gpus", "cost"),
    [
        (Policy.RESTRICTED, 4, {"without the alignment: 18 NVLinks, 722 GB/s"}),
        (Policy.RESTRICTED, 8, set[str]()),
        (Policy.NONE, 4, set[str]()),
    ],
)
def test_a_decision_that_is_explained_names_the_cost_of_its_alignment(
    policy: Policy, gpus: int, cost: set[str]
) -> None:
    """A kubelet aligns four GPUs to NUMA node 0, whose GPU 0 is off the fabric."""
    board = load_machine("hgx-b200-gpu0-off").topology
    rules = AdmissionRules(mode=Mode.KUBELET, policy=policy)

    decision = admit(node(board), pod(container(gpus=gpus)), rules, explain=True)

    assert cost == {each.alignment_cost for each in decision.explanation.considered if each.alignment_cost}

"""The score `quality` against a reference that was written from its rule, by looking at every set."""

import random
from collections.abc import Sequence
from itertools import combinations

import msgspec
import pytest
from decision_support import container, machine, node, pod
from seam_reference import naive_seam
from slot_support import asks, in_slots
from slot_support import holding as holding_slots

from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.model.decisions import PlacementContext
from topoalign.core.model.events import Allocation
from topoalign.core.model.ids import GPU, NIC, AllocationID, DeviceID
from topoalign.core.model.requests import AdmissionRules, Mode, PodRequest, Policy
from topoalign.core.model.topology.device_links import Link, PcieClass
from topoalign.core.model.topology.device_offers import Offer
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.queries import connection_score, pcie_class, share_node
from topoalign.core.model.topology.shapes import Shapes, rename_devices
from topoalign.core.placement.gpus.bandwidth import Seam
from topoalign.core.placement.preference import prefer
from topoalign.core.scoring.quality import NodeKey, NodePacking, device_need, free_devices, keys_of, node_key
from topoalign.core.state.fold import NodeState
from topoalign.machines import load_machine

RULES = AdmissionRules(mode=Mode.KUBELET, policy=Policy.RESTRICTED)
MACHINES = ("dgx1-volta", "8x-nvlink-pairs", "two-socket-8xpcie", "epyc-nps4-4gpu", "hgx-h100")


def holding(topology: Topology, *devices: DeviceID) -> NodeState:
    of_kind = {GPU: topology.gpu_by_id, NIC: topology.nic_by_id}
    held = {name: tuple(each for each in devices if each in ids) for name, ids in of_kind.items()}
    allocation = Allocation(id=AllocationID("a"), devices={name: ids for name, ids in held.items() if ids})
    return node(topology).holding(allocation)


def key(
    state: NodeState, asked: PodRequest, packing: NodePacking = NodePacking.BINPACK, rules: AdmissionRules = RULES
) -> NodeKey | None:
    topology = state.hardware
    return node_key(topology, device_need(topology, read_pod(asked, rules)), free_devices(state), packing)


def ranked(
    states: Sequence[NodeState],
    asked: PodRequest,
    packing: NodePacking = NodePacking.BINPACK,
    rules: AdmissionRules = RULES,
) -> list[int]:
    """The positions of the nodes, the best first."""
    keys = [key(state, asked, packing, rules) for state in states]
    return sorted(range(len(states)), key=lambda at: keys[at] or NodeKey(1.0, (1, 1), 9.0, ()))


def least_nodes(topology: Topology, gpus: Sequence[DeviceID], size: int) -> list[tuple[int, ...]]:
    """The smallest sets of NUMA nodes that have so many of these GPUs."""
    nodes = sorted({node for gpu in gpus for node in topology.devices[GPU][gpu] or ()})
    for width in range(1, len(nodes) + 1):
        sets = [
            each
            for each in combinations(nodes, width)
            if sum({*(topology.devices[GPU][gpu] or ())} <= {*each} for gpu in gpus) >= size
        ]
        if sets:
            return sets
    return []


def by_rule(state: NodeState, size: int, nics: int, packing: NodePacking) -> NodeKey | None:
    """One container: its seam, NICs, NUMA nodes and packing."""
    topology = state.hardware
    every, free = [*topology.gpu_by_id], [gpu for gpu in topology.gpu_by_id if gpu not in state.ownership.holders]
    spare = [nic for nic in topology.nic_by_id if nic not in state.ownership.holders]
    if len(free) < size or len(spare) < nics:
        return None
    lowest = min(least_nodes(topology, free, size), key=lambda nodes: sum(2**node for node in nodes))
    inside = [gpu for gpu in free if {*(topology.devices[GPU][gpu] or ())} <= {*lowest}]
    given = prefer(topology, GPU, inside, (), size, RULES.placement, context=PlacementContext(free=tuple(free)))
    width = len({topology.devices[GPU][gpu] for gpu in given})
    table = [[0 if a == b else connection_score(topology, a, b) for b in every] for a in every]
    members, all_free = [every.index(gpu) for gpu in given], [every.index(gpu) for gpu in free]
    nvlinks, pcie = naive_seam(table, members, [gpu.switch_links for gpu in topology.gpus])
    local = sum(any(pcie_class(topology, nic, gpu) in SWITCHES for gpu in given) for nic in spare)
    near = sum(
        any(pcie_class(topology, nic, gpu) is not PcieClass.SYS or share_node(topology, nic, gpu) for gpu in given)
        for nic in spare
    )
    left = len(free) - size + (len(spare) - nics if nics else 0)
    cut = sum(table[a][b] for a in members for b in all_free if b not in members)
    return NodeKey(
        seam=-round(Seam(nvlinks, pcie).bandwidth(topology.gpus[0].name), 1) if size > 1 else 0.0,
        nics=(-min(local, nics), -min(near, nics)),
        numa=width / len(least_nodes(topology, every, size)[0]),
        packing=(-left,) if packing is NodePacking.SPREAD else (cut, 0, left),
    )


SWITCHES = (PcieClass.PSB, PcieClass.PIX, PcieClass.PXB)


@pytest.mark.parametrize("name", MACHINES)
def test_keys_are_those_of_the_rule_on_machines_partly_held(name: str) -> None:
    topology, chance, seen = load_machine(name).topology, random.Random(11), set()
    for _ in range(60):
        devices = [*topology.gpu_by_id, *topology.nic_by_id]
        state = holding(topology, *chance.sample(devices, chance.randrange(len(devices) // 2)))
        size, nics = chance.choice((1, 2, 2, 3, 4, 8)), min(chance.choice((0, 0, 1, 2)), len(topology.nics))
        packing = chance.choice([*NodePacking])

        found = key(state, pod(container(gpus=size, nics=nics)), packing)

        assert by_rule(state, size, nics, packing) == found
        seen.add(found)
    assert len(seen) >= 3


GROUPED = msgspec.structs.replace(
    machine(gpus=(0,) * 8, nics=()),
    links=tuple(
        Link(
            a=DeviceID(f"GPU-{i}"),
            b=DeviceID(f"GPU-{j}"),
            pcie=PcieClass.PIX,
            fabric_links=2 if i // 4 == j // 4 else 0,
        )
        for i, j in combinations(range(8), 2)
    ),
)
"""Eight GPUs on one NUMA node, in two groups of four with NVLinks inside."""


def test_packing_puts_a_single_gpu_where_it_cuts_the_fewest_links() -> None:
    used, empty = holding(GROUPED, DeviceID("GPU-0")), holding(GROUPED)
    last = holding(GROUPED, *(DeviceID(f"GPU-{i}") for i in range(7)))
    one = pod(container(gpus=1))

    assert [2, 0, 1] == ranked([used, empty, last], one)
    assert [1, 0, 2] == ranked([used, empty, last], one, NodePacking.SPREAD)


def test_a_good_pair_on_an_empty_node_is_before_a_bad_pair_that_fills_one() -> None:
    """The seam comes before packing: what is left of the full node is one GPU of each group."""
    full = holding(GROUPED, *(DeviceID(f"GPU-{i}") for i in (1, 2, 3, 5, 6, 7)))

    assert [1, 0] == ranked([full, holding(GROUPED)], pod(container(gpus=2)))


def test_a_broken_board_is_first_for_one_gpu_and_last_for_several() -> None:
    """GPU 0 of the second board has no NVLink."""
    board = load_machine("hgx-h100").topology
    gpus = tuple(msgspec.structs.replace(gpu, switch_links=18 if gpu.index else 0) for gpu in board.gpus)
    links = tuple(
        msgspec.structs.replace(link, fabric_links=0) if DeviceID("GPU-0") in (link.a, link.b) else link
        for link in board.links
    )
    broken = msgspec.structs.replace(board, gpus=gpus, links=links)

    assert [1, 0] == ranked([node(board), node(broken)], pod(container(gpus=1)))
    assert [0, 1] == ranked([node(board), node(broken)], pod(container(gpus=8)))


def test_machines_are_compared_by_bandwidth() -> None:
    """Four GPUs on an H100 board, on a DGX-1 and behind PCIe switches; one GPU goes where it spoils the least."""
    boards = [node(load_machine(name).topology) for name in ("two-socket-8xpcie", "dgx1-volta", "hgx-h100")]

    assert [2, 1, 0] == ranked(boards, pod(container(gpus=4)))
    assert [0, 1, 2] == ranked(boards, pod(container(gpus=1)))


def test_a_node_with_too_few_devices_has_no_key() -> None:
    full = holding(machine(), *(DeviceID(name) for name in ("GPU-0", "GPU-1", "mlx5_0")))

    assert key(full, pod(container(gpus=3))) is None
    assert key(full, pod(container(gpus=1, nics=2))) is None
    assert key(full, pod(container(gpus=2, nics=1))) is not None


def test_policy_none_takes_gpus_of_several_numa_nodes() -> None:
    """The best pair of the machine is on two NUMA nodes: under policy none it is given, and the nodes are told apart."""
    across = Link(a=DeviceID("GPU-0"), b=DeviceID("GPU-2"), pcie=PcieClass.SYS, fabric_links=6)
    links = tuple(link for link in machine().links if (link.a, link.b) != (across.a, across.b))
    state = node(msgspec.structs.replace(machine(), links=(*links, across)))
    none = msgspec.structs.replace(RULES, policy=Policy.NONE)

    aligned, anywhere = (key(state, pod(container(gpus=2)), rules=rules) for rules in (RULES, none))

    assert aligned is not None and anywhere is not None
    assert anywhere < aligned
    assert (1.0, 2.0) == (aligned.numa, anywhere.numa)


def test_gpus_of_init_containers_are_taken_over_by_the_others() -> None:
    both = read_pod(pod(container("a", gpus=2), container("b", gpus=1), init=[container("i", gpus=3)]), RULES)
    init = read_pod(pod(container("a"), init=[container("i", gpus=3)]), RULES)

    assert ((GPU, 2), (GPU, 1)) == device_need(machine(), both).gpus
    assert ((GPU, 3),) == device_need(machine(), init).gpus


def test_time_slices_are_told_apart_by_packing_alone() -> None:
    offer = Offer(resource=GPU, devices=(DeviceID("GPU-0"), DeviceID("GPU-1")), replicas=4)
    topology = msgspec.structs.replace(machine(), offers=(offer,))
    used = Allocation(id=AllocationID("a"), devices={GPU: tuple(DeviceID(f"GPU-0::{i}") for i in range(4))})
    nodes = [node(topology), node(topology).holding(used)]

    assert [1, 0] == ranked(nodes, pod(container(gpus=1)))
    assert [0, 1] == ranked(nodes, pod(container(gpus=1)), NodePacking.SPREAD)


PLAIN = machine(gpus=(0, 0, 1, 1))
SLOTS = in_slots(
    msgspec.structs.replace(PLAIN, gpus=tuple(msgspec.structs.replace(gpu, memory=80 * 2**30) for gpu in PLAIN.gpus))
)


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        pytest.param(30, [2, 3, 1, 0], id="first where the least is left of a GPU in use"),
        pytest.param(60, [1, 2, 3, 0], id="where an unused one is taken, the fewest links to others are cut"),
        pytest.param(100, [1, 2, 3, 0], id="whole GPUs, too"),
    ],
)
def test_shares_fill_gpus_by_amounts(cores: int, expected: list[int]) -> None:
    """Held is nothing; 60 cores of each of three GPUs; 70 of one; 65 of one and all of its neighbour."""
    states = [
        node(SLOTS),
        holding_slots(node(SLOTS), *((gpu, 60, 1_000) for gpu in range(3))),
        holding_slots(node(SLOTS), (0, 70, 1_000)),
        holding_slots(node(SLOTS), (0, 65, 1_000), (1, 100, 1_000)),
    ]

    got = ranked(states, pod(asks(cores=cores, memory=1_000)))

    assert expected == got, [key(state, pod(asks(cores=cores, memory=1_000))) for state in states]


def test_pods_that_differ_in_annotations_alone_have_one_need() -> None:
    """Needs are keys of a cache: each with lists of hundreds of uuids of its own would fill the memory."""
    plain = pod(asks(cores=30, memory=1_000))
    choosing = msgspec.structs.replace(plain, annotations={"nvidia.com/use-gpuuuid": "GPU-0,GPU-1"})
    needs = [device_need(SLOTS, read_pod(each, RULES)) for each in (plain, choosing)]

    assert needs[0].shares
    assert needs[0] == needs[1]


def test_in_mode_best_the_key_is_that_of_the_gpus_that_the_pod_gets() -> None:
    """A board whose GPU 0 is off the fabric: four GPUs are those of the other NUMA node, unless a kubelet aligns."""
    board = node(load_machine("hgx-b200-gpu0-off").topology)
    best = msgspec.structs.replace(RULES, mode=Mode.BEST)

    found, aligned = (key(board, pod(container(gpus=4)), rules=rules) for rules in (best, RULES))

    assert found is not None and aligned is not None
    assert (-721.8, -20.0) == (found.seam, aligned.seam)


def test_containers_that_fill_a_gpu_have_a_key() -> None:
    """30, 30 and 40 cores of one GPU add up to all of it, as `admit` counts."""
    full = holding_slots(node(SLOTS), *((gpu, 100, 1_000) for gpu in range(3)))
    thirds = pod(*(asks(cores=cores, memory=1_000, name=f"c{number}") for number, cores in enumerate((30, 30, 40))))

    found = key(full, thirds)

    assert found is not None
    assert (0, 0.0, 0.0) == found.packing


def test_a_whole_gpu_is_one_that_nobody_uses() -> None:
    """Of GPU 3 another container has memory alone: all its cores are left, and it cannot be had whole."""
    used = holding_slots(node(SLOTS), *((gpu, 100, 1_000) for gpu in range(3)), (3, 0, 1_000))

    assert key(used, pod(asks(cores=100, memory=1_000))) is None
    assert key(used, pod(asks(cores=99, memory=1_000))) is not None


def test_what_stays_free_is_judged_after_the_last_container() -> None:
    """Two containers with 50 and 40 cores of the only GPU that has any left: a tenth stays free."""
    state = holding_slots(node(SLOTS), *((gpu, 100, 1_000) for gpu in range(3)))

    found = key(state, pod(asks(cores=50, memory=1_000, name="a"), asks(cores=40, memory=1_000, name="b")))

    assert found is not None
    assert (0, 0.1, 0.1) == found.packing


def test_two_containers_cut_nothing_where_they_take_all_that_is_free() -> None:
    """Two pairs of the last four GPUs of a DGX-1V."""
    state = holding(load_machine("dgx1-volta").topology, *(DeviceID(f"GPU-{i}") for i in range(4)))

    found = key(state, pod(container("a", gpus=2), container("b", gpus=2)))

    assert found is not None
    assert (0, 0, 0) == found.packing


@pytest.mark.parametrize("first", [0, 1])
def test_a_pod_without_gpus_finds_all_nodes_equal(first: int) -> None:
    """Whichever of an empty and a full node of one shape is looked at first."""
    shapes = Shapes()
    machine_ = shapes.interned(SLOTS)
    states = [node(machine_), holding_slots(node(machine_), *((gpu, 100, 1_000) for gpu in range(4)))]
    plain = pod(container(cpus=1))

    for packing, expected in ((NodePacking.BINPACK, (0, 0.0, 0.0)), (NodePacking.SPREAD, (0.0,))):
        keys = [key(states[at], plain, packing) for at in (first, 1 - first)]
        assert [NodeKey(0.0, (0, 0), 1.0, expected)] * 2 == keys


def test_machines_of_one_shape_have_the_same_keys() -> None:
    """Other uuids change nothing, and what was computed for one machine is remembered for the other."""
    topology, shapes = load_machine("dgx1-volta").topology, Shapes()
    other = rename_devices(topology, {gpu: DeviceID(f"GPU-other-{gpu}") for gpu in topology.gpu_by_id})
    first, second = (holding(shapes.interned(each), *[*each.gpu_by_id][0:6:5]) for each in (topology, other))

    keys = [key(state, pod(container(gpus=2, nics=1))) for state in (first, second)]

    plain = holding(topology, DeviceID("GPU-0"), DeviceID("GPU-5"))
    assert keys == [key(plain, pod(container(gpus=2, nics=1)))] * 2
    assert 1 == len(keys_of(first.hardware.shape))

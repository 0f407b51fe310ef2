"""The score `quality` against a reference that was written from its rule, by looking at every set."""

import random
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations

import msgspec
import pytest
from decision_support import container, machine, node, pod

from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.model.decisions import PlacementContext
from topoalign.core.model.events import Allocation
from topoalign.core.model.ids import GPU, NIC, AllocationID, DeviceID
from topoalign.core.model.requests import AdmissionRules, Mode, PodRequest, Policy
from topoalign.core.model.topology.links import Link, PcieClass
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.offers import Offer
from topoalign.core.model.topology.queries import pair_score, set_score
from topoalign.core.model.topology.shapes import Shapes, renamed
from topoalign.core.placement.preference import prefer
from topoalign.core.scoring.quality import Packing, device_need, free_devices, quality, scores_of
from topoalign.core.state.fold import NodeState
from topoalign.machines import load_machine

RULES = AdmissionRules(mode=Mode.KUBELET, policy=Policy.RESTRICTED)
MACHINES = ("dgx1-volta", "8x-nvlink-pairs", "two-socket-8xpcie", "epyc-nps4-4gpu", "hgx-h100")


def holding(topology: Topology, *devices: DeviceID) -> NodeState:
    of_kind = {GPU: topology.gpu_by_id, NIC: topology.nic_by_id}
    held = {name: tuple(each for each in devices if each in ids) for name, ids in of_kind.items()}
    allocation = Allocation(id=AllocationID("a"), devices={name: ids for name, ids in held.items() if ids})
    return node(topology).holding(allocation)


def score(
    state: NodeState, asked: PodRequest, packing: Packing = Packing.BINPACK, rules: AdmissionRules = RULES
) -> int:
    topology = state.hardware
    return quality(topology, device_need(topology, read_pod(asked, rules)), free_devices(state), packing)


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


def best(topology: Topology, gpus: Sequence[DeviceID], size: int) -> int:
    return max(set_score(topology, each) for each in combinations(gpus, size))


def by_rule(state: NodeState, size: int, nics: int, packing: Packing) -> int:
    """One container; links, NUMA nodes, NICs, what is left, packing."""
    topology = state.hardware
    every, free = [*topology.gpu_by_id], [gpu for gpu in topology.gpu_by_id if gpu not in state.ownership.holders]
    spare = [nic for nic in topology.nic_by_id if nic not in state.ownership.holders]
    if len(free) < size or len(spare) < nics:
        return 0
    lowest = min(least_nodes(topology, free, size), key=lambda nodes: sum(2**node for node in nodes))
    inside = [gpu for gpu in free if {*(topology.devices[GPU][gpu] or ())} <= {*lowest}]
    given = prefer(topology, GPU, inside, (), size, RULES.placement, beside=PlacementContext(free=tuple(free)))
    width = len({topology.devices[GPU][gpu] for gpu in given})
    near = sorted((max(pair_score(topology, nic, gpu) for gpu in given) for nic in spare), reverse=True)[:nics]
    rest = [gpu for gpu in free if gpu not in given]
    left = [Fraction(best(topology, rest, n), best(topology, every, n)) for n in (2, 4, 8) if n <= len(rest)]
    held = Fraction(len(every) - len(rest), len(every))
    parts = (
        Fraction(4 * set_score(topology, given), best(topology, every, size)) if size > 1 else Fraction(4),
        Fraction(len(least_nodes(topology, every, size)[0]), width),
        Fraction(sum(near), 50 * nics) if nics else Fraction(1),
        sum(left, Fraction(0)) / len(left) if left else Fraction(1),
        3 * (held if packing is Packing.BINPACK else 1 - held),
    )
    return int(sum(parts) + Fraction(1, 2))


@pytest.mark.parametrize("name", MACHINES)
def test_scores_are_those_of_the_rule_on_machines_partly_held(name: str) -> None:
    topology, chance, seen = load_machine(name).topology, random.Random(11), set()
    for _ in range(60):
        devices = [*topology.gpu_by_id, *topology.nic_by_id]
        state = holding(topology, *chance.sample(devices, chance.randrange(len(devices) // 2)))
        size, nics = chance.choice((1, 2, 2, 3, 4, 8)), min(chance.choice((0, 0, 1, 2)), len(topology.nics))
        packing = chance.choice([*Packing])

        found = score(state, pod(container(gpus=size, nics=nics)), packing)

        assert by_rule(state, size, nics, packing) == found
        seen.add(found)
    assert len(seen) >= 3


GROUPED = msgspec.structs.replace(
    machine(gpus=(0,) * 8, nics=()),
    links=tuple(
        Link(a=DeviceID(f"GPU-{i}"), b=DeviceID(f"GPU-{j}"), pcie=PcieClass.PIX, nvlinks=2 if i // 4 == j // 4 else 0)
        for i, j in combinations(range(8), 2)
    ),
)
"""Eight GPUs on one NUMA node, in two groups of four with NVLinks inside."""


def test_packing_puts_a_single_gpu_where_others_are_held() -> None:
    used, empty = holding(GROUPED, DeviceID("GPU-0")), holding(GROUPED)
    one = pod(container(gpus=1))

    assert (8, 7) == (score(used, one), score(empty, one))
    assert score(empty, one, Packing.SPREAD) > score(used, one, Packing.SPREAD)


def test_a_good_pair_on_an_empty_node_is_before_a_bad_pair_that_fills_one() -> None:
    """Links weigh more than packing: what is left of the full node is one GPU of each group."""
    full = holding(GROUPED, *(DeviceID(f"GPU-{i}") for i in (1, 2, 3, 5, 6, 7)))
    pair = pod(container(gpus=2))

    assert score(holding(GROUPED), pair) > score(full, pair)


def test_a_node_with_too_few_devices_scores_0() -> None:
    full = holding(machine(), *(DeviceID(name) for name in ("GPU-0", "GPU-1", "mlx5_0")))

    assert 0 == score(full, pod(container(gpus=3)))
    assert 0 == score(full, pod(container(gpus=1, nics=2)))
    assert 0 < score(full, pod(container(gpus=2, nics=1)))


def test_policy_none_takes_gpus_of_several_numa_nodes() -> None:
    """The best pair of the machine is on two NUMA nodes: under policy none it is given, and the nodes are told apart."""
    across = Link(a=DeviceID("GPU-0"), b=DeviceID("GPU-2"), pcie=PcieClass.SYS, nvlinks=6)
    links = tuple(link for link in machine().links if (link.a, link.b) != (across.a, across.b))
    state = node(msgspec.structs.replace(machine(), links=(*links, across)))
    none = msgspec.structs.replace(RULES, policy=Policy.NONE)

    aligned, anywhere = (score(state, pod(container(gpus=2)), rules=rules) for rules in (RULES, none))

    assert anywhere > aligned


def test_gpus_of_init_containers_are_taken_over_by_the_others() -> None:
    both = read_pod(pod(container("a", gpus=2), container("b", gpus=1), init=[container("i", gpus=3)]), RULES)
    init = read_pod(pod(container("a"), init=[container("i", gpus=3)]), RULES)

    assert ((GPU, 2), (GPU, 1)) == device_need(machine(), both).gpus
    assert ((GPU, 3),) == device_need(machine(), init).gpus


def test_shares_of_gpus_are_told_apart_by_packing_alone() -> None:
    offer = Offer(resource=GPU, devices=(DeviceID("GPU-0"), DeviceID("GPU-1")), replicas=4)
    topology = msgspec.structs.replace(machine(), offers=(offer,))
    used = Allocation(id=AllocationID("a"), devices={GPU: tuple(DeviceID(f"GPU-0::{i}") for i in range(4))})
    one = pod(container(gpus=1))

    assert score(node(topology).holding(used), one) > score(node(topology), one)
    assert score(node(topology), one, Packing.SPREAD) > score(node(topology).holding(used), one, Packing.SPREAD)


def test_machines_of_one_shape_have_the_same_scores() -> None:
    """Other uuids change nothing, and what was scored on one machine is remembered for the other."""
    topology, shapes = load_machine("dgx1-volta").topology, Shapes()
    other = renamed(topology, {gpu: DeviceID(f"GPU-other-{gpu}") for gpu in topology.gpu_by_id})
    first, second = (holding(shapes.interned(each), *[*each.gpu_by_id][0:6:5]) for each in (topology, other))

    scores = [score(state, pod(container(gpus=2, nics=1))) for state in (first, second)]

    assert (
        scores[0]
        == scores[1]
        == score(holding(topology, DeviceID("GPU-0"), DeviceID("GPU-5")), pod(container(gpus=2, nics=1)))
    )
    assert 1 == len(scores_of(first.hardware.shape))

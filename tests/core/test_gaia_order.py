"""The score `gaia`: nodes in the order in which gpu-admission tries them."""

import msgspec
from decision_support import machine, node, pod
from diagnosis_support import cluster, node_with
from hypothesis import given, settings
from hypothesis import strategies as st
from unit_support import CORES, KUBELET, MEMORY, asks, holds, in_units

from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.diagnosis.diagnosis import diagnose
from topoalign.core.diagnosis.node_decisions import Nodes
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import DeviceID, NodeName
from topoalign.core.model.requests import ContainerRequest, PodRequest
from topoalign.core.model.topology.device_offers import MEMORY_BLOCK
from topoalign.core.model.topology.model import Topology
from topoalign.core.scoring.quality import NodePacking
from topoalign.core.scoring.scorers import Scoring, scorer_by_name
from topoalign.core.state.fold import NodeState
from topoalign.tools.conformance.gaia_admission import AdmissionNodeCase, Pod, PromisedAmounts, promise

BLOCKS = 8
SCORER = scorer_by_name(Scoring.GAIA, NodePacking.BINPACK)
SMALL_SHARE = pod(asks(1, 1))

Held = list[tuple[int, int]]
"""Cores and blocks that are held of each GPU of a node."""


def hardware(gpus: int) -> Topology:
    bare = machine(nodes=1, gpus=[0] * gpus, nics=())
    memory = tuple(msgspec.structs.replace(gpu, memory=BLOCKS * MEMORY_BLOCK) for gpu in bare.gpus)
    return in_units(msgspec.structs.replace(bare, gpus=memory), gpus)


MACHINES = [hardware(gpus) for gpus in range(1, 4)]


def state_of(name: str, held: Held) -> NodeState:
    state = node(MACHINES[len(held) - 1])
    for index, (cores, blocks) in enumerate(held):
        units = {
            CORES: tuple(DeviceID(f"GPU-{index}::c{n}") for n in range(cores)),
            MEMORY: tuple(DeviceID(f"GPU-{index}::m{n}") for n in range(blocks)),
        }
        state = holds(state, f"of-{index}", {each: some for each, some in units.items() if some})
    return msgspec.structs.replace(state, node=NodeName(name))


def scores(states: list[NodeState], asked: PodRequest = SMALL_SHARE) -> list[int]:
    demand = read_pod(asked, KUBELET)
    keys = [
        SCORER.key(each.hardware, SCORER.need(each.hardware, demand), SCORER.left(each, KUBELET)) for each in states
    ]
    return [*SCORER.scores(keys)]


held_of_gpus = st.lists(
    st.sampled_from([(0, 0), (0, 2), (30, 2), (30, 3), (60, 3), (100, 0), (100, 4)]), min_size=1, max_size=3
)


@settings(max_examples=40)
@given(st.lists(held_of_gpus, min_size=1, max_size=5), st.permutations("abcde"))
def test_nodes_are_ranked_as_gpu_admission_tries_them(held: list[Held], names: list[str]) -> None:
    """By what its pods' annotations promise, of GPUs and blocks that the nodes have: the function that its cases check."""
    promises = [
        AdmissionNodeCase(
            NodeName(name),
            100 * len(of),
            BLOCKS * len(of),
            [Pod([PromisedAmounts(*amounts, predicate_idx=f"{at}") for at, amounts in enumerate(of)])],
        )
        for name, of in zip(names, held, strict=False)
    ]
    found = promise(promises, [Amount(cores=1, memory=MEMORY_BLOCK)])
    by_hand = sorted(
        (
            sum(100 - cores for cores, _ in of),
            sum(BLOCKS - blocks if cores < 100 else 0 for cores, blocks in of),
            name,
        )
        for name, of in zip(names, held, strict=False)
    )

    got = scores([state_of(name, of) for name, of in zip(names, held, strict=False)])

    tried = [name for *_, name in by_hand]
    roomy = {
        name
        for name, of in zip(names, held, strict=False)
        if any(cores < 100 and blocks < BLOCKS for cores, blocks in of)
    }
    ranked = sorted(tried, key=lambda name: name not in roomy)

    assert tried == found.tried_in_order
    assert (ranked[0] if roomy else None) == found.node
    assert [10 - ranked.index(name) for name, _ in zip(names, held, strict=False)] == got


def test_from_the_tenth_node_on_the_score_is_one() -> None:
    states = [state_of(f"n{number:02}", [(0, 0)]) for number in range(12)]

    assert [*range(10, 0, -1), 1, 1] == scores(states)


def test_pods_that_gpu_admission_lets_go_anywhere_find_all_nodes_equal() -> None:
    """Those without units, with memory alone, and with units of init containers alone. It judges by the pod's sums."""
    states = [state_of("a", [(30, 2)]), state_of("b", [(0, 0)])]
    split = pod(asks(20, name="one"), asks(blocks=2, name="two"))
    plain = ContainerRequest(name=asks().name)
    equal = [pod(plain), pod(asks(blocks=2)), pod(plain, init=[asks(20, 2, name="first")])]

    assert [[10, 10]] * 3 == [scores(states, each) for each in equal]
    assert [[10, 9]] * 2 == [scores(states, each) for each in (split, pod(asks(60, 2)))]


def test_a_node_without_gpus_in_units_comes_last() -> None:
    """gpu-admission says of it that it has no GPU."""
    bare = msgspec.structs.replace(node(machine()), node=NodeName("a"))
    need = (Amount(cores=1, memory=1),)
    nodes = (bare, state_of("b", [(0, 0)]))

    assert [0, 10] == SCORER.scores([SCORER.key(each.hardware, need, SCORER.left(each, KUBELET)) for each in nodes])


def test_nodes_on_which_gpu_admission_finds_no_room_come_last() -> None:
    """A GPU of which memory alone is held it takes for whole, and fails; topoalign takes the other one of node a."""
    states = [state_of("a", [(0, 2), (0, 0)]), state_of("b", [(0, 0), (0, 0)])]

    assert [[9, 10], [10, 9]] == [scores(states, pod(asks(*amounts))) for amounts in ((100,), (20, 2))]


def test_gpus_that_are_not_healthy_count_as_held() -> None:
    ill = msgspec.structs.replace(node(MACHINES[1], unhealthy=["GPU-0"]), node=NodeName("b"))

    assert [9, 10] == scores([state_of("a", [(0, 0), (30, 2)]), ill])


def test_a_cluster_is_listed_in_that_order_also_after_the_tenth_node() -> None:
    record = cluster(
        *(
            node_with(f"n{number:02}", *([SMALL_SHARE] if number == 11 else []), topology=MACHINES[0], rules=KUBELET)
            for number in range(12)
        )
    )
    found = diagnose(Nodes(record), pod(asks(1, 1), name="asked"), SCORER).admitting

    assert [("n11", 10), ("n00", 9), ("n01", 8)] == [(each.node, each.score) for each in found[:3]]
    assert [("n08", 1), ("n09", 1), ("n10", 1)] == [(each.node, each.score) for each in found[9:]]

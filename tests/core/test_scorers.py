"""Every score by its name is a whole number from 0 to 10."""

import pytest
from decision_support import container, machine, node, pod

from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.model.events import Allocation
from topoalign.core.model.ids import GPU, AllocationID, DeviceID
from topoalign.core.model.requests import AdmissionRules, Mode, Policy
from topoalign.core.scoring.quality import NodePacking
from topoalign.core.scoring.scorers import Scoring, scorer_by_name
from topoalign.core.state.fold import NodeState

RULES = AdmissionRules(mode=Mode.KUBELET, policy=Policy.SINGLE_NUMA_NODE)
DEMAND = read_pod(pod(container(gpus=1, cpus=2, gib=8)), RULES)
EMPTY = node(machine())
USED = EMPTY.holding(Allocation(id=AllocationID("a"), devices={GPU: (DeviceID("GPU-0"),)}, cpus="0-1"))


def scored(scoring: Scoring, packing: NodePacking, *states: NodeState) -> tuple[int, ...]:
    scorer = scorer_by_name(scoring, packing)
    return tuple(
        scorer.scores(
            [
                scorer.key(state.hardware, scorer.need(state.hardware, DEMAND), scorer.left(state, RULES))
                for state in states
            ]
        )
    )


@pytest.mark.parametrize(
    ("scoring", "expected"),
    [
        # GPUs, CPUs and memory of a NUMA node: 1 of 2, 2 of 8 and 8 of 64 GiB; the used one has 1 GPU and 6 CPUs left
        (Scoring.LEAST_ALLOCATED, (7, 5)),  # (50 + 75 + 87) / 3 = 70; (0 + 66 + 87) / 3 = 51
        (Scoring.MOST_ALLOCATED, (2, 2)),  # (50 + 25 + 12) / 3 = 29, also the lowest of the used node
        (Scoring.BALANCED, (9, 7)),  # variances of (.5, .25, .125) and (1, .33, .125)
        (Scoring.LEAST_NUMA_NODES, (9, 9)),  # 94
        (Scoring.QUALITY, (9, 10)),  # the used one is fuller
        (Scoring.GAIA, (10, 10)),  # the pod asks for no units: every node will do
        (Scoring.HAMI, (10, 10)),  # neither has GPUs in slots
    ],
)
def test_each_name_has_its_score(scoring: Scoring, expected: tuple[int, int]) -> None:
    """Of the empty node, and of the one that has a GPU and two CPUs less."""
    assert expected == scored(scoring, NodePacking.BINPACK, EMPTY, USED)


def test_packing_is_passed_on_to_the_quality() -> None:
    half = EMPTY.holding(Allocation(id=AllocationID("a"), devices={GPU: (DeviceID("GPU-0"), DeviceID("GPU-1"))}))
    empty, used = scored(Scoring.QUALITY, NodePacking.SPREAD, EMPTY, half)

    assert empty > used

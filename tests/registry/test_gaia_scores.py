"""Nodes that prioritize ranks in the order of gpu-admission."""

import pytest
from decision_support import pod
from unit_support import GAIA, REVERSED, asks
from view_support import SETTLED, Says, asked, tell_all

from topoalign.core.model.ids import NodeName
from topoalign.core.scoring.quality import NodePacking
from topoalign.core.scoring.scorers import Scoring, scorer_by_name
from topoalign.registry.cluster_nodes import Cluster
from topoalign.registry.scheduling.cluster_state.view import ClusterView
from topoalign.registry.scheduling.filter.scheduler import Scheduler
from topoalign.testing.manual_clock import ManualClock


def ranking(cluster: Cluster) -> Scheduler:
    """A scheduler that ranks nodes in the order of gpu-admission."""
    view = ClusterView(cluster, lambda: SETTLED, ManualClock(), scorer_by_name(Scoring.GAIA, NodePacking.BINPACK))
    return Scheduler(view)


def loaded(name: str, *shares: tuple[int, int]) -> Says:
    """A node whose kubelet has admitted these."""
    says = Says(name, REVERSED, GAIA)
    [*says.all()]
    for number, each in enumerate(shares):
        [*says.admit(pod(asks(*each, name="c0"), name=f"p{number}"), f"uid-{number}")]
    return says


def test_prioritize_ranks_nodes_as_gpu_admission_tries_them() -> None:
    """The most loaded first, by cores, memory and name; anew for the nodes that are asked about and when one changes."""
    cluster = Cluster(usage=True)
    nodes = {"a": (), "b": ((30, 2),), "c": ((30, 3),), "d": ((100, 0),)}
    says = {name: loaded(name, *shares) for name, shares in nodes.items()}
    for each in says.values():
        tell_all(cluster, [each.topology(), each.health(), each.snapshot(), each.usage()])
    scheduler, share = ranking(cluster), asked(pod(asks(20, 1), name="new"))
    names = tuple(map(NodeName, "abcd"))
    all_four = scheduler.prioritize(share, names)
    three = scheduler.prioritize(share, (*names[:3], NodeName("unknown")))
    plain = scheduler.prioritize(asked(pod(asks(blocks=1), name="memory")), names)
    tell_all(cluster, says["a"].admit(pod(asks(200, 0, name="c0"), name="large"), "uid-large"))
    changed = scheduler.prioritize(share, names)
    cluster.answers(NodeName("a"), False)

    assert ([7, 8, 9, 10], [8, 9, 10, 0]) == (all_four, three)
    assert [10, 10, 10, 10] == plain
    assert [10, 7, 8, 9] == changed
    assert [0, 8, 9, 10] == scheduler.prioritize(share, names)


@pytest.mark.anyio
async def test_a_pod_gets_the_best_node_of_that_order() -> None:
    cluster = Cluster(usage=True)
    for each in (loaded("a"), loaded("b", (30, 2))):
        tell_all(cluster, [each.topology(), each.health(), each.snapshot(), each.usage()])

    assert ["b", "a"] == [*await ranking(cluster).best(asked(pod(asks(20, 1), name="new")))]

"""Nodes whose GPUs in slots HAMi's rules choose: the registry predicts what they decide, and reads what HAMi reads."""

from random import Random

import msgspec
import pytest
from decision_support import pod
from hami_slot_support import BIND, POLICY, as_hami, hardware, state_of
from slot_support import asks
from view_support import NODE, RULES, SETTLED, OneNode, Says, asked, tell_all

from topoalign.core.admission.admit import admit
from topoalign.core.demand.share_annotations import NODE_POLICY, InvalidShare
from topoalign.core.model.decisions import Admission
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import AdmissionRules, Policy
from topoalign.core.scoring.quality import NodePacking
from topoalign.core.scoring.scorers import Scoring, scorer_by_name
from topoalign.registry.cluster_nodes import Cluster
from topoalign.registry.scheduling.cluster_state.view import ClusterView
from topoalign.registry.scheduling.filter.scheduler import Scheduler
from topoalign.testing.manual_clock import ManualClock

HAMI = as_hami(RULES)
LIST = {POLICY: "numa,binpack"}


def world(rules: AdmissionRules) -> OneNode:
    found = OneNode(rules, hardware())
    found.tell(found.says.all())
    return found


def test_the_registry_predicts_what_the_node_decides() -> None:
    """Pods of every policy come to nodes that are used by chance; among the refusals are HAMi's own."""
    codes = set[str]()
    for seed in range(40):
        chance = Random(seed)
        rules = msgspec.structs.replace(HAMI, policy=chance.choice([Policy.NONE, Policy.RESTRICTED]))
        it, used = world(rules), {gpu: [(10, 2_000)] * chance.randrange(5) for gpu in range(5)}
        it.tell(it.says.grant(each) for each in state_of(used).allocations.values())
        says = {
            POLICY: chance.choice(["binpack", "spread", "topology-aware", "mutex", "numa,spread"]),
            BIND: chance.choice(["true", "false"]),
        }
        wanted = asks(chance.randint(1, 3), chance.choice([1, 20_000]), chance.choice([0, 60, 100]))
        request = pod(wanted, annotations=says)

        refused = it.scheduler.filter(asked(request), (NODE,)).refused
        decision = admit(it.says.state, request, rules)

        assert ("" if isinstance(decision, Admission) else decision.code) == (
            refused[NODE].code if NODE in refused else ""
        ), (seed, decision)
        codes.add("" if isinstance(decision, Admission) else decision.code)

    assert {"", "ShareDoesNotFit"} < codes


def test_lists_of_policies_pass_where_a_node_reads_them() -> None:
    """On a cluster without such nodes, and once they are gone, they can be meant on none."""
    request = pod(asks(memory=1), annotations=LIST)
    it = world(RULES)
    it.view.renew()
    with pytest.raises(InvalidShare, match="is no policy"):
        it.scheduler.checks.check_waiting(asked(request))

    other = Says("node-2", hardware(), HAMI)
    tell_all(it.cluster, other.all())
    filtered = it.scheduler.filter(asked(request), (NODE, NodeName("node-2")))
    assert (("node-2",), "InvalidShare") == (filtered.passed, filtered.refused[NODE].code)

    it.view.forget(NodeName("node-2"))
    it.view.renew()
    with pytest.raises(InvalidShare, match="is no policy"):
        it.scheduler.checks.check(request)


def test_a_node_that_chooses_otherwise_from_now_on_is_read_anew() -> None:
    """Its hardware is the same, and its kubelet's rules are not."""
    it, request = world(RULES), pod(asks(memory=1), annotations=LIST)

    it.says.rules = HAMI
    it.tell((it.says.usage(),))

    assert (NODE,) == it.scheduler.filter(asked(request), (NODE,)).passed


def test_prioritize_ranks_nodes_as_hami_does() -> None:
    """The fullest first, or the emptiest where the pod says so; what it says makes it another request."""
    cluster = Cluster(usage=True)
    for name, used in {"a": {0: [(25, 2_000)]}, "b": {0: [(50, 6_000)], 1: [(25, 2_000)]}, "c": {}, "d": {}}.items():
        says = Says(name, hardware(), HAMI)
        tell_all(cluster, [*says.all(), *(says.grant(each) for each in state_of(used).allocations.values())])
    scheduler = Scheduler(
        ClusterView(cluster, lambda: SETTLED, ManualClock(), scorer_by_name(Scoring.HAMI, NodePacking.BINPACK))
    )
    names, share = tuple(map(NodeName, "abcd")), pod(asks(memory=1))
    spread = msgspec.structs.replace(share, annotations={NODE_POLICY: "spread"})

    found = [scheduler.prioritize(asked(each, uid), names) for each, uid in ((share, "uid-1"), (spread, "uid-2"))]

    assert [[9, 10, 8, 8], [9, 8, 10, 10]] == found
    assert names == scheduler.filter(asked(spread), names).passed

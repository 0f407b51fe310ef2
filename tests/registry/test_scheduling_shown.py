"""What the view of the cluster holds ends as what is reserved does, by the same rule."""

from random import Random

import pytest
from faults_support import THOROUGH
from reservation_support import NODE, changed
from shown_support import some_reservation, some_reservations, some_state
from view_support import RULES, asked

from topoalign.core.model.requests import PodRequest
from topoalign.core.state.fold import NodeState
from topoalign.core.state.node_reservations import NodeReservations, holding_reserved
from topoalign.registry.scheduling.cluster_state.assumed_pods import NodePods

SEEDS = 4_000 if THOROUGH else 400


def holding(known: NodeReservations) -> NodeState:
    """An empty node on which what is reserved is held."""
    state = NodeState(node=NODE)
    for each in known.held(0.0):
        state = holding_reserved(state, each)
    return state


@pytest.mark.parametrize("first", range(0, SEEDS, 100))
def test_a_view_holds_what_is_reserved_and_not_shown(first: int) -> None:
    for seed in range(first, first + 100):
        chance = Random(seed)
        known, holds = NodeReservations().apply(changed(*some_reservations(chance)), 1, 0.0), NodePods()
        for state in (some_state(chance) for _ in range(4)):
            known = known.observe(state)
            holds.reserve(known.held(0.0))
            holds.settle(state, state, RULES)

            assert holding(known).allocations == holds.added_to(NodeState(node=NODE), RULES).allocations, seed


@pytest.mark.parametrize("first", range(0, SEEDS, 100))
def test_what_a_bound_pod_holds_ends_as_its_reservation_would(first: int) -> None:
    """Also where the reservation expires, before or after the node has shown a part of it."""
    for seed in range(first, first + 100):
        chance = Random(seed)
        reserved = some_reservation(chance, "uid-a2")
        known, holds = NodeReservations().apply(changed(reserved), 1, 0.0), NodePods()
        pod = PodRequest(namespace=reserved.namespace, name=reserved.pod, containers=())
        holds.reserve([reserved])
        holds.expect(asked(pod, reserved.pod_uid))
        for number in range(4):
            if number == seed % 3:
                holds.reserve([])
            state = some_state(chance)
            known = known.observe(state)
            holds.settle(state, state, RULES)

            assert holding(known).allocations == holds.added_to(NodeState(node=NODE), RULES).allocations, seed

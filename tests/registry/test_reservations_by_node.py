"""The nodes on which something is reserved for a pod are those whose newest message has it."""

from random import Random

from fact_support import changed, reservation, reserved_container

from topoalign.core.model.ids import NodeName
from topoalign.core.state.node_reservations import NodeReservations
from topoalign.registry.scheduling.binding.cluster_reservations import ReservationsByNode

NODES = tuple(NodeName(f"node-{number}") for number in range(4))


def test_the_nodes_of_a_pod_are_those_that_a_look_at_every_node_finds() -> None:
    chance, known = Random(0), ReservationsByNode()
    for position in range(1, 500):
        node = chance.choice(NODES)
        pods = chance.sample("abcde", chance.randrange(4))
        if chance.random() < 0.2:
            known.drop(node)
        elif chance.random() < 0.2:
            known[node] = known.get(node, NodeReservations())
        else:
            event = changed(*(reservation(pod, reserved_container("GPU-0"), uid=pod) for pod in pods), seq=position)
            known[node] = known.get(node, NodeReservations()).apply(event, position, 0.0)
        expected = {pod: {node for node, each in known.items() if pod in each.until} for pod in "abcde"}

        assert expected == {pod: known.nodes_of(pod) for pod in "abcde"}
        assert {pod for pod, nodes in expected.items() if nodes} == known._nodes.keys()

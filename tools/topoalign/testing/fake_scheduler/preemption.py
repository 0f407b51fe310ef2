"""
Which pods make way for a more important one, as kube-scheduler v1.36 chooses them (DefaultPreemption).

    nodes without room by count -> on each the fewest victims -> preempt: the extender drops nodes -> the best node

On a node all less important pods are taken away, and as many as fit are put back, the most important and then the oldest
first. Of the nodes that the extender leaves, the one wins whose most important victim is the least important, then the
one with the lowest sum of priorities, then the one with the fewest victims.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from topoalign.testing.fake_api_server.objects import Object
from topoalign.testing.fake_scheduler.room import Key, Room, key_of, priority_of

LOWEST_PRIORITY = -(1 << 31)
"""Is subtracted from each priority before they are summed, so that more victims weigh more."""


class Preemption(NamedTuple):
    """Pods of one node that a pod displaced."""

    pod: Key
    node: str
    victims: tuple[Key, ...]


def victims_on(room: Room, pod: Object, node: str, running: Iterable[Object]) -> list[Object]:
    """
    The pods of the node that make room for the pod, the most important first; empty: none would help, or none is needed.
    `running`: the pods of the node, the oldest first.
    """
    lower = [each for each in running if priority_of(each) < priority_of(pod)]
    gone = {key_of(each) for each in lower}
    if not lower or not room.has_room_without(pod, node, gone):
        return []
    victims = []
    for each in sorted(lower, key=lambda other: -priority_of(other)):
        gone.discard(key_of(each))
        if not room.has_room_without(pod, node, gone):
            gone.add(key_of(each))
            victims.append(each)
    return victims


def is_eligible(pod: Object, on_nominated_node: Iterable[Object], *, is_unresolvable: bool) -> bool:
    """
    Whether the pod may preempt others. Not while pods of its nominated node are terminating for it, unless that node
    refused it for good (`is_unresolvable`).
    """
    if pod["spec"].get("preemptionPolicy") == "Never":
        return False
    if is_unresolvable:
        return True
    return not any(
        each["metadata"].get("deletionTimestamp") and priority_of(each) < priority_of(pod) for each in on_nominated_node
    )


def arguments_of(pod: Object, victims: Mapping[str, list[Object]]) -> dict[str, Any]:
    """The arguments of the extender's preempt. `pod`: as it is sent."""
    meta = {
        node: {"Pods": [{"UID": each["metadata"]["uid"]} for each in pods], "NumPDBViolations": 0}
        for node, pods in victims.items()
    }
    return {"Pod": pod, "NodeNameToVictims": None, "NodeNameToMetaVictims": meta}


def chosen_node(victims: Mapping[str, list[Object]]) -> str:
    """The node on which the least is lost."""

    def loss(node: str) -> tuple[int, int, int]:
        priorities = [priority_of(each) for each in victims[node]]
        return max(priorities), sum(each - LOWEST_PRIORITY for each in priorities), len(priorities)

    return min(victims, key=loss)

"""What became of the pods of a simulated cluster."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from topoalign.tools.simulate.cases import MOST_CASES, Case, case_of
from topoalign.tools.simulate.cluster import SimulatedCluster
from topoalign.tools.simulate.foreign import OVERTAKING_SECONDS, PREFIX
from topoalign.tools.simulate.node import Refused, SimulatedNode
from topoalign.tools.simulate.reserved import differences


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Counts over a whole run."""

    nodes: int
    pods: int
    admitted: int
    """By a node's kubelet."""
    refused: dict[str, int]
    """Reason of a node's kubelet -> pods. Empty is the aim: the scheduler knew what the node would say."""
    overtaken: int
    """Pods that a node refused within a second after another scheduler had bound a pod there; not among `refused`."""
    foreign_admitted: int
    """Pods that another scheduler bound, and their nodes admitted."""
    foreign_refused: int
    """The same, refused."""
    doubled: int
    """Devices that were given to a container while another one had them. Anything but 0 is a defect."""
    swapped: int
    """Pods that got the devices that were reserved for another one which waited for the same node."""
    realigned: int
    """Pods that got other devices than were reserved after something of their node became free: they were aligned anew."""
    undisturbed: int
    """Pods on whose nodes nothing became free from shortly before they were reserved until they were admitted."""
    deviated: int
    """Of these, pods that got devices which were reserved for none."""
    apart: int
    """GPUs that have no NIC of their pod beside them although its annotations ask for one. Anything but 0 is a defect."""
    waiting: int
    """Pods that were never bound."""
    unexplained: int
    """Of these, pods whose condition does not say why."""
    errors: dict[str, int]
    """What calls of the scheduler ended with as an error -> how often; each was tried again."""
    calls: dict[str, int]
    """Call of the scheduler -> how often."""
    cases: list[Case]
    """What explains pods that were refused, overtaken ones too, or deviated: the first ones."""
    seconds: float
    """From the first pod until nothing waited, or the run was given up."""
    pods_per_second: float
    """Pods that were bound, over these seconds."""


def report(cluster: SimulatedCluster, pods: int, seconds: float) -> Report:
    """The counts as they are now."""
    waiting = [pod for pod in cluster.api.pods if not pod["spec"].get("nodeName")]
    admitted = [pod for node in cluster.nodes for pod in node.admitted]
    refused = [(node, each) for node in cluster.nodes for each in node.refusals]
    own = [(node, each) for node, each in refused if not is_foreign(each.taken.pod)]
    known = [each for node, each in own if not is_overtaken(node, each)]
    bound = sum(not is_foreign(pod["metadata"]["name"]) for pod in cluster.api.pods) - len(waiting)
    found = Counter[str]()
    cases = [*refusals(cluster, own)]
    for node in cluster.nodes:
        record = cluster.reservations.nodes[node.name]
        counts, deviated = differences(record, node.given, node.freed)
        found += counts
        for each in deviated:
            case = partial(case_of, "deviated", node.name, each.taken, record.reserved, taken_by(node))
            cases.append(case(container=each.container, given=each.devices))
    return Report(
        nodes=len(cluster.nodes),
        pods=pods,
        admitted=sum(not is_foreign(pod) for pod in admitted),
        refused=dict(Counter(each.reason for each in known)),
        overtaken=len(own) - len(known),
        foreign_admitted=sum(map(is_foreign, admitted)),
        foreign_refused=len(refused) - len(own),
        doubled=sum(len(node.doubled) for node in cluster.nodes),
        swapped=found["swapped"],
        realigned=found["realigned"],
        undisturbed=found["undisturbed"],
        deviated=found["deviated"],
        waiting=pods - bound,
        apart=sum(len(node.apart) for node in cluster.nodes),
        unexplained=sum(not explained(pod) for pod in waiting),
        errors=dict(Counter(cluster.scheduler.errors)),
        calls=dict(cluster.scheduler.calls),
        cases=cases[:MOST_CASES],
        seconds=round(seconds, 3),
        pods_per_second=round(bound / seconds, 1) if seconds else 0.0,
    )


def refusals(cluster: SimulatedCluster, refused: Iterable[tuple[SimulatedNode, Refused]]) -> Iterator[Case]:
    """What explains these refusals."""
    for node, each in refused:
        reserved = cluster.reservations.nodes[node.name].reserved
        message = f"{each.reason}: {each.message}"
        case = partial(case_of, "refused", node.name, each.taken, reserved, taken_by(node))
        yield case(container=each.container, message=message)


def taken_by(node: SimulatedNode) -> dict[str, float]:
    """UID of a pod -> when the kubelet of the node admitted or refused it, in seconds of the loop."""
    all_taken = (*(each.taken for each in node.given), *(each.taken for each in node.refusals))
    return {taken.uid: taken.at for taken in all_taken}


def is_foreign(pod: str) -> bool:
    """Whether another scheduler bound the pod of this name."""
    return pod.startswith(PREFIX)


def is_overtaken(node: SimulatedNode, refused: Refused) -> bool:
    """Whether a pod was bound to the node by another scheduler a moment before this refusal."""
    return any(0 <= refused.taken.at - at < OVERTAKING_SECONDS for at in node.foreign_binds)


def explained(pod: dict[str, Any]) -> bool:
    """Whether the condition of a pod that waits has a reason."""
    conditions: Sequence[dict[str, Any]] = pod["status"].get("conditions", ())
    return any(each["type"] == "PodScheduled" and each.get("message") for each in conditions)

"""What became of the pods of a simulated cluster."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from topoalign.tools.simulate.cluster import SimulatedCluster


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Counts over a whole run."""

    nodes: int
    pods: int
    admitted: int
    """By a node's kubelet."""
    refused: dict[str, int]
    """Reason of a node's kubelet -> pods. Empty is the aim: the scheduler knew what the node would say."""
    doubled: int
    """Devices that were given to a container while another one had them. Anything but 0 is a defect."""
    waiting: int
    """Pods that were never bound."""
    unexplained: int
    """Of these, pods whose condition does not say why."""
    errors: dict[str, int]
    """What calls of the scheduler ended with as an error -> how often; each was tried again."""
    calls: dict[str, int]
    """Call of the scheduler -> how often."""
    seconds: float
    """From the first pod until nothing waited, or the run was given up."""
    pods_per_second: float
    """Pods that were bound, over these seconds."""


def report(cluster: SimulatedCluster, pods: int, seconds: float) -> Report:
    """The counts as they are now."""
    waiting = [pod for pod in cluster.api.pods if not pod["spec"].get("nodeName")]
    admitted = sum(node.admitted for node in cluster.nodes)
    bound = pods - len(waiting)
    return Report(
        nodes=len(cluster.nodes),
        pods=pods,
        admitted=admitted,
        refused=dict(Counter(refusal.reason for node in cluster.nodes for _, refusal in node.refusals)),
        doubled=sum(len(node.doubled) for node in cluster.nodes),
        waiting=len(waiting),
        unexplained=sum(not explained(pod) for pod in waiting),
        errors=dict(Counter(cluster.scheduler.errors)),
        calls=dict(cluster.scheduler.calls),
        seconds=round(seconds, 3),
        pods_per_second=round(bound / seconds, 1) if seconds else 0.0,
    )


def explained(pod: dict[str, Any]) -> bool:
    """Whether the condition of a pod that waits has a reason."""
    conditions: Sequence[dict[str, Any]] = pod["status"].get("conditions", ())
    return any(each["type"] == "PodScheduled" and each.get("message") for each in conditions)

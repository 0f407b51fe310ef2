"""
Pods that another scheduler binds: it counts devices, and knows nothing of topology or of what is reserved.

Nobody asks the registry about such a pod. It learns of it from the API server, a moment after the pod was bound, so a pod
of its own that is bound in that moment may be refused by the node.
"""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import anyio

from topoalign.tools.simulate.cluster import SimulatedCluster

PREFIX = "foreign-"
NODES = 5
"""The nodes that the other scheduler uses, too: the first of the cluster."""
PAUSES = (0.05, 0.5)
"""Seconds between two pods."""
OVERTAKING_SECONDS = 1.0
"""For so long after a foreign bind the registry may not know of it."""


async def bind_foreign(cluster: SimulatedCluster, pods: Sequence[Mapping[str, Any]], chance: Random) -> None:
    """Creates these pods one after another and binds each to a node that has room by count, if there is one."""
    shared = {str(node.name): node for node in cluster.nodes[:NODES]}
    for pod in pods:
        await anyio.sleep(chance.uniform(*PAUSES))
        made = cluster.api.add_pod(
            {
                "metadata": {**pod["metadata"], "name": PREFIX + pod["metadata"]["name"]},
                "spec": {**pod["spec"], "schedulerName": "another-scheduler"},
            }
        )
        metadata = made["metadata"]
        room = [shared[name] for name in cluster.scheduler.room.nodes_for(made) if name in shared]
        if not room:
            cluster.api.delete_pod(metadata["namespace"], metadata["name"])
            continue
        node = chance.choice(room)
        cluster.api.bind(metadata["namespace"], metadata["name"], {"target": {"name": node.name}})
        node.foreign_binds.append(anyio.current_time())

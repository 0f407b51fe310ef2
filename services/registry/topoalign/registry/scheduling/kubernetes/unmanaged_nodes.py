"""
Finds nodes that topoalign does not manage, such as those of NVIDIA's device plugin. The extender lets pods pass to them.

A node without any published fact is unmanaged if its Node has the label `topoalign.io/managed: "false"`, or by the setting
`TOPOALIGN_UNKNOWN_NODES`. A node with published facts is always managed, because its devices would otherwise be allocated
twice; a label on it is logged once and noted. `topoalign forget` makes a node that was moved away unmanaged.

Pods of gangs do not pass, because the gang cannot be reserved as a whole there.
"""

import structlog

from topoalign.core.model.errors import clean, quoted
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import GANG
from topoalign.registry.cluster_nodes import Cluster
from topoalign.registry.ports import SeenNode
from topoalign.registry.scheduling.scheduling_api import PodToSchedule

MANAGED = "topoalign.io/managed"
"""Label of a Node; `false`: topoalign does not manage it."""

log = structlog.get_logger("topoalign.registry.scheduling")


class UnmanagedNodes:
    """The nodes of Kubernetes that topoalign does not manage."""

    def __init__(self, cluster: Cluster, *, pass_unknown: bool) -> None:
        """`pass_unknown`: whether nodes without the label count as well."""
        self._cluster = cluster
        self._pass_unknown = pass_unknown
        self._nodes: dict[NodeName, bool] = {}
        """The nodes of Kubernetes, and whether the label of each is `false`."""
        self._logged: set[NodeName] = set()
        """Managed nodes with that label, which were logged."""
        cluster.listeners.append(self.observe)

    def __contains__(self, node: NodeName) -> bool:
        if node not in self._nodes or node in self._cluster:
            return False
        return self._nodes[node] or self._pass_unknown

    def passes(self, pod: PodToSchedule, node: NodeName) -> bool:
        """Whether the pod may go to the node because topoalign does not manage it."""
        return node in self and GANG not in pod.request.annotations

    def see(self, node: SeenNode) -> NodeName | None:
        """Notes a node of the API server. Returns it if its label has changed."""
        before = self._nodes.get(node.name, False)
        labelled = node.labels.get(MANAGED) == "false"
        self._nodes[node.name] = labelled
        if not labelled:
            self._logged.discard(node.name)
        self.observe(node.name)
        return node.name if labelled != before else None

    def lose(self, node: NodeName) -> None:
        """Removes a node that the API server no longer has."""
        self._nodes.pop(node, None)
        self._logged.discard(node)

    def observe(self, node: NodeName) -> None:
        """Logs a labelled node when its first fact arrives."""
        if self._nodes.get(node) and node not in self._logged and node in self._cluster:
            self._logged.add(node)
            log.warning(
                f"topoalign runs a node that is labelled {MANAGED}=false: the label has no effect", node=clean(node)
            )

    def finding(self) -> str | None:
        """Names the managed nodes with that label; None: there are none."""
        nodes = sorted(node for node, labelled in self._nodes.items() if labelled and node in self._cluster)
        if not nodes:
            return None
        remedy = "remove the label, or run `topoalign forget`"
        return f"topoalign runs nodes that are labelled {MANAGED}=false: {quoted(nodes)}; {remedy}"

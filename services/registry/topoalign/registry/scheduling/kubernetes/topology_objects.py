"""
Keeps the NodeResourceTopology objects of the nodes up to date, for scheduler plugins that read them.

Every ten seconds, the changed objects are written one after the other, at most twenty per second. Each object is owned
by its Node, so that Kubernetes deletes them together. An object that could not be written is retried after all others,
or after a minute if the cluster does not have the kind.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import structlog

from topoalign.core.model.errors import NoFit, TopoalignError
from topoalign.core.model.ids import NodeName
from topoalign.core.node_resource_topology import node_resource_topology
from topoalign.core.ports import Clock
from topoalign.registry.ports import ApiNotFound, KubernetesApi
from topoalign.registry.scheduling.cluster_state.view import ClusterView

PERIOD = 10.0
ABSENT_SECONDS = 60.0
EACH_SECONDS = 0.05

log = structlog.get_logger("topoalign.registry.scheduling")


class TopologyObjects:
    """`run` writes the objects."""

    def __init__(
        self, api: KubernetesApi, clock: Clock, view: ClusterView, uid_of: Callable[[NodeName], str | None]
    ) -> None:
        """`uid_of`: the UID of a Kubernetes Node; None: there is no such Node, so nothing is written."""
        self.written = 0
        """Number of writes."""
        self._api = api
        self._clock = clock
        self._view = view
        self._uid_of = uid_of
        self._version = 0
        """The version of the view up to which changes were processed."""
        self._due: dict[NodeName, None] = {}
        """Nodes with changes, in the order in which they are written."""
        self._last: dict[NodeName, dict[str, Any]] = {}
        """Node -> the object written last."""

    async def run(self) -> None:
        """Writes changed objects until cancelled."""
        while True:
            await self._clock.sleep(PERIOD)
            self._due |= dict.fromkeys(sorted(each.name for each in self._view.changed_since(self._version)))
            self._version = self._view.version
            self._last = {node: last for node, last in self._last.items() if node in self._view.nodes}
            try:
                await self._write_due()
            except ApiNotFound as error:
                log.warning("the cluster has no NodeResourceTopology", finding=error.finding)
                await self._clock.sleep(ABSENT_SECONDS)
            except TopoalignError as error:
                log.warning("a NodeResourceTopology was not written", finding=error.finding)

    async def _write_due(self) -> None:
        """Writes the due objects. After an error, the others stay due, and the failed one is moved to the end."""
        for node in tuple(self._due):
            made = self._object(node)
            del self._due[node]
            if made is not None and made != self._last.get(node):
                try:
                    await self._api.apply_topology(made)
                except TopoalignError:
                    self._due[node] = None
                    raise
                self.written += 1
                self._last[node] = made
                await self._clock.sleep(EACH_SECONDS)

    def _object(self, node: NodeName) -> dict[str, Any] | None:
        """Builds the object of a node; None if the node is not offered, or not in Kubernetes."""
        view = self._view.nodes.get(node)
        uid = self._uid_of(node)
        if view is None or view.kind is None or uid is None:
            return None
        basis = self._view.basis(view)
        try:
            made: dict[str, Any] = msgspec.to_builtins(node_resource_topology(basis.state, basis.rules))
        except NoFit as error:
            log.info("a node has no NodeResourceTopology", node=node, finding=error.finding)
            return None
        owner = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid}
        return {**made, "metadata": {**made["metadata"], "ownerReferences": [owner]}}

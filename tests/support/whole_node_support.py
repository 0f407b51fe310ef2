"""A node whose devices are offered as its machine has them, over real sockets."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from anyio.abc import TaskGroup
from kubelet_support import two_nodes
from share_support import ShareNode, running

from topoalign.allocator.containers.containers import Containers
from topoalign.core.model.decisions import Admission, Decision
from topoalign.core.model.requests import Policy
from topoalign.core.model.topology.model import Topology
from topoalign.plugin_config.configuration import Configuration, DeviceList, Flags, PluginFlags

MACHINE = two_nodes()


class Node(ShareNode):
    """`strategies`: how containers receive the list of their devices."""

    def __init__(
        self,
        directory: Path,
        policy: Policy = Policy.RESTRICTED,
        machine: Topology = MACHINE,
        strategies: tuple[DeviceList, ...] = ("envvar",),
    ) -> None:
        super().__init__(directory, machine, tuple(machine.devices), policy)
        flags = Flags(plugin=PluginFlags(device_list_strategy=strategies))
        self.containers = Containers(lambda: Configuration(flags=flags))
        self.by_variable_alone = flags.plugin.by_variable_alone

    def offered(self, machine: Topology) -> Topology:
        return machine

    def facts(self) -> list[str]:
        """Names of the recorded facts, without the snapshot of the start."""
        return [type(event).__name__ for event, _ in self.ledger.pending][1:]


def node(*options: Any, **more: Any) -> AbstractAsyncContextManager[tuple[Node, TaskGroup]]:
    """By the options of `Node`."""
    return running(lambda directory: Node(directory, *options, **more))


def fits(decision: Decision) -> Admission:
    assert isinstance(decision, Admission), decision
    return decision

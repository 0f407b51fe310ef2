"""
Reads the state of a node's kubelet from the files in its root directory.

Each of three managers has one file. If a file is missing, its manager has allocated nothing, and a finding reports it.
A file that cannot be read, or that does not fit this machine and these rules, is an error, because a guess about free
resources could lead to a wrong prediction. Entries of pods that are gone (`ListedPods`) are dropped, as the kubelet
drops them before its next decision. The files identify pods by UID, without a namespace.
"""

import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from topoalign.core.admission.prediction import describe_starting_kubelet
from topoalign.core.model.errors import NotFound, StateFault, clean, quoted
from topoalign.core.model.events import (
    Allocation,
    DeviceHealth,
    DeviceHealthChanged,
    HealthState,
    MemoryBlock,
    MemoryUse,
    Owner,
    TopologyDiscovered,
)
from topoalign.core.model.ids import AllocationID, ContainerName, DeviceID, Namespace, PodName, ResourceName
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.model.topology.cpuset import format_cpuset
from topoalign.core.model.topology.device_sets import NO_DEVICES
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import NodeState
from topoalign.kubelet.files import checkpoint, cpu_checkpoint, device_checkpoint, memory_checkpoint
from topoalign.kubelet.files.cpu_checkpoint import CpuManagerState
from topoalign.kubelet.files.device_checkpoint import CheckpointData
from topoalign.kubelet.files.memory_checkpoint import MemoryCheckpointBlock, MemoryManagerState
from topoalign.kubelet.files.pod_directories import ListedPods

ROOT = Path("/var/lib/kubelet")
"""The default of the kubelet's root directory (kubelet v1.36.3, --root-dir)."""
DEVICE_PLUGINS = "device-plugins"

SOCKET = Path("device-plugins/kubelet.sock")
"""The kubelet creates it again at each start (v1.36.3, cm/devicemanager/plugin/v1beta1)."""

SETTLE_SECONDS = 120.0
"""
The time after the kubelet's start for which predictions have a note. The kubelet reads manifests at once; how long the
API server takes to answer is unknown here.
"""

NO_NAMESPACE = Namespace("")

Container = tuple[str, str]
"""Pod uid, container."""


class ManagerHoldings(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file of one manager, or of all files together."""

    cpus: Mapping[Container, frozenset[int]] = {}
    blocks: Mapping[Container, tuple[MemoryBlock, ...]] = {}
    devices: Mapping[Container, Mapping[ResourceName, tuple[DeviceID, ...]]] = {}
    memory: Mapping[int, MemoryUse] = {}
    """Per NUMA node, as `NodeState.memory`."""
    registered: Mapping[ResourceName, frozenset[DeviceID]] | None = None
    """
    Resource -> the healthy devices that its plugin listed; empty if the plugin is gone and containers still have
    devices. None without a file.
    """
    dropped: Mapping[ResourceName, frozenset[DeviceID]] = {}
    """Devices that the file lists only for pods that are gone."""
    finding: str | None = None
    """What is unknown, as text."""
    uncertainty: str | None = None
    """Why the allocations are not certain, if they are not."""

    @property
    def allocations(self) -> tuple[Allocation, ...]:
        """One allocation for each container that holds anything, sorted by pod and name."""
        return tuple(
            Allocation(
                id=AllocationID("/".join(container)),
                owner=Owner(namespace=NO_NAMESPACE, pod=PodName(container[0]), container=ContainerName(container[1])),
                devices=dict(self.devices.get(container, {})),
                cpus=format_cpuset(self.cpus.get(container, ())),
                memory=self.blocks.get(container, ()),
            )
            for container in sorted({*self.cpus, *self.blocks, *self.devices})
        )


class KubeletNode(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a node according to its kubelet's files."""

    state: NodeState
    registered: Mapping[ResourceName, frozenset[DeviceID]] | None
    findings: tuple[str, ...]
    """What is unknown, as texts."""


def node_state(
    topology: TopologyDiscovered, health: DeviceHealthChanged, root: Path, rules: AdmissionRules
) -> KubeletNode:
    """
    Reads the state that the kubelet with this root directory uses for the next pod. A device that its plugin has not listed
    as healthy is not usable. Raises NotFound if there is no such directory, and StateFault for an unusable file.
    """
    try:
        is_directory = stat.S_ISDIR(root.stat().st_mode)
    except PermissionError:
        is_directory = True  # it may be one: reading its files reports that they cannot be read
    except (OSError, ValueError):  # ValueError: a name with a null character
        is_directory = False
    if not is_directory:
        raise NotFound("directory", str(root), f"give the kubelet's root directory, by default {ROOT}")
    hardware = topology.topology
    pods = ListedPods(root)
    cpus = held_cpus(root, hardware, rules, pods)
    memory = held_memory(root, hardware, rules, pods)
    devices = held_devices(root, hardware, pods)
    held = ManagerHoldings(cpus=cpus.cpus, blocks=memory.blocks, devices=devices.devices)
    state = NodeState(
        node=topology.node,
        topology=topology,
        health=listed_health(health, hardware, devices.registered),
        allocations={allocation.id: allocation for allocation in held.allocations},
        memory=memory.memory,
    )
    findings = (
        *(each.finding for each in (cpus, memory, devices)),
        memory.uncertainty,
        pods.reason_unknown,
        *pods.findings,
    )
    return KubeletNode(
        state=state,
        registered=devices.registered,
        findings=tuple(finding for finding in findings if finding is not None),
    )


def held_cpus(root: Path, topology: Topology, rules: AdmissionRules, pods: ListedPods) -> ManagerHoldings:
    """Reads the allocations of the CPU manager. Raises StateFault."""

    def load() -> CpuManagerState | None:
        state = cpu_checkpoint.load_cpu_state(root)
        if state is not None:
            cpu_checkpoint.check_cpu_state(state, topology, rules)
        return state

    state = checkpoint.load_settled(load)
    if state is None:
        return ManagerHoldings(finding=absent(root / cpu_checkpoint.NAME, "CPUs"))
    return ManagerHoldings(
        cpus={each: cpus for each, cpus in state.exclusive.items() if cpus and not pods.is_gone(each[0])}
    )


def held_memory(root: Path, topology: Topology, rules: AdmissionRules, pods: ListedPods) -> ManagerHoldings:
    """Reads the allocations of the memory manager. Raises StateFault."""

    def load() -> MemoryManagerState | None:
        state = memory_checkpoint.load_memory_state(root)
        if state is not None:
            memory_checkpoint.check_memory_state(state, topology, rules)
        return state

    state = checkpoint.load_settled(load, between=lambda read: read is not None and bool(read.lost))
    if state is None:
        return ManagerHoldings(finding=absent(root / memory_checkpoint.NAME, "memory"))
    uncertainties = [
        f"the kubelet's memory manager counts {amount} bytes of {clean(name)} as given away that no container has"
        for name, amount in state.lost.items()
    ]
    state = state.without({uid for uid in state.entries or {} if pods.is_gone(uid)})
    left = {node: dict(use.reserved) for node, use in state.use.items()}
    blocks = {
        container: tuple(spread_block(block, left) for block in blocks)
        for container, blocks in sorted(state.blocks.items())
    }
    return ManagerHoldings(
        blocks={container: each for container, each in blocks.items() if each},
        memory=state.use,
        uncertainty="; ".join(uncertainties) or None,
    )


def spread_block(block: MemoryCheckpointBlock, left: Mapping[int, dict[ResourceName, int]]) -> MemoryBlock:
    """Distributes a block over the nodes of its group, lowest first, up to the amounts in `left`, which it reduces."""
    taken = []
    wanted = block.size
    for node in block.numa_affinity:
        amounts = left.get(node, {})
        part = min(wanted, amounts.get(block.type, 0))
        amounts[block.type] = amounts.get(block.type, 0) - part
        wanted -= part
        taken.append(part)
    return MemoryBlock(resource=block.type, nodes=tuple(block.numa_affinity), size=block.size, taken=tuple(taken))


def held_devices(root: Path, topology: Topology, pods: ListedPods) -> ManagerHoldings:
    """Reads the allocations of the device manager. Raises StateFault."""
    directory = root / DEVICE_PLUGINS
    data = device_checkpoint.load_devices(directory)
    if data is None:
        return ManagerHoldings(finding=absent(directory / device_checkpoint.NAME, "devices"))
    registered = {
        ResourceName(resource): frozenset(map(DeviceID, devices))
        for resource, devices in data.registered_devices.items()
    }
    for resource, devices in registered.items():
        if resource in topology.devices and (foreign := devices - topology.devices[resource].keys()):
            raise StateFault(
                f"the kubelet has {quoted([resource])} {quoted(sorted(foreign))}, which the machine does not have",
                "describe the machine that the kubelet runs on, and give its plugin's configuration with --config",
            )
    listed = devices_by_container(data)
    held = {container: devices for container, devices in listed.items() if not pods.is_gone(container[0])}
    given = merge_devices(held.values())
    dropped = {
        resource: devices - given.get(resource, frozenset())
        for resource, devices in merge_devices(listed[each] for each in listed.keys() - held.keys()).items()
    }
    unlisted = dict.fromkeys(given.keys() - registered.keys(), frozenset[DeviceID]())
    return ManagerHoldings(devices=held, registered=registered | unlisted, dropped=dropped)


def merge_devices(
    containers: Iterable[Mapping[ResourceName, Iterable[DeviceID]]],
) -> dict[ResourceName, frozenset[DeviceID]]:
    """Resource -> the devices of all these containers."""
    found: dict[ResourceName, frozenset[DeviceID]] = {}
    for devices in containers:
        for resource, ids in devices.items():
            found[resource] = found.get(resource, frozenset()).union(ids)
    return found


def devices_by_container(data: CheckpointData) -> dict[Container, dict[ResourceName, tuple[DeviceID, ...]]]:
    """Container -> its devices; a device that is listed under several NUMA nodes counts once."""
    held: dict[Container, dict[ResourceName, tuple[DeviceID, ...]]] = {}
    for entry in data.pod_device_entries or ():
        ids = sorted({DeviceID(device) for devices in entry.device_ids.values() for device in devices})
        of_container = held.setdefault((entry.pod_uid, entry.container_name), {})
        resource = ResourceName(entry.resource_name)
        of_container[resource] = (*of_container.get(resource, ()), *ids)
    return held


def listed_health(
    health: DeviceHealthChanged, topology: Topology, registered: Mapping[ResourceName, Iterable[DeviceID]] | None
) -> DeviceHealthChanged:
    """The health of all devices for the kubelet: if it knows a resource, only its listed devices are healthy."""
    unlisted = DeviceHealth(state=HealthState.UNHEALTHY, reason="its plugin does not list it to the kubelet as healthy")
    absentees = {
        device: unlisted
        for resource, devices in (registered or {}).items()
        for device in topology.devices.get(resource, NO_DEVICES).keys() - frozenset(devices)
    }
    return msgspec.structs.replace(health, devices={**health.devices, **absentees})


def absent(path: Path, what: str) -> str:
    """The finding for a missing file."""
    return f"there is no {path}: the kubelet is taken to have given away no {what}"


def started(root: Path) -> float | None:
    """When the kubelet with this root directory began to listen for plugins, in wall seconds; None if not running."""
    try:
        status = (root / SOCKET).stat()
    except (OSError, ValueError):
        return None
    return status.st_mtime if stat.S_ISSOCK(status.st_mode) else None


def unsettled_reason(root: Path, now: float, seconds: float = SETTLE_SECONDS) -> str | None:
    """
    What is unknown because the kubelet with this root directory started less than `seconds` ago, as text; None if it
    started earlier, or is not running. Until it has received its pods from all sources, it drops no entries of pods
    that are gone. `now`: wall seconds.
    """
    since = started(root)
    return describe_starting_kubelet(now - since) if since is not None and 0 <= now - since < seconds else None

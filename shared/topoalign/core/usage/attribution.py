"""
Attributes measured use of GPUs to the containers that hold them.

A process belongs to a container if the container holds the GPU or MIG instance on which the process runs. The UID of
the pod must be that of the allocation and, if both are known, also the name of the container. All other processes are
listed separately, because users need them to find out why a GPU is busy: processes of the host, of pods without a GPU,
and of containers with another GPU. Nothing is guessed: if it is unknown where a process runs, it belongs to no
container, and the use by the holders is also unknown.

Example: a pod holds GPU-0 and uses 12 GiB of it; an X server of the host uses 1 GiB.

    GPU-0  holders  ml/train/main         12 GiB of 80 GiB
           others   /user.slice/… (Xorg)   1 GiB
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from topoalign.core.model.allocations import Allocation, Owner
from topoalign.core.model.holdings import Whole
from topoalign.core.model.ids import AllocationID, ContainerName, DeviceID, NodeName
from topoalign.core.model.processes import (
    DeviceUse,
    GpuProcess,
    LibraryCount,
    LibraryReading,
    Measurement,
    ProcessIdentity,
)
from topoalign.core.state.fold import NodeState
from topoalign.core.usage.given import HeldShare, all_held, given_to

Where = Literal["pod", "host", "unknown"]
"""Where the processes run that do not belong to a holder of the device: in a pod, on the host, or unknown."""


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """The use of one device by some processes. None: unknown, which does not mean 0."""

    memory: int | None
    """Bytes in total."""
    utilization: int | None
    """Percent of the last second, summed over all processes. Can exceed 100, because kernels run concurrently."""
    processes: tuple[GpuProcess, ...]


class HolderUse(msgspec.Struct, frozen=True, kw_only=True):
    """A container that holds a device or a part of it, and its use. Containers that use nothing are included."""

    owner: Owner | None
    """None: the kubelet has not reported the owner yet."""
    pod_uid: str
    """Empty: unknown. If so, its processes cannot be distinguished from others."""
    allocations: tuple[AllocationID, ...]
    devices: tuple[DeviceID, ...]
    """The ids by which it holds the device or parts of it: `GPU-x::3`."""
    cores: int | None
    """Hundredths of the device's computing time; 0: only memory. None: a time slice, which has no amount."""
    memory: int | None
    """Bytes. All memory of the device if it holds all computing time, except with slots. None: a time slice."""
    use: Use
    library: LibraryCount | None = None
    """The counts of its limiting library. The container can change them, so they are not reliable. None: unknown."""

    @property
    def memory_left(self) -> int | None:
        """Allocated bytes that it does not use; 0 if it uses more. None: unknown, or it has no amount."""
        if self.memory is None or self.use.memory is None:
            return None
        return max(0, self.memory - self.use.memory)


class OtherUse(msgspec.Struct, frozen=True, kw_only=True):
    """Processes of one container or control group that holds nothing of the device, and their use."""

    where: Where
    owner: Owner | None
    """
    The owner, if the pod holds something else on this node or held this device before. Its container is empty if
    unknown. None: no pod, or an unknown one.
    """
    pod_uid: str
    container_id: str
    cgroup: str
    use: Use


class DeviceShares(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU or MIG instance: who holds it, and who uses it."""

    device: DeviceID
    gpu: DeviceID
    """The GPU itself, or the GPU of the MIG instance."""
    memory: int | None
    """Bytes in total. None, here and below: unknown."""
    memory_used: int | None
    utilization: int | None
    memory_utilization: int | None
    """Percent of the last sampling period in which its memory was read or written."""
    failure: str
    """Why it was not measured. Empty: it was measured."""
    holders: tuple[HolderUse, ...]
    others: tuple[OtherUse, ...]


class NodeShares(msgspec.Struct, frozen=True, kw_only=True):
    """All GPUs of a node."""

    node: NodeName
    time: float
    """When it was measured, in seconds since 1970."""
    devices: tuple[DeviceShares, ...]
    """GPUs in the order of the node, each followed by its MIG instances."""
    finding: str
    """Why it is unknown where processes run. Empty: it is known."""
    left_out: int
    """Number of processes that are not listed because there are too many."""
    library_finding: str = ""
    """Why the counts of the libraries that limit containers are unknown. Empty: they are known, or there are none."""


Place = tuple[str, str, str, str]
"""The data that the processes of one group have in common: pod UID, container id, container name, control group."""


def attribute_use(state: NodeState, measured: Measurement) -> NodeShares:
    """The use of a node's GPUs by containers and other processes. Includes known GPUs that were not measured."""
    hardware = state.hardware
    uses = {use.device: use for use in measured.devices}
    held = _held_by_device(state)
    owners = _owners_by_pod(state.allocations.values())
    rows = []
    for gpu in hardware.gpus:
        instances = {instance.uuid: instance.memory for instance in gpu.mig or ()}
        for device, memory in ((gpu.id, gpu.memory), *instances.items()):
            use = uses.get(device) or DeviceUse(device=device, failure="it was not measured")
            mine = held.get(device, ())
            total = use.memory if use.memory is not None else memory
            rows.append(
                _device_shares(use, gpu.id, total, mine, owners, is_seen=not (measured.finding or measured.left_out))
            )
    return NodeShares(
        node=measured.node,
        time=measured.time,
        devices=tuple(rows),
        finding=measured.finding,
        left_out=measured.left_out,
    )


def _held_by_device(state: NodeState) -> Mapping[DeviceID, Sequence[HeldShare]]:
    # device -> what is held of it, in the order of the allocations; for an instance, also holdings of the whole GPU
    instances = {gpu.id: tuple(instance.uuid for instance in gpu.mig or ()) for gpu in state.hardware.gpus}
    found = defaultdict[DeviceID, list[HeldShare]](list)
    for each in all_held(state):
        holding = each.holding
        is_whole = isinstance(holding.part, Whole)
        for device in (holding.base, *(instances.get(holding.device, ()) if is_whole else ())):
            found[device].append(each)
    return found


def _owners_by_pod(allocations: Iterable[Allocation]) -> dict[str, Owner]:
    # also pods whose devices another pod has now
    known: dict[str, Owner] = {}
    for allocation in allocations:
        pods = [(each.pod_uid, each.owner) for each in allocation.displaced]
        for uid, owner in (*pods, (allocation.pod_uid, allocation.owner)):
            if uid and owner is not None:
                known[uid] = msgspec.structs.replace(owner, container=ContainerName(""))
    return known


def _device_shares(
    use: DeviceUse,
    gpu: DeviceID,
    memory: int | None,
    held: Sequence[HeldShare],
    owners: Mapping[str, Owner],
    *,
    is_seen: bool,
) -> DeviceShares:
    # `is_seen`: whether it is known where processes run
    by_holder: dict[object, list[HeldShare]] = {}
    for each in held:
        allocation = each.allocation
        key = (allocation.pod_uid, allocation.owner) if allocation.owner is not None else allocation.id
        by_holder.setdefault(key, []).append(each)
    groups = list(by_holder.values())
    firsts = [group[0].allocation for group in groups]
    theirs: list[list[GpuProcess]] = [[] for _ in groups]
    others: dict[Place, list[GpuProcess]] = {}
    for process in use.processes or ():
        at = _find_holder(process.identity, firsts)
        if at is not None:
            theirs[at].append(process)
        else:
            where = process.identity or ProcessIdentity()
            place = (where.pod_uid, where.container_id, where.container, where.cgroup)
            others.setdefault(place, []).append(process)
    unclear = {"", *(uid for uid, _, container, _ in others if not container)}  # pods that `others` may contain

    holders = []
    for group, processes in zip(groups, theirs, strict=True):
        first = group[0].allocation
        # whether it is known which processes belong to this pod
        is_clear = is_seen and first.pod_uid not in unclear
        is_complete = use.processes is not None and (not use.processes or is_clear)
        cores, given = given_to(group, memory)
        holders.append(
            HolderUse(
                owner=first.owner,
                pod_uid=first.pod_uid,
                allocations=tuple(dict.fromkeys(each.allocation.id for each in group)),
                devices=tuple(each.device for each in group),
                cores=cores,
                memory=given,
                use=_sum_use(processes, is_complete=is_complete),
            )
        )
    return DeviceShares(
        device=use.device,
        gpu=gpu,
        memory=memory,
        memory_used=use.memory_used,
        utilization=use.utilization,
        memory_utilization=use.memory_utilization,
        failure=use.failure,
        holders=tuple(holders),
        others=tuple(_other_use(processes, owners) for _, processes in sorted(others.items())),
    )


def _find_holder(identity: ProcessIdentity | None, holders: Sequence[Allocation]) -> int | None:
    # if the container of a process is unknown, the process belongs to the only holder of its pod
    if identity is None or not identity.pod_uid:
        return None
    same_pod = [at for at, each in enumerate(holders) if each.pod_uid == identity.pod_uid]
    if identity.container:
        names = {at: owner.container for at in same_pod if (owner := holders[at].owner) is not None}
        return next((at for at, name in names.items() if name == identity.container), None)
    return same_pod[0] if len(same_pod) == 1 else None


def _sum_use(processes: Sequence[GpuProcess], *, is_complete: bool) -> Use:
    # `is_complete`: whether these are all processes
    memory = [process.memory for process in processes]
    percent = [process.utilization for process in processes]
    return Use(
        memory=sum(each or 0 for each in memory) if is_complete and None not in memory else None,
        utilization=sum(each or 0 for each in percent) if is_complete and None not in percent else None,
        processes=tuple(processes),
    )


def _other_use(processes: Sequence[GpuProcess], owners: Mapping[str, Owner]) -> OtherUse:
    identity = processes[0].identity
    use = _sum_use(processes, is_complete=True)
    if identity is None:
        return OtherUse(where="unknown", owner=None, pod_uid="", container_id="", cgroup="", use=use)
    owner = owners.get(identity.pod_uid)
    return OtherUse(
        where="pod" if identity.pod_uid else "host" if identity.cgroup else "unknown",
        owner=msgspec.structs.replace(owner, container=identity.container) if owner is not None else None,
        pod_uid=identity.pod_uid,
        container_id=identity.container_id,
        cgroup=identity.cgroup,
        use=use,
    )


# The counts of the library that limits containers, in addition to the measurements of the driver.
#
# The two can differ, and neither corrects the other. The driver reports the memory of a container's processes,
# including contexts. The library counts only the allocations that it sees, and the container can write anything into
# its file. So counts are only shown, for the container to which they belong and for GPUs that it holds, and have no
# other use.


def has_library(state: NodeState) -> bool:
    """Whether a library that shares files may limit containers of the node. If so, its counts are read."""
    return any(offer.limiter == "hami-core" for offer in state.hardware.offered)


def with_library(shares: NodeShares, reading: LibraryReading) -> NodeShares:
    """The same, with the library's counts of each holder. Counts for devices that it does not hold are ignored."""
    counts: dict[tuple[AllocationID, DeviceID], LibraryCount] = {
        (use.allocation, count.device): count for use in reading.containers for count in use.counts
    }

    def counted(holder: HolderUse, device: DeviceID) -> HolderUse:
        found = [counts[each, device] for each in holder.allocations if (each, device) in counts]
        return msgspec.structs.replace(holder, library=found[-1]) if found else holder

    rows = (
        msgspec.structs.replace(row, holders=tuple(counted(each, row.device) for each in row.holders))
        for row in shares.devices
    )
    return msgspec.structs.replace(shares, devices=tuple(rows), library_finding=reading.finding)


# Finds containers that use more memory of a GPU than was allocated to them, in several consecutive measurements.
#
# A single measurement proves nothing: it can include the memory of a process that ends and of its successor. Only
# containers with an amount are checked; a time slice has none. If the use by a container is unknown, the measurement
# does not count for it, but does not end its series. A measurement shortly after one that counted is ignored, whoever
# requested it, because it shows nearly the same state.
#
# Example: measurements at 0, 15, 16 and 30 s are all above the allocated amount. The one at 16 s does not count, and
# the one at 30 s is the third.


SAMPLES = 3
"""Number of consecutive measurements after which a container is reported to use more than was allocated to it."""
APART_SECONDS = 7.5
"""Minimum time between two measurements that count: half the interval of the measurements of a node's allocator."""


class Excess(NamedTuple):
    """A container that uses more memory of a device than was allocated to it."""

    device: DeviceID
    holder: HolderUse


class ExcessWatch(msgspec.Struct, frozen=True, kw_only=True):
    """Counts measurements. Frozen: `after` returns the next state."""

    time: float | None = None
    """Time of the newest measurement that counted, in seconds since 1970. None: there is none yet."""
    rows: Mapping[object, int] = {}
    """Device and container -> number of consecutive measurements above the allocated amount."""
    lasting: tuple[Excess, ...] = ()
    """Containers with `SAMPLES` or more such measurements."""
    begun: tuple[Excess, ...] = ()
    """Those of `lasting` that reached `SAMPLES` with the newest measurement."""

    def counts(self, time: float) -> bool:
        """Whether a measurement at this time (seconds since 1970) counts. It also counts if the clock was set back."""
        return self.time is None or abs(time - self.time) >= APART_SECONDS

    def after(self, shares: NodeShares) -> "ExcessWatch":
        """The state after this measurement. If it does not count, only `begun` changes: it becomes empty."""
        if not self.counts(shares.time):
            return msgspec.structs.replace(self, begun=())
        rows: dict[object, int] = {}
        lasting = []
        begun = []
        for row in shares.devices:
            for holder in row.holders:
                key = (row.device, holder.allocations)
                before = self.rows.get(key, 0)
                if holder.memory is None:
                    rows[key] = 0
                elif holder.use.memory is None:
                    rows[key] = before
                else:
                    rows[key] = before + 1 if holder.use.memory > holder.memory else 0
                if rows[key] >= SAMPLES:
                    lasting.append(Excess(row.device, holder))
                    if before < SAMPLES:
                        begun.append(lasting[-1])
        return ExcessWatch(
            time=shares.time,
            rows={key: count for key, count in rows.items() if count},
            lasting=tuple(lasting),
            begun=tuple(begun),
        )

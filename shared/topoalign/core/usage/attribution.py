"""
Attributes measured use of GPUs to the containers that hold them.

A process belongs to the container that holds the GPU, or the MIG instance, on which it runs: the pod's UID must be that of
the allocation, and the name of the container too, where both are known. All others are listed next to the holders,
because a user who finds a GPU busy looks for them: processes of the host, of pods that were given no GPU, of containers
that were given another one. Nothing is guessed: a process of which nobody knows where it runs belongs to nobody, and then
what the holders use is not known either.

Example: a pod holds GPU-0, and uses 12 GiB of it; an X server of the host has 1 GiB.

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
"""Where processes run that hold nothing of a device: in a pod, in none, or unknown."""


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """What some processes use of one device. None: not known, which is not 0."""

    memory: int | None
    """Bytes, in all."""
    utilization: int | None
    """Percent of the last second, in all; kernels of several processes may run at the same time."""
    processes: tuple[GpuProcess, ...]


class HolderUse(msgspec.Struct, frozen=True, kw_only=True):
    """A container that holds a device or a part of it, and what it uses. One that uses nothing is listed as well."""

    owner: Owner | None
    """None: the kubelet has not reported yet for whom it is."""
    pod_uid: str
    """Empty: not known; then its processes cannot be distinguished from others."""
    allocations: tuple[AllocationID, ...]
    devices: tuple[DeviceID, ...]
    """What it holds of the device, under the ids that were handed out: `GPU-x::3`."""
    cores: int | None
    """Hundredths of the device's computing time; 0: memory alone. None: a time slice, which has no share."""
    memory: int | None
    """Bytes; all of them with all computing time, unless in slots. None: a time slice."""
    use: Use
    library: LibraryCount | None = None
    """What the library that limits it counts; the container writes it, so it is not reliable. None: not known."""

    @property
    def memory_left(self) -> int | None:
        """Bytes that it was given and does not use; 0 for one that uses more. None: not known, or not given by amount."""
        if self.memory is None or self.use.memory is None:
            return None
        return max(0, self.memory - self.use.memory)


class OtherUse(msgspec.Struct, frozen=True, kw_only=True):
    """Processes of one container or control group that holds nothing of the device, and what they use."""

    where: Where
    owner: Owner | None
    """Of a pod that holds something else of this node, or held this before; its container is empty where not known."""
    pod_uid: str
    container_id: str
    cgroup: str
    use: Use


class DeviceShares(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU or MIG instance: who holds it, and who uses it."""

    device: DeviceID
    gpu: DeviceID
    """The GPU that it is, or is an instance of."""
    memory: int | None
    """Bytes in all. None, here and below: not known."""
    memory_used: int | None
    utilization: int | None
    memory_utilization: int | None
    """Percent of the last sampling period in which its memory was read or written."""
    failure: str
    """Why it was not measured; empty: it was."""
    holders: tuple[HolderUse, ...]
    others: tuple[OtherUse, ...]


class NodeShares(msgspec.Struct, frozen=True, kw_only=True):
    """All GPUs of a node."""

    node: NodeName
    time: float
    """When it was measured: wall seconds."""
    devices: tuple[DeviceShares, ...]
    """GPUs in the order of the node, each followed by its MIG instances."""
    finding: str
    """Why it is not known where processes run; empty: it is."""
    left_out: int
    """Processes that were not listed because there are too many."""
    library_finding: str = ""
    """Why it is not known what the libraries that limit containers count; empty: it is, or there are none."""


Place = tuple[str, str, str, str]
"""What processes of one group have in common: pod UID, container id, container name, control group."""


def attribute_use(state: NodeState, measured: Measurement) -> NodeShares:
    """What the containers of a node use of its GPUs. GPUs that are known and were not measured are listed, too."""
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
    # of an instance also the whole GPU, in the order of the allocations
    instances = {gpu.id: tuple(instance.uuid for instance in gpu.mig or ()) for gpu in state.hardware.gpus}
    found = defaultdict[DeviceID, list[HeldShare]](list)
    for each in all_held(state):
        holding = each.holding
        is_whole = isinstance(holding.part, Whole)
        for device in (holding.base, *(instances.get(holding.device, ()) if is_whole else ())):
            found[device].append(each)
    return found


def _owners_by_pod(allocations: Iterable[Allocation]) -> dict[str, Owner]:
    # also of pods that held what another one has now
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
    unclear = {"", *(uid for uid, _, container, _ in others if not container)}  # their processes may be among others

    holders = []
    for group, processes in zip(groups, theirs, strict=True):
        first = group[0].allocation
        # whether it is known which processes are those of this pod
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
    # if its container is not known, a process belongs to the only holder of its pod
    if identity is None or not identity.pod_uid:
        return None
    same_pod = [at for at, each in enumerate(holders) if each.pod_uid == identity.pod_uid]
    if identity.container:
        names = {at: owner.container for at in same_pod if (owner := holders[at].owner) is not None}
        return next((at for at, name in names.items() if name == identity.container), None)
    return same_pod[0] if len(same_pod) == 1 else None


def _sum_use(processes: Sequence[GpuProcess], *, is_complete: bool) -> Use:
    # `is_complete`: whether there are no more processes than these
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


# What the library that limits a container counts, in addition to what the driver measures.
#
# The two differ, and neither corrects the other: the driver reports what the processes of a container have, contexts among
# it; the library counts what it has seen, and the container could write anything into its file. So a count stands with the
# container that it is of, for GPUs that this holds, and nothing else uses it.


def has_library(state: NodeState) -> bool:
    """Whether containers of the node may be limited by a library that shares files: so the library is asked."""
    return any(offer.limiter == "hami-core" for offer in state.hardware.offered)


def with_library(shares: NodeShares, reading: LibraryReading) -> NodeShares:
    """The same, each holder with what its library counts of the device; a device that it does not hold is skipped."""
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


# Finds containers that use more memory of a GPU than they were given, for several measurements in a row.
#
# One measurement proves nothing: memory of a process that ends may count together with that of its successor. Only a
# container that was given an amount can use more of it; a time slice has none. A measurement without what a
# container uses neither counts nor ends a row. Nor does one shortly after another that counted, whoever asked for the
# two: they are of the same moment.
#
# Example: measurements at 0, 15, 16, 30 s, all above what was given. That at 16 s does not count; that at 30 s is the
# third.


SAMPLES = 3
"""Measurements in a row after which a container is reported to use more than it was given."""
APART_SECONDS = 7.5
"""Between two measurements that count: half of what the allocator of a node lets pass between two of its own."""


class Excess(NamedTuple):
    """A container that uses more memory of a device than it was given."""

    device: DeviceID
    holder: HolderUse


class ExcessWatch(msgspec.Struct, frozen=True, kw_only=True):
    """Counts measurements. Frozen: `after` returns the next one."""

    time: float | None = None
    """Of the newest measurement that was counted, in wall seconds."""
    rows: Mapping[object, int] = {}
    """Device and container -> measurements in a row above what was given."""
    lasting: tuple[Excess, ...] = ()
    """Those that are above it for `SAMPLES` measurements or more."""
    begun: tuple[Excess, ...] = ()
    """Those among them for which the newest measurement was the last that it took."""

    def counts(self, time: float) -> bool:
        """Whether a measurement at this time, in wall seconds, would count. Behind a clock that was set back it does."""
        return self.time is None or abs(time - self.time) >= APART_SECONDS

    def after(self, shares: NodeShares) -> "ExcessWatch":
        """What is known after this measurement. One that does not count changes nothing, and nothing begins."""
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

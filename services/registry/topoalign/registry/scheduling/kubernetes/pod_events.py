"""
Writes Events of pods in addition to the scheduler's: the reservation, why a bind failed, and why no node admits the pod,
with the counts that the scheduler's texts must not have.

An Event changes no pod and triggers no retry. `EventWriter` bounds their number.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext

from topoalign.core.model.errors import TopoalignError, clean, quoted
from topoalign.core.model.ids import NodeName
from topoalign.core.model.reservations import Reservation
from topoalign.registry.ports import PodEvent
from topoalign.registry.scheduling.scheduling_api import BindsPods, PodToSchedule

MOST_CODES = 5
"""Reasons that an Event names."""


class BindEvents:
    """Binds pods through another binder, and writes Events about it."""

    def __init__(
        self,
        binder: BindsPods,
        reserved: Callable[[str], Mapping[NodeName, Reservation]],
        submit: Callable[[PodEvent], None],
        claim: Callable[[str, NodeName], AbstractContextManager[object]] = lambda uid, node: nullcontext(),
    ) -> None:
        """
        `reserved`: UID of a pod -> its reservations by node. `submit` queues an Event. `claim`: a context in which the
        pod of this UID counts against the quota of its namespace, as a pod of this node; raises if it exceeds the quota.
        """
        self._binder = binder
        self._reserved = reserved
        self._submit = submit
        self._claim = claim

    async def bind(self, namespace: str, name: str, uid: str, node: NodeName) -> None:
        """As `Scheduling.bind`."""
        try:
            with self._claim(uid, node):
                await self._binder.bind(namespace, name, uid, node)
        except TopoalignError as error:
            note = f"not bound to {clean(node)}: {error.code}: {error.finding}; {error.remedy}"
            self._submit(
                PodEvent(namespace=namespace, name=name, uid=uid, reason="BindFailed", note=note, kind="Warning")
            )
            raise
        reservation = self._reserved(uid).get(node)
        devices = [] if reservation is None else list_reserved_devices(reservation)
        if devices:
            note = f"reserved on {clean(node)}: {quoted(devices)}"
            self._submit(PodEvent(namespace=namespace, name=name, uid=uid, reason="DevicesReserved", note=note))


class RefusalEvents:
    """Writes Events about pods that no node admits."""

    def __init__(self, submit: Callable[[PodEvent], None], nodes: Collection[NodeName]) -> None:
        """`submit` queues an Event. `nodes`: those of Kubernetes."""
        self._submit = submit
        self._nodes = nodes

    def refuse(self, pod: PodToSchedule, counts: Counter[str]) -> None:
        """Writes an Event that no node admits the pod. `counts`: label of a refusal -> the number of nodes."""
        namespace = pod.request.namespace
        name = pod.request.name
        why = "; ".join(f"{label} on {count}" for label, count in counts.most_common(MOST_CODES))
        asked = f"{counts.total()} node{'s' if counts.total() != 1 else ''} that the scheduler asked about"
        note = (
            f"none of the {asked} (the cluster has {len(self._nodes)}) admits the pod: {why}; "
            f"see `topoalign why {clean(namespace)}/{clean(name)}`"
        )
        identity = " ".join(sorted(counts))  # counts change with every pod of the cluster
        self._submit(
            PodEvent(
                namespace=namespace,
                name=name,
                uid=pod.uid,
                reason="NoNodeFits",
                note=note,
                identity=identity,
                kind="Warning",
            )
        )


def list_reserved_devices(reservation: Reservation) -> list[str]:
    """Returns all reserved devices of a pod, container by container."""
    return [
        device
        for container in reservation.containers
        for devices in (container.devices, container.co_allocated)
        for ids in devices.values()
        for device in ids
    ]

"""
Enforces ResourceQuotas for parts of GPUs.

    a new pod       counts together with all pods of the namespace that have not ended, as in Kubernetes' own quotas
    a pending pod   counts together with the pods that are bound, being bound or reserved: otherwise, pods that were
                    created at the same time could block each other forever

Only pods that request resources with a quota are checked. Until the quotas are listed, pods that request such resources
wait (`QuotasUnknown`). If a pod requests GPUs without an amount, the size of the node's GPUs counts, so the result can
differ between nodes. A new pod has no node yet, so only the amounts in its request count. Quotas with scopes are not
enforced, and a warning is logged.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec
import structlog

from topoalign.core.model.errors import InvalidField, Unavailable, clean
from topoalign.core.model.ids import NodeName, ResourceName
from topoalign.core.model.requests import PodRequest
from topoalign.core.model.topology.device_offers import Slots
from topoalign.core.sharing.quota_amounts import (
    UNKNOWN_SIZES,
    Amounts,
    GpuSizes,
    OverQuota,
    PerGpu,
    amounts_per_gpu,
    check_quota,
    lowest_limits,
    quota_amounts,
    sum_quota_amounts,
)
from topoalign.registry.ports import SeenPod, SeenQuota
from topoalign.registry.scheduling.cluster_state.offered import OfferedResources
from topoalign.registry.scheduling.scheduling_api import PodToSchedule

log = structlog.get_logger("topoalign.registry.scheduling")


class NamespaceUse:
    """The pods of one namespace that request devices and have not ended, and the sums of their amounts."""

    def __init__(self, offers: OfferedResources) -> None:
        self.pods: dict[str, PodRequest] = {}
        """UID of a pod -> its request."""
        self.bound: dict[str, NodeName] = {}
        """UID of a bound pod -> its node."""
        self._offers = offers
        self._per_gpu: PerGpu | None = None
        """The resource names with which the pods were counted; None: they have not been counted yet."""
        self._version = 0
        """The version of the GPU sizes with which the pods were counted."""
        self._amounts: dict[str, tuple[GpuSizes, Amounts]] = {}
        """UID of a pod -> the sizes of its node's GPUs, and its amounts; without a node, those in its request."""
        # The sums are updated at each change of a pod, because adding up 5,000 pods in each filter call takes 9 ms.
        self._all: Counter[ResourceName] = Counter()
        self._of_bound: Counter[ResourceName] = Counter()

    def add(self, uid: str, request: PodRequest) -> None:
        """Adds a new pod."""
        self.pods[uid] = request
        self._count(uid)

    def bind(self, uid: str, node: NodeName) -> None:
        """Records the node of a pod, until its end."""
        if self.bound.get(uid) != node:
            self._uncount(uid)
            self.bound[uid] = node
            self._count(uid)

    def end(self, uid: str) -> None:
        """Removes a pod that has ended."""
        self._uncount(uid)
        del self.pods[uid]
        self.bound.pop(uid, None)

    def all(self) -> Amounts:
        """The sum of all pods. For a pod without a node, only the amounts in its request count."""
        self._count_all()
        return self._all

    def placed(self, others: Mapping[str, NodeName], without: Collection[str]) -> Amounts:
        """The sum of the bound pods and the `others` on their nodes, except the pods in `without`."""
        per_gpu = self._count_all()
        used = self._of_bound.copy()
        for uid in self.bound.keys() & without:
            used.subtract(self._amounts[uid][1])
        for uid in (others.keys() & self._amounts.keys()) - self.bound.keys() - {*without}:
            used.update(quota_amounts(self.pods[uid], per_gpu, self._offers.sizes_on(others[uid])))
        return used

    def of(self, uids: Collection[str], node: NodeName | None) -> Amounts:
        """The sum of these pods on this node; None: only the amounts in their requests count."""
        sizes = self._offers.sizes_on(node)
        per_gpu = amounts_per_gpu(self._offers.slots)
        return sum_quota_amounts(quota_amounts(self.pods[uid], per_gpu, sizes) for uid in uids if uid in self.pods)

    def _count_all(self) -> PerGpu:
        """Counts pods again if their resource names or GPU sizes have changed. Returns the resource names."""
        per_gpu = amounts_per_gpu(self._offers.slots)
        is_renamed = per_gpu != self._per_gpu
        if is_renamed or self._version != self._offers.sizes_version:
            self._per_gpu = per_gpu
            self._version = self._offers.sizes_version
            for uid in self.pods:
                if is_renamed or self._offers.sizes_on(self.bound.get(uid)) is not self._amounts[uid][0]:
                    self._uncount(uid)
                    self._count(uid)
        return per_gpu

    def _count(self, uid: str) -> None:
        if self._per_gpu is None:
            return
        sizes = self._offers.sizes_on(self.bound.get(uid))
        amounts = quota_amounts(self.pods[uid], self._per_gpu, sizes)
        self._amounts[uid] = sizes, amounts
        self._all.update(amounts)
        if uid in self.bound:
            self._of_bound.update(amounts)

    def _uncount(self, uid: str) -> None:
        _, amounts = self._amounts.pop(uid, (UNKNOWN_SIZES, {}))
        self._all.subtract(amounts)
        if uid in self.bound:
            self._of_bound.subtract(amounts)


class QuotasUnknown(Unavailable):
    """
    Raised while the ResourceQuotas are not read yet.

    Remedy: Wait; if it stays so, let the registry list and watch `resourcequotas`.
    """

    def __init__(self) -> None:
        super().__init__(
            "the ResourceQuotas of Kubernetes are not listed yet, and they may limit resources of the pod",
            "wait; if it stays so, check that the registry may list and watch resourcequotas (deploy/kubernetes)",
        )


class Quotas:
    """The quotas of all namespaces, and the pods that count against them."""

    def __init__(
        self,
        offers: OfferedResources,
        reserved: Callable[[], Mapping[str, Collection[NodeName]]],
        mates: Callable[[str], Collection[str]] = lambda uid: (),
    ) -> None:
        """
        `reserved`: UID of each reserved pod -> its nodes. `mates`: UID of a pod -> UIDs of the pending pods of its
        gang, which are reserved together.
        """
        self.listed = False
        """Whether all quotas are known."""
        self._offers = offers
        self._reserved = reserved
        self._mates = mates
        self._quotas: dict[str, SeenQuota] = {}
        self._limits: dict[str, Amounts] = {}
        """Namespace -> the lowest limits of its quotas."""
        self._held: dict[str, NamespaceUse] = {}
        """Namespace -> its pods."""
        self._namespaces: dict[str, str] = {}
        """UID of a pod that requests devices -> its namespace."""
        self._claims: dict[str, tuple[NodeName, Collection[str]]] = {}
        """UID of a pod that is being bound -> its node, and the UIDs of its gang's pods if not reserved yet."""

    def see(self, quota: SeenQuota) -> bool:
        """Records a quota. Returns whether a limit has changed; Kubernetes also updates the usage in a quota."""
        if self._quotas.get(quota.uid) == quota:
            return False
        if quota.scoped and quota.limits:
            log.warning("quota with scopes not enforced", namespace=clean(quota.namespace), quota=clean(quota.name))
        self._quotas[quota.uid] = quota
        return self._renew(quota.namespace)

    def lose(self, uid: str) -> bool:
        """Removes a quota. Returns whether it limited anything."""
        gone = self._quotas.pop(uid, None)
        return gone is not None and self._renew(gone.namespace)

    def _renew(self, namespace: str) -> bool:
        here = [each for each in self._quotas.values() if each.namespace == namespace and not each.scoped]
        before = self._limits.pop(namespace, {})
        now = lowest_limits(each.limits for each in here)
        if now:
            self._limits[namespace] = now
        return before != now

    def see_pod(self, pod: SeenPod) -> None:
        """Records a pod that has not ended. The request of a pod does not change."""
        if pod.uid not in self._namespaces:
            if not any("/" in name for name, _ in pod.limits()):  # true for most pods, which are not parsed
                return
            try:
                request = without_annotations(pod).to_schedule().request
            except InvalidField:  # no kubelet allocates anything to it
                return
            self._add(pod.uid, request)
        if pod.node is not None:
            self._held[pod.namespace].bind(pod.uid, pod.node)

    def _add(self, uid: str, request: PodRequest) -> None:
        self._namespaces[uid] = request.namespace
        held = self._held.setdefault(request.namespace, NamespaceUse(self._offers))
        held.add(uid, msgspec.structs.replace(request, annotations={}))

    def end_pod(self, uid: str) -> None:
        """Removes a pod that has ended or was deleted."""
        namespace = self._namespaces.pop(uid, None)
        if namespace is not None:
            self._held[namespace].end(uid)
            if not self._held[namespace].pods:
                del self._held[namespace]

    def check_new(self, pod: PodRequest) -> None:
        """Checks a pod that is to be created. Raises OverQuota and QuotasUnknown."""
        self._check(pod, None, lambda held: held.all())

    def check_waiting(self, pod: PodToSchedule, node: NodeName | None = None, without: Collection[str] = ()) -> None:
        """
        Checks a pending pod and its gang on this node (None: by requested amounts). Raises OverQuota and QuotasUnknown.
        """
        if self.listed and not self._limits.get(pod.request.namespace):
            return
        places = self._places()
        held = self._held.get(pod.request.namespace)
        counting = places.keys() | (held.bound.keys() if held is not None else ())
        if pod.uid not in counting:
            mates = {*self._mates(pod.uid)} - {pod.uid} - counting
            self._check(pod.request, node, lambda held: held.placed(places, (pod.uid, *without)), mates)

    def full_on(
        self, pod: PodToSchedule, nodes: Sequence[NodeName], without: Collection[str] = ()
    ) -> frozenset[NodeName]:
        """The nodes on which a pending pod exceeds its quota. `without`: UIDs of ignored pods. Raises QuotasUnknown."""
        if self.listed and not self._limits.get(pod.request.namespace):
            return frozenset()
        by_sizes: dict[int, list[NodeName]] = {}
        for node in nodes:
            by_sizes.setdefault(id(self._offers.sizes_on(node)), []).append(node)
        full = (alike for alike in by_sizes.values() if not quota_has_room(self, pod, alike[0], without))
        return frozenset(node for alike in full for node in alike)

    @contextmanager
    def claim(self, pod: PodToSchedule, node: NodeName) -> Iterator[None]:
        """Counts a pod and its gang on this node while it is being bound. Raises the errors of `check_waiting`."""
        self.check_waiting(pod, node)
        is_reported = pod.uid in self._namespaces
        if not is_reported:
            self._add(pod.uid, pod.request)
        # If the pod is reserved, its gang is reserved too, and each pod of the gang counts on its own node.
        self._claims[pod.uid] = node, () if pod.uid in self._reserved() else self._mates(pod.uid)
        try:
            yield
        except BaseException:
            if not is_reported:
                self.end_pod(pod.uid)
            raise
        else:
            # The pod still counts, because its reservation may end before Kubernetes reports the bind.
            if pod.uid in self._namespaces:
                self._held[pod.request.namespace].bind(pod.uid, node)
        finally:
            self._claims.pop(pod.uid, None)

    def _places(self) -> dict[str, NodeName]:
        """UID of each pod that is being bound or reserved -> its node; of several reserved nodes, the first by name."""
        of_gangs = {mate: node for node, mates in self._claims.values() for mate in mates}
        being_bound = {uid: node for uid, (node, _) in self._claims.items()}
        return {uid: min(nodes) for uid, nodes in self._reserved().items()} | of_gangs | being_bound

    def _check(
        self,
        pod: PodRequest,
        node: NodeName | None,
        used: Callable[[NamespaceUse], Amounts],
        mates: Collection[str] = (),
    ) -> None:
        """`used`: the sum of the other pods that count; `mates`: UIDs of the other pods of its gang."""
        per_gpu = amounts_per_gpu(self._offers.slots)
        counted = {*per_gpu, *(name for each in self._offers.units for name, _ in each.units)}
        amounts = quota_amounts(pod, per_gpu, self._offers.sizes_on(node))
        held = self._held.get(pod.namespace) or NamespaceUse(self._offers)
        if mates:
            amounts = sum_quota_amounts((amounts, held.of(mates, node)))
        asked = {name: amount for name, amount in amounts.items() if amount and name in counted}
        if not self.listed:
            percentages = {Slots().percentage, *(each.slots.percentage for each in self._offers.slots)}
            if any(
                name in counted or name in percentages for name, amount in quota_amounts(pod, per_gpu).items() if amount
            ):
                raise QuotasUnknown
            return
        limits = self._limits.get(pod.namespace)
        if limits is not None and not limits.keys().isdisjoint(asked):
            check_quota(pod.namespace, asked, used(held), limits, "this gang" if mates else "this pod")


def quota_has_room(quotas: Quotas | None, pod: PodToSchedule, node: NodeName, gone: Collection[str]) -> bool:
    """Whether the quota would have room for a pending pod on a node if these pods were gone. Raises QuotasUnknown."""
    try:
        if quotas is not None:
            quotas.check_waiting(pod, node, gone)
    except OverQuota:
        return False
    return True


def without_annotations(pod: SeenPod) -> SeenPod:
    """The pod without annotations. Users can change them while the pod runs; the kubelet and quotas ignore them."""
    metadata = pod.content.metadata
    if metadata is None or not metadata.annotations:
        return pod
    alone = msgspec.structs.replace(metadata, annotations=None)
    return msgspec.structs.replace(pod, content=msgspec.structs.replace(pod.content, metadata=alone))

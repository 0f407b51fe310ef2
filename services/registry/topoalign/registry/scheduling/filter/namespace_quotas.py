"""
Enforces ResourceQuotas for parts of GPUs.

    new pods       are added to all pods of the namespace that have not ended, as in Kubernetes' own quotas
    waiting pods   are added to those that are bound, reserved or being bound: pods that were created at the same moment
                   would otherwise keep each other waiting for ever

Only pods that request resources with a quota are checked. Until the quotas are listed, pods with an amount wait
(`QuotasUnknown`). If a pod has no amount, the size of its node's GPUs counts, so the result may differ from node to node. A
new pod has no node yet, so only its own amounts count. Quotas with scopes are not enforced; this is logged.
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
    """The pods of one namespace that ask for devices and have not ended, and their sums."""

    def __init__(self, offers: OfferedResources) -> None:
        self.pods: dict[str, PodRequest] = {}
        """UID -> its request."""
        self.bound: dict[str, NodeName] = {}
        """UID -> node."""
        self._offers = offers
        self._per_gpu: PerGpu | None = None
        """The resource names by which the pods were counted; None: they were not counted yet."""
        self._version = 0
        """Of the sizes by which the pods were counted."""
        self._sizes: dict[str, GpuSizes] = {}
        """UID -> sizes by which the pod was counted."""
        self._amounts: dict[str, Amounts] = {}
        """UID -> amounts on its node; without a node only the amounts in its request."""
        self._elsewhere: dict[str, tuple[GpuSizes, Amounts]] = {}
        """UID of a pod without a node -> its amounts with GPUs of this size, as requested last."""
        # The sums are updated at each change of a pod, because adding up 5,000 pods in each filter call takes 9 ms.
        self._all: Counter[ResourceName] = Counter()
        self._of_bound: Counter[ResourceName] = Counter()

    def add(self, uid: str, request: PodRequest) -> None:
        """Adds a new pod."""
        self.pods[uid] = request
        if self._per_gpu is not None:
            self._count(uid, self._per_gpu)

    def bind(self, uid: str, node: NodeName) -> None:
        """Records the node of a pod, until its end."""
        if self.bound.get(uid) != node:
            self._uncount(uid)
            self.bound[uid] = node
            if self._per_gpu is not None:
                self._count(uid, self._per_gpu)

    def end(self, uid: str) -> None:
        """Removes a pod that has ended."""
        self._uncount(uid)
        del self.pods[uid]
        self.bound.pop(uid, None)

    def all(self) -> Amounts:
        """The sum of all pods; pods without a node count with the amounts that they name."""
        self._count_all()
        return self._all

    def placed(self, others: Mapping[str, NodeName], without: Collection[str]) -> Amounts:
        """The sum of the bound pods and of these `others` on their nodes, without the pods `without`."""
        per_gpu = self._count_all()
        used = self._of_bound.copy()
        for uid in self.bound.keys() & without:
            used.subtract(self._amounts[uid])
        for uid in (others.keys() & self._amounts.keys()) - self.bound.keys() - {*without}:
            used.update(self._amounts_on(uid, others[uid], per_gpu))
        return used

    def of(self, uids: Collection[str], node: NodeName | None) -> Amounts:
        """The sum of these pods on this node; None: of the amounts that they name."""
        per_gpu = self._count_all()
        return sum_quota_amounts(self._amounts_on(uid, node, per_gpu) for uid in uids if uid in self._amounts)

    def _amounts_on(self, uid: str, node: NodeName | None, per_gpu: PerGpu) -> Amounts:
        """The amounts of a pod without a node if it were on this one."""
        sizes = self._offers.sizes_on(node)
        known = self._elsewhere.get(uid)
        if known is None or known[0] != sizes:
            known = self._elsewhere[uid] = sizes, quota_amounts(self.pods[uid], per_gpu, sizes)
        return known[1]

    def _count_all(self) -> PerGpu:
        """Counts all pods by the offered sizes and names of amounts. Returns the names."""
        per_gpu = amounts_per_gpu(self._offers.slots)
        version = self._offers.sizes_version
        if per_gpu != self._per_gpu:  # nodes offer amounts under other names
            self._amounts = {}
            self._sizes = {}
            self._elsewhere = {}
            self._all.clear()
            self._of_bound.clear()
            for uid in self.pods:
                self._count(uid, per_gpu)
        elif version != self._version:  # the GPUs of a node have another size
            for uid, node in self.bound.items():
                if self._offers.sizes_on(node) is not self._sizes[uid]:
                    self._uncount(uid)
                    self._count(uid, per_gpu)
        self._per_gpu = per_gpu
        self._version = version
        return per_gpu

    def _count(self, uid: str, per_gpu: PerGpu) -> None:
        sizes = self._sizes[uid] = self._offers.sizes_on(self.bound.get(uid))
        amounts = self._amounts[uid] = quota_amounts(self.pods[uid], per_gpu, sizes)
        self._all.update(amounts)
        if uid in self.bound:
            self._of_bound.update(amounts)

    def _uncount(self, uid: str) -> None:
        amounts = self._amounts.pop(uid, {})
        self._sizes.pop(uid, None)
        self._elsewhere.pop(uid, None)
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
    """The quotas of all namespaces, and their pods that count."""

    def __init__(
        self,
        offers: OfferedResources,
        reserved: Callable[[], Mapping[str, Collection[NodeName]]],
        mates: Callable[[str], Collection[str]] = lambda uid: (),
        freed: Callable[[], None] = lambda: None,
    ) -> None:
        """
        `reserved`: UID of each reserved pod -> its nodes. `mates`: UID of a pod -> UIDs of the pending pods of its gang,
        which are reserved together. `freed` is called after a failed bind if another pod was refused because of it, because
        Kubernetes sends no event then.
        """
        self.listed = False
        """Whether all quotas are known."""
        self._offers = offers
        self._reserved = reserved
        self._mates = mates
        self._freed = freed
        self._quotas: dict[str, SeenQuota] = {}
        self._limits: dict[str, Amounts] = {}
        """Namespace -> the lowest limits of its quotas."""
        self._held: dict[str, NamespaceUse] = {}
        """By namespace."""
        self._namespaces: dict[str, str] = {}
        """UID of a pod that asks for devices -> its namespace."""
        self._claims = Counter[str]()
        """UIDs of pods that are being bound, and of their gangs."""
        self._claimed_on: dict[str, NodeName] = {}
        """UID of such a pod -> the node."""
        self._read = set[str]()
        """UIDs of pods that are being bound and that the watch has not reported yet."""
        self._refused_beside_claims = False
        """Whether a pod was refused while others were being bound. If their bind fails, the pod may fit."""

    def see(self, quota: SeenQuota) -> bool:
        """Records a quota. Returns whether a limit has changed, because Kubernetes also writes its counts into quotas."""
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
        """Notes a pod that has not ended. Its request does not change."""
        self._read.discard(pod.uid)
        if pod.uid not in self._namespaces:
            if not any("/" in name for name, _ in pod.limits()):  # true for most pods, which need not be read
                return
            try:
                request = without_annotations(pod).to_schedule().request
            except InvalidField:  # no kubelet gives it anything
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
        """Raises OverQuota and QuotasUnknown for a pod that is to be created."""
        self._check(pod, None, lambda held: held.all())

    def check_waiting(self, pod: PodToSchedule, node: NodeName | None = None, without: Collection[str] = ()) -> None:
        """Raises OverQuota and QuotasUnknown for a pod, with its gang, on this node; None: by the amounts in its request."""
        reserved = self._reserved()
        held = self._held.get(pod.request.namespace)
        bound: Collection[str] = held.bound if held is not None else ()

        def counts(uid: str) -> bool:
            return uid in self._claims or uid in reserved or uid in bound

        if counts(pod.uid):
            return
        mates = [each for each in self._mates(pod.uid) if each != pod.uid and not counts(each)]
        gone = (pod.uid, *without)
        self._check(pod.request, node, lambda held: held.placed(self._places(), gone), mates)

    def full_on(
        self, pod: PodToSchedule, nodes: Sequence[NodeName], without: Collection[str] = ()
    ) -> frozenset[NodeName]:
        """The nodes on which a waiting pod exceeds its quota. `without`: UIDs of pods to leave out. Raises QuotasUnknown."""
        if not self._limits.get(pod.request.namespace):
            return frozenset()
        by_sizes: dict[int, list[NodeName]] = {}
        for node in nodes:
            by_sizes.setdefault(id(self._offers.sizes_on(node)), []).append(node)
        full = (alike for alike in by_sizes.values() if not quota_has_room(self, pod, alike[0], without))
        return frozenset(node for alike in full for node in alike)

    @contextmanager
    def claim(self, uid: str, node: NodeName) -> Iterator[None]:
        """Counts the pod and its gang on this node while it is being bound. Raises as `check_waiting`."""
        namespace = self._namespaces.get(uid)
        if namespace is not None:
            self.check_waiting(PodToSchedule(uid=uid, request=self._held[namespace].pods[uid]), node)
        claimed = {uid, *self._mates(uid)}
        self._claims.update(claimed)
        self._claimed_on = {**dict.fromkeys(claimed, node), **self._claimed_on, uid: node}
        try:
            yield
        except BaseException:
            if self._refused_beside_claims:
                self._refused_beside_claims = False
                self._freed()
            raise
        else:
            # The pod still counts, because its reservation may end before Kubernetes reports the bind.
            if uid in self._namespaces and uid not in self._read:
                self._held[self._namespaces[uid]].bind(uid, node)
        finally:
            self._claims.subtract(claimed)
            self._claims = +self._claims
            self._claimed_on = {each: on for each, on in self._claimed_on.items() if each in self._claims}
            if uid in self._read and uid not in self._claims:
                self._read.discard(uid)
                self.end_pod(uid)

    def check_read(self, pod: PodToSchedule, node: NodeName) -> None:
        """Raises as `check_waiting` for an unreported pod that is being bound. It counts until the bind ends."""
        if pod.uid in self._namespaces or pod.uid not in self._claims:
            return
        if pod.uid not in self._reserved():
            self._check(pod.request, node, lambda held: held.placed(self._places(), (pod.uid,)))
        self._read.add(pod.uid)
        self._add(pod.uid, pod.request)

    def _places(self) -> Mapping[str, NodeName]:
        """UID of each pod that is being bound or reserved -> its node, the first one of several."""
        return {**{uid: min(nodes) for uid, nodes in self._reserved().items()}, **self._claimed_on}

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
            try:
                check_quota(pod.namespace, asked, used(held), limits, "this gang" if mates else "this pod")
            except OverQuota:
                self._refused_beside_claims |= bool(self._claims)
                raise


def quota_has_room(quotas: Quotas | None, pod: PodToSchedule, node: NodeName, gone: Collection[str]) -> bool:
    """Whether the quota of a waiting pod has room on a node if these pods were gone. Raises QuotasUnknown."""
    try:
        if quotas is not None:
            quotas.check_waiting(pod, node, gone)
    except OverQuota:
        return False
    return True


def without_annotations(pod: SeenPod) -> SeenPod:
    """The pod without annotations, which a user may change while it runs; kubelet and quotas ignore them."""
    metadata = pod.content.metadata
    if metadata is None or not metadata.annotations:
        return pod
    alone = msgspec.structs.replace(metadata, annotations=None)
    return msgspec.structs.replace(pod, content=msgspec.structs.replace(pod.content, metadata=alone))

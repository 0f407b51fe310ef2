"""
ResourceQuotas and who holds what of them: whether a namespace may have another pod with parts of GPUs.

    new pods       count beside all pods of the namespace that have not ended, as in Kubernetes' own quotas
    waiting pods   count beside those that are bound, reserved or being bound: pods that were created in the same moment
                   would else keep one another waiting for ever

Only pods that ask for what quotas count are looked at. While the quotas are not listed, such pods wait (`QuotasUnknown`).
A quota with scopes is about some pods only and is not counted; the log says so.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import msgspec
import structlog

from topoalign.core.model.errors import InvalidField, Unavailable, clean
from topoalign.core.model.requests import PodRequest
from topoalign.core.sharing.quotas import (
    Amounts,
    OverQuota,
    PerGpu,
    amounts_per_gpu,
    check_quota,
    lowest_limits,
    quota_amounts,
    total,
)
from topoalign.registry.ports import SeenPod, SeenQuota
from topoalign.registry.scheduling.model import PodToSchedule
from topoalign.registry.scheduling.namespace_use import NamespaceUse
from topoalign.registry.scheduling.offered import OfferedResources

log = structlog.get_logger("topoalign.registry.scheduling")


class QuotasUnknown(Unavailable):
    """Raised while it is not known which quotas there are."""

    code = "QuotasUnknown"

    def __init__(self) -> None:
        super().__init__(
            "the ResourceQuotas of Kubernetes are not listed yet, and the pod asks for what they limit",
            "wait; if it stays so, see whether the registry may list and watch resourcequotas (deploy/kubernetes)",
        )


class Quotas:
    """The quotas of all namespaces, and their pods that hold something that quotas count."""

    def __init__(self, offers: OfferedResources, reserved: Callable[[], Collection[str]]) -> None:
        """`reserved`: UIDs of the pods for which something is reserved."""
        self.listed = False
        """Whether all quotas are known."""
        self._offers, self._reserved = offers, reserved
        self._quotas: dict[str, SeenQuota] = {}
        self._limits: dict[str, Amounts] = {}
        """Namespace -> the lowest limits of its quotas."""
        self._held: dict[str, NamespaceUse] = {}
        """By namespace."""
        self._namespaces: dict[str, str] = {}
        """UID of a pod -> its namespace, if it asks for devices."""
        self._claims = Counter[str]()
        """UIDs of pods that are being bound, and of those that wait with them."""
        self._read = set[str]()
        """UIDs of pods that are being bound and not shown yet."""
        self._refused_beside_claims = False
        """Whether a pod was refused while others were being bound, which may fail."""
        self.freed: Callable[[], None] = lambda: None
        """Called when a bind has failed beside which a pod was refused: nothing in Kubernetes tells of it."""
        self.mates: Callable[[str], Collection[str]] = lambda uid: ()
        """UID of a pod -> those of the pods of its gang that wait for a node: all of them are reserved with the first."""

    def see(self, quota: SeenQuota) -> bool:
        """A quota is so now. Returns whether that is news: Kubernetes writes into quotas what it has counted itself."""
        if self._quotas.get(quota.uid) == quota:
            return False
        if quota.scoped and quota.limits:
            log.warning("a quota with scopes is not counted", namespace=clean(quota.namespace), quota=clean(quota.name))
        self._quotas[quota.uid] = quota
        return self._renew(quota.namespace)

    def lose(self, uid: str) -> bool:
        """A quota is gone. Returns whether it limited anything."""
        gone = self._quotas.pop(uid, None)
        return gone is not None and self._renew(gone.namespace)

    def _renew(self, namespace: str) -> bool:
        here = [each for each in self._quotas.values() if each.namespace == namespace and not each.scoped]
        before, now = self._limits.pop(namespace, {}), lowest_limits(each.limits for each in here)
        if now:
            self._limits[namespace] = now
        return before != now

    def see_pod(self, pod: SeenPod) -> None:
        """A pod is there that has not ended. What it asks for does not change."""
        self._read.discard(pod.uid)
        if pod.uid not in self._namespaces:
            if not names_devices(pod):
                return
            try:
                request = without_annotations(pod).to_schedule().request
            except InvalidField:  # no kubelet gives it anything
                return
            self._add(pod.uid, request)
        if pod.node is not None:
            self._held[pod.namespace].bind(pod.uid)

    def _add(self, uid: str, request: PodRequest) -> None:
        self._namespaces[uid] = request.namespace
        held = self._held.setdefault(request.namespace, NamespaceUse())
        held.add(uid, msgspec.structs.replace(request, annotations={}))

    def end_pod(self, uid: str) -> None:
        """A pod has ended, or is gone."""
        namespace = self._namespaces.pop(uid, None)
        if namespace is not None:
            self._held[namespace].end(uid)
            if not self._held[namespace].pods:
                del self._held[namespace]

    def check_new(self, pod: PodRequest) -> None:
        """Raises OverQuota and QuotasUnknown for a pod that is to be created."""
        self._check(pod, lambda held, per_gpu: held.all(per_gpu))

    def check_waiting(self, pod: PodToSchedule, without: Collection[str] = ()) -> None:
        """
        The same for a pod that is to be bound, with its gang. One that is placed counts already. `without`: UIDs of pods
        that count as gone.
        """
        self._check_one(pod.uid, pod.request, without)

    @contextmanager
    def claim(self, uid: str) -> Iterator[None]:
        """
        The pod and its gang count while it is being bound, for those that are asked about meanwhile; and the pod itself
        afterwards, if that does not fail: its node may have what was reserved for it on record before Kubernetes shows that
        it is bound. Raises as `check_waiting`.
        """
        namespace = self._namespaces.get(uid)
        if namespace is not None:
            self._check_one(uid, self._held[namespace].pods[uid])
        claimed = {uid, *self.mates(uid)}
        self._claims.update(claimed)
        try:
            yield
        except BaseException:
            if self._refused_beside_claims:
                self._refused_beside_claims = False
                self.freed()
            raise
        else:
            if uid in self._namespaces and uid not in self._read:
                self._held[self._namespaces[uid]].bind(uid)
        finally:
            self._claims.subtract(claimed)
            self._claims = +self._claims
            if uid in self._read and uid not in self._claims:
                self._read.discard(uid)
                self.end_pod(uid)

    def check_read(self, pod: PodToSchedule) -> None:
        """
        Raises as `check_waiting` for a pod that is being bound and was read, as it is not shown yet. From then on it counts
        until it is bound or not, and then from when it is shown.
        """
        if pod.uid in self._namespaces or pod.uid not in self._claims:
            return
        reserved = self._reserved()
        if pod.uid not in reserved:
            self._check(pod.request, lambda held, per_gpu: held.placed(per_gpu, (*self._claims, *reserved), (pod.uid,)))
        self._read.add(pod.uid)
        self._add(pod.uid, pod.request)

    def _check_one(self, uid: str, pod: PodRequest, without: Collection[str] = ()) -> None:
        reserved, held = self._reserved(), self._held.get(pod.namespace)
        bound = held.bound if held is not None else frozenset[str]()

        def counts(each: str) -> bool:
            return each in self._claims or each in reserved or each in bound

        if counts(uid):
            return
        mates = [each for each in self.mates(uid) if each != uid and not counts(each)]
        gone = (uid, *without)
        self._check(pod, lambda held, per_gpu: held.placed(per_gpu, (*self._claims, *reserved), gone), mates)

    def _check(
        self, pod: PodRequest, used: Callable[[NamespaceUse, PerGpu], Amounts], mates: Collection[str] = ()
    ) -> None:
        """`used`: what those pods of the namespace hold beside which it counts; `mates`: UIDs of the others of its gang."""
        per_gpu = amounts_per_gpu(self._offers.slots)
        counted = {*per_gpu, *(name for each in self._offers.units for name, _ in each.units)}
        amounts, held = quota_amounts(pod, per_gpu), self._held.get(pod.namespace, NamespaceUse())
        if mates:
            amounts = total((amounts, held.of(mates, per_gpu)))
        asked = {name: amount for name, amount in amounts.items() if amount and name in counted}
        if not asked:
            return
        if not self.listed:
            raise QuotasUnknown
        limits = self._limits.get(pod.namespace)
        if limits is not None and not limits.keys().isdisjoint(asked):
            try:
                check_quota(pod.namespace, asked, used(held, per_gpu), limits, "this gang" if mates else "this pod")
            except OverQuota:
                self._refused_beside_claims |= bool(self._claims)
                raise


def has_room(quotas: Quotas | None, pod: PodToSchedule, gone: Collection[str]) -> bool:
    """Whether the quota of its namespace has room for a waiting pod if these were gone. Raises QuotasUnknown."""
    try:
        if quotas is not None:
            quotas.check_waiting(pod, gone)
    except OverQuota:
        return False
    return True


def without_annotations(pod: SeenPod) -> SeenPod:
    """The pod with no annotations, which a user may change while it runs: its kubelet looks at none, nor do quotas."""
    metadata = pod.content.metadata
    if metadata is None or not metadata.annotations:
        return pod
    alone = msgspec.structs.replace(metadata, annotations=None)
    return msgspec.structs.replace(pod, content=msgspec.structs.replace(pod.content, metadata=alone))


def names_devices(pod: SeenPod) -> bool:
    """Whether a container has a limit of an extended resource. Most pods have none, and need not be read."""
    spec = pod.content.spec
    containers = () if spec is None else (*(spec.init_containers or ()), *(spec.containers or ()))
    return any("/" in name for each in containers if each.resources for name in each.resources.limits or ())

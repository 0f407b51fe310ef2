"""
ResourceQuotas and who holds what of them: whether a namespace may have another pod with parts of GPUs.

    new pods       count beside all pods of the namespace that have not ended, as in Kubernetes' own quotas
    waiting pods   count beside those that are bound, reserved or being bound: pods that were created in the same moment
                   would else keep one another waiting for ever

Only pods that ask for what quotas count are looked at. While the quotas are not listed, such pods wait (`QuotasUnknown`).
A quota with scopes is about some pods only and is not counted; the log says so.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import msgspec
import structlog

from topoalign.core.model.errors import InvalidField, Unavailable, clean
from topoalign.core.model.requests import PodRequest
from topoalign.core.sharing.quotas import (
    Amounts,
    PerGpu,
    amounts_per_gpu,
    check_quota,
    lowest_limits,
    quota_amounts,
    total,
)
from topoalign.registry.ports import SeenPod, SeenQuota
from topoalign.registry.scheduling.model import PodToSchedule
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

    def __init__(self, offers: OfferedResources, is_placed: Callable[[str], bool]) -> None:
        """`is_placed`: whether the pod of this UID is bound, or something is reserved for it."""
        self.listed = False
        """Whether all quotas are known."""
        self._offers, self._is_placed = offers, is_placed
        self._quotas: dict[str, SeenQuota] = {}
        self._limits: dict[str, Amounts] = {}
        """Namespace -> the lowest limits of its quotas."""
        self._held: dict[str, dict[str, PodRequest]] = {}
        """Namespace -> UID of a pod that asks for devices -> what it asks for."""
        self._namespaces: dict[str, str] = {}
        """UID of a pod -> its namespace, if it holds anything."""
        self._amounts: dict[str, Amounts] = {}
        """UID of a pod -> what it holds, where that was counted with the slots `_counted_by`."""
        self._counted_by = offers.slots
        self._claims = Counter[str]()
        """UIDs of pods that are being bound."""

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
        if pod.uid in self._namespaces or not names_devices(pod):
            return
        try:
            request = pod.to_schedule().request
        except InvalidField:  # no kubelet gives it anything
            return
        self._namespaces[pod.uid] = pod.namespace
        self._held.setdefault(pod.namespace, {})[pod.uid] = msgspec.structs.replace(request, annotations={})

    def end_pod(self, uid: str) -> None:
        """A pod has ended, or is gone."""
        namespace = self._namespaces.pop(uid, None)
        if namespace is not None:
            del self._held[namespace][uid]
            self._amounts.pop(uid, None)
            if not self._held[namespace]:
                del self._held[namespace]

    def check_new(self, pod: PodRequest) -> None:
        """Raises OverQuota and QuotasUnknown for a pod that is to be created."""
        self._check(pod, self._held.get(pod.namespace, ()))

    def check_waiting(self, pod: PodToSchedule) -> None:
        """The same for a pod that is to be bound. One that is placed counts already."""
        self._check_one(pod.uid, pod.request)

    @contextmanager
    def claim(self, uid: str) -> Iterator[None]:
        """The pod counts while it is being bound, for those that are asked about meanwhile. Raises as `check_waiting`."""
        namespace = self._namespaces.get(uid)
        if namespace is not None:
            self._check_one(uid, self._held[namespace][uid])
        self._claims[uid] += 1
        try:
            yield
        finally:
            self._claims[uid] -= 1
            if not self._claims[uid]:
                del self._claims[uid]

    def _check_one(self, uid: str, pod: PodRequest) -> None:
        if not self._counts(uid):
            held = self._held.get(pod.namespace, ())
            self._check(pod, (other for other in held if other != uid and self._counts(other)))

    def _counts(self, uid: str) -> bool:
        return uid in self._claims or self._is_placed(uid)

    def _check(self, pod: PodRequest, others: Iterable[str]) -> None:
        """`others`: UIDs of the pods of the namespace beside which it counts."""
        per_gpu = amounts_per_gpu(self._offers.slots)
        counted = {*per_gpu, *(name for each in self._offers.units for name, _ in each.units)}
        amounts = quota_amounts(pod, per_gpu)
        asked = {name: amount for name, amount in amounts.items() if amount and name in counted}
        if not asked:
            return
        if not self.listed:
            raise QuotasUnknown
        limits = self._limits.get(pod.namespace)
        if limits is not None and not limits.keys().isdisjoint(asked):
            used = total(self._amounts_of(other, pod.namespace, per_gpu) for other in others)
            check_quota(pod.namespace, asked, used, limits)

    def _amounts_of(self, uid: str, namespace: str, per_gpu: PerGpu) -> Amounts:
        """What a pod holds. Counted once for all that ask: a filter that counts 5,000 pods anew takes 50 ms."""
        if self._counted_by != self._offers.slots:
            self._amounts, self._counted_by = {}, self._offers.slots
        if uid not in self._amounts:
            self._amounts[uid] = quota_amounts(self._held[namespace][uid], per_gpu)
        return self._amounts[uid]


def names_devices(pod: SeenPod) -> bool:
    """Whether a container has a limit of an extended resource. Most pods have none, and need not be read."""
    spec = pod.content.spec
    containers = () if spec is None else (*(spec.init_containers or ()), *(spec.containers or ()))
    return any("/" in name for each in containers if each.resources for name in each.resources.limits or ())

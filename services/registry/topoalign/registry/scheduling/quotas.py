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
    PerGpu,
    amounts_per_gpu,
    check_quota,
    lowest_limits,
    quota_amounts,
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
        if pod.uid not in self._namespaces:
            if not names_devices(pod):
                return
            try:
                request = pod.to_schedule().request
            except InvalidField:  # no kubelet gives it anything
                return
            self._namespaces[pod.uid] = pod.namespace
            held = self._held.setdefault(pod.namespace, NamespaceUse())
            held.add(pod.uid, msgspec.structs.replace(request, annotations={}))
        if pod.node is not None:
            self._held[pod.namespace].bind(pod.uid)

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

    def check_waiting(self, pod: PodToSchedule) -> None:
        """The same for a pod that is to be bound. One that is placed counts already."""
        self._check_one(pod.uid, pod.request)

    @contextmanager
    def claim(self, uid: str) -> Iterator[None]:
        """The pod counts while it is being bound, for those that are asked about meanwhile. Raises as `check_waiting`."""
        namespace = self._namespaces.get(uid)
        if namespace is not None:
            self._check_one(uid, self._held[namespace].pods[uid])
        self._claims[uid] += 1
        try:
            yield
        finally:
            self._claims[uid] -= 1
            if not self._claims[uid]:
                del self._claims[uid]

    def _check_one(self, uid: str, pod: PodRequest) -> None:
        reserved, held = self._reserved(), self._held.get(pod.namespace)
        if uid in self._claims or uid in reserved or (held is not None and uid in held.bound):
            return
        self._check(pod, lambda held, per_gpu: held.placed(per_gpu, (*self._claims, *reserved), (uid,)))

    def _check(self, pod: PodRequest, used: Callable[[NamespaceUse, PerGpu], Amounts]) -> None:
        """`used`: what those pods of the namespace hold beside which it counts."""
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
            held = self._held.get(pod.namespace, NamespaceUse())
            check_quota(pod.namespace, asked, used(held, per_gpu), limits)


def names_devices(pod: SeenPod) -> bool:
    """Whether a container has a limit of an extended resource. Most pods have none, and need not be read."""
    spec = pod.content.spec
    containers = () if spec is None else (*(spec.init_containers or ()), *(spec.containers or ()))
    return any("/" in name for each in containers if each.resources for name in each.resources.limits or ())

"""
What the pods of a namespace hold together of what quotas count. It is counted as pods come, are bound and end: a filter that
adds up 5,000 pods at each call takes 9 ms. All of it is counted again when nodes offer amounts under other names, and the
pods of a node when its GPUs have another size: the size counts for what a pod does not name.
"""

from collections.abc import Collection, Mapping

from topoalign.core.model.ids import NodeName, ResourceName
from topoalign.core.model.requests import PodRequest
from topoalign.core.sharing.quotas import Amounts, GpuSizes, PerGpu, amounts_per_gpu, quota_amounts, total
from topoalign.registry.scheduling.cluster_state.offered import OfferedResources


class NamespaceUse:
    """The pods of one namespace that ask for devices and have not ended."""

    def __init__(self, offers: OfferedResources) -> None:
        self.pods: dict[str, PodRequest] = {}
        """UID -> what it asks for."""
        self.bound: dict[str, NodeName] = {}
        """UID -> its node, of those that have one."""
        self._offers = offers
        self._per_gpu: PerGpu | None = None
        """The names of amounts by which the pods were counted; None: they were not."""
        self._version = 0
        """Of the sizes by which they were."""
        self._sizes: dict[str, GpuSizes] = {}
        """UID -> those of its node by which it was counted."""
        self._amounts: dict[str, Amounts] = {}
        """UID -> what it holds on its node; without a node what it names."""
        self._elsewhere: dict[str, tuple[GpuSizes, Amounts]] = {}
        """UID -> what a pod without a node holds with GPUs of this size, as it was asked last."""
        self._all: dict[ResourceName, int] = {}
        self._of_bound: dict[ResourceName, int] = {}

    def add(self, uid: str, request: PodRequest) -> None:
        """A pod is there that was not."""
        self.pods[uid] = request
        if self._per_gpu is not None:
            self._count(uid, self._per_gpu)

    def bind(self, uid: str, node: NodeName) -> None:
        """The pod has this node, until its end."""
        if self.bound.get(uid) != node:
            self._uncount(uid)
            self.bound[uid] = node
            if self._per_gpu is not None:
                self._count(uid, self._per_gpu)

    def end(self, uid: str) -> None:
        """The pod holds nothing any more."""
        self._uncount(uid)
        del self.pods[uid]
        self.bound.pop(uid, None)

    def all(self) -> Amounts:
        """What all of them hold, those without a node as far as they name it."""
        self._count_all()
        return self._all

    def placed(self, others: Mapping[str, NodeName], without: Collection[str]) -> Amounts:
        """What those hold that are bound, and these others, which may be bound, on their nodes; but none of `without`."""
        per_gpu = self._count_all()
        used = dict(self._of_bound)
        for uid in self.bound.keys() & without:
            change(used, self._amounts[uid], -1)
        for uid in (others.keys() & self._amounts.keys()) - self.bound.keys() - {*without}:
            change(used, self._amounts_on(uid, others[uid], per_gpu), 1)
        return used

    def of(self, uids: Collection[str], node: NodeName | None) -> Amounts:
        """What these would hold together on this node; None: what they name."""
        per_gpu = self._count_all()
        return total(self._amounts_on(uid, node, per_gpu) for uid in uids if uid in self._amounts)

    def _amounts_on(self, uid: str, node: NodeName | None, per_gpu: PerGpu) -> Amounts:
        """What a pod without a node would hold on this one."""
        sizes = self._offers.sizes_on(node)
        known = self._elsewhere.get(uid)
        if known is None or known[0] != sizes:
            known = self._elsewhere[uid] = sizes, quota_amounts(self.pods[uid], per_gpu, sizes)
        return known[1]

    def _count_all(self) -> PerGpu:
        """Has all pods counted by the names of amounts, which it returns, and the sizes that are offered now."""
        per_gpu = amounts_per_gpu(self._offers.slots)
        version = self._offers.sizes_version
        if per_gpu != self._per_gpu:
            self._amounts = {}
            self._sizes = {}
            self._elsewhere = {}
            self._all = {}
            self._of_bound = {}
            for uid in self.pods:
                self._count(uid, per_gpu)
        elif version != self._version:
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
        change(self._all, amounts, 1)
        if uid in self.bound:
            change(self._of_bound, amounts, 1)

    def _uncount(self, uid: str) -> None:
        amounts = self._amounts.pop(uid, {})
        self._sizes.pop(uid, None)
        self._elsewhere.pop(uid, None)
        change(self._all, amounts, -1)
        if uid in self.bound:
            change(self._of_bound, amounts, -1)


def change(used: dict[ResourceName, int], amounts: Amounts, sign: int) -> None:
    """Adds the amounts, or takes them away."""
    for name, amount in amounts.items():
        used[name] = used.get(name, 0) + sign * amount

"""
What the pods of a namespace hold together of what quotas count. It is counted as pods come, are bound and end: a filter that
adds up 5,000 pods at each call takes 9 ms.
"""

from collections.abc import Collection, Iterable

from topoalign.core.model.ids import ResourceName
from topoalign.core.model.requests import PodRequest
from topoalign.core.sharing.quotas import Amounts, PerGpu, quota_amounts, total


class NamespaceUse:
    """The pods of one namespace that ask for devices and have not ended."""

    def __init__(self) -> None:
        self.pods: dict[str, PodRequest] = {}
        """UID -> what it asks for."""
        self.bound: set[str] = set()
        """UIDs of those that have a node."""
        self._amounts: dict[str, Amounts] = {}
        """UID -> what it holds, of those that were counted."""
        self._per_gpu: PerGpu | None = None
        """By which they were."""
        self._all: dict[ResourceName, int] = {}
        self._of_bound: dict[ResourceName, int] = {}

    def add(self, uid: str, request: PodRequest) -> None:
        """A pod is there that was not."""
        self.pods[uid] = request
        if self._per_gpu is not None:
            self._count(uid, self._per_gpu)

    def bind(self, uid: str) -> None:
        """The pod has a node, until its end."""
        if uid not in self.bound:
            self.bound.add(uid)
            change(self._of_bound, self._amounts.get(uid, {}), 1)

    def end(self, uid: str) -> None:
        """The pod holds nothing any more."""
        del self.pods[uid]
        amounts = self._amounts.pop(uid, {})
        change(self._all, amounts, -1)
        if uid in self.bound:
            self.bound.remove(uid)
            change(self._of_bound, amounts, -1)

    def all(self, per_gpu: PerGpu) -> Amounts:
        """What all of them hold."""
        self._count_all(per_gpu)
        return self._all

    def placed(self, per_gpu: PerGpu, others: Iterable[str], without: Collection[str]) -> Amounts:
        """What those hold that are bound, and these others, some of which may be bound; but none of `without`."""
        self._count_all(per_gpu)
        used = dict(self._of_bound)
        for uid in self.bound.intersection(without):
            change(used, self._amounts[uid], -1)
        for uid in {*others}.intersection(self._amounts).difference(self.bound, without):
            change(used, self._amounts[uid], 1)
        return used

    def of(self, uids: Collection[str], per_gpu: PerGpu) -> Amounts:
        """What these hold together."""
        self._count_all(per_gpu)
        return total(self._amounts[uid] for uid in uids if uid in self._amounts)

    def _count_all(self, per_gpu: PerGpu) -> None:
        if per_gpu == self._per_gpu:
            return
        self._per_gpu = per_gpu
        self._amounts, self._all, self._of_bound = {}, {}, {}
        for uid in self.pods:
            self._count(uid, per_gpu)

    def _count(self, uid: str, per_gpu: PerGpu) -> None:
        amounts = self._amounts[uid] = quota_amounts(self.pods[uid], per_gpu)
        change(self._all, amounts, 1)
        if uid in self.bound:
            change(self._of_bound, amounts, 1)


def change(used: dict[ResourceName, int], amounts: Amounts, sign: int) -> None:
    """Adds the amounts, or takes them away."""
    for name, amount in amounts.items():
        used[name] = used.get(name, 0) + sign * amount

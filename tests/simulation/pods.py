"""Pods as the API server wants them, and the directories that a kubelet makes for them."""

from typing import Literal

import msgspec

from topoalign.core.model.ids import ContainerName, PodName, ResourceName
from topoalign.core.ports import Clock
from topoalign.kubelet.files.pod_directories import PodDirectories

TIDY_SECONDS = 2.5
"""For so long the directory of a deleted pod stays."""


class Container(msgspec.Struct, frozen=True, kw_only=True):
    name: ContainerName
    role: Literal["init", "sidecar", "app"]
    limits: dict[ResourceName, int]
    """In the order in which the kubelet asks for them."""
    amounts: dict[ResourceName, int] = {}
    """What it asks for besides, of which no kubelet knows."""


class Pod(msgspec.Struct, frozen=True, kw_only=True):
    """What the API server wants to run here."""

    uid: str
    name: PodName
    containers: tuple[Container, ...]
    """Init containers and sidecars first, in the order in which they start."""
    volumes: bool = True
    """Whether it has any."""
    refused: bool = False
    """Whether the kubelet refuses it after Allocate, because another of its managers does."""
    breaks: bool = False
    """Whether it is refused when its last container has one of its resources and not the other ones."""
    cards: int = 1
    """Over how many GPUs the units of each of its containers are spread."""


class Directories:
    """`pods/<uid>` in the kubelet's root directory (spec/kubelet.md, section 12)."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._volumes: dict[str, bool] = {}
        """Pods with a directory -> whether they have volumes."""
        self._torn_down: set[str] = set()
        self._deleted: dict[str, float] = {}

    def make(self, pod: Pod) -> None:
        """Before the first container starts."""
        self._volumes[pod.uid] = pod.volumes

    def tear_down(self, uid: str) -> None:
        """All containers have ended; the pod is not deleted yet. Without volumes nothing can be seen of that."""
        if self._volumes.get(uid):
            self._torn_down.add(uid)

    def delete(self, uid: str) -> None:
        self._deleted.setdefault(uid, self._clock.monotonic())

    def now(self) -> PodDirectories:
        for uid, since in self._deleted.items():
            if self._clock.monotonic() - since >= TIDY_SECONDS:
                self._volumes.pop(uid, None)
        unreadable = frozenset(uid for uid, volumes in self._volumes.items() if not volumes)
        return PodDirectories(torn_down={uid: uid in self._torn_down for uid in self._volumes}, unreadable=unreadable)

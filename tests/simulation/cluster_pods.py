"""The pods of a simulated cluster as their users have them: what they ask for, and which belong together."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import msgspec
from simulation.cluster_world import ClusterWorld
from simulation.divisions import CORES
from simulation.registry_shares import AMOUNTS, asked_of

from topoalign.core.model.ids import GPU, ResourceName
from topoalign.core.model.requests import GANG, GANG_SIZE, PodRequest
from topoalign.kubelet.files.manifest import PodManifest as Manifest
from topoalign.kubelet.files.manifest import request_from_pod
from topoalign.testing.fake_api_server.objects import ApiError, Object

GANG_SIZES = (2, 3, 4)
NAMESPACE = "default"
COUNTED: Mapping[str, ResourceName] = {"units": CORES, "slots": AMOUNTS.cores}
"""What the quota of the namespace counts, by how GPUs are offered."""


class CreatedPod(NamedTuple):
    """A pod that was created."""

    name: str
    uid: str
    request: PodRequest
    priority: int
    gang: str
    """Empty: it belongs to none."""
    size: int
    """Of the gang."""
    counted: int
    """What the quota counts for it."""


class Pods:
    """All pods that were ever created."""

    def __init__(self, world: ClusterWorld, run_for: Callable[[str, float], None]) -> None:
        """`run_for` notes for how many seconds a pod will run."""
        self._world = world
        self._run_for = run_for
        self.created: dict[str, CreatedPod] = {}
        """By name; none is used twice."""
        self.by_uid: dict[str, CreatedPod] = {}
        self._gangs = 0

    def create(self, *, priority: int, seconds: float | None = None) -> None:
        limits, annotations = self._asked()
        pod = self._create(limits, annotations, priority)
        if seconds is not None:
            self._run_for(pod.name, seconds)

    def create_gang(self, size: int, members: int) -> Callable[[], None]:
        """Creates so many members of a new gang; what is returned creates another one."""
        limits, annotations = self._asked()
        self._gangs += 1
        annotations = {**annotations, GANG: f"gang-{self._gangs}", GANG_SIZE: str(size)}
        for _ in range(members):
            self._create(limits, annotations, 0)

        def create_another() -> None:
            self._create(limits, annotations, 0)

        return create_another

    def _asked(self) -> tuple[dict[ResourceName, int], dict[str, str]]:
        chance = self._world.chance
        if self._world.division == "whole":
            return {GPU: chance.choice((1, 1, 2, 2, 3, 4))}, {}
        return asked_of(self._world.division, chance)

    def _create(self, limits: Mapping[ResourceName, int], annotations: Mapping[str, str], priority: int) -> CreatedPod:
        name = f"p{len(self.created)}"
        amounts = {resource: str(amount) for resource, amount in limits.items()}
        container = {"name": "main", "image": "none", "resources": {"limits": amounts, "requests": amounts}}
        made = self._world.api.add_pod(
            {
                "metadata": {"name": name, "annotations": dict(annotations)},
                "spec": {"priority": priority, "containers": [container]},
            }
        )
        counted = limits.get(COUNTED.get(self._world.division, GPU), 0)
        if self._world.division == "slots":
            counted *= limits[GPU]
        pod = CreatedPod(
            name,
            made["metadata"]["uid"],
            request_from_pod(msgspec.convert(made, Manifest)),
            priority,
            annotations.get(GANG, ""),
            int(annotations.get(GANG_SIZE, 1)),
            counted,
        )
        self.created[name] = self.by_uid[pod.uid] = pod
        self._world.note("created", name, pod.uid, dict(limits), dict(annotations), priority)
        return pod

    def delete(self, name: str) -> None:
        self._world.note("deleted", name)
        self._world.api.delete_pod(NAMESPACE, name)

    def shown(self, name: str) -> Object | None:
        """The pod as the API server has it; None: it is gone."""
        try:
            return self._world.api.pods.get((NAMESPACE, name))
        except ApiError:
            return None

    def live(self) -> Iterator[tuple[CreatedPod, Object]]:
        """The pods that are there, have not ended, and are not being deleted."""
        for name, pod in self.created.items():
            shown = self.shown(name)
            if shown is None or shown["metadata"].get("deletionTimestamp"):
                continue
            if shown["status"]["phase"] in ("Pending", "Running"):
                yield pod, shown

    def present(self) -> list[str]:
        """The names of these pods."""
        return [pod.name for pod, _ in self.live()]

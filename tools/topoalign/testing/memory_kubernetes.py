"""The port to the API server over the objects of its stand-in, in the same process and without HTTP."""

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import anyio
import msgspec

from topoalign.core.model.ids import NodeName
from topoalign.registry.kubernetes import objects
from topoalign.registry.ports import (
    ApiConflict,
    GoneObject,
    PodEvent,
    SeenNode,
    SeenPod,
    SeenPodGroup,
    SeenQuota,
    Synced,
)
from topoalign.testing.fake_api_server.cluster import FakeCluster
from topoalign.testing.fake_api_server.objects import ApiError, Objects

S = TypeVar("S", bound=SeenPod | SeenNode | SeenQuota | SeenPodGroup)


class MemoryKubernetes:
    """What an API server would answer, at once."""

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster

    @property
    def trouble(self) -> str | None:
        """Nothing can be in the way."""
        return None

    def pods(self) -> AsyncGenerator[SeenPod | GoneObject | Synced, None]:
        """As the port says."""
        return followed(self._cluster.pods, objects.ShownPod)

    def nodes(self) -> AsyncGenerator[SeenNode | GoneObject | Synced, None]:
        """As the port says."""
        return followed(self._cluster.nodes, objects.ShownNode)

    def quotas(self) -> AsyncGenerator[SeenQuota | GoneObject | Synced, None]:
        """As the port says."""
        return followed(self._cluster.quotas, objects.ShownQuota)

    def pod_groups(self, api_group: str) -> AsyncGenerator[SeenPodGroup | GoneObject | Synced, None]:
        """As the port says."""
        here = self._cluster.pod_groups.get(api_group)
        return followed(here, objects.ShownPodGroup) if here is not None else followed_none()

    async def pod(self, namespace: str, name: str) -> SeenPod | None:
        """As the port says."""
        try:
            return msgspec.convert(self._cluster.pods.get((namespace, name)), objects.ShownPod).to_seen()
        except ApiError:
            return None

    async def bind(self, namespace: str, name: str, uid: str, node: NodeName) -> None:
        """As the port says."""
        with answered():
            self._cluster.bind(namespace, name, objects.binding(namespace, name, uid, node))

    async def delete(self, namespace: str, name: str, uid: str) -> None:
        """As the port says."""
        with answered():
            self._cluster.delete_pod(namespace, name, uid)

    async def report(self, report: PodEvent) -> None:
        """As the port says."""
        made = objects.event(report, "memory", "2026-01-01T00:00:00Z")
        with suppress(ApiConflict), answered():
            self._cluster.add_event(report.namespace, made)

    async def wake(self, node: NodeName, text: str) -> None:
        """As the port says."""
        with answered():
            self._cluster.nodes.merge(("", node), objects.woken(text))

    async def apply_topology(self, topology: Mapping[str, Any]) -> None:
        """As the port says."""
        with answered():
            self._cluster.topologies.apply(("", topology["metadata"]["name"]), topology)

    async def version(self) -> tuple[int, int]:
        """As the port says."""
        return self._cluster.version


async def followed(kept: Objects, kind: type[objects.ApiObject[S]]) -> AsyncGenerator[S | GoneObject | Synced, None]:
    """All objects, `Synced`, and each change; from the beginning again where changes are no longer kept."""
    known: dict[str, S] = {}
    """By UID."""
    while True:
        version = kept.newest
        listed = [msgspec.convert(each, kind).to_seen() for each in kept]
        here = {each.uid for each in listed}
        for uid in [uid for uid in known if uid not in here]:
            yield GoneObject(known.pop(uid).key)
        for each in listed:
            known[each.uid] = each
            yield each
        yield Synced()
        try:
            while True:
                changes = kept.since(version)
                for change in changes:
                    version = change.version
                    seen = msgspec.convert(change.object, kind).to_seen()
                    if change.type == "DELETED":
                        known.pop(seen.uid, None)
                        yield GoneObject(seen.key)
                    else:
                        known[seen.uid] = seen
                        yield seen
                if not changes:
                    await kept.wait()
        except ApiError:  # what came after `version` is no longer kept
            continue


async def followed_none() -> AsyncGenerator[Synced, None]:
    """A kind that the cluster lacks."""
    yield Synced()
    await anyio.sleep_forever()


@contextmanager
def answered() -> Iterator[None]:
    """Raises the port's errors for those of the stand-in."""
    try:
        yield
    except ApiError as error:
        raise objects.error_for_status(error.code, error.message) from error

"""The port to the API server over the objects of its stand-in, in the same process and without HTTP."""

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import msgspec

from topoalign.core.model.ids import NodeName
from topoalign.registry.kubernetes import objects
from topoalign.registry.ports import (
    ApiConflict,
    GoneNode,
    GonePod,
    GoneQuota,
    PodEvent,
    SeenNode,
    SeenPod,
    SeenQuota,
    Synced,
)
from topoalign.testing.fake_api_server.cluster import FakeCluster
from topoalign.testing.fake_api_server.objects import ApiError, Object, Objects

S = TypeVar("S")
G = TypeVar("G")


class MemoryKubernetes:
    """What an API server would answer, at once."""

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster

    @property
    def trouble(self) -> str | None:
        """Nothing can be in the way."""
        return None

    def pods(self) -> AsyncGenerator[SeenPod | GonePod | Synced, None]:
        """As the port says."""
        return followed(self._cluster.pods, pod_of, gone_pod)

    def nodes(self) -> AsyncGenerator[SeenNode | GoneNode | Synced, None]:
        """As the port says."""
        return followed(self._cluster.nodes, node_of, gone_node)

    def quotas(self) -> AsyncGenerator[SeenQuota | GoneQuota | Synced, None]:
        """As the port says."""
        return followed(self._cluster.quotas, quota_of, gone_quota)

    async def pod(self, namespace: str, name: str) -> SeenPod | None:
        """As the port says."""
        try:
            return pod_of(self._cluster.pods.get((namespace, name)))
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


async def followed(
    kind: Objects, seen: Callable[[Object], S], gone: Callable[[Object], G]
) -> AsyncGenerator[S | G | Synced, None]:
    """All objects, `Synced`, and each change; from the beginning again where changes are no longer kept."""
    known: dict[str, Object] = {}
    while True:
        version = kind.newest
        listed = list(kind)
        here = {each["metadata"]["uid"] for each in listed}
        for uid in [uid for uid in known if uid not in here]:
            yield gone(known.pop(uid))
        for each in listed:
            known[each["metadata"]["uid"]] = each
            yield seen(each)
        yield Synced()
        try:
            while True:
                changes = kind.since(version)
                for change in changes:
                    version = change.version
                    uid = change.object["metadata"]["uid"]
                    if change.type == "DELETED":
                        known.pop(uid, None)
                        yield gone(change.object)
                    else:
                        known[uid] = change.object
                        yield seen(change.object)
                if not changes:
                    await kind.wait()
        except ApiError:  # what came after `version` is no longer kept
            continue


def pod_of(shown: Object) -> SeenPod:
    """The pod as the registry looks at it."""
    return objects.seen_pod(msgspec.convert(shown, objects.ShownPod))


def node_of(shown: Object) -> SeenNode:
    """The node as the registry looks at it."""
    return objects.seen_node(msgspec.convert(shown, objects.ShownNode))


def quota_of(shown: Object) -> SeenQuota:
    """The quota as the registry looks at it."""
    return objects.seen_quota(msgspec.convert(shown, objects.ShownQuota))


def gone_quota(shown: Object) -> GoneQuota:
    """The quota, which is gone."""
    return GoneQuota(uid=shown["metadata"]["uid"])


def gone_pod(shown: Object) -> GonePod:
    """The pod, which is gone."""
    return objects.gone_pod(pod_of(shown))


def gone_node(shown: Object) -> GoneNode:
    """The node, which is gone."""
    return GoneNode(name=NodeName(shown["metadata"]["name"]))


@contextmanager
def answered() -> Iterator[None]:
    """Raises the port's errors for those of the stand-in."""
    try:
        yield
    except ApiError as error:
        raise objects.error_for_status(error.code, error.message) from error

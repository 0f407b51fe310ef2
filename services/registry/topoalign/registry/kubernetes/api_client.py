"""
The port to the API server over HTTP.

The objects of each kind are followed by a paginated list and then by watches. A watch that ends or fails is resumed
after the newest resource version that was received, including those of bookmarks. If the API server no longer has the
changes after this version (410), all objects are listed again, and known objects that the list lacks are reported as
deleted. For this, only the keys of the objects are stored. The pause after a failure is 0.2 s, and doubles with each
further failure up to 10 s.

lightkube's own watch is not used (docs/decisions/0015-lightkube.md): it has no timeout, it resumes after a 410 without
a list, so that deletions are lost, and it decodes whole objects.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec
import structlog
from lightkube.config.client_adapter import user_auth, verify_cluster
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.config.models import User
from lightkube.core.exceptions import ConfigError
from yarl import URL

from topoalign.core.demand.gangs import COSCHEDULING, KAI, NATIVE, VOLCANO
from topoalign.core.model.errors import InvalidField, Undecodable, clean
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Clock
from topoalign.registry.kubernetes import objects
from topoalign.registry.kubernetes.api_requests import (
    CALL_SECONDS,
    LIST_SECONDS,
    Credentials,
    Expired,
    Requests,
    answer_error,
)
from topoalign.registry.ports import (
    ApiConflict,
    ApiNotFound,
    ApiRefused,
    ApiUnavailable,
    GoneObject,
    PodEvent,
    SeenNode,
    SeenPod,
    SeenPodGroup,
    SeenQuota,
    Synced,
)
from topoalign.runtime.clock import backoff_seconds
from topoalign.runtime.request_turns import TaskTurns

S = TypeVar("S", bound=SeenPod | SeenNode | SeenQuota | SeenPodGroup)

IN_CLUSTER = "in-cluster"
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
TOPOLOGIES = "/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies"
POD_GROUPS: Mapping[str, Sequence[str]] = {
    NATIVE: ("v1beta1", "v1alpha2"),
    COSCHEDULING: ("v1alpha1",),
    KAI: ("v2alpha2",),
    VOLCANO: ("v1beta1",),
}
"""API group of PodGroups -> its versions, the preferred one first."""
ABSENT_SECONDS = 60.0
"""Seconds between two checks whether a kind that the cluster lacks has been added."""
PAGE = 500
"""Maximum number of objects in a page: some megabytes of pods."""
WATCH_SECONDS = 290
"""The API server ends a watch after this time, so that the watch can continue at another replica."""
SILENT_SECONDS = 90.0
"""A watch without data for this time is assumed to be dead: an API server sends a bookmark every minute."""
FIRST_PAUSE = 0.2
LONGEST_PAUSE = 10.0

log = structlog.get_logger("topoalign.registry.kubernetes")


class Listed(msgspec.Struct, frozen=True):
    """A page of a list."""

    items: list[msgspec.Raw] = []
    metadata: objects.ListMetadata = objects.ListMetadata()


class WatchEvent(msgspec.Struct, frozen=True):
    """A line of a watch."""

    type: str
    object: msgspec.Raw


class ObjectWatch(Generic[S]):
    """Follows the objects of one kind for one reader."""

    def __init__(
        self,
        requests: Requests,
        clock: Clock,
        path: str,
        kind: type[objects.ApiObject[S]],
        silent_seconds: float = SILENT_SECONDS,
        versions: Sequence[str] = (),
    ) -> None:
        """`versions`: paths of the kind's versions. If the API server has none of them, there are no objects."""
        self._requests = requests
        self._clock = clock
        self._path = path
        self._versions = versions
        self._kind = kind
        self._silent = silent_seconds
        self._version = ""
        self._failures = 0
        self._known: set[str] = set()
        """Keys of the objects that exist in the API server."""
        self.trouble: str | None = None

    async def follow(self) -> AsyncGenerator[S | GoneObject | Synced, None]:
        """Yields all objects, `Synced`, then each change, without end. Raises nothing."""
        turns = TaskTurns(self._clock)
        self.trouble = f"{self._path} is not listed yet"
        while True:
            try:
                async with aclosing(self._changes() if self._version else self._list()) as steps:
                    async for each in steps:
                        yield each
                        await turns.give()
                if not self._version:
                    await self._clock.sleep(ABSENT_SECONDS)
            except Expired:
                self._version = ""
                await self._pause("the API server no longer has the changes since then")
            except ApiNotFound as error:  # the API server no longer has this version of the kind
                self._version = ""
                await self._pause(error.finding)
            except (ApiUnavailable, ApiRefused, ApiConflict, Undecodable) as error:
                await self._pause(error.finding)

    async def _list(self) -> AsyncGenerator[S | GoneObject | Synced, None]:
        here: set[str] = set()
        parameters = {"limit": str(PAGE)}
        while True:
            page = await self._page(parameters)
            for raw in page.items:
                if (seen := self._decode(raw)) is not None:
                    here.add(seen.key)
                    self._known.add(seen.key)
                    yield seen
            if not page.metadata.next_page:
                break
            parameters["continue"] = page.metadata.next_page
        for key in self._known - here:
            yield GoneObject(key)
        self._known = here
        self._version = page.metadata.resource_version
        self._end_trouble()
        yield Synced()

    async def _page(self, parameters: Mapping[str, str]) -> Listed:
        for path in self._versions or (self._path,):
            try:
                page = await self._requests.send("GET", path, parameters=parameters, seconds=LIST_SECONDS)
            except ApiNotFound:
                if not self._versions:
                    raise
                continue
            self._path = path
            return objects.decode_object(page, Listed)
        return Listed()

    async def _changes(self) -> AsyncGenerator[S | GoneObject, None]:
        parameters = {
            "watch": "true",
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        async with self._requests.lines(self._path, parameters, self._silent) as lines:
            async for line in lines:
                event = objects.decode_object(line, WatchEvent)
                self._end_trouble()
                if event.type == "ERROR":
                    raise answer_error(0, event.object)
                if event.type != "BOOKMARK" and (seen := self._decode(event.object)) is not None:
                    if event.type == "DELETED":
                        self._known.discard(seen.key)
                        yield GoneObject(seen.key)
                    else:
                        self._known.add(seen.key)
                        yield seen
                self._version = objects.decode_object(event.object, objects.AnyObject).metadata.resource_version

    def _decode(self, raw: msgspec.Raw) -> S | None:
        try:
            return objects.decode_object(raw, self._kind).to_seen()
        except Undecodable as error:
            log.warning("an object is skipped", path=self._path, finding=error.finding)
            return None

    def _end_trouble(self) -> None:
        if self.trouble is not None:
            log.info("followed", path=self._path)
        self._failures = 0
        self.trouble = None

    async def _pause(self, why: str) -> None:
        self._failures += 1
        if self.trouble is None:
            log.warning("not followed", path=self._path, finding=why)
        self.trouble = f"{self._path}: {why}"
        await self._clock.sleep(backoff_seconds(self._failures, FIRST_PAUSE, LONGEST_PAUSE))


class Version(msgspec.Struct, frozen=True):
    """The answer of /version. Some distributions write `36+`."""

    major: str
    minor: str


class HttpKubernetes:
    """The port over HTTP. `instance`: name of this replica in Events. Each kind can have one follower at a time."""

    def __init__(self, requests: Requests, clock: Clock, instance: str, silent_seconds: float = SILENT_SECONDS) -> None:
        self._requests = requests
        self._clock = clock
        self._instance = instance
        pods = ObjectWatch(requests, clock, "/api/v1/pods", objects.ShownPod, silent_seconds)
        nodes = ObjectWatch(requests, clock, "/api/v1/nodes", objects.ShownNode, silent_seconds)
        quotas = ObjectWatch(requests, clock, "/api/v1/resourcequotas", objects.ShownQuota, silent_seconds)
        self._pod_groups: dict[str, ObjectWatch[SeenPodGroup]] = {}
        for api_group, versions in POD_GROUPS.items():
            paths = [f"/apis/{api_group}/{version}/podgroups" for version in versions]
            self._pod_groups[api_group] = ObjectWatch(
                requests, clock, paths[0], objects.ShownPodGroup, silent_seconds, paths
            )
        self._watches: Sequence[ObjectWatch[Any]] = (pods, nodes, quotas, *self._pod_groups.values())
        self.pods = pods.follow
        self.nodes = nodes.follow
        self.quotas = quotas.follow

    def pod_groups(self, api_group: str) -> AsyncGenerator[SeenPodGroup | GoneObject | Synced, None]:
        """As in the port."""
        return self._pod_groups[api_group].follow()

    @property
    def trouble(self) -> str | None:
        """As in the port."""
        return next((each.trouble for each in self._watches if each.trouble is not None), None)

    async def pod(self, namespace: str, name: str) -> SeenPod | None:
        """As in the port."""
        try:
            shown = await self._requests.send("GET", pod_path(namespace, name))
        except ApiNotFound:
            return None
        return objects.decode_object(shown, objects.ShownPod).to_seen()

    async def bind(self, namespace: str, name: str, uid: str, node: NodeName) -> None:
        """As in the port."""
        body = objects.binding(namespace, name, uid, node)
        await self._requests.send("POST", f"{pod_path(namespace, name)}/binding", body)

    async def delete(self, namespace: str, name: str, uid: str) -> None:
        """As in the port."""
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        await self._requests.send("DELETE", pod_path(namespace, name), options)

    async def report(self, report: PodEvent) -> None:
        """As in the port."""
        now = datetime.fromtimestamp(self._clock.wall(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        body = objects.event(report, self._instance, now)
        with suppress(ApiConflict):  # another replica has already written it
            await self._requests.send("POST", f"/api/v1/namespaces/{quote(report.namespace, '')}/events", body)

    async def wake(self, node: NodeName, text: str) -> None:
        """As in the port."""
        await self._requests.send("PATCH", f"/api/v1/nodes/{quote(node, '')}", objects.woken(text), MERGE_PATCH)

    async def apply_topology(self, topology: Mapping[str, Any]) -> None:
        """As in the port."""
        path = f"{TOPOLOGIES}/{quote(topology['metadata']['name'], '')}"
        force = {"fieldManager": objects.REPORTER, "force": "true"}
        await self._requests.send("PATCH", path, topology, APPLY_PATCH, force)

    async def version(self) -> tuple[int, int]:
        """As in the port."""
        found = objects.decode_object(await self._requests.send("GET", "/version"), Version)
        return int(found.major.rstrip("+")), int(found.minor.rstrip("+"))


def pod_path(namespace: str, name: str) -> str:
    """The path of a pod."""
    return f"/api/v1/namespaces/{quote(namespace, '')}/pods/{quote(name, '')}"


@asynccontextmanager
async def connect_kubernetes(
    where: str,
    clock: Clock,
    instance: str,
    *,
    call_seconds: float = CALL_SECONDS,
    silent_seconds: float = SILENT_SECONDS,
) -> AsyncIterator[HttpKubernetes]:
    """
    The API server that `where` names, `in-cluster` or the path of a kubeconfig. It need not be reachable yet.

    Raises InvalidField for a configuration that cannot be used.
    """
    try:
        config = read_kubeconfig(where)
        assert config.user is not None, "read_kubeconfig adds one"
        tls = verify_cluster(config.cluster, config.user, config.abs_file, trust_env=False)
        credentials = Credentials(user_auth(config.user))
    except Exception as error:  # lightkube passes on all errors of its parsers
        raise InvalidField(
            "TOPOALIGN_KUBERNETES",
            f"{clean(where)} cannot be used: {clean(str(error) or type(error).__name__, 200)}",
            "give `off`, `in-cluster` in a pod with a service account, or the path of a kubeconfig",
        ) from error
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=tls),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"Accept-Encoding": "identity"},  # decompressing a list blocks the event loop longer
    ) as http:
        requests = Requests(http, config.cluster.server, credentials, call_seconds)
        yield HttpKubernetes(requests, clock, instance, silent_seconds)


def read_kubeconfig(where: str) -> SingleConfig:
    """Reads the current context. Raises ConfigError, and any error of lightkube and yarl for an invalid file."""
    config = (KubeConfig.from_service_account() if where == IN_CLUSTER else KubeConfig.from_file(Path(where))).get()
    if config is None:
        raise ConfigError("it has no current context")
    if URL(config.cluster.server).scheme not in ("http", "https"):
        raise ConfigError("its server has no URL")
    return config if config.user is not None else config._replace(user=User())

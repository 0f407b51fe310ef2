"""The port to the API server over HTTP."""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
from lightkube.config.client_adapter import user_auth, verify_cluster
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.config.models import User
from lightkube.core.exceptions import ConfigError
from yarl import URL

from topoalign.core.model.errors import InvalidField, clean
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Clock
from topoalign.registry.kubernetes import objects
from topoalign.registry.kubernetes.api_requests import CALL_SECONDS, Credentials, Requests
from topoalign.registry.kubernetes.object_watch import SILENT_SECONDS, ObjectWatch
from topoalign.registry.ports import ApiConflict, ApiNotFound, Gone, PodEvent, SeenNode, SeenPod, SeenQuota, Synced

IN_CLUSTER = "in-cluster"
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
TOPOLOGIES = "/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies"


class Version(msgspec.Struct, frozen=True):
    """The answer of /version. Some distributions write `36+`."""

    major: str
    minor: str


class HttpKubernetes:
    """The API server; `instance` names this replica in Events."""

    def __init__(self, requests: Requests, clock: Clock, instance: str, silent_seconds: float = SILENT_SECONDS) -> None:
        self._requests = requests
        self._clock = clock
        self._instance = instance
        self._pods = ObjectWatch(requests, clock, "/api/v1/pods", objects.ShownPod, silent_seconds)
        self._nodes = ObjectWatch(requests, clock, "/api/v1/nodes", objects.ShownNode, silent_seconds)
        self._quotas = ObjectWatch(requests, clock, "/api/v1/resourcequotas", objects.ShownQuota, silent_seconds)

    @property
    def trouble(self) -> str | None:
        """As in the port."""
        return self._pods.trouble or self._nodes.trouble or self._quotas.trouble

    def pods(self) -> AsyncGenerator[SeenPod | Gone | Synced, None]:
        """As in the port; one follower at a time."""
        return self._pods.follow()

    def nodes(self) -> AsyncGenerator[SeenNode | Gone | Synced, None]:
        """As in the port; one follower at a time."""
        return self._nodes.follow()

    def quotas(self) -> AsyncGenerator[SeenQuota | Gone | Synced, None]:
        """As in the port; one follower at a time."""
        return self._quotas.follow()

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
        with suppress(ApiConflict):  # another replica was faster
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
    except Exception as error:  # lightkube lets through whatever its parsers raise
        raise InvalidField(
            "TOPOALIGN_KUBERNETES",
            f"{clean(where)} cannot be used: {clean(str(error) or type(error).__name__, 200)}",
            "give `off`, `in-cluster` in a pod with a service account, or the path of a kubeconfig",
        ) from error
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=tls),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"Accept-Encoding": "identity"},  # unpacking a list would hold up the loop longer than reading it
    ) as http:
        requests = Requests(http, config.cluster.server, credentials, call_seconds)
        yield HttpKubernetes(requests, clock, instance, silent_seconds)


def read_kubeconfig(where: str) -> SingleConfig:
    """Raises ConfigError, and whatever a wrong file makes lightkube and yarl raise."""
    config = (KubeConfig.from_service_account() if where == IN_CLUSTER else KubeConfig.from_file(Path(where))).get()
    if config is None:
        raise ConfigError("it has no current context")
    if URL(config.cluster.server).scheme not in ("http", "https"):
        raise ConfigError("its server has no URL")
    return config if config.user is not None else config._replace(user=User())

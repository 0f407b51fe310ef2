"""
The HTTP side of the stand-in: paths, verbs and answers of an API server for the kinds that the registry uses.

Merge patches and server-side apply are taken alike; selectors are refused with 400, because nobody here uses any. With a
token, requests without it get 401.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
from anyio.abc import TaskStatus
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from topoalign.runtime.connections import HttpConnection
from topoalign.runtime.http_server import listen_on_port, serve_application
from topoalign.runtime.tasks import background
from topoalign.testing.fake_api_server.cluster import FakeCluster
from topoalign.testing.fake_api_server.faults import Fault, Faults, Harm
from topoalign.testing.fake_api_server.objects import ApiError, Objects
from topoalign.testing.fake_api_server.watching import BOOKMARK_SECONDS, Pages, watched

NAMED = ("/api/v1/namespaces/{namespace}/{plural}", "/api/v1/{plural}", "/apis/{group}/{version}/{plural}")


IDLE_SECONDS = 120


class FakeApiServer:
    """Serves a cluster; `url` is known once it listens."""

    def __init__(self, cluster: FakeCluster, token: str = "", bookmark_seconds: float = BOOKMARK_SECONDS) -> None:
        self.cluster = cluster
        self.token = token
        self.url = ""
        self.faults = Faults()
        self.requests: Counter[str] = Counter()
        """Requests by name, `POST binding`, and bookmarks that were sent, `BOOKMARK pods`."""
        self._requested = anyio.Event()
        self._bookmark_seconds = bookmark_seconds
        self._pages = Pages()
        self._connections: set[HttpConnection] = set()

    def kubeconfig(self, file: Path) -> Path:
        """Writes a configuration for clients of this server."""
        user = {"token": self.token} if self.token else {}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "fake", "user": user}],
        }
        file.write_bytes(msgspec.json.encode(document))
        return file

    async def asked(self, request: str, times: int) -> None:
        """Until there were so many of this name."""
        while self.requests[request] < times:
            await self._requested.wait()

    def end_watches(self) -> None:
        """Closes all connections at once, as a restart does."""
        for connection in list(self._connections):
            connection.transport.abort()

    async def run(self, host: str, port: int, *, task_status: TaskStatus[str] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serves until cancelled; has started once it listens. Raises AddressInUse."""
        listener = listen_on_port(host, port)
        address, chosen = listener.getsockname()[:2]
        self.url = f"http://{address}:{chosen}"
        methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
        paths = [path + deeper for path in NAMED for deeper in ("", "/{name}", "/{name}/{sub}")]
        routes = [Route("/version", self._version), *(Route(path, self._answer, methods=methods) for path in paths)]
        await serve_application(
            Starlette(routes=routes),
            listener,
            protocol=noting(self._connections),
            idle_seconds=IDLE_SECONDS,
            task_status=task_status,
        )

    async def _version(self, request: Request) -> Response:
        major, minor = self.cluster.version
        return answer({"major": str(major), "minor": f"{minor}+", "gitVersion": f"v{major}.{minor}.2"})

    async def _answer(self, request: Request) -> Response:
        called = Call.of(request)
        self._count(called.name)
        body = await request.body()
        fault = self.faults.take(called.name)
        try:
            if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
                raise ApiError(401, "Unauthorized", "Unauthorized")
            if fault is not None:
                await self._before(fault, request)
            if called.watch:
                return StreamingResponse(self._watched(called, request.query_params), media_type="application/json")
            result = self._do(called, request.query_params, body)
            status = 201 if request.method == "POST" else 200
        except ApiError as error:
            result = error.status
            status = error.code
        if fault is not None:
            await self._after(fault, request)
        return answer(result, status)

    def _count(self, name: str) -> None:
        self.requests[name] += 1
        self._requested.set()
        self._requested = anyio.Event()

    async def _watched(self, called: "Call", parameters: Mapping[str, str]) -> AsyncIterator[bytes]:
        async for part in watched(self._kind(called), called.namespace, parameters, self._bookmark_seconds):
            yield part
            if part.startswith(b'{"type":"BOOKMARK"'):
                self._count(f"BOOKMARK {called.plural}")

    async def _before(self, fault: Fault, request: Request) -> None:
        if fault.harm is Harm.REFUSE:
            raise ApiError(fault.status, "Refused", "refused on demand")
        if fault.harm is Harm.DROP:
            self._drop(request)
        if fault.harm in (Harm.DROP, Harm.SILENT):
            await self._until_gone(request)
            raise ApiError(499, "Gone", "the client has closed the connection")

    async def _after(self, fault: Fault, request: Request) -> None:
        if fault.harm is Harm.LOSE:
            self._drop(request)
        if fault.harm is Harm.SLOW:
            await anyio.sleep(fault.seconds)

    def _drop(self, request: Request) -> None:
        """Closes the connection of this request."""
        for connection in [each for each in self._connections if each.client == request.scope["client"]]:
            connection.transport.abort()

    async def _until_gone(self, request: Request) -> None:
        """Until the client closes the connection."""
        while (await request.receive())["type"] != "http.disconnect":
            pass

    def _kind(self, called: "Call") -> Objects:
        return self.cluster.kind(called.plural, called.api_version)

    def _do(self, called: "Call", parameters: Mapping[str, str], body: bytes) -> Mapping[str, Any]:
        """Raises ApiError."""
        if "fieldSelector" in parameters or "labelSelector" in parameters:
            raise ApiError(400, "BadRequest", "the stand-in has no selectors")
        kind = self._kind(called)
        key = (called.namespace or "", called.object_name or "")
        given: dict[str, Any] = msgspec.json.decode(body) if body else {}
        match called.method, called.object_name, called.sub:
            case "GET", None, _:
                return self._pages.page(kind, called.namespace, parameters)
            case "GET", _, _:
                return kind.get(key)
            case "POST", _, "binding":
                self.cluster.bind(key[0], key[1], given)
                return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}
            case "POST", None, _:
                return self._create(called, given)
            case "DELETE", _, _:
                return self._delete(called, key, given)
            case "PATCH", _, _ if parameters.get("fieldManager") and kind is self.cluster.topologies:
                return kind.apply(key, given)
            case "PATCH", _, _:
                return kind.merge(key, given)
            case "PUT", _, _:
                return kind.replace(key, given, given.get("metadata", {}).get("resourceVersion"))
        raise ApiError(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")

    def _create(self, called: "Call", given: dict[str, Any]) -> Mapping[str, Any]:
        if called.plural == "pods":
            return self.cluster.add_pod({**given, "metadata": {**given["metadata"], "namespace": called.namespace}})
        if called.plural == "events":
            return self.cluster.add_event(called.namespace or "default", given)
        return self._kind(called).create((called.namespace or "", given["metadata"]["name"]), given)

    def _delete(self, called: "Call", key: tuple[str, str], given: dict[str, Any]) -> Mapping[str, Any]:
        if called.plural != "pods":
            return self._kind(called).remove(key)
        uid = (given.get("preconditions") or {}).get("uid")
        return self.cluster.delete_pod(*key, uid, given.get("gracePeriodSeconds"))


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """What a request is about."""

    method: str
    plural: str
    api_version: str
    namespace: str | None
    object_name: str | None
    sub: str | None
    watch: bool

    @classmethod
    def of(cls, request: Request) -> "Call":
        """From the path and the parameters."""
        path = request.path_params
        watch = request.query_params.get("watch") in ("true", "1")
        namespace = path.get("namespace")
        name = path.get("name")
        sub = path.get("sub")
        api_version = f"{path['group']}/{path['version']}" if "group" in path else "v1"
        return cls(
            method=request.method,
            plural=path["plural"],
            api_version=api_version,
            namespace=namespace,
            object_name=name,
            sub=sub,
            watch=watch,
        )

    @property
    def name(self) -> str:
        """`WATCH pods`, `LIST nodes`, `GET pods`, `POST binding`."""
        method = "WATCH" if self.watch else "LIST" if self.method == "GET" and self.object_name is None else self.method
        return f"{method} {self.sub or self.plural}"


def noting(connections: set[HttpConnection]) -> type[HttpConnection]:
    """A protocol whose connections are in this set while they are open."""

    class Noted(HttpConnection):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
            super().connection_made(transport)
            connections.add(self)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            connections.discard(self)

    return Noted


def answer(body: Mapping[str, Any], status: int = 200) -> Response:
    """An answer in JSON."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


@asynccontextmanager
async def fake_api_server(
    cluster: FakeCluster, *, token: str = "", bookmark_seconds: float = BOOKMARK_SECONDS
) -> AsyncIterator[FakeApiServer]:
    """A server on a free port of the loopback address, while the context is open."""
    server = FakeApiServer(cluster, token, bookmark_seconds)
    async with background() as tasks:
        await tasks.start(server.run, "127.0.0.1", 0)
        try:
            yield server
        finally:
            server.end_watches()

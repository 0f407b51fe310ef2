"""
The HTTP read API: `GET /v1/nodes`, `GET /v1/nodes/{name}`, `GET /v1/allocations`, `GET /v1/shares?node=NAME`.

It reads the fold and changes nothing. Only for `/v1/shares` it queries the node, because the use of GPUs is not stored.
Every response is JSON, including errors: {"code", "finding", "remedy"}. An unknown query parameter is an error that
names the parameter: if `?nod=a` were ignored, the response would cover all nodes.

Lists are paginated: `limit` is the maximum number of items of a page, `continue` is the token for the next page. The
token contains the key of the last row, so rows added or removed between two requests do not shift the next page.
"""

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterable, Iterator
from heapq import merge
from itertools import groupby, islice
from operator import itemgetter
from typing import Generic, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from topoalign.core import wire
from topoalign.core.model.errors import (
    BadRequest,
    InvalidField,
    NoFit,
    NotFound,
    TopoalignError,
    Unavailable,
    clean,
    quoted,
)
from topoalign.core.model.events import Allocation
from topoalign.core.model.ids import NodeName
from topoalign.core.model.processes import Measurement
from topoalign.core.model.requests import NodeRequest
from topoalign.core.ports import Bus, Clock
from topoalign.registry import api_views
from topoalign.registry.api_views import ANSWER_SECONDS, AllocationView, read_node_library, shares_view
from topoalign.registry.cluster_nodes import Cluster, ClusterNode, Key
from topoalign.registry.foreign_nodes import ForeignNodes
from topoalign.registry.node_metrics import in_turns

T = TypeVar("T")

HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
STATUS = {NotFound: 404, BadRequest: 400, NoFit: 409, Unavailable: 503}
"""Base class of an error -> HTTP status; the first match counts. Any other error is a defect: 500."""
LONGEST_URL = 4_096
"""Maximum number of characters of path and query together."""

DEFAULT_LIMIT = 500
MOST = 1_000
"""The default and the maximum number of items of a page."""


class Page(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """A page of a list."""

    items: tuple[T, ...]
    next: str | None = msgspec.field(name="continue")
    """The token for the next page, to be sent as `continue`; null on the last page."""


def limit_of(text: str | None) -> int:
    """The length of a page. Raises InvalidField."""
    if text is None:
        return DEFAULT_LIMIT
    if not (text.isascii() and text.isdigit() and len(text) <= 6 and 1 <= int(text) <= MOST):
        raise InvalidField("limit", quoted([text]), f"give a whole number from 1 to {MOST}")
    return int(text)


def parse_continue(token: str | None) -> Key:
    """The key after which a page begins; () for the first page. Raises InvalidField for an invalid token."""
    if token is None:
        return ()
    try:
        return msgspec.json.decode(urlsafe_b64decode(token.encode()), type=Key)
    except (msgspec.DecodeError, binascii.Error, ValueError, RecursionError):
        raise InvalidField("continue", quoted([token]), "give back what the last page had, unchanged") from None


def page(rows: Iterable[tuple[Key, T]], limit: int) -> Page[T]:
    """A page with the first `limit` rows. The rows must be sorted by key; at most `limit` + 1 of them are read."""
    found = list(islice(rows, limit + 1))
    more = len(found) > limit
    token = urlsafe_b64encode(msgspec.json.encode(found[limit - 1][0])).decode() if more else None
    return Page(items=tuple(item for _, item in found[:limit]), next=token)


class Api:
    """Serves the API from the fold of one cluster."""

    def __init__(self, cluster: Cluster, clock: Clock, bus: Bus, foreign: ForeignNodes) -> None:
        """`bus`: for requests to nodes. `foreign`: the nodes that HAMi manages."""
        self._cluster = cluster
        self._clock = clock
        self._bus = bus
        self._foreign = foreign

    def mount(self) -> Mount:
        """The routes below /v1, with their own exception handlers."""
        app = Starlette(
            routes=[
                Route("/nodes", self.nodes),
                Route("/nodes/{name}", self.node),
                Route("/allocations", self.allocations),
                Route("/shares", self.shares),
            ],
            exception_handlers={
                TopoalignError: answer_product_error,
                HTTPException: http_error_answers(
                    "GET, HEAD", "/v1/nodes, /v1/nodes/NAME, /v1/allocations or /v1/shares"
                ),
                Exception: answer_defect,
            },
        )
        return Mount("/v1", app=app)

    async def nodes(self, request: Request) -> Response:
        """A page of the nodes, sorted by name."""
        query = parameters(request, "limit", "continue")
        after = parse_continue(query.get("continue"))
        limit = limit_of(query.get("limit"))
        last = after[0] if after else ""
        members = ((member.state.node, member) for member in self._cluster.members(last))
        names = self._foreign.names
        others = ((name, None) for name in names[bisect_right(names, last) :] if name not in self._cluster)
        rows = page((((name,), (name, member)) for name, member in merge(members, others, key=itemgetter(0))), limit)
        items = [
            api_views.foreign_summary(self._foreign, name)
            if member is None
            else api_views.summarize_member(member, self._foreign.owner(name))
            async for name, member in in_turns(rows.items, self._clock)
        ]
        return json(Page(items=tuple(items), next=rows.next))

    async def node(self, request: Request) -> Response:
        """The details of one node."""
        parameters(request)
        name = NodeName(request.path_params["name"])
        if name in self._foreign and name not in self._cluster:
            return json(
                api_views.NodeDetail(
                    summary=api_views.foreign_summary(self._foreign, name),
                    topology=None,
                    health={},
                    allocations=(),
                    hami=self._foreign.view(name),
                )
            )
        member = self._cluster.member(name)
        live = ((member, each) for some in self._cluster.allocations(node=name) for _, member, each in some)
        items = [view async for view in in_turns(view_by_node(live), self._clock)]
        return json(api_views.detail(member, tuple(items), self._foreign.owner(name), self._foreign.view(name)))

    async def allocations(self, request: Request) -> Response:
        """A page of the live allocations, sorted by node and id; optionally filtered by node, namespace and pod."""
        query = parameters(request, "node", "namespace", "pod", "limit", "continue")
        after = parse_continue(query.get("continue"))
        limit = limit_of(query.get("limit"))
        node = NodeName(query["node"]) if "node" in query else None
        if node is not None:
            self._cluster.member(node)
        found: list[tuple[Key, tuple[ClusterNode, Allocation]]] = []
        of_nodes = self._cluster.allocations(after, node, query.get("namespace"), query.get("pod"))
        async for some in in_turns(of_nodes, self._clock):
            found += [(key, (member, each)) for key, member, each in some]
            if len(found) > limit:
                break
        rows = page(found, limit)
        items = [view async for view in in_turns(view_by_node(rows.items), self._clock)]
        return json(Page(items=tuple(items), next=rows.next))

    async def shares(self, request: Request) -> Response:
        """The GPUs of one node, with the containers that hold each and those that use it now."""
        query = parameters(request, "node")
        if "node" not in query:
            raise InvalidField(
                "node", "is missing", "name one node: each is asked by itself, and only when somebody looks"
            )
        node = NodeName(query["node"])
        self._cluster.member(node)
        question = msgspec.json.encode(NodeRequest(node=node))
        answer = await self._bus.ask(wire.discovery_subject(node, "use"), question, within=ANSWER_SECONDS)
        measurement = wire.decode_answer(answer, Measurement)
        reading = await read_node_library(self._bus, self._cluster.member(node))
        return json(shares_view(self._cluster.member(node), measurement, reading))


def view_by_node(rows: Iterable[tuple[ClusterNode, Allocation]]) -> Iterator[AllocationView]:
    """The views of allocations that are sorted by node."""
    for member, some in groupby(rows, key=itemgetter(0)):
        yield from api_views.allocation_views(member, (each for _, each in some))


def parameters(request: Request, *known: str) -> dict[str, str]:
    """The query's parameters. Raises InvalidField for an unknown, repeated or too long one."""
    if len(request.url.path) + len(request.url.query) > LONGEST_URL:
        raise InvalidField("url", f"longer than {LONGEST_URL} characters", "ask for less at once")
    found: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in known:
            may = f"known here: {', '.join(known)}" if known else "this address takes none"
            raise InvalidField("query", f"unknown parameter {quoted([name])}", may)
        if name in found:
            raise InvalidField(name, "stands twice", "give it once")
        found[name] = value
    return found


def json(body: object, status: int = 200) -> Response:
    """A JSON response."""
    return Response(msgspec.json.encode(body), status, HEADERS, "application/json")


def error(code: str, finding: str, remedy: str, status: int) -> Response:
    """A JSON response for an error. Its texts are made printable and cut at 1,000 characters."""
    return json({"code": code, "finding": clean(finding, 1000), "remedy": clean(remedy, 1000)}, status)


async def answer_product_error(request: Request, exc: Exception) -> Response:
    """Answers an error of the product: its base class determines the status."""
    assert isinstance(exc, TopoalignError)
    status = next((status for kind, status in STATUS.items() if isinstance(exc, kind)), 500)
    return error(exc.code, exc.finding, exc.remedy, status)


def http_error_answers(methods: str, addresses: str) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Returns a handler for requests with an unknown path or method. `methods`, `addresses`: those that are allowed."""

    async def answer_http_error(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        if exc.status_code != 405:
            return error("NotFound", f"nothing at {quoted([request.url.path])}", f"use {addresses}", exc.status_code)
        answer = error(
            "MethodNotAllowed", f"method {clean(request.method, 20)} is not supported", f"use {methods}", 405
        )
        answer.headers["Allow"] = methods
        return answer

    return answer_http_error


async def answer_defect(request: Request, exc: Exception) -> Response:
    """Answers a defect without details, which are in the log."""
    return error("Internal", "the registry failed to answer", "look for the traceback in its log", 500)

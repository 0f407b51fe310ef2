"""
The HTTP application that kube-scheduler calls: `POST /scheduler/{filter,prioritize,bind,preempt}`.

After a filter error, kube-scheduler retries the pod only by a growing backoff, not when the cluster changes. Therefore:

    an invalid pod        filter refuses it on every node with a text that names the field, prioritize scores 0, preempt none
    a temporary error     filter and bind answer with `Error`, prioritize and preempt as above
    an invalid body       400, 408, 413 or 415 with {"code", "finding", "remedy"}: it is not from a kube-scheduler

Only bind has side effects.
"""

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from functools import partial

import anyio
import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from topoalign.core.model.errors import InvalidField, NoFit, TopoalignError, quoted
from topoalign.registry.api import answer_defect, answer_product_error, error, http_error_answers
from topoalign.registry.scheduling.extender import extender_answers
from topoalign.registry.scheduling.extender.arguments import read_arguments, read_bind, read_called_pod, read_preempt
from topoalign.registry.scheduling.extender.extender_answers import (
    FilterAnswer,
    Score,
    encode,
    text_of_error,
)
from topoalign.registry.scheduling.filter.scheduler import Scheduler
from topoalign.registry.scheduling.scheduling_api import Bind
from topoalign.runtime.request_turns import outlive_connection, take_turn

LARGEST_BODY = 64 * 1024 * 1024
"""Bytes: 5,000 whole nodes of 12 KiB each."""
SMALL_BODY = 1024 * 1024
"""Bytes. Larger bodies are read one at a time, so that a burst does not fill the memory."""
BODY_SECONDS = 4.0
"""Time for the arrival of a body: less than the 5 s after which a kube-scheduler gives up."""

Call = Callable[[bytes], Awaitable[bytes]]
"""A function from the JSON body of a request to that of its answer."""

log = structlog.get_logger("topoalign.registry.extender")


class RequestRefused(Exception):
    """Raised for a request body that is too large, too slow, or of another type. It has an HTTP status."""

    def __init__(self, status: int, code: str, finding: str, remedy: str) -> None:
        super().__init__(finding)
        self.status = status
        self.code = code
        self.finding = finding
        self.remedy = remedy


class Extender:
    """Answers kube-scheduler's calls by a `Scheduler`, and binds pods."""

    def __init__(
        self,
        scheduling: Scheduler,
        bind: Bind,
        kubernetes: Callable[[], tuple[int, int]],
        *,
        seconds: float = BODY_SECONDS,
        timing: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """
        `kubernetes`: major and minor version of the scheduler; `seconds`: maximum time for the arrival of a body; `timing`:
        context manager that measures a call of this name.
        """
        self._scheduling = scheduling
        self._bind = bind
        self._kubernetes = kubernetes
        self._seconds = seconds
        self._timing = timing
        self._refusals = extender_answers.RenderedRefusals()

    def routes(self) -> list[BaseRoute]:
        """The four calls."""
        calls: dict[str, Call] = {
            "filter": self.filter,
            "prioritize": self.prioritize,
            "bind": self.bind,
            "preempt": self.preempt,
        }
        return [
            call_route(f"/scheduler/{verb}", call, LARGEST_BODY, self._seconds, partial(self._timing, verb))
            for verb, call in calls.items()
        ]

    async def filter(self, body: bytes) -> bytes:
        """Answers filter: the nodes that would admit the pod."""
        asked = read_arguments(body)
        try:
            pod = read_called_pod(asked.pod)
            await take_turn()
            filtered = await self._scheduling.plan_and_filter(pod, asked.nodes, asked.labels)
        except (InvalidField, NoFit) as error:
            return extender_answers.refuse_all(asked, error)
        except TopoalignError as failure:
            log.warning("filter failed", code=failure.code, finding=failure.finding)
            return encode(FilterAnswer(error=text_of_error(failure.code)))
        if not filtered.passed:
            return self._refusals.answer(asked, filtered, self._kubernetes())
        return extender_answers.filter_answer(asked, filtered, self._kubernetes())

    async def prioritize(self, body: bytes) -> bytes:
        """Answers prioritize: the score of each node."""
        asked = read_arguments(body)
        try:
            pod = read_called_pod(asked.pod)
            await take_turn()
            await self._scheduling.prepare(pod)
            scores = self._scheduling.prioritize(pod, asked.nodes)
        except TopoalignError as failure:
            log.info("no scores", code=failure.code, finding=failure.finding)
            scores = [0] * len(asked.nodes)
        return encode(list(map(Score, asked.nodes, scores)))

    async def preempt(self, body: bytes) -> bytes:
        """Answers preempt: the nodes that would admit the pod without these victims."""
        pod, victims = read_preempt(body)
        try:
            helped = await self._scheduling.preempt(read_called_pod(pod), victims)
        except TopoalignError as failure:
            log.info("no preemption", code=failure.code, finding=failure.finding)
            helped = {}
        return extender_answers.preempt_answer(helped)

    async def bind(self, body: bytes) -> bytes:
        """Answers bind. If the answer has no error, the pod is bound."""
        outlive_connection()
        asked = read_bind(body)
        try:
            await self._bind(asked.pod_namespace, asked.pod_name, asked.pod_uid, asked.node)
        except TopoalignError as failure:
            log.warning(
                "not bound", pod=f"{asked.pod_namespace}/{asked.pod_name}", node=asked.node, finding=str(failure)
            )
            return encode({"Error": text_of_error(failure.code)})
        return encode({"Error": ""})


def make_application(routes: list[BaseRoute]) -> Starlette:
    """The application with these routes, whose errors are JSON."""
    handlers = {
        TopoalignError: answer_product_error,
        RequestRefused: answer_refused,
        HTTPException: http_error_answers("POST", "/scheduler/filter, prioritize, bind or preempt, or /webhook"),
        Exception: answer_defect,
    }
    served = Starlette(routes=routes, exception_handlers=handlers)
    served.router.redirect_slashes = False  # a redirect would use the host of the caller's Host header
    return served


def call_route(
    path: str,
    call: Call,
    most: int,
    seconds: float,
    timing: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Route:
    """A route for a call. `most`, `seconds`: maximum bytes and arrival time of a body; `timing`: measures the call."""
    large = anyio.Lock()

    async def endpoint(request: Request) -> Response:
        try:
            body = await read_body(request, most, seconds, large)
        except ClientDisconnect:
            return Response(status_code=400)  # the client has disconnected
        await take_turn()
        with timing():
            answer = await call(body)
        return Response(answer, media_type="application/json")

    return Route(path, endpoint, methods=["POST"])


async def read_body(request: Request, most: int, seconds: float, large: anyio.Lock) -> bytes:
    """Reads a body. `large`: locked while a large body is read. Raises RequestRefused and ClientDisconnect."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestRefused(415, "UnsupportedMediaType", f"content type {quoted([kind])}", "send application/json")
    chunks: list[bytes] = []
    size = 0
    async with AsyncExitStack() as turn:
        with anyio.move_on_after(seconds) as waiting:
            async for chunk in request.stream():
                if size <= SMALL_BODY < size + len(chunk):
                    await turn.enter_async_context(large)
                size += len(chunk)
                if size <= most:
                    chunks.append(chunk)
                else:
                    chunks.clear()  # but read on: an answer before the end of the body would be lost
                if size > 2 * most:
                    break
    if size > most:
        raise RequestRefused(
            413, "TooLarge", f"a body of more than {most} bytes", "send fewer nodes, or set nodeCacheCapable"
        )
    if waiting.cancelled_caught:
        raise RequestRefused(408, "TooSlow", f"the body did not arrive within {seconds:g} s", "check the network")
    return b"".join(chunks)


async def answer_refused(request: Request, exc: Exception) -> Response:
    """Answers a refused request and closes the connection, because the remaining body is not read."""
    assert isinstance(exc, RequestRefused)
    answer = error(exc.code, exc.finding, exc.remedy, exc.status)
    answer.headers["Connection"] = "close"
    return answer

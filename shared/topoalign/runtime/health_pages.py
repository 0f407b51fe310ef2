"""
The HTTP pages of a process: /livez, /readyz, /metrics, and pages of its services.

/livez responds as long as the event loop runs, with status 503 while the loop is delayed too much. /readyz has status
200 if every check of the context passes, otherwise 503 with the reasons. `?verbose` lists all checks, and notes about
conditions in which the process still works. /readyz/NAME has only the checks that one Service needs
(`Context.readiness`), for the readiness probe of its pods. The server listens on the loopback address by default.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from importlib import metadata

import anyio
from anyio.abc import TaskStatus
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Info, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from topoalign.core.model.errors import TopoalignError, clean
from topoalign.runtime.context import Check, Context, Page, Series
from topoalign.runtime.http_server import listen_on_port, serve_application
from topoalign.runtime.request_turns import take_turn

Endpoint = Callable[[Request], Awaitable[Response]]


async def serve_http(
    context: Context, host: str, port: int, *, task_status: TaskStatus[str] = anyio.TASK_STATUS_IGNORED
) -> None:
    """Serves the pages until cancelled. Reports its start and URL when it listens. Port 0: any. Raises AddressInUse."""
    await serve_application(
        build_application(context), listen_on_port(host, port), turns=context.turns, task_status=task_status
    )


def build_application(context: Context) -> Starlette:
    """The HTTP application with the pages of the process and of its services."""

    def checked(checks: Mapping[str, Check], failing: str, notes: Mapping[str, Check]) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            verbose = "verbose" in request.query_params
            return check_response(checks, failing, verbose=verbose, notes=notes if verbose else {})

        return endpoint

    async def metrics(request: Request) -> Response:
        own = generate_latest(context.metrics)  # before the response begins, so that a defect is an error
        return StreamingResponse(exposition(own, context.series), headers={"content-type": CONTENT_TYPE_LATEST})

    register_build(context.metrics)
    routes = [
        Route("/livez", checked(context.life, "not alive", {})),
        Route("/readyz", checked(context.checks, "not ready", context.notes)),
        Route("/metrics", metrics),
        *(Route(f"/readyz/{name}", checked(each, "not ready", {})) for name, each in context.readiness.items()),
        *(Route(path, page_endpoint(page)) for path, page in context.pages.items()),
        *context.routes,
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: answer_http_error})


def register_build(registry: CollectorRegistry) -> None:
    """Adds the metric that shows the version of this program."""
    build = Info("topoalign_build", "The version of this program.", registry=registry)
    build.info({"version": metadata.version("topoalign")})


def page_endpoint(page: Page) -> Endpoint:
    """Makes an endpoint for a page. A TopoalignError that the page raises becomes status 503, as in the API."""

    async def endpoint(request: Request) -> Response:
        try:
            body, content_type = await page()
        except TopoalignError as error:
            document = {"code": error.code, "finding": error.finding, "remedy": error.remedy}
            return JSONResponse(document, status_code=503)
        return Response(body, headers={"content-type": content_type, "cache-control": "no-store"})

    return endpoint


async def exposition(own: bytes, series: Iterable[Series]) -> AsyncGenerator[bytes, None]:
    """Yields the page of metrics: those of the process, then the series that its services write themselves."""
    yield own
    for write in series:
        await take_turn()
        async for chunk in write():
            yield chunk
            await take_turn()


def check_response(checks: Mapping[str, Check], failing: str, *, verbose: bool, notes: Mapping[str, Check]) -> Response:
    """The page of these checks: a line for each failed check, or with `verbose` for each; status 200 if all pass."""
    results = {name: check() for name, check in sorted(checks.items())}
    reasons = {name: reason for name, reason in results.items() if reason is not None}
    lines = [
        f"[+] {clean(name)}" if reason is None else f"[-] {clean(name)}: {clean(reason, 300)}"
        for name, reason in (results if verbose else reasons).items()
    ]
    noted = {name: note() for name, note in sorted(notes.items())}
    lines += [f"[!] {clean(name)}: {clean(note, 300)}" for name, note in noted.items() if note is not None]
    lines.append(failing if reasons else "ok")
    return PlainTextResponse("\n".join(lines) + "\n", status_code=503 if reasons else 200)


async def answer_http_error(request: Request, error: Exception) -> Response:
    """Responds to an unknown page or a wrong method with an error in the format of the API."""
    assert isinstance(error, HTTPException)
    body = {
        "code": "NotFound" if error.status_code == 404 else "BadRequest",
        "finding": f"{request.method} {clean(request.url.path, 200)}: {error.detail}",
        "remedy": "pages are /livez, /readyz, /metrics and, where a registry runs, those below /v1",
    }
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)

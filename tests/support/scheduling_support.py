"""A `Scheduler` that records what it is asked and answers by a rule, the extender in front of it, and its client."""

import json
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

import anyio
from anyio import to_thread
from starlette.routing import BaseRoute

from topoalign.core.model.errors import TopoalignError
from topoalign.core.model.ids import NodeName
from topoalign.registry.scheduling.extender import extender_server
from topoalign.registry.scheduling.extender.handlers import Extender, make_application
from topoalign.registry.scheduling.filter.scheduler import Scheduler
from topoalign.registry.scheduling.scheduling_api import Filtered, NodeRefusal, PodToSchedule, Victims
from topoalign.runtime.http_server import listen_on_port, serve_application

FULL = NodeRefusal(code="NotEnoughDevices", helped_by_victims=True)
HOPELESS = NodeRefusal(code="UnknownResource")


class RecordedScheduling(Scheduler):
    """Refuses the nodes that it is given reasons for, scores by position, and binds whatever comes."""

    def __init__(self, refused: Callable[[NodeName], NodeRefusal | None] = lambda node: None) -> None:
        self.refused = refused
        self.pods: list[PodToSchedule] = []
        self.labels: list[Mapping[NodeName, Mapping[str, str]]] = []
        self.bound: list[tuple[str, str, str, NodeName]] = []
        self.victims: list[Mapping[NodeName, Victims]] = []
        self.prepared: list[PodToSchedule] = []
        self.error: TopoalignError | None = None

    def _record(self, pod: PodToSchedule) -> None:
        self.pods.append(pod)
        if self.error is not None:
            raise self.error

    async def prepare(self, pod: PodToSchedule) -> None:
        """Nothing takes long here."""
        self.prepared.append(pod)

    async def plan_and_filter(
        self, pod: PodToSchedule, nodes: Sequence[NodeName], labels: Mapping[NodeName, Mapping[str, str]] = {}
    ) -> Filtered:
        await self.prepare(pod)
        return self.filter(pod, nodes, labels)

    def filter(
        self, pod: PodToSchedule, nodes: Sequence[NodeName], labels: Mapping[NodeName, Mapping[str, str]] = {}
    ) -> Filtered:
        self._record(pod)
        self.labels.append(labels)
        reasons = {node: self.refused(node) for node in nodes}
        return Filtered(
            passed=[node for node, reason in reasons.items() if reason is None],
            refused={node: reason for node, reason in reasons.items() if reason is not None},
        )

    def prioritize(self, pod: PodToSchedule, nodes: Sequence[NodeName]) -> Sequence[int]:
        self._record(pod)
        return [10 - position % 11 for position in range(len(nodes))]

    async def preempt(self, pod: PodToSchedule, victims: Mapping[NodeName, Victims]) -> Mapping[NodeName, Victims]:
        self._record(pod)
        self.victims.append(victims)
        return {node: some for node, some in victims.items() if self.refused(node) is None}

    async def bind(self, namespace: str, name: str, uid: str, node: NodeName) -> None:
        self.bound.append((namespace, name, uid, node))
        if self.error is not None:
            raise self.error


@asynccontextmanager
async def serving(
    scheduling: Scheduler,
    *,
    kubernetes: tuple[int, int] = (1, 36),
    seconds: float = 4.0,
    tls: ssl.SSLContext | None = None,
    more: Iterable[BaseRoute] = (),
) -> AsyncIterator[str]:
    """The URL of an extender that answers from this."""
    listener = listen_on_port("127.0.0.1", 0)
    binder = scheduling if isinstance(scheduling, RecordedScheduling) else RecordedScheduling()
    routes = [*Extender(scheduling, binder.bind, lambda: kubernetes, seconds=seconds).routes(), *more]

    async def run(*, task_status: anyio.abc.TaskStatus[str]) -> None:
        await serve_application(
            make_application(routes),
            listener,
            idle_seconds=extender_server.IDLE_SECONDS,
            tls=tls,
            task_status=task_status,
        )

    async with anyio.create_task_group() as tasks:
        yield await tasks.start(run)
        tasks.cancel_scope.cancel()


def go_json(value: object) -> bytes:
    """As Go writes it: compact, UTF-8, three characters escaped."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026").encode()


def request_bytes(path: str, body: bytes, **headers: str) -> bytes:
    """A request with the headers of a kube-scheduler."""
    fields = {
        "Host": "registry",
        "User-Agent": "Go-http-client/1.1",
        "Content-Length": str(len(body)),
        "Content-Type": "application/json",
        "Accept-Encoding": "gzip",
        **headers,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body


class RawClient:
    """One connection, on which whole requests are written and answers read as they arrive."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self.address = (host, int(port))
        self.socket = socket.create_connection(self.address, timeout=60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.socket.close()

    async def answer(self, request: bytes) -> bytes:
        """The answer to this request, by its content-length."""
        return await to_thread.run_sync(self._exchange, request, is_whole)

    async def rest(self, request: bytes) -> bytes:
        """All that comes until the server closes."""
        return await to_thread.run_sync(self._exchange, request, lambda found: False)

    def _exchange(self, request: bytes, is_enough: Callable[[bytes], bool]) -> bytes:
        self.socket.sendall(request)
        found = b""
        while not is_enough(found) and (got := self.socket.recv(1 << 22)):
            found += got
        return found


def is_whole(answer: bytes) -> bool:
    """Whether an answer has come as far as its content-length, or has none."""
    head, end, body = answer.partition(b"\r\n\r\n")
    size = re.search(rb"content-length: (\d+)", head)
    return bool(end) and (size is None or len(body) >= int(size[1]))


def split(answers: bytes) -> list[bytes]:
    """Answers that came one behind the other."""
    found = []
    while answers:
        head, _, rest = answers.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        found.append(head + b"\r\n\r\n" + rest[:length])
        answers = rest[length:]
    return found


def parsed(answer: bytes) -> tuple[int, dict[str, str], Any]:
    """Status, headers and JSON of an answer that came whole."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    assert int(headers["content-length"]) == len(body), "the answer came whole"
    return int(status.split()[1]), headers, json.loads(body)

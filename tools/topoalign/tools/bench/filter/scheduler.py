"""Asks the registry as kube-scheduler does, on one kept connection: filter, then prioritize with the nodes that passed."""

import socket
import time
from collections.abc import Sequence
from http import HTTPStatus
from itertools import count
from uuid import NAMESPACE_OID, uuid5

import msgspec

from topoalign.core.model.ids import NodeName
from topoalign.tools.bench.registry.reader import PATIENCE_SECONDS, NotAnswered


class Amounts(msgspec.Struct, frozen=True):
    """What the one container of a pod asks for; its limits are its requests."""

    gpus: int = 1
    cpus: int = 8
    mib: int = 32 * 1024


class Filtered(msgspec.Struct, rename="pascal"):
    """The answer to filter."""

    node_names: list[NodeName]
    failed_and_unresolvable_nodes: dict[NodeName, str] = {}
    failed_nodes: dict[NodeName, str] = {}
    error: str = ""


class Scheduler:
    """A client of the registry's scheduler extender on a port of this machine."""

    def __init__(self, port: int, nodes: Sequence[NodeName], seconds: float = PATIENCE_SECONDS) -> None:
        """`seconds`: how long it waits for a part of an answer."""
        self._socket = socket.create_connection(("127.0.0.1", port), seconds)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._nodes = list(nodes)
        self._numbers = count()

    def schedule(self, amounts: Amounts) -> tuple[float, Filtered]:
        """
        Milliseconds that filter and prioritize took together for another pod, and what filter answered. Reading its JSON and
        writing the requests does not count. Raises NotAnswered.
        """
        number = next(self._numbers)
        turned = number % len(self._nodes)
        pod = pod_json(number, amounts)
        took, filtered = self.filter(pod, self._nodes[turned:] + self._nodes[:turned])
        if len(filtered.node_names) > 1:
            more, answer = self._post("prioritize", about(pod, filtered.node_names))
            scores = msgspec.json.decode(answer)
            if len(scores) != len(filtered.node_names):
                raise NotAnswered("/scheduler/prioritize", f"{len(scores)} of {len(filtered.node_names)} scores")
            took += more
        return took * 1000, filtered

    def filter(self, pod: bytes, nodes: Sequence[NodeName]) -> tuple[float, Filtered]:
        """Seconds that filter took for this pod and these nodes, and its answer. Raises NotAnswered."""
        took, answer = self._post("filter", about(pod, nodes))
        filtered = msgspec.json.decode(answer, type=Filtered)
        if filtered.error:
            raise NotAnswered("/scheduler/filter", filtered.error)
        return took, filtered

    def bind(self, namespace: str, name: str, uid: str, node: NodeName) -> float:
        """Milliseconds that bind took. Raises NotAnswered where the pod is not bound."""
        body = {"PodName": name, "PodNamespace": namespace, "PodUID": uid, "Node": node}
        took, answer = self._post("bind", msgspec.json.encode(body))
        if error := msgspec.json.decode(answer)["Error"]:
            raise NotAnswered("/scheduler/bind", error)
        return took * 1000

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()

    def _post(self, verb: str, body: bytes) -> tuple[float, bytes]:
        head = (
            f"POST /scheduler/{verb} HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: Go-http-client/1.1\r\n"
            f"Content-Length: {len(body)}\r\nContent-Type: application/json\r\nAccept-Encoding: gzip\r\n\r\n"
        )
        request = head.encode() + body
        began = time.perf_counter()
        self._socket.sendall(request)
        status, answer = self._answer()
        took = time.perf_counter() - began
        if status != HTTPStatus.OK:
            raise NotAnswered(f"/scheduler/{verb}", f"{status} {answer[:200].decode(errors='replace')}")
        return took, answer

    def _answer(self) -> tuple[int, bytes]:
        data = b""
        while b"\r\n\r\n" not in data:
            data += self._received()
        head, _, rest = data.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        headers = dict(line.lower().split(b": ", 1) for line in lines[1:])
        parts = [rest]
        missing = int(headers[b"content-length"]) - len(rest)
        while missing > 0:
            parts.append(self._received())
            missing -= len(parts[-1])
        return int(lines[0].split()[1]), b"".join(parts)

    def _received(self) -> bytes:
        data = self._socket.recv(1 << 20)
        if not data:
            raise NotAnswered("/scheduler", "the connection was closed")
        return data


def about(pod: bytes, nodes: Sequence[NodeName]) -> bytes:
    """The arguments of filter and prioritize."""
    return b'{"Pod":%s,"Nodes":null,"NodeNames":%s}' % (pod, msgspec.json.encode(nodes))


def pod_json(number: int, amounts: Amounts) -> bytes:
    """A Guaranteed pod as kube-scheduler sends it, with a name and a UID of its own."""
    asked = {"cpu": str(amounts.cpus), "memory": f"{amounts.mib}Mi", "nvidia.com/gpu": str(amounts.gpus)}
    container = {
        "name": "main",
        "image": "registry.example.com/train:1",
        "resources": {"limits": asked, "requests": asked},
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "File",
        "imagePullPolicy": "IfNotPresent",
    }
    metadata = {
        "name": f"train-{number}",
        "namespace": "research",
        "uid": str(uuid5(NAMESPACE_OID, f"train-{number}")),
        "resourceVersion": str(1000 + number),
        "generation": 1,
        "creationTimestamp": "2026-11-22T02:45:54Z",
    }
    spec = {
        "containers": [container],
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 30,
        "dnsPolicy": "ClusterFirst",
        "securityContext": {},
        "schedulerName": "default-scheduler",
        "priority": 0,
        "enableServiceLinks": True,
        "preemptionPolicy": "PreemptLowerPriority",
    }
    return msgspec.json.encode(
        {"metadata": metadata, "spec": spec, "status": {"phase": "Pending", "qosClass": "Guaranteed"}}
    )

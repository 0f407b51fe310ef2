"""
The case `bind`: one pod after another is bound to a node with a real agent.

The agent plays an HGX H100 for the stand-in of a kubelet, and confirms each bind by what that kubelet's files have. The API
server is a stand-in in this process, which keeps its objects in memory. Each pod is created and filtered before it is bound,
as a scheduler does it; the time is that of the bind alone. After it the pod is deleted, and its reservation ends before the
next one.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from itertools import count
from pathlib import Path

import msgspec
from anyio.from_thread import BlockingPortal, start_blocking_portal

from topoalign.cli.link import connect_to_bus
from topoalign.core import wire
from topoalign.core.model.events import ReservationsChanged
from topoalign.core.model.ids import GPU, NodeName
from topoalign.core.model.requests import AdmissionRules, Policy
from topoalign.core.ports import Bus, Stream
from topoalign.machines import load_machine
from topoalign.runtime.tasks import background
from topoalign.testing.fake_api_server.cluster import FakeCluster
from topoalign.testing.fake_api_server.server import fake_api_server
from topoalign.testing.fake_kubelet.kubelet import FakeKubelet
from topoalign.testing.ports import kept_ports
from topoalign.tools.bench.device_plugin.agent import Agent, running
from topoalign.tools.bench.device_plugin.node import Row, scratch
from topoalign.tools.bench.filter.scheduler import Amounts, Scheduler, pod_json
from topoalign.tools.bench.registry.measure import streams
from topoalign.tools.bench.registry.reader import NotAnswered, Reader, until
from topoalign.tools.measuring import summarize_times

NODE = NodeName("gpu-00000.example.com")
MACHINE = "hgx-h100"
LOOK_SECONDS = 0.005
"""Between two looks at what is reserved."""
WARM = 3
"""Binds that do not count."""
RULES = AdmissionRules(policy=Policy.RESTRICTED, reserved_cpus="0-3", memory_manager="None")
CONFIG = """\
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
topologyManagerPolicy: restricted
cpuManagerPolicy: static
reservedSystemCPUs: 0-3
"""


def bind(calls: int) -> Row:
    """The case with so many binds. Raises NotAnswered."""
    with (
        start_blocking_portal() as portal,
        scratch() as folder,
        streams(portal, folder / "nats") as url,
        portal.wrap_async_context_manager(connect_to_bus(url)) as bus,
        portal.wrap_async_context_manager(kubelet_in(folder / "kubelet")) as kubelet,
        portal.wrap_async_context_manager(fake_api_server(FakeCluster())) as api,
        running("node", agent_settings(url, folder)) as agent,
    ):
        until(lambda: portal.call(kubelet.allocatable, GPU) > 0, "the GPUs are not listed", agent)
        portal.call(api.cluster.add_node, NODE)
        with asking(url, str(api.kubeconfig(folder / "kubeconfig"))) as (registry, scheduler):
            pods = Pods(portal, bus, api.cluster, registry, scheduler)
            for _ in range(WARM):
                pods.bind()
            registry.longest_block_ms()
            row = summarize_times("bind", [pods.bind() for _ in range(calls)])
            return row | {"longest_block_ms": registry.longest_block_ms(), "rss_mb": registry.rss_mb}


class Pods:
    """Pods of the benchmark, one after another."""

    def __init__(
        self, portal: BlockingPortal, bus: Bus, cluster: FakeCluster, registry: Agent, scheduler: Scheduler
    ) -> None:
        self._portal = portal
        self._bus = bus
        self._cluster = cluster
        self._registry = registry
        self._scheduler = scheduler
        self._numbers = count()

    def bind(self) -> float:
        """Milliseconds that a bind took. The pod is gone then, and what was reserved for it. Raises NotAnswered."""
        pod = pod_json(next(self._numbers), Amounts())
        made = self._portal.call(self._cluster.add_pod, msgspec.json.decode(pod))["metadata"]
        if not self._scheduler.filter(pod, [NODE])[1].node_names:
            raise NotAnswered("/scheduler/filter", "the node does not admit the pod")
        took = self._scheduler.bind(made["namespace"], made["name"], made["uid"], NODE)
        if not self._reserved():
            raise NotAnswered("/scheduler/bind", "nothing is reserved")
        self._portal.call(self._cluster.delete_pod, made["namespace"], made["name"], None, 0)
        until(lambda: not self._reserved(), "the reservation of a deleted pod", self._registry, LOOK_SECONDS)
        return took

    def _reserved(self) -> bool:
        """Whether anything is reserved on the node."""
        newest = self._portal.call(self._bus.newest, Stream.RESERVATIONS, wire.reservation_subject(NODE))
        if newest is None:
            return False
        event = wire.decode_event(newest.message)
        assert isinstance(event, ReservationsChanged), "its subject has nothing else"
        return bool(event.reservations)


@asynccontextmanager
async def kubelet_in(root: Path) -> AsyncIterator[FakeKubelet]:
    """A kubelet with this root directory, while the context is open."""
    kubelet = FakeKubelet(root / "device-plugins", root / "pod-resources", load_machine(MACHINE).topology, RULES)
    (root / "config.yaml").write_text(CONFIG)
    async with background() as tasks:
        await tasks.start(kubelet.run)
        yield kubelet


def agent_settings(url: str, folder: Path) -> dict[str, str]:
    """Of the node's agent."""
    return {
        "NODE": NODE,
        "MACHINE": MACHINE,
        "NATS_URL": url,
        "STATE_DIR": str(folder / "state"),
        "KUBELET_DIR": str(folder / "kubelet" / "device-plugins"),
        "KUBELET_VERSION": "v1.36.2",
        "LOG_LEVEL": "error",
    }


@contextmanager
def asking(url: str, kubeconfig: str) -> Iterator[tuple[Agent, Scheduler]]:
    """A registry with access to the API server that knows of the node what it needs to, while the context is open."""
    with kept_ports(2) as (pages_port, port):
        settings = {
            "NATS_URL": url,
            "HTTP_PORT": str(pages_port),
            "SCHEDULER_PORT": str(port),
            "KUBERNETES": kubeconfig,
            "LOG_LEVEL": "error",
        }
        with running("registry", settings, observed=True) as registry, closing(Reader(pages_port)) as reader:
            until(lambda: reader.is_ok("/readyz"), "the registry has not read the streams", registry)
            with closing(Scheduler(port, [NODE])) as scheduler:
                until(
                    lambda: bool(scheduler.schedule(Amounts())[1].node_names), "the node does not admit a pod", registry
                )
                yield registry, scheduler

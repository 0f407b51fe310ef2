"""
Finds the nodes whose GPUs HAMi allocates, from annotations in the API server: their GPUs, the pods that hold them, and
whether the nodes are offered.

HAMi manages a node if the Node has HAMi's register annotation, and either the handshake is live or a bound pod that has
not ended holds a share that HAMi allocated. Such a node is offered to no pod, because topoalign would allocate GPUs
that HAMi's containers share. If an allocator of topoalign answers for the node, both would allocate the same GPUs. The
node is then a `ContestedNode`, which is logged and counted; otherwise it is a `ForeignNode`.

A pod holds a share if one of its containers requests devices and its annotation names a GPU. The GPU need not be
registered: HAMi's plugin does not register a GPU that it cannot reach, even if containers use it. The amount does not
matter: 0 means no limit. A pod of another system with this annotation and a device request looks like a pod of HAMi.

An annotation that cannot be decoded is logged once, but still counts: HAMi manages the node, and a pod that requests
devices holds a share.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

import anyio
import msgspec
import structlog
from anyio.abc import TaskStatus

from topoalign.core import wire
from topoalign.core.demand.share_annotations import DEVICES_ALLOCATED
from topoalign.core.diagnosis.hami_nodes import ContestedNode, ForeignNode, ForeignPage, ForeignRequest
from topoalign.core.model.errors import clean
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Bus, Clock, Endpoint
from topoalign.core.sharing.hami.node_annotations import (
    ForeignGpu,
    ForeignPod,
    HamiLiveness,
    foreign_gpus,
    liveness_of,
    read_registered_gpus,
    read_shares,
)
from topoalign.core.sharing.hami.registration import InvalidAnnotation, RegisteredGpu
from topoalign.kubelet.files.resource_quantities import whole
from topoalign.registry.ports import NotReadYet, SeenNode, SeenPod
from topoalign.runtime.replies import answer_with
from topoalign.runtime.request_turns import TaskTurns

HAMI = "hami"
LOOK_SECONDS = 15.0
"""Seconds between two checks for expired handshakes; HAMi's scheduler uses the same interval."""
LONGEST_HANDSHAKE = 100
"""Maximum number of characters of a handshake that are stored."""
SERVICE = "topoalign-registry"
MOST = 1_000
"""Maximum number of nodes in a page. Even with names of 253 characters, a page is far smaller than a message can be."""
NOTHING: Mapping[str, ForeignPod] = {}

log = structlog.get_logger("topoalign.registry.foreign_nodes")


class HamiNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node with HAMi's register annotation."""

    gpus: tuple[RegisteredGpu, ...]
    finding: str
    """Why its GPUs are unknown; empty: they are known."""
    handshake: str | None
    cordon: str | None
    allocatable: int


class HamiView(msgspec.Struct, frozen=True, kw_only=True):
    """The information about a node in HAMi's annotations."""

    liveness: HamiLiveness
    """Liveness of HAMi's device plugin on the node."""
    handshake: str | None
    """The handshake annotation. Its time is the local time of HAMi's scheduler."""
    finding: str
    """Why the GPUs are unknown; empty: they are known."""
    gpus: tuple[ForeignGpu, ...]


class ForeignNodes:
    """
    The nodes and pods with HAMi's annotations. `run` checks the handshakes. The methods that note a change return the
    node if its `refusal` has changed, otherwise None.
    """

    def __init__(self, clock: Clock, answering: Callable[[NodeName], bool] = lambda node: False) -> None:
        """`answering`: whether an allocator of topoalign answers for a node."""
        self._clock = clock
        self._answering = answering
        self._nodes: dict[NodeName, HamiNode] = {}
        self._pods: dict[NodeName, dict[str, ForeignPod]] = {}
        """Node -> UID -> pod that is bound to it, has not ended and holds shares that HAMi allocated."""
        self._node_of: dict[str, NodeName] = {}
        self.refusals: dict[NodeName, str] = {}
        """Node -> the code of the refusal for every pod, of all nodes that HAMi manages."""

    def __contains__(self, node: NodeName) -> bool:
        """Whether the node has HAMi's register annotation."""
        return node in self._nodes

    def owner(self, node: NodeName) -> str | None:
        """`hami` if HAMi allocates the GPUs of a node; None: it does not."""
        return HAMI if node in self.refusals else None

    def refusal(self, node: NodeName) -> str:
        """The code of the refusal for every pod; empty: HAMi does not manage the node."""
        return self.refusals.get(node, "")

    @property
    def names(self) -> list[NodeName]:
        """The names of all nodes with HAMi's register annotation, sorted."""
        return sorted(self._nodes)

    def pods(self, node: NodeName) -> int:
        """The number of pods on a node that hold shares that HAMi allocated."""
        return len(self._pods.get(node, NOTHING))

    def liveness(self, node: NodeName) -> HamiLiveness:
        """The liveness of HAMi's device plugin on a node that is in `names`."""
        known = self._nodes[node]
        now = datetime.fromtimestamp(self._clock.wall(), UTC).replace(tzinfo=None)
        return liveness_of(known.handshake, known.allocatable, now)

    def gpus(self, node: NodeName) -> tuple[RegisteredGpu, ...]:
        """The GPUs of a node that is in `names`."""
        return self._nodes[node].gpus

    def view(self, node: NodeName) -> HamiView | None:
        """The information about a node in HAMi's annotations; None: there are none."""
        known = self._nodes.get(node)
        if known is None:
            return None
        return HamiView(
            liveness=self.liveness(node),
            handshake=known.handshake and clean(known.handshake, LONGEST_HANDSHAKE),
            finding=known.finding,
            gpus=foreign_gpus(known.gpus, known.cordon, self._pods.get(node, NOTHING).values()),
        )

    def see(self, node: SeenNode) -> NodeName | None:
        """Notes a node of the API server."""
        hami = node.hami
        if hami is None or hami.register is None:
            return self.lose(node.name)
        before = self._nodes.get(node.name)
        finding = ""
        try:
            gpus = read_registered_gpus(hami.register)
        except InvalidAnnotation as error:
            gpus = ()
            finding = error.finding
            if before is None or not before.finding:
                log.warning("HAMi's GPUs of a node cannot be read", node=clean(node.name), finding=finding)
        self._nodes[node.name] = HamiNode(
            gpus=gpus,
            finding=finding,
            handshake=hami.handshake and hami.handshake[:LONGEST_HANDSHAKE],
            cordon=hami.cordon,
            allocatable=node.allocatable_gpus,
        )
        return self.observe(node.name)

    def lose(self, node: NodeName) -> NodeName | None:
        """Notes that a node was deleted, or that HAMi has no GPUs there."""
        return self._judge(node) if self._nodes.pop(node, None) is not None else None

    def see_pod(self, pod: SeenPod) -> NodeName | None:
        """Notes a pod of the API server."""
        spec = pod.content.spec
        text = pod.annotations.get(DEVICES_ALLOCATED)
        requests_devices = any(
            "/" in name and amount is not None and whole(str(amount)) != 0 for name, amount in pod.limits()
        )
        if text is None or pod.node is None or pod.finished or not requests_devices:
            return self.lose_pod(pod.uid)
        init = [each.name for each in (spec and spec.init_containers) or ()]
        containers = [each.name for each in (spec and spec.containers) or ()]
        try:
            shares = read_shares(text, init, containers)
        except InvalidAnnotation as error:
            if pod.uid not in self._node_of:
                log.warning("HAMi's shares of a pod cannot be read", pod=clean(pod.name), finding=error.finding)
            shares = ()
        else:
            if not any(share.gpu for share in shares):
                return self.lose_pod(pod.uid)
        self._node_of[pod.uid] = pod.node
        held = ForeignPod(namespace=pod.namespace, name=pod.name, uid=pod.uid, shares=shares)
        self._pods.setdefault(pod.node, {})[pod.uid] = held
        return self.observe(pod.node)

    def lose_pod(self, uid: str) -> NodeName | None:
        """Notes that a pod was deleted or holds no share of HAMi."""
        node = self._node_of.pop(uid, None)
        if node is None:
            return None
        del self._pods[node][uid]
        if not self._pods[node]:
            del self._pods[node]
        return self.observe(node)

    def observe(self, node: NodeName) -> NodeName | None:
        """Checks a node again after its facts, its pods, or whether its allocator answers have changed."""
        return self._judge(node) if node in self._nodes else None

    async def run(self, changed: Callable[[NodeName], None]) -> None:
        """Checks the handshakes until cancelled. Calls `changed` with each node whose `refusal` has changed."""
        turns = TaskTurns(self._clock)
        while True:
            await self._clock.sleep(LOOK_SECONDS)
            for node in tuple(self._nodes):
                if self.observe(node) is not None:
                    changed(node)
                await turns.give()

    def _judge(self, node: NodeName) -> NodeName | None:
        before = self.refusal(node)
        refusal = ""
        if node in self._nodes and (self.pods(node) or self.liveness(node) is HamiLiveness.LIVE):
            refusal = ContestedNode.code if self._answering(node) else ForeignNode.code
        if refusal == before:
            return None
        if refusal:
            self.refusals[node] = refusal
        else:
            del self.refusals[node]
        if refusal == ContestedNode.code:
            log.warning("HAMi and topoalign both give out the GPUs of a node: it is not offered", node=clean(node))
        elif before == ContestedNode.code:
            log.info("one alone gives out the GPUs of a node", node=clean(node))
        return node


async def serve_foreign(
    bus: Bus,
    foreign: ForeignNodes,
    behind: Callable[[], str | None],
    *,
    task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Answers `ForeignRequest` until cancelled. `behind`: why nodes or pods have not been read yet; None: they have."""

    async def list_nodes(request: ForeignRequest) -> ForeignPage:
        if (finding := behind()) is not None:
            raise NotReadYet(finding)
        names = sorted(foreign.refusals)
        start = bisect_right(names, request.after)
        page = names[start : start + MOST]
        return ForeignPage(nodes={name: foreign.refusal(name) for name in page}, has_more=start + MOST < len(names))

    endpoint = Endpoint(name="foreign", subject=wire.foreign_subject(), answer=answer_with(ForeignRequest, list_nodes))
    async with bus.serve(SERVICE, [endpoint]):
        task_status.started()
        await anyio.sleep_forever()

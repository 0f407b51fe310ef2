"""
`allocate`, `what-if`, `release`, `trust`, `explain`, `watch` and `topo` against a node that answers over a real NATS server.

The node is a scripted one: what it answers is fixed, so that the tests see what the command line makes of it.
"""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from anyio.from_thread import start_blocking_portal

from topoalign.cli import link, root
from topoalign.core import wire
from topoalign.core.model.decisions import Admission, Alignment, Considered, Explained, Explanation, Refusal
from topoalign.core.model.errors import KubeletOwnsDevices, NotFound
from topoalign.core.model.events import (
    Allocation,
    AllocationBound,
    AllocationGranted,
    AllocationRefused,
    AllocationReleased,
    AllocationsSnapshot,
    Owner,
    TopologyDiscovered,
)
from topoalign.core.model.hints import TopologyHint
from topoalign.core.model.ids import (
    GPU,
    AllocationID,
    ContainerName,
    DeviceID,
    Namespace,
    NodeName,
    PodName,
    ResourceName,
)
from topoalign.core.model.requests import AllocateRequest, ClockReading, ExplainRequest, NodeRequest, ReleaseRequest
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.core.ports import Endpoint
from topoalign.runtime.nats_bus import connect_bus
from topoalign.runtime.nats_server import local_nats
from topoalign.runtime.replies import answer_with

NODE = NodeName("gpu.node-1")
OWNER = Owner(namespace=Namespace("ml"), pod=PodName("train\x1b[2J"), container=ContainerName("main"))
GPUS = tuple(DeviceID(f"GPU-{name}") for name in "abcd")
HELD = Allocation(id=AllocationID("a-1"), owner=OWNER, devices={GPU: GPUS[1:3]}, cpus="0-3", affinity=(0,))
EXPLANATION = Explanation(
    alignments=(
        Alignment(
            container=ContainerName("main"),
            hints={"device": {GPU: (TopologyHint(0b01, True),)}},
            merged=TopologyHint(0b01, True),
            admitted=True,
        ),
    ),
    considered=(
        Considered(resource=GPU, devices=GPUS[1:3], seam="2 NVLinks", score=240, chosen=True, why="best connected"),
    ),
)


async def read_clock(request: NodeRequest) -> ClockReading:
    return ClockReading(clock="1", now=0.0)


class Node:
    """What was asked of the scripted node: the newest request of each verb."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}
        self.doubt: str | None = None

    async def allocate(self, request: AllocateRequest) -> Admission | Refusal:
        self.asked["allocate"] = request
        return self.decision(request)

    async def what_if(self, request: AllocateRequest) -> Admission | Refusal:
        self.asked["what-if"] = request
        return self.decision(request)

    def decision(self, request: AllocateRequest) -> Admission | Refusal:
        if request.pod.name == "kubelet":
            raise KubeletOwnsDevices(NODE)
        if request.pod.name == "unserved":
            names = (ResourceName("nvidia.com/gpus"),)
            return Admission(allocations=(HELD,), explanation=msgspec.structs.replace(EXPLANATION, unserved=names))
        if request.pod.containers[0].limits.get(GPU, 0) > len(GPUS):
            return Refusal(
                reason="TopologyAffinityError",
                code="NotEnoughDevices",
                finding="4 GPUs are free",
                remedy="ask for fewer",
                container=None,
                provider=None,
                explanation=EXPLANATION,
            )
        return Admission(allocations=(HELD,), explanation=EXPLANATION)

    async def release(self, request: ReleaseRequest) -> tuple[AllocationID, ...]:
        if request.target != "ml/train":
            raise NotFound("live allocation or pod", request.target, "look at `topoalign watch`")
        return (HELD.id,)

    async def trust(self, request: NodeRequest) -> str | None:
        doubt, self.doubt = self.doubt, None
        return doubt

    async def explain(self, request: ExplainRequest) -> Explained:
        decision = Admission(allocations=(HELD,), explanation=EXPLANATION)
        return Explained(allocations=(HELD,), decision=decision if request.target == "ml/train" else None)

    @asynccontextmanager
    async def serving(self, store: Path) -> AsyncIterator[str]:
        """The node on a NATS server of its own, which holds what the node has said. Yields its URL."""
        answers = {
            "clock": answer_with(NodeRequest, read_clock),
            "allocate": answer_with(AllocateRequest, self.allocate),
            "what-if": answer_with(AllocateRequest, self.what_if),
            "release": answer_with(ReleaseRequest, self.release),
            "explain": answer_with(ExplainRequest, self.explain),
            "trust": answer_with(NodeRequest, self.trust),
        }
        endpoints = [
            Endpoint(name=verb, subject=wire.admission_subject(NODE, verb), answer=answer)
            for verb, answer in answers.items()
        ]
        topology = Topology(
            gpus=tuple(Gpu(id=gpu, index=i, pci=f"0000:0{i}:00.0", numa_affinity=(0,)) for i, gpu in enumerate(GPUS))
        )
        facts = (
            TopologyDiscovered(node=NODE, epoch=1, revision=1, boot_id="b", source="described", topology=Topology()),
            TopologyDiscovered(node=NODE, epoch=1, revision=2, boot_id="b", source="described", topology=topology),
            AllocationsSnapshot(node=NODE, epoch=9, seq=1, allocations=(), digest=""),
            AllocationGranted(node=NODE, epoch=9, seq=2, allocation=msgspec.structs.replace(HELD, owner=None)),
            AllocationBound(node=NODE, epoch=9, seq=3, allocation=HELD.id, owner=OWNER),
            AllocationRefused(
                node=NODE,
                epoch=9,
                seq=4,
                namespace=OWNER.namespace,
                pod=OWNER.pod,
                container=None,
                reason="TopologyAffinityError",
                code="x",
                finding="no\nfit",
                remedy="",
            ),
            AllocationReleased(node=NODE, epoch=9, seq=5, allocation=HELD.id, reason="gone"),
        )
        async with local_nats(store) as url, connect_bus(url) as bus, bus.serve("topoalign-allocator", endpoints):
            for fact in facts:
                await bus.publish(wire.encode_event(fact, 1_700_000_000.0))
            yield url


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, str]]:
    node = Node()
    with (
        start_blocking_portal("asyncio") as portal,
        portal.wrap_async_context_manager(node.serving(tmp_path_factory.mktemp("nats"))) as url,
    ):
        yield node, url


@pytest.fixture
def node(serving: tuple[Node, str], monkeypatch: pytest.MonkeyPatch) -> Node:
    """The node, with the environment set so that the commands find it."""
    monkeypatch.setenv("TOPOALIGN_NATS_URL", serving[1])
    monkeypatch.setenv("TOPOALIGN_NODE", NODE)
    return serving[0]


class Ran:
    """A command line that has been run, and what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str], line: str) -> None:
        self.status = root.run_command_line(line.split())
        self.out, self.err = capsys.readouterr()

        assert {"\n"} >= {c for c in self.out + self.err if not c.isprintable()}, "foreign text is never obeyed"

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def test_allocate_asks_for_what_the_options_say(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    Ran(capsys, "allocate --gpus 2 --cpus 8 --memory 64Gi --nics 1 --pod ml/train --policy restricted --mode kubelet")

    request = node.asked["allocate"]
    amounts = {"nvidia.com/gpu": 2, "cpu": 8000, "memory": 64 * 2**30, "topoalign.io/nic": 1}
    (container,) = request.pod.containers
    assert (NODE, "ml", "train") == (request.node, request.pod.namespace, request.pod.name)
    assert (amounts, amounts) == (container.requests, container.limits)
    assert {"policy": "restricted", "mode": "kubelet"} == request.rules


def test_allocate_shows_each_device_with_index_uuid_pci_and_numa_node(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = Ran(capsys, "allocate --gpus 2")

    assert 0 == ran.status
    assert ["nvidia.com/gpu", "2", "GPU-c", "0000:02:00.0", "0"] == ran.out.splitlines()[3].split()
    assert "seam        PCIe within a NUMA node" in ran.out
    assert "topoalign release default/cli-" in ran.err


def test_a_refusal_ends_with_4_and_says_why_and_what_to_do(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(capsys, "what-if --gpus 8")

    assert 4 == ran.status
    for words in ("TopologyAffinityError (NotEnoughDevices)", "finding  4 GPUs are free", "remedy   ask for fewer"):
        assert words in ran.out


def test_a_name_that_the_node_does_not_serve_is_a_finding(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    """With exit code 6 and nothing of what else the pod would get."""
    ran, document = (
        Ran(capsys, "what-if --gpus 1 --pod unserved"),
        Ran(capsys, "what-if --gpus 1 --pod unserved --json"),
    )

    assert (6, "") == (ran.status, ran.out)
    assert "nobody serves 'nvidia.com/gpus' here" in ran.err
    assert ("UnservedResource", 6) == (document.json["error"]["code"], document.json["error"]["exit"])


def test_json_answers_are_documents_with_the_whole_decision(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    granted, refused = Ran(capsys, "allocate --gpus 2 --json"), Ran(capsys, "what-if --gpus 8 --json")

    assert (0, 4) == (granted.status, refused.status)
    assert "a-1" == granted.json["decision"]["allocations"][0]["id"]
    assert ("Refusal", "NotEnoughDevices") == tuple(refused.json["decision"][key] for key in ("type", "code"))


def test_what_the_node_refuses_to_do_has_the_exit_code_of_its_reason(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    kubelet, missing = Ran(capsys, "allocate --gpus 1 --pod kubelet"), Ran(capsys, "release ml/other --json")

    assert (4, 3) == (kubelet.status, missing.status)
    assert "code: KubeletOwnsDevices" in kubelet.err
    assert "NotFound" == missing.json["error"]["code"]


def test_release_names_what_was_given_back(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    assert "released a-1\n" == Ran(capsys, "release ml/train").out
    assert ["a-1"] == Ran(capsys, "release ml/train --json").json["released"]


def test_trust_says_which_doubt_it_ended(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    node.doubt = "line 7 cannot be decoded\x1b[2J"
    first, again = Ran(capsys, "trust"), Ran(capsys, "trust")
    node.doubt = "it is empty"

    assert "the record is confirmed; it was unconfirmed: line 7 cannot be decoded?[2J\n" == first.out
    assert "the record was confirmed already\n" == again.out
    assert "it is empty" == Ran(capsys, "trust --json").json["doubt"]


def test_explain_shows_hints_merge_and_every_set_considered(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(capsys, "explain ml/train")

    assert 0 == ran.status
    for words in ("{0}*", "merged: {0}*, admitted", "GPU1 GPU2  2 NVLinks  240    best connected"):
        assert words in ran.out


def test_explain_says_where_nothing_is_remembered(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    assert "not known: the kubelet made this decision" in Ran(capsys, "explain a-1").err


def test_watch_words_every_event_for_people(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    lines = Ran(capsys, "watch --since 0 --count 5").out.splitlines()

    told = [line.split(NODE + " ", 1)[1] for line in lines]
    assert [
        "snapshot  0 live",
        "granted   not known yet: GPU1 GPU2 CPUs 0-3 [a-1]",
        "bound     ml/train?[2J/main: GPU1 GPU2 CPUs 0-3 [a-1]",
        "refused   ml/train?[2J: TopologyAffinityError, no?fit",
        "released  ml/train?[2J/main: GPU1 GPU2 CPUs 0-3 [a-1] (gone)",
    ] == told
    assert ["1", "2", "3", "4", "5"] == [line.split()[0] for line in lines]


def test_watch_as_ndjson_has_an_event_a_line_with_its_position(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) for line in Ran(capsys, "watch --since 3 --count 2 --json").out.splitlines()]

    assert [(4, "AllocationRefused"), (5, "AllocationReleased")] == [(r["position"], r["event"]["type"]) for r in rows]


def test_topo_of_a_running_node_is_its_newest_topology(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(capsys, "topo --json")

    assert 0 == ran.status
    assert list(GPUS) == [gpu["id"] for gpu in ran.json["gpus"]]


def test_topo_of_a_node_that_never_spoke_is_not_found(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    assert 3 == Ran(capsys, "topo --node other").status


def test_a_silent_node_is_unavailable_and_the_remedy_names_the_option(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = Ran(capsys, "allocate --gpus 1 --node other")

    assert 69 == ran.status
    assert "allocator of node other does not answer" in ran.err
    assert "--node" in ran.err


def test_doctor_finds_nats_right(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    findings = {finding["check"]: finding for finding in Ran(capsys, "doctor --json").json["findings"]}

    assert "ok" == findings["NATS"]["verdict"]


@pytest.mark.parametrize("line", ["allocate --gpus 1", "watch", "fragmentation", "explain a", "release a", "trust"])
def test_without_anything_running_the_remedy_is_told(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TOPOALIGN_NATS_URL", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    ran = Ran(capsys, line)

    assert (69, "") == (ran.status, ran.out)
    assert "start `topoalign up`" in ran.err


def test_an_unreachable_nats_is_unavailable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "CONNECT_SECONDS", 0.1)

    ran = Ran(capsys, "watch --nats nats://127.0.0.1:1 --json")

    assert 69 == ran.status
    assert "BusUnavailable" == ran.json["error"]["code"]

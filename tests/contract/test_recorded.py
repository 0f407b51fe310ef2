"""
State directories and streams that an earlier version wrote are read, and written again byte for byte.

`tests/recorded/<day>` has what a version of that day left behind: for each node its state directory, and all messages of
the two streams. A node with a kubelet gave out GPUs and NICs, of which one pod went, and a GPU was cordoned; a node without
one shared its GPUs in time, gave out CPUs and memory, released a pod and refused one.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from cluster_support import tell

from topoalign.allocator.ledger import journal_format
from topoalign.core import wire
from topoalign.core.model.events import AllocationsSnapshot, Event, LedgerFact
from topoalign.core.model.ids import DeviceID, NodeName
from topoalign.core.ports import Message
from topoalign.core.state.fold import NodeState, replay
from topoalign.discovery.device_record import RecordFile
from topoalign.registry.cluster_nodes import Cluster

RECORDED = sorted(path for path in (Path(__file__).parents[1] / "recorded").iterdir() if path.is_dir())
STATES = sorted(path for day in RECORDED for path in day.glob("*/state"))
HELD = {
    "node-kubelet": {
        "default/late": {"GPU-4", "GPU-5"},
        "default/next": {"GPU-7"},
        "default/serve": {"GPU-6"},
        "default/train": {"GPU-0", "GPU-1", "GPU-2", "GPU-3", "mlx5_0", "mlx5_1"},
    },
}


class Line(msgspec.Struct, frozen=True):
    """A message of a stream, as the recordings have it."""

    subject: str
    headers: dict[str, str]
    body: msgspec.Raw


def messages(day: Path, stream: str) -> Iterator[Message]:
    for line in (day / f"{stream}.jsonl").read_bytes().splitlines():
        read = msgspec.json.decode(line, type=Line)
        yield Message(subject=read.subject, headers=read.headers, body=bytes(read.body))


def facts(day: Path) -> list[Event]:
    return [wire.decode_event(message) for stream in ("nodes", "allocations") for message in messages(day, stream)]


def held(state: NodeState) -> dict[str, set[str]]:
    """Pod -> its devices."""
    pods: dict[str, set[str]] = {}
    for allocation in state.allocations.values():
        assert allocation.owner is not None
        pods.setdefault(f"{allocation.owner.namespace}/{allocation.owner.pod}", set()).update(allocation.device_ids)
    return pods


@pytest.mark.parametrize("state", STATES, ids=lambda path: f"{path.parts[-3]}-{path.parts[-2]}")
def test_a_recorded_journal_is_whole_and_agrees_with_its_stream(state: Path) -> None:
    node = NodeName(state.parent.name)
    found = journal_format.read_journal((state / "journal").read_bytes(), node, None)
    events = [event for line in found.lines for event in line.entry.events]
    newest = max(at for at, event in enumerate(events) if isinstance(event, AllocationsSnapshot))
    ours = [event for event in facts(state.parents[1]) if isinstance(event, LedgerFact) and event.node == node]
    state_then = replay(node, events[newest:])

    assert (None, None) == (found.damage, found.unconfirmed)
    assert held(replay(node, ours)) == held(state_then)
    assert f"{state_then.epoch} {state_then.seq}" == " ".join((state / "published").read_text().split())
    if node in HELD:
        assert HELD[node] == held(state_then)


@pytest.mark.parametrize("state", STATES, ids=lambda path: f"{path.parts[-3]}-{path.parts[-2]}")
def test_a_recorded_journal_is_written_again_byte_for_byte(state: Path) -> None:
    """So a version of that day reads what this one writes."""
    content = (state / "journal").read_bytes()
    found = journal_format.read_journal(content, NodeName(state.parent.name), None)
    lines = content.splitlines(keepends=True)

    assert lines[1:] == [journal_format.encode_line(line.entry) for line in found.lines]


@pytest.mark.parametrize("day", RECORDED, ids=lambda path: path.name)
@pytest.mark.parametrize("stream", ["allocations", "nodes"])
def test_a_recorded_message_is_encoded_again_byte_for_byte(day: Path, stream: str) -> None:
    for message in messages(day, stream):
        event = wire.decode_event(message)
        again = wire.encode_event(event, 0.0)

        assert (message.subject, message.body) == (again.subject, again.body)
        assert {**message.headers, "ce-time": ""} == {**again.headers, "ce-time": ""}


@pytest.mark.parametrize("day", RECORDED, ids=lambda path: path.name)
def test_the_registry_folds_recorded_streams(day: Path) -> None:
    cluster = Cluster()
    for event in facts(day):
        tell(cluster, event)

    assert {"node-bus", "node-kubelet"} == set(cluster.nodes)
    assert HELD["node-kubelet"] == held(cluster.member(NodeName("node-kubelet")).state)


@pytest.mark.parametrize("day", RECORDED, ids=lambda path: path.name)
def test_what_discovery_remembered_is_read(day: Path, tmp_path: Path) -> None:
    shutil.copytree(day / "node-kubelet" / "state", tmp_path / "state")
    file = RecordFile(tmp_path / "state", "another boot")

    assert file.load() is None
    assert {DeviceID("GPU-7")} == set(file.kept.cordons)

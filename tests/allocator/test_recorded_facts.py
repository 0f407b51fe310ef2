"""
Journals, messages and HTTP answers of earlier versions, from 0.1.0 on, are read, and written again byte for byte.

So agents of one version and the next one can share a cluster: fields may be added to facts, and none that stands there may
change.
"""

import shutil
from pathlib import Path

import anyio
import pytest
from device_allocations_support import GPUS, NODE
from recorded_support import answers_of, message_of, recordings

from topoalign.allocator.ledger import journal_format
from topoalign.core import wire
from topoalign.core.model.events import AllocationRefused, AllocationsSnapshot
from topoalign.core.state.fold import NodeState, replay
from topoalign.discovery.device_record import RecordFile

RECORDED = Path(__file__).parents[1] / "recorded" / "0.1.0"
JOURNAL = (RECORDED / "journal").read_bytes()
MESSAGES = (RECORDED / "messages").read_bytes()
ANSWERS = (RECORDED / "answers").read_bytes()


def read_journal(content: bytes) -> journal_format.JournalContent:
    found = journal_format.read_journal(content, NODE, None)
    assert (None, None, 0) == (found.damage, found.unconfirmed, found.unfinished)
    return found


def test_the_recordings_hold_devices_in_every_way() -> None:
    """Otherwise the tests below would pass for nothing."""
    for way in (
        b"GPU-1::2",
        b"MIG-0::1",
        b'"parents":{"0000:91:00.2":"mlx5_1"}',
        b'"virtual_functions":',
        b'"displaced":[',
    ):
        assert way in JOURNAL
        assert way.replace(b'"', b'\\"') in MESSAGES


def test_a_recorded_journal_is_written_again_byte_for_byte() -> None:
    header = journal_format.encode_line(journal_format.JournalHeader(version=journal_format.VERSION, node=NODE))

    again = header + b"".join(journal_format.encode_line(line.entry) for line in read_journal(JOURNAL).lines)

    assert JOURNAL.splitlines() == again.splitlines()


def test_a_state_folded_from_a_recorded_journal_has_the_recorded_digest() -> None:
    events = [event for line in read_journal(JOURNAL).lines for event in line.entry.events]
    *before, last = events
    assert isinstance(last, AllocationsSnapshot)

    state = replay(NODE, before[1:])

    assert last.digest == state.digest
    assert [*last.allocations] == [*state.allocations.values()]


@pytest.mark.parametrize("line", MESSAGES.splitlines(), ids=lambda line: line.split(b'"', 2)[1].decode())
def test_a_recorded_message_is_written_again_byte_for_byte(line: bytes) -> None:
    message, time = message_of(line)

    assert message == wire.encode_event(wire.decode_event(message), time)


def test_the_registry_answers_recorded_messages_as_it_did() -> None:
    assert ANSWERS.splitlines() == anyio.run(answers_of, MESSAGES).splitlines()


def test_the_same_deeds_are_recorded_as_they_were() -> None:
    """Refusals aside: their sentences are for people, and may be worded anew."""

    def facts(content: bytes) -> list[object]:
        events = (event for line in read_journal(content).lines for event in line.entry.events)
        return [event for event in events if not isinstance(event, AllocationRefused)]

    again = anyio.run(recordings)["journal"]

    assert facts(JOURNAL) == facts(again)
    assert replayed(JOURNAL) == replayed(again)


def test_a_recorded_device_record_is_read(tmp_path: Path) -> None:
    shutil.copy(RECORDED / "devices.json", tmp_path)
    file = RecordFile(tmp_path, "another boot")

    assert file.load() is None
    assert {GPUS[7]: "its fan is replaced"} == file.kept.cordons


def replayed(content: bytes) -> NodeState:
    lines = read_journal(content).lines
    return replay(NODE, [event for line in lines for event in line.entry.events][1:])

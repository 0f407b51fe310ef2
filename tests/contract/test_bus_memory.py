"""What only the bus in memory has to promise: that it does not grow without end."""

import pytest
from bus_support import said

from topoalign.core.ports import Message
from topoalign.runtime import memory_bus
from topoalign.runtime.memory_bus import Log


def test_of_messages_that_were_dropped_for_newer_ones_no_id_is_kept() -> None:
    log = Log(per_subject=3)
    for number in range(1_000):
        log.append(said(number, f"topoalign.v1.health.{number % 2}"))

    assert [received.position for received in log.kept] == list(range(995, 1_001))
    assert {f"test.{number}" for number in range(994, 1_000)} == log._ids.keys()


def test_what_the_bound_of_the_whole_stream_dropped_is_not_dropped_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quiet subject's messages fall to the bound; its next one must cost no other subject a message."""
    monkeypatch.setattr(memory_bus, "MOST_MESSAGES", 20)
    log = Log(per_subject=1)
    log.append(said(0, "quiet"))
    for number in range(1, 21):
        log.append(said(number, f"busy.{number}"))
    before = len(log.kept)
    log.append(Message(subject="quiet", headers={}, body=b""))

    assert before + 1 == len(log.kept)
    assert len(log.kept) == len(log._ids) + 1

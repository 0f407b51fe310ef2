"""What only the bus in memory has to promise: that subjects of which the newest matters do not grow."""

from bus_support import said

from topoalign.runtime.memory_bus import Log


def test_of_messages_that_were_dropped_for_newer_ones_no_id_is_kept() -> None:
    log = Log(per_subject=3)
    for number in range(1_000):
        log.append(said(number, f"topoalign.v1.health.{number % 2}"))

    assert [received.position for received in log.kept] == list(range(995, 1_001))
    assert {f"test.{number}" for number in range(994, 1_000)} == log._ids.keys()

"""`topoalign bench registry` measures a real registry that reads a real nats-server, and says what it is measured with."""

import io
import socket
from collections import Counter
from contextlib import AbstractContextManager

import msgspec
import pytest

from topoalign.core import wire
from topoalign.core.model.events import AllocationsSnapshot, Event
from topoalign.core.model.topology.topology_checks import validate
from topoalign.core.state.fold import NodeState, replay
from topoalign.testing.ports import kept_ports
from topoalign.tools.bench import registry
from topoalign.tools.bench.device_plugin import agent
from topoalign.tools.bench.device_plugin.agent import Agent
from topoalign.tools.bench.registry import pages
from topoalign.tools.bench.registry.filling import NotStored, acknowledged, said
from topoalign.tools.bench.registry.history import FACTS, LIVE, MORE, READINGS, History
from topoalign.tools.bench.registry.measure import measure
from topoalign.tools.bench.registry.reader import NotAnswered, until

NODES = 12


def test_each_case_is_measured_and_no_node_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    The registry reads the streams of a few nodes, whose allocators all stand by what it believes of them. It waits for
    their answers as long as a busy machine may take.
    """

    def running(command: str, settings: dict[str, str], *, observed: bool) -> AbstractContextManager[Agent]:
        return agent.running(command, settings | {"REGISTRY_ANSWER_SECONDS": "60"}, observed=observed)

    monkeypatch.setitem(measure.__globals__, "running", running)
    rows = {row["case"]: row for row in registry.cases(nodes=NODES, calls=2, changed=(87, 5))}

    last = "start-20097-events"
    assert ["start-12", "asked-12", "page", "walk", "metrics", "spoken-again", last] == list(rows)
    for row in rows.values():
        assert {"case", "n", "p50_ms", "p99_ms", "longest_block_ms", "rss_mb"} == row.keys() - {"stale"}
        assert all(float(str(row[key])) > 0 for key in row.keys() - {"case", "stale"})
    assert [0, 0, 0, 0] == [row["stale"] for row in rows.values() if "stale" in row]


def test_a_process_that_ends_is_waited_for_no_longer(capsys: pytest.CaptureFixture[str]) -> None:
    """What it wrote last is said."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = {"HTTP_PORT": str(taken.getsockname()[1]), "LOG_LEVEL": "error"}
        with agent.running("registry", settings) as ends, pytest.raises(NotAnswered) as error:
            until(lambda: False, "the registry has not read the streams", ends)

    said = "the registry has not read the streams: the process ended with 69; error: cannot listen on 127.0.0.1"
    assert str(error.value).startswith(said)
    assert "AddressInUse" in capsys.readouterr().err


def test_a_kept_port_is_for_who_was_told_its_number() -> None:
    with kept_ports(2) as (one, other):
        with socket.socket() as unknowing, pytest.raises(OSError, match="in use"):
            unknowing.bind(("127.0.0.1", one))
        with socket.create_server(("127.0.0.1", one)) as told, socket.create_connection(told.getsockname()):
            told.accept()[0].close()
    with socket.socket() as later:
        later.bind(("127.0.0.1", other))

    assert one != other


def test_a_history_has_as_many_facts_and_live_allocations_as_the_cases_say() -> None:
    history = History(7)
    events: list[Event] = [*history.readings(), *history.facts()]  # type: ignore[list-item]  # all are events
    state = replay(history.node, events)

    assert (READINGS + FACTS, LIVE) == (len(events), len(state.allocations))
    assert LIVE == len({device for each in state.allocations.values() for device in each.device_ids})
    assert (state.digest, state.seq) == (history.state.digest, FACTS)
    assert 25 == max(event.seq for event in events if isinstance(event, AllocationsSnapshot))
    validate(state.hardware)


def test_each_further_round_of_a_history_has_as_many_facts_as_said() -> None:
    history = History(7)
    facts = list(history.facts(rounds=3))

    assert (FACTS + 2 * MORE, LIVE) == (len(facts), len(history.state.allocations))
    assert history.state.digest == replay(history.node, facts).digest


def test_snapshots_of_a_history_have_the_digest_of_the_facts_before() -> None:
    """So a reader of the streams finds nothing to complain about."""
    history = History(1)
    state = NodeState(node=history.node)
    for event in history.facts():
        if isinstance(event, AllocationsSnapshot):
            assert event.digest == state.digest
        state = state.fold(event)


def test_nodes_share_no_uuid_and_their_facts_come_in_turns() -> None:
    histories = [History(number) for number in range(3)]
    events = list(said(histories))
    facts = events[3 * READINGS :]

    assert 3 * LIVE == len({gpu for history in histories for gpu in history.gpus})
    assert [history.node for history in histories] * FACTS == [event.node for event in facts]
    assert {READINGS + FACTS} == set(Counter(event.node for event in events).values())
    assert len(events) == len({wire.event_id(event) for event in events})


@pytest.mark.parametrize(
    "answer",
    [
        b'MSG inbox 1 40\r\n{"error":{"code":400,"description":"bad"}}\r\n',
        b"MSG inbox 1 0\r\n\r\n",
        b"-ERR 'Permissions Violation'\r\n",
        b"",
    ],
)
def test_a_fact_that_the_server_does_not_store_ends_the_filling(answer: bytes) -> None:
    with pytest.raises(NotStored):
        acknowledged(io.BytesIO(answer))


def test_an_acknowledgement_is_found_between_the_server_s_other_words() -> None:
    answers = io.BytesIO(b'INFO {}\r\nPING\r\nMSG inbox 1 27\r\n{"stream":"A", "seq":17}\r\n')
    acknowledged(answers)

    assert b"" == answers.read()


class Pages:
    """Three pages of a list; notes what is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def get(self, path: str) -> bytes:
        self.asked.append(path)
        number = int(path.partition("continue=")[2] or 0)
        return msgspec.json.encode({"items": [], "continue": str(number + 1) if number < 2 else None})


def test_a_page_is_measured_by_one_request_a_call() -> None:
    reader = Pages()
    page = next(pages.cases(reader, 5))  # type: ignore[arg-type]  # stands in for a reader
    list_walked = len(reader.asked)
    row = page()

    assert (5, 3) == (row["n"], list_walked)
    assert 3 + 5 + 5 == len(reader.asked)  # five more calls that do not count

"""Requests that nobody can mean are refused with the path of the field, at a cost in proportion to their length."""

import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, get_args

import msgspec
import pytest
from decision_support import asking
from e2e_support import allocate, answering, in_one_process, pod

from topoalign.cli import root
from topoalign.client import Client
from topoalign.core import wire
from topoalign.core.demand.pod_validation import validate_pod
from topoalign.core.hints.answer_checks import check_answer
from topoalign.core.hints.providers import answer_hint_request, to_hint_question
from topoalign.core.model.decisions import Admission, Refusal
from topoalign.core.model.errors import InvalidField
from topoalign.core.model.events import TopologyDiscovered
from topoalign.core.model.hints import HintAnswer, HintQuestion
from topoalign.core.model.ids import GPU, ContainerName, DeviceID, NodeName
from topoalign.core.model.maintenance import Override
from topoalign.core.model.requests import AdmissionRules, AllocateRequest
from topoalign.core.ports import Bus, Endpoint, Stream
from topoalign.core.state.fold import NodeState
from topoalign.machines import load_machine
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.replies import answer_with as answers

pytestmark = pytest.mark.anyio

NODE = NodeName("node-1")
CALLS = 20_000
"""Function calls that a refusal may cost beside one for each byte: a decision on this machine takes as many."""

WORDS: tuple[Override, ...] = get_args(Override)
COUNTS = {
    "1e9": "int",
    "-1": "-1 is outside 0 to 2^63-1",
    "1.5": "int",
    '"1e3"': "int",
    '"4"': "int",
    '"٣"': "int",
    "NaN": "NaN is no number",
    "-Infinity": "-Infinity is no number",
    "1e999": "range",
    "9" * 30: "is outside 0 to 2^63-1",
    "9" * 5_000: "range",
    "true": "int",
    "null": "int",
    "[1]": "int",
    '1,"nvidia.com/gpu":2': "stands twice",
}
"""JSON where a number of devices belongs -> words of the refusal."""
AMBIGUOUS = ("NaN", "-Infinity", '1,"nvidia.com/gpu":2')
"""Of these the refusal names the key or the constant."""


@pytest.fixture(scope="module")
async def bus(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bus]:
    """A node that plays a dgx-a100, without a kubelet."""
    folder: Path = tmp_path_factory.mktemp("abuse")
    settings = {"TOPOALIGN_NODE": NODE, "TOPOALIGN_MACHINE": "dgx-a100", "TOPOALIGN_STATE_DIR": str(folder)}
    over: Bus = MemoryBus()
    async with in_one_process(over, settings):
        await answering(over, NODE)
        yield over


def request(verb: str) -> str:
    """A sound request for 2 GPUs, or about the pod that has them, as JSON."""
    asked = AllocateRequest(node=NODE, pod=pod("p", gpus=2))
    if verb in ("allocate", "what-if"):
        return msgspec.json.encode(asked).decode()
    if verb in ("release", "explain"):
        return '{"node":"node-1","target":"default/p"}'
    if verb in WORDS:
        return '{"node":"node-1","devices":["0"]}'
    return '{"node":"node-1"}'


async def hint_question(bus: Bus) -> HintQuestion:
    """What the allocator would ask now."""
    state = NodeState(node=NODE)
    events = Client(bus).nodes(node=NODE)
    while state.topology is None or state.health is None:
        state = state.apply((await anext(events)).event)
    await events.aclose()
    asked = validate_pod(pod("p", gpus=2, cpus=4))
    return to_hint_question(asking(state, asked, ContainerName("main"), AdmissionRules()), asked)


async def refused(bus: Bus, subject: str, body: str | bytes) -> str:
    """What a request is refused with; it must be the asker's fault, and leave no trace."""
    before = await bus.last_position(Stream.ALLOCATIONS)
    with counted() as work:
        reply = json.loads(await bus.ask(subject, body.encode() if isinstance(body, str) else body, 10))
    assert "failure" in reply, reply
    assert "request" == reply["failure"]["fault"]
    assert reply["failure"]["remedy"]
    assert before == await bus.last_position(Stream.ALLOCATIONS)
    assert work() < CALLS + len(body)
    finding = reply["failure"]["finding"]
    assert len(finding) < 500 and finding.isprintable()
    return str(finding)


@contextmanager
def counted() -> Any:
    """Counts the function calls of this thread while the block lasts: what it costs, without a clock."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    had = sys.getprofile()
    sys.setprofile(count)
    try:
        yield lambda: calls
    finally:
        sys.setprofile(had)


def subject(verb: str) -> str:
    match verb:
        case "announce":
            return wire.discovery_subject(NODE, "announce")
        case "alive":
            return wire.discovery_subject(NODE, "alive")
        case "cordon" | "uncordon" | "heal" | "report":
            return wire.devices_subject(NODE, verb)
        case _:
            return wire.admission_subject(NODE, verb)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("verb", ["allocate", "what-if"])
async def test_a_number_of_devices_that_is_none_is_refused_with_its_path(bus: Bus, verb: str, count: str) -> None:
    """C53."""
    body = request(verb).replace('"nvidia.com/gpu":2', f'"nvidia.com/gpu":{count}')
    finding = await refused(bus, subject(verb), body)

    assert count in AMBIGUOUS or "containers[0].limits" in finding or "containers[0].requests" in finding
    assert COUNTS[count] in finding


@pytest.mark.parametrize("count", COUNTS)
async def test_a_hint_question_for_an_invalid_number_is_refused_with_its_path(bus: Bus, count: str) -> None:
    """C53: A hint question for a value that is not a number is refused with its path."""
    asked = msgspec.json.encode(await hint_question(bus)).decode()
    finding = await refused(
        bus, wire.hints_subject(NODE), asked.replace('"nvidia.com/gpu":2', f'"nvidia.com/gpu":{count}')
    )

    assert count in AMBIGUOUS or "containers[0]." in finding
    assert COUNTS[count] in finding


@pytest.mark.parametrize("count", [1_000_000_000, 2**63 - 1])
async def test_more_devices_than_there_can_be_are_refused_at_once(bus: Bus, count: int) -> None:
    """
    C53: More devices than there can be are refused at the cost of one check. A sound number, so the node answers it: which
    container, which resource, how many there are.
    """
    with counted() as work:
        decision = await allocate(bus, NODE, pod("greedy", gpus=count))
        calls = work()

    assert isinstance(decision, Refusal)
    assert "main" == decision.container
    assert f"{count} of nvidia.com/gpu needed, 8 free" in decision.finding
    assert calls < CALLS


@pytest.mark.parametrize(
    "verb", ["allocate", "what-if", "release", "explain", "snapshot", "trust", "announce", "alive", *WORDS]
)
async def test_every_request_refuses_repeated_unknown_missing_or_mistyped_fields(bus: Bus, verb: str) -> None:
    """C53: Every request refuses fields that stand twice, are unknown, missing or of another type."""
    sound = request(verb)
    abuse = {
        "stands twice: 'node'": sound.replace('{"node":', '{"node":"other","node":'),
        "later": sound.replace('{"node":', '{"later":1,"node":'),
        "$.node": sound.replace('"node-1"', "7", 1),
        "node": sound.replace('"node":"node-1",', "").replace('"node":"node-1"', ""),
        "node: ": sound.replace('"node-1"', json.dumps("x" * 100_000), 1),
        "NaN is no number": sound.replace('"node-1"', "[NaN]", 1),
        "object": "[]",
        "": "{",
        "malformed": sound + sound,
        "array": "[" * 100_000,
        "more than 1000000": sound[:-1] + " " * 1_000_000 + "}",
    }
    for words, body in abuse.items():
        if words == "more than 1000000":
            with pytest.raises(Exception, match="is more than 1000000"):  # the bus itself does not carry it
                await bus.ask(subject(verb), body.encode(), 5)
            continue
        assert words in await refused(bus, subject(verb), body)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize(
    "device", ["٣", "-1", "1.5", "1e0", "9" * 5_000, "x" * 100_000, "a\n\x1b[2J", "", " 0", "0_0", "0x0"]
)
async def test_a_word_about_a_device_that_is_none_is_refused(bus: Bus, word: Override, device: str) -> None:
    """C53: an index is written in the digits 0 to 9, and is one of a GPU that is there."""
    await refused(bus, subject(word), json.dumps({"node": NODE, "devices": [device]}))


@pytest.mark.parametrize("word", WORDS)
async def test_a_word_about_ten_thousand_devices_is_refused(bus: Bus, word: Override) -> None:
    """C53."""
    await refused(bus, subject(word), json.dumps({"node": NODE, "devices": [f"GPU-{n}" for n in range(10_000)]}))


HUGE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "containers": (lambda a: a["pod"].update(containers=a["pod"]["containers"] * 10_000), "pod.containers"),
    "resources": (
        lambda a: a["pod"]["containers"][0].update(limits={f"example.com/r{n}": 1 for n in range(10_000)}),
        "pod.containers[0].",
    ),
    "annotations": (lambda a: a["pod"].update(annotations={f"a{n}": "x" for n in range(10_000)}), "pod.annotations"),
    "a long annotation": (lambda a: a["pod"].update(annotations={"a": "x" * 500_000}), "pod.annotations"),
    "a long name": (lambda a: a["pod"].update(name="x" * 500_000), "pod.name"),
    "a name of lines": (lambda a: a["pod"].update(name="a\nb\x1b[2J"), "pod.name"),
    "a long resource": (
        lambda a: a["pod"]["containers"][0].update(limits={"x" * 500_000: 1}, requests={}),
        "pod.containers[0].limits",
    ),
    "rules that are not": (lambda a: a.update(rules={f"r{n}": 1 for n in range(10_000)}), "rules"),
    "a rule out of its wits": (lambda a: a.update(rules={"policy": "x" * 10_000}), "rules"),
}


@pytest.mark.parametrize("what", HUGE)
@pytest.mark.parametrize("verb", ["allocate", "what-if"])
async def test_too_much_of_anything_is_refused_with_its_path(bus: Bus, verb: str, what: str) -> None:
    """C53."""
    asked = json.loads(request(verb))
    change, path = HUGE[what]
    change(asked)

    assert path in await refused(bus, subject(verb), json.dumps(asked))


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"reserved_cpus": "0-65535," * 10_000 + "0"}, "reserved_cpus"),
        ({"reserved_cpus": "٣"}, "reserved_cpus"),
        ({"reserved_cpu_count": -1}, "reserved_cpu_count"),
        ({"max_allowable_numa_nodes": -1}, "max_allowable_numa_nodes"),
        ({"policy": "wild"}, "policy"),
        ({"later": 1}, "later"),
    ],
)
async def test_rules_that_cannot_be_meant_are_refused_wherever_they_come_from(
    bus: Bus, rules: dict[str, Any], words: str
) -> None:
    """C53: in a prediction, which may assume any, and in a hint question."""
    asked = json.loads(request("what-if"))
    asked["rules"] = rules
    hints = json.loads(msgspec.json.encode(await hint_question(bus)))
    hints["rules"] = rules

    assert words in await refused(bus, subject("what-if"), json.dumps(asked))
    assert words in await refused(bus, wire.hints_subject(NODE), json.dumps(hints))


async def test_a_question_with_ten_thousand_allocations_has_a_bounded_cost(bus: Bus) -> None:
    """C53: as many as a message holds; ten thousand devices that do not exist, CPU lists that name each a thousand times."""
    asked = json.loads(msgspec.json.encode(await hint_question(bus)))
    asked["allocations"] = [{"id": str(n), "devices": {GPU: [f"GPU-{n}"]}} for n in range(10_000)]
    with counted() as work:
        reply = await bus.ask(wire.hints_subject(NODE), json.dumps(asked).encode(), 10)
        calls = work()
    asked["allocations"] = [{"id": "1", "cpus": "0-65535," * 10_000 + "0"}]

    assert b'"ok"' in reply
    assert calls < 50 * 10_000
    assert "allocations[0]" in await refused(bus, wire.hints_subject(NODE), json.dumps(asked))


def test_ten_thousand_hints_are_refused_before_they_are_read() -> None:
    """C53: a hinting service that answers with more than there can be costs what it takes to count them."""
    machine = load_machine("dgx-a100").topology
    topology = TopologyDiscovered(node=NODE, epoch=1, revision=1, boot_id="b", source="test", topology=machine)
    state = NodeState(node=NODE).apply(topology)
    asked = asking(state, pod("p", gpus=2), ContainerName("main"), AdmissionRules())
    sound = answer_hint_request(asked)
    many = {**sound.providers, "device": {GPU: ((1, True),) * 10_000}}
    body = msgspec.json.encode({"ok": {"providers": many}})
    with counted() as work, pytest.raises(InvalidField, match=r"providers.device\[nvidia.com/gpu\]: has 10000 hints"):
        check_answer(asked, wire.decode_answer(body, HintAnswer))

    assert work() < 2_000


async def test_an_allocator_told_ten_thousand_hints_asks_its_own_providers(tmp_path: Path) -> None:
    """C53."""
    bus: Bus = MemoryBus()

    async def hints(asked: HintQuestion) -> dict[str, object]:
        return {"providers": {"device": {GPU: [[1, True]] * 10_000}, "cpu": {}, "memory": {}}}

    endpoint = Endpoint(name="hints", subject=wire.hints_subject(NODE), answer=answers(HintQuestion, hints))
    settings = {"TOPOALIGN_NODE": NODE, "TOPOALIGN_MACHINE": "dgx-a100", "TOPOALIGN_STATE_DIR": str(tmp_path)}
    async with bus.serve("topoalign-hinting", [endpoint]), in_one_process(bus, settings, ("discovery", "allocator")):
        await answering(bus, NODE)
        decision = await allocate(bus, NODE, pod("p", gpus=4))

    assert isinstance(decision, Admission)
    assert 4 == len({DeviceID(d) for allocation in decision.allocations for d in allocation.devices[GPU]})


@pytest.mark.parametrize("value", ["1" + "0" * 30, "1e9", "-1", "1.5", "1e3", "NaN", "9" * 5_000, ""])
@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("allocate", "--gpus"),
        ("allocate", "--cpus"),
        ("allocate", "--nics"),
        ("what-if", "--gpus"),
        ("watch", "--since"),
        ("watch", "--count"),
    ],
)
def test_the_command_line_names_the_option_that_is_not_a_number(
    command: str, option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """C53: The command line refuses what is not a number by the name of the option. At once, without asking anybody."""
    assert 2 == root.run_command_line([command, f"{option}={value}"])
    assert option in capsys.readouterr().err

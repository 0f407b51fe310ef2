"""
Whatever a pod, a GPU or a NIC is called, no output obeys it.

One hostile machine with hostile pods on it, announced over a real NATS by a node that answers with hostile words, is pushed
through every output: the commands as text, as JSON and on a terminal, the pictures, the HTTP API, the metrics and the logs.
"""

import io
import json
import logging
import os
import pty
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx
import msgspec
import pytest
import structlog
from anyio.from_thread import start_blocking_portal
from defusedxml.ElementTree import fromstring
from prometheus_client.parser import text_string_to_metric_families

from topoalign.cli import root
from topoalign.core import wire
from topoalign.core.model.decisions import Admission, Alignment, Considered, Explained, Explanation, Refusal
from topoalign.core.model.events import (
    Allocation,
    AllocationBound,
    AllocationDeviated,
    AllocationGranted,
    AllocationRefused,
    AllocationReleased,
    AllocationsSnapshot,
    DeviceHealth,
    DeviceHealthChanged,
    HealthState,
    LedgerFact,
    MemoryBlock,
    Owner,
    TopologyDiscovered,
)
from topoalign.core.model.hints import TopologyHint
from topoalign.core.model.ids import (
    GPU,
    NIC,
    AllocationID,
    ContainerName,
    DeviceID,
    Namespace,
    NodeName,
    PodName,
    ResourceName,
)
from topoalign.core.model.requests import AllocateRequest, ClockReading, ExplainRequest, NodeRequest, ReleaseRequest
from topoalign.core.model.topology.model import Cpu, Gpu, Nic, NicPort, NumaNode, PciBridge, PluginDevice, Topology
from topoalign.core.ports import Endpoint
from topoalign.registry.main import serve
from topoalign.runtime.clock import SystemClock
from topoalign.runtime.context import Context
from topoalign.runtime.health_pages import serve_http
from topoalign.runtime.logging import configure_logging
from topoalign.runtime.nats_bus import connect_bus
from topoalign.runtime.nats_server import local_nats
from topoalign.runtime.replies import answer_with
from topoalign.runtime.tasks import background
from topoalign.tools.draw.diagram import diagram_of
from topoalign.tools.draw.layout import scene_of
from topoalign.tools.draw.svg import png

SPLIT = "INJECTED-LINE"
"""Stands at the beginning of a line only where a name was allowed to end the line before it."""
HOSTILE = {
    "ansi": "\x1b[2J\x1b]0;owned\x07\x9b31m",
    "lines": f'a\n{SPLIT} 1\r\n{SPLIT}{{x="1"}} 2\u2028{SPLIT}\x85{SPLIT}',
    "html": "<script>alert(1)</script><img src=x onerror=alert(1)>&amp;\"'--></svg>",
    "template": "{{7*7}}{% for x in y %}${jndi:ldap://x}$(reboot)`reboot`%s%n",
    "markup": "[bold red]x[/][link=file:///etc/passwd]y[/link]",
    "turned": "\u202eevil\u2066\u200f\u2069",
    "invisible": "\x00\x7f\u200b\ufeff\u00ad\U000e0041",
    "quotes": '"; drop table pods; -- \\" \\n',
    "long": "x" * 20_000,
}
NODE = NodeName("gpu-1")
LONGEST = 6_000
"""Characters of one line that people are shown, and of one label: long names are cut, several of them may share a line."""


def bad(place: int) -> str:
    """A hostile name that differs from the others, so that it can be an id."""
    return f"{list(HOSTILE.values())[place % len(HOSTILE)]}{place}"


GPUS = tuple(DeviceID(bad(n)) for n in range(9))
NICS = tuple(DeviceID(bad(n)) for n in range(9, 18))
MACHINE = Topology(
    cpus=(Cpu(id=0, core=0, socket=0, node=0, uncore=0), Cpu(id=1, core=1, socket=0, node=0, uncore=0)),
    nodes=(NumaNode(id=0, memory=1 << 30, hugepages={ResourceName(bad(20)): 0}),),
    bridges=(PciBridge(address=bad(21)), PciBridge(address=bad(22), parent=bad(21))),
    gpus=tuple(
        Gpu(id=gpu, index=n, name=bad(n + 1), pci=bad(n + 2), bridge=bad(22), numa_affinity=(0,), cpu_affinity=(0, 1))
        for n, gpu in enumerate(GPUS)
    ),
    nics=tuple(
        Nic(
            id=nic,
            index=n,
            pci=bad(n + 3),
            bridge=bad(22),
            numa_affinity=(0,),
            netdevs=(bad(n),),
            ports=(NicPort(number=1, link_layer=bad(n), state=bad(n + 1)),),
        )
        for n, nic in enumerate(NICS)
    ),
    others=(PluginDevice(id=DeviceID(bad(30)), resource=ResourceName(bad(31)), nodes=(0,)),),
)
HEALTH = {
    device: DeviceHealth(state=list(HealthState)[n % 3], reason=bad(n), cordoned=n % 2 == 0)
    for n, device in enumerate((*GPUS, *NICS))
}


def owner(n: int) -> Owner:
    return Owner(namespace=Namespace(bad(n)), pod=PodName(bad(n + 1)), container=ContainerName(bad(n + 2)))


HELD = tuple(
    Allocation(
        id=AllocationID(bad(n + 40)),
        owner=owner(n),
        devices={GPU: (gpu,), NIC: (NICS[n],), ResourceName(bad(n)): (DeviceID(bad(n + 60)),)},
        memory=(MemoryBlock(resource=ResourceName(bad(n)), nodes=(0,), size=1, taken=(1,)),),
    )
    for n, gpu in enumerate(GPUS)
)
EXPLANATION = Explanation(
    alignments=tuple(
        Alignment(
            container=ContainerName(bad(n)),
            hints={bad(n): {ResourceName(bad(n + 1)): (TopologyHint(1, True),)}},
            merged=TopologyHint(1, True),
            admitted=True,
        )
        for n in range(9)
    ),
    considered=tuple(Considered(resource=GPU, devices=GPUS[:2], score=1, chosen=n == 0, why=bad(n)) for n in range(9)),
    notes=tuple(map(bad, range(9))),
)


def facts() -> Iterator[Any]:
    """What the node has said, in order."""
    yield TopologyDiscovered(node=NODE, epoch=1, revision=1, boot_id=bad(1), source=bad(2), topology=MACHINE)
    yield DeviceHealthChanged(node=NODE, epoch=1, revision=1, devices=HEALTH)
    yield AllocationsSnapshot(node=NODE, epoch=9, seq=1, allocations=HELD, digest=bad(0))
    yield AllocationReleased(node=NODE, epoch=9, seq=2, allocation=HELD[0].id, reason=bad(1))
    yield AllocationGranted(node=NODE, epoch=9, seq=3, allocation=msgspec.structs.replace(HELD[0], owner=None))
    yield AllocationBound(node=NODE, epoch=9, seq=4, allocation=HELD[0].id, owner=owner(0))
    yield AllocationDeviated(node=NODE, epoch=9, seq=5, allocation=HELD[1].id, preferred=GPUS[:4], allocated=GPUS[4:])
    for n in range(9):
        of = owner(n)
        yield AllocationRefused(
            node=NODE,
            epoch=9,
            seq=6 + n,
            namespace=of.namespace,
            pod=of.pod,
            container=of.container,
            reason=bad(n + 3),
            code=bad(n),
            finding=bad(n + 1),
            remedy=bad(n + 2),
        )


async def read_clock(request: NodeRequest) -> ClockReading:
    return ClockReading(clock="1", now=0.0)


async def refuse(request: AllocateRequest) -> Refusal:
    n = int(request.pod.name.removeprefix("p"))
    return Refusal(
        reason=bad(n),
        code=bad(n + 1),
        finding=bad(n + 2),
        remedy=bad(n + 3),
        container=ContainerName(bad(n + 4)),
        provider=bad(n + 5),
        explanation=EXPLANATION,
    )


async def explain(request: ExplainRequest) -> Explained:
    return Explained(allocations=HELD, decision=Admission(allocations=HELD, explanation=EXPLANATION))


async def release(request: ReleaseRequest) -> tuple[AllocationID, ...]:
    return tuple(allocation.id for allocation in HELD)


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[str, str]]:
    """The node and a registry; yields the URLs of NATS and of the registry."""
    answers = {
        "clock": answer_with(NodeRequest, read_clock),
        "allocate": answer_with(AllocateRequest, refuse),
        "what-if": answer_with(AllocateRequest, refuse),
        "explain": answer_with(ExplainRequest, explain),
        "release": answer_with(ReleaseRequest, release),
    }
    endpoints = [
        Endpoint(name=verb, subject=wire.admission_subject(NODE, verb), answer=answer)
        for verb, answer in answers.items()
    ]
    async with local_nats(folder) as url, connect_bus(url) as bus, bus.serve("topoalign-allocator", endpoints):
        for fact in facts():
            await bus.publish(wire.encode_event(fact, 1_700_000_000.0))
        context = Context(bus=bus, clock=SystemClock(), environment={})
        async with background() as tasks:
            await tasks.start(serve, context)
            yield url, await tasks.start(serve_http, context, "127.0.0.1", 0)


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    with (
        start_blocking_portal("asyncio") as portal,
        portal.wrap_async_context_manager(serving(tmp_path_factory.mktemp("nats"))) as both,
    ):
        yield both


@pytest.fixture
def environment(urls: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found = {"TOPOALIGN_NATS_URL": urls[0], "TOPOALIGN_NODE": NODE}
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    return found


def assert_obeys_nothing(text: str) -> None:
    """Only printable characters and ends of lines, none of which a name has made, and no line without end."""
    assert {"\n"} >= {c for c in text if not c.isprintable()}, sorted({c for c in text if not c.isprintable()})
    assert not [line for line in text.splitlines() if line.startswith(SPLIT)]
    assert LONGEST > max(map(len, text.splitlines()), default=0)


SAID = sum(isinstance(fact, LedgerFact) for fact in facts())
TEXT = [
    "topo",
    "topo --wide",
    "draw",
    "draw --ascii-only",
    "fragmentation",
    "gpu list",
    f"watch --since 0 --count {SAID}",
    "watch --count 1",
    "explain x",
    "release x",
    "doctor",
    *(f"allocate --gpus 1 --pod p{n}" for n in range(9)),
    *(f"what-if --gpus 1 --pod p{n}" for n in range(9)),
]


@pytest.mark.parametrize("line", TEXT)
def test_what_people_are_shown_holds_no_command_and_no_line_of_its_own(
    environment: dict[str, str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """C59: stdout and stderr of each command."""
    status = root.run_command_line(line.split())
    out, err = capsys.readouterr()

    assert status in (0, 4), err
    assert out
    assert_obeys_nothing(out.replace("\t", " ") if line.startswith("topo") else out)  # nvidia-smi parts columns by tabs
    assert_obeys_nothing(err)


@pytest.mark.parametrize(
    "line",
    [
        "topo --json",
        "fragmentation --json",
        "gpu list --json",
        f"watch --since 0 --json --count {SAID}",
        "explain x --json",
        "release x --json",
        "doctor --json",
        "allocate --gpus 1 --pod p1 --json",
    ],
)
def test_json_on_a_terminal_is_whole_and_plain(
    environment: dict[str, str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """C59: every name is in it, none of it as a character that a terminal obeys."""
    root.run_command_line(line.split())
    out, err = capsys.readouterr()

    assert {"\n"} >= {c for c in out + err if not c.isprintable()}
    documents = out.splitlines() if line.startswith("watch") else [out]
    assert all(json.loads(document) for document in documents)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_given_on_the_command_line_is_not_obeyed_when_it_comes_back(
    environment: dict[str, str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """C59: as node, as pod, as machine, as annotation, as the command itself."""
    text = HOSTILE[name].replace("\x00", "")
    for arguments in (
        [text],
        ["topo", "--node", text],
        ["topo", "--machine", text],
        ["allocate", "--gpus", text],
        ["allocate", "--gpus", "1", "--pod", text],
        ["allocate", "--gpus", "1", "--node", text],
        ["allocate", "--gpus", "1", "--annotation", text],
        ["explain", text],
        ["doctor", "--node", text, "--state-dir", f"/{text[:200]}"],
    ):
        root.run_command_line(arguments)
        out, err = capsys.readouterr()
        assert_obeys_nothing(out)
        assert_obeys_nothing(err)


def test_on_a_terminal_nothing_but_colours_is_added(environment: dict[str, str]) -> None:
    """C59: behind a pseudo-terminal, where tables wrap and colours are on."""
    for line in ("gpu list", "watch --count 1"):
        shown = on_a_terminal([str(Path(sys.executable).with_name("topoalign")), *line.split()])
        plain = shown.replace("\r\n", "\n")
        for colour in range(100):
            plain = plain.replace(f"\x1b[{colour}m", "")

        assert {"\n"} >= {c for c in plain if not c.isprintable()}
        assert "[link=file" not in plain or "file:///etc/passwd" in plain, "markup is shown and not followed"


def on_a_terminal(command: list[str]) -> str:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, stdin=theirs, env={**os.environ, "TERM": "xterm"})
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 65_536):
            shown += chunk
    except OSError:  # how Linux says that the other side is gone
        pass
    finally:
        os.close(ours)
    assert process.wait(30) == 0, shown
    return shown.decode()


def test_a_picture_holds_names_as_text_and_nothing_else(
    environment: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """C59: an SVG is a document that browsers run."""
    assert 0 == root.run_command_line(["draw", "--out", str(tmp_path / "node.svg")])
    drawn = (tmp_path / "node.svg").read_text("utf-8")
    picture = fromstring(drawn)

    assert_obeys_nothing(capsys.readouterr().err)
    assert set() == names(picture) & {"script", "img", "a", "foreignObject", "image", "use", "iframe", "style"}
    assert not [
        name for element in picture.iter() for name in element.attrib if name.startswith("on") or "href" in name
    ]
    assert "<script" not in drawn and "onerror=alert(1)>" not in drawn
    assert {"\n"} >= {c for c in drawn if not c.isprintable()}
    assert len(drawn) < 500_000


def names(picture: ElementTree.Element) -> set[str]:
    return {element.tag.rpartition("}")[2] for element in picture.iter()}


def test_a_picture_of_pixels_is_made_and_has_no_end_of_names() -> None:
    """C59: a name of twenty thousand characters makes no picture of as many."""
    picture = png(scene_of(diagram_of(bad(8), MACHINE, HELD, HEALTH)))

    assert picture.startswith(b"\x89PNG")
    assert len(picture) < 5_000_000


def test_http_answers_are_json_that_no_browser_takes_for_a_page(urls: tuple[str, str]) -> None:
    """C59."""
    with httpx.Client(base_url=urls[1]) as http:
        while http.get("/readyz").status_code != 200:
            pass
        hostile = ("/v1/nodes/%1b%3Cscript%3E", "/v1/allocations?pod=<b>")
        for path in ("/v1/nodes", f"/v1/nodes/{NODE}", "/v1/allocations", *hostile):
            answer = http.get(path)

            assert "application/json" == answer.headers["content-type"]
            assert "nosniff" == answer.headers["x-content-type-options"]
            assert not {c for c in answer.text if ord(c) < 0x20}
            assert answer.json() is not None
        held = http.get("/v1/allocations").json()["items"]
        for path in ("/<script>", "/%1b[2J", "/readyz?verbose", "/livez"):
            answer = http.get(path)

            assert answer.headers["content-type"].startswith(("application/json", "text/plain"))
            assert_obeys_nothing(answer.text)

    assert {allocation.id for allocation in HELD} == {allocation["id"] for allocation in held}


def test_metrics_can_be_read_and_have_no_series_that_a_name_has_made(urls: tuple[str, str]) -> None:
    """C59: a label ends where it ends, and is no longer than a name may be."""
    text = httpx.get(f"{urls[1]}/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}

    assert_obeys_nothing(text)
    held = families["topoalign_gpu_allocation_info"].samples
    assert len(HELD) == len(held)
    assert all(len(value) <= 253 and value.isprintable() for sample in held for value in sample.labels.values())
    assert not [name for name in families if SPLIT in name]


@pytest.mark.parametrize("form", ["console", "json"])
@pytest.mark.parametrize("name", HOSTILE)
def test_logs_are_one_line_an_event(form: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C59: as value, as key, inside lists and errors, from us and from libraries."""
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    configure_logging(form, "debug", node=HOSTILE[name])
    text = HOSTILE[name]
    structlog.get_logger("topoalign.test").warning(text, pod=text, devices=[text, {text: text}], **{text: text})
    logging.getLogger("grpclib").warning("%s", text)
    try:
        raise ValueError(text)
    except ValueError:
        structlog.get_logger("topoalign.test").exception("defect", pod=text)
    logging.getLogger().handlers[0].flush()
    lines = written.getvalue().splitlines()

    assert {"\n"} >= {c for c in written.getvalue() if not c.isprintable()}
    assert not [line for line in lines if line.startswith(SPLIT)]
    if form == "json":
        assert ["warning", "warning", "error"] == [json.loads(line)["level"] for line in lines]

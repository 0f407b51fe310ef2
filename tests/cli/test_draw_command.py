"""`draw`: forms, where they go, and a node that is drawn as its services announced it."""

import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from anyio.from_thread import start_blocking_portal
from decision_support import container, granted, node, pod
from draw_support import ALLOCATIONS, HEALTH

from topoalign.cli import root
from topoalign.core import wire
from topoalign.core.admission.admit import admit
from topoalign.core.model.events import (
    AllocationsSnapshot,
    DeviceHealth,
    DeviceHealthChanged,
    HealthState,
    TopologyDiscovered,
)
from topoalign.core.model.ids import GPU, NodeName
from topoalign.core.model.requests import AdmissionRules
from topoalign.machines import catalogue
from topoalign.runtime.nats_bus import connect_bus
from topoalign.runtime.nats_server import local_nats
from topoalign.tools.draw.diagram import diagram_of
from topoalign.tools.draw.layout import scene_of
from topoalign.tools.draw.svg import svg

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
NODE = NodeName("gpu.node-1")


def test_characters_go_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == root.run_command_line(["draw", "--machine", "dgx-a100"])

    out = capsys.readouterr().out
    assert out.startswith("dgx-a100\n2 sockets, 8 NUMA nodes")
    assert "└─ [GPU0] [GPU1] [NIC0] [NIC1]" in out


def test_ascii_only_draws_no_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == root.run_command_line(["draw", "--machine", "dgx1-volta", "--of", "ascii", "--ascii-only"])
    assert capsys.readouterr().out.isascii()


def test_the_end_of_the_name_says_the_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    starts = {"a.svg": b"<?xml", "a.PNG": b"\x89PNG", "a.txt": b"dgx2\n"}

    for name in starts:
        assert 0 == root.run_command_line(["draw", "--machine", "dgx2", "--out", str(tmp_path / name)])

    assert starts == {name: (tmp_path / name).read_bytes()[: len(start)] for name, start in starts.items()}
    assert "" == capsys.readouterr().out


def test_an_unsupported_file_name_is_refused_unless_of_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file name with an unsupported ending is refused, unless --of gives the format."""
    out = tmp_path / "a.pdf"

    assert 2 == root.run_command_line(["draw", "--machine", "dgx2", "--out", str(out)])
    assert (
        "the format .pdf is not supported: end the name in .svg, .png or .txt, or give --of" in capsys.readouterr().err
    )
    assert not out.exists()
    assert 0 == root.run_command_line(["draw", "--machine", "dgx2", "--of", "svg", "--out", str(out)])
    assert out.read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize(("form", "start"), [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_a_picture_goes_into_a_pipe_as_it_is(
    form: str, start: bytes, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert 0 == root.run_command_line(["draw", "--machine", "cpu-only", "--of", form])
    assert capfdbinary.readouterr().out.startswith(start)


@pytest.mark.parametrize("form", ["svg", "png"])
def test_a_picture_is_never_written_to_a_terminal(
    form: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)

    assert 2 == root.run_command_line(["draw", "--machine", "dgx2", "--of", form])

    out, err = capsys.readouterr()
    assert "" == out
    assert "--out FILE" in err


def test_characters_on_a_terminal_fill_its_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setenv("NO_COLOR", "1")

    assert 0 == root.run_command_line(["draw", "--machine", "dgx2"])
    assert 70 == max(map(len, capsys.readouterr().out.splitlines()))


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 3 == root.run_command_line(["draw", "--machine", "dgx2", "--out", str(tmp_path / "no" / "a.svg")])
    assert "a.svg: No such file or directory" in capsys.readouterr().err


def test_the_picture_of_a_dgx_a100_is_up_to_date() -> None:
    """It was drawn of a node that `up --machine dgx-a100` plays, with three pods on it."""
    topology = catalogue.machine("dgx-a100")

    healthy = DeviceHealth(state=HealthState.HEALTHY)
    health = dict.fromkeys((*topology.gpu_by_id, *topology.nic_by_id), healthy)

    assert svg(scene_of(diagram_of("dgx-a100", topology, ALLOCATIONS, health))) == (
        PICTURES / "dgx-a100.svg"
    ).read_text("utf-8")


def test_the_picture_of_a_degraded_board_is_up_to_date() -> None:
    """It shows the GPUs that `admit` gives on an empty board to a pod with four GPUs, then to one with a single GPU."""
    topology = catalogue.machine("hgx-b200-gpu0-off")
    state = node(topology)
    for name, count in (("train", 4), ("notebook", 1)):
        asked = pod(container(gpus=count, nics=count), name=name)
        state = granted(state, admit(state, asked, AdmissionRules()))

    held = {each.owner.pod: each.devices[GPU] for each in state.allocations.values() if each.owner is not None}
    drawn = svg(scene_of(diagram_of("hgx-b200-gpu0-off", topology, state.allocations.values())))
    assert {"train": ("GPU-4", "GPU-5", "GPU-6", "GPU-7"), "notebook": ("GPU-0",)} == held
    assert drawn == (PICTURES / "hgx-b200-gpu0-off.svg").read_text("utf-8")


@asynccontextmanager
async def announced(store: Path) -> AsyncIterator[str]:
    """A NATS server that holds what a node has said."""
    topology = catalogue.machine("dgx-a100")
    facts = (
        TopologyDiscovered(node=NODE, epoch=1, revision=1, boot_id="b", source="described", topology=topology),
        DeviceHealthChanged(node=NODE, epoch=1, revision=1, devices={}),
        DeviceHealthChanged(node=NODE, epoch=1, revision=2, devices=HEALTH),
        AllocationsSnapshot(node=NODE, epoch=9, seq=1, allocations=ALLOCATIONS, digest=""),
    )
    async with local_nats(store) as url, connect_bus(url) as bus:
        for fact in facts:
            await bus.publish(wire.encode_event(fact, 1_700_000_000.0))
        yield url


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with (
        start_blocking_portal("asyncio") as portal,
        portal.wrap_async_context_manager(announced(tmp_path_factory.mktemp("nats"))) as url,
    ):
        yield url


def test_a_running_node_is_drawn_with_who_holds_what_and_what_is_wrong(
    nats: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 0 == root.run_command_line(["draw", "--nats", nats, "--node", NODE])

    out = capsys.readouterr().out
    assert out.startswith("gpu.node-1\n")
    for words in ("[GPU0 A] [GPU1 A]", "[GPU6 B] [GPU7 C]", "[GPU4 !] [GPU5 #]", "[A] ml/train/main", "! unhealthy"):
        assert words in out


def test_a_node_that_never_spoke_is_not_found(nats: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert 3 == root.run_command_line(["draw", "--nats", nats, "--node", "other"])

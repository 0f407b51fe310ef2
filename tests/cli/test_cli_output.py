"""What comes from outside is shown, and never obeyed: by the terminal, by whoever reads the JSON."""

import json
import os
import select
from pathlib import Path

import msgspec
import pytest

from topoalign.cli import formatting, output
from topoalign.core.model.decisions import Alignment, Considered, Explanation, Refusal
from topoalign.core.model.events import Allocation, MemoryBlock, Owner
from topoalign.core.model.hints import Hints, TopologyHint
from topoalign.core.model.ids import (
    GPU,
    MEMORY,
    NIC,
    AllocationID,
    ContainerName,
    DeviceID,
    Namespace,
    PodName,
    ResourceName,
)
from topoalign.core.model.topology.device_links import Link, PcieClass
from topoalign.core.model.topology.model import Gpu, Topology

HOSTILE = "\x1b[31mred\x1b]0;title\x07\x9b1m\u202eevil[bold red]<b>{{x}}\n" + "long" * 200


def allocation() -> Allocation:
    return Allocation(
        id=AllocationID(HOSTILE),
        owner=Owner(namespace=Namespace("ml"), pod=PodName(HOSTILE), container=ContainerName("main")),
        devices={GPU: (DeviceID("GPU-a"), DeviceID("GPU-b")), NIC: (DeviceID(HOSTILE),)},
        cpus="0-3",
        memory=(MemoryBlock(resource=MEMORY, nodes=(0, 1), size=3 * 2**30, taken=(2**31, 2**30)),),
        affinity=(0, 1),
    )


def topology() -> Topology:
    gpus = tuple(
        Gpu(id=DeviceID(f"GPU-{name}"), index=index, pci=f"0000:0{index}:00.0", numa_affinity=(index,))
        for index, name in enumerate("ab")
    )
    return Topology(
        gpus=gpus, links=(Link(a=DeviceID("GPU-a"), b=DeviceID("GPU-b"), pcie=PcieClass.SYS, fabric_links=12),)
    )


def explanation() -> Explanation:
    hints: dict[str, dict[ResourceName, Hints]] = {
        "device": {GPU: (TopologyHint(0b01, True), TopologyHint(0b11, False)), NIC: ()},
        "cpu": {},
    }
    return Explanation(
        alignments=(
            Alignment(container=ContainerName(HOSTILE), hints=hints, merged=TopologyHint(0b11, False), admitted=False),
        ),
        considered=(Considered(resource=GPU, devices=(DeviceID("GPU-b"),), score=7, chosen=True, why=HOSTILE),),
    )


def refusal() -> Refusal:
    return Refusal(
        reason="TopologyAffinityError",
        code="NotPreferred",
        finding=HOSTILE,
        remedy=HOSTILE,
        container=None,
        provider=None,
        explanation=explanation(),
    )


def unprintable(text: str) -> set[str]:
    return {c for c in text if not c.isprintable()}


def test_devices_are_shown_with_index_uuid_pci_and_numa_node(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The output for people has index, uuid, PCI address and NUMA node, and no control characters."""
    formatting.show_allocation(allocation(), topology())

    out = capsys.readouterr().out
    assert {"\n"} == unprintable(out)
    assert ["nvidia.com/gpu", "1", "GPU-b", "0000:01:00.0", "1"] == out.splitlines()[3].split()
    assert "seam        12 NVLinks" in out
    assert "CPUs        0-3" in out
    assert "memory      3 GiB on NUMA 0-1" in out
    assert "aligned to  NUMA 0-1" in out


def test_a_refusal_and_its_explanation_say_everything_and_obey_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    formatting.show_decision(refusal(), topology())
    formatting.show_explanation(explanation(), topology())

    out = capsys.readouterr().out
    assert {"\n"} == unprintable(out)
    for words in (
        "refused: TopologyAffinityError (NotPreferred)",
        "the pod as a whole, by the topology policy",
        "{0}* {0-1}",
        "cannot be met",
        "no preference",
        "merged: {0-1}, refused by the policy",
        "GPU1",
    ):
        assert words in out


def test_only_what_the_policy_refuses_is_said_to_be_refused_by_it(capsys: pytest.CaptureFixture[str]) -> None:
    """An amount that cannot be meant is nobody's alignment."""
    unmeant = msgspec.structs.replace(refusal(), reason="UnexpectedAdmissionError", code="InvalidShare")
    formatting.show_refusal(unmeant)

    assert "where    the pod as a whole" in capsys.readouterr().out.splitlines()


def test_json_is_whole_and_holds_nothing_that_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json({"pod": HOSTILE})
    output.print_json_line({"pod": HOSTILE})

    document, line = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert {"\n"} == unprintable(document + "\n" + line)
    assert HOSTILE == json.loads(document)["pod"] == json.loads(line)["pod"]


def test_columns_stand_under_their_titles_and_a_row_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    output.columns(("NAME", "N"), [("a\nb", 1), ("longer", 22)])

    assert "NAME    N\na?b     1\nlonger  22\n" == capsys.readouterr().out


WIDE = (
    "GPU1",
    "GPU-8d1c7f32-9a0b-4c11-8c0e-2f5d1b1a7e56",
    "unhealthy, cordoned",
    "the driver has not answered for 5 s",
)
TITLES = ("NAME", "DEVICE", "HEALTH", "WHY")


@pytest.mark.parametrize("columns", [30, 60, 70, 80, 90, 100, 110, 120, 200])
def test_on_a_terminal_of_any_width_no_name_is_broken_and_nothing_is_lost(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")

    output.columns(TITLES, [WIDE, ("GPU2", "GPU-0", "healthy", "-")])

    shown = capsys.readouterr().out
    assert [] == [word for cell in WIDE for word in cell.split() if word not in shown.split()]
    assert columns < 60 or all(len(line.rstrip()) <= columns for line in shown.splitlines())


def test_a_pipe_whose_reader_is_gone_can_be_waited_for_and_a_file_cannot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stdout, (tmp_path / "out").open("w") as file:
        monkeypatch.setattr("sys.stdout", stdout)
        piped = output.pipe()
        monkeypatch.setattr("sys.stdout", file)
        filed = output.pipe()
        before = select.select([writing], [], [], 0)[0]
        os.close(reading)
        after = select.select([writing], [], [], 0)[0]

    assert (writing, None) == (piped, filed)
    assert ([], [writing]) == (before, after)

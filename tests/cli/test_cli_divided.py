"""`gpu list`, `draw`, `fragmentation` and `explain` show how GPUs are divided, by whom, and what is left of them."""

import json
import re
from itertools import combinations
from typing import Any, Literal

import msgspec
import pytest
from decision_support import NODE, node
from draw_support import check_scene
from slot_support import holding as slots_held
from slot_support import in_mig_mode, in_slots
from unit_support import CORES, DGX, MEMORY, holds, in_units

from topoalign.cli import link, root
from topoalign.cli.explain import show_partitioned_gpus
from topoalign.cli.formatting import brief, show_allocation
from topoalign.cli.link import AnnouncedNode, NodeLink
from topoalign.core.model.decisions import Explained
from topoalign.core.model.ids import GPU, DeviceID, ResourceName
from topoalign.core.model.topology.device_offers import LimitedBy, Offer, Slots
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import NodeState
from topoalign.core.state.gpu_partitioning import partitioning_by_gpu
from topoalign.tools.draw.diagram import Diagram, diagram_of
from topoalign.tools.draw.layout import scene_of
from topoalign.tools.draw.scene import Box, Text
from topoalign.tools.draw.svg import png, svg
from topoalign.tools.draw.text import render_text


def shared(gpus: int = 2, sharers: int = 5, in_all: int = 8) -> NodeState:
    """The first GPUs in units, each shared by so many containers: 18 cores and 30 blocks, the last memory alone."""
    state = node(in_units(DGX, in_all))
    for gpu in DGX.gpus[:gpus]:
        for number in range(sharers):
            cores, blocks = range(number * 18, number * 18 + 18), range(number * 30, number * 30 + 30)
            devices = {
                CORES: tuple(DeviceID(f"{gpu.id}::c{n}") for n in cores) if number < 4 else (),
                MEMORY: tuple(DeviceID(f"{gpu.id}::m{n}") for n in blocks),
            }
            given = {name: some for name, some in devices.items() if some}
            state = holds(state, f"serve-{gpu.index}-{number}", given)
    return state


def status(state: NodeState) -> AnnouncedNode:
    assert state.health is not None
    return AnnouncedNode(NODE, state.hardware, tuple(state.allocations.values()), state.health.devices)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.setattr(link, "read_announced_node", lambda *_: status(shared(in_all=3)))
    monkeypatch.setattr(link, "read_node_or_machine", lambda *_: status(shared(in_all=3)))

    def command(*arguments: str) -> str:
        assert 0 == root.run_command_line([*arguments])
        return capsys.readouterr().out

    return command


def test_the_list_has_a_row_for_each_holder_and_what_is_left(run: Any) -> None:
    rows = [re.split(r" {2,}", line.strip()) for line in run("gpu", "list").splitlines()]

    assert ["NAME", "DEVICE", "PCI", "HEALTH", "DIVIDED", "HELD BY", "LEFT", "WHY"] == rows[0]
    assert ["units", "default/serve-0-0/main: 18 cores, 7680 MiB", "28 cores, 2560 MiB"] == rows[1][4:7]
    assert [[f"default/serve-0-{n}/main: 18 cores, 7680 MiB"] for n in (1, 2, 3)] == rows[2:5]
    assert ["default/serve-0-4/main: 7680 MiB"] == rows[5]
    assert ["units", "-", "100 cores, 40960 MiB"] == rows[11][4:7]
    assert ["whole", "-", "whole"] == rows[12][4:7]


@pytest.mark.parametrize(
    ("topology", "limiter", "expected"),
    [
        (in_units(DGX), "none", "not enforced"),
        (in_units(DGX), "vcuda", ""),
        (in_slots(DGX), "none", "not enforced"),
        (in_slots(DGX), "hami-core", ""),
        (in_slots(DGX, scaling=Slots(instances=True)), None, ""),
        (in_units(DGX), "mps", ""),
        (in_slots(DGX), "mps", ""),
        (DGX, None, ""),
    ],
)
def test_the_list_tells_where_nothing_limits(
    topology: Topology,
    limiter: LimitedBy | None,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What becomes MIG instances the hardware limits."""
    said = {"sharing": "mps", "limiter": None} if limiter == "mps" else {"limiter": limiter}
    offers = tuple(msgspec.structs.replace(each, **said) for each in topology.offered)
    found = status(node(msgspec.structs.replace(topology, offers=offers)))
    monkeypatch.setattr(link, "read_node_or_machine", lambda *_: found)

    assert 0 == root.run_command_line(["gpu", "list"])
    notes = capsys.readouterr().err
    assert 0 == root.run_command_line(["gpu", "list", "--json"])
    first, *_ = json.loads(capsys.readouterr().out)["devices"]

    assert (expected in notes, bool(expected)) == (True, "imiter" in notes)
    assert limiter == first["division"].get("limiter")


def test_programs_read_the_same(run: Any) -> None:
    first, *_ = json.loads(run("gpu", "list", "--json"))["devices"]
    divided = json.loads(run("fragmentation", "--json"))["divided"]

    assert (["units"], {"cores": 28, "memory": 2560 << 20}) == (first["division"]["ways"], first["division"]["left"])
    assert {"cores": 18, "memory": 7680 << 20} == {
        name: amount for name, amount in first["division"]["held"][0].items() if name != "owner"
    }
    assert ["GPU-0", "GPU-1", "GPU-2"] == [*divided]
    assert first["division"] == divided["GPU-0"]


def test_fragmentation_tells_what_is_left_of_parts(run: Any) -> None:
    out = run("fragmentation")

    assert "6 of 8 GPUs free" in out
    assert "left of 3 GPUs in units: 156 cores, 46080 MiB; most of one: 100 cores, 40960 MiB (GPU2)" in out
    assert "default/serve-1-4/main: 7680 MiB" in out


def in_slices(topology: Topology, replicas: int, sharing: Literal["time-slicing", "mps"] = "time-slicing") -> Topology:
    """The machine with each GPU offered so often, or each MIG instance of those in MIG mode."""
    devices = tuple(base for gpu in topology.gpus for base in ([each.uuid for each in gpu.mig or ()] or [gpu.id]))
    offer = Offer(resource=GPU, devices=devices, replicas=replicas, sharing=sharing)
    return msgspec.structs.replace(topology, offers=(offer,))


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (
            slots_held(node(in_slots(DGX, gpus=2)), (0, 30, 8000), 0),
            "2 GPUs in slots: 18 slots, 160 cores, 69824 MiB; most of one: 10 slots, 100 cores, 40960 MiB (GPU1)",
        ),
        (slots_held(node(in_slots(DGX, gpus=1)), (0, 100, 40960)), "1 GPU in slots: nothing"),
        (
            holds(node(in_slices(DGX, 4)), "infer", {GPU: (DeviceID("GPU-0::1"),)}),
            "8 GPUs in time slices: 31 slices; most of one: 4 slices (GPU1)",
        ),
        (node(in_slices(DGX, 2, "mps")), "8 GPUs by MPS: 16 slices; most of one: 2 slices (GPU0)"),
    ],
    ids=["slots", "nothing", "slices", "mps"],
)
def test_fragmentation_adds_up_what_is_left_of_each_way(
    state: NodeState, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(link, "read_announced_node", lambda *_: status(state))
    assert 0 == root.run_command_line(["fragmentation"])

    assert [f"left of {expected}"] == [line for line in capsys.readouterr().out.splitlines() if "left of" in line]


def test_explain_shows_the_gpu_that_a_share_is_of(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """One line for all units of a kind, which are equal, and who else has something of their GPU."""
    state = shared(in_all=3)
    allocation = state.allocations[next(iter(state.allocations))]
    show_allocation(allocation, state.hardware)
    shown = capsys.readouterr().out
    show_partitioned_gpus(NodeLink("nats://nowhere", NODE, False), (allocation,), state.hardware)
    cards = capsys.readouterr().out

    assert 1 == shown.count("18 units of GPU-0") and 1 == shown.count("30 units of GPU-0")
    assert "18 cores of GPU0 30 blocks of GPU0" == brief(allocation, state.hardware)
    assert "28 cores, 2560 MiB" in cards and "default/serve-0-3/main" in cards and "GPU1" not in cards


def test_programs_read_it_in_what_explain_says(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of whole GPUs nothing."""
    state = shared(in_all=3)
    whole = holds(state, "whole", {GPU: (state.hardware.gpus[5].id,)})
    first, last = (list(each.allocations.values())[at] for each, at in ((state, 0), (whole, -1)))
    divided = []
    for allocation in (first, last):
        explained = Explained(allocations=(allocation,), decision=None)
        monkeypatch.setattr(NodeLink, "ask", lambda *_, found=explained: (found, state.hardware))
        nobody = ("--node", NODE, "--nats", "nats://127.0.0.1:1")
        divided.append(json.loads(run("explain", "x/y", "--json", *nobody))["divided"])

    assert {"GPU-0": json.loads(run("fragmentation", "--json"))["divided"]["GPU-0"]} == divided[0]
    assert {} == divided[1]


def test_slots_are_shown_with_their_amounts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state = slots_held(node(in_slots(DGX, gpus=2)), (0, 30, 8000), 0)
    monkeypatch.setattr(link, "read_node_or_machine", lambda *_: status(state))
    assert 0 == root.run_command_line(["gpu", "list"])
    shown = capsys.readouterr()
    rows = [re.split(r" {2,}", line.strip()) for line in shown.out.splitlines()]
    lines = render_text(drawn(state), 120).splitlines()

    assert ["slots", "default/held-0/main: 1 slot, 30 cores, 8000 MiB", "8 slots, 60 cores, 28864 MiB"] == rows[1][4:7]
    assert ["default/held-1/main: 1 slot, 10 cores, 4096 MiB"] == rows[2]
    assert "GPU0 slots, 8 left: 60% 28 GiB; A 30% 7.8 GiB; B 10% 4 GiB" in lines
    assert "not enforced" in shown.err


def test_a_little_memory_is_not_drawn_as_none() -> None:
    lines = render_text(drawn(slots_held(node(in_slots(DGX, gpus=1)), (0, 5, 64), (0, 5, 40832))), 120).splitlines()

    assert "GPU0 slots, 8 left: 90% 64 MiB; A 5% 64 MiB; B 5% 39 GiB" in lines


def test_instances_beside_slices_of_others_are_not_called_slices() -> None:
    """Two of the seven instances of a GPU are in four slices each, and one slice is held."""
    instances = in_mig_mode(DGX, [9856] * 7)
    uuids = tuple(each.uuid for each in instances.gpus[0].mig or ())
    offers = (
        Offer(resource=GPU, devices=uuids[:2], replicas=4, sharing="time-slicing"),
        Offer(resource=ResourceName("nvidia.com/mig-1g.10gb"), devices=uuids[2:]),
    )
    machine = msgspec.structs.replace(instances, gpus=instances.gpus[:1], offers=offers)
    state = holds(node(machine), "infer", {GPU: (DeviceID(f"{uuids[0]}::1"),)})

    assert "GPU0 parts, left: 12 of 13; A 1 slice" in render_text(drawn(state), 120).splitlines()


def test_a_slot_of_an_allocation_is_shown_with_its_amount(capsys: pytest.CaptureFixture[str]) -> None:
    """One of which none is recorded counts as an equal part, and is shown with the others of its GPU."""
    state = slots_held(node(in_slots(DGX, gpus=2)), (0, 30, 8000), 0)
    for allocation in state.allocations.values():
        show_allocation(allocation, state.hardware)
    rows = [re.split(r" {2,}", line) for line in capsys.readouterr().out.splitlines() if line.startswith(GPU)]

    assert ["GPU-0::0: 30 cores, 8000 MiB", "GPU-0::1"] == [row[2] for row in rows]


def drawn(state: NodeState) -> Diagram:
    return diagram_of("gpu-7", state.hardware, state.allocations.values(), None, partitioning_by_gpu(state))


def test_eight_gpus_with_five_sharers_each_are_legible() -> None:
    """Nothing overlaps or is cut, and each sharer has a row in its GPU with its letter, its colour and what it has."""
    state = shared(gpus=8)
    scene = scene_of(drawn(state))
    rows = [item for item in scene.items if isinstance(item, Box) and item.role == "part"]
    texts = [item.text for item in scene.items if isinstance(item, Text)]

    check_scene(scene, state.hardware)
    assert 40 == len(rows)
    assert [] == [pair for pair in combinations(rows, 2) if pair[0] != pair[1] and same_place(*pair)]
    assert (32, 8, 8) == tuple(texts.count(each) for each in ("18% 7.5 GiB", "7.5 GiB", "28% 2.5 GiB"))
    assert 8 == texts.count("units, left:")
    assert not any(each.endswith("…") for each in texts)
    assert "default/serve-7-4/main: 7680 MiB" in svg(scene)
    assert png(scene).startswith(b"\x89PNG")


def same_place(a: Box, b: Box) -> bool:
    return a.x < b.right and b.x < a.right and a.y < b.bottom and b.y < a.bottom


def test_how_a_gpu_in_mig_mode_is_shared_fits_into_its_box() -> None:
    """Its box says in a line of its own that it is in MIG mode."""
    instances = in_mig_mode(DGX, [9856] * 7)
    sliced = in_slices(msgspec.structs.replace(instances, gpus=instances.gpus[:1]), 4)
    for machine, expected in ((in_slots(instances, gpus=1), "slots, 70 left:"), (sliced, "slices, left:")):
        texts = [item.text for item in scene_of(drawn(node(machine))).items if isinstance(item, Text)]

        assert (1, 1) == (texts.count(expected), texts.count("MIG: 7"))
        assert not any(each.endswith("…") for each in texts)


def test_a_drawing_in_characters_has_a_line_for_each_divided_gpu() -> None:
    lines = render_text(drawn(shared(gpus=1)), 120).splitlines()

    assert (
        "GPU0 units, left: 28% 2.5 GiB; A 18% 7.5 GiB; B 18% 7.5 GiB; C 18% 7.5 GiB; D 18% 7.5 GiB; E 7.5 GiB" in lines
    )
    assert "GPU1 units, left: 100% 40 GiB" in lines
    assert any("[GPU0 ABC+]" in line for line in lines)

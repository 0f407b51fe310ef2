"""What `gpu list`, `explain` and `draw` show of a GPU adds up, where an init container left a slot to a later one."""

import json
import re
from typing import Any

import pytest
from decision_support import NODE, node
from slot_support import MIB, in_slots, slot
from unit_support import DGX

from topoalign.cli import link, root
from topoalign.cli.explain import show_partitioned_gpus
from topoalign.cli.link import AnnouncedNode, NodeLink
from topoalign.core.model.allocations import Allocation, Owner, Role
from topoalign.core.model.events import AllocationGranted
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import GPU, AllocationID, ContainerName, Namespace, PodName
from topoalign.core.state.fold import NodeState
from topoalign.core.state.gpu_partitioning import partitioning_by_gpu
from topoalign.tools.draw.diagram import diagram_of
from topoalign.tools.draw.text import render_text


def holding(*held: tuple[str, int, int]) -> NodeState:
    """Containers of one pod with one slot, one after the other: name, cores, MiB. The last one is an app container."""
    state = node(in_slots(DGX, gpus=1))
    device = slot(0, 3, state)
    for place, (name, cores, memory) in enumerate(held, 1):
        role: Role = "app" if place == len(held) else "init"
        allocation = Allocation(
            id=AllocationID(name),
            owner=Owner(namespace=Namespace("ml"), pod=PodName("train"), container=ContainerName(name)),
            role=role,
            devices={GPU: (device,)},
            slots={device: Amount(cores=cores, memory=memory * MIB)},
        )
        state = state.apply(AllocationGranted(node=NODE, epoch=state.epoch, seq=state.seq + 1, allocation=allocation))
    return state


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> NodeState:
    """Two init containers and an app container: 60 cores, then 20, then 30."""
    found = holding(("prepare", 60, 20480), ("check", 20, 1024), ("main", 30, 10240))
    assert found.health is not None
    shown = AnnouncedNode(NODE, found.hardware, tuple(found.allocations.values()), found.health.devices)
    monkeypatch.setattr(link, "read_announced_node", lambda *_: shown)
    monkeypatch.setattr(link, "read_node_or_machine", lambda *_: shown)
    return found


HELD = [
    "ml/train/prepare: 1 slot, 60 cores, 20480 MiB (nothing of it alone)",
    "ml/train/check: 1 slot, 20 cores, 1024 MiB (nothing of it alone)",
    "ml/train/main: 1 slot, 60 cores, 20480 MiB",
]
LEFT = "9 slots, 40 cores, 20480 MiB"


def test_tables_tell_what_an_init_container_has_alone(state: NodeState, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing: the app container has its slot with the larger amount, and that with what is left is the GPU."""
    assert 0 == root.run_command_line(["gpu", "list"])
    listed = [re.split(r" {2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    show_partitioned_gpus(NodeLink("nats://nowhere", NODE, False), tuple(state.allocations.values()), state.hardware)
    explained = [re.split(r" {2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]

    assert [[HELD[0], LEFT], [HELD[1]], [HELD[2]]] == [listed[1][5:7], *listed[2:4]]
    assert [["GPU0", "slots", HELD[0], LEFT], [HELD[1]], [HELD[2]]] == explained[-3:]


def test_programs_can_add_up_what_containers_have(state: NodeState, capsys: pytest.CaptureFixture[str]) -> None:
    """`alone` where it is there, else all that a container has."""
    assert 0 == root.run_command_line(["gpu", "list", "--json"])
    division: dict[str, Any] = json.loads(capsys.readouterr().out)["devices"][0]["division"]
    prepare, check, main = division["held"]
    counted = [each.get("alone", each) for each in (*division["held"], division["left"])]

    assert ({}, {}) == (prepare["alone"], check["alone"])
    assert "alone" not in main
    assert (10, 100, 40960 * MIB) == tuple(
        sum(each.get(kind, 0) for each in counted) for kind in ("slots", "cores", "memory")
    )


def test_the_rows_of_a_gpu_in_the_picture_add_up(state: NodeState) -> None:
    drawn = diagram_of("gpu-7", state.hardware, state.allocations.values(), None, partitioning_by_gpu(state))

    assert "GPU0 slots, 9 left: 40% 20 GiB; A nothing; B nothing; C 60% 20 GiB" in render_text(drawn, 120).splitlines()

"""Pods that may have parts of cards keep a node that HAMi has given up; annotations of pods without devices do not."""

from typing import Any

import msgspec
import pytest
from api_server_support import shown_pod

from topoalign.core.demand.share_annotations import DEVICES_ALLOCATED, HANDSHAKE, REGISTER
from topoalign.core.model.ids import NodeName
from topoalign.core.sharing.hami.registration import RegisteredGpu
from topoalign.registry.foreign_nodes import ForeignNodes
from topoalign.registry.kubernetes.objects import ShownNode, ShownPod, decode_object
from topoalign.testing.manual_clock import ManualClock

NODE = NodeName("left")
CARD = RegisteredGpu(id="GPU-h0", slots=10, memory=81559, cores=100, type="NVIDIA H100", healthy=True)
TEXT = msgspec.json.encode([CARD]).decode()
SHARE = "GPU-h0,NVIDIA,4096,20:;"
GPUS = {"nvidia.com/gpu": "1"}
CPUS = {"cpu": "1", "memory": "1Gi", "ephemeral-storage": "1Gi", "hugepages-2Mi": "2Mi"}


@pytest.fixture
def foreign() -> ForeignNodes:
    """Of a node that HAMi has given up, where an allocator of topoalign answers."""
    foreign = ForeignNodes(ManualClock(), answering=lambda node: True)
    see_node(foreign, TEXT)
    return foreign


def see_node(foreign: ForeignNodes, register: str) -> None:
    annotations = {REGISTER: register, HANDSHAKE: "Deleted_2026.01.02 03:04:05"}
    node = {"metadata": {"name": NODE, "annotations": annotations}, "status": {"allocatable": {"nvidia.com/gpu": "8"}}}
    foreign.see(decode_object(msgspec.json.encode(node), ShownNode).to_seen())


def see_pod(
    foreign: ForeignNodes, text: str, limits: dict[str, Any] | None, init: dict[str, Any] | None = None
) -> None:
    """Shows a pod of one container, and of one init container where that has limits, with this annotation."""
    pod = shown_pod("p", node=NODE)
    pod["metadata"] |= {"uid": "1", "annotations": {DEVICES_ALLOCATED: text}}
    pod["spec"]["containers"][0]["resources"] = {"limits": limits}
    if init is not None:
        pod["spec"]["initContainers"] = [{"name": "setup", "resources": {"limits": init}}]
    foreign.see_pod(decode_object(msgspec.json.encode(pod), ShownPod).to_seen())


@pytest.mark.parametrize(
    "text",
    ["", "x", ";;", ",NVIDIA,1,1:;", "[1-0],NVIDIA,1,1:;", ",,0,0:;"],
)
def test_a_text_without_a_share_of_a_card_keeps_no_node(foreign: ForeignNodes, text: str) -> None:
    """An older version of HAMi writes `,,0,0:` for a container that has none."""
    see_pod(foreign, text, GPUS)

    assert ("", 0) == (foreign.refusal(NODE), foreign.pods(NODE))


@pytest.mark.parametrize("limits", [None, {}, CPUS, {"nvidia.com/gpu": "0"}, {"nvidia.com/gpu": None}])
def test_a_pod_that_asks_for_no_device_keeps_no_node(foreign: ForeignNodes, limits: dict[str, Any] | None) -> None:
    """HAMi gives shares to containers that ask for them; this one was annotated by somebody else."""
    see_pod(foreign, SHARE, limits, CPUS)

    assert ("", 0) == (foreign.refusal(NODE), foreign.pods(NODE))


@pytest.mark.parametrize(
    ("text", "limits", "init"),
    [
        (SHARE, GPUS, None),
        (SHARE, {"nvidia.com/gpumem": 4096}, None),
        (SHARE, {"example.com/renamed": "1"}, None),
        (SHARE + ";", CPUS, GPUS),
        ("GPU-h0,NVIDIA,4096,0:;", GPUS, None),
        ("GPU-h0,NVIDIA,0,20:;", GPUS, None),
        ("GPU-h0[1-0],NVIDIA,4096,20:;", GPUS, None),
        (",,0,0:;" + SHARE, GPUS, None),
        ("GPU-h0,NVIDIA,0,0:;", GPUS, None),  # 0 of both is no limit
        ("GPU-of-nobody,NVIDIA,1,1:;", GPUS, None),
        ("a,", GPUS, None),  # cannot be read
        ("GPU-h0,NVIDIA,x,20:;", GPUS, None),
        ("GPU-h0,NVIDIA,99999999,20:;", GPUS, None),
    ],
)
def test_a_share_of_a_card_keeps_the_node(
    foreign: ForeignNodes, text: str, limits: dict[str, Any], init: dict[str, Any] | None
) -> None:
    """Forged or not: nothing that the API server shows tells them apart."""
    see_pod(foreign, text, limits, init)

    assert ("ContestedNode", 1) == (foreign.refusal(NODE), foreign.pods(NODE))


@pytest.mark.parametrize(
    "register", ["[]", msgspec.json.encode([msgspec.structs.replace(CARD, id="GPU-h9")]).decode(), "{"]
)
def test_a_pod_counts_whichever_cards_are_registered_now(foreign: ForeignNodes, register: str) -> None:
    """A plugin without a driver registers none, and one that leaves out a card registers it no more: it has holders yet."""
    see_pod(foreign, SHARE, GPUS)
    see_node(foreign, register)

    assert ("ContestedNode", 1) == (foreign.refusal(NODE), foreign.pods(NODE))

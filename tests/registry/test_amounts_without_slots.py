"""Amounts of GPUs in slots where no node offers slots, or other nodes than those that offer units."""

from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from bad_share_support import RULES, SECOND, Limits, cluster, filtered, pod, requested, review, said, units, what_if
from decision_support import machine
from diagnosis_support import cluster as record_of
from diagnosis_support import node_with
from scheduling_support import serving
from slot_support import PLAIN, in_slots
from unit_support import DGX, in_units
from view_support import OneNode, Says, tell_all

from topoalign.cli.whole_cluster import ClusterOptions, ask_cluster
from topoalign.core.admission.prediction import predict
from topoalign.core.demand.share_annotations import InvalidShare
from topoalign.core.diagnosis.node_records import NodeRecord, encode_lines
from topoalign.core.model.decisions import Admission
from topoalign.core.model.ids import ResourceName
from topoalign.core.model.topology.device_offers import Slots
from topoalign.core.model.topology.model import Topology
from topoalign.registry.scheduling.webhook.reviews import Webhook

pytestmark = pytest.mark.anyio

GPUS, MIB, PERCENT, COMPUTE, PRIORITY = (
    f"nvidia.com/{name}" for name in ("gpu", "gpumem", "gpumem-percentage", "gpucores", "priority")
)
UNKNOWN = "a resource that the node does not offer; correct the name or label the nodes"
TIME, BYTES, HALF = (ResourceName(f"example.com/{name}") for name in ("time", "bytes", "half"))


def webhook_of(node: OneNode) -> Webhook:
    offers = node.view.offers
    return Webhook("", lambda resource: resource in offers.names, node.scheduler.checks.check, offers.left_out)


@pytest.mark.parametrize("hardware", [in_units(DGX), in_units(DGX, 4), DGX], ids=["units", "mixed", "whole"])
async def test_units_with_amounts_of_slots_are_refused_without_slots_too(hardware: Topology, tmp_path: Path) -> None:
    """By all three, in the same words, whether the pod says of how many GPUs the amounts are or not."""
    node = cluster(hardware)
    async with (
        serving(node.scheduler, more=webhook_of(node).routes()) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        for more, field in (({GPUS: "1"}, GPUS), ({GPUS: "1", MIB: "9"}, GPUS), ({MIB: "9"}, MIB)):
            given = pod({**units("20", "16"), **more}, {})
            text = what_if(node, given, tmp_path)
            assert text.startswith(f"{SECOND}[{field}]: GPUs in two ways, for tencent.com/vcuda-core and")
            assert {text} == await filtered(http, given)
            asks_for_ours = GPUS in more or node.view.offers.units  # else it may be for another's devices
            assert (text if asks_for_ours else "") == await said(http, given, "/webhook")


@pytest.mark.parametrize(
    "limits", [{GPUS: "1", MIB: "4000"}, {PERCENT: "50", COMPUTE: "30"}, {GPUS: "1", COMPUTE: "1"}]
)
async def test_amounts_that_a_gpu_has_wait_for_a_node_with_slots(limits: Limits, tmp_path: Path) -> None:
    """A node without slots would give a whole GPU, or none. An autoscaler may bring one with slots."""
    node, given = cluster(), pod(limits, {})
    async with serving(node.scheduler, more=webhook_of(node).routes()) as url, httpx.AsyncClient(base_url=url) as http:
        assert (await review(http, given, "/webhook"))["allowed"]
        assert {UNKNOWN} == await filtered(http, given)
        tell_all(node.cluster, Says("slots", in_slots(DGX), RULES).all())
        node.view.renew()
        assert node.view.offers.slots
        filled = pod({GPUS: "1", **limits}, {})
        asked = {"Pod": filled, "NodeNames": ["slots", "node-1"]}
        assert ["slots"] == (await http.post("/scheduler/filter", json=asked)).json()["NodeNames"]


def test_what_if_of_a_node_without_slots_says_that_nobody_lists_amounts(tmp_path: Path) -> None:
    node, asked = cluster(machine()), requested(pod({GPUS: "1", MIB: "4000"}, {}), tmp_path)

    decision = predict(node.says.state, asked, 0.0)

    assert isinstance(decision, Admission)
    assert f"nobody lists {MIB} here: the kubelet passes over it, a scheduler would not" in decision.explanation.notes


async def test_both_kinds_are_refused_whichever_nodes_offer_them(tmp_path: Path) -> None:
    """Units under names of their own on one node, slots under one of their own on another, amounts as HAMi names them."""
    node = cluster(in_units(DGX, 8, TIME, BYTES))
    tell_all(node.cluster, Says("slots", renamed(HALF), RULES).all())
    node.view.renew()
    share = {str(TIME): "20", str(BYTES): "16"}
    two = (
        f"GPUs in two ways, for {BYTES} and {TIME} are asked for as well; ask for a share of a GPU or for whole devices"
    )
    known = (node_with("units", topology=node.says.hardware), node_with("slots", topology=renamed(HALF)))
    async with serving(node.scheduler, more=webhook_of(node).routes()) as url, httpx.AsyncClient(base_url=url) as http:
        for more, field in (
            ({str(HALF): "1", MIB: "9"}, MIB),
            ({str(HALF): "1"}, HALF),
            ({MIB: "9"}, MIB),
            ({GPUS: "1", MIB: "9"}, GPUS),
        ):
            given = pod({**share, **more}, {})
            text = await said(http, given, "/webhook")
            assert text.startswith(f"{SECOND}[{field}]: {two}")
            assert {text} == await filtered(http, given)
            assert text == of_cluster(given, tmp_path, *known)
            if field != HALF:  # a node does not know that other nodes offer slots under this name
                assert text == what_if(node, given, tmp_path)


def test_questions_to_a_cluster_refuse_what_its_scheduler_refuses(tmp_path: Path) -> None:
    """`what-if --cluster` and `why`: by the hardware of all nodes, also of those that do not answer now."""
    whole, units_away = node_with("whole", topology=DGX), in_units(DGX, 8, ResourceName(COMPUTE), ResourceName(MIB))
    away = msgspec.structs.replace(node_with("away", topology=units_away), silent=True)

    assert "UnknownResource" == of_cluster(pod({GPUS: "1", MIB: "4000"}, {}), tmp_path, whole)
    slots = node_with("slots", topology=in_slots(DGX))
    assert "is missing" in of_cluster(pod({MIB: "16Gi"}, {}), tmp_path, whole, slots)
    assert "0 cores" in of_cluster(pod({COMPUTE: "0"}, {}), tmp_path, whole, slots)
    assert "spreads units" in of_cluster(pod({GPUS: "1"}, {"topoalign.io/gpus": "2"}), tmp_path, whole)
    uuids = {"nvidia.com/use-gpuuuid": "GPU-nobody"}
    assert "no node has such a GPU" in of_cluster(pod({GPUS: "1", MIB: "9"}, uuids), tmp_path, slots)
    assert "NodeStale" == of_cluster(pod({COMPUTE: "200"}, {}), tmp_path, whole, away)


@pytest.mark.parametrize("memory", [MIB, "tencent.com/vcuda-memory"])
async def test_units_under_the_names_of_amounts_are_units(tmp_path: Path, memory: str) -> None:
    """200 of computing time are two whole GPUs then, and no amount of one in slots, whatever the other name is."""
    node = cluster(in_units(DGX, 8, ResourceName(COMPUTE), ResourceName(memory)))
    bad, known = pod({COMPUTE: "150"}, {}), node_with("units", topology=node.says.hardware)
    async with serving(node.scheduler, more=webhook_of(node).routes()) as url, httpx.AsyncClient(base_url=url) as http:
        for good in (pod({COMPUTE: "200"}, {}), pod({COMPUTE: "30", memory: "16"}, {})):
            assert "" == await said(http, good, "/webhook")
            assert "" in await filtered(http, good)
            assert "" == what_if(node, good, tmp_path)
            assert "" == of_cluster(good, tmp_path, known)
        text = await said(http, bad, "/webhook")
        assert text.startswith(f"{SECOND}[{COMPUTE}]: 150 units of computing time")
        assert {text} == await filtered(http, bad)
        assert text == what_if(node, bad, tmp_path)


async def test_pods_for_nodes_of_hami_are_let_through(tmp_path: Path) -> None:
    """Its annotations have an effect there, and no node of topoalign has slots on which they would have none."""
    node = cluster(DGX)
    async with serving(node.scheduler, more=webhook_of(node).routes()) as url, httpx.AsyncClient(base_url=url) as http:
        for key, text in (("nvidia.com/vgpu-mode", "mig"), ("hami.io/node-scheduler-policy", "spread")):
            assert (await review(http, pod({GPUS: "1", MIB: "4000"}, {key: text}), "/webhook"))["allowed"]


def renamed(slots: ResourceName, amounts: Slots = PLAIN) -> Topology:
    """The machine with its GPUs in slots under this name, and with these names of amounts."""
    offers = tuple(msgspec.structs.replace(each, resource=slots, slots=amounts) for each in in_slots(DGX).offered)
    return msgspec.structs.replace(DGX, offers=offers)


def of_cluster(given: dict[str, Any], directory: Path, *nodes: NodeRecord) -> str:
    """What `what-if --cluster` says of a pod, or the code of the main reason; empty: it fits."""
    file = directory / "cluster"
    file.write_bytes(b"".join(encode_lines(record_of(*nodes))))
    try:
        _, answer = ask_cluster(
            None, ClusterOptions(None, None, None, file), requested(given, directory), {}, as_json=False
        )
    except InvalidShare as error:
        return f"{error.finding}; {error.remedy}"
    return answer.reason.code if answer.reason is not None else ""

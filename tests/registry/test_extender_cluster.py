"""The extender before the view of a cluster: recorded calls are answered soundly, and none but bind has an effect."""

import json
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from decision_support import container, machine, pod
from scheduling_support import go_json, serving
from view_support import RULES, Says, scheduler_of, some_request, some_says, tell_all

from topoalign.core.model.ids import GPU
from topoalign.core.model.requests import PodRequest
from topoalign.core.model.topology.shapes import Shapes
from topoalign.registry.cluster_nodes import Cluster
from topoalign.registry.scheduling.filter.scheduler import Scheduler

pytestmark = pytest.mark.anyio

EIGHT = (0, 0, 0, 0, 1, 1, 1, 1)
JSON = {"content-type": "application/json"}


def scheduler_beside(*nodes: Says, full: Says | None = None) -> Scheduler:
    """`full`: one of the nodes, of which a pod has six GPUs."""
    cluster = Cluster(usage=True)
    for says in nodes:
        tell_all(cluster, says.all())
    if full is not None:
        tell_all(cluster, full.admit(pod(container("main", gpus=6)), "uid-6"))
    return scheduler_of(cluster)


def recorded(vectors: Path, verb: str) -> list[dict[str, Any]]:
    file = vectors / "extender" / f"{verb}.jsonl"
    if not file.is_file():
        pytest.skip(f"no recorded requests at {file}")
    return [json.loads(line)["request"]["body"] for line in file.read_text().splitlines()]


def named(said: dict[str, Any]) -> list[str]:
    """The nodes of a call or an answer, in either form."""
    return said["NodeNames"] or [item["metadata"]["name"] for item in (said["Nodes"] or {"items": []})["items"]]


def gpus_of(body: dict[str, Any]) -> int:
    """What the containers of a recorded pod ask for at once, where it has no init containers."""
    containers = body["Pod"]["spec"]["containers"]
    return sum(int(each.get("resources", {}).get("limits", {}).get(GPU, 0)) for each in containers)


async def test_recorded_calls_are_answered_by_what_nodes_have_free(vectors: Path) -> None:
    """Of three nodes with eight GPUs one is free, one has six in use, and one is not known."""
    says = Says("n2", machine(gpus=EIGHT), RULES)
    scheduler = scheduler_beside(Says("n1", machine(gpus=EIGHT), RULES), says, full=says)
    seen = set()

    async with serving(scheduler) as url, httpx.AsyncClient(base_url=f"{url}/scheduler/", headers=JSON) as http:
        for body in recorded(vectors, "filter"):
            answer = (await http.post("filter", content=go_json(body))).json()
            names, passed = named(body), named(answer)
            refused = answer["FailedAndUnresolvableNodes"]
            if answer["Error"]:  # nobody has shown this registry what the pod preempted on its nominated node
                assert body["Pod"]["status"]["nominatedNodeName"] in names
                assert answer["Error"].startswith("VictimsTerminating")
                continue
            assert sorted(names) == sorted((*passed, *refused)), "each once"
            assert ({}, "") == (answer["FailedNodes"], answer["Error"])
            asked = gpus_of(body)
            if 0 < asked <= 8 and "initContainers" not in body["Pod"]["spec"] and "n1" in names:
                assert "n1" in passed
            if asked > 2:
                assert "n2" not in passed
            seen |= {text.partition(":")[0] for text in refused.values()}
        for body in recorded(vectors, "prioritize"):
            scores = (await http.post("prioritize", content=go_json(body))).json()
            assert all(type(each["Score"]) is int and 0 <= each["Score"] <= 10 for each in scores)
        for body in recorded(vectors, "preempt"):
            helped = (await http.post("preempt", content=go_json(body))).json()["NodeNameToMetaVictims"]
            assert {*helped} <= {*(body["NodeNameToMetaVictims"] or body["NodeNameToVictims"])}

    assert {"UnknownNode", "NotAligned"} <= seen


def manifest(request: PodRequest, uid: str) -> dict[str, Any]:
    def listed(group: Any) -> list[dict[str, Any]]:
        return [
            {
                "name": each.name,
                "restartPolicy": "Always" if each.sidecar else None,
                "resources": {
                    side: {k: f"{v}m" if k == "cpu" else str(v) for k, v in amounts.items()}
                    for side, amounts in (("requests", each.requests), ("limits", each.limits))
                },
            }
            for each in group
        ]

    spec = {"initContainers": listed(request.init_containers), "containers": listed(request.containers)}
    return {"metadata": {"name": request.name, "uid": uid, "annotations": request.annotations}, "spec": spec}


async def test_no_call_but_bind_has_an_effect() -> None:
    """Whatever is asked in between, good or bad, what is answered to a pod is the same in every byte."""
    chance, shapes = Random(48), Shapes()
    nodes = [some_says(chance, f"node-{number}", shapes) for number in range(6)]
    names = [says.node for says in nodes]
    requests = [some_request(chance, chance.choice(nodes).hardware, f"p{number}") for number in range(12)]
    scheduler = scheduler_beside(*nodes)
    pods = [manifest(request, f"uid-{number}") for number, request in enumerate(requests)]
    bad = [None, {}, manifest(requests[0], ""), {"metadata": {"uid": "u"}, "spec": {"containers": []}}]

    async with serving(scheduler) as url, httpx.AsyncClient(base_url=f"{url}/scheduler/", headers=JSON) as http:

        async def answers() -> list[bytes]:
            calls = [
                (verb, {"Pod": each, "NodeNames": some})
                for each in pods
                for some in (names, [*names, "ghost"], names[:1])
                for verb in ("filter", "prioritize")
            ]
            return [(await http.post(verb, content=go_json(body))).content for verb, body in calls]

        await http.post("filter", content=go_json({"Pod": pods[0], "NodeNames": names}))
        version, first = scheduler.view.version, await answers()
        for each in (*pods, *bad):
            meta = {name: {"Pods": [{"UID": "uid-1"}], "NumPDBViolations": 0} for name in names}
            await http.post("preempt", content=go_json({"Pod": each, "NodeNameToMetaVictims": meta}))
            await http.post("filter", content=go_json({"Pod": each, "NodeNames": names * 2}))
            await http.post("filter", content=b"{")
        again = await answers()

    assert first == again
    assert version == scheduler.view.version
    fresh = scheduler_beside(*nodes)
    async with serving(fresh) as url, httpx.AsyncClient(base_url=f"{url}/scheduler/", headers=JSON) as http:
        one = await http.post("filter", content=go_json({"Pod": pods[3], "NodeNames": names}))
    assert one.content in first

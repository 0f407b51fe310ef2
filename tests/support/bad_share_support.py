"""Pods that ask for shares of GPUs, and what webhook, filter and what-if say of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
from decision_support import machine
from scheduling_support import go_json
from unit_support import CORES, DGX, MEMORY, in_units
from view_support import TIME, OneNode, Says, tell_all

from topoalign.cli.explain import pod_in
from topoalign.core.admission.prediction import predict
from topoalign.core.model.decisions import Refusal
from topoalign.core.model.errors import TopoalignError
from topoalign.core.model.requests import AdmissionRules, Mode, PodRequest, Policy
from topoalign.core.model.topology.model import Topology

RULES = AdmissionRules(mode=Mode.KUBELET, policy=Policy.NONE)
MOST = 160
"""Blocks of 256 MiB of a GPU of the DGX A100 with 40 GB."""
SECOND = "spec.containers[1].resources.limits"
WEIGHTS, UUIDS = "hami.io/device-scoring-weights", "nvidia.com/use-gpuuuid"

Limits = dict[str, str]


def units(cores: str | None = None, blocks: str | None = None) -> Limits:
    return {str(name): amount for name, amount in ((CORES, cores), (MEMORY, blocks)) if amount is not None}


def pod(
    limits: Mapping[str, str | None], annotations: Mapping[str, str | None], group: str = "containers"
) -> dict[str, Any]:
    """A pod of which the second container, or the first init container, asks for this; None: null in its manifest."""
    asking = {"name": "asks", "resources": {"limits": limits}}
    spec: dict[str, Any] = {"containers": [{"name": "main"}, asking]}
    if group == "initContainers":
        spec = {"initContainers": [asking], "containers": [{"name": "main"}]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p", "namespace": "team", "uid": "u", "annotations": annotations},
        "spec": spec,
    }


def cluster(hardware: Topology | None = None) -> OneNode:
    """A node with GPUs in units, or this one, and one with whole GPUs alone."""
    found = OneNode(RULES, hardware or in_units(DGX))
    found.tell(found.says.all())
    tell_all(found.cluster, Says("whole", machine(), RULES).all())
    found.view.renew()
    return found


def requested(given: dict[str, Any], directory: Path) -> PodRequest:
    """The pod as the command reads it from a file. Raises InvalidField."""
    file = directory / "pod.json"
    file.write_bytes(msgspec.json.encode(given))
    nothing: dict[str, Any] = dict.fromkeys(("gpus", "cpus", "memory", "nics", "annotations", "pod"))
    return pod_in(file, nothing).request


def what_if(node: OneNode, given: dict[str, Any], directory: Path) -> str:
    """What the command says of the pod in a file, asking the node; empty: it fits."""
    try:
        decision = predict(node.says.state, requested(given, directory), TIME)
    except TopoalignError as error:
        return f"{error.finding}; {error.remedy}"
    return f"{decision.finding}; {decision.remedy}" if isinstance(decision, Refusal) else ""


async def review(http: httpx.AsyncClient, given: dict[str, Any], path: str) -> Any:
    resource = {"group": "", "version": "v1", "resource": "pods"}
    request = {"uid": "r", "operation": "CREATE", "namespace": "team", "resource": resource, "object": given}
    asked = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    answer = await http.post(path, content=go_json(asked), headers={"content-type": "application/json"})
    return answer.json()["response"]


async def said(http: httpx.AsyncClient, given: dict[str, Any], path: str) -> str:
    """What the webhook says; empty: it lets the pod pass."""
    answer = await review(http, given, path)
    status = answer.get("status", {})

    assert answer["allowed"] or ("Invalid", 422) == (status["reason"], status["code"])
    return str(status.get("message", "")).removeprefix("topoalign: ")


async def filtered(http: httpx.AsyncClient, given: dict[str, Any]) -> set[str]:
    """What the filter says of each node, without the code; empty: it lets the pod pass there."""
    asked = {"Pod": given, "NodeNames": ["node-1", "whole"]}
    call = await http.post("/scheduler/filter", content=go_json(asked), headers={"content-type": "application/json"})
    answer = call.json()
    assert "" == answer["Error"] and {} == answer["FailedNodes"]
    texts = answer["FailedAndUnresolvableNodes"]
    return {texts.get(node, "").partition(": ")[2] for node in ("node-1", "whole")}

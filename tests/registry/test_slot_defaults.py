"""The webhook fills in what a container leaves out that asks for slots of GPUs, and judges the pod with that."""

import base64
import json
from copy import deepcopy
from typing import Any

import httpx
import pytest
from scheduling_support import RecordedScheduling, go_json, serving
from slot_support import in_slots
from unit_support import DGX

from topoalign.core.demand.shares import slot_resources
from topoalign.core.model.ids import GPU, NodeName, ResourceName
from topoalign.core.model.topology.device_offers import Slots
from topoalign.core.sharing.pod_checks import Offers, check_pod
from topoalign.core.sharing.slot_defaults import slot_defaults
from topoalign.registry.ports import SeenQuota
from topoalign.registry.scheduling.cluster_state.offered import OfferedResources
from topoalign.registry.scheduling.filter.namespace_quotas import Quotas
from topoalign.registry.scheduling.webhook.reviews import Webhook

pytestmark = pytest.mark.anyio

MACHINE = in_slots(DGX)
OFFERED = slot_resources(MACHINE)
CORES, MEMORY = "nvidia.com/gpucores", "nvidia.com/gpumem"
PERCENTAGE, PRIORITY = "nvidia.com/gpumem-percentage", "nvidia.com/priority"
NAMES = {GPU, CORES, MEMORY, PERCENTAGE, PRIORITY}

Limits = dict[str, str]


def webhook(offered: Any = OFFERED) -> Webhook:
    names = {name for each in offered for name in (each.resource, *each.slots.resources)}
    return Webhook(
        "",
        names.__contains__,
        lambda pod: check_pod(pod, Offers(slots=offered)),
        lambda pod: slot_defaults(pod, offered),
    )


def pod(limits: Limits, **container: Any) -> dict[str, Any]:
    asks = {"name": "asks", "resources": {"limits": limits}, **container}
    return {"metadata": {"name": "p"}, "spec": {"initContainers": [{"name": "i"}], "containers": [{"name": "m"}, asks]}}


async def answer(hook: Webhook, given: dict[str, Any], path: str = "/webhook") -> Any:
    resource = {"group": "", "version": "v1", "resource": "pods"}
    request = {"uid": "r", "operation": "CREATE", "namespace": "team", "resource": resource, "object": given}
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    async with serving(RecordedScheduling(), more=hook.routes()) as url, httpx.AsyncClient(base_url=url) as http:
        got = await http.post(path, content=go_json(review), headers={"content-type": "application/json"})
    return got.json()["response"]


def patched(given: dict[str, Any], said: Any) -> dict[str, Any]:
    """The pod after the patch of the answer: `add` of RFC 6902, with the requests that an API server fills in."""
    found = deepcopy(given)
    for change in json.loads(base64.b64decode(said["patch"])) if "patch" in said else ():
        assert "add" == change["op"]
        *way, last = [each.replace("~1", "/").replace("~0", "~") for each in change["path"][1:].split("/")]
        at: Any = found
        for step in way:
            at = at[int(step)] if isinstance(at, list) else at[step]
        if isinstance(at, list):
            at.insert(len(at) if last == "-" else int(last), change["value"])
        else:
            at[last] = change["value"]
    return found


@pytest.mark.parametrize(
    ("asked", "added"),
    [
        ({GPU: "1"}, {CORES: "100"}),
        ({GPU: "2", PERCENTAGE: "100"}, {CORES: "100"}),
        ({GPU: "2", PERCENTAGE: "50"}, {}),
        ({GPU: "1", MEMORY: "4000"}, {}),
        ({GPU: "1", CORES: "30"}, {}),
        ({GPU: "1", MEMORY: "0"}, {}),
        ({GPU: "1", MEMORY: "10", PERCENTAGE: "100"}, {CORES: "100"}),
        ({MEMORY: "4000"}, {GPU: "1"}),
        ({CORES: "30"}, {GPU: "1"}),
        ({PERCENTAGE: "100"}, {GPU: "1", CORES: "100"}),
        ({GPU: "0"}, {}),
        ({"example.com/fpga": "1"}, {}),
    ],
)
async def test_what_is_left_out_is_filled_in(asked: Limits, added: Limits) -> None:
    """By HAMi's rules; what comes out is what the validating webhook lets pass, and is filled in no further."""
    hook, given = webhook(), pod(asked)
    said = await answer(hook, given)
    after = patched(given, said)

    assert said["allowed"], said
    assert {**asked, **added} == after["spec"]["containers"][1]["resources"]["limits"]
    assert given["spec"]["initContainers"] == after["spec"]["initContainers"]
    for path in ("/webhook", "/webhook/validate"):
        again = await answer(hook, after, path)
        assert again["allowed"] and "patch" not in again


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (None, [{"name": "CUDA_TASK_PRIORITY", "value": "1"}]),
        ([], [{"name": "CUDA_TASK_PRIORITY", "value": "1"}]),
        ([{"name": "A", "value": "b"}], [{"name": "A", "value": "b"}, {"name": "CUDA_TASK_PRIORITY", "value": "1"}]),
        ([{"name": "CUDA_TASK_PRIORITY", "value": "0"}], [{"name": "CUDA_TASK_PRIORITY", "value": "0"}]),
    ],
)
async def test_the_priority_is_a_variable_of_the_container(env: Any, expected: list[dict[str, str]]) -> None:
    given = pod({GPU: "1", MEMORY: "1", PRIORITY: "1"}, env=env)
    after = patched(given, await answer(webhook(), given))

    assert expected == after["spec"]["containers"][1]["env"]


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({GPU: "1", PERCENTAGE: "150"}, PERCENTAGE),
        ({MEMORY: "16Gi"}, MEMORY),
        ({PRIORITY: "1"}, PRIORITY),
        ({GPU: "1", CORES: "0"}, CORES),
    ],
)
async def test_what_cannot_be_meant_is_not_mended(asked: Limits, field: str) -> None:
    said = await answer(webhook(), pod(asked))

    assert (False, 422) == (said["allowed"], said["status"]["code"])
    assert f"spec.containers[1].resources.limits[{field}]: " in said["status"]["message"]


async def test_the_validating_webhook_judges_what_is_there() -> None:
    """
    What is missing need not be filled in: the registry that was asked first may not have known the slots yet, and a pod
    that it let pass would be denied by another one. An amount of no GPU cannot be meant.
    """
    limits: list[Limits] = [{str(GPU): "1"}, {MEMORY: "4000"}]
    said = [await answer(webhook(), pod(each), "/webhook/validate") for each in limits]

    assert [True, False] == [each["allowed"] for each in said]
    assert (422, True) == (said[1]["status"]["code"], MEMORY in said[1]["status"]["message"])


async def test_the_slots_that_are_asked_for_decide_under_which_names() -> None:
    """Two kinds of GPUs with the same names for amounts; and names of their own."""
    other = OFFERED[0]._replace(resource=ResourceName("example.com/a100"))
    renamed = OFFERED[0]._replace(
        resource=ResourceName("example.com/l4"),
        slots=Slots(memory=ResourceName("example.com/mib"), cores=ResourceName("x.y/c")),
    )
    hook = webhook((OFFERED[0], other, renamed))

    async def limits(asked: Limits) -> Limits:
        given = pod(asked)
        found: Limits = patched(given, await answer(hook, given))["spec"]["containers"][1]["resources"]["limits"]
        return found

    assert {"example.com/a100": "1", CORES: "100"} == await limits({"example.com/a100": "1"})
    assert {"example.com/mib": "9", "example.com/l4": "1"} == await limits({"example.com/mib": "9"})
    assert {"example.com/l4": "1", "x.y/c": "100"} == await limits({"example.com/l4": "1"})
    assert {MEMORY: "9", "example.com/a100": "1"} == await limits({MEMORY: "9"})


async def test_without_slots_nothing_is_filled_in() -> None:
    hook = Webhook("", NAMES.__contains__)
    said = await answer(hook, pod({GPU: "1"}))

    assert said["allowed"] and "patch" not in said


async def test_cores_that_are_filled_in_count_for_quotas() -> None:
    """A pod for a whole GPU asks for its 100 cores. A percentage of memory, which depends on the GPU, does not count."""
    offers = OfferedResources()
    offers.note(NodeName("n"), MACHINE)
    quotas = Quotas(offers, dict)
    quotas.listed = True
    limits = {ResourceName(CORES): 99, ResourceName(MEMORY): 10}
    quotas.see(SeenQuota(namespace="team", name="gpus", uid="q", limits=limits))
    hook = Webhook("", NAMES.__contains__, quotas.check_new, offers.left_out)
    asked: list[Limits] = [{str(GPU): "1"}, {str(GPU): "1", PERCENTAGE: "50"}, {str(GPU): "1", MEMORY: "11"}]
    said = [await answer(hook, pod(each)) for each in asked]

    assert [False, True, False] == [each["allowed"] for each in said]
    finding = f"limits.{CORES} of its ResourceQuota is 99, its pods hold 0, and this pod asks for 100"
    assert finding in said[0]["status"]["message"]
    assert 403 == said[2]["status"]["code"]

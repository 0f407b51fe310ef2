"""
The webhook denies what no pod may say of itself, names the field, and fills in the scheduler's name.

Pods that ask for nothing of ours are let through untouched, whatever they are.
"""

import base64
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import pytest
from scheduling_support import RecordedScheduling, go_json, serving

from topoalign.core.model.errors import InvalidField
from topoalign.core.model.ids import GPU, ResourceName
from topoalign.core.model.requests import GANG, GANG_SIZE, PodRequest
from topoalign.core.sharing.pod_checks import check_pod
from topoalign.core.sharing.quota_amounts import OverQuota
from topoalign.registry.scheduling.cluster_state.offered import OfferedResources
from topoalign.registry.scheduling.filter.scheduler import PodChecks
from topoalign.registry.scheduling.webhook.reviews import Webhook

pytestmark = pytest.mark.anyio

OURS = "topoalign-scheduler"
GPUS = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
HINT = "scheduling.koordinator.sh/device-allocate-hint"
JOINT = "scheduling.koordinator.sh/device-joint-allocate"


def offered(resource: ResourceName) -> bool:
    return resource == "nvidia.com/mig-1g.5gb"


def pod(*, annotations: Mapping[str, str] = {}, labels: Mapping[str, str] = {}, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "train", "annotations": dict(annotations), "labels": dict(labels)},
        "spec": {"containers": [{"name": "main", **GPUS}], "schedulerName": "default-scheduler", **spec},
    }


def review(obj: object, **more: object) -> dict[str, object]:
    request = {
        "uid": "r-1",
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "operation": "CREATE",
        "namespace": "team",
        "userInfo": {"username": "somebody", "groups": ["system:authenticated"]},
        "object": obj,
        "oldObject": None,
        "dryRun": False,
        **more,
    }
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    webhook = Webhook(OURS, offered)
    async with serving(RecordedScheduling(), more=webhook.routes()) as url, httpx.AsyncClient(base_url=url) as client:
        yield client


async def answer(http: httpx.AsyncClient, obj: object, path: str = "/webhook", **more: object) -> Any:
    got = await http.post(path, content=go_json(review(obj, **more)), headers={"content-type": "application/json"})

    assert 200 == got.status_code
    said = got.json()
    assert ("admission.k8s.io/v1", "AdmissionReview", "r-1") == (
        said["apiVersion"],
        said["kind"],
        said["response"].pop("uid"),
    )
    return said["response"]


async def denied(http: httpx.AsyncClient, obj: object, **more: Any) -> tuple[int, str]:
    """Code and message: the same from both webhooks, or a denial by the one that can fill in."""
    said = await answer(http, obj, **more)
    assert not said["allowed"], said
    return said["status"]["code"], said["status"]["message"].removeprefix("topoalign: ").partition("; ")[0]


async def test_a_pod_gets_the_name_of_the_scheduler(http: httpx.AsyncClient) -> None:
    """Of any resource that some node offers; a pod that has the name already stays as it is."""
    mig = [{"name": "main", "resources": {"limits": {"nvidia.com/mig-1g.5gb": "1"}}}]
    init = {"initContainers": [{"name": "warm", **GPUS}], "containers": [{"name": "main"}]}
    patch = [{"op": "add", "path": "/spec/schedulerName", "value": OURS}]

    specs: list[dict[str, Any]] = [{}, {"schedulerName": None}, {"containers": mig}, init]
    for spec in specs:
        said = await answer(http, pod(**spec))
        assert (True, "JSONPatch") == (said["allowed"], said["patchType"])
        assert patch == json.loads(base64.b64decode(said["patch"]))
    assert {"allowed": True} == await answer(http, pod(schedulerName=OURS))
    assert {"allowed": True} == await answer(http, pod(schedulerName=OURS), path="/webhook/validate")


async def test_pods_that_ask_for_nothing_of_ours_are_let_through(http: httpx.AsyncClient) -> None:
    """Also where they are wrong, privileged, or another scheduler's: they are none of our business."""
    foreign = {"name": "c", "resources": {"limits": {"example.com/fpga": "x"}}, "securityContext": {"privileged": True}}

    specs: list[dict[str, Any]] = [
        {"containers": [foreign], "nodeName": "n", "schedulerName": "other"},
        {"containers": []},
    ]
    for path in ("/webhook", "/webhook/validate"):
        for spec in specs:
            assert {"allowed": True} == await answer(http, pod(**spec), path=path)
        assert {"allowed": True} == await answer(http, None, path=path, operation="DELETE")
        services = {"group": "", "version": "v1", "resource": "services"}
        assert {"allowed": True} == await answer(http, {"spec": {}}, path=path, resource=services)


@pytest.mark.parametrize("scheduler", [None, "", "default-scheduler", OURS, "koord-scheduler", "volcano"])
async def test_koordinators_names_are_judged_unless_another_schedules(scheduler: str | None) -> None:
    """Without its annotations they are none of our business, either: a node may have such a resource."""
    webhook = Webhook(OURS, offered, PodChecks(OfferedResources()).check)
    half = {"resources": {"requests": {"koordinator.sh/gpu": "50"}, "limits": {"koordinator.sh/gpu": "50"}}}
    spec: dict[str, Any] = {"containers": [{"name": "main", **half}], "schedulerName": scheduler}
    async with serving(RecordedScheduling(), more=webhook.routes()) as url, httpx.AsyncClient(base_url=url) as http:
        for path in ("/webhook", "/webhook/validate"):
            assert {"allowed": True} == await answer(http, pod(**spec), path=path)
            if scheduler in ("koord-scheduler", "volcano"):
                assert {"allowed": True} == await answer(http, pod(annotations={HINT: "{}"}, **spec), path=path)
                continue
            code, finding = await denied(http, pod(annotations={HINT: "{}"}, **spec), path=path)
            assert (422, "spec.containers[0].resources.limits[koordinator.sh/gpu]") == (code, finding.partition(":")[0])


async def test_what_probably_means_something_else_is_a_warning() -> None:
    """Both webhooks say so of a pod that is created; to an update and to another scheduler's pod they say nothing."""
    checks = PodChecks(OfferedResources())
    webhook = Webhook(OURS, offered, checks.check, warn=checks.warnings)
    amount = {"nvidia.com/gpumem": "4000"}
    key = {"nvidia.com/use-gpu-uuid": "GPU-0"}
    pods = [pod(annotations=amount, schedulerName=OURS), pod(annotations=key, schedulerName=OURS)]
    async with serving(RecordedScheduling(), more=webhook.routes()) as url, httpx.AsyncClient(base_url=url) as http:
        for path in ("/webhook", "/webhook/validate"):
            said = [await answer(http, each, path=path) for each in pods]

            assert [
                "metadata.annotations[nvidia.com/gpumem]: has no effect; write it in resources.limits of a container",
                "metadata.annotations[nvidia.com/use-gpu-uuid]: nobody reads this key; did you mean nvidia.com/use-gpuuuid?",
            ] == [each["warnings"][0] for each in said]
            assert [{"allowed", "warnings"}] * 2 == [each.keys() for each in said]
            assert {"allowed": True} == await answer(http, pod(schedulerName=OURS), path=path)
            updated = pod(annotations=key)
            assert {"allowed": True} == await answer(http, updated, path=path, operation="UPDATE", oldObject=pod())
        plain = [{"name": "main"}]
        assert {"allowed": True} == await answer(http, pod(annotations=key, containers=plain, schedulerName="volcano"))
        filled = await answer(http, pod(annotations=key))
        assert {"allowed", "patch", "patchType", "warnings"} == filled.keys()


async def test_annotations_of_ours_are_denied_to_everybody(http: httpx.AsyncClient) -> None:
    """When a pod is created and when it is changed, whatever it asks for; what a pod has may stay."""
    forged = pod(annotations={"topoalign.io/devices": "GPU-0"}, containers=[{"name": "c"}])
    finding = "metadata.annotations[topoalign.io/devices]: is not for users to write"

    assert (403, finding) == await denied(http, forged)
    assert (403, finding) == await denied(http, forged, operation="UPDATE", oldObject=pod())
    assert (403, finding) == await denied(http, forged, path="/webhook/validate")
    assert {"allowed": True} == await answer(http, forged, operation="UPDATE", oldObject=forged)


async def test_an_annotation_of_ours_is_not_for_users_to_change(http: httpx.AsyncClient) -> None:
    """One that the registry has written may be removed and stay; annotations in other domains may change."""

    def with_devices(*gpus: str) -> dict[str, Any]:
        written = {"topoalign.io/devices": ",".join(gpus)} if gpus else {}
        return pod(annotations={**written, "example.com/devices": ",".join(gpus)})

    changed: dict[str, Any] = {"operation": "UPDATE", "oldObject": with_devices("GPU-0")}
    finding = "metadata.annotations[topoalign.io/devices]: is not for users to write"

    for path in ("/webhook", "/webhook/validate"):
        for subresource in ("", "status", "resize"):
            update = {**changed, "path": path, "subResource": subresource}
            assert (403, finding) == await denied(http, with_devices("GPU-1"), **update)
            assert {"allowed": True} == await answer(http, with_devices(), **update)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"nodeName": "gpu-1"}, "spec.nodeName"),
        ({"schedulerName": "volcano"}, "spec.schedulerName"),
        (
            {"initContainers": [{"name": "s", "restartPolicy": "Always", "securityContext": {"privileged": True}}]},
            "spec.initContainers[0].securityContext.privileged",
        ),
        (
            {"containers": [{"name": "m", **GPUS}, {"name": "s", "securityContext": {"privileged": True}}]},
            "spec.containers[1].securityContext.privileged",
        ),
    ],
)
async def test_ways_past_the_scheduler_are_denied(http: httpx.AsyncClient, spec: dict[str, Any], field: str) -> None:
    """A label that exempts pods elsewhere has no effect: whoever creates a pod writes its labels."""
    for labels in ({}, {"topoalign.io/webhook": "ignore", "hami.io/webhook": "ignore"}):
        code, finding = await denied(http, pod(labels=labels, **spec))
        assert (403, field) == (code, finding.partition(":")[0])


async def test_a_static_pod_is_shown_by_its_kubelet_alone(http: httpx.AsyncClient) -> None:
    """It runs already, and denying its picture would only hide it."""
    mirror = pod(annotations={"kubernetes.io/config.mirror": "x"}, nodeName="gpu-1")
    kubelet = {"username": "system:node:gpu-1", "groups": ["system:nodes", "system:authenticated"]}

    assert {"allowed": True} == await answer(http, mirror, userInfo=kubelet)
    assert (403, "spec.nodeName: the pod would not pass the scheduler") == await denied(http, mirror)


@pytest.mark.parametrize(
    ("amount", "finding"),
    [
        ("-1", "spec.containers[0].resources.limits[nvidia.com/gpu]: '-1' is outside 0 to 2^63-1"),
        ("1500m", "spec.containers[0].resources.limits[nvidia.com/gpu]: '1500m' is no amount"),
        ("1e30", "spec.containers[0].resources.limits[nvidia.com/gpu]: "),
    ],
)
async def test_requests_that_cannot_be_meant_are_denied(http: httpx.AsyncClient, amount: str, finding: str) -> None:
    code, said = await denied(
        http, pod(containers=[{"name": "m", "resources": {"limits": {"nvidia.com/gpu": amount}}}])
    )

    assert 422 == code
    assert said.startswith(finding.partition("'")[0])


async def test_pod_level_resources_that_no_api_server_takes_are_denied(http: httpx.AsyncClient) -> None:
    devices = pod(resources={"limits": {"nvidia.com/gpu": "1"}})
    finding = "spec.resources.limits[nvidia.com/gpu]: only cpu, memory and hugepages-<size> are pod-level resources"

    assert (422, finding) == await denied(http, devices)
    assert {"allowed": True} == await answer(http, pod(resources={"limits": {"cpu": "4"}}, schedulerName=OURS))


@pytest.mark.parametrize(
    ("annotations", "field"),
    [
        ({HINT: "{"}, f"metadata.annotations[{HINT}]"),
        ({HINT: '{"gpu":{"exclusivePolicy":"Sometimes"}}'}, f"metadata.annotations[{HINT}].gpu.exclusivePolicy"),
        ({JOINT: '{"deviceTypes":["gpu","gpu"]}'}, f"metadata.annotations[{JOINT}].deviceTypes"),
        ({f"{JOINT}d": "{}"}, f"metadata.annotations[{JOINT}d]"),
        ({"topoalign.io/gang": "g"}, "metadata.annotations[topoalign.io/gang-size]"),
        ({"topoalign.io/gang-size": "2"}, "metadata.annotations[topoalign.io/gang]"),
        ({"topoalign.io/gang": "g", "topoalign.io/gang-size": "1e3"}, "metadata.annotations[topoalign.io/gang-size]"),
        ({"topoalign.io/gang": "g", "topoalign.io/gang-size": "0"}, "metadata.annotations[topoalign.io/gang-size]"),
        (
            {"topoalign.io/gang": "g", "topoalign.io/gang-size": "\u0662"},
            "metadata.annotations[topoalign.io/gang-size]",
        ),
        ({"topoalign.io/gang": "a/b", "topoalign.io/gang-size": "2"}, "metadata.annotations[topoalign.io/gang]"),
    ],
)
async def test_annotations_that_cannot_be_meant_are_denied(
    http: httpx.AsyncClient, annotations: dict[str, str], field: str
) -> None:
    code, finding = await denied(http, pod(annotations=annotations))

    assert (422, field) == (code, finding.partition(": ")[0])


async def test_annotations_that_can_be_meant_are_allowed(http: httpx.AsyncClient) -> None:
    nics = [{"name": "m", "resources": {"limits": {"nvidia.com/gpu": "2", "topoalign.io/nic": "2"}}}]
    annotations = {
        JOINT: '{"deviceTypes":["gpu","rdma"],"requiredScope":"SamePCIe"}',
        HINT: '{"gpu":{"requiredTopologyScope":"NUMANode"}}',
        "topoalign.io/gang": "llama",
        "topoalign.io/gang-size": "512",
        "example.com/any": "thing",
    }

    assert (await answer(http, pod(annotations=annotations, containers=nics)))["allowed"]


@pytest.mark.parametrize("path", ["/webhook", "/webhook/validate"])
@pytest.mark.parametrize("subresource", ["", "status"])
@pytest.mark.parametrize(
    ("before", "after", "field"),
    [
        ({}, {GANG: "g"}, GANG_SIZE),
        ({GANG: "g", GANG_SIZE: "2"}, {GANG: "g"}, GANG_SIZE),
        ({GANG: "g", GANG_SIZE: "2"}, {GANG: "g", GANG_SIZE: "0"}, GANG_SIZE),
        ({GANG: "g", GANG_SIZE: "2"}, {GANG_SIZE: "2"}, GANG),
    ],
)
async def test_an_update_of_our_annotations_is_judged_as_a_creation(
    http: httpx.AsyncClient, path: str, subresource: str, before: dict[str, str], after: dict[str, str], field: str
) -> None:
    """S07: also one that takes an annotation away, and one of a pod that is bound, which a new pod must not be."""
    old = pod(annotations=before, nodeName="gpu-1")
    update: dict[str, Any] = {"operation": "UPDATE", "subResource": subresource, "oldObject": old, "path": path}
    new = pod(annotations=after, nodeName="gpu-1")
    code, finding = await denied(http, new, **update)

    assert (422, f"metadata.annotations[{field}]") == (code, finding.partition(": ")[0])
    assert {"allowed": True} == await answer(http, old, **update)
    assert {"allowed": True} == await answer(http, new, **{**update, "oldObject": new}), "it is no change"
    assert {"allowed": True} == await answer(http, pod(annotations=after, containers=[{"name": "c"}]), **update)


async def test_an_update_is_judged_by_the_cluster_and_not_by_its_quotas() -> None:
    """S07: the pod counts for the quotas of its namespace already."""

    def over_quota(request: PodRequest) -> None:
        raise OverQuota("team", GPU, 1, 1, 1)

    def unknown_cards(request: PodRequest) -> None:
        raise InvalidField("metadata.annotations[topoalign.io/gpus]", "more than a node has", "ask for fewer")

    for check_updated, allowed in ((check_pod, True), (unknown_cards, False)):
        webhook = Webhook(OURS, offered, over_quota, check_updated=check_updated)
        async with serving(RecordedScheduling(), more=webhook.routes()) as url, httpx.AsyncClient(base_url=url) as http:
            new = pod(annotations={GANG: "g", GANG_SIZE: "2"})
            said = await answer(http, new, operation="UPDATE", oldObject=pod())
            assert allowed is said["allowed"]


@pytest.mark.parametrize("path", ["/webhook", "/webhook/validate"])
@pytest.mark.parametrize("resource", [("pods", "binding"), ("bindings", "")])
async def test_a_binding_sets_no_annotation_of_ours(
    http: httpx.AsyncClient, path: str, resource: tuple[str, str]
) -> None:
    """S07: the API server copies the annotations of a Binding to the pod, which is decided on already."""

    def binding(**annotations: str) -> dict[str, object]:
        target = {"apiVersion": "v1", "kind": "Node", "name": "gpu-1"}
        return {"metadata": {"name": "train", "annotations": annotations}, "target": target}

    name, subresource = resource
    creation: dict[str, Any] = {
        "kind": {"group": "", "version": "v1", "kind": "Binding"},
        "resource": {"group": "", "version": "v1", "resource": name},
        "subResource": subresource,
        "path": path,
    }
    for key in (GANG, "topoalign.io/devices"):
        code, finding = await denied(http, binding(**{key: "x"}), **creation)
        assert (403, f"metadata.annotations[{key}]") == (code, finding.partition(": ")[0])
    assert {"allowed": True} == await answer(http, binding(note="x"), **creation)
    assert {"allowed": True} == await answer(http, {"metadata": {"name": "train"}}, **creation)


async def test_the_validating_webhook_changes_nothing(http: httpx.AsyncClient) -> None:
    """A pod that lost the scheduler's name to a later webhook is denied."""
    said = await answer(http, pod(), path="/webhook/validate")

    assert "patch" not in said
    assert (403, "topoalign: spec.schedulerName: is not topoalign-scheduler; leave it to the mutating webhook") == (
        said["status"]["code"],
        said["status"]["message"],
    )


async def test_without_a_name_of_ours_pods_keep_theirs() -> None:
    """The extender then belongs to default-scheduler, and who names another one knows why."""
    webhook = Webhook("", offered)
    async with serving(RecordedScheduling(), more=webhook.routes()) as url, httpx.AsyncClient(base_url=url) as http:
        for name in (None, "default-scheduler", "volcano"):
            for path in ("/webhook", "/webhook/validate"):
                assert {"allowed": True} == await answer(http, pod(schedulerName=name), path=path)
        assert (403, "spec.nodeName: the pod would not pass the scheduler") == await denied(http, pod(nodeName="n"))


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[" * 100_000, 400),
        (go_json({"apiVersion": "admission.k8s.io/v1beta1", "kind": "AdmissionReview", "request": {"uid": "u"}}), 400),
        (go_json({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview"}), 400),
        (go_json(review({"spec": []})), 400),
        (go_json(review(pod(annotations={"a": "x" * (3 * 2**20)}))), 413),
    ],
)
async def test_what_is_no_review_is_answered_with_an_error(http: httpx.AsyncClient, body: bytes, status: int) -> None:
    got = await http.post("/webhook", content=body, headers={"content-type": "application/json"})

    assert (status, {"code", "finding", "remedy"}) == (got.status_code, set(got.json()))

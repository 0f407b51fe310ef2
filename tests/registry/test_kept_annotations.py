"""Of a pod's annotations the registry keeps those that count: a tenant may write 256 KiB, and thousands of pods wait."""

import json
from typing import Any

import msgspec
import pytest
from api_server_support import pod_of, shown_pod
from scheduling_support import go_json

from topoalign.core.model.errors import InvalidField
from topoalign.registry.ports import SeenPod
from topoalign.registry.scheduling.cluster_state.reported_pods import ReportedPods
from topoalign.registry.scheduling.extender.arguments import read_called_pod
from topoalign.registry.scheduling.scheduling_api import MOST_CHARACTERS
from topoalign.registry.scheduling.webhook.reviews import Webhook
from topoalign.testing.fake_api_server.cluster import FakeCluster

COUNTING = {
    "topoalign.io/gang": "g",
    "topoalign.io/gang-size": "2",
    "topoalign.io/misspelled": "x",
    "nvidia.com/use-gpuuuid": "GPU-0",
    "nvidia.com/vgpu-mode": "mig",
    "scheduling.koordinator.sh/device-joint-allocate": "{}",
    "scheduling.koordinator.sh/device-misspelled": "{}",
}
OTHERS = {
    "tencent.com/vcuda-core-limit": "5",
    "example.com/note": "x" * 100_000,
    "kubectl.kubernetes.io/last-applied-configuration": "y" * 100_000,
}
LONG = {"nvidia.com/use-gpuuuid": "GPU-0," * 6_000}
TOO_MUCH = f"metadata.annotations: more than {MOST_CHARACTERS} characters about devices"

pytestmark = pytest.mark.anyio


def shown(annotations: dict[str, str]) -> dict[str, Any]:
    found = shown_pod("p")
    found["metadata"]["annotations"] = annotations
    return found


def seen(annotations: dict[str, str]) -> SeenPod:
    return pod_of(FakeCluster().add_pod(shown(annotations)))


def test_those_that_count_are_kept_whichever_way_a_pod_comes() -> None:
    """As the scheduler sends it, and as the API server shows it, also while it waits."""
    pod, pods = seen(COUNTING | OTHERS), ReportedPods()
    body = shown(COUNTING | OTHERS)
    body["metadata"]["uid"] = pod.uid
    pods.wait(pod)

    assert COUNTING == read_called_pod(go_json(body)).request.annotations == pod.to_schedule().request.annotations
    assert pod.to_schedule() == pods.waiting[pod.uid].to_schedule()
    assert len(msgspec.json.encode(pods.waiting[pod.uid])) < 2_000


def test_more_than_32_kib_that_count_are_refused_and_not_kept() -> None:
    pod, pods = seen(LONG | OTHERS), ReportedPods()
    body = shown(LONG)
    body["metadata"]["uid"] = pod.uid
    pods.wait(pod)

    with pytest.raises(InvalidField, match=TOO_MUCH):
        read_called_pod(go_json(body))
    for each in (pod, pods.waiting[pod.uid]):
        with pytest.raises(InvalidField, match=TOO_MUCH):
            each.to_schedule()
    assert len(msgspec.json.encode(pods.waiting[pod.uid])) < MOST_CHARACTERS + 2_000


async def test_the_webhook_denies_what_is_refused_for_its_length() -> None:
    request = {"uid": "r", "operation": "CREATE", "resource": {"resource": "pods"}, "object": shown(LONG)}
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    answer = json.loads(await Webhook("", lambda resource: False).mutate(go_json(review)))["response"]

    assert (False, f"topoalign: {TOO_MUCH}") == (answer["allowed"], answer["status"]["message"].partition(";")[0])

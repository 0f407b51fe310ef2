"""A Pod's manifest becomes what its containers ask for."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.model.errors import BadRequest, InvalidField
from topoalign.core.model.ids import CPU, GPU, MEMORY, ResourceName
from topoalign.core.model.requests import PodRequest, Qos
from topoalign.kubelet.files import documents, manifest

POD = """
apiVersion: v1
kind: Pod
metadata: {generateName: train-, namespace: ml, labels: {a: b}, annotations: {example.com/why: "{}"}}
spec:
  nodeSelector: {x: y}
  initContainers:
    - {name: fetch, image: i, resources: {limits: {cpu: 500m, memory: 1Gi}}}
    - {name: proxy, restartPolicy: Always, resources: {requests: {cpu: 1}}}
  containers:
    - name: main
      restartPolicy: Always
      resources:
        requests: {cpu: "2", ephemeral-storage: 1Gi}
        limits: {cpu: 2.5, memory: 64Gi, nvidia.com/gpu: 4, hugepages-2Mi: 4Mi, ephemeral-storage: 2Gi}
    - name: idle
"""


def read(text: str) -> PodRequest:
    return manifest.request_from_document(documents.parse_document(text.encode(), "pod.yaml"))


@pytest.mark.parametrize(
    ("resources", "field", "remedy"),
    [
        ("resources: {limit: {nvidia.com/gpu: 1}}", "spec.containers[0].resources.limit", "limits, requests, claims"),
        ("resources: {nvidia.com/gpu: 1}", "spec.containers[0].resources.nvidia.com/gpu", "amounts inside limits"),
        ("resources: {limits: {cpus: 2}}", "spec.containers[0].resources.limits[cpus]", "write cpu, memory,"),
        ("resources: {requests: {mem: 1Gi}}", "spec.containers[0].resources.requests[mem]", "write cpu, memory,"),
    ],
)
def test_a_file_whose_pod_would_seem_to_ask_for_nothing_is_an_error(
    tmp_path: Path, resources: str, field: str, remedy: str
) -> None:
    """An API server refuses it. A pod of the cluster is not checked: a later version may have more fields."""
    (tmp_path / "pod.yaml").write_text(f"kind: Pod\nspec:\n  containers:\n  - name: main\n    {resources}\n")
    with pytest.raises(InvalidField) as error:
        manifest.load_manifest(tmp_path / "pod.yaml")

    assert (field, True) == (error.value.field, remedy in error.value.remedy)
    (tmp_path / "good.yaml").write_text(POD)
    assert manifest.load_manifest(tmp_path / "good.yaml").spec is not None


def test_a_manifest_is_read_in_the_units_of_a_request() -> None:
    """Requests, limits, init containers and sidecars of a manifest are read in the units of a request."""
    pod = read(POD)

    assert ("ml", "train") == (pod.namespace, pod.name)
    assert {"example.com/why": "{}"} == pod.annotations
    assert {} == read(POD.replace(', annotations: {example.com/why: "{}"}', ", annotations: null")).annotations
    assert [("fetch", False), ("proxy", True)] == [(each.name, each.sidecar) for each in pod.init_containers]
    assert {CPU: 500, MEMORY: 1 << 30} == pod.init_containers[0].requests
    main, idle = pod.containers
    assert {CPU: 2500, MEMORY: 64 << 30, GPU: 4, ResourceName("hugepages-2Mi"): 4 << 20} == main.limits
    assert {**main.limits, CPU: 2000} == main.requests
    assert {} == idle.requests
    assert not main.sidecar
    assert Qos.BURSTABLE is pod.qos


@pytest.mark.parametrize(
    ("old", "new", "path"),
    [
        ("kind: Pod", "kind: Deployment", "kind: 'Deployment' of 'v1' is no Pod of v1"),
        ("apiVersion: v1", "apiVersion: apps/v1", "kind"),
        ("gpu: 4", "gpu: 1.5", r"spec.containers\[0\].resources.limits\[nvidia.com/gpu\]: '1.5' is no amount"),
        ("gpu: 4", "gpu: 99999999999999999999999", r"limits\[nvidia.com/gpu\]: '9+' is no amount"),
        ("cpu: 500m", "example.com/a: 1}, requests: {example.com/b: 1", r"requests\[example.com/b\]: has no limit"),
        ("gpu: 4", "gpu: 500m", r"spec.containers\[0\].resources.limits\[nvidia.com/gpu\]"),
        ("64Gi", "64GB", r"spec.containers\[0\].resources.limits\[memory\]: '64GB'"),
        ("cpu: 500m", "cpu: -1", r"spec.initContainers\[0\].resources.limits\[cpu\]"),
        ('cpu: "2"', "cpu: 3", r"spec.containers\[0\].resources.requests\[cpu\]: 3000 is above the limit 2500"),
        ("name: idle", "name: main", r"spec.containers\[1\].name: 'main' stands twice"),
        ("name: idle", "image: x", r"spec.containers\[1\]: Object missing required field `name`"),
        ('example.com/why: "{}"', "example.com/why: {}", "metadata.annotations"),
        ("example.com/why", "why not", r"metadata.annotations\[why not\]: not a key"),
        ("nodeSelector: {x: y}", "resources: {limits: {cpu: 4x}}", r"spec.resources.limits\[cpu\]: '4x'"),
        ("nodeSelector: {x: y}", "resources: {limits: {cpu: 2}}", r"spec.resources.limits\[cpu\]: 2000 is less than"),
        ("nodeSelector: {x: y}", "resources: {limits: {cpu: 4, a/b: 1}}", r"spec.resources.limits\[a/b\]: only cpu"),
        (
            "nodeSelector: {x: y}",
            "resources: {requests: {ephemeral-storage: 1}}",
            r"requests\[ephemeral-storage\]: only cpu",
        ),
        ("nodeSelector: {x: y}", "resources: {requests: [cpu]}", "spec.resources.requests: Expected `object"),
        ("nodeSelector: {x: y}", "resources: {limits: {memory: 63Gi}, requests: {memory: 0}}", "spec.resources.limits"),
        ("resources: {requests: {cpu: 1}}", "resources: 7", r"spec.initContainers\[1\].resources: Expected `object`"),
    ],
)
def test_what_is_wrong_in_a_manifest_is_named_by_its_path(old: str, new: str, path: str) -> None:
    assert old in POD
    with pytest.raises(InvalidField, match=path) as caught:
        read(POD.replace(old, new, 1))
    assert caught.value.remedy


def test_pod_level_resources_are_read() -> None:
    """They decide the QoS class; empty or null ones are none."""
    resources = "resources: {requests: {cpu: 3500m, hugepages-2Mi: 4Mi}, limits: {cpu: 4, hugepages-2Mi: 4Mi}}"
    pod = read(POD.replace("nodeSelector: {x: y}", resources))

    assert {CPU: 4_000, ResourceName("hugepages-2Mi"): 4 << 20} == pod.resources.limits
    assert 3_500 == pod.resources.requests[CPU]
    assert pod.has_pod_level_resources and Qos.BURSTABLE is pod.qos
    for none in ("resources: {}", "resources: null", "resources: {requests: {}, limits: null}"):
        assert read(POD) == read(POD.replace("nodeSelector: {x: y}", none))


def test_resource_claims_are_read_by_name() -> None:
    claims = "resourceClaims: [{name: gpus, resourceClaimTemplateName: t}, {name: nics, resourceClaimName: mine}]"

    assert ("gpus", "nics") == read(POD.replace("nodeSelector: {x: y}", claims)).claims
    with pytest.raises(InvalidField, match=r"spec.resourceClaims\[0\].name: '' is not a name"):
        read(POD.replace("nodeSelector: {x: y}", "resourceClaims: [{}]"))


amounts = st.dictionaries(
    st.sampled_from(["cpu", "memory", "nvidia.com/gpu", "x", "a/b\x1b"]),
    st.one_of(st.integers(), st.floats(), st.text(max_size=6), st.booleans(), st.none()),
)


@given(amounts, amounts, st.text(max_size=4), st.text(max_size=4))
def test_no_amounts_or_names_end_in_a_trace(requests: Any, limits: Any, name: str, policy: str) -> None:
    container = {"name": name, "restartPolicy": policy, "resources": {"requests": requests, "limits": limits}}
    spec = {"containers": [container], "initContainers": [{**container, "name": "init"}]}
    try:
        assert 1 == len(manifest.request_from_document({"kind": "Pod", "apiVersion": "v1", "spec": spec}).containers)
    except BadRequest as error:
        assert error.remedy


SCHEDULED: dict[str, Any] = {
    "metadata": {"name": "p", "namespace": "ml", "uid": "8e10", "creationTimestamp": None, "annotations": {"a": "b"}},
    "spec": {
        "initContainers": [{"name": "fetch", "restartPolicy": "Always", "resources": {"limits": {"cpu": "1"}}}],
        "containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1"}, "requests": {"cpu": "1"}}}],
        "securityContext": {},
    },
    "status": {"phase": "Pending"},
}
"""A Pod as a kube-scheduler sends it: typed by where it stands, so without kind and apiVersion."""

LEFT_OUT = (
    ("kind",),
    ("apiVersion",),
    ("metadata",),
    ("metadata", "name"),
    ("metadata", "generateName"),
    ("metadata", "namespace"),
    ("metadata", "annotations"),
    ("spec", "initContainers"),
    ("spec", "resources"),
    ("spec", "containers", 0, "resources"),
    ("spec", "containers", 0, "resources", "limits"),
    ("spec", "containers", 0, "resources", "requests"),
    ("spec", "containers", 0, "restartPolicy"),
    ("spec", "initContainers", 0, "restartPolicy"),
)
"""What a Pod can do without."""


def changed(path: tuple[str | int, ...], *, null: bool) -> Any:
    """The Pod with null there, or without."""
    pod = deepcopy(SCHEDULED)
    at: Any = pod
    for step in path[:-1]:
        at = at[step]
    if null:
        at[path[-1]] = None
    else:
        at.pop(path[-1], None)
    return pod


def test_a_pod_without_kind_and_api_version_is_read() -> None:
    pod = manifest.request_from_document(deepcopy(SCHEDULED))

    assert ("ml", "p") == (pod.namespace, pod.name)
    assert {GPU: 1} == pod.containers[0].limits
    assert {CPU: 1000, GPU: 1} == pod.containers[0].requests
    assert pod == manifest.request_from_document({"kind": "Pod", "apiVersion": "v1", **deepcopy(SCHEDULED)})
    assert pod == manifest.request_from_document({"kind": "Pod", **deepcopy(SCHEDULED)})
    assert pod == manifest.request_from_document({"kind": "", "apiVersion": "", **deepcopy(SCHEDULED)})


@pytest.mark.parametrize("path", LEFT_OUT)
def test_null_is_as_good_as_nothing(path: tuple[str | int, ...]) -> None:
    assert manifest.request_from_document(changed(path, null=False)) == manifest.request_from_document(
        changed(path, null=True)
    )


def test_null_among_amounts_and_annotations_is_the_empty_value() -> None:
    """Null among amounts and annotations is the empty value, as Kubernetes reads it."""
    pod = changed(("metadata", "annotations", "a"), null=True)
    pod["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": None, "cpu": "2"}, "requests": None}
    read = manifest.request_from_document(pod)

    assert {"a": ""} == read.annotations
    assert {GPU: 0, CPU: 2000} == read.containers[0].limits


@pytest.mark.parametrize("null", [True, False])
@pytest.mark.parametrize(
    ("path", "field"),
    [
        (("spec",), "spec: there is none"),
        (("spec", "containers"), "spec.containers: there is none"),
        (("spec", "containers", 0, "name"), r"spec.containers\[0\]"),
    ],
)
def test_what_a_pod_cannot_do_without_is_named_by_its_path(path: tuple[str | int, ...], field: str, null: bool) -> None:
    with pytest.raises(InvalidField, match=field) as caught:
        manifest.request_from_document(changed(path, null=null))

    assert caught.value.remedy


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"kind": "Deployment"}, "kind: 'Deployment' is no Pod of v1"),
        ({"apiVersion": "apps/v1"}, "kind: 'apps/v1' is no Pod of v1"),
        ({"kind": 7}, "kind: '7' is no Pod of v1"),
    ],
)
def test_another_kind_is_refused_also_where_half_of_it_is_said(more: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidField, match=words):
        manifest.request_from_document({**deepcopy(SCHEDULED), **more})


def test_a_list_that_is_null_in_a_list_is_named() -> None:
    pod = deepcopy(SCHEDULED)
    pod["spec"]["containers"] = [None]
    with pytest.raises(InvalidField, match=r"spec.containers\[0\]"):
        manifest.request_from_document(pod)


@given(st.lists(st.sampled_from(LEFT_OUT[:9]), unique=True, max_size=5), st.booleans())
def test_any_of_these_may_be_missing_together(paths: list[tuple[str | int, ...]], null: bool) -> None:
    pod = deepcopy(SCHEDULED)
    for path in sorted(paths, key=len, reverse=True):
        at: Any = pod
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = None
        if not null:
            del at[path[-1]]
    read = manifest.request_from_document(pod)

    gone = {path[-1] for path in paths} | ({"name", "namespace", "annotations"} if ("metadata",) in paths else set())
    assert ("default" if "namespace" in gone else "ml", "pod" if "name" in gone else "p") == (read.namespace, read.name)
    assert ({} if "annotations" in gone else {"a": "b"}) == read.annotations
    assert (0 if "initContainers" in gone else 1) == len(read.init_containers)


def test_every_pod_that_a_kube_scheduler_sent_is_read(vectors: Path) -> None:
    for line in (vectors / "extender" / "filter.jsonl").read_text().splitlines():
        body = json.loads(line)["request"]["body"]
        pod = manifest.request_from_document(body["Pod"])

        assert ("resources" in body["Pod"]["spec"]) == pod.has_pod_level_resources
        assert body["Pod"]["metadata"]["name"] == pod.name
        assert [each["name"] for each in body["Pod"]["spec"]["containers"]] == [each.name for each in pod.containers]

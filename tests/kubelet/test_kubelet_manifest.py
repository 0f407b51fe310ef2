"""A Pod's manifest becomes what its containers ask for."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.errors import BadRequest, InvalidField
from topoalign.core.ids import CPU, GPU, MEMORY, ResourceName
from topoalign.core.requests import PodRequest, Qos
from topoalign.kubelet import documents, manifest

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
    return manifest.pod_of(documents.read(text.encode(), "pod.yaml"))


def test_requests_limits_init_containers_and_sidecars_are_read_in_the_units_of_a_request() -> None:
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
        ("gpu: 4", "gpu: 99999999999999999999999", r"limits\[nvidia.com/gpu\]: '9+' is too large"),
        ("cpu: 500m", "example.com/a: 1}, requests: {example.com/b: 1", r"requests\[example.com/b\]: has no limit"),
        ("gpu: 4", "gpu: 500m", r"spec.containers\[0\].resources.limits\[nvidia.com/gpu\]"),
        ("64Gi", "64GB", r"spec.containers\[0\].resources.limits\[memory\]: '64GB'"),
        ("cpu: 500m", "cpu: -1", r"spec.initContainers\[0\].resources.limits\[cpu\]"),
        ('cpu: "2"', "cpu: 3", r"pod.containers\[0\].requests\[cpu\]: 3000 is above the limit 2500"),
        ("name: idle", "name: main", r"pod.containers\[1\].name: 'main' stands twice"),
        ("name: idle", "image: x", r"spec.containers\[1\]: Object missing required field `name`"),
        ('example.com/why: "{}"', "example.com/why: {}", "metadata.annotations"),
        ("example.com/why", "why not", r"pod.annotations\[why not\]: not a key"),
        ("nodeSelector: {x: y}", "resources: {limits: {cpu: 4}}", "spec.resources: resources of a whole pod"),
        ("resources: {requests: {cpu: 1}}", "resources: 7", r"spec.initContainers\[1\].resources: Expected `object`"),
    ],
)
def test_what_is_wrong_in_a_manifest_is_named_by_its_path(old: str, new: str, path: str) -> None:
    assert old in POD
    with pytest.raises(InvalidField, match=path) as caught:
        read(POD.replace(old, new, 1))
    assert caught.value.remedy


amounts = st.dictionaries(
    st.sampled_from(["cpu", "memory", "nvidia.com/gpu", "x", "a/b\x1b"]),
    st.one_of(st.integers(), st.floats(), st.text(max_size=6), st.booleans(), st.none()),
)


@given(amounts, amounts, st.text(max_size=4), st.text(max_size=4))
def test_no_amounts_or_names_end_in_a_trace(requests: Any, limits: Any, name: str, policy: str) -> None:
    container = {"name": name, "restartPolicy": policy, "resources": {"requests": requests, "limits": limits}}
    spec = {"containers": [container], "initContainers": [{**container, "name": "init"}]}
    try:
        assert 1 == len(manifest.pod_of({"kind": "Pod", "apiVersion": "v1", "spec": spec}).containers)
    except BadRequest as error:
        assert error.remedy

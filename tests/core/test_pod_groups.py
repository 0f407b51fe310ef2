"""A pod names its gang by annotations, by a PodGroup, or by both with the same name."""

from typing import Any

import pytest

from topoalign.core.demand.gangs import Gang, gang_of
from topoalign.core.model.errors import InvalidField
from topoalign.core.model.requests import GANG, GANG_SIZE
from topoalign.kubelet.files.manifest import request_from_document

NATIVE = {"spec": {"schedulingGroup": {"podGroupName": "train"}}}
COSCHEDULING = {"metadata": {"labels": {"scheduling.x-k8s.io/pod-group": "train"}}}
KAI = {"metadata": {"annotations": {"pod-group-name": "train"}}}
VOLCANO = {"metadata": {"annotations": {"scheduling.k8s.io/group-name": "train"}}}
VOLCANO_TOO = {"metadata": {"annotations": {"scheduling.volcano.sh/group-name": "train"}}}
OWN = {"metadata": {"annotations": {GANG: "train", GANG_SIZE: "4"}}}


def gang(*parts: dict[str, Any]) -> Gang | None:
    """The gang of a pod with these fields."""
    metadata: dict[str, Any] = {"name": "a", "namespace": "ml"}
    spec: dict[str, Any] = {"containers": [{"name": "main"}]}
    for part in parts:
        for field, value in part.get("metadata", {}).items():
            metadata[field] = {**metadata.get(field, {}), **value}
        spec |= part.get("spec", {})
    return gang_of(request_from_document({"metadata": metadata, "spec": spec}))


@pytest.mark.parametrize(
    ("parts", "size", "api_groups"),
    [
        ([OWN], 4, ()),
        ([NATIVE], None, ("scheduling.k8s.io",)),
        ([COSCHEDULING], None, ("scheduling.x-k8s.io",)),
        ([KAI], None, ("scheduling.run.ai",)),
        ([VOLCANO], None, ("scheduling.volcano.sh",)),
        ([VOLCANO, VOLCANO_TOO], None, ("scheduling.volcano.sh",)),
        ([NATIVE, OWN], 4, ("scheduling.k8s.io",)),
        ([VOLCANO, NATIVE], None, ("scheduling.k8s.io", "scheduling.volcano.sh")),
    ],
)
def test_a_gang_is_found_in_every_field_that_names_one(
    parts: list[dict[str, Any]], size: int | None, api_groups: tuple[str, ...]
) -> None:
    assert Gang(name="ml/train", size=size, api_groups=api_groups) == gang(*parts)


def test_a_pod_without_these_fields_is_in_no_gang() -> None:
    other = {"metadata": {"labels": {"app": "train"}, "annotations": {"other": "train"}}}

    assert gang(other, {"spec": {"schedulingGroup": {}}}) is None


@pytest.mark.parametrize(
    ("parts", "field", "finding"),
    [
        (
            [NATIVE, {"metadata": {"labels": {"scheduling.x-k8s.io/pod-group": "serve"}}}],
            "metadata.labels[scheduling.x-k8s.io/pod-group]",
            "is 'serve', but spec.schedulingGroup.podGroupName is 'train'",
        ),
        (
            [KAI, {"metadata": {"annotations": {GANG: "serve", GANG_SIZE: "2"}}}],
            f"metadata.annotations[{GANG}]",
            "is 'serve', but metadata.annotations[pod-group-name] is 'train'",
        ),
        (
            [NATIVE, {"metadata": {"annotations": {GANG_SIZE: "2"}}}],
            f"metadata.annotations[{GANG}]",
            "is missing",
        ),
        (
            [NATIVE, {"metadata": {"annotations": {GANG: "train"}}}],
            "metadata.annotations[topoalign.io/gang-size]",
            "missing",
        ),
        ([{"spec": {"schedulingGroup": {"podGroupName": "A b"}}}], "spec.schedulingGroup.podGroupName", "not a name"),
    ],
)
def test_two_names_of_a_gang_are_refused_with_both_fields(
    parts: list[dict[str, Any]], field: str, finding: str
) -> None:
    with pytest.raises(InvalidField) as refused:
        gang(*parts)

    assert field == refused.value.field
    assert finding in str(refused.value)

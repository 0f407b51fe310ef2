"""What of a pod probably means something else than it says, as warnings."""

from collections.abc import Mapping

import pytest

from topoalign.core.demand import share_annotations
from topoalign.core.deviceshare.koordinator_names import ANNOTATIONS
from topoalign.core.model.ids import GPU, NIC, ResourceName
from topoalign.core.sharing.pod_warnings import CORE_LIMIT, LONGEST, MOST, warnings_of

SERVED = {GPU, NIC, ResourceName("nvidia.com/gpumem")}
WHERE = "spec.containers[0]"


def said(annotations: Mapping[str, str], *limits: str) -> tuple[str, ...]:
    named = {ResourceName(name): WHERE for name in limits or (GPU,)}
    return warnings_of(annotations, named, SERVED)


@pytest.mark.parametrize(
    "name",
    [
        "nvidia.com/gpu",
        "nvidia.com/gpumem",
        "nvidia.com/gpumem-percentage",
        "nvidia.com/gpucores",
        "nvidia.com/priority",
        "tencent.com/vcuda-core",
        "tencent.com/vcuda-memory",
        "koordinator.sh/gpu-memory-ratio",
        "volcano.sh/vgpu-memory-percentage",
    ],
)
def test_an_amount_as_an_annotation_is_a_limit(name: str) -> None:
    """Unless a container has the limit as well."""
    text = f"metadata.annotations[{name}]: has no effect; write it in resources.limits of a container"

    assert (text,) == said({name: "4000"}, "example.com/other")
    assert () == said({name: "4000"}, name)
    assert len(text) <= 120


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("nvidia.com/use-gpu-uuid", "nvidia.com/use-gpuuuid"),
        ("nvidia.com/useGPUUUID", "nvidia.com/use-gpuuuid"),
        ("nvdia.com/use-gpuuuid", "nvidia.com/use-gpuuuid"),
        ("nvidia.com/nouse-gpu-type", "nvidia.com/nouse-gputype"),
        ("hami.io/device-scoring-weight", "hami.io/device-scoring-weights"),
        ("tencent.com/vcuda-limit", CORE_LIMIT),
        ("nvidia.com/gpu-memory", "nvidia.com/gpumem in resources.limits of a container"),
        ("koordinator.sh/device-joint-allocate", "scheduling.koordinator.sh/device-joint-allocate"),
        ("scheduling.koordinator.sh/gpu-partitions-spec", "scheduling.koordinator.sh/gpu-partition-spec"),
    ],
)
def test_a_misspelt_key_is_named_with_the_right_one(key: str, meant: str) -> None:
    text = f"metadata.annotations[{key}]: nobody reads this key; did you mean {meant}?"

    assert (text,) == said({key: "x"})
    assert len(text) <= LONGEST


def test_keys_that_are_right_or_of_others_are_no_warning() -> None:
    """Those that schedulers and nodes write are near others, and stand on every pod that they handle."""
    written = {
        "hami.io": ("vgpu-node", "vgpu-time", "bind-time", "bind-phase", "vgpu-devices-allocated", "webhook"),
        "tencent.com": ("predicate-time", "predicate-node", "predicate-gpu-idx-0", "gpu-assigned"),
        "scheduling.koordinator.sh": ("device-allocated", "gpu-partitions", "resource-spec", "gang-name"),
        "koordinator.sh": ("qosClass",),
        "volcano.sh": ("vgpu-node", "vgpu-time", "bind-phase", "task-topology"),
        "example.com": ("vgpu-node", "use-gpuuuid", "gang"),
        "topoalign.io": ("gang", "gang-size", "cards", "gangs"),
    }
    right = {*share_annotations.OF_PODS, *ANNOTATIONS}

    assert () == said({f"{domain}/{rest}": "x" for domain, several in written.items() for rest in several})
    assert () == said(dict.fromkeys(right, "x"))


def test_a_wish_without_effect_is_named_with_what_gives_it_one() -> None:
    limit = {CORE_LIMIT: "50"}

    assert said(limit)[0].endswith("has no effect; a container gets its tencent.com/vcuda-core")
    assert all(len(text) <= 120 for text in said(limit))


def test_a_limit_that_is_near_a_served_name_is_named_with_it() -> None:
    text = f"{WHERE}.resources.limits[nvidia.com/gpus]: topoalign serves no such name; did you mean nvidia.com/gpu?"

    assert (text,) == said(
        {}, "nvidia.com/gpus", "nvidia.com/gpu.shared", "example.com/fpga", "cpu", "volcano.sh/vgpu-number"
    )
    assert len(text) <= 120


def test_warnings_are_few_and_short_whatever_a_pod_says() -> None:
    keys = {f"nvidia.com/use-gpuuuid{number}" + "x" * 300: "" for number in range(1000)}
    amounts = dict.fromkeys(("nvidia.com/gpu", "nvidia.com/gpumem", *keys), "")
    odd = {f"{ResourceName('nvidia.com/gpu')}{'s' * number}\n": "" for number in range(20)}

    for annotations in (keys, amounts, odd):
        found = said(annotations, "example.com/x")
        assert len(found) <= MOST
        assert all(len(text) <= LONGEST and text.isprintable() for text in found)

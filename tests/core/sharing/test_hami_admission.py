"""What becomes of a new pod with shares: what is filled in, and what is refused with its path."""

import pytest

from topoalign.core.model.errors import InvalidField
from topoalign.core.model.ids import ResourceName
from topoalign.core.sharing.hami.admission import (
    AdmissionSettings,
    Changes,
    Container,
    Pod,
    QuotaExceeded,
    admit_pod,
    changes_to,
)
from topoalign.core.sharing.hami.quota import NamespaceQuota
from topoalign.core.sharing.hami.requests import Defaults

COUNT, CORES = ResourceName("nvidia.com/gpu"), ResourceName("nvidia.com/gpucores")
MEMORY, PERCENTAGE = ResourceName("nvidia.com/gpumem"), ResourceName("nvidia.com/gpumem-percentage")
PRIORITY = ResourceName("nvidia.com/priority")

Limits = dict[ResourceName, int | str]


def container(limits: Limits | None = None, number: int = 0, privileged: bool = False) -> Container:
    return Container(path=f"spec.containers[{number}]", limits=limits or {}, privileged=privileged)


@pytest.mark.parametrize(
    ("limits", "added"),
    [
        ({COUNT: 2}, {CORES: 100}),
        ({COUNT: 1, PERCENTAGE: 100}, {CORES: 100}),
        ({COUNT: 1, PERCENTAGE: "99.5"}, {CORES: 100}),
        ({COUNT: 1, PERCENTAGE: 50}, {}),
        ({COUNT: 1, PERCENTAGE: 100, MEMORY: 10}, {CORES: 100}),
        ({COUNT: 1, MEMORY: 0}, {}),
        ({COUNT: 1, CORES: 0}, {}),
        ({MEMORY: 1000}, {COUNT: 1}),
        ({CORES: 30}, {COUNT: 1}),
        ({PERCENTAGE: 100}, {COUNT: 1, CORES: 100}),
    ],
)
def test_what_a_container_leaves_out_is_filled_in(limits: Limits, added: dict[ResourceName, int]) -> None:
    assert Changes(limits=added, asks=True) == changes_to(container(limits))


def test_what_is_only_requested_counts_like_a_limit() -> None:
    asked = Container(path="spec.containers[0]", requests={COUNT: 1, MEMORY: 5})

    assert Changes(asks=True) == changes_to(asked)


def test_without_a_default_number_a_share_without_cards_is_none() -> None:
    settings = AdmissionSettings(cards=0)

    assert Changes() == changes_to(container({CORES: 30}), settings)
    assert Changes(limits={COUNT: 3}, asks=True) == changes_to(container({CORES: 30}), AdmissionSettings(cards=3))


def test_what_the_limiter_is_told() -> None:
    settings = AdmissionSettings(core_policy="force", hide_cards=True)

    told = changes_to(container({COUNT: 1, CORES: 20, PRIORITY: "1"}), settings)

    assert {"CUDA_TASK_PRIORITY": "1", "GPU_CORE_UTILIZATION_POLICY": "force"} == told.env
    assert {"NVIDIA_VISIBLE_DEVICES": "none"} == changes_to(container(), settings).env
    assert {} == changes_to(container()).env == changes_to(container({COUNT: 1, CORES: 20})).env


@pytest.mark.parametrize("percentage", [-1, 101, "150", "100.5", "x", 1 << 32])
def test_a_percentage_is_one_of_a_hundred(percentage: int | str) -> None:
    with pytest.raises(InvalidField) as raised:
        admit_pod(Pod(containers=(container(), container({COUNT: 1, PERCENTAGE: percentage}, number=1))))

    assert "spec.containers[1].resources.limits[nvidia.com/gpumem-percentage]" == raised.value.field


def test_no_container_of_a_pod_with_shares_is_privileged() -> None:
    """Not even one that has no share itself, or an init container; without shares it may be."""
    share, privileged = container({COUNT: 1}), container(number=1, privileged=True)
    for pod in (Pod(containers=(share, privileged)), Pod(init_containers=(privileged,), containers=(share,))):
        with pytest.raises(InvalidField) as raised:
            admit_pod(pod)

        assert "spec.containers[1].securityContext.privileged" == raised.value.field
    assert not admit_pod(Pod(containers=(privileged,), node="n")).asks


def test_no_pod_with_shares_names_its_node() -> None:
    with pytest.raises(InvalidField) as raised:
        admit_pod(Pod(init_containers=(container({COUNT: 1}),), containers=(container(),), node="n"))

    assert "spec.nodeName" == raised.value.field


@pytest.mark.parametrize(
    ("init", "apps", "memory", "cores"),
    [
        ([], [{COUNT: 2, MEMORY: 1000, CORES: 10}], 2000, 20),
        ([{COUNT: 1, MEMORY: 1500}, {COUNT: 1, MEMORY: 1500}], [{COUNT: 1, MEMORY: 700}, {MEMORY: 700}], 1500, 0),
        ([{COUNT: 1, MEMORY: 100}], [{COUNT: 1, MEMORY: 700, CORES: 30}, {COUNT: 1, MEMORY: 700, CORES: 40}], 1400, 70),
        ([], [{COUNT: 1, PERCENTAGE: 50}], 0, 0),
        ([], [{COUNT: 1}], 0, 100),
    ],
)
def test_a_pod_must_fit_the_quota_of_its_namespace(
    init: list[Limits], apps: list[Limits], memory: int, cores: int
) -> None:
    """Cores of whole cards are those that are filled in; a percentage of memory does not count."""
    pod = Pod(
        init_containers=tuple(container(each) for each in init), containers=tuple(container(each) for each in apps)
    )

    assert admit_pod(pod, NamespaceQuota(memory=memory, cores=cores)).asks
    for quota in (NamespaceQuota(memory=memory - 1), NamespaceQuota(cores=cores - 1)):
        with pytest.raises(QuotaExceeded):
            admit_pod(pod, quota)


def test_the_default_amount_of_memory_counts_for_the_quota() -> None:
    pod = Pod(containers=(container({COUNT: 1, CORES: 10}),))

    with pytest.raises(QuotaExceeded):
        admit_pod(pod, NamespaceQuota(memory=4999), defaults=Defaults(memory=5000))

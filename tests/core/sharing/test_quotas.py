"""What a namespace may hold of GPUs: each GPU counts, init containers by the largest, and of several quotas the lowest."""

import pytest
from decision_support import container, pod
from hypothesis import given, settings
from hypothesis import strategies as st

from topoalign.core.model.ids import ContainerName, ResourceName
from topoalign.core.model.requests import ContainerRequest, PodRequest
from topoalign.core.sharing.quotas import OverQuota, check_quota, lowest_limits, quota_amounts, total

COUNT, MEMORY = ResourceName("nvidia.com/gpu"), ResourceName("nvidia.com/gpumem")
CORES, UNITS = ResourceName("nvidia.com/gpucores"), ResourceName("tencent.com/vcuda-core")

amounts = st.dictionaries(st.sampled_from([COUNT, MEMORY, CORES, UNITS]), st.integers(0, 5))


def asking(limits: dict[ResourceName, int], name: str, *, sidecar: bool = False) -> ContainerRequest:
    return ContainerRequest(name=ContainerName(name), requests=limits, limits=limits, sidecar=sidecar)


def reference(asked: PodRequest, name: ResourceName) -> int:
    """From the rule: at any moment the sidecars started so far run, beside one init container or all app containers."""

    def of(each: ContainerRequest) -> int:
        gpus = each.limits.get(COUNT, 1) if name in (MEMORY, CORES) else 1
        return each.limits.get(name, 0) * gpus

    moments = []
    for position, init in enumerate(asked.init_containers):
        before = [each for each in asked.init_containers[:position] if each.sidecar]
        moments.append(sum(map(of, before)) + of(init))
    sidecars = [each for each in asked.init_containers if each.sidecar]
    return max(*moments, sum(map(of, (*sidecars, *asked.containers))), 0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(amounts, st.booleans()), max_size=4), st.lists(amounts, min_size=1, max_size=3))
def test_a_pod_holds_what_it_has_at_its_largest_moment(
    init: list[tuple[dict[ResourceName, int], bool]], apps: list[dict[ResourceName, int]]
) -> None:
    asked = pod(
        *(asking(each, f"a{place}") for place, each in enumerate(apps)),
        init=[asking(each, f"i{place}", sidecar=sidecar) for place, (each, sidecar) in enumerate(init)],
    )
    found = quota_amounts(asked)

    for name in (COUNT, MEMORY, CORES, UNITS):
        assert reference(asked, name) == found.get(name, 0)


def test_memory_and_cores_count_for_each_gpu_of_a_container() -> None:
    """The example of the module: an init container of two GPUs needs more than two app containers of one each."""
    asked = pod(
        container("one", others={"nvidia.com/gpu": 1, "nvidia.com/gpumem": 4000}),
        container("two", others={"nvidia.com/gpu": 1, "nvidia.com/gpumem": 1000}),
        init=[container("warm", others={"nvidia.com/gpu": 2, "nvidia.com/gpumem": 3000, "nvidia.com/gpucores": 30})],
    )

    assert {COUNT: 2, MEMORY: 6000, CORES: 60} == quota_amounts(asked)


@pytest.mark.parametrize(("asked", "fits"), [(20, True), (21, False), (0, True)])
def test_a_limit_may_be_reached_and_not_exceeded(asked: int, fits: bool) -> None:
    limits = lowest_limits([{UNITS: 100, MEMORY: 5}, {UNITS: 70}])
    used = total([{UNITS: 30}, {UNITS: 20, COUNT: 3}])

    assert ({UNITS: 70, MEMORY: 5}, {UNITS: 50, COUNT: 3}) == (limits, used)
    if fits:
        check_quota("ml", {UNITS: asked, COUNT: 9}, used, limits)
        return
    with pytest.raises(
        OverQuota, match=r"namespace ml: limits.tencent.com/vcuda-core of its ResourceQuota is 70, its pods"
    ):
        check_quota("ml", {UNITS: asked}, used, limits)


def test_a_limit_of_nothing_allows_nothing() -> None:
    with pytest.raises(OverQuota):
        check_quota("ml", {MEMORY: 1}, {}, {MEMORY: 0})

"""What a namespace may hold of GPUs: each GPU counts, init containers by the largest, and of several quotas the lowest."""

import msgspec
import pytest
from decision_support import container, pod
from hypothesis import given, settings
from hypothesis import strategies as st
from instance_support import profile
from slot_support import in_mig_mode, in_slots
from unit_support import DGX, in_units

from topoalign.core.model.ids import ContainerName, ResourceName
from topoalign.core.model.requests import ContainerRequest, PodRequest
from topoalign.core.model.topology.device_offers import Offer, Slots
from topoalign.core.model.topology.model import Topology
from topoalign.core.sharing.quota_amounts import (
    OverQuota,
    check_quota,
    gpu_sizes,
    lowest_limits,
    quota_amounts,
    sum_quota_amounts,
)

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


@settings(max_examples=60)
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


PERCENT = ResourceName("nvidia.com/gpumem-percentage")
BLOCKS = ResourceName("tencent.com/vcuda-memory")
GPUS = tuple(gpu.id for gpu in DGX.gpus)
WHOLE = msgspec.structs.replace(DGX, offers=(Offer(resource=COUNT, devices=GPUS),))
IN_TIME = msgspec.structs.replace(DGX, offers=(Offer(resource=COUNT, devices=GPUS, replicas=4),))
IN_SLOTS = in_slots(DGX)
SCALED = in_slots(DGX, scaling=Slots(memory_scaling=1.5))
L4, L4_MIB = ResourceName("example.com/l4"), ResourceName("example.com/mib")
RENAMED = msgspec.structs.replace(
    DGX, offers=(Offer(resource=L4, devices=GPUS, replicas=10, slots=Slots(memory=L4_MIB)),)
)
MIXED = in_slots(
    msgspec.structs.replace(DGX, gpus=(msgspec.structs.replace(DGX.gpus[0], memory=16 << 30), *DGX.gpus[1:]))
)
PROFILES = (profile("1g.5gb", 5, 1, 1, 0), profile("3g.20gb", 20, 3, 4, 0))
DYNAMIC = in_slots(
    msgspec.structs.replace(
        DGX, gpus=tuple(msgspec.structs.replace(gpu, mig=(), mig_profiles=PROFILES) for gpu in DGX.gpus)
    ),
    7,
    scaling=Slots(instances=True),
)
MIG = in_mig_mode(DGX, [4864, 9856])
SINGLE = msgspec.structs.replace(
    MIG, offers=(Offer(resource=COUNT, devices=tuple(each.uuid for each in MIG.gpus[0].mig or ())),)
)


@pytest.mark.parametrize(
    ("hardware", "limits", "expected"),
    [
        (IN_SLOTS, {COUNT: 1, PERCENT: 40}, {MEMORY: 16384}),
        (IN_SLOTS, {COUNT: 3, PERCENT: 40, CORES: 20}, {MEMORY: 49152, CORES: 60}),
        (IN_SLOTS, {COUNT: 1}, {MEMORY: 40960, CORES: 100}),
        (IN_SLOTS, {COUNT: 2, CORES: 30}, {MEMORY: 81920, CORES: 60}),
        (IN_SLOTS, {COUNT: 2, MEMORY: 1000, PERCENT: 40}, {MEMORY: 2000}),
        (IN_SLOTS, {COUNT: 1, MEMORY: 0, PERCENT: 0}, {MEMORY: 40960, CORES: 100}),
        (SCALED, {COUNT: 1, PERCENT: 50}, {MEMORY: 30720}),
        (MIXED, {COUNT: 1, PERCENT: 50}, {MEMORY: 20480}),
        (RENAMED, {L4: 2, PERCENT: 50}, {L4_MIB: 40960}),
        (in_slots(MIG, 3, 1), {COUNT: 1, PERCENT: 50}, {MEMORY: 4928}),
        (DYNAMIC, {COUNT: 2, PERCENT: 25}, {MEMORY: 10240}),
        (DYNAMIC, {COUNT: 1}, {MEMORY: 20480, CORES: 100}),
        (WHOLE, {COUNT: 2}, {MEMORY: 81920, CORES: 200}),
        (SINGLE, {COUNT: 1}, {MEMORY: 9856, CORES: 100}),
        (IN_TIME, {COUNT: 1}, {}),
        (in_units(DGX), {UNITS: 200}, {BLOCKS: 320}),
        (in_units(DGX), {UNITS: 200, BLOCKS: 7}, {BLOCKS: 7}),
        (in_units(DGX), {UNITS: 30, BLOCKS: 7}, {BLOCKS: 7}),
    ],
)
def test_amounts_that_are_not_named_count_by_the_size_of_the_gpus(
    hardware: Topology, limits: dict[ResourceName, int], expected: dict[ResourceName, int]
) -> None:
    """GPUs have 40960 MiB, or the largest of the node has; MIG instances 4864 and 9856 MiB, dynamic ones 20480."""
    per_gpu = {MEMORY: frozenset({COUNT}), CORES: frozenset({COUNT}), L4_MIB: frozenset({L4})}
    found = quota_amounts(pod(asking(limits, "main")), per_gpu, gpu_sizes(hardware))

    assert expected == {name: found[name] for name in (MEMORY, CORES, BLOCKS, L4_MIB) if found.get(name)}


def test_an_init_container_without_amounts_counts_at_its_moment() -> None:
    """It has both GPUs whole; the app container, afterwards, a fifth of the memory of one, and its sidecar as much."""
    init = [asking({COUNT: 1, PERCENT: 20}, "side", sidecar=True), asking({COUNT: 2}, "warm")]
    asked = pod(asking({COUNT: 1, PERCENT: 20}, "main"), init=init)
    found = quota_amounts(asked, sizes=gpu_sizes(IN_SLOTS))

    assert (8192 + 2 * 40960, 200) == (found[MEMORY], found[CORES])


@pytest.mark.parametrize(("asked", "fits"), [(20, True), (21, False), (0, True)])
def test_a_limit_may_be_reached_and_not_exceeded(asked: int, fits: bool) -> None:
    limits = lowest_limits([{UNITS: 100, MEMORY: 5}, {UNITS: 70}])
    used = sum_quota_amounts([{UNITS: 30}, {UNITS: 20, COUNT: 3}])

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

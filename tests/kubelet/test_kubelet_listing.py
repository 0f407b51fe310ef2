"""What ListAndWatch says is put together by hand, and is to the byte what the generated code would say."""

import tracemalloc
from collections.abc import Sequence
from typing import Any

import anyio
import msgspec
import pytest
from fact_support import mig_device
from hypothesis import given, settings
from hypothesis import strategies as st
from kubelet_support import NODE, two_nodes

from topoalign.allocator.device_plugin import listing
from topoalign.allocator.device_plugin.listing import SLICE, DeviceListing, encoded_by
from topoalign.core.model.events import Allocation, DeviceHealth, DeviceHealthChanged, HealthState, TopologyDiscovered
from topoalign.core.model.ids import GPU, AllocationID, DeviceID, ResourceName
from topoalign.core.model.topology.cpuset import LARGEST_ID
from topoalign.core.model.topology.device_offers import Offer
from topoalign.core.model.topology.mig import MigDevice
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.core.model.topology.topology_checks import MOST_HANDED_OUT
from topoalign.core.state.fold import NodeState
from topoalign.kubelet.grpc.api import v1beta1

pytestmark = pytest.mark.anyio

SHARED = ResourceName("nvidia.com/gpu.shared")
IDS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=200).filter(lambda text: ":" not in text)
NUMA_NODES = st.integers(0, 2**31)
HEALTHS = st.builds(DeviceHealth, state=st.sampled_from(HealthState), reason=st.just(""), cordoned=st.booleans())


@st.composite
def nodes(draw: st.DrawFn) -> NodeState:
    """A node whose devices are offered in any way, whole, in parts or in shares, and are of any health."""
    ids = draw(st.lists(IDS, min_size=1, max_size=6, unique=True))
    gpus = tuple(
        Gpu(
            id=DeviceID(name),
            index=index,
            numa_affinity=tuple(draw(st.lists(NUMA_NODES, max_size=3, unique=True))),
            mig=draw(st.none() | st.just((instance(f"MIG-{name}"),))),
        )
        for index, name in enumerate(ids)
    )
    devices = tuple(DeviceID(f"MIG-{gpu.id}") if gpu.mig and draw(st.booleans()) else gpu.id for gpu in gpus)
    cut = draw(st.integers(0, len(devices)))
    replicas = st.sampled_from((1, 2, 9, 10, 11, 101, 1001))
    offers = tuple(
        Offer(resource=SHARED, devices=part, replicas=draw(replicas)) for part in (devices[:cut], devices[cut:])
    )
    topology = Topology(gpus=gpus, offers=draw(st.just(offers) | st.none()))
    return state_of(topology, draw(st.dictionaries(st.sampled_from((*ids, *devices)), HEALTHS)))


def instance(uuid: str) -> MigDevice:
    return mig_device(uuid, 1, memory=1)


def state_of(topology: Topology, health: dict[DeviceID, DeviceHealth]) -> NodeState:
    found = TopologyDiscovered(node=NODE, epoch=1, revision=1, boot_id="b", source="test", topology=topology)
    judged = DeviceHealthChanged(node=NODE, epoch=1, revision=1, devices=health)
    return NodeState(node=NODE, topology=found, health=judged)


def by_the_generated_code(state: NodeState, resource: ResourceName) -> bytes:
    """The same from what the topology says of each device as it is handed out."""
    return bytes(
        v1beta1.ListAndWatchResponse(
            devices=[
                v1beta1.Device(
                    id=device,
                    health="Healthy" if state.health_of(device).usable else "Unhealthy",
                    topology=None
                    if near is None
                    else v1beta1.TopologyInfo(nodes=[v1beta1.NumaNode(id=n) for n in near]),
                )
                for device, near in state.hardware.devices.get(resource, {}).items()
            ]
        )
    )


async def test_all_that_a_node_may_offer_goes_into_one_message_of_a_kubelet() -> None:
    """The largest number of shares, all ill and far away, of which one in ten was handed out by another name before."""
    count = MOST_HANDED_OUT // 1_000
    ids = tuple(DeviceID(f"GPU-5c1b3f2a-8e4d-4b7a-9f60-0d2c7e9a1b{i:02x}") for i in range(count))
    gpus = tuple(Gpu(id=id, index=index, numa_affinity=(LARGEST_ID,)) for index, id in enumerate(ids))
    state = state_of(Topology(gpus=gpus, offers=(Offer(resource=SHARED, devices=ids, replicas=1_000),)), {})
    before = tuple(DeviceID(f"{ids[0]}::{n}") for n in range(10_000, 10_000 + MOST_HANDED_OUT // 10))
    held = Allocation(id=AllocationID("before"), devices={SHARED: before})

    assert len((await DeviceListing(SHARED).of(state.holding(held))).SerializeToString()) < 4 << 20


@settings(max_examples=50)
@given(nodes())
async def test_the_bytes_are_those_of_the_generated_code(state: NodeState) -> None:
    """For every topology, any number of shares and every health."""
    for resource in (SHARED, GPU):
        said = await DeviceListing(resource).of(state)

        assert by_the_generated_code(state, resource) == said.SerializeToString()


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from((1, 2, 12)), HEALTHS), min_size=1, max_size=6))
async def test_after_changes_the_same_is_said_as_from_the_beginning(
    changes: Sequence[tuple[int, DeviceHealth]],
) -> None:
    """Of what is offered, of health, or of both."""
    lists = DeviceListing(SHARED)
    topologies = {replicas: state_of(offered(replicas), {}).topology for replicas, _ in changes}
    for replicas, health in changes:
        judged = state_of(Topology(), {DeviceID("GPU-1"): health})
        state = msgspec.structs.replace(judged, topology=topologies[replicas])
        said = await lists.of(state)

        assert by_the_generated_code(state, SHARED) == said.SerializeToString()


async def test_what_changes_no_device_is_nothing_new_to_say() -> None:
    """An allocation, or a topology discovered anew that offers the same, does not send the list again."""
    lists = DeviceListing(GPU)
    state = state_of(two_nodes(), {})
    first = await lists.of(state)
    gpu = Allocation(id=AllocationID("a"), devices={GPU: (DeviceID("GPU-0"),)})
    again = state_of(two_nodes(), {})

    assert first is await lists.of(state.holding(gpu))
    assert first is await lists.of(again)


async def test_only_the_shares_of_a_card_whose_health_changed_are_encoded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grant encodes nothing, whatever the number of shares."""
    made: list[str] = []

    def spied(offer: Offer, base: DeviceID, *others: Any) -> bytes:
        made.append(base)
        return encoded_by(offer, base, *others)

    monkeypatch.setattr(listing, "encoded_by", spied)
    lists, state = DeviceListing(SHARED), healthy(offered(replicas=2_500))
    first = await lists.of(state)
    granted = state.holding(Allocation(id=AllocationID("a"), devices={SHARED: (DeviceID("GPU-2::7"),)}))
    ill = state_of(Topology(), {**state.reported_health, DeviceID("GPU-5"): DeviceHealth(state=HealthState.UNHEALTHY)})
    after = msgspec.structs.replace(granted, health=ill.health)

    assert [gpu.id for gpu in two_nodes().gpus] == made
    assert first is await lists.of(granted)
    assert first is not await lists.of(after)
    assert ["GPU-5"] == made[8:]
    assert by_the_generated_code(after, SHARED) == (await lists.of(after)).SerializeToString()


async def test_the_bytes_of_a_list_of_thousands_of_shares_are_kept_once() -> None:
    """Not for each health, nor each part and the whole, nor for the same topology discovered once more."""
    lists, states = DeviceListing(SHARED), [healthy(offered(replicas=2_500)) for _ in range(2)]
    length, _ = [len((await DeviceListing(SHARED).of(state)).SerializeToString()) for state in states]
    tracemalloc.start()
    try:
        for state in states:
            await lists.of(state)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert length <= kept <= 1.1 * length


async def test_a_device_held_under_a_former_offer_is_said_to_be_unhealthy() -> None:
    held = Allocation(id=AllocationID("a"), devices={GPU: (DeviceID("GPU-1"),)})
    state = healthy(offered(replicas=2))
    lists = DeviceListing(SHARED)
    before = v1beta1.ListAndWatchResponse.FromString((await lists.of(state)).SerializeToString())
    after = v1beta1.ListAndWatchResponse.FromString((await lists.of(state.holding(held))).SerializeToString())

    assert not [device.id for device in before.devices if device.health != "Healthy"]
    assert ["GPU-1::0", "GPU-1::1"] == [device.id for device in after.devices if device.health == "Unhealthy"]


async def test_others_have_their_turn_while_a_long_list_is_prepared() -> None:
    topology = Topology(gpus=tuple(Gpu(id=DeviceID(f"GPU-{i}"), index=i) for i in range(3 * SLICE)))
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(other)
        await DeviceListing(GPU).of(state_of(topology, {}))
        tasks.cancel_scope.cancel()

    assert turns >= 6  # three of the preparation, three of the judging


def offered(replicas: int) -> Topology:
    devices = tuple(gpu.id for gpu in two_nodes().gpus)
    return msgspec.structs.replace(two_nodes(), offers=(Offer(resource=SHARED, devices=devices, replicas=replicas),))


def healthy(topology: Topology) -> NodeState:
    return state_of(topology, {gpu.id: DeviceHealth(state=HealthState.HEALTHY) for gpu in topology.gpus})

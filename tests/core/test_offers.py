"""What is offered of a node's hardware: its ids, how it is, and that no card is ever given twice however it is divided."""

from collections import Counter
from typing import Literal

import msgspec
import pytest
from decision_support import NODE, admitted, container, granted, machine, node, pod, refused
from fact_support import mig_device
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.admission.admit import admit
from topoalign.core.model.errors import InvalidField
from topoalign.core.model.events import (
    Allocation,
    AllocationsSnapshot,
    DeviceHealth,
    DeviceHealthChanged,
    HealthState,
    TopologyDiscovered,
)
from topoalign.core.model.holdings import base_of
from topoalign.core.model.ids import GPU, NIC, AllocationID, DeviceID, ResourceName
from topoalign.core.model.requests import AdmissionRules, Mode
from topoalign.core.model.topology.device_names import name_device
from topoalign.core.model.topology.device_offers import Offer
from topoalign.core.model.topology.model import Topology, VirtualFunction
from topoalign.core.model.topology.topology_checks import validate
from topoalign.core.placement.preference import prefer
from topoalign.core.state.fold import NodeState

Packing = Literal["distributed", "packed"]
PACKINGS: tuple[Packing, ...] = ("distributed", "packed")
SHARED = ResourceName("nvidia.com/gpu.shared")
SLICE = ResourceName("nvidia.com/mig-1g.10gb")
PLAIN = machine()
G0, G1, G2, G3 = PLAIN.gpu_by_id
N0, N1 = PLAIN.nic_by_id


def ids(*names: str) -> tuple[DeviceID, ...]:
    return tuple(map(DeviceID, names))


def offering(*offers: Offer, topology: Topology = PLAIN) -> Topology:
    offered = msgspec.structs.replace(topology, offers=offers)
    validate(offered)
    return offered


def with_mig() -> Topology:
    """GPU 3 is cut into two MIG instances, NIC 1 has two virtual functions."""
    instances = tuple(mig_device(f"MIG-{i}", i) for i in range(2))
    functions = tuple(VirtualFunction(pci=f"0000:99:00.{i}") for i in range(2))
    gpus = (*PLAIN.gpus[:3], msgspec.structs.replace(PLAIN.gpus[3], mig=instances))
    nics = (PLAIN.nics[0], msgspec.structs.replace(PLAIN.nics[1], virtual_functions=functions))
    return msgspec.structs.replace(PLAIN, gpus=gpus, nics=nics)


def holding(topology: Topology, resource: ResourceName = GPU, **held: tuple[DeviceID, ...]) -> NodeState:
    """A node with these allocations of a resource, whatever is offered now."""
    live = tuple(Allocation(id=AllocationID(name), devices={resource: devices}) for name, devices in held.items())
    snapshot = AllocationsSnapshot(node=NODE, epoch=9, seq=1, allocations=live, digest="")
    return node(topology).apply(snapshot)


def overlapping(state: NodeState, *names: str) -> list[AllocationID]:
    """The allocations that hold something which overlaps one of these ids."""
    ownership = state.ownership
    return ownership.overlapping(map(ownership.holding, ids(*names)))


SHARES = offering(Offer(resource=SHARED, devices=(G0, G1), replicas=3), Offer(resource=GPU, devices=(G2, G3)))


def test_without_offers_whole_devices_have_their_usual_names() -> None:
    """Without offers, whole GPUs and NICs are offered under their usual names."""
    assert {GPU: [G0, G1, G2, G3], NIC: [N0, N1]} == {name: list(each) for name, each in PLAIN.devices.items()}


def test_shares_are_numbered_and_near_the_node_of_their_card() -> None:
    assert {f"{G0}::0", f"{G0}::1", f"{G0}::2"} <= SHARES.devices[SHARED].keys()
    assert 6 == len(SHARES.devices[SHARED])
    assert {(0,)} == set(SHARES.devices[SHARED].values())
    assert [G2, G3] == list(SHARES.devices[GPU])
    assert ("part", "gpu", "other") == tuple(map(SHARES.kind_of, (SHARED, GPU, ResourceName("example.com/fpga"))))


def test_mig_instances_and_virtual_functions_belong_to_their_card() -> None:
    topology = offering(
        Offer(resource=SLICE, devices=ids("MIG-0", "MIG-1"), replicas=2),
        Offer(resource=NIC, devices=ids("0000:99:00.0", "0000:99:00.1")),
        topology=with_mig(),
    )

    assert G3 == topology.parent_of(DeviceID("MIG-1::1"))
    assert N1 == topology.parent_of(DeviceID("0000:99:00.1"))
    assert {(1,)} == set(topology.devices[SLICE].values()) | set(topology.devices[NIC].values())
    assert "GPU3/MIG-0::1" == name_device(topology, SLICE, DeviceID("MIG-0::1")).short
    assert "GPU0::2" == name_device(SHARES, SHARED, DeviceID(f"{G0}::2")).short


@pytest.mark.parametrize(
    ("offers", "path"),
    [
        ((Offer(resource=GPU, devices=ids("GPU-no")),), "offers[0].devices"),
        ((Offer(resource=GPU, devices=(G0,)), Offer(resource=SHARED, devices=(G0,), replicas=2)), "offers[1].devices"),
        ((Offer(resource=GPU, devices=(G3,)), Offer(resource=SLICE, devices=ids("MIG-0"))), "offers[0].devices"),
        ((Offer(resource=GPU, devices=(G0,), replicas=0),), "offers[0]"),
        ((Offer(resource=GPU, devices=(G0,), most=0),), "offers[0]"),
        ((Offer(resource=GPU, devices=(G0,), replicas=50_001),), "offers[0].replicas"),
    ],
)
def test_an_offer_of_a_missing_or_repeated_device_is_refused_by_its_path(offers: tuple[Offer, ...], path: str) -> None:
    """An offer of a device that does not exist, or of one twice, is refused by its path."""
    with pytest.raises(InvalidField) as caught:
        offering(*offers, topology=with_mig())

    assert path == caught.value.field


def test_a_part_belongs_to_one_card() -> None:
    whole = with_mig()
    twice = msgspec.structs.replace(whole.gpus[0], mig=whole.gpus[3].mig)
    with pytest.raises(InvalidField, match="'MIG-0' is there twice"):
        validate(msgspec.structs.replace(whole, gpus=(twice, *whole.gpus[1:])))


def test_a_share_is_as_ill_as_its_card_and_an_instance_may_be_ill_alone() -> None:
    ill, well = (DeviceHealth(state=state) for state in (HealthState.UNHEALTHY, HealthState.HEALTHY))
    topology = offering(
        Offer(resource=SHARED, devices=(G0, G1), replicas=2),
        Offer(resource=SLICE, devices=ids("MIG-0", "MIG-1")),
        topology=with_mig(),
    )
    health = DeviceHealthChanged(
        node=NODE,
        epoch=2,
        revision=1,
        devices={G0: ill, G1: well, G3: well, DeviceID("MIG-1"): msgspec.structs.replace(ill, reason="XID 94")},
    )
    state = node(topology).apply(health)

    assert HealthState.UNHEALTHY == state.health_of(DeviceID(f"{G0}::1")).state
    assert state.health_of(DeviceID(f"{G1}::1")).usable
    assert state.health_of(DeviceID("MIG-0")).usable
    assert "XID 94" == state.health_of(DeviceID("MIG-1")).reason


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    "bad", [DeviceHealth(state=HealthState.HEALTHY, cordoned=True), DeviceHealth(state=HealthState.UNHEALTHY)]
)
def test_a_card_handed_out_whole_is_no_healthier_than_its_instances(replicas: int, bad: DeviceHealth) -> None:
    """
    A card that is handed out whole or in shares is no healthier than its instances: a container that gets the card gets
    them, too. An instance may have been cordoned, or have become unhealthy when it was handed out itself.
    """
    topology = offering(Offer(resource=SHARED, devices=(G0, G3), replicas=replicas), topology=with_mig())
    well = DeviceHealth(state=HealthState.HEALTHY)
    devices = {G0: well, G3: well, DeviceID("MIG-1"): bad}
    state = node(topology).apply(DeviceHealthChanged(node=NODE, epoch=2, revision=1, devices=devices))

    assert {G0} == {base_of(device) for device in topology.devices[SHARED] if state.health_of(device).usable}
    assert {G0} == {base_of(device) for device in state.healthy(SHARED)}
    assert state.health_of(DeviceID("MIG-0")).usable


def test_a_cordoned_card_keeps_its_shares_back() -> None:
    cordoned = DeviceHealth(state=HealthState.HEALTHY, cordoned=True)
    state = node(SHARES).apply(DeviceHealthChanged(node=NODE, epoch=2, revision=1, devices={G0: cordoned}))

    assert not state.health_of(DeviceID(f"{G0}::0")).usable


def test_shares_of_a_gpu_that_is_held_whole_wait_for_its_release() -> None:
    """Shares of a GPU that is still held whole wait until it is released."""
    state = holding(SHARES, whole=(G0,))

    assert {G0} == state.ownership.blocked
    assert [f"{G1}::{n}" for n in range(3)] == list(state.ownership.free(SHARED))
    assert ["whole"] == overlapping(state, f"{G0}::1")


def test_a_gpu_of_which_a_share_is_still_held_waits_too() -> None:
    state = holding(PLAIN, share=ids(f"{G0}::1"))

    assert {G0} == state.ownership.blocked
    assert (G1, G2, G3) == tuple(state.ownership.free(GPU))
    assert ["share"] == overlapping(state, G0)


def test_other_shares_of_a_gpu_stay_free_also_above_a_smaller_number() -> None:
    """Other shares of a shared GPU stay free, also those above a number of shares that has become smaller."""
    state = holding(SHARES, SHARED, one=ids(f"{G0}::1"), beyond=ids(f"{G1}::7"))

    assert frozenset() == state.ownership.blocked
    assert 5 == len(state.ownership.free(SHARED))
    assert [] == overlapping(state, f"{G0}::2", f"{G1}::0")


def test_shares_held_under_another_name_keep_their_card_back() -> None:
    """
    Shares that are still held under another resource name keep their card back. The kubelet knows nothing of the former
    name, and would give the same share again.
    """
    state = holding(SHARES, GPU, one=ids(f"{G0}::1"))

    assert {G0} == state.ownership.blocked


def test_a_gpu_waits_for_who_held_an_instance_of_it_that_is_gone() -> None:
    """Its device node is in that container still: with MIG off, the whole GPU would be two containers'."""
    held = Allocation(id=AllocationID("a"), devices={SLICE: ids("MIG-0::1")}, parents={DeviceID("MIG-0"): G3})
    state = node(PLAIN).holding(held)

    assert {G3} == state.ownership.blocked
    assert ["a"] == overlapping(state, G3) == overlapping(state, f"{G3}::0", "MIG-0")
    assert {*held.device_ids} == {*state.ailing(held)}, "the instance is not as well as its card: it is gone"


def test_instances_of_a_gpu_that_is_held_whole_wait() -> None:
    topology = offering(Offer(resource=SLICE, devices=ids("MIG-0", "MIG-1")), topology=with_mig())

    assert () == tuple(holding(topology, whole=(G3,)).ownership.free(SLICE))


def naive_overlap(topology: Topology, one: DeviceID, other: DeviceID) -> bool:
    """Straight from the words: one is the other, or one is the whole and the other a part of it."""

    def wholes(device: DeviceID) -> list[DeviceID]:
        parents = {mig.uuid: gpu.id for gpu in topology.gpus for mig in gpu.mig or ()}
        chain = [device]
        if "::" in device:
            chain.append(DeviceID(device.split("::")[0]))
        if chain[-1] in parents:
            chain.append(parents[chain[-1]])
        return chain

    return other in wholes(one) or one in wholes(other)


ANY = st.sampled_from(ids(G0, G2, G3, f"{G0}::0", f"{G0}::1", f"{G3}::0", "MIG-0", "MIG-1", "MIG-0::0", "MIG-0::1"))


@given(st.lists(ANY, max_size=4, unique=True), st.lists(ANY, min_size=1, max_size=3, unique=True))
def test_overlap_is_that_of_wholes_and_parts(held: list[DeviceID], asked: list[DeviceID]) -> None:
    topology = with_mig()
    state = holding(topology, GPU, **{f"a{i}": (device,) for i, device in enumerate(held)})

    expected = [
        f"a{i}" for i, device in enumerate(held) if any(naive_overlap(topology, device, each) for each in asked)
    ]

    assert expected == overlapping(state, *asked)


@given(st.data())
def test_shares_come_from_the_least_or_the_most_held_card_one_by_one(data: st.DataObject) -> None:
    """I7 and the rule itself, against counting by hand."""
    packing: Packing = data.draw(st.sampled_from(PACKINGS))
    topology = offering(Offer(resource=SHARED, devices=(G0, G1, G2, G3), replicas=3, packing=packing))
    listed = list(topology.devices[SHARED])
    available = data.draw(st.lists(st.sampled_from(listed), unique=True, min_size=1))
    required = data.draw(st.lists(st.sampled_from(available), unique=True, max_size=3))
    size = data.draw(st.integers(max(1, len(required)), len(available)))

    chosen = prefer(topology, SHARED, available, required, size, "topology")

    assert {*required} <= {*chosen} <= {*available}
    assert size == len(chosen) == len({*chosen})
    assert chosen == prefer(topology, SHARED, available[::-1], required, size, "simple")
    naive = Counter(dict.fromkeys((G0, G1, G2, G3), 3))
    naive.subtract(base_of(each) for each in available if each not in required)
    for _ in range(size - len(required)):
        open_cards = [card for card in naive if naive[card] < 3]
        naive[(min if packing == "distributed" else max)(open_cards, key=naive.__getitem__)] += 1
    loads = Counter(dict.fromkeys((G0, G1, G2, G3), 3))
    loads.subtract(base_of(each) for each in available if each not in chosen)
    assert sorted(naive.values()) == sorted(loads.values())


def test_of_equally_used_cards_a_container_gets_one_it_has_none_of() -> None:
    """
    Of cards with equally many shares held, the container gets one of which it has no share, also where its own are
    nearer to one another.
    """
    topology = offering(Offer(resource=SHARED, devices=(G1, G2, G3), replicas=3))
    available = [device for device in topology.devices[SHARED] if device != f"{G1}::0"]
    own = ids(f"{G2}::0", f"{G3}::0")

    assert ids(f"{G1}::1", *own) == prefer(topology, SHARED, available, own, 3, "topology")


def test_what_a_container_was_just_given_counts_as_its_own() -> None:
    """GPU 2 is the least used, then comes GPU 3 beside it, then GPU 1, of which it has none, and not GPU 2 again."""
    topology = offering(Offer(resource=SHARED, devices=(G1, G2, G3), replicas=3))
    available = [device for device in topology.devices[SHARED] if device not in (f"{G1}::0", f"{G3}::0")]

    assert ids(f"{G1}::1", f"{G2}::0", f"{G3}::1") == prefer(topology, SHARED, available, [], 3, "topology")


def test_of_equally_used_cards_a_container_gets_the_nearest_to_its_own() -> None:
    """Of cards with equally many shares held, the container gets the one nearest to its own."""
    topology = offering(Offer(resource=SHARED, devices=(G1, G2, G3), replicas=2))
    available, own = list(topology.devices[SHARED]), ids(f"{G3}::0")

    assert ids(f"{G2}::0", *own) == prefer(topology, SHARED, available, own, 2, "topology")


def test_shares_beside_whole_gpus_of_one_resource_are_packed_too() -> None:
    topology = offering(
        Offer(resource=GPU, devices=(G2, G3)), Offer(resource=GPU, devices=(G0, G1), replicas=3, packing="packed")
    )
    available = [device for device in topology.devices[GPU] if device != f"{G1}::0"]

    assert ids(f"{G1}::1") == prefer(topology, GPU, available, [], 1, "topology")


def test_a_size_that_cannot_be_met_has_no_preference() -> None:
    """A size of 0, of too many or of fewer than are required has no preference."""
    available = list(SHARES.devices[SHARED])

    assert () == prefer(SHARES, SHARED, available, [], 0, "topology")
    assert () == prefer(SHARES, SHARED, available, [], 7, "topology")
    assert () == prefer(SHARES, SHARED, available, available[:3], 2, "topology")


def test_whole_gpus_under_another_name_are_chosen_by_their_links() -> None:
    resource = ResourceName("nvidia.com/a100")
    topology = offering(Offer(resource=resource, devices=(G1, G2, G3)))

    assert (G2, G3) == prefer(topology, resource, [G1, G2, G3], [], 2, "best-effort")


@pytest.mark.parametrize("mode", list(Mode))
def test_admission_gives_shares_and_refuses_more_than_allowed(mode: Mode) -> None:
    """Admission gives shares, and refuses more than one container may ask for."""
    topology = offering(Offer(resource=SHARED, devices=(G0, G1), replicas=3, most=2))
    rules = AdmissionRules(mode=mode)
    state = node(topology)

    two = pod(container(others={SHARED: 2}))
    (given_two,) = admitted(admit(state, two, rules)).values()
    refusal = refused(admit(state, pod(container(others={SHARED: 3})), rules))

    assert {G0, G1} == {base_of(device) for device in given_two.devices[SHARED]}
    assert "TooLarge" == refusal.code
    assert 4 == len(granted(state, admit(state, two, rules)).ownership.free(SHARED))


def test_offers_travel_with_the_topology() -> None:
    found = TopologyDiscovered(node=NODE, epoch=1, revision=1, boot_id="b", source="s", topology=SHARES)

    again = msgspec.json.decode(msgspec.json.encode(found), type=TopologyDiscovered)

    assert SHARES.devices == again.topology.devices

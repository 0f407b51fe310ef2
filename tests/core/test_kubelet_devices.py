"""The devices of a node as its kubelet will have them: what counts as held, as free and as there, rule by rule."""

import msgspec
import pytest
from decision_support import container, machine, node, pod
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.admission.kubelet_devices import (
    as_others,
    describe_unaccounted_grants,
    dropped_of,
    explain_unavailable_resources,
    find_unrecorded_devices,
    with_others,
    without_dropped,
    without_ended,
)
from topoalign.core.admission.prediction import to_kubelet_rules
from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.model.errors import InvalidField
from topoalign.core.model.events import Allocation, HealthState, Owner
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import (
    GPU,
    NIC,
    AllocationID,
    ContainerName,
    DeviceID,
    Namespace,
    PodName,
    ResourceName,
)
from topoalign.core.model.kubelet import CheckpointEntry, KubeletObserved, ListedDevices
from topoalign.core.model.requests import AdmissionRules, Mode
from topoalign.core.model.topology.model import PluginDevice
from topoalign.core.state.fold import NodeState

FPGA, VPU = ResourceName("example.com/fpga"), ResourceName("example.com/vpu")
RULES = AdmissionRules(mode=Mode.KUBELET)
STATE = node(machine())
DEVICES = [*(DeviceID(f"GPU-{i}") for i in range(4)), *(DeviceID(f"mlx5_{i}") for i in range(2))]


def owner(name: str) -> Owner:
    return Owner(namespace=Namespace("default"), pod=PodName(name), container=ContainerName("main"))


def allocation(number: int, devices: frozenset[DeviceID], owned: bool) -> Allocation:
    given_out = {
        resource: tuple(sorted(each for each in devices if each.startswith(prefix)))
        for resource, prefix in ((GPU, "GPU"), (NIC, "mlx5"))
    }
    kept = {resource: ids for resource, ids in given_out.items() if ids}
    return Allocation(id=AllocationID(f"a{number}"), owner=owner(f"p{number}") if owned else None, devices=kept)


some = st.frozensets(st.sampled_from(DEVICES))


@st.composite
def records(draw: st.DrawFn) -> list[Allocation]:
    sets = draw(st.lists(st.tuples(some, st.booleans()), max_size=4))
    return [allocation(number, devices, owned) for number, (devices, owned) in enumerate(sets) if devices]


@given(records(), some)
def test_what_was_seen_to_run_is_free_where_only_gone_pods_have_it(
    record: list[Allocation], gone: frozenset[DeviceID]
) -> None:
    """Of an allocation that nobody was seen with nothing is dropped; one of which nothing is left is no more."""
    state = STATE
    for each in record:
        state = state.holding(each)
    listed = {GPU: {each for each in gone if each in DEVICES[:4]}, FPGA: {DeviceID("f")}, NIC: {*gone} - {*DEVICES[:4]}}

    dropped = dropped_of(state.allocations, listed)
    left = without_dropped(state, dropped)

    expected = {each.id: each.device_ids - (gone if each.owner is not None else frozenset()) for each in record}
    assert {name: ids for name, ids in expected.items() if ids} == {
        name: held.device_ids for name, held in left.allocations.items()
    }
    assert all(dropped.values()) and all(ids for each in dropped.values() for ids in each.values())
    assert all(held.devices.values() and all(held.devices.values()) for held in left.allocations.values())
    assert left.allocations == without_dropped(left, {AllocationID("other"): {GPU: ()}}).allocations


def test_of_slots_in_part_dropped_the_rest_keeps_its_amounts_and_instances() -> None:
    slots = [DeviceID("GPU-0::0"), DeviceID("GPU-1::0")]
    amounts = dict.fromkeys(slots, Amount(cores=10, memory=1))
    held = msgspec.structs.replace(
        allocation(1, frozenset(), True),
        devices={GPU: tuple(slots)},
        slots=amounts,
        instances={each: each for each in slots},
    )

    (left,) = without_dropped(STATE.holding(held), {held.id: {GPU: (slots[0],)}}).allocations.values()

    assert {slots[1]} == left.device_ids == left.slots.keys() == left.instances.keys()


def test_what_has_ended_is_free_and_named() -> None:
    state = STATE.holding(allocation(1, frozenset(DEVICES[:1]), True)).holding(
        allocation(2, frozenset(DEVICES[1:2]), False)
    )

    left, notes = without_ended(state, [AllocationID("a1"), AllocationID("a2"), AllocationID("gone")])
    same, none = without_ended(state, [AllocationID("gone")])

    assert ({}, 1) == (left.allocations, len(notes))
    assert "'default/p1/main', 'a2'" in notes[0]
    assert (state.allocations, ()) == (same.allocations, none)


def entry(mounted: bool, *devices: str, resource: ResourceName = GPU) -> CheckpointEntry:
    ids = tuple(map(DeviceID, devices))
    return CheckpointEntry(pod_uid="u", container=ContainerName("c"), devices={resource: ids}, mounted=mounted)


def test_of_devices_offered_here_a_pod_that_runs_for_sure_holds_them() -> None:
    """Those that somebody holds and those of containers that have ended are left out; of other plugins' all are held."""
    plugin = with_others(STATE, {FPGA: (ListedDevices(nodes=(0,), ids=(DeviceID("f"),)),)})
    state = plugin.holding(allocation(1, frozenset(DEVICES[:1]), True))

    assert {GPU: ("GPU-2",)} == find_unrecorded_devices(
        state, entry(True, "GPU-0", "GPU-1", "GPU-2"), [DeviceID("GPU-1")]
    )
    assert {} == find_unrecorded_devices(state, entry(False, "GPU-2"), [])
    assert {FPGA: ("f",)} == find_unrecorded_devices(state, entry(False, "f", resource=FPGA), [])
    assert {} == find_unrecorded_devices(state, entry(True, "v", resource=VPU), [])


@pytest.mark.parametrize(
    ("owned", "listed", "unknown", "noted"),
    [(False, False, "", True), (True, False, "", False), (False, True, "", False), (False, False, "no file", False)],
)
def test_what_was_asked_for_and_no_container_has_is_noted(owned: bool, listed: bool, unknown: str, noted: bool) -> None:
    state = STATE.holding(allocation(1, frozenset(DEVICES[:1]), owned))
    kubelet = KubeletObserved(
        rules=to_kubelet_rules(RULES), entries=(entry(False, "GPU-0"),) if listed else (), checkpoint_unknown=unknown
    )

    notes = describe_unaccounted_grants(state, kubelet)

    assert noted == bool(notes)
    assert all("'GPU-0'" in note for note in notes)


def test_devices_that_came_with_others_are_not_noted_as_asked_for() -> None:
    """The kubelet does not know of them, so its checkpoint never lists them."""
    with_nic = msgspec.structs.replace(
        allocation(1, frozenset((DEVICES[0], DEVICES[4])), False), co_allocated=(DEVICES[4],)
    )
    kubelet = KubeletObserved(rules=to_kubelet_rules(RULES), entries=(entry(False, "GPU-0"),))

    assert () == describe_unaccounted_grants(STATE.holding(with_nic), kubelet)


def test_devices_of_other_plugins_come_in_the_order_of_names() -> None:
    """They take the place of what was known of their resource; offers of ours and other resources stay as they are."""
    before = (
        PluginDevice(id=DeviceID("f-9"), resource=FPGA, nodes=None),
        PluginDevice(id=DeviceID("v-0"), resource=VPU, nodes=(1,)),
    )
    state = node(machine(others=before))
    listed = {
        FPGA: (
            ListedDevices(nodes=(1,), ids=(DeviceID("f-2"), DeviceID("f-1"))),
            ListedDevices(ids=(DeviceID("f-0"),)),
        ),
        GPU: (ListedDevices(nodes=(0,), ids=(DeviceID("GPU-9"),)),),
    }

    got = with_others(state, listed)

    assert [("v-0", (1,)), ("f-0", None), ("f-1", (1,)), ("f-2", (1,))] == [
        (o.id, o.nodes) for o in got.hardware.others
    ]
    assert all(got.health_of(DeviceID(name)).usable for name in ("f-0", "f-1", "f-2"))
    assert state.hardware.devices[GPU] == got.hardware.devices[GPU]
    ill = msgspec.structs.replace(got.reported_health[DeviceID("GPU-0")], state=HealthState.UNHEALTHY)
    assert state.health is not None
    known = msgspec.structs.replace(
        state, health=msgspec.structs.replace(state.health, devices={**state.reported_health, DeviceID("f-1"): ill})
    )
    assert not with_others(known, listed).health_of(DeviceID("f-1")).usable, "what discovery says goes first"


def test_what_cannot_be_placed_changes_nothing() -> None:
    listed = {FPGA: (ListedDevices(nodes=(1,), ids=(DeviceID("f"),)),)}
    empty = NodeState(node=STATE.node)
    unjudged = msgspec.structs.replace(STATE, health=None)

    for state, reported_health in (
        (STATE, None),
        (STATE, {}),
        (STATE, {GPU: listed[FPGA]}),
        (empty, listed),
        (unjudged, listed),
    ):
        assert state == with_others(state, reported_health)


def test_what_a_pod_of_this_name_holds_is_somebody_elses() -> None:
    """The next pod of the name has another UID."""
    demand = read_pod(pod(container(), name="p1"), RULES)
    own, foreign = allocation(1, frozenset(DEVICES[:1]), True), allocation(2, frozenset(DEVICES[1:2]), True)
    elsewhere = msgspec.structs.replace(
        allocation(3, frozenset(DEVICES[2:3]), True),
        owner=msgspec.structs.replace(owner("p1"), namespace=Namespace("x")),
    )
    state = STATE.holding(own).holding(foreign).holding(elsewhere)

    got = as_others(state, demand).allocations

    assert [msgspec.structs.replace(own, owner=None), foreign, elsewhere] == [*got.values()]
    assert [*state.allocations] == [*got]


def test_a_resource_without_devices_here_is_an_error_only_if_registered() -> None:
    asked = read_pod(pod(container(gpus=1, others={VPU: 1, FPGA: 2})), RULES)
    hardware = STATE.hardware

    nobody = explain_unavailable_resources(asked, hardware, None)
    unknown = explain_unavailable_resources(asked, hardware, frozenset(), "no socket")

    assert ["nobody lists example.com/fpga here", "nobody lists example.com/vpu here"] == [
        n.split(":")[0] for n in nobody
    ]
    assert [True, True] == [note.startswith("whether a plugin lists") and "no socket" in note for note in unknown]
    assert () == explain_unavailable_resources(
        read_pod(pod(container(gpus=1)), RULES), hardware, frozenset([GPU, FPGA])
    )
    with pytest.raises(InvalidField, match=r"limits\[example.com/vpu\]"):
        explain_unavailable_resources(asked, hardware, frozenset([VPU]))

"""Sets of devices are sets, whatever is listed; and those of a node are what its allocations and its health say."""

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st
from ownership_support import Case, cases

from topoalign.core.model.holdings import base_of
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.device_sets import NO_DEVICES, DeviceSet, OfferedDevices

NAMES = [DeviceID(name) for name in ("a", "b", "b::0", "b::1", "c::1", "c::10", "c::", "d::x", "e")]
OTHERS = [DeviceID(name) for name in ("", "a::0", "x", "c")]

listings = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from([None, (), (0,), (1,), (0, 1), (-1,)])),
    unique_by=lambda each: each[0],
)
some = st.sets(st.sampled_from([*NAMES, *OTHERS]))


def in_order(listed: Iterable[DeviceID], ids: Iterable[DeviceID]) -> list[DeviceID]:
    wanted = {*ids}
    return [device for device in listed if device in wanted]


@given(listings, some, some, st.integers(-1, 10))
def test_sets_of_devices_are_the_sets_of_their_ids(
    listed: list[tuple[DeviceID, tuple[int, ...] | None]], one: set[DeviceID], other: set[DeviceID], amount: int
) -> None:
    """In the hardware's order, and without what is not listed."""
    devices = OfferedDevices(listed)
    mine, theirs = devices.some(one), devices.some([*other, *other])

    assert in_order(devices, one) == [*mine]
    assert in_order(devices, one & other) == [*(mine & theirs)]
    assert in_order(devices, one | other) == [*(mine | theirs)]
    assert in_order(devices, one - other) == [*(mine - theirs)]
    assert in_order(devices, one)[: max(0, amount)] == [*mine.first(amount)]
    assert len(in_order(devices, one)) == len(mine)
    assert [device in one and device in devices for device in (*NAMES, *OTHERS)] == [
        device in mine for device in (*NAMES, *OTHERS)
    ]
    assert (in_order(devices, one) == in_order(devices, other)) == (mine == theirs)
    assert [*devices] == [*devices.everything] == [*devices.ids]
    assert {base_of(device) for device in mine} == {*mine.bases}
    assert [base for base in devices.by_base if base in mine.bases] == mine.bases
    if mine:
        assert in_order(devices, one)[0] == mine.lowest


@given(listings, st.lists(st.sampled_from([*NAMES, *OTHERS])))
def test_ids_are_a_set_where_all_are_listed_and_named_once(
    listed: list[tuple[DeviceID, tuple[int, ...] | None]], ids: list[DeviceID]
) -> None:
    devices = OfferedDevices(listed)
    found = devices.listed(ids)

    if len({*ids}) == len(ids) and {*ids} <= {*devices}:
        assert isinstance(found, DeviceSet)
        assert in_order(devices, ids) == [*found]
    else:
        assert found is ids


@given(listings)
def test_devices_are_grouped_by_what_they_have_in_common(
    listed: list[tuple[DeviceID, tuple[int, ...] | None]],
) -> None:
    devices = OfferedDevices(listed)

    for groups, key in ((devices.by_nodes, devices.get), (devices.by_base, lambda device: device.split("::")[0])):
        assert {key(device): [each for each in devices if key(each) == key(device)] for device in devices} == {
            name: [*group] for name, group in groups.items()
        }
        assert [*dict.fromkeys(map(key, devices))] == [*groups]


def test_a_set_of_nothing_is_empty_and_iterates_over_nothing() -> None:
    assert (0, [], NO_DEVICES.everything) == (
        len(NO_DEVICES.some(NAMES)),
        [*NO_DEVICES.some(NAMES)],
        DeviceSet(OfferedDevices(), 0),
    )


@given(cases())
def test_held_and_free_devices_are_those_found_one_by_one(case: Case) -> None:
    """A device is held under its id whichever resource it was given for; free are the usable that are not held."""
    state = case.state
    owned = state.ownership
    held = {device for each in case.allocations for devices in each.devices.values() for device in devices}
    for resource, listed in state.hardware.devices.items():
        usable = [d for d in listed if state.health_of(d).usable and d.split("::")[0] not in owned.co_allocated]

        assert in_order(listed, held) == [*owned.held(resource)]
        assert usable == [*owned.usable(resource)]
        assert [device for device in usable if device not in held] == [*owned.free(resource)]
    nobody = ResourceName("example.com/none")
    assert [0, 0, 0] == [len(owned.held(nobody)), len(owned.usable(nobody)), len(owned.free(nobody))]

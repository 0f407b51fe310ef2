"""Which devices are preferred, and which are handed out around a preference, against naive readings of the rules."""

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.model.ids import GPU, NIC, DeviceID, ResourceName
from topoalign.core.model.requests import Placement
from topoalign.core.model.topology.device_links import Link, PcieClass
from topoalign.core.model.topology.device_sets import OfferedDevices
from topoalign.core.model.topology.model import Gpu, Nic, NicPort, PluginDevice, Topology
from topoalign.core.model.topology.queries import connection_score
from topoalign.core.placement.device_choice import NoHealthyDevice, NotEnoughDevices, choose_devices
from topoalign.core.placement.preference import prefer

OTHER = ResourceName("example.com/x")
UNKNOWN = DeviceID("nobody")


@st.composite
def machines(draw: st.DrawFn) -> Topology:
    """Two GPUs, five NICs of which some are down, and five devices of another's plugin."""
    ids = [*(DeviceID(f"GPU-{i}") for i in range(2)), *(DeviceID(f"mlx5_{i}") for i in range(5))]
    ports = st.lists(st.builds(NicPort, number=st.just(1), state=st.sampled_from(["", "ACTIVE", "DOWN"])), max_size=2)
    return Topology(
        gpus=tuple(Gpu(id=id, index=i) for i, id in enumerate(ids[:2])),
        nics=tuple(Nic(id=id, index=i, ports=tuple(draw(ports))) for i, id in enumerate(ids[2:])),
        links=tuple(Link(a=a, b=b, pcie=draw(st.sampled_from(PcieClass))) for a, b in combinations(ids, 2)),
        others=tuple(PluginDevice(id=DeviceID(f"x-{i}"), resource=OTHER, nodes=None) for i in range(5)),
    )


def naive(
    topology: Topology,
    resource: ResourceName,
    free: Sequence[DeviceID],
    must: Sequence[DeviceID],
    size: int,
    near: Sequence[DeviceID],
) -> tuple[DeviceID, ...]:
    listed = [*topology.devices[resource]]
    odd = len({*free}) < len(free) or len({*must}) < len(must) or not {*must} <= {*free} <= {*listed}
    if odd or size < 1 or not len(must) <= size <= len(free):
        return ()

    def rank(device: DeviceID) -> tuple[bool, int, int]:
        if resource != NIC:
            return (False, 0, listed.index(device))
        states = [port.state for port in topology.nic_by_id[device].ports]
        down = bool(states) and all(state == "DOWN" for state in states)
        return (down, -sum(connection_score(topology, device, gpu) for gpu in near), listed.index(device))

    others = sorted({*free} - {*must}, key=rank)[: size - len(must)]
    return tuple(sorted({*must, *others}, key=listed.index))


@given(machines(), st.sampled_from([NIC, OTHER]), st.data())
def test_nics_are_preferred_near_gpus_and_others_in_order(
    of: Topology, resource: ResourceName, data: st.DataObject
) -> None:
    """Nothing is preferred where the question contradicts itself or names what the node does not have."""
    listed = [*of.devices[resource], UNKNOWN]
    free = data.draw(st.lists(st.sampled_from(listed), max_size=5) | st.permutations(listed[:-1]))
    must = data.draw(st.lists(st.sampled_from(free or listed), max_size=3))
    size = data.draw(st.integers(-1, 6))
    near = tuple(of.gpu_by_id)[: data.draw(st.integers(0, 2))]

    expected = naive(of, resource, free, must, size, near)

    assert expected == prefer(of, resource, free, must, size, Placement.TOPOLOGY, near)


@pytest.mark.parametrize("placement", Placement)
def test_no_device_policy_answers_a_question_that_contradicts_itself(placement: Placement) -> None:
    of = Topology(gpus=tuple(Gpu(id=DeviceID(f"GPU-{i}"), index=i) for i in range(4)))
    a, b, *_ = gpus = [*of.gpu_by_id]

    for free, must, size in (
        (gpus, [], 0),
        (gpus, [], 5),
        (gpus, [a, b], 1),
        (gpus, [a, a], 3),
        ([a, a], [], 1),
        ([a], [b], 1),
        ([a, UNKNOWN], [], 1),
    ):
        assert () == prefer(of, GPU, free, must, size, placement)


names = st.sampled_from([DeviceID(each) for each in "abcdef"])
some = st.frozensets(names)


@given(
    st.lists(st.sampled_from([None, (), (0,), (1,), (0, 1), (-1,)]), min_size=6, max_size=6),
    some,
    some,
    some,
    st.integers(1, 6),
    st.sampled_from([None, 0b01, 0b10, 0b11, 0b100]),
    st.none() | st.lists(names | st.just(UNKNOWN), max_size=6),
)
def test_what_is_handed_out_is_left_over_then_aligned_then_preferred(
    nodes: list[tuple[int, ...] | None],
    healthy: frozenset[DeviceID],
    allocated: frozenset[DeviceID],
    left: frozenset[DeviceID],
    required: int,
    affinity: int | None,
    answer: list[DeviceID] | None,
) -> None:
    """What an init container left is held; of the others as many as can be are near the affinity."""
    devices = OfferedDevices({DeviceID(name): near for name, near in zip("abcdef", nodes, strict=True)})
    allocated |= left
    known = affinity is not None and any(devices.values())
    free = [each for each in devices if each in healthy - allocated]
    aligned = {e for e in free if known and any(n >= 0 and (affinity or 0) >> n & 1 for n in devices[e] or ())}
    reused = [each for each in devices if each in left][:required]
    needed = required - len(reused)

    try:
        asked = choose_devices(OTHER, devices, healthy, allocated, left, required, affinity)
        given_out = asked.complete(answer)
    except (NoHealthyDevice, NotEnoughDevices) as error:
        assert isinstance(error, NoHealthyDevice) == (not healthy)
        assert not healthy or 0 < needed > len(free)
        return

    assert [each for each in devices if each in given_out] == [*given_out]
    assert required == len(given_out)
    assert {*reused} <= {*given_out} <= {*reused, *free}
    assert max(0, min(needed, len(aligned))) == len(aligned & {*given_out} - {*reused})
    assert (needed > 0 and needed != len(aligned)) == asked.is_open
    if asked.is_open:
        must = {*reused} | (aligned if needed > len(aligned) else set())
        choice = aligned if needed < len(aligned) else {*free} - aligned
        assert (must, must | choice, required) == ({*asked.must_include}, {*asked.available}, asked.size)
        wanted = [each for each in devices if each in choice and each in (answer or ())]
        assert {*wanted[: required - len(must)]} <= {*given_out}

"""Whether a container that holds devices holds what it asks for: so an allocator knows a request that is repeated."""

import json

import msgspec
import pytest
from decision_support import machine, node
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.deviceshare.demand import JointDemand, container_demand
from topoalign.core.deviceshare.joint_refusals import DevicesDoNotFit
from topoalign.core.deviceshare.koordinator_names import HINT_ANNOTATION, JOINT_ANNOTATION
from topoalign.core.deviceshare.node_devices import ContainerDevices, holds_demanded, joint_devices, put_demand_to_node
from topoalign.core.model.ids import GPU, NIC, DeviceID, ResourceName
from topoalign.core.model.topology.model import Topology, VirtualFunction

FUNCTIONS = tuple(tuple(f"0000:{nic}8:00.{i}" for i in (1, 2)) for nic in range(3))


def hardware() -> Topology:
    """Four GPUs and three NICs, each NIC with two virtual functions."""
    plain = machine(nics=(0, 1, 1))
    nics = tuple(
        msgspec.structs.replace(nic, virtual_functions=tuple(VirtualFunction(pci=pci) for pci in FUNCTIONS[nic.index]))
        for nic in plain.nics
    )
    return msgspec.structs.replace(plain, nics=nics)


STATE = node(hardware())
NICS = tuple(hardware().nic_by_id)


def demand(gpus: int, nics: int, rdma: int = 0, hint: object = None) -> JointDemand:
    annotations = {JOINT_ANNOTATION: json.dumps({"deviceTypes": ["gpu", "rdma"]})}
    if hint is not None:
        annotations[HINT_ANNOTATION] = json.dumps({"rdma": hint})
    asked = {GPU: gpus, NIC: nics, ResourceName("koordinator.sh/rdma"): rdma}
    return container_demand(annotations, {name: amount for name, amount in asked.items() if amount}, compat=False)


HINTS: st.SearchStrategy[object] = st.sampled_from([None, {"vfSelector": {}}, {"allocateStrategy": "ApplyForAll"}])


@given(st.integers(0, 4), st.integers(0, 3), st.booleans(), HINTS)
def test_who_was_given_what_is_asked_holds_it(gpus: int, nics: int, by_unit: bool, hint: object) -> None:
    """And does not with a GPU more or less, or without any NIC where some were asked for."""
    asked = demand(gpus, 0, 1, hint) if by_unit and nics else demand(gpus, nics, hint=hint if nics else None)
    if not asked.requests:
        assert holds_demanded(STATE, asked, ContainerDevices())
        return
    try:
        got = joint_devices(put_demand_to_node(STATE, asked), None)
    except DevicesDoNotFit:
        return

    assert holds_demanded(STATE, asked, got)
    held = got.devices.get(GPU, ())
    for other in (held[:-1], (*held, DeviceID("GPU-9"))):
        if other != held:
            assert not holds_demanded(STATE, asked, ContainerDevices({**got.devices, GPU: other}, got.functions))
    if nics:
        assert not holds_demanded(STATE, asked, ContainerDevices({GPU: held}))
    else:
        assert not holds_demanded(STATE, asked, ContainerDevices({**got.devices, NIC: NICS[:1]}))


@pytest.mark.parametrize(
    ("asked", "nics", "functions", "expected"),
    [
        (demand(1, 1), 1, (), True),
        (demand(1, 1), 3, (), True),
        (demand(1, 2), 1, (), False),
        (demand(1, 1), 1, (0,), False),
        (demand(1, 0, 1, {"vfSelector": {}}), 1, (0,), True),
        (demand(1, 0, 1, {"vfSelector": {}}), 1, (), False),
        (demand(1, 0, 1, {"vfSelector": {}}), 2, (0,), False),
        (demand(1, 0, 1, {"vfSelector": {}}), 2, (0, 1), True),
        (demand(1, 0, 100, {"vfSelector": {}}), 1, (), True),
        (demand(1, 0, 100, {"vfSelector": {}}), 1, (0,), False),
        (demand(1, 1, 0, {"allocateStrategy": "ApplyForAll"}), 1, (), True),
    ],
)
def test_nics_are_held_whole_or_by_functions_as_they_are_asked_for(
    asked: JointDemand, nics: int, functions: tuple[int, ...], expected: bool
) -> None:
    """More NICs than asked for are held where there is one for each place with GPUs; all of them, if others have come."""
    held = ContainerDevices(
        {GPU: (DeviceID("GPU-0"),), NIC: NICS[:nics]}, {NICS[nic]: FUNCTIONS[nic][:1] for nic in functions}
    )

    assert expected is holds_demanded(STATE, asked, held)


def test_who_asks_for_what_the_node_no_longer_has_does_not_hold_it() -> None:
    """Its GPUs were lost: what it holds is no answer to what it asks."""
    held = ContainerDevices({GPU: (DeviceID("GPU-0"),)})

    assert holds_demanded(STATE, demand(1, 0), held)
    assert not holds_demanded(node(machine(gpus=())), demand(1, 0), held)

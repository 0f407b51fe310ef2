"""What lies between two devices, from the bridges above them."""

from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.device_links import PcieClass
from topoalign.core.model.topology.model import Nic
from topoalign.machines import pcie

HOST, OTHER = "pci0000:00", "pci0000:80"
SWITCH = (HOST, "0000:00:03.0", "0000:02:00.0")


@pytest.mark.parametrize(
    ("a", "b", "same_node", "expected"),
    [
        ((*SWITCH, "0000:03:04.0"), (*SWITCH, "0000:03:10.0"), True, PcieClass.PIX),
        (SWITCH[:2], SWITCH[:2], True, PcieClass.PIX),
        ((HOST,), (HOST,), True, PcieClass.PHB),
        ((*SWITCH, "0000:03:04.0"), SWITCH[:2], True, PcieClass.PXB),
        ((*SWITCH, "0000:03:04.0", "0000:04:00.0"), (*SWITCH, "0000:03:10.0"), True, PcieClass.PXB),
        ((HOST, "0000:00:01.0"), (HOST, "0000:00:02.0"), True, PcieClass.PHB),
        ((HOST, "0000:00:01.0"), (OTHER, "0000:80:01.0"), True, PcieClass.NODE),
        ((HOST, "0000:00:01.0"), (OTHER, "0000:80:01.0"), False, PcieClass.SYS),
    ],
)
def test_the_class_follows_from_the_bridges_that_are_not_shared(
    a: pcie.Chain, b: pcie.Chain, same_node: bool, expected: PcieClass
) -> None:
    assert expected == pcie.between(a, b, same_node=same_node) == pcie.between(b, a, same_node=same_node)


def test_a_chain_begins_at_the_host_bridge_and_ends_above_the_device() -> None:
    path = PurePosixPath("sys/devices/platform/soc/pci0001:00/0001:00:00.0/0001:01:00.0/0001:02:00.0")

    assert ("pci0001:00", "0001:00:00.0", "0001:01:00.0") == pcie.chain_of(path)
    assert () == pcie.chain_of(PurePosixPath("sys/bus/pci/devices/0001:02:00.0"))


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=6))
def test_bridges_are_listed_once_and_below_their_parents(ways: list[list[int]]) -> None:
    chains = [tuple("/".join(map(str, way[: i + 1])) for i in range(len(way))) for way in ways]
    bridges = pcie.collect_bridges(chains)

    assert len({bridge.address for bridge in bridges}) == len(bridges)
    seen: set[str | None] = {None}
    for bridge in bridges:
        assert bridge.parent in seen
        seen.add(bridge.address)


def test_devices_whose_place_is_unknown_have_no_link() -> None:
    chains: dict[DeviceID, pcie.Chain] = {DeviceID("a"): (HOST,), DeviceID("b"): (), DeviceID("c"): (OTHER,)}
    devices = [Nic(id=name, index=i, numa_affinity=(0,)) for i, name in enumerate(chains)]

    assert [("a", "c", PcieClass.NODE)] == [
        (link.a, link.b, link.pcie) for link in pcie.link_devices(devices, chains, one_node=False)
    ]


def test_on_a_host_with_one_node_devices_are_on_it_though_nobody_says_so() -> None:
    chains: dict[DeviceID, pcie.Chain] = {DeviceID("a"): (HOST,), DeviceID("b"): (OTHER,)}
    devices = [Nic(id=name, index=i) for i, name in enumerate(chains)]

    assert [PcieClass.NODE] == [link.pcie for link in pcie.link_devices(devices, chains, one_node=True)]
    assert [PcieClass.SYS] == [link.pcie for link in pcie.link_devices(devices, chains, one_node=False)]

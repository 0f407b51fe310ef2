"""The labels, resources and partition tables that joint allocation sees of a node that topoalign knows."""

import re
from collections.abc import Sequence

import msgspec
import pytest
from decision_support import NODE, machine, node
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.deviceshare.inventory import HOPPER_TABLE, DeviceLocation
from topoalign.core.deviceshare.koordinator_names import DeviceType
from topoalign.core.deviceshare.node_inventory import (
    LeftOver,
    bridges_above,
    inventory_of,
    koordinator_partition_table,
    locate_devices,
    to_label_value,
)
from topoalign.core.model.events import Allocation, AllocationGranted
from topoalign.core.model.ids import GPU, NIC, AllocationID, DeviceID
from topoalign.core.model.topology.device_links import Link, PcieClass
from topoalign.core.model.topology.device_offers import Offer
from topoalign.core.model.topology.model import Gpu, Nic, NicPort, PciBridge, Topology, VirtualFunction

N = DeviceID("mlx5_0")
GIB = 1 << 30


def labels_of(nic: Nic) -> dict[str, str]:
    (found,) = inventory_of(node(Topology(nics=(nic,)))).by_type[DeviceType.RDMA]
    return found.labels


@pytest.mark.parametrize(
    ("ports", "expected"),
    [
        ((), {}),
        ((NicPort(number=1),), {}),
        ((NicPort(number=1, link_layer="Ethernet", state="DOWN"),), {"linkLayer": "Ethernet", "state": "DOWN"}),
        ((NicPort(number=1, state="DOWN"), NicPort(number=2, state="ACTIVE")), {"state": "ACTIVE"}),
        ((NicPort(number=1, state="ACTIVE"), NicPort(number=2, state="DOWN")), {"state": "ACTIVE"}),
        ((NicPort(number=1, state="INIT"), NicPort(number=2, state="DOWN")), {"state": "INIT"}),
        (
            (NicPort(number=1), NicPort(number=2, link_layer="InfiniBand"), NicPort(number=3, link_layer="Ethernet")),
            {"linkLayer": "InfiniBand"},
        ),
        ((NicPort(number=1, link_layer="a b", state="c d"),), {"linkLayer": "a-b", "state": "c-d"}),
    ],
)
def test_a_nic_is_labelled_by_the_first_port_and_active_if_one_is(
    ports: tuple[NicPort, ...], expected: dict[str, str]
) -> None:
    assert {"name": "mlx5_0", **expected} == labels_of(Nic(id=N, index=0, ports=ports))


def test_a_gpu_is_labelled_by_its_model_and_has_as_much_as_is_known() -> None:
    gpus = (
        Gpu(id=DeviceID("GPU-0"), index=0, name="NVIDIA H100 80GB HBM3", memory=80 * GIB),
        Gpu(id=DeviceID("GPU-1"), index=1),
    )

    known, bare = inventory_of(node(Topology(gpus=gpus))).by_type[DeviceType.GPU]

    whole = {"koordinator.sh/gpu-core": 100, "koordinator.sh/gpu-memory-ratio": 100}
    assert ({"model": "NVIDIA-H100-80GB-HBM3"}, {}) == (known.labels, bare.labels)
    assert {**whole, "koordinator.sh/gpu-memory": 80 * GIB} == known.resources
    assert whole == bare.resources


@given(st.text(alphabet="aZ9-_. é/", max_size=70))
def test_a_label_is_a_value_that_kubernetes_takes(text: str) -> None:
    """Runs of other characters are one dash; nothing else is changed but the ends."""
    got = to_label_value(text)

    assert re.fullmatch(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?", got)
    assert re.sub(r"[ é/]+", "-", text)[:63].strip("-_.") == got


H100 = "NVIDIA H100 80GB HBM3"


def eight(names: Sequence[str] = (H100,) * 8, links: int = 18, first: int = 0) -> Topology:
    return Topology(
        gpus=tuple(
            Gpu(id=DeviceID(f"GPU-{i}"), index=i + first, name=name, switch_links=links) for i, name in enumerate(names)
        )
    )


@pytest.mark.parametrize(
    ("topology", "expected"),
    [
        (eight(), True),
        (eight(("NVIDIA H800",) * 4 + ("H20",) * 4), True),
        (eight(("NVIDIA H200",) * 8), False),
        (eight((H100,) * 7 + ("NVIDIA A100",)), False),
        (eight((H100,) * 7), False),
        (eight((H100,) * 9), False),
        (eight(first=1), False),
        (eight(links=0), False),
        (Topology(), False),
    ],
)
def test_eight_hoppers_behind_nvswitches_have_the_table(topology: Topology, expected: bool) -> None:
    assert (HOPPER_TABLE if expected else None) == koordinator_partition_table(topology)


def test_bridges_above_a_device_end_where_nothing_more_is_known() -> None:
    """Also in a circle, which a description may have before it is checked."""
    parents = {"c": "b", "b": "a", "a": None, "x": "gone", "y": "z", "z": "y"}

    assert ["a", "b", "c"] == bridges_above("c", parents)
    assert ["gone", "x"] == bridges_above("x", parents)
    assert ["z", "y"] == bridges_above("y", parents)
    assert [] == bridges_above(None, parents)


def placed(*links: Link, bridged: bool = False) -> dict[DeviceID, DeviceLocation]:
    bridges = tuple(PciBridge(address=a, parent=b) for a, b in (("host", None), ("port", "host"), ("down", "port")))
    gpus = tuple(Gpu(id=DeviceID(f"GPU-{i}"), index=i, bridge="down" if bridged and not i else None) for i in range(4))
    return dict(locate_devices(Topology(gpus=gpus, links=links, bridges=bridges)))


def link(a: int, b: int, pcie: PcieClass | None) -> Link:
    return Link(a=DeviceID(f"GPU-{a}"), b=DeviceID(f"GPU-{b}"), pcie=pcie)


def test_without_bridges_links_say_what_is_on_one_switch_and_one_complex() -> None:
    """GPU 0 and 1 by a switch, 1 and 2 by a host bridge; of GPU 3 nothing is known but an NVLink."""
    zero, one, two = (DeviceID(f"GPU-{i}") for i in range(3))

    found = placed(link(0, 1, PcieClass.PXB), link(1, 2, PcieClass.PHB), link(2, 3, None))

    assert {zero, one, two} == found.keys()
    assert found[zero] == found[one]
    assert (found[zero].pcie, True) == (found[two].pcie, bool(found[two].pcie))
    assert found[zero].switch != found[two].switch
    assert bool(found[zero].switch)


@pytest.mark.parametrize("apart", [PcieClass.NODE, PcieClass.SYS])
def test_links_over_the_host_put_nothing_together(apart: PcieClass) -> None:
    found = placed(link(0, 1, apart))

    assert 2 == len({place.pcie for place in found.values()}) == len({place.switch for place in found.values()})


def test_where_bridges_are_known_they_say_where_a_device_is() -> None:
    """The host bridge is the root complex, the port below it the switch; links are not looked at."""
    found = placed(link(0, 1, PcieClass.PIX), bridged=True)

    assert ("host", "port") == (found[DeviceID("GPU-0")].pcie, found[DeviceID("GPU-0")].switch)


FUNCTIONS = tuple(VirtualFunction(pci=f"0000:99:00.{i}") for i in (1, 2))


@pytest.mark.parametrize(
    ("held", "left", "used_whole", "used_by_function"),
    [
        ((), LeftOver(), 0, 0),
        (("0000:99:00.1",), LeftOver(), 100, 99),
        (("0000:99:00.1",), LeftOver(functions=("0000:99:00.1",)), 0, 0),
        (("0000:99:00.1", "0000:99:00.2"), LeftOver(functions=("0000:99:00.1",)), 100, 99),
        (None, LeftOver(), 100, 100),
        (None, LeftOver(devices=(N,)), 0, 0),
    ],
)
def test_a_nic_is_used_as_a_whole_or_by_its_functions(
    held: tuple[str, ...] | None, left: LeftOver, used_whole: int, used_by_function: int
) -> None:
    """`held`: the functions in an allocation, None for the NIC as a whole. To whom wants a function one unit is left."""
    plain = machine(gpus=(), nics=(0,))
    nics = (msgspec.structs.replace(plain.nics[0], virtual_functions=FUNCTIONS),)
    state = node(msgspec.structs.replace(plain, nics=nics, offers=(Offer(resource=NIC, devices=(N,)),)))
    if held is None or held:
        allocation = Allocation(
            id=AllocationID("a"), devices={NIC: (N,)}, virtual_functions={N: held} if held is not None else {}
        )
        state = state.apply(AllocationGranted(node=NODE, epoch=0, seq=1, allocation=allocation))

    (whole,) = inventory_of(state, left).by_type[DeviceType.RDMA]
    (shared,) = inventory_of(state, left, by_function=True).by_type[DeviceType.RDMA]

    used = [each.used.get("koordinator.sh/rdma", 0) for each in (whole, shared)]
    assert [used_whole, used_by_function] == used
    assert frozenset({*(held or ())} - {*left.functions}) == whole.used_functions == shared.used_functions
    assert bool(left.devices or left.functions) == whole.left == shared.left
    assert frozenset(left.functions) == whole.left_functions
    assert [function.bus for function in whole.groups[0].functions] == [each.pci for each in FUNCTIONS]


def test_what_is_not_offered_as_a_whole_is_left_out() -> None:
    plain = machine(gpus=(0, 1), nics=(0, 1))
    offers = (Offer(resource=GPU, devices=(DeviceID("GPU-1"),)), Offer(resource=NIC, devices=(N,)))

    found = inventory_of(node(msgspec.structs.replace(plain, offers=offers)))

    assert [("gpu", "GPU-1"), ("rdma", "mlx5_0")] == [(each.kind.value, each.id) for each in found.devices]

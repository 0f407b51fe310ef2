"""The sizes and numbers that a topology may have: the largest is sound, and the next one is refused by its path."""

from collections.abc import Mapping

import msgspec
import pytest
from fact_support import mig_device

from topoalign.core.model.errors import InvalidField
from topoalign.core.model.events import TopologyDiscovered
from topoalign.core.model.ids import DeviceID, NodeName, ResourceName
from topoalign.core.model.topology.device_links import Link
from topoalign.core.model.topology.device_offers import Offer
from topoalign.core.model.topology.model import (
    Cpu,
    Gpu,
    Nic,
    NumaNode,
    PciBridge,
    PluginDevice,
    Topology,
    VirtualFunction,
)
from topoalign.core.model.topology.topology_checks import check_bounds, validate

A, B = DeviceID("GPU-a"), DeviceID("GPU-b")
PAGES = ResourceName("hugepages-2Mi")
NODE = NumaNode(id=0)


def cpu(id: int, core: int = 0, socket: int = 0, uncore: int = 0) -> Cpu:
    return Cpu(id=id, core=core, socket=socket, node=0, uncore=uncore)


def gpu(index: int) -> Gpu:
    return Gpu(id=DeviceID(f"GPU-{index}"), index=index)


def cpus(count: int) -> dict[str, object]:
    return {"nodes": (NODE,), "cpus": tuple(map(cpu, range(count)))}


def others(count: int) -> dict[str, object]:
    resource = ResourceName("example.com/x")
    return {"others": tuple(PluginDevice(id=DeviceID(f"x-{i}"), resource=resource, nodes=None) for i in range(count))}


def two_gpus(nvlinks: int) -> dict[str, object]:
    return {"gpus": (Gpu(id=A, index=0), Gpu(id=B, index=1)), "links": (Link(a=A, b=B, fabric_links=nvlinks),)}


def near(count: int) -> dict[str, object]:
    return {"gpus": (Gpu(id=A, index=0, cpu_affinity=(1,) * count),)}


def shares(first: int, second: int) -> dict[str, object]:
    offers = (Offer(resource=PAGES, devices=(A,), replicas=first), Offer(resource=PAGES, devices=(B,), replicas=second))
    return {"gpus": (Gpu(id=A, index=0), Gpu(id=B, index=1)), "offers": offers}


@pytest.mark.parametrize(
    ("largest", "larger", "field"),
    [
        (cpus(8_192), cpus(8_193), "cpus"),
        (
            {"nodes": tuple(NumaNode(id=i) for i in range(1_024))},
            {"nodes": tuple(NumaNode(id=i) for i in range(1_025))},
            "nodes",
        ),
        ({"gpus": tuple(map(gpu, range(128)))}, {"gpus": tuple(map(gpu, range(129)))}, "gpus"),
        (
            {"nics": tuple(Nic(id=DeviceID(f"mlx5_{i}"), index=i) for i in range(256))},
            {"nics": tuple(Nic(id=DeviceID(f"mlx5_{i}"), index=i) for i in range(257))},
            "nics",
        ),
        (
            {"bridges": tuple(PciBridge(address=f"{i}") for i in range(4_096))},
            {"bridges": tuple(PciBridge(address=f"{i}") for i in range(4_097))},
            "bridges",
        ),
        (others(65_536), others(65_537), "others"),
        (shares(25_000, 25_000), shares(25_000, 25_001), "offers[1].replicas"),
        ({"nodes": (NumaNode(id=65_535),)}, {"nodes": (NumaNode(id=65_536),)}, "nodes[0].id"),
        (
            {"nodes": (NODE,), "cpus": (cpu(65_535),)},
            {"nodes": (NODE,), "cpus": (cpu(65_536),)},
            "cpus[0].id",
        ),
        (
            {"nodes": (NODE,), "cpus": (cpu(0, socket=65_535, uncore=65_535),)},
            {"nodes": (NODE,), "cpus": (cpu(0, socket=65_536),)},
            "cpus[0].socket",
        ),
        ({"nodes": (NODE,), "cpus": (cpu(1, core=1),)}, {"nodes": (NODE,), "cpus": (cpu(1, core=2),)}, "cpus[0].core"),
        (
            {"nodes": (NumaNode(id=0, memory=1 << 60),)},
            {"nodes": (NumaNode(id=0, memory=(1 << 60) + 1),)},
            "nodes[0].memory",
        ),
        ({"nodes": (NumaNode(id=0, memory=0),)}, {"nodes": (NumaNode(id=0, memory=-1),)}, "nodes[0].memory"),
        (
            {"nodes": (NumaNode(id=0, memory=2, hugepages={PAGES: 2}),)},
            {"nodes": (NumaNode(id=0, memory=2, hugepages={PAGES: 3}),)},
            "nodes[0].memory",
        ),
        (
            {"nodes": (NumaNode(id=0, hugepages={PAGES: 1 << 60}),)},
            {"nodes": (NumaNode(id=0, hugepages={PAGES: (1 << 60) + 1}),)},
            f"nodes[0].hugepages.{PAGES}",
        ),
        ({"nodes": (NODE,), "distances": ((1,),)}, {"nodes": (NODE,), "distances": ((0,),)}, "distances[0][0]"),
        (
            {"nodes": (NODE,), "distances": ((65_535,),)},
            {"nodes": (NODE,), "distances": ((65_536,),)},
            "distances[0][0]",
        ),
        (two_gpus(999), two_gpus(1_000), "links[0].fabric_links"),
        (
            {"gpus": (Gpu(id=A, index=0, switch_links=999),)},
            {"gpus": (Gpu(id=A, index=0, switch_links=1_000),)},
            "gpus[0].switch_links",
        ),
        (
            {"gpus": (Gpu(id=A, index=0, device_nodes=("/dev/kfd", "/dev/dri/renderD128", "/dev/accel/accel0")),)},
            {"gpus": (Gpu(id=A, index=0, device_nodes=("/dev/kfd", "/dev/dri/../sda")),)},
            "gpus[0].device_nodes",
        ),
        (near(65_535), near(65_536), "gpus[0].cpu_affinity"),
        ({"gpus": (gpu(65_535),)}, {"gpus": (gpu(65_536),)}, "gpus[0].index"),
        (
            {"gpus": (Gpu(id=DeviceID("x" * 128), index=0),)},
            {"gpus": (Gpu(id=DeviceID("x" * 129), index=0),)},
            "gpus[0].id",
        ),
        ({"nics": (Nic(id=DeviceID("x"), index=0),)}, {"nics": (Nic(id=DeviceID("x\n"), index=0),)}, "nics[0].id"),
    ],
)
def test_the_largest_is_sound_and_the_next_is_refused_by_its_path(
    largest: Mapping[str, object], larger: Mapping[str, object], field: str
) -> None:
    """Linux is built for 8,192 CPUs and 1,024 NUMA nodes at most; a range of ids ends at 65,535."""
    validate(msgspec.structs.replace(Topology(), **largest))
    with pytest.raises(InvalidField) as caught:
        validate(msgspec.structs.replace(Topology(), **larger))

    assert field == caught.value.field


def test_devices_of_one_plugin_share_its_resource() -> None:
    """Only an id that repeats is refused."""
    resource = ResourceName("example.com/x")
    twins = tuple(PluginDevice(id=DeviceID(name), resource=resource, nodes=None) for name in ("x-0", "x-1"))

    validate(Topology(others=twins))
    with pytest.raises(InvalidField, match="others"):
        validate(Topology(others=(*twins, twins[0])))


def test_parts_have_ids_of_their_own() -> None:
    """A MIG instance and a virtual function are known by their ids alone, as cards are."""
    mig = mig_device("one", 0, memory=1)
    function = VirtualFunction(pci="one")
    cut, nic = Gpu(id=A, index=0, mig=(mig,)), Nic(id=DeviceID("mlx5_0"), index=0, virtual_functions=(function,))

    validate(Topology(gpus=(cut,)))
    validate(Topology(nics=(nic,)))
    with pytest.raises(InvalidField, match="devices and their parts"):
        validate(Topology(gpus=(cut,), nics=(nic,)))
    with pytest.raises(InvalidField, match="devices and their parts"):
        validate(Topology(nics=(nic, Nic(id=DeviceID("one"), index=1))))


@pytest.mark.parametrize(
    ("heard", "path"),
    [
        (Topology(nodes=(NumaNode(id=-1), NumaNode(id=65_535))), None),
        (Topology(nodes=(NumaNode(id=-2),)), "nodes"),
        (Topology(nodes=(NumaNode(id=65_536),)), "nodes"),
        (Topology(cpus=(Cpu(id=0, core=0, socket=0, node=65_536, uncore=0),)), "cpus"),
        (Topology(gpus=(Gpu(id=A, index=0, numa_affinity=(0, 65_536)),)), "gpus"),
        (Topology(gpus=(Gpu(id=A, index=0, device_nodes=("/dev/sda",)),)), "gpus[0].device_nodes"),
        (Topology(nics=(Nic(id=DeviceID("mlx5_0"), index=0, numa_affinity=(65_536,)),)), "nics"),
        (Topology(others=(PluginDevice(id=DeviceID("x"), resource=PAGES, nodes=(65_536,)),)), "others"),
        (Topology(others=(PluginDevice(id=DeviceID("x"), resource=PAGES, nodes=None),)), None),
        (Topology(offers=(Offer(resource=PAGES, devices=(A, B), replicas=25_000),)), None),
        (Topology(offers=(Offer(resource=PAGES, devices=(A, B), replicas=25_001),)), "offers"),
        (Topology(offers=(Offer(resource=PAGES, devices=(A, B) * 25_001, replicas=0),)), "offers"),
    ],
)
def test_of_what_is_heard_only_sizes_are_refused(heard: Topology, path: str | None) -> None:
    """A node may say odd things of itself, but nothing of which a mask or a list would take gigabytes."""
    if path is None:
        check_bounds(heard)
        return
    with pytest.raises(InvalidField) as caught:
        check_bounds(heard)

    assert path == caught.value.field


@pytest.mark.parametrize(
    ("source", "machine"),
    [("described: dgx-a100", "described: dgx-a100"), ("nvml", ""), ("nvml described: ", "")],
)
def test_a_described_machine_is_told_by_how_its_source_begins(source: str, machine: str) -> None:
    found = TopologyDiscovered(node=NodeName("n"), epoch=1, revision=1, boot_id="b", source=source, topology=Topology())

    assert machine == found.machine


def test_a_machine_is_described_in_one_line_by_what_is_known() -> None:
    whole = Topology(
        cpus=(cpu(0), Cpu(id=1, core=1, socket=1, node=1, uncore=1)),
        nodes=(NumaNode(id=0), NumaNode(id=1)),
        gpus=(gpu(0),),
    )
    pasted = msgspec.structs.replace(whole, sockets_known=False, nodes_known=False, cpus=())

    assert "2 sockets, 2 NUMA nodes, CPUs 0-1, 1 GPU, 0 NICs" == whole.describe()
    assert "CPUs unknown, 1 GPU, 0 NICs" == pasted.describe()

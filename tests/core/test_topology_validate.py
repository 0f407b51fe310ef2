"""A topology that contradicts itself is refused, and the first wrong value named by its path."""

from collections.abc import Mapping

import msgspec
import pytest
from fact_support import mig_device

from topoalign.core.model.errors import InvalidField
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.device_links import Link, PcieClass
from topoalign.core.model.topology.model import Cpu, Gpu, Nic, NumaNode, PciBridge, PluginDevice, Topology
from topoalign.core.model.topology.topology_checks import MOST_CPUS, MOST_GPUS, validate

A, B, N = DeviceID("GPU-a"), DeviceID("GPU-b"), DeviceID("mlx5_0")

WHOLE = Topology(
    cpus=(Cpu(id=1, core=1, socket=0, node=0, uncore=0), Cpu(id=4, core=1, socket=0, node=8, uncore=0)),
    nodes=(
        NumaNode(id=0, memory=1 << 30, hugepages={ResourceName("hugepages-2Mi"): 1 << 21}),
        NumaNode(id=8),
        NumaNode(id=252),
    ),
    distances=((10, 40, 80), (40, 10, 80), (80, 80, 10)),
    bridges=(PciBridge(address="pci0000:00"), PciBridge(address="0000:00:01.0", parent="pci0000:00")),
    gpus=(
        Gpu(id=A, index=0, bridge="0000:00:01.0", numa_affinity=(0, 8), memory_node=252),
        Gpu(id=B, index=3, cpu_affinity=(1, 4)),
    ),
    nics=(Nic(id=N, index=0, numa_affinity=(8,)),),
    links=(Link(a=A, b=B, fabric_links=4, pcie=PcieClass.PIX), Link(a=A, b=N, pcie=PcieClass.SYS)),
    others=(PluginDevice(id=DeviceID("x-0"), resource=ResourceName("example.com/x"), nodes=(3,)),),
)


def test_a_machine_with_gaps_in_its_ids_and_nodes_without_cpus_is_sound() -> None:
    validate(WHOLE)
    validate(Topology())


def cpu(id: int, core: int = 0, node: int = 0, socket: int = 0, uncore: int = 0) -> Cpu:
    return Cpu(id=id, core=core, socket=socket, node=node, uncore=uncore)


MIG = mig_device("MIG-1", 0, memory=1)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"cpus": (cpu(0), cpu(0))}, "cpus[1].id"),
        ({"cpus": (cpu(1), cpu(0))}, "cpus[1].id"),
        ({"cpus": (cpu(-1, core=-1),)}, "cpus[0].id"),
        ({"cpus": (cpu(0, core=1),)}, "cpus[0].core"),
        ({"cpus": (cpu(0), cpu(1, node=3))}, "cpus[1].node"),
        ({"cpus": (cpu(0, socket=-1),)}, "cpus[0].socket"),
        ({"cpus": (cpu(0, uncore=-1),)}, "cpus[0].uncore"),
        ({"cpus": tuple(cpu(i) for i in range(MOST_CPUS + 1))}, "cpus"),
        ({"nodes": (*WHOLE.nodes, NumaNode(id=8))}, "nodes[3].id"),
        ({"nodes": (NumaNode(id=0, memory=-1), *WHOLE.nodes[1:])}, "nodes[0].memory"),
        (
            {"nodes": (NumaNode(id=0, memory=1, hugepages={ResourceName("hugepages-2Mi"): 2}), *WHOLE.nodes[1:])},
            "nodes[0].memory",
        ),
        ({"nodes": (NumaNode(id=0, hugepages={ResourceName("memory"): 2}), *WHOLE.nodes[1:])}, "nodes[0].hugepages"),
        (
            {"nodes": (NumaNode(id=0, hugepages={ResourceName("hugepages-2Mi"): -2}), *WHOLE.nodes[1:])},
            "nodes[0].hugepages.hugepages-2Mi",
        ),
        ({"distances": ((10, 40), (40, 10))}, "distances"),
        ({"distances": ((10, 40, 80), (40, 10), (80, 80, 10))}, "distances[1]"),
        ({"distances": ((10, 40, 80), (40, 0, 80), (80, 80, 10))}, "distances[1][1]"),
        ({"bridges": (*WHOLE.bridges, WHOLE.bridges[0])}, "bridges"),
        ({"bridges": (*WHOLE.bridges, PciBridge(address="c", parent="nowhere"))}, "bridges[2].parent"),
        (
            {"bridges": (*WHOLE.bridges, PciBridge(address="c", parent="d"), PciBridge(address="d", parent="c"))},
            "bridges[2].parent",
        ),
        ({"bridges": (*WHOLE.bridges, PciBridge(address="c", parent="c"))}, "bridges[2].parent"),
        ({"bridges": (*WHOLE.bridges, PciBridge(address=""))}, "bridges[2].address"),
        ({"bridges": WHOLE.bridges[:1]}, "gpus[0].bridge"),
        ({"gpus": (WHOLE.gpus[0], Gpu(id=B, index=0))}, "gpus[1].index"),
        ({"gpus": (WHOLE.gpus[0], Gpu(id=A, index=1))}, "devices and their parts"),
        ({"gpus": (Gpu(id=N, index=0),), "links": ()}, "devices and their parts"),
        ({"gpus": (Gpu(id=DeviceID("a b"), index=0),)}, "gpus[0].id"),
        ({"gpus": (Gpu(id=A, index=0, numa_affinity=(1,)),)}, "gpus[0].numa_affinity"),
        ({"gpus": (Gpu(id=A, index=0, numa_affinity=(0, 0)),)}, "gpus[0].numa_affinity"),
        ({"gpus": (Gpu(id=A, index=0, cpu_affinity=(-1,)),)}, "gpus[0].cpu_affinity"),
        ({"gpus": (Gpu(id=A, index=0, memory_node=1),)}, "gpus[0].memory_node"),
        ({"gpus": (Gpu(id=A, index=0, memory=1 << 70),)}, "gpus[0].memory"),
        ({"gpus": (Gpu(id=A, index=0, switch_links=-1),)}, "gpus[0].switch_links"),
        ({"gpus": (Gpu(id=A, index=0, links_down=-1),)}, "gpus[0].links_down"),
        ({"gpus": (Gpu(id=A, index=0, fabric_state="fine"),)}, "gpus[0].fabric_state"),
        ({"gpus": (Gpu(id=A, index=0, mig=(MIG, MIG)),)}, "devices and their parts"),
        ({"gpus": tuple(Gpu(id=DeviceID(f"{i}"), index=i) for i in range(MOST_GPUS + 1))}, "gpus"),
        ({"nics": (Nic(id=N, index=-1),)}, "nics[0].index"),
        ({"nics": (Nic(id=N, index=0, numa_affinity=(9,)),)}, "nics[0].numa_affinity"),
        ({"nics": (Nic(id=N, index=0, bridge="none"),)}, "nics[0].bridge"),
        ({"nics": (Nic(id=N, index=0), Nic(id=N, index=1))}, "devices and their parts"),
        ({"links": (Link(a=A, b=DeviceID("none")),)}, "links[0].b"),
        ({"links": (Link(a=A, b=A),)}, "links[0].b"),
        ({"links": (Link(a=A, b=B), Link(a=B, b=A))}, "links[1]"),
        ({"links": (Link(a=A, b=N, fabric_links=1),)}, "links[0].fabric_links"),
        ({"links": (Link(a=A, b=B, fabric_links=-1),)}, "links[0].fabric_links"),
        ({"others": (*WHOLE.others, *WHOLE.others)}, "others"),
    ],
)
def test_a_contradiction_is_named_by_its_path(change: Mapping[str, object], field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        validate(msgspec.structs.replace(WHOLE, **change))

    assert field == caught.value.field
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("device", "resources"),
    [(A, "nvidia.com/gpu and example.com/y"), (WHOLE.others[0].id, "example.com/x and example.com/y")],
)
def test_one_device_under_two_resources_is_refused_and_both_are_named(device: DeviceID, resources: str) -> None:
    """Who holds a device and how it is are known by its id: under two resources it would be given twice."""
    twin = PluginDevice(id=device, resource=ResourceName("example.com/y"), nodes=(0,))

    with pytest.raises(InvalidField) as caught:
        validate(msgspec.structs.replace(WHOLE, others=(*WHOLE.others, twin)))

    assert "others[1].id" == caught.value.field
    assert all(resource in caught.value.finding for resource in resources.split(" and "))

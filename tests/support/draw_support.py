"""Machines, allocations and health that the tests of drawings share."""

from collections.abc import Sequence
from itertools import combinations

from topoalign.core.model.events import Allocation, DeviceHealth, HealthState, Owner
from topoalign.core.model.ids import GPU, NIC, AllocationID, ContainerName, DeviceID, Namespace, PodName
from topoalign.core.model.topology.device_links import Link
from topoalign.core.model.topology.model import Cpu, Gpu, Nic, NumaNode, PciBridge, Topology
from topoalign.machines import catalogue
from topoalign.tools.draw.diagram import Diagram, diagram_of
from topoalign.tools.draw.scene import Box, DrawnLine, Scene, Text, text_width

EDGE = 0.02
"""Rounding."""


def allocation(pod: str, gpus: Sequence[str] = (), nics: Sequence[str] = (), namespace: str = "ml") -> Allocation:
    devices = {GPU: tuple(map(DeviceID, gpus)), NIC: tuple(map(DeviceID, nics))}
    return Allocation(
        id=AllocationID(f"id-{pod}"),
        owner=Owner(namespace=Namespace(namespace), pod=PodName(pod), container=ContainerName("main")),
        devices={resource: ids for resource, ids in devices.items() if ids},
    )


ALLOCATIONS = (
    allocation("train", ["GPU-0", "GPU-1", "GPU-2", "GPU-3"], ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]),
    allocation("tune", ["GPU-6"], ["mlx5_6"]),
    allocation("notebook", ["GPU-7"], namespace="research"),
)
"""On a dgx-a100, as the picture in the documents shows it."""

HEALTH = {
    DeviceID("GPU-4"): DeviceHealth(state=HealthState.UNHEALTHY, reason="GPU is lost"),
    DeviceID("GPU-5"): DeviceHealth(state=HealthState.HEALTHY, cordoned=True),
    DeviceID("mlx5_4"): DeviceHealth(state=HealthState.UNKNOWN),
    DeviceID("mlx5_5"): DeviceHealth(state=HealthState.HEALTHY, cordoned=True),
}


def gpus(count: int, per_node: int = 0, switch_links: int = 0) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(
            id=DeviceID(f"GPU-{i}"),
            index=i,
            numa_affinity=(i // per_node,) if per_node else (),
            switch_links=switch_links,
        )
        for i in range(count)
    )


def nics(count: int, per_node: int = 0) -> tuple[Nic, ...]:
    return tuple(
        Nic(id=DeviceID(f"mlx5_{i}"), index=i, numa_affinity=(i // per_node,) if per_node else ()) for i in range(count)
    )


def cpus(nodes: int, each: int = 4) -> tuple[Cpu, ...]:
    return tuple(Cpu(id=i, core=i, socket=i // each, node=i // each, uncore=i // each) for i in range(nodes * each))


def nodes(count: int) -> tuple[NumaNode, ...]:
    return tuple(NumaNode(id=i, memory=2**37) for i in range(count))


MESH = tuple(
    Link(a=DeviceID(f"GPU-{a}"), b=DeviceID(f"GPU-{b}"), fabric_links=1 + (a + b) % 3)
    for a, b in combinations(range(16), 2)
)
ODD = {
    "nothing": Topology(),
    "no node is known": Topology(gpus=gpus(3), nics=nics(2)),
    "72 GPUs on a switch": Topology(cpus=cpus(2), nodes=nodes(2), gpus=gpus(72, 36, 18), nics=nics(20, 10)),
    "34 NUMA nodes": Topology(cpus=cpus(34), nodes=nodes(34), gpus=gpus(34, 1)),
    "200 bare NUMA nodes": Topology(nodes=nodes(200)),
    "a mesh that is too dense for arcs": Topology(cpus=cpus(2), nodes=nodes(2), gpus=gpus(16, 8), links=MESH),
    "a chain of bridges that bites its tail": Topology(
        bridges=(PciBridge(address="a", parent="b"), PciBridge(address="b", parent="a")),
        gpus=(Gpu(id=DeviceID("GPU-0"), index=0, bridge="a"), Gpu(id=DeviceID("GPU-1"), index=1, bridge="lost")),
    ),
    "switches below switches without end": Topology(
        bridges=tuple(PciBridge(address=str(i), parent=str(i - 1) if i else None) for i in range(128)),
        gpus=tuple(Gpu(id=DeviceID(f"GPU-{i}"), index=i, bridge=str(i)) for i in range(128)),
    ),
}
MACHINES = {name: catalogue.machine(name) for name in catalogue.names()} | ODD


def drawn(name: str) -> Diagram:
    return diagram_of(name, MACHINES[name], ALLOCATIONS, HEALTH)


def names(topology: Topology) -> list[str]:
    return sorted([f"GPU{gpu.index}" for gpu in topology.gpus] + [f"NIC{nic.index}" for nic in topology.nics])


def devices(scene: Scene) -> list[Box]:
    return [item for item in scene.items if isinstance(item, Box) and item.role in ("gpu", "nic")]


def extent(text: Text) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of the letters."""
    return text.left, text.y - 0.75 * text.size, text.left + text_width(text.text, text.size, text.bold), text.y


def overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] - EDGE and b[0] < a[2] - EDGE and a[1] < b[3] - EDGE and b[1] < a[3] - EDGE


def check_scene(scene: Scene, topology: Topology) -> None:
    boxes = [item for item in scene.items if isinstance(item, Box)]
    texts = [item for item in scene.items if isinstance(item, Text) and item.text]
    points = [point for item in scene.items if isinstance(item, DrawnLine) for point in item.points]
    corners = [(box.x, box.y, box.right, box.bottom) for box in boxes] + [extent(text) for text in texts]
    corners += [(x, y, x, y) for x, y in points]

    assert names(topology) == sorted(box.tooltip.split()[0] for box in devices(scene)), "each device once"
    outside = [
        one
        for one in corners
        if one[0] < -EDGE or one[1] < -EDGE or one[2] > scene.width + EDGE or one[3] > scene.height + EDGE
    ]
    assert [] == outside, "nothing outside the picture"
    places = [(box.x, box.y, box.right, box.bottom) for box in devices(scene)]
    assert [] == [pair for pair in combinations(places, 2) if overlap(*pair)], "no two devices overlap"
    assert [] == [(a.text, b.text) for a, b in combinations(texts, 2) if overlap(extent(a), extent(b))], "nor texts"

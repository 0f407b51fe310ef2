"""Machines, allocations and health that the tests of drawings share."""

from collections.abc import Sequence
from itertools import combinations

from fact_support import owner

from topoalign.core.model.events import Allocation, DeviceHealth, HealthState
from topoalign.core.model.ids import GPU, NIC, AllocationID, DeviceID
from topoalign.core.model.topology.model import Cpu, NumaNode, Topology
from topoalign.tools.draw.scene import Box, DrawnLine, Scene, Text, text_width

EDGE = 0.02
"""Rounding."""


def allocation(pod: str, gpus: Sequence[str] = (), nics: Sequence[str] = (), namespace: str = "ml") -> Allocation:
    devices = {GPU: tuple(map(DeviceID, gpus)), NIC: tuple(map(DeviceID, nics))}
    return Allocation(
        id=AllocationID(f"id-{pod}"),
        owner=owner(pod, namespace=namespace),
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


def cpus(nodes: int, each: int = 4) -> tuple[Cpu, ...]:
    return tuple(Cpu(id=i, core=i, socket=i // each, node=i // each, uncore=i // each) for i in range(nodes * each))


def nodes(count: int) -> tuple[NumaNode, ...]:
    return tuple(NumaNode(id=i, memory=2**37) for i in range(count))


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

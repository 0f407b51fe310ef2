"""What is not found any more stays listed, and the machine still hangs together."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.device_links import Link, PcieClass
from topoalign.core.model.topology.model import Gpu, Nic, NumaNode, PciBridge, Topology
from topoalign.core.model.topology.topology_checks import validate
from topoalign.discovery.service import with_lost


def machine(gpus: list[int], nics: int = 2) -> Topology:
    """The GPUs of these names in this order, each below a bridge of its own, all linked to all."""
    devices = [DeviceID(f"GPU-{gpu}") for gpu in gpus] + [DeviceID(f"mlx5_{nic}") for nic in range(nics)]
    return Topology(
        nodes=(NumaNode(id=0), NumaNode(id=1)),
        bridges=(
            PciBridge(address="pci0000:00"),
            *(PciBridge(address=f"0000:00:{gpu:02x}.0", parent="pci0000:00") for gpu in gpus),
        ),
        gpus=tuple(
            Gpu(
                id=DeviceID(f"GPU-{gpu}"),
                index=index,
                pci=f"0000:{gpu + 1:02x}:00.0",
                bridge=f"0000:00:{gpu:02x}.0",
                numa_affinity=(gpu % 2,),
                memory_node=gpu % 2,
            )
            for index, gpu in enumerate(gpus)
        ),
        nics=tuple(Nic(id=DeviceID(f"mlx5_{nic}"), index=nic, bridge="pci0000:00") for nic in range(nics)),
        links=tuple(Link(a=a, b=b, pcie=PcieClass.PHB) for i, a in enumerate(devices) for b in devices[i + 1 :]),
    )


def test_a_machine_that_lacks_nothing_is_taken_as_it_is() -> None:
    found = machine([3, 1, 2])

    assert found is with_lost(machine([1, 2, 3]), found)


def test_a_lost_gpu_keeps_its_place_and_all_that_was_known_of_it() -> None:
    had, found = machine([0, 1, 2, 3]), machine([0, 1, 2, 3])
    gone = found.gpus[1].id
    found = msgspec.structs.replace(
        found,
        gpus=tuple(gpu for gpu in found.gpus if gpu.id != gone),
        links=tuple(link for link in found.links if gone not in (link.a, link.b)),
        bridges=tuple(bridge for bridge in found.bridges if bridge.address != "0000:00:01.0"),
    )

    merged = with_lost(had, found)

    assert (had.gpus, had.links) == (merged.gpus, merged.links)
    assert set(had.bridges) == set(merged.bridges)


def test_a_lost_gpu_whose_index_another_has_taken_goes_to_the_end() -> None:
    merged = with_lost(machine([0, 1, 2]), machine([1, 2]))

    assert [("GPU-1", 0), ("GPU-2", 1), ("GPU-0", 2)] == [(gpu.id, gpu.index) for gpu in merged.gpus]


def test_a_card_that_sits_where_another_sat_has_replaced_it() -> None:
    """Whatever it is called: two cards cannot be at one address."""
    found = machine([0, 1])
    renamed = msgspec.structs.replace(found.gpus[0], id=DeviceID("GPU-new"))

    merged = with_lost(found, Topology(nodes=found.nodes, bridges=found.bridges, gpus=(renamed, found.gpus[1])))

    assert ["GPU-new", "GPU-1"] == [gpu.id for gpu in merged.gpus]
    assert ["mlx5_0", "mlx5_1"] == [nic.id for nic in merged.nics]


def test_a_lost_gpu_forgets_a_numa_node_that_is_gone_too() -> None:
    found = msgspec.structs.replace(machine([0]), nodes=(NumaNode(id=0),))

    lost = with_lost(machine([0, 1]), found).gpus[1]

    assert ((), None) == (lost.numa_affinity, lost.memory_node)


@given(st.lists(st.lists(st.integers(0, 7), unique=True), min_size=2, max_size=6))
def test_every_gpu_ever_seen_is_listed_once(
    readings: list[list[int]],
) -> None:
    """A GPU that is there has the index it was found with."""
    merged, seen = machine(readings[0]), set(readings[0])
    for reading in readings[1:]:
        merged = with_lost(merged, machine(reading))
        seen |= set(reading)

        validate(merged)
        assert {f"GPU-{gpu}" for gpu in seen} == {gpu.id for gpu in merged.gpus}
        assert [f"GPU-{gpu}" for gpu in reading] == [gpu.id for gpu in merged.gpus][: len(reading)]

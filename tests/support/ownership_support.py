"""Nodes of which cards, parts of cards and shares are held, for the tests of ownership."""

from typing import NamedTuple

import msgspec
from decision_support import NODE, machine, node
from hypothesis import strategies as st

from topoalign.core.model.events import Allocation, AllocationsSnapshot
from topoalign.core.model.ids import GPU, NIC, AllocationID, DeviceID, ResourceName
from topoalign.core.model.topology.device_offers import Offer
from topoalign.core.model.topology.mig import MigDevice
from topoalign.core.model.topology.model import Topology, VirtualFunction
from topoalign.core.model.topology.topology_checks import validate
from topoalign.core.state.fold import NodeState

SHARED, SLICE, FUNCTION = map(ResourceName, ("nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb", "nvidia.com/vf"))
SHARES = 2
PLAIN = machine(gpus=(0, 0, 1), nics=(0, 1))
CUT, SRIOV = DeviceID("GPU-2"), DeviceID("mlx5_1")
INSTANCES = (DeviceID("MIG-0"), DeviceID("MIG-1"))
FUNCTIONS = (DeviceID("0000:99:00.1"), DeviceID("0000:99:00.2"))
GONE = DeviceID("MIG-9")
"""An instance that GPU-2 had once, as the record still says."""

PARENT: dict[str, str] = {
    **dict.fromkeys((*INSTANCES, GONE), CUT),
    **dict.fromkeys(FUNCTIONS, SRIOV),
    **{f"GPU-{i}::{n}": f"GPU-{i}" for i in range(3) for n in range(SHARES + 1)},
    **{f"{mig}::{n}": mig for mig in (*INSTANCES, GONE) for n in range(SHARES)},
}
"""Each part -> what it is a part of."""
THINGS = [DeviceID(name) for name in sorted({*PARENT, *PARENT.values(), "mlx5_0"})]


class Case(NamedTuple):
    """A node's hardware and who holds what, oldest first."""

    topology: Topology
    allocations: tuple[Allocation, ...]

    @property
    def state(self) -> NodeState:
        return node(self.topology).apply(
            AllocationsSnapshot(node=NODE, epoch=9, seq=1, allocations=self.allocations, digest="")
        )


def cut() -> Topology:
    """GPU 2 has two MIG instances, NIC 1 two virtual functions."""
    instances = tuple(
        MigDevice(uuid=uuid, profile="1g.10gb", gpu_instance=i, compute_instance=0, memory=10 << 30)
        for i, uuid in enumerate(INSTANCES)
    )
    functions = tuple(VirtualFunction(pci=pci) for pci in FUNCTIONS)
    gpus = (*PLAIN.gpus[:2], msgspec.structs.replace(PLAIN.gpus[2], mig=instances))
    nics = (PLAIN.nics[0], msgspec.structs.replace(PLAIN.nics[1], virtual_functions=functions))
    return msgspec.structs.replace(PLAIN, gpus=gpus, nics=nics)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    offers: list[Offer] = [Offer(resource=NIC, devices=(DeviceID("mlx5_0"),))]
    for gpu in PLAIN.gpu_by_id:
        ways = [Offer(resource=GPU, devices=(gpu,)), Offer(resource=SHARED, devices=(gpu,), replicas=SHARES)]
        if gpu == CUT:
            ways += [Offer(resource=SLICE, devices=INSTANCES, replicas=replicas) for replicas in (1, SHARES)]
        offers += draw(st.sampled_from([[way] for way in ways] + [[]]))
    whole, functions = Offer(resource=NIC, devices=(SRIOV,)), Offer(resource=FUNCTION, devices=FUNCTIONS)
    offers.append(draw(st.sampled_from([whole, functions])))
    topology = msgspec.structs.replace(cut(), offers=tuple(offers))
    validate(topology)
    allocations = []
    for number in range(draw(st.integers(0, 4))):
        name = AllocationID(f"a{draw(st.integers(0, 9))}-{number}")
        if draw(st.booleans()):
            resource = draw(st.sampled_from([GPU, SHARED, SLICE, NIC, FUNCTION]))
            devices = draw(st.lists(st.sampled_from(THINGS), min_size=1, max_size=3, unique=True))
            cards = {GONE: CUT} if any(device.startswith(GONE) for device in devices) else {}
            cards |= dict.fromkeys(INSTANCES, CUT) if draw(st.booleans()) else {}
            allocations.append(Allocation(id=name, devices={resource: tuple(devices)}, parents=cards))
        else:
            addresses = draw(st.lists(st.sampled_from(FUNCTIONS), min_size=1, unique=True))
            held = {SRIOV: tuple(map(str, addresses))}
            allocations.append(Allocation(id=name, devices={NIC: (SRIOV,)}, virtual_functions=held))
    return Case(topology, tuple(allocations))

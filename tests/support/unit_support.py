"""Machines whose GPUs are offered in units of computing time and of memory."""

from collections.abc import Sequence
from typing import Any

import msgspec
from decision_support import container, machine
from decision_support import refused as refusal
from fact_support import owner

from topoalign.core.admission.admit import admit
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.decisions import Admission, Refusal
from topoalign.core.model.ids import GPU, AllocationID, DeviceID, ResourceName
from topoalign.core.model.requests import GPU_COUNT, AdmissionRules, ContainerRequest, Mode, PodRequest, Policy
from topoalign.core.model.topology.device_offers import MEMORY_BLOCK, Offer
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.topology_checks import validate
from topoalign.core.state.fold import NodeState
from topoalign.machines import load_machine

CORES, MEMORY = ResourceName("tencent.com/vcuda-core"), ResourceName("tencent.com/vcuda-memory")
DGX = load_machine("dgx-a100").topology
BEST = AdmissionRules(mode=Mode.BEST, policy=Policy.NONE)
KUBELET = AdmissionRules(mode=Mode.KUBELET, policy=Policy.NONE)


def in_units(topology: Topology, gpus: int = 8, cores: ResourceName = CORES, memory: ResourceName = MEMORY) -> Topology:
    """The machine with its first GPUs in units under these names, the others whole."""
    shared, whole = topology.gpus[:gpus], topology.gpus[gpus:]
    by_blocks: dict[int, list[DeviceID]] = {}
    for gpu in shared:
        by_blocks.setdefault((gpu.memory or 0) // MEMORY_BLOCK, []).append(gpu.id)
    ids = tuple(gpu.id for gpu in shared)
    offers = [Offer(resource=cores, devices=ids, replicas=100, unit="cores", limiter="none")]
    offers += [
        Offer(resource=memory, devices=tuple(devices), replicas=blocks, unit="memory", limiter="none")
        for blocks, devices in by_blocks.items()
    ]
    if whole:
        offers.append(Offer(resource=GPU, devices=tuple(gpu.id for gpu in whole)))
    found = msgspec.structs.replace(topology, offers=tuple(offers))
    validate(found)
    return found


GAIA = AdmissionRules(mode=Mode.KUBELET, policy=Policy.NONE, compat="gaia", cpu_manager="none", memory_manager="None")
BARE = machine(nodes=2, gpus=(0, 0, 1, 1), nics=())
REVERSED = in_units(
    msgspec.structs.replace(
        BARE,
        gpus=tuple(msgspec.structs.replace(gpu, minor=3 - gpu.index, memory=8 * MEMORY_BLOCK) for gpu in BARE.gpus),
    )
)
"""Four GPUs of 8 blocks, whose minor numbers are in the opposite order of their indexes."""


def limited(machine: Topology, **terms: Any) -> Topology:
    """The same offers, those of amounts on other terms."""
    offers = tuple(msgspec.structs.replace(each, **terms) if each.by_amounts else each for each in machine.offered)
    return msgspec.structs.replace(machine, offers=offers)


def asks(cores: int = 0, blocks: int = 0, name: str = "main") -> ContainerRequest:
    amounts = {CORES: cores, MEMORY: blocks}
    return container(name, others={resource: amount for resource, amount in amounts.items() if amount})


def spread(pod: PodRequest, cards: object) -> PodRequest:
    """The pod with its units spread over so many GPUs."""
    return msgspec.structs.replace(pod, annotations={GPU_COUNT: str(cards)})


def gpus_of(state: NodeState, devices: Sequence[DeviceID]) -> list[int]:
    """Indexes of the GPUs of these units, each once."""
    by_id = state.hardware.gpu_by_id
    return sorted({by_id[state.hardware.parent_of(device)].index for device in devices})


def holds(state: NodeState, name: str, devices: dict[ResourceName, tuple[DeviceID, ...]]) -> NodeState:
    """The node after a container of a pod of this name was given these devices."""
    given = Allocation(id=AllocationID(name), owner=owner(name), devices=devices, pod_uid=f"uid-{name}")
    return state.holding(given)


def admitted(state: NodeState, asked: PodRequest, rules: AdmissionRules) -> tuple[Allocation, ...]:
    decision = admit(state, asked, rules)
    assert isinstance(decision, Admission), decision
    return decision.allocations


def refused(state: NodeState, asked: PodRequest, rules: AdmissionRules) -> Refusal:
    return refusal(admit(state, asked, rules))

"""
The time of the decision about one pod, hints and placement included, in one process.

- `dgx-a100`, `dgx-a100-explained`: 4 GPUs, 32 CPUs, 4 NICs and 64 GiB on an empty node, without and with the sets of devices
  that could have been chosen.
- `shares-3360`, `shares-10624`: 20 shares on a node with 8 GPUs of 420 shares each, or 16 of 664. Half of each GPU is held,
  by containers with 20 shares. Before each decision a container ends and another one takes its place.
"""

import time
from collections.abc import Iterator, Mapping

import msgspec

from topoalign.core.admission.admit import admit
from topoalign.core.model.decisions import Admission
from topoalign.core.model.events import HEALTHY, Allocation, DeviceHealth, HealthState
from topoalign.core.model.holdings import handed_out
from topoalign.core.model.ids import CPU, GPU, MEMORY, NIC, AllocationID, ContainerName, NodeName, PodName, ResourceName
from topoalign.core.model.requests import AdmissionRules, ContainerRequest, PodRequest, Policy
from topoalign.core.model.topology.device_offers import Offer
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import NodeState, initial_state
from topoalign.machines import load_machine
from topoalign.tools.measuring import measure_calls, summarize_times

NODE = NodeName("bench")
SHARES = 20
"""Of a container."""
CALLS = 300
WARM = 5
"""Decisions that count, and that do not."""


def cases() -> Iterator[dict[str, object]]:
    """All cases, each measured when it is asked for."""
    state = empty_node(load_machine("dgx-a100").topology)
    pod = pod_of({GPU: 4, CPU: 32_000, NIC: 4, MEMORY: 64 << 30})
    yield measure_calls("dgx-a100", lambda: admit(state, pod, AdmissionRules()))
    yield measure_calls("dgx-a100-explained", lambda: admit(state, pod, AdmissionRules(), explain=True))
    yield among_shares("hgx-h100", 420)
    yield among_shares("dgx2", 664)


def among_shares(machine: str, replicas: int) -> dict[str, object]:
    """The case `shares` on a machine of the catalogue, each of whose GPUs is shared so many ways."""
    state = half_held(machine, replicas)
    pod = pod_of({GPU: SHARES})
    rules = AdmissionRules(policy=Policy.RESTRICTED)
    milliseconds = []
    for number in range(WARM + CALLS):
        first = next(iter(state.allocations.values()))
        newest = msgspec.structs.replace(first, id=AllocationID(f"later-{number}"))
        state = state.without(first.id).holding(newest)
        began = time.perf_counter()
        decision = admit(state, pod, rules)
        milliseconds.append((time.perf_counter() - began) * 1000)
        assert isinstance(decision, Admission), "half of the shares are free"
    return summarize_times(f"shares-{len(state.hardware.devices[GPU])}", milliseconds[WARM:])


def half_held(machine: str, replicas: int) -> NodeState:
    """The state of this node, of each of whose GPUs containers hold half of the shares."""
    plain = load_machine(machine).topology
    offer = Offer(resource=GPU, devices=tuple(plain.gpu_by_id), replicas=replicas)
    health = dict.fromkeys(offer.devices, DeviceHealth(state=HealthState.HEALTHY))
    state = initial_state(NODE, msgspec.structs.replace(plain, offers=(offer,)), health, "described: bench")
    for gpu in offer.devices:
        held = [*handed_out(gpu, replicas)][: replicas // 2]
        for start in range(0, len(held), SHARES):
            shares = tuple(held[start : start + SHARES])
            state = state.holding(Allocation(id=AllocationID(shares[0]), devices={GPU: shares}))
    return state


def pod_of(amounts: Mapping[ResourceName, int], name: str = "bench") -> PodRequest:
    """A pod of one container with these requests, and limits equal to them."""
    container = ContainerRequest(name=ContainerName("main"), requests=dict(amounts), limits=dict(amounts))
    return PodRequest(name=PodName(name), containers=(container,))


def empty_node(topology: Topology) -> NodeState:
    """A node with all devices healthy and none allocated."""
    devices = {device: HEALTHY for each in topology.devices.values() for device in each}
    return initial_state(NODE, topology, devices, "described: bench")

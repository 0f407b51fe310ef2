"""What later containers of a pod take over from its init containers, told step by step."""

from typing import NamedTuple

from decision_support import container, node, pod
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.hints.reuse import (
    allocation_for,
    held_by_pod,
    live_allocations_of_pod,
    own_part,
    reusable_cpus,
    reusable_devices,
    reusable_functions,
    reusable_memory,
)
from topoalign.core.model.allocations import Role
from topoalign.core.model.events import Allocation, MemoryBlock, Owner
from topoalign.core.model.ids import (
    GPU,
    MEMORY,
    NIC,
    AllocationID,
    ContainerName,
    DeviceID,
    Namespace,
    PodName,
    ResourceName,
)
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.model.topology.bitmask import node_mask
from topoalign.core.model.topology.cpuset import format_cpuset
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import NodeState

GPUS, NICS = ([DeviceID(f"{kind}{i}") for i in range(4)] for kind in ("GPU-", "mlx5_"))
PAGES = ResourceName("hugepages-2Mi")


class Step(NamedTuple):
    """What a container got."""

    role: Role
    gpus: frozenset[DeviceID]
    nics: frozenset[DeviceID]
    by_function: frozenset[DeviceID]
    """Of these NICs only a function."""
    cpus: frozenset[int]
    memory: tuple[tuple[tuple[int, ...], ResourceName, int], ...]

    def held(self, number: int) -> Allocation:
        functions: dict[DeviceID, tuple[str, ...]] = {
            nic: (f"{nic}.{number % 2}",) for nic in self.nics & self.by_function
        }
        blocks = (
            MemoryBlock(resource=name, nodes=nodes, size=size, taken=(size,) + (0,) * (len(nodes) - 1))
            for nodes, name, size in self.memory
        )
        return Allocation(
            id=AllocationID(f"a{number}"),
            role=self.role,
            devices={GPU: tuple(sorted(self.gpus)), NIC: tuple(sorted(self.nics))},
            virtual_functions=functions,
            cpus=format_cpuset(self.cpus),
            memory=tuple(blocks),
        )


steps = st.lists(
    st.builds(
        Step,
        role=st.sampled_from(["init", "init", "sidecar", "app"]),
        gpus=st.frozensets(st.sampled_from(GPUS)),
        nics=st.frozensets(st.sampled_from(NICS)),
        by_function=st.frozensets(st.sampled_from(NICS)),
        cpus=st.frozensets(st.integers(0, 5)),
        memory=st.lists(
            st.tuples(st.sampled_from([(0,), (1,), (0, 1)]), st.sampled_from([MEMORY, PAGES]), st.integers(0, 3)),
            max_size=3,
        ).map(tuple),
    ),
    max_size=5,
)


@given(steps)
def test_what_init_containers_had_is_left_until_another_takes_it(containers: list[Step]) -> None:
    """A NIC is left only by who had it whole, and is taken by who takes but a function of it."""
    gpus, nics = frozenset[DeviceID](), frozenset[DeviceID]()
    functions, cpus = frozenset[str](), frozenset[int]()
    memory: dict[tuple[int, ResourceName], int] = {}
    for number, each in enumerate(containers):
        own = frozenset(f"{nic}.{number % 2}" for nic in each.nics & each.by_function)
        if each.role == "init":
            gpus |= each.gpus
            nics |= each.nics - each.by_function
            functions |= own
            cpus |= each.cpus
            for nodes, name, size in each.memory:
                memory[node_mask(nodes), name] = memory.get((node_mask(nodes), name), 0) + size
        else:
            gpus, nics, functions, cpus = gpus - each.gpus, nics - each.nics, functions - own, cpus - each.cpus

    held = [each.held(number) for number, each in enumerate(containers)]

    assert (gpus, nics) == (reusable_devices(held, GPU), reusable_devices(held, NIC))
    assert (functions, cpus) == (reusable_functions(held), reusable_cpus(held))
    assert memory == reusable_memory(held)


def test_what_a_pod_holds_is_told_by_its_names() -> None:
    """Of another namespace, of another pod and of nobody known is not its own; a container has but its own part."""
    owners = [
        ("default", "pod-1", "main"),
        ("default", "pod-1", "side"),
        ("else", "pod-1", "main"),
        ("default", "x", "m"),
    ]
    held = [
        Allocation(
            id=AllocationID(f"a{i}"),
            owner=Owner(namespace=Namespace(space), pod=PodName(name), container=ContainerName(part)),
        )
        for i, (space, name, part) in enumerate(owners)
    ]
    held.append(Allocation(id=AllocationID("a9")))
    state: NodeState = node(Topology())
    for each in held:
        state = state.holding(each)
    demand = read_pod(pod(container("main"), container("side")), AdmissionRules())

    assert tuple(held[:2]) == held_by_pod(state, demand) == held_by_pod(state, demand.of(ContainerName("main")))
    assert (held[2],) == live_allocations_of_pod(state, Namespace("else"), PodName("pod-1"))
    assert (held[1],) == own_part(held[:2], demand.of(ContainerName("side")))
    assert tuple(held) == own_part(held, demand)
    assert () == own_part(held[4:], demand.of(ContainerName("main")))


def test_an_allocation_being_decided_has_the_names_of_its_container() -> None:
    demand = read_pod(pod(container("main"), init=[container("proxy", sidecar=True)]), AdmissionRules())

    got = allocation_for(demand.containers[0], {NIC: (NICS[0],)}, {NICS[0]: ("f",)})

    assert ("default/pod-1/proxy", "sidecar") == (got.id, got.role)
    assert Owner(namespace=Namespace("default"), pod=PodName("pod-1"), container=ContainerName("proxy")) == got.owner
    assert ({NIC: (NICS[0],)}, {NICS[0]: ("f",)}) == (got.devices, got.virtual_functions)

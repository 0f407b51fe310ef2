"""
Mode `best` against a walk over all sets of NUMA nodes: what fits as well as it can is admitted, and what is admitted fits.

The reference knows nothing of hints. It counts on every set of nodes what is free there now, memory by the memory
manager's rule: a node is used alone or by one group of nodes at a time.
"""

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import NamedTuple

import msgspec
import pytest
from decision_support import GIB, admitted, container, granted, machine, node, pod, refused
from hypothesis import given
from hypothesis import strategies as st
from seam_reference import naive_rank

from topoalign.core.admission.admit import admit
from topoalign.core.model.decisions import Admission, Refusal
from topoalign.core.model.events import Allocation
from topoalign.core.model.hints import TopologyHint
from topoalign.core.model.ids import CPU, GPU, MEMORY, NIC, DeviceID, ResourceName
from topoalign.core.model.requests import AdmissionRules, ContainerRequest, Mode, PodRequest, Policy, Scope
from topoalign.core.model.topology.bitmask import node_mask
from topoalign.core.model.topology.cpuset import parse_cpuset
from topoalign.core.model.topology.model import NumaNode, PluginDevice, Topology
from topoalign.core.model.topology.queries import connection_score, pcie_class
from topoalign.core.state.fold import NodeState
from topoalign.machines import load_machine

PAGES = ResourceName("hugepages-1Gi")
WIDE, LOOSE = ResourceName("example.com/between"), ResourceName("example.com/anywhere")
OTHERS = (
    *(PluginDevice(id=DeviceID(f"between-{i}"), resource=WIDE, nodes=(i, i + 1)) for i in range(2)),
    *(PluginDevice(id=DeviceID(f"anywhere-{i}"), resource=LOOSE, nodes=None) for i in range(2)),
)
RESTRICTED, SINGLE = Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE
KINDS = ("gpus", "cpus", "memory", "pages", "nics", "between", "anywhere")
Nodes = frozenset[int]
Wants = Mapping[ResourceName, int]


class Free(NamedTuple):
    """What is free of a node, as the allocations that live on it leave it."""

    devices: dict[ResourceName, list[frozenset[int] | None]]
    """Per resource the nodes each free device is near; None without topology."""
    cpus: dict[int, int]
    memory: dict[int, dict[ResourceName, int]]
    """Of the nodes that have CPUs."""
    groups: dict[int, set[Nodes]]
    """By which groups of nodes the memory of a node is in use."""
    nodes: tuple[int, ...]

    def sets(self) -> list[Nodes]:
        return [frozenset(each) for size in range(1, len(self.nodes) + 1) for each in combinations(self.nodes, size)]

    def fits(self, wants: Wants, inside: Nodes) -> bool:
        """Whether all of it is there on these nodes."""
        devices = all(self.near(name, inside) >= amount for name, amount in wants.items() if name in self.devices)
        cpus = sum(self.cpus.get(each, 0) for each in inside) >= wants.get(CPU, 0)
        return devices and cpus and any(True for _ in self.memory_groups(wants, inside))

    def near(self, name: ResourceName, inside: Nodes) -> int:
        return sum(1 for near in self.devices[name] if near is None or near & inside)

    def memory_groups(self, wants: Wants, inside: Nodes) -> Iterator[Nodes]:
        """The groups within these nodes that may have the memory, and do."""
        sizes = {name: wants[name] for name in (MEMORY, PAGES) if wants.get(name)}
        for group in self.sets():
            alike = all(self.groups[each] <= {group} for each in group)
            has = all(sum(self.memory.get(n, {}).get(name, 0) for n in group) >= size for name, size in sizes.items())
            if not sizes or (group <= inside & self.memory.keys() and alike and has):
                yield group

    def width(self, wants: Wants) -> int:
        """The least number of nodes that one request fits on; 0 if it fits nowhere."""
        return min((len(each) for each in self.sets() if self.fits(wants, each)), default=0)

    def best_sets(self, wants: Wants) -> list[Nodes]:
        """Those on which all fits and which are no wider than the widest that one of the requests needs by itself."""
        memory = {name: amount for name, amount in wants.items() if name in (MEMORY, PAGES)}
        alone = [{name: amount} for name, amount in wants.items() if name not in memory]
        widest = max([1, *map(self.width, [*alone, memory])])
        return [each for each in self.sets() if len(each) <= widest and self.fits(wants, each)]


def free_of(state: NodeState, rules: AdmissionRules) -> Free:
    topology, live = state.hardware, state.allocations.values()
    busy = {device for each in live for devices in each.devices.values() for device in devices}
    cpus = {cpu.id: cpu.node for cpu in topology.cpus}
    taken = {cpu for each in live for cpu in parse_cpuset(each.cpus)} | parse_cpuset(rules.reserved_cpus)
    free_cpus = [near for cpu, near in cpus.items() if cpu not in taken]
    memory, groups = {}, {}
    for each in topology.nodes:
        blocks = [block for held in live for block in held.memory if each.id in block.nodes]
        groups[each.id] = {frozenset(block.nodes) for block in blocks}
        if each.id in cpus.values() and each.memory:
            kept = rules.reserved_memory.get(each.id, {})
            memory[each.id] = {
                name: max(0, size - kept.get(name, 0))
                - sum(b.taken[b.nodes.index(each.id)] for b in blocks if b.resource == name)
                for name, size in {MEMORY: each.memory - sum(each.hugepages.values()), **each.hugepages}.items()
            }
    return Free(
        devices={
            name: [
                None if near is None else frozenset(near)
                for device, near in devices.items()
                if device not in busy and state.health_of(device).usable
            ]
            for name, devices in topology.devices.items()
        },
        cpus={each: free_cpus.count(each) for each in topology.node_ids},
        memory=memory,
        groups=groups,
        nodes=topology.node_ids,
    )


def wanted(asked: PodRequest) -> dict[ResourceName, int]:
    """What the pod needs at the moment when it needs most, resource by resource."""
    names = {name for each in (*asked.init_containers, *asked.containers) for name in each.limits}

    def most(name: ResourceName) -> int:
        beside, moments = 0, []
        for each in asked.init_containers:
            moments.append(beside + counted(each, name))
            beside += counted(each, name) if each.sidecar else 0
        return max([*moments, beside + sum(counted(each, name) for each in asked.containers)])

    return {name: most(name) for name in sorted(names)}


def counted(each: ContainerRequest, name: ResourceName) -> int:
    amount = each.limits.get(name, 0)
    return amount if name != CPU else 0 if amount % 1000 else amount // 1000


@st.composite
def machines(draw: st.DrawFn) -> Topology:
    """2 to 4 NUMA nodes, the last of them without CPUs or with memory of its own alone at times."""
    count = draw(st.integers(2, 4))
    where = st.integers(0, count - 1)
    built = machine(
        nodes=count,
        cores=2,
        threads=draw(st.integers(1, 2)),
        gpus=draw(st.lists(where, min_size=1, max_size=8)),
        nics=draw(st.lists(where, min_size=1, max_size=3)),
        others=OTHERS,
    )
    sizes = [(draw(st.integers(2, 8)), draw(st.sampled_from([0, 0, 2]))) for _ in range(count)]
    nodes = [NumaNode(id=i, memory=size * GIB, hugepages={PAGES: pages * GIB}) for i, (size, pages) in enumerate(sizes)]
    cpus = [cpu for cpu in built.cpus if cpu.node < count - 1] if draw(st.integers(0, 3)) == 0 else built.cpus
    far = {(a, b): draw(st.sampled_from([12, 20, 32])) for a, b in combinations(range(count), 2)}
    rows = tuple(tuple(far.get((min(a, b), max(a, b)), 10) for b in range(count)) for a in range(count))
    return msgspec.structs.replace(built, nodes=tuple(nodes), cpus=tuple(cpus), distances=rows)


def containers(
    draw: st.DrawFn, name: str, most: int, sidecar: bool = False, kinds: tuple[str, ...] = KINDS
) -> ContainerRequest:
    """Asks for some of what there is; what it does not ask for leaves room for the rest to matter."""
    asks = draw(st.sets(st.sampled_from(kinds), min_size=1))
    some = st.integers(1, most)
    return container(
        name,
        gpus=draw(some) if "gpus" in asks else 0,
        cpus=draw(st.sampled_from([0.5, 1, 2, most])) if "cpus" in asks else 0,
        gib=draw(st.sampled_from([1, 2, most, 2 * most, 3 * most])) if "memory" in asks else 0,
        nics=int("nics" in asks),
        sidecar=sidecar,
        others={PAGES: GIB * ("pages" in asks), WIDE: int("between" in asks), LOOSE: int("anywhere" in asks)},
    )


@st.composite
def nodes_in_use(draw: st.DrawFn) -> tuple[NodeState, AdmissionRules]:
    """Some devices are bad, and pods have come and gone."""
    topology = draw(machines())
    bad = draw(st.sets(st.sampled_from([gpu.id for gpu in topology.gpus]), max_size=2))
    state = node(topology, unhealthy=bad)
    rules = AdmissionRules(
        policy=draw(st.sampled_from([RESTRICTED, SINGLE])),
        reserved_cpus=draw(st.sampled_from(["", "0"])),
        reserved_memory=draw(st.sampled_from([{}, {0: {MEMORY: GIB}}])),
    )
    lax = msgspec.structs.replace(rules, policy=Policy.BEST_EFFORT)
    for number in range(draw(st.integers(0, 4))):
        decision = admit(
            state, pod(containers(draw, "main", 3), name=f"earlier-{number}"), draw(st.sampled_from([rules, lax]))
        )
        state = granted(state, decision) if isinstance(decision, Admission) else state
    for gone in draw(st.lists(st.sampled_from(sorted(state.allocations)), unique=True)) if state.allocations else ():
        state = state.without(gone)
    return state, rules


@st.composite
def pods(draw: st.DrawFn, inits: int) -> PodRequest:
    kinds = draw(st.sampled_from([KINDS, ("memory", "pages")]))
    apps = [containers(draw, f"app-{i}", 4, kinds=kinds) for i in range(draw(st.integers(1, 2)))]
    first = [containers(draw, f"init-{i}", 4, draw(st.booleans()), kinds) for i in range(draw(st.integers(0, inits)))]
    return pod(*apps, init=first)


def check_inside(state: NodeState, got: Mapping[str, Allocation], inside: Nodes, free: Free) -> None:
    """Everything given lies on these nodes, and memory is of groups that may be used."""
    near = {device: nodes for devices in state.hardware.devices.values() for device, nodes in devices.items()}
    node_of = {cpu.id: cpu.node for cpu in state.hardware.cpus}
    for each in got.values():
        assert all(near[device] is None or inside & set(near[device] or ()) for device in each.device_ids)
        assert all(node_of[cpu] in inside for cpu in parse_cpuset(each.cpus))
        for block in each.memory:
            group = frozenset(block.nodes)
            assert group <= inside
            assert all(free.groups[member] <= {group} for member in group)
    assert len({block.nodes for each in got.values() for block in each.memory}) <= len(got)


def best_gpus(state: NodeState, amount: int, nics: int, inside: Nodes) -> tuple[object, ...]:
    """What sorts NUMA nodes by the best set of so many of their free GPUs; nothing where none are asked for."""
    topology = state.hardware
    every = [*topology.gpu_by_id]
    free = {every.index(gpu) for gpu in state.ownership.free(GPU)}
    inner = [at for at in sorted(free) if {*(topology.devices[GPU][every[at]] or ())} & inside]
    table = [[0 if a == b else connection_score(topology, a, b) for b in every] for a in every]
    spare = []
    for nic in state.ownership.free(NIC):
        paths = {at: pcie_class(topology, nic, gpu) for at, gpu in enumerate(every)}
        spare.append(
            ([at for at, path in paths.items() if path == "PIX"], [at for at, path in paths.items() if path != "SYS"])
        )
    ranks = (naive_rank(table, table, members, free, (nics, spare))[:-1] for members in combinations(inner, amount))
    return min(ranks, default=()) if amount else ()


@given(nodes_in_use(), pods(inits=0), st.sampled_from(Scope))
def test_a_pod_is_admitted_if_it_is_as_narrow_as_its_widest_request(
    given_node: tuple[NodeState, AdmissionRules], asked: PodRequest, scope: Scope
) -> None:
    """
    A pod that fits on as few nodes as its widest request needs is admitted, and no other pod is. restricted admits
    exactly if a set of NUMA nodes has all that is asked for and is no wider than what one of the requests needs by
    itself; single-numa-node exactly if one node has it all. The set given is the narrowest, then the one with the GPUs that
    come first by device policy `topology`, then the closest.
    """
    state, rules = given_node
    scope = scope if len(asked.containers) == 1 else Scope.POD
    rules = msgspec.structs.replace(rules, scope=scope)
    wants, free = wanted(asked), free_of(state, rules)

    decision = admit(state, asked, rules)

    sets = free.best_sets(wants)
    if rules.policy is SINGLE:
        sets = [each for each in free.sets() if len(each) == 1 and free.fits(wants, each)]
    assert bool(sets) == isinstance(decision, Admission), (sets, decision)
    if isinstance(decision, Admission):
        (merged,) = {alignment.merged for alignment in decision.explanation.alignments}
        distances = state.hardware.distances
        assert distances is not None

        def preference(each: Nodes) -> tuple[object, ...]:
            apart = sum(distances[a][b] for a in each for b in each)
            gpus = best_gpus(state, wants.get(GPU, 0), wants.get(NIC, 0), each)
            return (len(each), gpus, 0 if rules.policy is SINGLE else apart, node_mask(each))

        if merged.affinity is not None:
            best = min(sets, key=preference)
            assert TopologyHint(node_mask(best), True) == merged
            check_inside(state, admitted(decision), best, free)


@given(nodes_in_use(), pods(inits=3), st.sampled_from(Scope))
def test_what_a_strict_policy_admits_never_fails_when_it_is_given_out(
    given_node: tuple[NodeState, AdmissionRules], asked: PodRequest, scope: Scope
) -> None:
    """A refusal names no provider; and in scope pod, what fits as a whole is enough for every container of the pod."""
    state, rules = given_node
    rules = msgspec.structs.replace(rules, scope=scope)

    decision = admit(state, asked, rules)

    if isinstance(decision, Refusal):
        assert (None, "TopologyAffinityError") == (decision.provider, decision.reason)
    else:
        after = free_of(granted(state, decision), rules)
        assert all(left >= 0 for each in after.memory.values() for left in each.values())
        assert all(len(groups) <= 1 for groups in after.groups.values())
    if scope is Scope.POD:
        free = free_of(state, rules)
        sets = free.best_sets(wanted(asked))
        fits = any(len(each) == 1 for each in sets) if rules.policy is SINGLE else bool(sets)
        assert fits == isinstance(decision, Admission)


def test_memory_that_fits_on_one_node_keeps_no_later_pod_off_the_next() -> None:
    """The GPUs span two nodes, and the memory is used as a group only by the kubelet; groups and single use do not mix."""
    two, later = pod(container(gpus=2, cpus=2, gib=2)), pod(container(cpus=1, gib=6), name="later")
    outcomes = {}
    for mode in Mode:
        rules = AdmissionRules(policy=RESTRICTED, mode=mode)
        state = node(machine(gpus=(0, 1), cores=1, memory=8 * GIB))
        lax = msgspec.structs.replace(rules, policy=Policy.BEST_EFFORT)
        first = admit(state, two, lax)
        second = admit(granted(state, first), later, rules)
        outcomes[mode] = ([block.nodes for block in admitted(first)["main"].memory], isinstance(second, Admission))

    assert {Mode.KUBELET: ([(0, 1)], False), Mode.BEST: ([(0,)], True)} == outcomes


def test_a_container_takes_over_the_nodes_that_its_pod_started_with() -> None:
    """
    A container takes over the group of nodes that its pod needed to start. The init container needs the memory of two
    nodes; the app container would fit on the third alone, but the pod is aligned to those two, and they have enough as
    soon as what is taken over counts.
    """
    staged = pod(container(gib=6), init=[container("load", gib=12)])
    state, rules = node(machine(nodes=3, memory=8 * GIB)), AdmissionRules(policy=RESTRICTED, scope=Scope.POD)

    got = admitted(admit(state, staged, rules))

    assert [(0, 1), (0, 1)] == [got[name].memory[0].nodes for name in ("load", "main")]


def test_requests_of_init_containers_count_before_a_pod_is_admitted() -> None:
    """
    What only init containers ask for must be there before the pod is admitted. The kubelet leaves the hugepages of an
    init container out of the pod's request, and fails when it gives them out.
    """
    topology = msgspec.structs.replace(
        machine(cores=1),
        nodes=tuple(NumaNode(id=i, memory=8 * GIB, hugepages={PAGES: i * 4 * GIB}) for i in range(2)),
    )
    staged = pod(container(cpus=1, gib=1), init=[container("load", cpus=1, gib=1, others={PAGES: GIB})])
    rules = AdmissionRules(policy=SINGLE, scope=Scope.POD)

    assert {(1,)} == {each.affinity for each in admitted(admit(node(topology), staged, rules)).values()}
    kubelet = refused(admit(node(topology), staged, msgspec.structs.replace(rules, mode=Mode.KUBELET)))
    assert ("memory", "UnexpectedAdmissionError") == (kubelet.provider, kubelet.reason)


def test_too_few_devices_without_topology_are_refused_before_giving() -> None:
    """In mode `best`, too few devices without topology are refused before anything is given out."""
    asked = pod(container(others={LOOSE: 3}))
    refusals = {
        mode: refused(admit(node(machine(others=OTHERS)), asked, AdmissionRules(policy=RESTRICTED, mode=mode)))
        for mode in Mode
    }

    assert {Mode.KUBELET: "device", Mode.BEST: None} == {mode: each.provider for mode, each in refusals.items()}


def test_a_node_without_cpus_is_no_place_for_memory() -> None:
    """A GPU's own memory has room, and only the kubelet would use it."""
    topology = msgspec.structs.replace(
        machine(nodes=1, gpus=(0,), nics=()),
        nodes=(NumaNode(id=0, memory=4 * GIB), NumaNode(id=1, memory=64 * GIB)),
        distances=((10, 80), (80, 10)),
    )
    hungry = pod(container(cpus=1, gib=16))
    best, kubelet = (
        {name: each for one in answer.alignments[0].hints.values() for name, each in one.items()}
        for mode in (Mode.BEST, Mode.KUBELET)
        for answer in [admit(node(topology), hungry, AdmissionRules(mode=mode, policy=RESTRICTED)).explanation]
    )

    assert {CPU: (TopologyHint(0b1, True),), MEMORY: ()} == best
    assert (TopologyHint(0b10, True), TopologyHint(0b11, False)) == kubelet[MEMORY]


def test_distance_settles_equally_many_nodes_except_in_single_numa_node() -> None:
    """
    Distance decides between equally many nodes in every policy except single-numa-node. Node 0 is near node 3. The
    kubelet, not told to prefer the closest, takes the lowest pair.
    """
    rows = tuple(tuple(10 if a == b else 12 if {a, b} == {0, 3} else 32 for b in range(4)) for a in range(4))
    state = node(msgspec.structs.replace(machine(nodes=4, gpus=(0, 1, 2, 3), nics=()), distances=rows))

    got = {
        (mode, policy): admitted(admit(state, pod(container(gpus=2)), AdmissionRules(mode=mode, policy=policy)))
        for mode in Mode
        for policy in (Policy.BEST_EFFORT, RESTRICTED)
    }

    assert [(0, 1), (0, 1), (0, 3), (0, 3)] == [each["main"].affinity for each in got.values()]
    assert ("GPU-0", "GPU-3") == got[Mode.BEST, RESTRICTED]["main"].devices[GPU]


@pytest.mark.parametrize(("gpus", "node_id"), [(4, 1), (1, 0)])
def test_numa_nodes_are_those_with_the_best_connected_gpus(gpus: int, node_id: int) -> None:
    """GPU 0 of an NVSwitch board has lost its NVLinks; a kubelet aligns to the lowest node."""
    broken = without_nvlinks(machine(gpus=(0,) * 4 + (1,) * 4, nics=()))
    modes = {mode: affinity_of(broken, gpus, mode) for mode in Mode}

    assert {Mode.BEST: (node_id,), Mode.KUBELET: (0,)} == modes


def test_numa_nodes_are_compared_on_machines_with_many_of_them() -> None:
    """On a GB200 tray, with 34 NUMA nodes, GPU 0 has lost its NVLinks: two GPUs are those of the other Grace."""
    tray = without_nvlinks(load_machine("gb200-tray").topology)

    assert (1,) == affinity_of(tray, 2, Mode.BEST)
    assert (0,) == affinity_of(load_machine("gb200-tray").topology, 2, Mode.BEST)


def without_nvlinks(board: Topology) -> Topology:
    """The machine with 18 NVLinks to an NVSwitch for each GPU but the first, which has none."""
    first = board.gpus[0].id
    return msgspec.structs.replace(
        board,
        gpus=tuple(msgspec.structs.replace(gpu, switch_links=18 if gpu.index else 0) for gpu in board.gpus),
        links=tuple(
            msgspec.structs.replace(link, fabric_links=0 if first in (link.a, link.b) else 18)
            if link.b in board.gpu_by_id
            else link
            for link in board.links
        ),
    )


def affinity_of(topology: Topology, gpus: int, mode: Mode) -> tuple[int, ...] | None:
    """The NUMA nodes that a pod with so many GPUs is aligned to."""
    decision = admit(node(topology), pod(container(gpus=gpus)), AdmissionRules(mode=mode, policy=RESTRICTED))
    assert isinstance(decision, Admission)
    return decision.allocations[0].affinity

"""Pods with device annotations under a kubelet: what is chosen together among what the kubelet would take."""

import json
from collections.abc import Collection, Iterator
from itertools import combinations

import msgspec
import pytest
from decision_support import admitted, container, node, pod, refused
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.admission.admit import admit
from topoalign.core.admission.feasibility import need_of
from topoalign.core.admission.pipeline import BY_RESERVATION
from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.deviceshare.koordinator_names import HINT_ANNOTATION, JOINT_ANNOTATION, PARTITION_ANNOTATION
from topoalign.core.deviceshare.node_inventory import locate_devices
from topoalign.core.model.decisions import Admission
from topoalign.core.model.errors import InvalidField
from topoalign.core.model.events import Allocation
from topoalign.core.model.ids import GPU, NIC, AllocationID, DeviceID, ResourceName
from topoalign.core.model.requests import AdmissionRules, ContainerRequest, Mode, Placement, PodRequest, Policy
from topoalign.core.model.topology.bitmask import node_mask
from topoalign.core.model.topology.model import Gpu, Nic, NumaNode, PciBridge, Topology, VirtualFunction
from topoalign.core.placement.device_choice import choose_for_container
from topoalign.core.state.fold import NodeState
from topoalign.machines import catalogue

KUBELET = AdmissionRules(mode=Mode.KUBELET, policy=Policy.RESTRICTED)
TOGETHER = {"deviceTypes": ["gpu", "rdma"]}
SAME_PCIE = {**TOGETHER, "requiredScope": "SamePCIe"}


def joint(
    *containers: ContainerRequest,
    said: object = SAME_PCIE,
    hints: object = None,
    partition: object = None,
    init: tuple[ContainerRequest, ...] = (),
) -> PodRequest:
    both = {JOINT_ANNOTATION: said, HINT_ANNOTATION: hints, PARTITION_ANNOTATION: partition}
    annotations = {key: json.dumps(value) for key, value in both.items() if value is not None}
    return pod(*containers, init=init, annotations=annotations)


def held(state: NodeState, *devices: str) -> NodeState:
    gpus = tuple(DeviceID(each) for each in devices if each.startswith("GPU"))
    nics = tuple(DeviceID(each) for each in devices if not each.startswith("GPU"))
    return state.holding(Allocation(id=AllocationID("held"), devices={GPU: gpus, NIC: nics}))


HGX, EPYC = catalogue.machine("hgx-h100"), catalogue.machine("epyc-nps4-4gpu")


def test_gpus_alone_in_the_limits_bring_a_nic_for_each_switch() -> None:
    """GPUs 0 to 3 are on four switches, each with a NIC; the kubelet is asked for none of these."""
    got = admitted(admit(node(HGX), joint(container(gpus=4)), KUBELET))["main"]

    assert ("GPU-0", "GPU-1", "GPU-2", "GPU-3") == got.devices[GPU]
    assert ("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3") == got.devices[NIC] == got.co_allocated
    assert {GPU: got.devices[GPU]} == got.from_kubelet


def test_nics_beyond_the_limits_are_companions() -> None:
    got = admitted(admit(node(HGX), joint(container(gpus=4, nics=1)), KUBELET))["main"]

    assert {"mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"} == {*got.devices[NIC]}
    assert ("mlx5_0",) == got.from_kubelet[NIC] == got.devices[NIC][:1]


def test_gpus_are_chosen_that_have_nics_beside_them() -> None:
    """Only GPU 0 and GPU 2 of the machine have one: the plugin alone would take the first two."""
    rules = msgspec.structs.replace(KUBELET, policy=Policy.NONE, placement=Placement.SIMPLE)
    plain = admitted(admit(node(EPYC), pod(container(gpus=2)), rules))["main"]
    got = admitted(admit(node(EPYC), joint(container(gpus=2)), rules))["main"]

    assert ("GPU-0", "GPU-1") == plain.devices[GPU]
    assert {GPU: ("GPU-0", "GPU-2"), NIC: ("mlx5_0", "mlx5_1")} == got.devices


def test_same_pcie_that_cannot_be_met_is_a_refusal() -> None:
    state = held(node(EPYC), "mlx5_0")
    rules = msgspec.structs.replace(KUBELET, policy=Policy.NONE)

    assert "DevicesDoNotFit" == refused(admit(state, joint(container(gpus=2)), rules)).code
    assert admitted(admit(state, joint(container(gpus=1)), rules))["main"].co_allocated == ("mlx5_1",)
    assert isinstance(admit(state, joint(container(gpus=2), said=TOGETHER), rules), Admission)


def test_companions_stay_within_a_strict_alignment() -> None:
    """All NICs of NUMA node 0 are in use: those of node 1 are for a policy that admits without alignment alone."""
    taken = [f"mlx5_{n}" for n in (0, 1, 2, 3, 8)]
    state = held(node(HGX), *taken, "GPU-4", "GPU-5", "GPU-6", "GPU-7")
    asked = joint(container(gpus=2), said=TOGETHER)
    loose = msgspec.structs.replace(KUBELET, policy=Policy.BEST_EFFORT)

    assert "DevicesDoNotFit" == refused(admit(state, asked, KUBELET)).code
    assert ("mlx5_4",) == admitted(admit(state, asked, loose))["main"].co_allocated


def test_a_virtual_function_is_a_companion_and_shares_its_nic() -> None:
    first = msgspec.structs.replace(
        HGX.nics[0], virtual_functions=tuple(VirtualFunction(pci=f"0000:04:01.{n}") for n in range(2))
    )
    machine = msgspec.structs.replace(HGX, nics=(first, *HGX.nics[1:]))
    functions: object = {"rdma": {"vfSelector": {}}}
    units = {"koordinator.sh/rdma": 1}
    state = node(machine)
    for asked in (joint(container(gpus=1), hints=functions), joint(container(gpus=1, others=units), hints=functions)):
        got = admitted(admit(state, asked, KUBELET))["main"]

        assert {"mlx5_0": ("0000:04:01.0",)} == got.virtual_functions
        assert ("mlx5_0",) == got.co_allocated
    state = state.holding(msgspec.structs.replace(got, id=AllocationID("first"), owner=None))
    assert "mlx5_0" not in state.ownership.free(NIC)
    freed = held(state, "GPU-1")
    assert "DevicesDoNotFit" == refused(admit(freed, asked, KUBELET)).code  # another GPU is on another switch


def test_functions_of_nics_in_the_limits_are_refused_with_their_path() -> None:
    asked = joint(container(gpus=1, nics=1), hints={"rdma": {"vfSelector": {}}})

    with pytest.raises(InvalidField, match="vfSelector"):
        read_pod(asked, KUBELET)


def test_hints_and_partitions_count_without_a_joint_annotation() -> None:
    chosen = admit(node(HGX), joint(container(gpus=2), said=None, partition={}), KUBELET)
    nic = admit(
        node(HGX),
        joint(container(nics=1), said=None, hints={"rdma": {"selector": {"matchLabels": {"name": "mlx5_2"}}}}),
        KUBELET,
    )

    assert ("GPU-0", "GPU-1") == admitted(chosen)["main"].devices[GPU]
    assert {NIC: ("mlx5_2",)} == admitted(nic)["main"].devices


def test_a_container_without_gpus_gets_no_companions() -> None:
    got = admitted(admit(node(HGX), joint(container(gpus=1), container("side", cpus=1)), KUBELET))

    assert ("mlx5_0",) == got["main"].co_allocated
    assert "side" not in got or not got["side"].devices


def test_a_container_takes_over_what_comes_with_an_init_container() -> None:
    """The kubelet knows of its GPU alone, and takes that in any case."""
    got = admitted(admit(node(HGX), joint(container(gpus=2), init=(container("first", gpus=1),)), KUBELET))

    assert {*got["first"].devices[GPU]} <= {*got["main"].devices[GPU]}
    assert {*got["first"].co_allocated} <= {*got["main"].co_allocated}
    assert 2 == len(got["main"].co_allocated)


def test_a_static_policy_without_a_preference_takes_the_first_devices() -> None:
    """GPU 3 is taken over. The static policy of a DGX-1 prefers no set of three GPUs, so the kubelet adds the first ones."""
    rules = msgspec.structs.replace(KUBELET, policy=Policy.NONE, placement=Placement.STATIC_DGX1_VOLTA)
    init = (container("first", gpus=4, nics=1),)
    asked = joint(container("a", gpus=3, nics=1), container("b", gpus=3, nics=1), said=TOGETHER, init=init)
    got = admitted(admit(node(HGX), asked, rules))

    assert ("GPU-3", "GPU-4", "GPU-5") == got["b"].devices[GPU]


def test_a_prediction_says_that_it_stands_on_a_reservation() -> None:
    notes = admit(node(HGX), joint(container(gpus=1)), KUBELET).explanation.notes

    assert (BY_RESERVATION,) == notes
    assert () == admit(node(HGX), pod(container(gpus=1)), KUBELET).explanation.notes


def test_amounts_alone_do_not_decide_on_devices_chosen_together() -> None:
    assert need_of(HGX, read_pod(joint(container(gpus=1)), KUBELET)) is None
    assert need_of(HGX, read_pod(pod(container(gpus=1)), KUBELET)) is not None


places = st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 1))
"""NUMA node, root complex on it, switch below that."""


@given(
    st.lists(places, min_size=1, max_size=5),
    st.lists(places, min_size=1, max_size=5),
    st.sets(st.integers(0, 9), max_size=4),
    st.integers(1, 3),
    st.integers(0, 2),
    st.sampled_from([Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE, Policy.NONE, Policy.BEST_EFFORT]),
)
def test_what_is_chosen_is_what_a_naive_search_finds(
    gpus: list[tuple[int, int, int]],
    nics: list[tuple[int, int, int]],
    busy: set[int],
    count: int,
    limit: int,
    policy: Policy,
) -> None:
    """
    The kubelet takes just the GPUs and NICs that are chosen, each GPU has a NIC beside it, and a pod is refused only where
    no such set exists; under best-effort, which admits without alignment, a set may exist that is not found.
    """
    machine = built(gpus, nics)
    names = [*(gpu.id for gpu in machine.gpus), *(nic.id for nic in machine.nics)]
    state = held(node(machine), *(names[each] for each in busy if each < len(names)))
    rules = msgspec.structs.replace(KUBELET, policy=policy)
    asked = joint(container(gpus=count, nics=limit))
    plain = admit(state, msgspec.structs.replace(asked, annotations={}), rules)
    decision = admit(state, asked, rules)
    if not isinstance(plain, Admission):
        assert refused(plain).code == refused(decision).code
        return
    affinity = plain.allocations[0].affinity
    exist = any(True for _ in naive(state, asked, rules, affinity, count, limit))
    if not isinstance(decision, Admission):
        assert "DevicesDoNotFit" == refused(decision).code
        assert not exist or policy is Policy.BEST_EFFORT
        return
    got = admitted(decision)["main"]
    assert {*got.devices[GPU]} <= {*state.ownership.free(GPU)}
    assert {*got.devices[NIC]} <= {*state.ownership.free(NIC)}
    assert beside(machine, got.devices[GPU], got.devices[NIC])
    for resource, ids in got.from_kubelet.items():
        assert {*ids} == {*followed(state, asked, rules, resource, affinity, ids)}
    assert limit == len(got.from_kubelet.get(NIC, ()))


def followed(
    state: NodeState,
    asked: PodRequest,
    rules: AdmissionRules,
    resource: ResourceName,
    affinity: tuple[int, ...] | None,
    preferred: Collection[DeviceID],
) -> tuple[DeviceID, ...]:
    """What the kubelet takes if its plugin prefers these."""
    (demand,) = read_pod(msgspec.structs.replace(asked, annotations={}), rules).containers
    choice = choose_for_container(state, demand, resource, None if affinity is None else node_mask(affinity))
    return choice.complete(preferred)


def naive(
    state: NodeState,
    asked: PodRequest,
    rules: AdmissionRules,
    affinity: tuple[int, ...] | None,
    count: int,
    limit: int,
) -> Iterator[tuple[tuple[DeviceID, ...], tuple[DeviceID, ...]]]:
    """All sets of GPUs that the kubelet may take and of NICs, with each GPU beside a NIC and each NIC beside a GPU."""
    machine, places = state.hardware, locate_devices(state.hardware)
    near = {nic for nic in state.ownership.free(NIC) if affinity is None or places[nic].node in affinity}
    for chosen in combinations(state.ownership.free(GPU), count):
        if {*chosen} != {*followed(state, asked, rules, GPU, affinity, chosen)}:
            continue
        for size in range(max(1, limit), len(near) + 1):
            for nics in combinations(sorted(near), size):
                of_kubelet = not limit or any(
                    {*some} == {*followed(state, asked, rules, NIC, affinity, some)}
                    for some in combinations(nics, limit)
                )
                if beside(machine, chosen, nics) and of_kubelet:
                    yield chosen, nics


def beside(machine: Topology, gpus: Collection[DeviceID], nics: Collection[DeviceID]) -> bool:
    """Whether both are on the same switches, or else on the same root complexes."""
    places = locate_devices(machine)
    return {places[gpu].switch for gpu in gpus} == {places[nic].switch for nic in nics} or (
        {places[gpu].pcie for gpu in gpus} == {places[nic].pcie for nic in nics}
    )


def built(gpus: list[tuple[int, int, int]], nics: list[tuple[int, int, int]]) -> Topology:
    """A machine of two NUMA nodes, each with two root complexes of two switches, and these devices below them."""
    roots = [PciBridge(address=f"pci000{node}:{root}0") for node in (0, 1) for root in (0, 1)]
    switches = [
        PciBridge(address=f"{root.address[3:]}:0{switch}.0", parent=root.address) for root in roots for switch in (0, 1)
    ]

    def above(place: tuple[int, int, int]) -> str:
        return switches[place[0] * 4 + place[1] * 2 + place[2]].address

    return Topology(
        nodes=tuple(NumaNode(id=each, memory=1 << 30) for each in (0, 1)),
        gpus=tuple(
            Gpu(id=DeviceID(f"GPU-{n}"), index=n, numa_affinity=(at[0],), bridge=above(at)) for n, at in enumerate(gpus)
        ),
        nics=tuple(
            Nic(id=DeviceID(f"mlx5_{n}"), index=n, numa_affinity=(at[0],), bridge=above(at))
            for n, at in enumerate(nics)
        ),
        bridges=(*roots, *switches),
    )

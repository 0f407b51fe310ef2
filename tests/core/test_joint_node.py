"""Joint allocation on nodes as topoalign knows them: where devices sit, what is in use, and what a container gets."""

import json
from collections.abc import Mapping

import msgspec
import pytest
from decision_support import NODE, node

from topoalign.core.deviceshare.candidates import JointRequest
from topoalign.core.deviceshare.demand import container_demand, is_joint, read_demand
from topoalign.core.deviceshare.inventory import HOPPER_TABLE, DeviceLocation
from topoalign.core.deviceshare.joint_allocation import allocate_all_types
from topoalign.core.deviceshare.joint_refusals import DevicesDoNotFit
from topoalign.core.deviceshare.koordinator_names import (
    HINT_ANNOTATION,
    JOINT_ANNOTATION,
    PARTITION_ANNOTATION,
    DeviceType,
)
from topoalign.core.deviceshare.node_devices import ContainerDevices, put_demand_to_node
from topoalign.core.deviceshare.node_devices import joint_devices as devices_of
from topoalign.core.deviceshare.node_inventory import NOTHING, LeftOver, inventory_of, locate_devices
from topoalign.core.model.errors import InvalidField
from topoalign.core.model.events import Allocation, AllocationGranted
from topoalign.core.model.ids import GPU, NIC, AllocationID, DeviceID, ResourceName
from topoalign.core.model.topology.bitmask import node_mask
from topoalign.core.model.topology.device_links import PcieClass
from topoalign.core.model.topology.device_offers import Offer
from topoalign.core.model.topology.model import NicPort, Topology, VirtualFunction
from topoalign.core.model.topology.queries import pcie_class
from topoalign.core.state.fold import NodeState
from topoalign.machines import catalogue
from topoalign.machines.nvidia_smi_print import print_matrix
from topoalign.tools.conformance.koordinator_numa_hints import NumaHint, numa_hints
from topoalign.tools.machine_formats.nvidia_smi import read_pasted_matrix

SAME_PCIE = {JOINT_ANNOTATION: json.dumps({"deviceTypes": ["gpu", "rdma"], "requiredScope": "SamePCIe"})}
TOGETHER = {JOINT_ANNOTATION: json.dumps({"deviceTypes": ["gpu", "rdma"]})}
ONE_EACH = {GPU: 1, NIC: 1}


def holding(state: NodeState, *devices: str) -> NodeState:
    gpus = tuple(DeviceID(each) for each in devices if each.startswith("GPU"))
    nics = tuple(DeviceID(each) for each in devices if not each.startswith("GPU"))
    held = Allocation(id=AllocationID("held"), devices={GPU: gpus, NIC: nics})
    return state.apply(AllocationGranted(node=NODE, epoch=0, seq=state.seq + 1, allocation=held))


def joint_devices(
    state: NodeState,
    annotations: Mapping[str, str],
    requests: Mapping[ResourceName, int],
    affinity: int | None,
    *,
    spill: bool = False,
    compat: bool = False,
    left: LeftOver = NOTHING,
) -> ContainerDevices:
    demand = container_demand(annotations, requests, compat=compat)
    return devices_of(put_demand_to_node(state, demand, left), affinity, spill=spill)


@pytest.mark.parametrize("name", catalogue.names())
def test_places_agree_with_the_pcie_class_of_every_pair_of_devices(name: str) -> None:
    """The same switch is PIX or PXB, the same root complex is PHB or nearer."""
    topology = catalogue.machine(name)
    check_places(topology)


@pytest.mark.parametrize("name", [name for name in catalogue.names() if catalogue.machine(name).links])
def test_a_pasted_matrix_has_no_bridges_and_its_links_say_the_same(name: str) -> None:
    topology = read_pasted_matrix(print_matrix(catalogue.machine(name)))

    assert () == topology.bridges
    check_places(topology)


def check_places(topology: Topology) -> None:
    places = locate_devices(topology)
    devices = [*topology.gpu_by_id, *topology.nic_by_id]
    for a in devices:
        for b in devices:
            link = topology.link_by_pair.get((a, b))
            if link is None or link.pcie is None:
                continue
            near = pcie_class(topology, a, b)
            assert (near in (PcieClass.PSB, PcieClass.PIX, PcieClass.PXB)) == (places[a].switch == places[b].switch)
            assert (near not in (PcieClass.NODE, PcieClass.SYS)) == (places[a].pcie == places[b].pcie)


def test_a_device_of_which_nothing_is_known_has_no_place() -> None:
    topology = Topology(gpus=catalogue.machine("hgx-h100").gpus[:1])
    lost = msgspec.structs.replace(topology.gpus[0], bridge=None, numa_affinity=())
    near = msgspec.structs.replace(lost, numa_affinity=(1,))

    assert {} == locate_devices(Topology(gpus=(lost,)))
    assert {lost.id: DeviceLocation(1)} == locate_devices(Topology(gpus=(near,)))


def test_a_container_gets_gpus_with_the_nics_beside_them() -> None:
    state = holding(node(catalogue.machine("hgx-h100")), "GPU-0", "mlx5_1")

    got = joint_devices(state, SAME_PCIE, {GPU: 2, NIC: 2, ResourceName("cpu"): 4000}, None)

    assert {GPU: ("GPU-2", "GPU-3"), NIC: ("mlx5_2", "mlx5_3")} == got.devices
    assert {} == got.functions


def test_devices_stay_within_the_affinity_unless_they_may_spill() -> None:
    """Devices stay on the NUMA nodes of the affinity unless they may spill."""
    state = node(catalogue.machine("hgx-h100"))

    assert ("GPU-4",) == joint_devices(state, SAME_PCIE, ONE_EACH, node_mask([1])).devices[GPU]
    with pytest.raises(DevicesDoNotFit, match="Insufficient GPU Devices"):
        joint_devices(state, TOGETHER, {GPU: 5, NIC: 1}, node_mask([1]))
    assert 5 == len(joint_devices(state, TOGETHER, {GPU: 5, NIC: 1}, node_mask([1]), spill=True).devices[GPU])


def test_held_devices_are_not_given_except_those_of_an_init_container() -> None:
    """What an allocation holds is not given, except for what an init container left."""
    state = holding(node(catalogue.machine("two-socket-8xpcie")), *(f"GPU-{i}" for i in range(8)))

    with pytest.raises(DevicesDoNotFit):
        joint_devices(state, TOGETHER, {GPU: 1}, None)
    assert {GPU: ("GPU-3",)} == joint_devices(
        state, TOGETHER, {GPU: 1}, None, left=LeftOver([DeviceID("GPU-3")])
    ).devices


@pytest.mark.parametrize("name", ["two-socket-8xpcie", "hgx-h100"])
def test_what_an_init_container_left_is_taken_before_equally_near_ones(name: str) -> None:
    """
    What an init container left is taken before other devices that are as near. This holds for the topology tree and for
    the partitions that a machine with Hopper GPUs has.
    """
    state = holding(node(catalogue.machine(name)), "GPU-5", "GPU-0", "GPU-1", "mlx5_1")
    left = LeftOver([DeviceID("GPU-5"), DeviceID("mlx5_1")])

    assert {GPU: ("GPU-5",), NIC: ("mlx5_1",)} == joint_devices(
        state, {HINT_ANNOTATION: "{}"}, ONE_EACH, None, left=left
    ).devices
    assert ("GPU-4", "GPU-5") == joint_devices(state, TOGETHER, {GPU: 2}, None, left=left).devices[GPU]


def test_a_search_for_pairs_first_takes_what_an_init_container_left() -> None:
    """Where pairs are searched, what an init container left is taken first."""
    state = node(catalogue.machine("hgx-h100"))

    got = joint_devices(state, SAME_PCIE, ONE_EACH, None, left=LeftOver([DeviceID("GPU-6")]))

    assert {GPU: ("GPU-6",), NIC: ("mlx5_6",)} == got.devices
    three = joint_devices(state, SAME_PCIE, {GPU: 3, NIC: 3}, None, left=LeftOver([DeviceID("GPU-7")])).devices[GPU]
    assert ("GPU-4", "GPU-5", "GPU-7") == three


def test_a_device_that_is_not_healthy_is_not_given() -> None:
    state = node(catalogue.machine("hgx-h100"), unhealthy=["GPU-0", "mlx5_1"])

    assert {GPU: ("GPU-2",), NIC: ("mlx5_2",)} == joint_devices(state, SAME_PCIE, ONE_EACH, None).devices


def test_a_virtual_function_is_named_with_the_nic_it_is_of() -> None:
    topology = catalogue.machine("hgx-h100")
    functions = tuple(VirtualFunction(pci=f"0000:ff:00.{i}") for i in (3, 2))
    nics = tuple(
        msgspec.structs.replace(nic, virtual_functions=functions if nic.index == 4 else ()) for nic in topology.nics
    )
    state = node(msgspec.structs.replace(topology, nics=nics))
    hints = {HINT_ANNOTATION: json.dumps({"rdma": {"vfSelector": {}}})}

    got = joint_devices(state, {**SAME_PCIE, **hints}, ONE_EACH, None)

    assert ("GPU-4",) == got.devices[GPU]
    assert {nics[4].id: ("0000:ff:00.2",)} == got.functions


def test_gpus_that_are_offered_in_shares_are_left_out_of_joint_allocation() -> None:
    """Nothing tells their NUMA node under the resource of whole GPUs; the pod still gets one of those that are whole."""
    topology = catalogue.machine("hgx-h100")
    shared, *whole = topology.gpu_by_id
    offers = (
        Offer(resource=ResourceName("nvidia.com/gpu.shared"), devices=(shared,), replicas=2),
        Offer(resource=GPU, devices=tuple(whole)),
        Offer(resource=NIC, devices=tuple(topology.nic_by_id)),
    )

    got = joint_devices(node(msgspec.structs.replace(topology, offers=offers)), SAME_PCIE, ONE_EACH, None)

    assert {GPU: ("GPU-1",), NIC: ("mlx5_1",)} == got.devices


def test_selectors_choose_by_model_link_layer_and_state() -> None:
    topology = catalogue.machine("hgx-h100")
    nics = tuple(
        msgspec.structs.replace(
            nic,
            ports=(
                NicPort(number=1, link_layer="InfiniBand" if nic.index > 1 else "Ethernet", state="ACTIVE"),
                NicPort(number=2, state="DOWN"),
            ),
        )
        for nic in topology.nics
    )
    state = node(msgspec.structs.replace(topology, nics=nics))
    wanted = {"matchLabels": {"linkLayer": "InfiniBand", "state": "ACTIVE"}}
    hints = {HINT_ANNOTATION: json.dumps({"rdma": {"selector": wanted}})}

    assert {NIC: (nics[2].id,)} == joint_devices(state, hints, {NIC: 1}, None).devices
    labels = inventory_of(state).by_type[DeviceType.GPU][0].labels
    assert " " not in labels["model"]
    assert "H100" in labels["model"]


def test_hopper_gpus_behind_nvswitches_have_koordinators_partitions() -> None:
    state = node(catalogue.machine("hgx-h100"))
    spec = {PARTITION_ANNOTATION: "{}"}

    assert HOPPER_TABLE == inventory_of(state).table
    assert {GPU: ("GPU-0", "GPU-1")} == joint_devices(state, spec, {GPU: 2}, None).devices
    with pytest.raises(DevicesDoNotFit, match="Unsupported number"):
        joint_devices(state, spec, {GPU: 3}, None)
    with pytest.raises(DevicesDoNotFit, match="missing GPU Partition Table"):
        joint_devices(node(catalogue.machine("dgx1-volta")), spec, {GPU: 2}, None)


def test_partitions_are_kept_where_same_pcie_is_asked_too() -> None:
    """NICs 0 and 1 are held, so the next partition goes to the pair beside NICs 2 and 3."""
    state = holding(node(catalogue.machine("hgx-h100")), "mlx5_1")
    spec = {PARTITION_ANNOTATION: "{}", **SAME_PCIE}

    assert {GPU: ("GPU-2", "GPU-3"), NIC: ("mlx5_2", "mlx5_3")} == joint_devices(
        state, spec, {GPU: 2, NIC: 1}, None
    ).devices


def test_nics_asked_for_in_two_ways_are_refused() -> None:
    with pytest.raises(InvalidField, match=r"koordinator\.sh/rdma"):
        joint_devices(
            node(catalogue.machine("hgx-h100")), TOGETHER, {**ONE_EACH, ResourceName("koordinator.sh/rdma"): 1}, None
        )


def test_a_container_that_asks_for_no_device_gets_none() -> None:
    assert {} == joint_devices(node(catalogue.machine("hgx-h100")), TOGETHER, {ResourceName("cpu"): 1}, None).devices


def test_only_pods_with_one_of_the_annotations_are_decided_jointly() -> None:
    assert is_joint(TOGETHER)
    assert not is_joint({"example.com/else": "{}"})


def test_numa_hints_are_the_sets_of_nodes_on_which_all_types_can_be_had() -> None:
    """On one node there are four GPUs, so five need both."""
    state = node(catalogue.machine("hgx-h100"))

    def hints(gpus: int) -> object:
        demand = read_demand(SAME_PCIE, {"nvidia.com/gpu": gpus, "koordinator.sh/rdma": 100})
        return numa_hints(JointRequest(demand=demand, inventory=inventory_of(state)))

    narrow = [NumaHint((0,), True, 500), NumaHint((1,), True, 0), NumaHint((0, 1), False, 500)]
    assert {DeviceType.GPU: narrow, DeviceType.RDMA: narrow} == hints(4)
    wide = [NumaHint((0, 1), True, 500)]
    assert {DeviceType.GPU: wide, DeviceType.RDMA: wide} == hints(5)


@pytest.mark.parametrize("name", [name for name in catalogue.names() if catalogue.machine(name).gpus])
def test_same_pcie_on_machines_as_they_are_sold(name: str) -> None:
    """Each GPU of what is given shares a switch or at least the root complex with one of the NICs."""
    topology = catalogue.machine(name)
    state = node(topology)
    for gpus in range(1, len(topology.gpus) + 1):
        try:
            got = joint_devices(state, SAME_PCIE, {GPU: gpus, NIC: 1}, None).devices
        except DevicesDoNotFit:
            continue
        far = (PcieClass.NODE, PcieClass.SYS)
        assert gpus == len(got[GPU])
        assert all(any(pcie_class(topology, gpu, nic) not in far for nic in got[NIC]) for gpu in got[GPU])


def test_koordinators_answers_are_to_be_had_on_a_node_of_ours() -> None:
    """Its GPUs are chosen without a look at the NICs."""
    state = holding(node(catalogue.machine("epyc-nps4-4gpu")), "GPU-0")
    asked = {GPU: 1, NIC: 1}

    with pytest.raises(DevicesDoNotFit, match="Joint-Allocate rules violation"):
        joint_devices(state, SAME_PCIE, asked, None, compat=True)
    assert {GPU: ("GPU-2",), NIC: ("mlx5_1",)} == joint_devices(state, SAME_PCIE, asked, None).devices


def test_a_demand_of_nothing_is_answered_with_nothing() -> None:
    state = node(catalogue.machine("hgx-h100"))

    assert {} == allocate_all_types(JointRequest(demand=read_demand({}, {}), inventory=inventory_of(state)))

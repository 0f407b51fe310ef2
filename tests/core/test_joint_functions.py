"""Virtual functions: NICs that several pods share, and never one function twice."""

import json

import msgspec
import pytest
from decision_support import NODE, admitted, container, node, pod, refused
from hypothesis import given, settings
from hypothesis import strategies as st

from topoalign.core.admission.admit import admit
from topoalign.core.deviceshare.koordinator_names import HINT_ANNOTATION, JOINT_ANNOTATION
from topoalign.core.hints.reuse import reusable_devices, reusable_functions
from topoalign.core.model.decisions import Admission
from topoalign.core.model.events import Allocation, AllocationGranted, AllocationReleased, Event
from topoalign.core.model.ids import GPU, NIC, AllocationID, DeviceID, ResourceName
from topoalign.core.model.requests import AdmissionRules, ContainerRequest, PodRequest, Policy
from topoalign.core.model.topology.model import Topology, VirtualFunction
from topoalign.core.state.fold import NodeState, replay
from topoalign.machines import catalogue

BEST = AdmissionRules()
RESTRICTED = AdmissionRules(policy=Policy.RESTRICTED)
UNALIGNED = AdmissionRules(policy=Policy.NONE)


def sriov(name: str = "two-socket-8xpcie", functions: int = 2) -> Topology:
    """The machine with so many virtual functions on each NIC."""
    topology = catalogue.machine(name)
    nics = tuple(
        msgspec.structs.replace(
            nic,
            virtual_functions=tuple(VirtualFunction(pci=f"{nic.id}.{i + 1}") for i in range(functions)),
        )
        for nic in topology.nics
    )
    return msgspec.structs.replace(topology, nics=nics)


def by_function(
    *containers: ContainerRequest, name: str = "pod-1", init: tuple[ContainerRequest, ...] = (), **hint: object
) -> PodRequest:
    said = {
        JOINT_ANNOTATION: json.dumps({"deviceTypes": ["gpu", "rdma"]}),
        HINT_ANNOTATION: json.dumps({"rdma": {"vfSelector": {}, **hint}}),
    }
    return pod(*containers, name=name, init=init, annotations=said)


def held(state: NodeState, asked: PodRequest, rules: AdmissionRules = BEST) -> tuple[NodeState, dict[str, Allocation]]:
    got = admitted(admit(state, asked, rules))
    for each in got.values():
        state = state.holding(each)
    return state, got


def test_two_pods_share_a_nic_by_its_functions_and_a_third_does_not() -> None:
    """Two pods share a NIC by its functions, and a third gets the next NIC."""
    state = node(sriov())
    functions = []
    for i in range(3):
        state, got = held(state, by_function(container(gpus=1, nics=1), name=f"p{i}"), RESTRICTED)
        functions.append(got["main"].virtual_functions)

    assert [{"mlx5_0": ("mlx5_0.1",)}, {"mlx5_0": ("mlx5_0.2",)}, {"mlx5_1": ("mlx5_1.1",)}] == functions


def test_a_nic_with_a_function_in_use_is_given_to_nobody_as_a_whole() -> None:
    state, _ = held(node(sriov()), by_function(container(nics=1)))

    assert ("mlx5_1",) == tuple(state.ownership.free(NIC))
    assert frozenset() == state.ownership.held_whole
    assert {"mlx5_0"} == state.ownership.holders.keys()
    together = msgspec.structs.replace(by_function(container(nics=1), name="c"), annotations={JOINT_ANNOTATION: "{}"})
    for asked in (
        together,
        pod(container(nics=1), name="plain"),
        by_function(container(others={"koordinator.sh/rdma": 50}), name="b"),
    ):
        after, got = held(state, asked)
        assert ({NIC: ("mlx5_1",)}, {}) == (got["main"].devices, got["main"].virtual_functions)
        assert () == tuple(after.ownership.free(NIC))
        refused(admit(after, msgspec.structs.replace(asked, name="again"), BEST))


def test_a_nic_that_is_held_as_a_whole_has_no_function_to_give() -> None:
    state, _ = held(node(sriov()), pod(container(nics=1), name="whole"))

    _, got = held(state, by_function(container(nics=1)))

    assert {"mlx5_1": ("mlx5_1.1",)} == got["main"].virtual_functions


def test_two_nics_by_functions_are_functions_of_two_nics() -> None:
    _, got = held(node(sriov()), by_function(container(nics=2)))
    assert {"mlx5_0": ("mlx5_0.1",), "mlx5_1": ("mlx5_1.1",)} == got["main"].virtual_functions

    _, got = held(node(sriov()), by_function(container(nics=1), allocateStrategy="ApplyForAll"), UNALIGNED)
    assert {"mlx5_0", "mlx5_1"} == got["main"].virtual_functions.keys()

    _, got = held(node(sriov()), by_function(container(nics=1), exclusivePolicy="DeviceLevel"))
    assert ({NIC: ("mlx5_0",)}, {}) == (got["main"].devices, got["main"].virtual_functions)


def test_without_functions_on_the_node_none_are_given() -> None:
    refusal = refused(admit(node(catalogue.machine("two-socket-8xpcie")), by_function(container(nics=1)), BEST))

    assert "Insufficient rdma VirtualFunctions" == refusal.finding


def test_the_function_of_an_init_container_is_used_again() -> None:
    state, _ = held(node(sriov()), by_function(container(nics=1), name="other"))

    state, got = held(
        state, by_function(container(nics=1), container("second", nics=1), init=(container("i", nics=1),))
    )

    assert ("mlx5_0.2",) == got["i"].virtual_functions[DeviceID("mlx5_0")]
    assert got["i"].virtual_functions == got["main"].virtual_functions
    assert {"mlx5_1": ("mlx5_1.1",)} == got["second"].virtual_functions


def test_a_nic_of_which_an_init_container_had_a_function_is_not_left_whole() -> None:
    _, got = held(node(sriov()), by_function(container(gpus=1), init=(container("i", gpus=1, nics=1),)))
    init = [each for name, each in got.items() if name == "i"]

    assert frozenset() == reusable_devices(init, NIC)
    assert {"mlx5_0.1"} == reusable_functions(init)
    assert {"GPU-0"} == reusable_devices(init, GPU)


def test_a_nic_that_an_init_container_had_whole_is_shared_with_nobody_else() -> None:
    """The pod holds it as long as it lives, though its other container has but a function of it."""
    first = by_function(container(nics=1), init=(container("i", others={"koordinator.sh/rdma": 100}),))
    state, got = held(node(sriov()), first)
    _, others = held(state, by_function(container(nics=1), name="other"))

    assert {"mlx5_0": ("mlx5_0.1",)} == got["main"].virtual_functions
    assert {"mlx5_1"} == others["main"].virtual_functions.keys()


@pytest.mark.parametrize(
    "functions", [{"mlx5_9": ["0000:01:00.1"]}, {"mlx5_0": []}, {"mlx5_0": ["0000:01:00.1"], "GPU-7": ["x"]}]
)
def test_functions_of_nics_that_are_not_held_are_no_allocation(functions: dict[str, list[str]]) -> None:
    body = {"id": "a", "devices": {NIC: ["mlx5_0"]}, "virtual_functions": functions}

    with pytest.raises(msgspec.ValidationError, match="virtual functions"):
        msgspec.convert(body, Allocation)


def test_functions_go_over_the_wire_and_are_left_out_where_there_are_none() -> None:
    _, got = held(node(sriov()), by_function(container(gpus=1, nics=1)))
    text = msgspec.json.encode(got["main"])

    assert got["main"] == msgspec.json.decode(text, type=Allocation)
    assert b'"virtual_functions":{"mlx5_0":["mlx5_0.1"]}' in text
    plain = Allocation(id=AllocationID("a"), devices={NIC: (DeviceID("mlx5_0"),)})
    assert b"virtual" not in msgspec.json.encode(plain)


asked = st.one_of(
    st.builds(lambda g, n: by_function(container(gpus=g, nics=n)), st.integers(0, 2), st.integers(1, 2)),
    st.builds(lambda n: by_function(container(nics=n), init=(container("i", nics=1),)), st.integers(1, 2)),
    st.builds(lambda g, n: pod(container(gpus=g, nics=n)), st.integers(1, 2), st.integers(0, 1)),
    st.builds(
        lambda units: by_function(container(others={"koordinator.sh/rdma": units})), st.sampled_from([1, 2, 100, 200])
    ),
)


@settings(max_examples=80)
@given(st.lists(asked | st.integers(0, 9), max_size=14), st.sampled_from(["hgx-h100", "two-socket-8xpcie"]))
def test_no_function_is_given_twice_and_no_whole_nic_is_shared(steps: list[PodRequest | int], machine: str) -> None:
    """
    No function is given twice, and no NIC that is held whole is shared. Pods come and go (a number ends the pod of that
    place); folding the facts anew comes to the same node.
    """
    start = state = node(sriov(machine))
    facts: list[Event] = []
    for number, step in enumerate(steps):
        live = sorted({each.owner.pod for each in state.allocations.values() if each.owner is not None})
        if isinstance(step, int):
            gone = [
                a.id for a in state.allocations.values() if a.owner is not None and a.owner.pod in live[step : step + 1]
            ]
            new: list[Event] = [
                AllocationReleased(node=NODE, epoch=0, seq=state.seq + 1 + i, allocation=name, reason="released")
                for i, name in enumerate(gone)
            ]
        else:
            decision = admit(state, msgspec.structs.replace(step, name=f"p{number}"), RESTRICTED)
            got = decision.allocations if isinstance(decision, Admission) else ()
            new = [
                AllocationGranted(node=NODE, epoch=0, seq=state.seq + 1 + i, allocation=each)
                for i, each in enumerate(got)
            ]
        for fact in new:
            state = state.apply(fact)
        facts += new
        check(state)

    again = replay(NODE, facts)
    assert again.digest == state.digest
    assert state.ownership.functions_in_use == again.ownership.functions_in_use
    assert start.digest == NodeState(node=NODE).digest


def check(state: NodeState) -> None:
    """By who holds what, pod by pod: a pod's containers may have taken over from one another."""
    whole: dict[DeviceID, set[str]] = {}
    parts: dict[str, set[str]] = {}
    sharing: dict[DeviceID, set[str]] = {}
    for each in state.allocations.values():
        assert each.owner is not None
        for device in each.device_ids:
            (sharing if device in each.virtual_functions else whole).setdefault(device, set()).add(each.owner.pod)
        for address in each.function_addresses:
            parts.setdefault(address, set()).add(each.owner.pod)
    assert all(len(pods) == 1 for pods in (*whole.values(), *parts.values()))
    assert all(sharing.get(device, set()) <= pods for device, pods in whole.items())
    assert {*state.ownership.free(NIC)}.isdisjoint({*whole, *sharing})
    assert {*state.ownership.free(GPU)}.isdisjoint(whole)
    assert {*state.ownership.free(ResourceName(NIC)), *whole, *sharing} >= state.hardware.nic_by_id.keys()

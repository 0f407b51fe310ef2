"""The differences between mode `kubelet` and mode `best`, each by the example that docs/modes.md tells."""

import msgspec
import pytest
from decision_support import GIB, container, granted, machine, node, pod
from slot_support import in_slots

from topoalign.core.admission.admit import admit
from topoalign.core.model.decisions import Admission, Decision
from topoalign.core.model.ids import GPU, ContainerName, ResourceName
from topoalign.core.model.requests import AdmissionRules, ContainerRequest, Mode, PodRequest, Policy
from topoalign.core.model.topology.model import NumaNode, Topology
from topoalign.core.state.fold import NodeState


def told(decision: Decision) -> str:
    """`refused by NotAligned`, or what each container got: NUMA nodes, devices, CPUs, memory."""
    if not isinstance(decision, Admission):
        return f"refused by {decision.code}"
    return "; ".join(
        " ".join(
            [
                "any" if each.affinity is None else ",".join(map(str, each.affinity)),
                *(device for devices in each.devices.values() for device in devices),
                *([f"cpus {each.cpus}"] if each.cpus else []),
                *(f"memory of {','.join(map(str, block.nodes))}" for block in each.memory),
            ]
        )
        for each in decision.allocations
    )


def half_taken() -> NodeState:
    """Two GPUs on each of two NUMA nodes, one of each in use."""
    state = node(machine())
    for number in range(2):
        first = pod(container(gpus=1, cpus=8), name=f"earlier-{number}")
        state = granted(state, admit(state, first, AdmissionRules(policy=Policy.SINGLE_NUMA_NODE)))
    return state


def mostly_full() -> NodeState:
    """Node 0 has the CPUs and 4 GiB left, node 1 is the memory of a GPU: 64 GiB without CPUs."""
    one = machine(nodes=1, gpus=(0,), nics=(), bare_nodes=1)
    state = node(msgspec.structs.replace(one, nodes=tuple(NumaNode(id=i, memory=64 * GIB) for i in range(2))))
    return granted(state, admit(state, pod(container(cpus=1, gib=60), name="earlier"), AdmissionRules()))


def with_neighbours() -> Topology:
    """Four NUMA nodes with a GPU each, 0 beside 3."""
    near = {frozenset((0, 3))}
    rows = tuple(tuple(10 if a == b else 12 if frozenset((a, b)) in near else 32 for b in range(4)) for a in range(4))
    return msgspec.structs.replace(machine(nodes=4, gpus=(0, 1, 2, 3), nics=()), distances=rows)


def sized(plain: Topology) -> Topology:
    return msgspec.structs.replace(
        plain, gpus=tuple(msgspec.structs.replace(gpu, memory=16 * GIB) for gpu in plain.gpus)
    )


ODD = ResourceName("example.com/none")


@pytest.mark.parametrize(
    ("state", "asked", "policy", "kubelet", "best"),
    [
        pytest.param(
            half_taken(),
            pod(container(gpus=2)),
            "restricted",
            "refused by NotAligned",
            "0,1 GPU-1 GPU-3",
            id="preferred by what is free now",
        ),
        pytest.param(
            node(machine()),
            pod(container(gpus=1, cpus=12, gib=1)),
            "restricted",
            "refused by NotAligned",
            "0,1 GPU-0 cpus 0-5,8-13 memory of 0",
            id="room for all, not the same preference of all",
        ),
        pytest.param(
            node(machine()),
            pod(container(gpus=1, cpus=1, gib=200)),
            "restricted",
            "refused by MemoryNotExtendable",
            "refused by NotEnoughMemory",
            id="memory that fits nowhere",
        ),
        pytest.param(
            mostly_full(),
            pod(container(cpus=1, gib=10)),
            "none",
            "any cpus 4 memory of 1",
            "refused by NotEnoughMemory",
            id="memory of a node without CPUs",
        ),
        pytest.param(
            node(machine(), unhealthy=("GPU-0", "GPU-1", "GPU-2", "GPU-3")),
            pod(ContainerRequest(name=ContainerName("main"), requests={GPU: 0}, limits={GPU: 0})),
            "none",
            "refused by NoHealthyDevice",
            "any",
            id="a limit of 0",
        ),
        pytest.param(
            node(with_neighbours()),
            pod(container(gpus=2)),
            "restricted",
            "0,1 GPU-0 GPU-1",
            "0,3 GPU-0 GPU-3",
            id="distance",
        ),
        pytest.param(
            node(machine(gpus=(0, 1))),
            pod(container(gpus=2, cpus=2, gib=4)),
            "best-effort",
            "0,1 GPU-0 GPU-1 cpus 0,8 memory of 0,1",
            "0,1 GPU-0 GPU-1 cpus 0,8 memory of 0",
            id="memory on no more nodes than it needs",
        ),
        pytest.param(
            node(machine()),
            pod(container(gpus=1, cpus=2)),
            "restricted",
            "0 GPU-0",
            "0 GPU-0 cpus 0,8",
            id="CPUs of its own for a pod that is not Guaranteed",
        ),
        pytest.param(
            node(machine()),
            pod(container(others={ODD: 1})),
            "restricted",
            "0,1",
            "refused by UnknownResource",
            id="a resource that the node does not have",
        ),
        pytest.param(
            node(machine(nodes=9, gpus=(8,), nics=())),
            pod(container(gpus=1)),
            "restricted",
            "refused by TooManyNumaNodes",
            "8 GPU-0",
            id="more NUMA nodes than the kubelet allows",
        ),
        pytest.param(
            granted(node(machine()), admit(node(machine()), pod(container(gpus=2), name="earlier"), AdmissionRules())),
            pod(container(gpus=1, nics=1)),
            "none",
            "any GPU-2 mlx5_0",
            "any GPU-2 mlx5_1",
            id="NICs near the GPUs",
        ),
        pytest.param(
            node(in_slots(sized(machine()), 2)),
            pod(container(others={GPU: 3, "nvidia.com/gpumem": 1})),
            "single-numa-node",
            "any GPU-0::0 GPU-1::0 GPU-2::0",
            "refused by NotAligned",
            id="slots that are listed without NUMA nodes",
        ),
    ],
)
def test_the_modes_differ_as_the_page_tells(
    state: NodeState, asked: PodRequest, policy: str, kubelet: str, best: str
) -> None:
    rules = AdmissionRules(policy=Policy(policy))

    decisions = {
        mode: told(admit(state, asked, msgspec.structs.replace(rules, mode=mode))) for mode in (Mode.KUBELET, Mode.BEST)
    }

    assert {Mode.KUBELET: kubelet, Mode.BEST: best} == decisions

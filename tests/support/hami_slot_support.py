"""Nodes of five GPUs of three models in slots, for which pods choose GPUs by annotations."""

from collections.abc import Collection, Mapping, Sequence

import msgspec
from decision_support import machine, node
from hypothesis import strategies as st
from slot_support import MIB, PLAIN, holding, in_slots

from topoalign.core.model.ids import DeviceID
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.model.topology.device_links import Link
from topoalign.core.model.topology.device_offers import Slots
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import NodeState

POLICY, WEIGHTS, BIND = "hami.io/gpu-scheduler-policy", "hami.io/device-scoring-weights", "nvidia.com/numa-bind"
USE_TYPE, NO_TYPE = "nvidia.com/use-gputype", "nvidia.com/nouse-gputype"
USE_UUID, NO_UUID = "nvidia.com/use-gpuuuid", "nvidia.com/nouse-gpuuuid"
NODES = (0, 1, 0, 1, 1)
NAMES = (
    "NVIDIA A100-SXM4-40GB",
    "NVIDIA H100 80GB HBM3",
    "NVIDIA A100-SXM4-40GB",
    "NVIDIA H100 80GB HBM3",
    "NVIDIA L4",
)
SIZES = (32_768, 65_536, 32_768, 65_536, 16_384)
"""MiB."""
SLOTS = 4
NVLINKS = {(0, 2): 4, (1, 3): 2, (3, 4): 12, (0, 1): 1}
MIXED_NODES, MIXED_SIZES = (0, 0, 1, 1, None), (40_000, 80_000, 40_000, 80_000, 20_000)

CHOICES = {
    BIND: ("true", "false"),
    USE_TYPE: ("a100", "H100,L4", "nvidia"),
    NO_TYPE: ("l4", "80gb"),
    USE_UUID: ("GPU-0,GPU-2,GPU-3", "GPU-1", "GPU-4,GPU-9"),
    NO_UUID: ("GPU-0", "GPU-2,GPU-8"),
    WEIGHTS: ("slot=0,core=1,memory=0", "slot=1,core=1,memory=4", "slot=2,core=0,memory=1"),
}
"""Annotation -> texts by which a pod chooses GPUs."""

Used = Mapping[int, Sequence[tuple[int, int]]]
"""GPU's index -> cores and MiB of each container on it."""


def as_hami(rules: AdmissionRules) -> AdmissionRules:
    return msgspec.structs.replace(rules, compat="hami")


def of_three_models(nodes: Sequence[int | None], sizes: Sequence[int]) -> Topology:
    plain = machine(gpus=nodes)
    sized = [
        msgspec.structs.replace(gpu, name=name, memory=size * MIB)
        for gpu, name, size in zip(plain.gpus, NAMES, sizes, strict=True)
    ]
    return msgspec.structs.replace(plain, gpus=tuple(sized))


def mixed(slots: Slots = PLAIN) -> Topology:
    """Of the last GPU no NUMA node is known."""
    return in_slots(of_three_models(MIXED_NODES, MIXED_SIZES), SLOTS, scaling=slots)


def hardware(slots: Slots = PLAIN) -> Topology:
    """With NVLinks between some pairs; of amounts that single precision has exactly."""
    plain = of_three_models(NODES, SIZES)
    nvlinks = {(DeviceID(f"GPU-{a}"), DeviceID(f"GPU-{b}")): count for (a, b), count in NVLINKS.items()}
    links = [
        Link(a=each.a, b=each.b, pcie=each.pcie, fabric_links=nvlinks.get((each.a, each.b), 0)) for each in plain.links
    ]
    return in_slots(msgspec.structs.replace(plain, links=tuple(links)), SLOTS, scaling=slots)


def state_of(used: Used, topology: Topology | None = None) -> NodeState:
    held = ((gpu, cores, memory) for gpu, some in used.items() for cores, memory in some)
    return holding(node(topology or hardware()), *held)


@st.composite
def usage(
    draw: st.DrawFn,
    sizes: Sequence[int] = SIZES,
    cores: Sequence[int] = (0, 25, 50),
    memory: Sequence[int] = (1_024, 4_096, 8_192),
) -> Used:
    """What GPUs of these sizes have room for."""
    used: dict[int, list[tuple[int, int]]] = {}
    some = st.tuples(st.integers(0, 4), st.sampled_from(cores), st.sampled_from(memory))
    for gpu, *amounts in draw(st.lists(some, max_size=8)):
        held = [*used.get(gpu, ()), (amounts[0], amounts[1])]
        if len(held) <= SLOTS and sum(c for c, _ in held) <= 100 and sum(m for _, m in held) <= sizes[gpu]:
            used[gpu] = held
    return used


def annotations(policies: Sequence[str], weighed: Collection[str | None]) -> st.SearchStrategy[dict[str, str]]:
    """Annotations of a pod; weights only together with the policies that are `weighed`, None: without a policy."""
    texts = {POLICY: policies, **CHOICES}
    some = st.fixed_dictionaries({}, optional={key: st.sampled_from(each) for key, each in texts.items()})
    return some.map(
        lambda says: says if says.get(POLICY) in weighed else {key: says[key] for key in says if key != WEIGHTS}
    )

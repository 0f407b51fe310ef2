"""A machine in slots whose GPUs HAMi's rules choose, and what the reference of HAMi's decisions knows of it."""

from collections.abc import Mapping

import hami_reference as reference
import msgspec
from decision_support import machine, node
from hypothesis import strategies as st
from slot_choice_reference import BIND, NO_TYPE, NO_UUID, POLICY, USE_TYPE, USE_UUID, WEIGHTS, Used
from slot_support import MIB, PLAIN, holding, in_slots

from topoalign.core.model.ids import DeviceID
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.model.topology.device_links import Link
from topoalign.core.model.topology.device_offers import Slots
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import NodeState

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
WEIGHED = (None, "binpack", "spread", "topology-aware", "binpack,numa", "numa,spread", "mutex,topology-aware")
POLICIES = (*WEIGHED, "mutex", "numa", "numa,mutex", "topology-aware,binpack")

Asked = tuple[int, int, int, int]
"""GPUs, cores, MiB, percentage."""


def as_hami(rules: AdmissionRules) -> AdmissionRules:
    return msgspec.structs.replace(rules, compat="hami")


def hardware(slots: Slots = PLAIN) -> Topology:
    """Five GPUs of three models on two NUMA nodes, some pairs with NVLinks; of amounts that single precision has exactly."""
    plain = machine(gpus=NODES)
    sized = [
        msgspec.structs.replace(gpu, name=name, memory=size * MIB)
        for gpu, name, size in zip(plain.gpus, NAMES, SIZES, strict=True)
    ]
    nvlinks = {(DeviceID(f"GPU-{a}"), DeviceID(f"GPU-{b}")): count for (a, b), count in NVLINKS.items()}
    links = [
        Link(a=each.a, b=each.b, pcie=each.pcie, fabric_links=nvlinks.get((each.a, each.b), 0)) for each in plain.links
    ]
    return in_slots(msgspec.structs.replace(plain, gpus=tuple(sized), links=tuple(links)), SLOTS, scaling=slots)


def state_of(used: Used, topology: Topology | None = None) -> NodeState:
    held = ((gpu, cores, memory) for gpu, some in used.items() for cores, memory in some)
    return holding(node(topology or hardware()), *held)


def expected(used: Used, asked: list[Asked], says: Mapping[str, str]) -> list[set[int]] | None:
    """The GPUs of each of a pod's containers by HAMi's rules; None: it has none."""
    cards = [
        reference.Card(
            uuid=f"GPU-{at}",
            index=at,
            numa=NODES[at],
            type=NAMES[at],
            slots=SLOTS,
            used_slots=len(used.get(at, ())),
            memory=SIZES[at],
            used_memory=sum(memory for _, memory in used.get(at, ())),
            used_cores=sum(cores for cores, _ in used.get(at, ())),
        )
        for at in range(len(NODES))
    ]
    scores: dict[str, dict[str, int]] = {card.uuid: {} for card in cards}
    for a in range(len(NODES)):
        for b in range(len(NODES)):
            worth = (50 if NODES[a] == NODES[b] else 10) + 100 * NVLINKS.get((min(a, b), max(a, b)), 0)
            scores[f"GPU-{a}"] |= {f"GPU-{b}": worth} if a != b else {}
    requests = [
        [reference.Request(count=count, cores=cores, memory=memory, percent=101 if memory else percentage or 100)]
        for count, cores, memory, percentage in asked
    ]
    weights = [int(each.partition("=")[2]) for each in says.get(WEIGHTS, "slot=1,core=1,memory=1").split(",")]
    placed = reference.place(
        reference.Node(cards, scores=scores), list(requests), 0, says, (weights[0], weights[1], weights[2])
    )
    return None if isinstance(placed, str) else [{int(uuid[4:]) for uuid, _, _ in given} for given in placed[0]]


@st.composite
def annotations(draw: st.DrawFn) -> dict[str, str]:
    says: dict[str, str] = {}
    policy = draw(st.sampled_from(POLICIES))
    for key, values in (
        (POLICY, [policy]),
        (BIND, [None, None, "true", "false"]),
        (USE_TYPE, [None, None, None, "a100", "H100,L4", "nvidia"]),
        (NO_TYPE, [None, None, None, "l4", "80gb"]),
        (USE_UUID, [None, None, None, "GPU-0,GPU-2,GPU-3", "GPU-1", "GPU-4,GPU-9"]),
        (NO_UUID, [None, None, None, "GPU-0", "GPU-2,GPU-8"]),
    ):
        if (value := draw(st.sampled_from(values))) is not None:
            says[key] = value
    if policy in WEIGHED and draw(st.booleans()):
        says[WEIGHTS] = draw(
            st.sampled_from(["slot=0,core=1,memory=0", "slot=1,core=1,memory=4", "slot=2,core=0,memory=1"])
        )
    return says


@st.composite
def usage(draw: st.DrawFn) -> Used:
    used: dict[int, list[tuple[int, int]]] = {}
    some = st.tuples(st.integers(0, 4), st.sampled_from([0, 25, 50]), st.sampled_from([1_024, 4_096, 8_192]))
    for gpu, cores, memory in draw(st.lists(some, max_size=8)):
        held = [*used.get(gpu, ()), (cores, memory)]
        if len(held) <= SLOTS and sum(c for c, _ in held) <= 100 and sum(m for _, m in held) <= SIZES[gpu]:
            used[gpu] = held
    return used


asked = st.tuples(
    st.sampled_from([1, 1, 2, 3]),
    st.sampled_from([0, 25, 50, 100]),
    st.sampled_from([0, 0, 2_048, 16_384]),
    st.sampled_from([0, 25, 50]),
).filter(lambda each: any(each[1:]))

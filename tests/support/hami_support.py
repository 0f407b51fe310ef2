"""
Cards, requests and annotations drawn for tests of HAMi's decisions, shared GPUs by few words, and levels of the GPU tree as
NVML reports them, by chance.
"""

from typing import Any

import instance_support
import msgspec
from hami_reference import Card
from hypothesis import strategies as st

from topoalign.core.demand.shares import HamiRequest
from topoalign.core.model.byte_sizes import MIB
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.mig import MigPlacement
from topoalign.core.sharing.shared_gpus import SharedGpu

A100 = tuple(msgspec.structs.replace(each, memory=each.memory // 40) for each in instance_support.A100)
"""The profiles of an A100, with the memory of a card of 1024 MiB."""

POLICIES = (
    "spread", "binpack", "mutex", "numa", "topology-aware", "unknown", "", "binpack,numa", "numa,spread", "spread, numa",
    "mutex,topology-aware", "mutex,binpack", "numa,binpack,numa", "topology-aware,binpack", " mutex",
)  # fmt: skip
UUIDS = tuple("abcdef")


@st.composite
def cards(draw: st.DrawFn, most: int = 5, modes: tuple[str, ...] = ("", "hami-core", "mig")) -> list[Card]:
    """Cards of one node, of amounts that single precision keeps exactly, so that ties are ties."""
    indexes = draw(st.permutations(range(most)))
    return [card(draw, UUIDS[number], indexes[number], modes) for number in range(draw(st.integers(0, most)))]


def card(draw: st.DrawFn, uuid: str, index: int, modes: tuple[str, ...]) -> Card:
    """One card, often one that is empty."""
    mode = draw(st.sampled_from(modes))
    places = draw(st.sets(st.integers(0, 7), max_size=4)) if mode == "mig" else set()
    return Card(
        uuid=uuid,
        index=draw(st.sampled_from([0, index])),
        numa=draw(st.integers(0, 1)),
        type=draw(st.sampled_from(["NVIDIA", "NVIDIA", "NVIDIA A100", "NVIDIA-H100", "Ascend"])),
        mode=mode,
        healthy=draw(st.integers(0, 5)) > 0,
        slots=draw(st.sampled_from([0, 4, 4, 8])),
        used_slots=draw(st.sampled_from([0, 0, 0, 1, 2, 4, 5])),
        memory=draw(st.sampled_from([0, 512, 1024, 1024])),
        used_memory=128 * draw(st.sampled_from([0, 0, 1, 4, 8])),
        cores=draw(st.sampled_from([0, 4, 100, 100, 200])),
        used_cores=25 * draw(st.sampled_from([0, 0, 1, 3, 4])),
        profiles=draw(st.sampled_from([A100, A100[:1], ()])) if mode == "mig" else (),
        slices=frozenset(places),
    )


def request(count: int = 1, memory: int = 0, percent: int = 101, cores: int = 0, vendor: str = "NVIDIA") -> HamiRequest:
    return HamiRequest(count=count, vendor=vendor, memory=memory, percent=percent, cores=cores)


requests = st.builds(
    request,
    count=st.integers(1, 4),
    memory=st.sampled_from([0, 0, 128, 300, 1024, 2048]),
    percent=st.sampled_from([101, 101, 0, 25, 50, 100]),
    cores=st.sampled_from([0, 0, 25, 50, 100, 150]),
)

NAMES = ("", " ", ",", "a", "b,c", " a , d,", "A", "zzz")
NOTES = {
    "nvidia.com/use-gputype": ("", "a100", "H100,ascend", "nvidia", ",", "V100"),
    "nvidia.com/nouse-gputype": ("", "a100,", "V100", ","),
    "nvidia.com/use-gpuuuid": NAMES,
    "nvidia.com/nouse-gpuuuid": NAMES,
    "nvidia.com/vgpu-mode": ("", "mig", "hami-core", "hami-core,mig"),
    "nvidia.com/numa-bind": ("true", "1", "false", "yes", ""),
    "hami.io/gpu-scheduler-policy": (*POLICIES, *["topology-aware"] * len(POLICIES)),
}
note = st.sampled_from([*NOTES]).flatmap(lambda key: st.tuples(st.just(key), st.sampled_from(NOTES[key])))
annotations = st.lists(note, max_size=3).map(dict)
"""Few of them, for each refuses cards."""
pair_scores = st.dictionaries(
    st.sampled_from(UUIDS),
    st.dictionaries(st.sampled_from(UUIDS), st.sampled_from([-5, 0, 1, 10, 100, 200])),
    max_size=6,
)


def usage(card: Card) -> SharedGpu:
    """The card in the type of the product."""
    return SharedGpu(
        device=DeviceID(card.uuid),
        index=card.index,
        minor=card.index,
        numa_node=card.numa,
        model=card.type,
        usable=card.healthy,
        mode=card.mode,
        all_slots=card.slots,
        sharers=card.used_slots,
        offered=Amount(cores=card.cores, memory=card.memory * MIB),
        held=Amount(cores=card.used_cores, memory=card.used_memory * MIB),
        profiles=card.profiles,
        taken=frozenset(MigPlacement(start=each, size=1) for each in sorted(card.slices)),
    )


BLOCK = 2**28
LEVELS = (10, 20, 30, 40, 50)
Levels = list[list[int]]


@st.composite
def hierarchies(draw: st.DrawFn, most: int = 8) -> Levels:
    """Levels of cards that are grouped, groups of which are grouped again, and so on, each time on a higher level."""
    count = draw(st.integers(1, most))
    levels = [[0] * count for _ in range(count)]
    groups = [[card] for card in draw(st.permutations(range(count)))]
    for level in LEVELS:
        joined: list[list[int]] = []
        for group in groups:
            if joined and draw(st.booleans()) | (level == LEVELS[-1]):
                for a in joined[-1]:
                    for b in group:
                        levels[a][b] = levels[b][a] = level
                joined[-1] = joined[-1] + group
            else:
                joined.append(group)
        groups = joined
    return levels


def shared_gpu(
    index: int, memory: int, cores_held: int = 0, memory_held: int = 0, *, minor: int | None = None, **more: Any
) -> SharedGpu:
    """GPU-<index> with 100 cores and so many bytes, of which so much is held, by somebody if anything is."""
    return SharedGpu(
        device=DeviceID(f"GPU-{index}"),
        index=index,
        minor=index if minor is None else minor,
        offered=Amount(cores=100, memory=memory),
        held=Amount(cores=cores_held, memory=memory_held),
        **{"sharers": int(cores_held > 0 or memory_held > 0), **more},
    )

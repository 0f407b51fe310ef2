"""Cards, requests and annotations drawn for tests of HAMi's decisions, and the same in the types of the product."""

from hami_reference import Card, Profile, Request
from hypothesis import strategies as st

from topoalign.core.demand.shares import HamiRequest
from topoalign.core.model.byte_sizes import MIB
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.mig import MigPlacement, MigProfile
from topoalign.core.sharing.shared_gpus import SharedGpu

A100 = (
    Profile("1g.5gb", 128, 14, 1, tuple((start, 1) for start in range(7))),
    Profile("2g.10gb", 256, 28, 2, ((0, 2), (2, 2), (4, 2))),
    Profile("3g.20gb", 512, 42, 3, ((0, 4), (4, 4))),
    Profile("4g.20gb", 512, 57, 4, ((0, 4),)),
    Profile("7g.40gb", 1024, 100, 7, ((0, 8),)),
)
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


requests = st.builds(
    Request,
    count=st.integers(1, 4),
    memory=st.sampled_from([0, 0, 128, 300, 1024, 2048]),
    percent=st.sampled_from([101, 101, 0, 25, 50, 100]),
    cores=st.sampled_from([0, 0, 25, 50, 100, 150]),
)

names = st.sampled_from(["", " ", ",", "a", "b,c", " a , d,", "A", "zzz"])
annotations = st.lists(
    st.one_of(
        st.tuples(
            st.just("nvidia.com/use-gputype"), st.sampled_from(["", "a100", "H100,ascend", "nvidia", ",", "V100"])
        ),
        st.tuples(st.just("nvidia.com/nouse-gputype"), st.sampled_from(["", "a100,", "V100", ","])),
        st.tuples(st.just("nvidia.com/use-gpuuuid"), names),
        st.tuples(st.just("nvidia.com/nouse-gpuuuid"), names),
        st.tuples(st.just("nvidia.com/vgpu-mode"), st.sampled_from(["", "mig", "hami-core", "hami-core,mig"])),
        st.tuples(st.just("nvidia.com/numa-bind"), st.sampled_from(["true", "1", "false", "yes", ""])),
        st.tuples(st.just("hami.io/gpu-scheduler-policy"), st.sampled_from(POLICIES)),
        st.tuples(st.just("hami.io/gpu-scheduler-policy"), st.just("topology-aware")),
    ),
    max_size=3,
).map(dict)
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
        profiles=profiles(card.profiles),
        taken=frozenset(MigPlacement(start=each, size=1) for each in sorted(card.slices)),
    )


def profiles(some: tuple[Profile, ...]) -> tuple[MigProfile, ...]:
    """The profiles in the type of the product."""
    return tuple(
        MigProfile(
            name=each.name,
            memory=each.memory * MIB,
            cores=each.cores,
            slices=each.slices,
            placements=tuple(MigPlacement(start=start, size=size) for start, size in each.places),
        )
        for each in some
    )


def asked(request: Request) -> HamiRequest:
    """The request in the type of the product."""
    return HamiRequest(
        count=request.count,
        vendor=request.vendor,
        memory=request.memory,
        percent=request.percent,
        cores=request.cores,
    )

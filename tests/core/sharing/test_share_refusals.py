"""Why a share is refused: each refusal has its code, the path of the field that it is about, and a remedy."""

import msgspec
import pytest
from hami_support import shared_gpu

from topoalign.core.demand.share_annotations import OTHER_TYPE, OTHER_UUID, GpuRules, Selection
from topoalign.core.demand.shares import Share, ShareFields
from topoalign.core.model.errors import NoFit, TopoalignError
from topoalign.core.placement.gpus.bandwidth import SetScorer
from topoalign.core.sharing.choice import choose_gpus, positions_with_enough
from topoalign.core.sharing.shared_gpus import SharedGpu

GIB = 2**30
PATHS = ShareFields(cores="limits[x/cores]", memory="limits[x/memory]", gpus="annotations[x/cards]")
EMPTY = shared_gpu(0, 8 * GIB, model="NVIDIA L4")


def refused(request: Share, *cards: SharedGpu) -> TopoalignError:
    scores = [[0] * len(cards) for _ in cards]
    with pytest.raises(TopoalignError) as caught:
        choose_gpus(cards, positions_with_enough(cards, request, PATHS), request, SetScorer(scores), PATHS)
    assert caught.value.remedy
    return caught.value


def used(cores: int, gib: int = 0, slots: int = 0, held: int = 0) -> SharedGpu:
    sharers = held or int(cores > 0 or gib > 0)
    return shared_gpu(0, 8 * GIB, cores, gib * GIB, model="NVIDIA L4", all_slots=slots, sharers=sharers)


SHARE = Share(1, cores=40, memory=4 * GIB)
PAIR = Share(2, cores=40, memory=4 * GIB)
MEMORY = Share(1, cores=0, memory=4 * GIB)
WHOLE = Share(1, cores=100, memory=4 * GIB)
MUTEX = GpuRules(mutex=True)
SMALL = shared_gpu(0, 2 * GIB, model="NVIDIA L4")


@pytest.mark.parametrize(
    ("request_", "cards", "code", "finding"),
    [
        (SHARE, [used(70), used(95)], "NotEnoughShareCores", "40 cores of one GPU asked for; the most .* is 30 cores"),
        (
            PAIR,
            [used(0), used(90)],
            "NotEnoughShareCores",
            "40 cores of each of 2 GPUs asked for; 1 of 2 GPUs have that left",
        ),
        (
            PAIR,
            [used(50), used(90)],
            "NotEnoughShareCores",
            "40 cores of each of 2 GPUs .* 1 of 2 GPUs have that left.* is 50 cores",
        ),
        (SHARE, [used(70), used(70)], "NotEnoughShareCores", "40 cores of one GPU asked for"),
        (MEMORY, [used(100)], "NotEnoughShareCores", "1 cores of one GPU .* is 0"),
        (SHARE, [used(0, 6)], "NotEnoughShareMemory", "4096 MiB of one GPU .* is 2048 MiB"),
        (SHARE, [used(0, 6), used(0, 6)], "NotEnoughShareMemory", "4096 MiB of one GPU asked for"),
        (SHARE, [used(70, 0), used(0, 6)], "ShareSplit", "a slot, 40 cores and .* together are left on 0 GPUs"),
        (SHARE, [used(10, 0, 2, 2)], "NotEnoughShareSlots", "1 slots of one GPU .* is 0 slots"),
        (PAIR, [used(0)], "NotEnoughShareGpus", "2 GPUs are asked for, and 1"),
        (WHOLE, [used(1), used(0, 1), used(0, 0, 2, 1)], "NotEnoughUnusedGpus", "1 unused .* the node has 0"),
        (Share(2, cores=100, memory=0), [used(0), used(1)], "NotEnoughUnusedGpus", "2 unused .* the node has 1"),
        (WHOLE, [SMALL, used(1)], "NotEnoughShareMemory", "4096 MiB of one GPU .* is 2048 MiB"),
        (WHOLE, [SMALL], "MemoryAboveGpu", "4096 MiB .* of one GPU, and a GPU has 2048 MiB"),
        (SHARE, [SMALL], "MemoryAboveGpu", "a GPU has 2048 MiB"),
        (SHARE, [], "NoGpuAccepted", "no GPU of the node may be chosen: it has none"),
    ],
)
def test_cards_that_lack_something_refuse_with_a_code(
    request_: Share, cards: list[SharedGpu], code: str, finding: str
) -> None:
    error = refused(request_, *cards)

    assert isinstance(error, NoFit)
    assert code == error.code
    with pytest.raises(NoFit, match=rf"(limits|annotations)\[x/(cores|memory|cards)\]: .*{finding}"):
        raise error


def test_a_card_in_use_is_refused_where_nobody_else_may_be() -> None:
    assert "NotEnoughUnusedGpus" == refused(SHARE._replace(rules=MUTEX), used(1)).code


def test_cards_that_may_not_be_chosen_are_counted_by_reason() -> None:
    ill, other = msgspec.structs.replace(EMPTY, usable=False), msgspec.structs.replace(EMPTY, model="NVIDIA A2")
    rules = GpuRules(types=Selection(("l4",)), uuids=Selection(("GPU-1",)))
    error = refused(SHARE._replace(rules=rules), ill, ill, other, EMPTY)

    assert "NoGpuAccepted" == error.code
    reasons = ((2, "not healthy"), (1, OTHER_TYPE), (1, OTHER_UUID))
    assert all(f"{number} {reason}" in error.finding for number, reason in reasons)


@pytest.mark.parametrize("nodes", [(0, 1), (None, None), (0, None)])
def test_cards_of_two_numa_nodes_or_of_none_are_split(nodes: tuple[int | None, ...]) -> None:
    """An unknown NUMA node is never taken for another GPU's."""
    cards = [msgspec.structs.replace(EMPTY, numa_node=node) for node in nodes]
    error = refused(PAIR._replace(rules=GpuRules(numa_bind=True)), *cards)

    assert ("ShareSplit", "annotations[x/cards]") == (error.code, error.finding.partition(":")[0])


def test_one_card_is_on_one_numa_node_wherever_that_is() -> None:
    assert (EMPTY,) == choose_gpus([EMPTY], [0], SHARE._replace(rules=GpuRules(numa_bind=True)), SetScorer([[0]]))

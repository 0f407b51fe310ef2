"""Who uses more memory than it was given is told after three measurements in a row, once."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from use_support import GIB, NODE, UIDS, owner

from topoalign.core.model.ids import AllocationID, DeviceID
from topoalign.core.usage.attribution import DeviceShares, HolderUse, NodeShares, Use
from topoalign.core.usage.excess import SAMPLES, ExcessWatch

GIVEN = 4 * GIB


def measured(time: float, used: int | None, given: int | None = GIVEN, allocation: str = "a-1") -> NodeShares:
    holder = HolderUse(
        owner=owner("train"),
        pod_uid=UIDS[0],
        allocations=(AllocationID(allocation),),
        devices=(DeviceID("GPU-0"),),
        cores=20,
        memory=given,
        use=Use(memory=used, utilization=None, processes=()),
    )
    row = DeviceShares(
        device=DeviceID("GPU-0"),
        card=DeviceID("GPU-0"),
        memory=80 * GIB,
        memory_used=used,
        utilization=None,
        memory_utilization=None,
        failure="",
        holders=(holder,),
        others=(),
    )
    return NodeShares(node=NODE, time=time, devices=(row,), finding="", left_out=0)


def watched(samples: Sequence[int | None], given: int | None = GIVEN) -> list[tuple[int, int]]:
    """After each sample how many containers are above what they were given, and for how many that has begun now."""
    watch, seen = ExcessWatch(), []
    for time, used in enumerate(samples):
        watch = watch.after(measured(float(time), used, given))
        seen.append((len(watch.lasting), len(watch.begun)))
    return seen


def test_three_measurements_in_a_row_are_told_once() -> None:
    over = GIVEN + 1

    assert [(0, 0), (0, 0), (1, 1), (1, 0), (0, 0)] == watched([over, over, over, over, GIVEN])
    assert [(0, 0)] * 5 == watched([over, over, GIVEN, over, over])


def test_an_unknown_use_neither_counts_nor_ends_a_row() -> None:
    over = GIVEN + 1

    assert [(0, 0), (0, 0), (0, 0), (1, 1), (1, 0)] == watched([over, over, None, over, None])


def test_without_an_amount_nobody_is_above_it() -> None:
    assert [(0, 0)] * 5 == watched([1 << 60] * 5, given=None)


def test_one_measurement_that_is_read_often_counts_once() -> None:
    watch = ExcessWatch()
    for _ in range(5):
        watch = watch.after(measured(1.0, GIVEN + 1))

    assert () == watch.lasting
    watch = watch.after(measured(2.0, GIVEN + 1)).after(measured(3.0, GIVEN + 1))
    assert (1, 1) == (len(watch.lasting), len(watch.begun))
    assert (1, 0) == (len(watch.after(measured(3.0, GIVEN + 1)).lasting), len(watch.after(measured(3.0, 0)).begun))


def test_what_has_ended_is_forgotten() -> None:
    watch = ExcessWatch()
    for time in range(3):
        watch = watch.after(measured(float(time), GIVEN + 1))
    watch = watch.after(measured(4.0, GIVEN + 1, allocation="a-2"))

    assert ((), 1) == (watch.lasting, len(watch.rows))


@given(st.lists(st.sampled_from([0, GIVEN, GIVEN + 1, None]), max_size=12))
def test_the_count_is_that_of_the_known_measurements_at_the_end(samples: list[int | None]) -> None:
    """By hand: of the known samples up to here, how many at the end are above."""
    for until, (lasting, begun) in enumerate(watched(samples), 1):
        known = [used for used in samples[:until] if used is not None]
        row = 0
        for used in reversed(known):
            if used <= GIVEN:
                break
            row += 1

        assert (row >= SAMPLES) == bool(lasting)
        assert (row == SAMPLES and samples[until - 1] is not None) == bool(begun)

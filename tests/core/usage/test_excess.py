"""Who uses more memory than it was given is told after three measurements in a row, once."""

from collections.abc import Sequence

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from use_support import GIB, NODE, UIDS, owner

from topoalign.core.model.ids import AllocationID, DeviceID
from topoalign.core.usage.attribution import (
    APART_SECONDS,
    SAMPLES,
    DeviceShares,
    ExcessWatch,
    HolderUse,
    NodeShares,
    Use,
)

GIVEN = 4 * GIB
GPUS = ("GPU-0", "GPU-1")


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
        gpu=DeviceID("GPU-0"),
        memory=80 * GIB,
        memory_used=used,
        utilization=None,
        memory_utilization=None,
        failure="",
        holders=(holder,),
        others=(),
    )
    return NodeShares(node=NODE, time=time, devices=(row,), finding="", left_out=0)


def of_device(shares: NodeShares, name: str) -> NodeShares:
    """The same measurement, of another GPU."""
    (row,) = shares.devices
    return msgspec.structs.replace(shares, devices=(msgspec.structs.replace(row, device=DeviceID(name)),))


def watched(samples: Sequence[int | None], given: int | None = GIVEN) -> list[tuple[int, int]]:
    """After each sample how many containers are above what they were given, and for how many that has begun now."""
    watch, seen = ExcessWatch(), []
    for time, used in enumerate(samples):
        watch = watch.after(measured(time * APART_SECONDS, used, given))
        seen.append((len(watch.lasting), len(watch.begun)))
    return seen


def test_three_measurements_in_a_row_are_told_once() -> None:
    over = GIVEN + 1

    assert [(0, 0), (0, 0), (1, 1), (1, 0), (0, 0)] == watched([over, over, over, over, GIVEN])
    assert [(0, 0)] * 5 == watched([over, over, GIVEN, over, over])


def test_each_device_of_a_container_has_a_row_of_its_own() -> None:
    """Above on GPU-0 alone; then on GPU-1 alone, which the measurements of GPU-0 do not count for."""
    watch, seen = ExcessWatch(), []
    for number, above in enumerate(["GPU-0"] * 3 + ["GPU-1"] * 3):
        rows = [of_device(measured(number * APART_SECONDS, GIVEN + (name == above)), name) for name in GPUS]
        watch = watch.after(
            msgspec.structs.replace(rows[0], devices=tuple(row for each in rows for row in each.devices))
        )
        seen.append(([each.device for each in watch.lasting], [each.device for each in watch.begun]))

    assert [([], [])] * 2 == seen[:2] == seen[3:5]
    assert (["GPU-0"], ["GPU-0"]) == seen[2]
    assert (["GPU-1"], ["GPU-1"]) == seen[5]


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
    watch = watch.after(measured(20.0, GIVEN + 1)).after(measured(30.0, GIVEN + 1))
    assert (1, 1) == (len(watch.lasting), len(watch.begun))
    assert (1, 0) == (len(watch.after(measured(30.0, GIVEN + 1)).lasting), len(watch.after(measured(30.0, 0)).begun))


def test_measurements_close_together_count_once_whoever_asked() -> None:
    """Those at 15 and 16 s are two of one moment: at 30 s there are three, and one at 31 s ends nothing."""
    watch, lasting = ExcessWatch(), []
    for time, used in ((0, 5), (15, 5), (16, 5), (22.4, 5), (30, 5), (31, 0), (37.5, 0)):
        watch = watch.after(measured(float(time), used * GIB))
        lasting.append(len(watch.lasting))

    assert [0, 0, 0, 0, 1, 1, 0] == lasting


@given(st.lists(st.tuples(st.integers(-40, 40), st.booleans()), max_size=12))
def test_what_counts_is_apart_from_what_counted_before(steps: list[tuple[int, bool]]) -> None:
    """By hand: go through the list and keep what is far from the one kept last. Clocks of nodes are set back as well."""
    watch, time = ExcessWatch(), 1000.0
    kept: list[tuple[float, bool]] = []
    for step, is_above in steps:
        time += step
        watch = watch.after(measured(time, GIVEN + 1 if is_above else 0))
        if not kept or not -7.5 < time - kept[-1][0] < 7.5:
            kept.append((time, is_above))

    last = [is_above for _, is_above in kept[-3:]]
    assert ([True] * 3 == last) == bool(watch.lasting)


def test_what_has_ended_is_forgotten() -> None:
    watch = ExcessWatch()
    for time in (0.0, 15.0, 30.0):
        watch = watch.after(measured(time, GIVEN + 1))
    watch = watch.after(measured(45.0, GIVEN + 1, allocation="a-2"))

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

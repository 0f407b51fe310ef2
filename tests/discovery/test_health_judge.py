"""Whom to trust: a judge that knows only what it is told, and no clock."""

from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.model.events import HEALTHY, DeviceHealth, HealthState
from topoalign.core.model.ids import DeviceID
from topoalign.discovery.drivers.reading_health import unhealthy
from topoalign.discovery.health_keeper import RELAPSE_SECONDS, HealthJudge

QUIET = 60.0
A, B, MIG = DeviceID("GPU-a"), DeviceID("GPU-b"), DeviceID("MIG-a-1")
LOST = unhealthy("lost")


class Ward:
    """A judge, and two GPUs of which the first has an instance."""

    def __init__(self) -> None:
        self.judge = HealthJudge(QUIET)
        self.found = {A: HEALTHY, B: HEALTHY}
        self.read(0.0)

    def read(self, now: float, *, gone: tuple[DeviceID, ...] = (), **found: DeviceHealth) -> None:
        self.found |= {DeviceID(f"GPU-{name}"): health for name, health in found.items()}
        self.judge.read(self.found, {MIG: A}, gone, now)

    def of(self, device: DeviceID) -> tuple[HealthState, str]:
        known = self.judge.health_by_device({}).get(device, HEALTHY)
        return known.state, known.reason

    def state(self, device: DeviceID = A) -> HealthState:
        return self.of(device)[0]


def test_a_sign_takes_a_device_out_of_use_at_once_and_no_other() -> None:
    ward = Ward()
    assert ward.judge.sign(A, "XID 94", 1.0), "that is news"
    assert not ward.judge.sign(A, "XID 94", 2.0)

    assert (HealthState.UNHEALTHY, "XID 94; out of use until it has been quiet for a while") == ward.of(A)
    assert HealthState.HEALTHY == ward.state(B)


def test_only_a_reading_begun_after_the_quiet_time_brings_it_back() -> None:
    """A device comes back by a reading that began after the quiet time, and by nothing else."""
    ward = Ward()
    ward.judge.sign(A, "XID 94", 100.0)
    ward.judge.sign(A, "XID 94", 110.0)

    ward.read(110.0 + QUIET - 0.1)
    assert HealthState.UNHEALTHY == ward.state(), "the newest sign counts"
    assert HealthState.UNHEALTHY == ward.state(), "time alone heals nothing"
    ward.read(110.0 + QUIET)
    assert HealthState.HEALTHY == ward.state()


def test_a_reading_that_finds_it_bad_is_a_sign_too() -> None:
    ward = Ward()
    ward.read(10.0, a=LOST)
    ward.read(200.0, a=LOST)
    assert (HealthState.UNHEALTHY, "lost") == ward.of(A)

    ward.read(210.0, a=HEALTHY)
    assert (HealthState.UNHEALTHY, "lost; out of use until it has been quiet for a while") == ward.of(A)
    ward.read(200.0 + QUIET)
    assert HealthState.HEALTHY == ward.state()


def test_a_device_that_comes_up_late_is_used_at_its_first_good_reading() -> None:
    """At boot a NIC's port is down until its switch has answered: that is no illness to recover from."""
    judge = HealthJudge(QUIET)
    judge.read({A: unhealthy("no port is active")}, {}, (), 0.0)
    assert HealthState.UNHEALTHY == judge.health_by_device({})[A].state
    judge.read({A: HEALTHY}, {}, (), 10.0)
    assert HealthState.HEALTHY == judge.health_by_device({})[A].state


def test_who_falls_ill_again_soon_waits_twice_as_long_each_time() -> None:
    ward, now, waits = Ward(), 0.0, []
    for _ in range(4):
        ward.judge.sign(A, "XID 94", now)
        began = now
        while ward.state() is HealthState.UNHEALTHY:
            now += 1.0
            ward.read(now)
        waits.append(now - began)
    assert [QUIET, 2 * QUIET, 4 * QUIET, 8 * QUIET] == waits

    now += RELAPSE_SECONDS
    ward.judge.sign(A, "XID 94", now)
    ward.read(now + QUIET)
    assert HealthState.HEALTHY == ward.state(), "what was long ago is forgotten"


def test_a_reading_begun_before_a_sign_does_not_shorten_the_quiet() -> None:
    """The driver is slow just when a GPU fails: the XID comes while a reading that finds it bad is under way."""
    ward = Ward()
    ward.judge.sign(A, "XID 94", 130.0)
    ward.read(100.0, a=LOST)
    ward.read(100.0 + QUIET, a=HEALTHY)
    assert HealthState.UNHEALTHY == ward.state()

    ward.judge.lose_subscription("events cannot be waited for", {A})
    ward.read(110.0 + QUIET)
    ward.judge.lose_subscription(None)
    ward.read(129.9 + QUIET)
    assert HealthState.UNHEALTHY == ward.state()
    ward.read(110.0 + 2 * QUIET)
    assert HealthState.HEALTHY == ward.state()


def test_a_quiet_time_of_hours_is_not_shortened() -> None:
    """The bound on what relapses add is no bound on what is configured."""
    assert 3 * RELAPSE_SECONDS == HealthJudge(3 * RELAPSE_SECONDS).quiet(A, 0.0)


def test_without_a_quiet_time_a_device_may_fall_ill_as_often_as_it_likes() -> None:
    """`quietSeconds: 0` is a configuration: each reading decides."""
    judge = HealthJudge(0.0)
    for now in range(1100):
        judge.sign(A, "XID 94", float(now))
        judge.read({A: HEALTHY}, {}, (), float(now))
        assert HealthState.HEALTHY == judge.health_by_device({})[A].state


def test_a_lasting_sign_ends_only_with_a_reset_that_readings_saw() -> None:
    """A lasting sign outlives any quiet time and ends with a reset that readings have seen."""
    ward = Ward()
    ward.judge.sign(A, "XID 79", 10.0, lasting=True)
    ward.read(10.0 + 100 * QUIET)
    assert (HealthState.UNHEALTHY, "XID 79; out of use until it was reset, or an operator heals it") == ward.of(A)
    assert {A: "XID 79"} == ward.judge.lasting()

    ward.read(7000.0, gone=(A,), a=LOST)
    assert (HealthState.UNHEALTHY, "XID 79; lost") == ward.of(A)
    ward.read(7010.0, a=HEALTHY)
    assert ({}, HealthState.UNHEALTHY) == (ward.judge.lasting(), ward.state()), "back, and on trial"
    ward.read(7010.0 + QUIET - 0.1)
    assert HealthState.UNHEALTHY == ward.state(), "the quiet time begins when it is back"
    ward.read(7010.0 + QUIET)
    assert HealthState.HEALTHY == ward.state()


def test_the_reset_of_a_gpu_is_one_of_its_instances() -> None:
    ward = Ward()
    ward.judge.sign(MIG, "XID 95", 10.0, lasting=True)
    ward.read(20.0, gone=(A,), a=LOST)
    ward.read(30.0, a=HEALTHY)
    assert ({}, HealthState.UNHEALTHY) == (ward.judge.lasting(), ward.state(MIG))
    ward.read(30.0 + QUIET)

    assert HealthState.HEALTHY == ward.state(MIG)


def test_a_wait_for_a_reset_survives_readings_without_the_device() -> None:
    """A service that starts while NVML hangs reads /sys, which has neither GPUs without uuid nor MIG instances."""
    judge = HealthJudge(QUIET)
    judge.sign(A, "XID 119", 0.0, lasting=True)
    judge.sign(MIG, "XID 95", 0.0, lasting=True)
    judge.read({}, {}, (), 10.0)
    assert {A: "XID 119", MIG: "XID 95"} == judge.lasting()

    judge.read({A: HEALTHY, B: HEALTHY}, {MIG: B}, (), 20.0 + QUIET)
    assert {A: HealthState.UNHEALTHY, B: HealthState.HEALTHY, MIG: HealthState.UNHEALTHY} == {
        device: health.state for device, health in judge.health_by_device({}).items()
    }


def test_a_reading_that_fails_once_is_no_reset() -> None:
    """An error that comes and goes says nothing of the memory that XID 95 called corrupt."""
    ward = Ward()
    ward.judge.sign(A, "XID 95", 10.0, lasting=True)
    ward.read(20.0, a=unhealthy("Unknown Error"))
    ward.read(1000.0, a=HEALTHY)

    assert {A: "XID 95"} == ward.judge.lasting()


def test_a_reading_that_cannot_tell_how_a_gpu_is_ends_no_wait_for_a_reset() -> None:
    ward = Ward()
    ward.judge.sign(A, "XID 79", 10.0, lasting=True)
    ward.read(20.0, gone=(A,), a=LOST)
    ward.read(1000.0, a=DeviceHealth(state=HealthState.UNKNOWN, reason="/sys is all that is read"))

    assert {A: "XID 79"} == ward.judge.lasting()


def test_a_new_lasting_sign_after_the_reset_asks_for_another_one() -> None:
    ward = Ward()
    ward.judge.sign(A, "XID 79", 10.0, lasting=True)
    ward.read(20.0, gone=(A,), a=LOST)
    ward.judge.sign(A, "XID 48", 25.0, lasting=True)
    ward.read(30.0, a=HEALTHY)
    ward.read(30.0 + 10 * QUIET)

    assert (HealthState.UNHEALTHY, {A: "XID 79"}) == (ward.state(), ward.judge.lasting())


def test_an_operator_heals_whatever_it_was_and_the_reading_still_counts() -> None:
    ward = Ward()
    ward.judge.sign(A, "XID 79", 10.0, lasting=True)
    ward.judge.sign(MIG, "XID 94", 10.0)
    ward.judge.heal(A)
    assert [HealthState.HEALTHY] * 2 == [ward.state(A), ward.state(MIG)]

    ward.read(20.0, a=LOST)
    ward.judge.heal(A)
    assert (HealthState.UNHEALTHY, "lost") == ward.of(A)


def test_a_healed_device_has_no_longer_quiet_time_for_old_relapses() -> None:
    """After an operator has healed a device, earlier relapses no longer lengthen its quiet time."""
    ward = Ward()
    ward.judge.sign(A, "XID 94", 0.0)
    ward.read(QUIET)
    ward.judge.heal(A)
    ward.judge.sign(A, "XID 94", 100.0)
    ward.read(100.0 + QUIET)

    assert HealthState.HEALTHY == ward.state()


def test_an_instance_is_ill_alone_and_forgotten_with_the_instance() -> None:
    ward = Ward()
    ward.judge.sign(MIG, "XID 94", 10.0)
    assert [HealthState.UNHEALTHY, HealthState.HEALTHY] == [ward.state(MIG), ward.state(A)]

    ward.judge.read(ward.found, {}, (), 20.0)
    ward.read(21.0)
    assert MIG not in ward.judge.health_by_device({})


def test_without_a_reading_nobody_knows_and_what_was_bad_stays_bad() -> None:
    ward = Ward()
    ward.judge.sign(A, "XID 94", 10.0)
    ward.judge.failed("NVML hangs")

    assert (HealthState.UNHEALTHY, "XID 94; NVML hangs") == ward.of(A)
    assert (HealthState.UNKNOWN, "NVML hangs") == ward.of(B)
    ward.read(20.0)
    assert HealthState.HEALTHY == ward.state(B), "not being known is no illness"


def test_a_gpu_that_cannot_be_heard_is_unknown_and_never_counts_as_quiet() -> None:
    ward = Ward()
    ward.judge.sign(A, "XID 94", 10.0)
    ward.judge.sign(MIG, "XID 94", 10.0)
    ward.judge.lose_subscription("events cannot be waited for", {A})
    ward.read(500.0)
    assert (HealthState.UNHEALTHY, HealthState.HEALTHY) == (ward.state(A), ward.state(B))
    assert HealthState.UNHEALTHY == ward.state(MIG), "its events are those of its GPU"

    ward.judge.lose_subscription(None)
    ward.read(510.0)
    assert HealthState.UNHEALTHY == ward.state(A), "who knows what happened meanwhile"
    ward.read(500.0 + QUIET)
    assert HealthState.HEALTHY == ward.state(A)

    ward.judge.lose_subscription("events cannot be waited for", {A, B})
    assert HealthState.UNKNOWN == ward.state(B)


def test_a_cordon_is_said_beside_the_health_of_devices_and_instances() -> None:
    ward = Ward()
    ward.judge.sign(A, "XID 94", 10.0)
    said = ward.judge.health_by_device({A: "fan", B: "", MIG: "test"})

    assert [(HealthState.UNHEALTHY, True), (HealthState.HEALTHY, True), (HealthState.HEALTHY, True)] == [
        (said[device].state, said[device].cordoned) for device in (A, B, MIG)
    ]
    assert ("cordoned: fan", "cordoned") == (said[A].reason.split("; ")[-1], said[B].reason)
    assert {A, B, MIG} == set(said)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["sign", "lasting", "bad", "gone", "good", "fail", "heal"]),
        st.floats(0, 50, allow_nan=False),
    ),
    max_size=40,
)


@given(STEPS)
def test_signs_of_one_gpu_change_no_other_and_count_at_once(
    steps: list[tuple[str, float]],
) -> None:
    """And no device is ever healthy within the quiet time after a sign, other than by an operator's word."""
    ward, now, newest = Ward(), 0.0, -QUIET
    for what, later in steps:
        now += later
        match what:
            case "sign" | "lasting":
                ward.judge.sign(A, what, now, lasting=what == "lasting")
                newest = now
            case "bad" | "gone":
                ward.read(now, gone=(A,) if what == "gone" else (), a=LOST)
                newest = now
            case "good":
                ward.read(now, a=HEALTHY)
            case "fail":
                ward.judge.failed("hangs")
            case "heal":
                ward.judge.heal(A)
                newest = -QUIET
        assert (HealthState.UNKNOWN if what == "fail" else ward.state(B)) == ward.state(B)
        assert HealthState.UNHEALTHY != ward.state(B)
        if now - newest < QUIET:
            assert HealthState.UNHEALTHY == ward.state(A)

"""What discovery says of the health of devices: from readings, from events between them, and from operators."""

from pathlib import Path

import msgspec
import pytest
from discovery_support import HOLD_DOWN_SECONDS, NODE, QUIET_SECONDS, READ_SECONDS, World, inventory
from fact_support import mig_device

from topoalign.core import wire
from topoalign.core.model.errors import BadRequest, DriverFault, Unavailable
from topoalign.core.model.events import DeviceHealth, DeviceHealthChanged, HealthState
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.maintenance import DevicesRequest, Override
from topoalign.core.model.topology.model import Gpu, Nic, Topology
from topoalign.core.ports import HardwareEvent, Inventory, Occurrence
from topoalign.discovery.device_record import NAME
from topoalign.discovery.service import SOON_SECONDS
from topoalign.discovery.xids import XidRules
from topoalign.runtime.tasks import background

pytestmark = pytest.mark.anyio

A, B = DeviceID("GPU-0"), DeviceID("GPU-1")
HEALTHY = DeviceHealth(state=HealthState.HEALTHY)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "state")


async def happens(world: World, kind: Occurrence, gpu: DeviceID | None = A, **more: int) -> None:
    assert world.hardware.listener is not None
    world.hardware.listener.receive(HardwareEvent(kind=kind, gpu=gpu, **more))


async def word(world: World, word: Override, *devices: str, reason: str = "") -> dict[DeviceID, DeviceHealth]:
    request = msgspec.json.encode(DevicesRequest(node=NODE, devices=devices, reason=reason))
    return wire.decode_answer(
        await world.bus.ask(wire.devices_subject(NODE, word), request, 5.0), dict[DeviceID, DeviceHealth]
    )


async def said(world: World) -> list[DeviceHealthChanged]:
    return [event for event in await world.said() if isinstance(event, DeviceHealthChanged)]


def parted() -> Inventory:
    """Two GPUs with addresses, one of them with two MIG instances, and a NIC."""
    parts = tuple(mig_device(f"MIG-{i}", i, memory=1) for i in (1, 2))
    gpus = (Gpu(id=A, index=0, pci="0000:07:00.0", mig=parts), Gpu(id=B, index=1, pci="0000:0f:00.0"))
    nics = (Nic(id=DeviceID("mlx5_0"), index=0, pci="0000:09:00.0"),)
    return Inventory(topology=Topology(gpus=gpus, nics=nics), health=dict.fromkeys((A, B, nics[0].id), HEALTHY))


async def test_eight_gpus_that_fail_together_are_two_announcements(world: World) -> None:
    """The first at once, the rest at the end of the hold-down."""
    world.hardware.now = inventory(*range(8))
    async with world.running():
        await world.clock.advance(HOLD_DOWN_SECONDS)
        for i in range(8):
            await happens(world, Occurrence.XID, DeviceID(f"GPU-{i}"), xid=79)
        await world.clock.advance(0)
        assert [8, 7] == [sum(h.usable for h in event.devices.values()) for event in await said(world)]

        await world.clock.advance(HOLD_DOWN_SECONDS)
        assert [8, 7, 0] == [sum(h.usable for h in event.devices.values()) for event in await said(world)]


async def test_what_comes_and_goes_within_the_hold_down_is_not_said(world: World) -> None:
    async with world.running():
        await happens(world, Occurrence.XID, xid=999)
        await word(world, "heal", "0")
        await world.clock.advance(2 * HOLD_DOWN_SECONDS)

        assert 1 == len(await said(world))


async def test_a_passing_xid_ends_with_the_quiet_time_and_a_lasting_one_does_not(world: World) -> None:
    """A passing xid is over after the quiet time and a lasting one is not."""
    async with world.running():
        await happens(world, Occurrence.XID, A, xid=999)
        await happens(world, Occurrence.XID, B, xid=95)
        await world.clock.advance(QUIET_SECONDS + READ_SECONDS)

        devices = (await world.health()).devices
        assert [HealthState.HEALTHY, HealthState.UNHEALTHY] == [devices[A].state, devices[B].state]
        assert "XID 95 (uncontained memory error: reset the GPU)" in devices[B].reason
        assert 1 == world.registry.get_sample_value("topoalign_discovery_xids_total", {"xid": "95"})
        assert 2 == world.registry.get_sample_value("topoalign_discovery_health_changes_total", {"state": "unhealthy"})
        assert 1 == world.registry.get_sample_value("topoalign_discovery_devices", {"state": "unhealthy"})


async def test_what_a_service_reports_is_out_of_use_until_it_has_been_quiet(world: World) -> None:
    """As the allocator does of a GPU whose driver makes no MIG instances: it comes back as after an error."""
    async with world.running():
        told = await word(world, "report", str(A), reason="its MIG instances cannot be changed: no permission")
        assert "no permission; out of use until" in told[A].reason
        await world.clock.advance(HOLD_DOWN_SECONDS)
        assert [A] == [device for device, health in (await world.health()).devices.items() if not health.usable]

        await world.clock.advance(QUIET_SECONDS + READ_SECONDS)
        assert (await world.health()).devices[A].usable


async def test_an_xid_of_a_mig_instance_costs_that_instance_alone(tmp_path: Path) -> None:
    """An xid of a mig instance costs that instance and an unknown instance the card."""
    world = World(tmp_path, environment={"MIG_STRATEGY": "mixed"})
    world.hardware.now = parted()
    async with world.running():
        await happens(world, Occurrence.XID, A, xid=999, gpu_instance=2, compute_instance=0)
        await world.clock.advance(HOLD_DOWN_SECONDS)
        devices = (await world.health()).devices
        assert [DeviceID("MIG-2")] == [device for device, health in devices.items() if not health.usable]

        await happens(world, Occurrence.XID, A, xid=999, gpu_instance=1)
        await world.clock.advance(HOLD_DOWN_SECONDS)
        devices = (await world.health()).devices
        assert {"MIG-1", "MIG-2"} == {device for device, health in devices.items() if not health.usable}

        await happens(world, Occurrence.XID, A, xid=999, gpu_instance=7)
        await world.clock.advance(HOLD_DOWN_SECONDS)
        assert HealthState.UNHEALTHY == (await world.health()).devices[A].state


async def test_an_xid_of_a_mig_instance_costs_a_gpu_that_is_offered_as_a_whole(world: World) -> None:
    """As by default, where a GPU is in MIG mode all the same: its container may use any of the instances."""
    world.hardware.now = parted()
    async with world.running():
        await happens(world, Occurrence.XID, A, xid=999, gpu_instance=2, compute_instance=0)
        await world.clock.advance(HOLD_DOWN_SECONDS)

        assert [A] == [device for device, health in (await world.health()).devices.items() if not health.usable]


async def test_an_instance_is_reported_no_better_than_its_card(world: World) -> None:
    """What is said to an operator of an instance is no better than its card."""
    world.hardware.now = parted()
    async with world.running():
        await happens(world, Occurrence.XID, A, xid=79)
        assert HealthState.UNHEALTHY == (await word(world, "heal", "MIG-1"))[DeviceID("MIG-1")].state


@pytest.mark.parametrize("kind", [Occurrence.CHANGED, Occurrence.UNAVAILABLE])
async def test_what_only_a_reading_can_tell_is_read_soon(world: World, kind: Occurrence) -> None:
    async with world.running():
        reads = world.hardware.reads
        for _ in range(5):
            await happens(world, kind)
        await world.clock.advance(SOON_SECONDS / 2)
        await happens(world, kind)
        await world.clock.advance(SOON_SECONDS / 2)
        assert reads + 1 == world.hardware.reads
        await world.clock.advance(SOON_SECONDS)

        assert reads + 1 == world.hardware.reads, "it was seen by that reading, too"


async def test_health_that_is_held_back_is_published_at_the_end_of_the_hold_down(world: World) -> None:
    async with world.running():
        await world.clock.advance(HOLD_DOWN_SECONDS / 2)
        await happens(world, Occurrence.XID, A, xid=79)
        await world.clock.advance(HOLD_DOWN_SECONDS / 4)
        assert 1 == len(await said(world))
        await world.clock.advance(HOLD_DOWN_SECONDS / 4)

        assert 2 == len(await said(world))


async def test_a_cordon_just_as_a_hold_down_ends_is_published_after_the_next_one(world: World) -> None:
    """A change at its very end is published at once, and the next one in the same moment is held back again."""
    world.hardware.now = inventory(0, 1, 2)

    async def cordon_two_at_its_end() -> None:
        await world.clock.sleep(HOLD_DOWN_SECONDS)
        await word(world, "cordon", "GPU-1")
        await word(world, "cordon", "GPU-2")

    async with world.running(), background() as tasks:
        tasks.start_soon(cordon_two_at_its_end)
        await world.clock.advance(HOLD_DOWN_SECONDS / 2)
        await word(world, "cordon", "GPU-0")
        await world.clock.advance(HOLD_DOWN_SECONDS / 2)
        await world.clock.advance(HOLD_DOWN_SECONDS)

        assert all(health.cordoned for health in (await world.health()).devices.values())


async def test_what_happens_during_a_reading_is_read_by_another_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That reading may have asked the GPU before."""
    read = world.hardware.read

    async def busy() -> Inventory:
        found = await read()
        if world.hardware.reads == 2:
            await happens(world, Occurrence.CHANGED)
        return found

    async with world.running():
        monkeypatch.setattr(world.hardware, "read", busy)
        await happens(world, Occurrence.CHANGED)
        await world.clock.advance(SOON_SECONDS)
        assert 2 == world.hardware.reads
        await world.clock.advance(SOON_SECONDS)

        assert 3 == world.hardware.reads


async def test_an_event_of_nobody_makes_nobody_ill_and_is_looked_into(world: World) -> None:
    async with world.running():
        reads = world.hardware.reads
        await happens(world, Occurrence.XID, None, xid=79)
        await happens(world, Occurrence.XID, DeviceID("GPU-x"), xid=79)
        await world.clock.advance(2 * SOON_SECONDS)

        assert (reads + 1, 1) == (world.hardware.reads, len(await said(world)))


async def test_gpus_without_events_are_unknown_with_the_reason(world: World) -> None:
    """Gpus that cannot be received are unknown with the reason until they can."""
    async with world.running():
        assert world.hardware.listener is not None
        reads = world.hardware.reads
        world.hardware.listener.lose_subscription("NVML hangs", frozenset({A}))
        await world.clock.advance(HOLD_DOWN_SECONDS)
        assert reads + 1 == world.hardware.reads, "a reading tells more"
        devices = (await world.health()).devices
        assert (HealthState.UNKNOWN, "NVML hangs", HEALTHY) == (devices[A].state, devices[A].reason, devices[B])
        assert "NVML hangs" == world.discovery.subscription_loss()

        world.hardware.listener.lose_subscription(None)
        await world.clock.advance(HOLD_DOWN_SECONDS)
        assert ({HEALTHY}, None) == (set((await world.health()).devices.values()), world.discovery.subscription_loss())


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("0", "GPU-0"),
        ("GPU-1", "GPU-1"),
        ("GPU1", "GPU-1"),
        ("gpu1", "GPU-1"),
        ("NIC0", "mlx5_0"),
        ("GPU0/MIG-2", "MIG-2"),
        ("0000:0F:00.0", "GPU-1"),
        ("00000000:0F:00.0", "GPU-1"),
        ("0f:00.0", "GPU-1"),
        ("MIG-2", "MIG-2"),
        ("mlx5_0", "mlx5_0"),
        ("0000:09:00.0", "mlx5_0"),
    ],
)
async def test_a_device_is_named_as_people_name_it(world: World, name: str, device: str) -> None:
    world.hardware.now = parted()
    async with world.running():
        answer = await word(world, "cordon", name, reason="fan")
        await world.clock.advance(HOLD_DOWN_SECONDS)

        cordoned = DeviceHealth(state=HealthState.HEALTHY, reason="cordoned: fan", cordoned=True)
        assert {DeviceID(device): cordoned} == answer
        assert cordoned == (await world.health()).devices[DeviceID(device)]
        assert [device] == [d for d, health in (await world.health()).devices.items() if not health.usable]

        assert {DeviceID(device): HEALTHY} == await word(world, "uncordon", device)


@pytest.mark.parametrize("name", ["GPU0/1", "ml/0", "/0", "GPU1/MIG-2", "GPU9/MIG-2", "GPU0/GPU1"])
async def test_a_part_is_named_with_its_own_card_or_not_at_all(world: World, name: str) -> None:
    world.hardware.now = parted()
    async with world.running():
        with pytest.raises(BadRequest, match="no device"):
            await word(world, "cordon", name, reason="fan")


async def test_a_request_with_an_unknown_device_changes_nothing(world: World) -> None:
    """An unknown device is refused with the list and nothing of the request is done."""
    async with world.running():
        with pytest.raises(BadRequest, match="7") as caught:
            await word(world, "cordon", "0", "7\x1b[31m")
        assert "'GPU0 GPU-0', 'GPU1 GPU-1'" in caught.value.remedy
        assert caught.value.finding.isprintable()
        await world.clock.advance(HOLD_DOWN_SECONDS)

        assert 1 == len(await said(world))


@pytest.mark.parametrize("names", [(), ("0",) * 257])
async def test_none_and_too_many_are_refused(world: World, names: tuple[str, ...]) -> None:
    async with world.running():
        with pytest.raises(BadRequest, match="devices"):
            await word(world, "heal", *names)


async def test_before_the_first_reading_nobody_can_be_meant() -> None:
    world = World()
    world.hardware.now = DriverFault("NVML hangs", "restart it")
    async with world.running():
        with pytest.raises(Unavailable, match="NVML hangs"):
            await word(world, "cordon", "0")


async def test_a_cordon_that_cannot_be_kept_does_not_hold() -> None:
    world = World()  # whose state directory cannot be made
    async with world.running():
        with pytest.raises(Unavailable, match="cannot be written") as caught:
            await word(world, "cordon", "0")
        assert "TOPOALIGN_STATE_DIR" in caught.value.remedy
        await world.clock.advance(HOLD_DOWN_SECONDS)
        assert {HEALTHY} == set((await world.health()).devices.values())


async def test_a_gpu_that_fails_is_out_of_use_although_the_disk_is_full() -> None:
    """A gpu that fails is out of use whether or not that can be written down."""
    world = World()
    async with world.running():
        await happens(world, Occurrence.XID, xid=79)
        await world.clock.advance(HOLD_DOWN_SECONDS)
        assert HealthState.UNHEALTHY == (await world.health()).devices[A].state


async def test_a_gpu_that_was_gone_for_its_reset_is_back_after_the_quiet_time(world: World) -> None:
    """It has left the bus and come back: that was one."""
    async with world.running():
        await happens(world, Occurrence.XID, xid=79)
        await world.becomes(inventory(1))
        assert "lost" in (await world.health()).devices[A].reason
        await world.becomes(inventory(0, 1))
        assert HealthState.UNHEALTHY == (await world.health()).devices[A].state
        await world.clock.advance(QUIET_SECONDS)

        assert {A: HEALTHY, B: HEALTHY} == (await world.health()).devices


async def test_a_gpu_that_does_not_say_who_it_is_was_not_reset_by_that(world: World) -> None:
    """It is missing among those that do, and as much in need of its reset as before when it answers again."""
    async with world.running():
        await happens(world, Occurrence.XID, xid=95)
        await world.becomes(msgspec.structs.replace(inventory(1), nameless=True))
        await world.becomes(inventory(0, 1), QUIET_SECONDS + READ_SECONDS)

        health = (await world.health()).devices[A]
        assert (HealthState.UNHEALTHY, True) == (health.state, "until it was reset" in health.reason)


@pytest.mark.parametrize(("xid", "usable"), [(94, True), (48, False)])
async def test_the_xid_beside_an_uncorrectable_memory_error_decides(world: World, xid: int, usable: bool) -> None:
    """An error that was contained (94) costs the application alone; otherwise (48) the GPU has to be reset."""
    async with world.running():
        await happens(world, Occurrence.DOUBLE_BIT_ECC)
        await happens(world, Occurrence.XID, xid=xid)
        await world.clock.advance(HOLD_DOWN_SECONDS)

        assert usable == (await world.health()).devices[A].usable


async def test_a_context_switch_timeout_takes_a_gpu_out_of_use_until_a_reset(world: World) -> None:
    """XID 109, which NVIDIA's device plugin ignores."""
    async with world.running():
        await happens(world, Occurrence.XID, xid=109)
        await world.clock.advance(QUIET_SECONDS + READ_SECONDS)
        reason = (await world.health()).devices[A].reason
        assert reason.startswith("XID 109 (context switch timeout: reset the GPU); out of use until it was reset")

        await world.becomes(inventory(1))
        await world.becomes(inventory(0, 1), QUIET_SECONDS + READ_SECONDS)
        assert HEALTHY == (await world.health()).devices[A]


async def test_without_health_checks_only_readings_cost_a_gpu(
    world: World,
) -> None:
    """As `DP_DISABLE_HEALTHCHECKS=all` has it."""
    world.health_keeper.follow(XidRules(all_ignored=True), QUIET_SECONDS)
    async with world.running():
        await happens(world, Occurrence.DOUBLE_BIT_ECC)
        await happens(world, Occurrence.XID, xid=79)
        await world.clock.advance(HOLD_DOWN_SECONDS)
        assert {A: HEALTHY, B: HEALTHY} == (await world.health()).devices

        await world.becomes(inventory(0, 1, sick="the driver asks for a reset of the GPU"))
        assert HealthState.UNHEALTHY == (await world.health()).devices[A].state


async def test_cordons_survive_a_restart_and_a_boot_and_a_cordon_may_be_changed(tmp_path: Path) -> None:
    first = World(tmp_path)
    async with first.running():
        await word(first, "cordon", "0", "1", reason="fan")
        await word(first, "cordon", "1", reason="cable")
    second = World(tmp_path, boot_id="another")
    async with second.running():
        reasons = {device: health.reason for device, health in (await second.health()).devices.items()}
        assert {A: "cordoned: fan", B: "cordoned: cable"} == reasons


@pytest.mark.parametrize("told", ["the former one", "the new one"])
async def test_what_one_of_two_versions_is_told_holds_for_both_whoever_goes(tmp_path: Path, told: str) -> None:
    """While a new version takes over both answer, and nobody chooses which: it may also be the new one that goes."""
    former, new = World(tmp_path), World(tmp_path)
    async with former.running(), new.running():
        hearing, other = (former, new) if told == "the former one" else (new, former)
        await word(hearing, "cordon", "0", reason="fan")
        await word(other, "cordon", "1", reason="cable")
        await happens(other, Occurrence.XID, B, xid=79)
        for world in (hearing, other):
            await world.clock.advance(READ_SECONDS)
        both = {A: (HealthState.HEALTHY, True), B: (HealthState.UNHEALTHY, True)}
        assert [both, both] == [await states(hearing), await states(other)]

        await word(hearing, "uncordon", "0")
        await word(hearing, "heal", "1")
        await other.clock.advance(READ_SECONDS)
        assert {A: (HealthState.HEALTHY, False), B: (HealthState.HEALTHY, True)} == await states(other)
    next_one = World(tmp_path)
    async with next_one.running():
        assert {A: (HealthState.HEALTHY, False), B: (HealthState.HEALTHY, True)} == await states(next_one)


async def states(world: World) -> dict[DeviceID, tuple[HealthState, bool]]:
    return {device: (known.state, known.cordoned) for device, known in (await world.health()).devices.items()}


async def test_what_an_operator_has_healed_stays_healed_over_a_restart(tmp_path: Path) -> None:
    """Also over one that follows at once, as in the steps to reset a GPU."""
    first = World(tmp_path)
    async with first.running():
        await happens(first, Occurrence.XID, xid=79)
        await word(first, "heal", "0")
    second = World(tmp_path)
    async with second.running():
        assert {A: HEALTHY, B: HEALTHY} == (await second.health()).devices


async def test_a_gpu_that_has_gone_can_be_uncordoned_by_its_id(tmp_path: Path) -> None:
    first = World(tmp_path)
    async with first.running():
        await word(first, "cordon", "0")
    second = World(tmp_path)
    second.hardware.now = inventory(1)
    async with second.running():
        assert HealthState.UNKNOWN == (await word(second, "uncordon", "GPU-0"))[A].state
    assert b"GPU-0" not in (tmp_path / NAME).read_bytes()


async def test_a_damaged_record_is_loud_until_an_operator_has_spoken(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text('{"version": 1, "cordons": {"GPU-0":')
    world = World(tmp_path)
    async with world.running():
        assert "cordons are not known" in (world.health_keeper.not_ready_reason() or "")
        await word(world, "cordon", "0")

        assert None is world.health_keeper.not_ready_reason()
        assert (tmp_path / f"{NAME}.corrupt-1").exists()


async def test_a_damaged_record_is_reported_until_an_operator_overrides(tmp_path: Path) -> None:
    """A restart is what people try first; what was cordoned would be given out, and nobody would say so."""
    (tmp_path / NAME).write_text('{"version": 2, "cordons": {"GPU-0": "fan"}}')
    said = []
    for _ in range(3):
        world = World(tmp_path)
        async with world.running():
            said.append(world.health_keeper.not_ready_reason() or "")
    async with world.running():
        await word(world, "uncordon", "1")
        assert None is world.health_keeper.not_ready_reason()
    after = World(tmp_path)

    assert 1 == len(set(said))
    assert "cordons are not known" in said[0] and f"{NAME}.corrupt-1" in said[0]
    assert None is after.health_keeper.not_ready_reason()


async def test_a_cordoned_gpu_that_falls_ill_says_both(world: World) -> None:
    async with world.running():
        await word(world, "cordon", "0", reason="fan")
        await happens(world, Occurrence.XID, xid=79)
        health = (await word(world, "cordon", "0", reason="fan"))[A]

    assert (HealthState.UNHEALTHY, True) == (health.state, health.cordoned)
    assert health.reason.startswith("XID 79") and health.reason.endswith("cordoned: fan")

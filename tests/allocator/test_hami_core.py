"""Containers with slots that are limited by HAMi-core: what they are told, and what they find."""

import os
import re
import stat
from pathlib import Path

import anyio
import msgspec
import pytest
from disk_support import without_capabilities
from nvml_support import compiled
from slot_node_support import EACH, MACHINE, SLOTS, Ask, HamiCoreNode, SlotNode
from slot_support import MIB, in_slots

from topoalign.allocator.containers.hami_core.slot_directories import HamiCoreEdits, held_in_order, limit_variables
from topoalign.allocator.containers.host_files import ContainerUnready
from topoalign.allocator.containers.responses import VisibleDevice
from topoalign.cli.hook import install_library
from topoalign.core.model.decisions import Admission, Refusal
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import DeviceID
from topoalign.machines import load_machine
from topoalign.plugin_config.hook_files import LIBRARY, PRELOAD, find_missing_file

pytestmark = pytest.mark.anyio
READER = Path(__file__).with_name("hami_core_reader.c")
LIMITS = re.compile(r"CUDA_DEVICE_(MEMORY|SM)_LIMIT(_\d+)?")


def limits(it: HamiCoreNode, name: str, container: str = "c0") -> dict[str, str]:
    return {name: value for name, value in it.answer(name, container).envs.items() if LIMITS.fullmatch(name)}


async def test_a_container_gets_its_limits_and_the_library() -> None:
    async with HamiCoreNode.running() as (it, _):
        await it.run_pod("a", Ask(2, memory=6_000, cores=40))

        told, mounts = it.answer("a").envs, it.mounts("a")
        assert {
            "CUDA_DEVICE_MEMORY_LIMIT_0": "6000m",
            "CUDA_DEVICE_MEMORY_LIMIT_1": "6000m",
            "CUDA_DEVICE_SM_LIMIT": "40",
        } == limits(it, "a")
        assert {"NVIDIA_VISIBLE_DEVICES", "CUDA_DEVICE_MEMORY_SHARED_CACHE"} == told.keys() - limits(it, "a").keys()
        assert re.fullmatch(r"/usr/local/vgpu/[0-9a-f]{32}\.cache", told["CUDA_DEVICE_MEMORY_SHARED_CACHE"])
        assert {
            "/usr/local/vgpu": (it.root / it.named("a") / "cache", False),
            "/usr/local/vgpu/libvgpu.so": (it.root / LIBRARY, True),
            "/tmp/vgpulock": (it.root / "vgpulock", False),
            "/etc/ld.so.preload": (it.root / PRELOAD, True),
        } == mounts
        assert {True} == {host.exists() for host, _ in mounts.values()}
        writable = [stat.S_IMODE(host.stat().st_mode) for host, read_only in mounts.values() if not read_only]
        assert [0o777, 0o777] == writable
        assert 0o755 == stat.S_IMODE(it.cache("a").parent.stat().st_mode)


@pytest.mark.parametrize(
    ("held", "cores"),
    [
        ([(40, 100), (40, 100)], ["40", "40"]),
        ([(40, 100), (0, 200)], ["40", "0"]),
        ([(40, 100), (60, 200)], ["40", "60"]),
        ([(100, 16_384)], ["0"]),
        ([(0, 100)], ["0"]),
        ([(12, 0)], ["12"]),
        ([(7, 1)] * 16, ["7"] * 16),
    ],
    ids=["equal", "one without", "unlike", "a whole GPU", "memory alone", "below a MiB", "sixteen"],
)
async def test_a_program_in_c_reads_the_limits_as_the_library(
    held: list[tuple[int, int]], cores: list[str], reader: Path
) -> None:
    """No GPU of a container has less of a limit because another one has more, and none is unlimited by a limit of 0."""
    told = limit_variables([Amount(cores=cores, memory=memory * MIB) for cores, memory in held])
    read = await anyio.run_process([str(reader)], env=told)
    expected = [f"{max(1, memory) * MIB}/{limit}" for (_, memory), limit in zip(held, cores, strict=True)]
    general = told.get("CUDA_DEVICE_SM_LIMIT", "0")

    assert [*expected, *[f"0/{general}"] * (16 - len(held))] == read.stdout.decode().split()


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(READER, tmp_path_factory.mktemp("reader") / "reader")


def test_limits_are_in_the_order_of_nvml_whatever_the_slots_are() -> None:
    hardware = in_slots(MACHINE, SLOTS)
    slots = [DeviceID(f"GPU-{gpu}::{gpu}") for gpu in (2, 0, 3)]
    amounts = {slot: Amount(cores=number, memory=number) for number, slot in enumerate(slots)}

    assert [1, 0, 2] == [each and each.cores for each in held_in_order(slots, amounts, hardware)]


def test_slots_without_a_record_are_equal_parts_and_of_no_other_gpus() -> None:
    """A kubelet repeats its call after the journal was lost; the configuration may have changed since."""
    slots = [DeviceID("GPU-1::7")]

    assert [Amount(cores=100 // SLOTS, memory=EACH // SLOTS * MIB)] == held_in_order(
        slots, {}, in_slots(MACHINE, SLOTS)
    )
    with pytest.raises(ContainerUnready, match="not in slots any more"):
        held_in_order(slots, {}, in_slots(MACHINE, SLOTS, gpus=1))


async def test_without_a_reservation_the_limits_are_an_equal_part() -> None:
    async with HamiCoreNode.running() as (it, _):
        assert isinstance(await it.admit_pod(it.asking("a", Ask(memory=15_000, cores=80))), Admission)

        part = {"CUDA_DEVICE_MEMORY_LIMIT_0": f"{EACH // SLOTS}m", "CUDA_DEVICE_SM_LIMIT": f"{100 // SLOTS}"}
        assert part == limits(it, "a")


@pytest.mark.parametrize("lost", [LIBRARY, PRELOAD])
async def test_without_the_library_nothing_is_given_out(lost: str) -> None:
    async with HamiCoreNode.running() as (it, _):
        (it.root / lost).rename(it.root.parent / "elsewhere")

        decision = await it.admit_pod(it.asking("a", Ask(1)))

        assert isinstance(decision, Refusal)
        assert f"no usable {lost}" in decision.finding
        assert it.containers is not None
        reason = it.containers.poll(it.ledger.state.hardware) or ""
        assert f"topoalign hook install --library libvgpu.so --to {it.root}" in reason
        assert {} == dict(it.ledger.state.allocations)
        (it.root.parent / "elsewhere").rename(it.root / lost)
        assert None is it.containers.poll(it.ledger.state.hardware)
        assert isinstance(await it.admit_pod(it.asking("b", Ask(1))), Admission)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a directory to another user")
async def test_a_root_that_another_user_has_closed_is_said_and_refused() -> None:
    """As one that `hook install` has made there as another user: an error here would end the agent."""
    async with HamiCoreNode.running() as (it, _):
        assert it.containers is not None
        os.chown(it.root, 4711, 4711)
        it.root.chmod(0o700)
        with without_capabilities():
            decision = await it.admit_pod(it.asking("a", Ask(1)))
            reason = it.containers.poll(it.ledger.state.hardware) or ""

        assert isinstance(decision, Refusal)
        assert f"no usable {LIBRARY}" in decision.finding
        assert "has to belong to the agent's user" in reason
        assert {} == dict(it.ledger.state.allocations)


@pytest.mark.parametrize("lost", [LIBRARY, PRELOAD])
def test_what_is_no_regular_file_is_missing(lost: str, tmp_path: Path) -> None:
    """Nobody waits for who writes to a pipe."""
    install_library(b"library", tmp_path)
    (tmp_path / lost).unlink()
    os.mkfifo(tmp_path / lost)

    assert lost == find_missing_file(tmp_path)


async def test_a_root_that_cannot_be_written_is_said_and_refused() -> None:
    async with HamiCoreNode.running() as (it, _):
        (it.root / "vgpulock").symlink_to(it.root.parent)

        decision = await it.admit_pod(it.asking("a", Ask(1)))

        assert isinstance(decision, Refusal)
        assert "cannot create its directories" in decision.finding
        assert {} == dict(it.ledger.state.allocations)


def test_more_gpus_than_the_library_has_room_for_are_refused() -> None:
    printer = HamiCoreEdits("/hami")
    machine = load_machine("dgx-a100").topology
    gpus = [VisibleDevice(DeviceID(f"GPU-{n}"), f"GPU-{n}", machine.gpus[0], None) for n in range(17)]

    printer.check(machine, gpus[:16])
    with pytest.raises(ContainerUnready, match="this one has 17"):
        printer.check(machine, gpus)


async def test_without_the_limiter_containers_get_nothing_of_it() -> None:
    async with SlotNode.running() as (it, _):
        assert isinstance(await it.admit_pod(it.asking("a", Ask(1))), Admission)

        (answer,) = (each for running in it.kubelet.running.values() for each in running.responses.values())
        assert ["NVIDIA_VISIBLE_DEVICES"] == [*answer.envs]
        assert [] == answer.mounts


async def test_an_app_container_never_has_the_file_of_its_init_container() -> None:
    """The limits in it are those of whoever opened it first."""
    async with HamiCoreNode.running() as (it, _):
        await it.run_pod("a", Ask(memory=3_000, cores=20), init=(Ask(memory=9_000, cores=50),))

        assert it.slots_of("a")["c0"] == it.slots_of("a")["c1"]
        assert it.cache("a", "c0") == it.cache("a", "c1")
        files = {it.answer("a", each).envs["CUDA_DEVICE_MEMORY_SHARED_CACHE"] for each in ("c0", "c1")}
        assert 2 == len(files)
        assert it.cache("a").is_dir()


def test_the_answer_with_slots_of_a_changed_machine_is_in_its_order() -> None:
    """GPUs are numbered anew after a reboot; what counts is how NVML counts them now."""
    gpus = tuple(msgspec.structs.replace(gpu, index=3 - gpu.index) for gpu in reversed(MACHINE.gpus))
    hardware = in_slots(msgspec.structs.replace(MACHINE, gpus=gpus), SLOTS)
    slots = [DeviceID("GPU-0::0"), DeviceID("GPU-1::0")]
    amounts = {slots[0]: Amount(cores=10, memory=MIB), slots[1]: Amount(cores=20, memory=MIB)}

    assert [20, 10] == [each and each.cores for each in held_in_order(slots, amounts, hardware)]

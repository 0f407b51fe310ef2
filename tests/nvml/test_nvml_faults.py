"""One fault stays one fault: lost GPUs, old and dead drivers, calls that hang; over pynvml and a stand-in library."""

import sys
from itertools import pairwise
from pathlib import Path

import anyio
import pynvml
import pytest
from nvml_support import (
    DEADLINE,
    GPUS,
    Node,
    StandIn,
    address,
    built,
    host_tree,
    script,
    standing_in,
    switch_links,
    told_uuids,
    uuid,
)

from topoalign.core.model.errors import DriverFault
from topoalign.core.model.events import HealthState
from topoalign.core.ports import Inventory
from topoalign.discovery.drivers.nvml.driver import REOPEN_SECONDS, NvmlDriver
from topoalign.runtime.tasks import background

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("call", ["nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID"])
async def test_a_lost_gpu_without_identity_is_skipped_and_others_are_read(node: Node, call: str) -> None:
    """A lost GPU that does not report its identity is skipped, and the others are read."""
    found = await node.read(*switch_links(8, 18), f"fail {call} 3 15")

    assert [gpu for i, gpu in enumerate(GPUS) if i != 3] == [gpu.id for gpu in found.topology.gpus]
    assert [0, 1, 2, 4, 5, 6, 7] == [gpu.index for gpu in found.topology.gpus]
    assert {"NV18"} == {link.label for link in found.topology.links if link.a in GPUS and link.b in GPUS}
    assert {HealthState.HEALTHY} == {health.state for health in found.health.values()}
    assert 1 == len(found.findings)
    assert "GPU 3 does not answer" in found.findings[0]
    assert not found.nameless


async def test_a_gpu_without_identity_may_be_any_that_is_missing(node: Node) -> None:
    """A GPU that does not report its identity for an unknown reason may be any GPU that is missing."""
    assert (await node.read("fail nvmlDeviceGetUUID 3 999")).nameless
    assert not (await node.read()).nameless


@pytest.mark.parametrize(("code", "word"), [(15, "GPU is lost"), (16, "GPU requires restart"), (999, "Unknown Error")])
async def test_a_gpu_that_fails_later_is_listed_as_it_was_and_unhealthy(node: Node, code: int, word: str) -> None:
    before = await node.read(*switch_links(8, 18))
    after = await node.read(*switch_links(8, 18), f"fail nvmlDeviceGetMemoryInfo 3 {code}")

    assert before.topology == after.topology
    assert [GPUS[3]] == [device for device, health in after.health.items() if not health.usable]
    assert HealthState.UNHEALTHY == after.health[GPUS[3]].state
    assert word in after.health[GPUS[3]].reason
    assert (frozenset({GPUS[3]}) if code in (15, 16) else frozenset()) == after.awaiting_reset

    assert before == await node.read(*switch_links(8, 18)), "it is whole again when it answers again"


async def test_a_gpu_that_a_single_field_says_is_lost_is_lost(node: Node) -> None:
    """The call as a whole answers in order."""
    found = await node.read("lost 3 230")

    assert (frozenset({GPUS[3]}), False) == (found.awaiting_reset, found.health[GPUS[3]].usable)


async def test_a_gpu_that_fails_from_the_start_is_listed_with_what_it_says(node: Node) -> None:
    found = await node.read("fail nvmlDeviceGetPciInfo_v3 3 999", "fail nvmlDeviceGetNvLinkState 3 999")

    assert list(GPUS) == [gpu.id for gpu in found.topology.gpus]
    assert [GPUS[3]] == [device for device, health in found.health.items() if not health.usable]
    assert ["GPU 3 (GPU-3) fails", "the connections of GPU-3"] == [
        finding.split(":")[0].removesuffix(" cannot be read") for finding in found.findings
    ]


async def test_a_gpu_that_returns_failing_is_listed_as_before_it_went(node: Node) -> None:
    """A GPU that was gone and comes back with errors is listed with its values from before."""
    before = await node.read()
    await node.read("fail nvmlDeviceGetHandleByIndex_v2 3 15")
    after = await node.read("fail nvmlDeviceGetMemoryInfo 3 999")

    assert before.topology == after.topology


async def test_a_gpu_that_fails_from_the_start_sits_where_the_files_say(node: Node) -> None:
    """As after a restart of the service: the kubelet is to hear of the same NUMA node as before."""
    before = (await node.read()).topology.gpus[3]
    told_uuids(node.root, 3)
    fresh = NvmlDriver(node.root, node.clock, DEADLINE)
    failing = script(more=["fail nvmlDeviceGetPciInfo_v3 3 999"])
    node.standin.play(failing.replace("uuid=GPU-3 ", f"uuid={uuid(3)} "))
    found = (await fresh.read()).topology.gpus[3]

    assert (before.pci, before.bridge, before.numa_affinity) == (found.pci, found.bridge, found.numa_affinity)


async def test_a_gpu_without_access_rights_is_a_finding_and_reopens_nothing(node: Node) -> None:
    """Every opening leaves the other GPUs unheard for a while, and gives no rights."""
    await node.read()
    for _ in range(3):
        await node.clock.advance(REOPEN_SECONDS)
        found = await node.read("fail nvmlDeviceGetHandleByIndex_v2 3 4")

    assert (7, 1) == (len(found.topology.gpus), node.standin.calls("nvmlInitWithFlags"))
    assert "GPU 3 does not answer and is left out" in found.findings[0]


@pytest.mark.parametrize("gpus", [(), (1,)])
async def test_gpus_that_are_hidden_from_the_service_are_a_finding(node: Node, gpus: tuple[int, ...]) -> None:
    """As where its own container has NVIDIA_VISIBLE_DEVICES set: a node that has fewer than it had says so."""
    found = await node.read(gpus=gpus)

    assert 1 == len(found.findings)
    assert f"NVML reports {len(gpus)} of the 8 GPUs in /sys" in found.findings[0]
    assert [i not in gpus for i in range(8)] == [address(i) in found.findings[0] for i in range(8)]


async def test_a_name_that_is_no_text_costs_no_gpu(node: Node) -> None:
    garbled = script().encode().replace(b"name=NVIDIA_H100", b"name=NVIDIA_\xff\xfe", 1)
    node.standin.loaded.standin_play(garbled)
    found = await node.driver.read()

    assert ("", "NVIDIA H100 80GB") == (found.topology.gpus[0].name, found.topology.gpus[1].name)
    assert {HealthState.HEALTHY} == {health.state for health in found.health.values()}


@pytest.mark.parametrize("code", [7, 21, 26])
async def test_a_call_that_a_driver_has_given_up_costs_no_gpu(node: Node, code: int) -> None:
    """Too small a mask, no data, a function that is deprecated: what it would have told is not known, and that is all."""
    found = await node.read(*(f"fail nvmlDevice{call} * {code}" for call in ("GetMemoryAffinity", "GetGpuFabricInfo")))

    assert {HealthState.HEALTHY} == {health.state for health in found.health.values()}


async def test_an_impossible_amount_of_memory_is_one_gpus_and_is_not_believed(node: Node) -> None:
    found = await node.read("gpu uuid=GPU-x pci=00000000:F9:00.0 memory=18446744073709551615")

    assert None is found.topology.gpus[8].memory
    assert {HealthState.HEALTHY} == {health.state for health in found.health.values()}


async def test_a_mig_instance_destroyed_during_a_reading_harms_no_gpu(node: Node) -> None:
    """A MIG instance that is destroyed while it is read does not affect the health of its GPU."""
    card, instance = "gpu uuid=GPU-x pci=00000000:F9:00.0 mig=1", "mig 8 gi=1 uuid=MIG-a"
    found = await node.read(card, instance, "fail nvmlDeviceGetAttributes_v2 * 6")

    assert () == found.topology.gpus[8].mig
    assert {HealthState.HEALTHY} == {health.state for health in found.health.values()}


@pytest.mark.parametrize("nth", [1, 2, 3])
async def test_a_mig_instance_stays_where_another_goes_during_a_reading(
    node: Node, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """Those after it have other indices then: the one that a list by index misses has not gone."""
    card, *instances = ("gpu uuid=GPU-x pci=00000000:F9:00.0 mig=1", *(f"mig 8 gi={i} uuid=MIG-{i}" for i in range(3)))
    by_index, asked = pynvml.nvmlDeviceGetMigDeviceHandleByIndex, list[int]()

    def one_goes(device: object, index: int) -> object:
        handle = by_index(device, index)
        asked.append(index)
        if index == 1 and asked.count(1) == nth:
            node.standin.play(script(more=[card, instances[0], instances[2]]))
        return handle

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMigDeviceHandleByIndex", one_goes)
    found = await node.read(card, *instances)

    assert ["MIG-0", "MIG-2"] == [each.uuid for each in found.topology.gpus[8].mig or ()]


async def test_mig_instances_that_have_one_name_or_none_take_nobody_along(node: Node) -> None:
    """As when one is made anew in another place while the list is read."""
    named = [f"mig 8 gi={i} uuid={uuid}" for i, uuid in enumerate(("MIG-a", "MIG-a", "", "MIG-GPU-x/7/0"))]
    found = await node.read("gpu uuid=GPU-x pci=00000000:F9:00.0 mig=1", *named)

    assert ["MIG-a", "MIG-GPU-x/7/0"] == [instance.uuid for instance in found.topology.gpus[8].mig or ()]
    assert 2 == len(found.findings)


async def test_nvml_is_opened_anew_while_a_gpu_is_lost_but_not_at_every_reading(node: Node) -> None:
    """A process that has NVML open does not see a GPU that comes back, and opening it is dear."""
    lost = "fail nvmlDeviceGetHandleByIndex_v2 3 15"
    await node.read()
    await node.clock.advance(10 * REOPEN_SECONDS)
    await node.read()
    assert 1 == node.standin.calls("nvmlInitWithFlags"), "nothing fails"

    await node.read(lost)
    await node.read(lost)
    await node.read(lost)
    assert 2 == node.standin.calls("nvmlInitWithFlags"), "once at once"

    await node.clock.advance(REOPEN_SECONDS)
    await node.read(lost)
    found = await node.read()
    assert 3 == node.standin.calls("nvmlInitWithFlags")
    assert list(GPUS) == [gpu.id for gpu in found.topology.gpus]


async def test_for_a_gpu_that_stays_lost_nvml_is_opened_ever_more_rarely(node: Node) -> None:
    """
    The others are not received for as long as the failure lasts; one that fails later is reopened as soon as the first.
    """

    async def gaps(lost: str, minutes: int) -> list[int]:
        """Between openings, with a reading a minute, one of which finds that it is time and the next one opens."""
        opened = []
        for minute in range(minutes):
            count = node.standin.calls("nvmlInitWithFlags")
            await node.clock.advance(REOPEN_SECONDS)
            await node.read(lost)
            opened += [minute] * (node.standin.calls("nvmlInitWithFlags") - count)
        return [later - earlier for earlier, later in pairwise(opened)]

    await node.read()
    assert [1 + 1, 2 + 1, 4 + 1, 8 + 1, 16 + 1] == await gaps("fail nvmlDeviceGetMemoryInfo 3 15", 41)
    await node.read()
    assert [1 + 1, 2 + 1] == await gaps("fail nvmlDeviceGetMemoryInfo 5 15", 9)


@pytest.mark.parametrize("uuid", ["GPU-0", "GPU-\x1b[31m", ""])
async def test_a_gpu_whose_uuid_cannot_be_one_is_left_out(node: Node, uuid: str) -> None:
    found = await node.read(f"gpu uuid={uuid} pci=00000000:F9:00.0")

    assert list(GPUS) == [gpu.id for gpu in found.topology.gpus]
    assert found.findings[0].isprintable() and "GPU 8" in found.findings[0]


async def test_a_driver_that_lacks_the_newer_functions_still_tells_the_rest(tmp_path: Path) -> None:
    """What is absent is unknown, and links whose remote end is no GPU still count as links to a switch."""
    (tmp_path / "loaded").mkdir()
    with standing_in(built(tmp_path, "-DOLD_DRIVER"), tmp_path / "loaded", script()) as standin:
        old = Node(host_tree(tmp_path / "host"), standin)
        found = await old.read(*switch_links(8, 6))

    assert () == found.findings
    assert {HealthState.HEALTHY} == {health.state for health in found.health.values()}
    assert ({6}, {None}) == (
        {gpu.switch_links for gpu in found.topology.gpus},
        {g.fabric for g in found.topology.gpus},
    )
    assert "NV6" == found.topology.link_by_pair[GPUS[0], GPUS[7]].label


@pytest.mark.parametrize("code", [9, 12, 18])
async def test_an_nvml_that_does_not_open_is_a_driver_fault_and_may_open_later(node: Node, code: int) -> None:
    with pytest.raises(DriverFault, match="nvmlInitWithFlags"):
        await node.read(f"fail nvmlInitWithFlags * {code}")

    assert 8 == len((await node.read()).topology.gpus)


async def test_an_nvml_that_dies_meanwhile_is_a_driver_fault_and_is_opened_anew(node: Node) -> None:
    await node.read()
    with pytest.raises(DriverFault, match="nvmlDeviceGetName"):
        await node.read("fail nvmlDeviceGetName 2 1")

    assert 8 == len((await node.read()).topology.gpus)
    assert 2 == node.standin.calls("nvmlInitWithFlags")


async def test_without_pynvml_there_is_a_driver_fault_with_a_remedy(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)

    with pytest.raises(DriverFault, match="pynvml is not installed") as caught:
        await node.read()
    assert "nvidia-ml-py" in caught.value.remedy


@pytest.mark.parametrize("call", ["nvmlInitWithFlags", "nvmlDeviceGetName", "nvmlDeviceGetNvLinkState"])
async def test_a_call_that_hangs_is_a_named_fault_and_the_loop_goes_on(node: Node, call: str) -> None:
    """Nothing is begun beside a call that hangs; once it ends, the next reading is whole."""
    node.standin.play(script(more=[f"hang {call}"]))
    async with background() as tasks:
        tasks.start_soon(deadline_passes, node, call)
        with pytest.raises(DriverFault, match=call):
            await node.driver.read()

    with pytest.raises(DriverFault, match=call):
        await node.driver.read()
    assert 1 == node.standin.calls(call), "no second thread is sent after the first"

    node.standin.release()
    found = await answering(node.driver)
    assert 8 == len(found.topology.gpus)


async def deadline_passes(node: Node, call: str) -> None:
    await called(node.standin, call)
    await node.clock.advance(DEADLINE)


async def called(standin: StandIn, function: str) -> None:
    """Gives the driver's thread the turns it needs to get there."""
    while not standin.calls(function):
        await anyio.lowlevel.checkpoint()


async def answering(driver: NvmlDriver) -> Inventory:
    """A reading, as soon as the driver can make one again."""
    while True:
        try:
            return await driver.read()
        except DriverFault:
            await anyio.lowlevel.checkpoint()

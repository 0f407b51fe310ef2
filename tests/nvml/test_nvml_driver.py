"""What the NVML driver reads, over the real pynvml and a stand-in library."""

from itertools import combinations

import msgspec
import pytest
from nvml_support import DGX1_VOLTA, GPUS, Node, address, direct_links, switch_links

from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.device_links import PcieClass
from topoalign.core.model.topology.mig import MigDevice, MigPlacement
from topoalign.core.model.topology.model import Fabric
from topoalign.core.ports import Inventory
from topoalign.discovery.drivers.nvml.driver import CONNECTIONS_SECONDS

pytestmark = pytest.mark.anyio


async def test_a_gpu_is_who_nvml_says_and_sits_where_the_files_say(node: Node) -> None:
    found = (await node.read("gpu uuid=GPU-x pci=00000000:F9:00.0 minor=12 cpus=f0000f000 nodes=6")).topology

    gpu = found.gpus[5]
    assert ("GPU-5", 5, 5, "NVIDIA H100 80GB", 80 << 30) == (gpu.id, gpu.index, gpu.minor, gpu.name, gpu.memory)
    assert (address(5), (1,), tuple(range(16, 32))) == (gpu.pci, gpu.numa_affinity, gpu.cpu_affinity)
    assert gpu.bridge in {bridge.address for bridge in found.bridges}
    assert (None, 0, None, None) == (gpu.memory_node, gpu.switch_links, gpu.fabric, gpu.mig)
    unseen = found.gpus[8]
    assert ("0000:f9:00.0", None) == (unseen.pci, unseen.bridge), "files do not show it"
    assert ((12, 13, 14, 15), (1,), 12, None) == (
        unseen.cpu_affinity,
        unseen.numa_affinity,
        unseen.minor,
        unseen.memory,
    )


async def test_the_numa_node_of_a_gpu_is_the_kernels_word_before_nvmls(node: Node) -> None:
    """NVML's affinity may name every node of the machine."""
    found = await node.read(f"gpu uuid=GPU-x pci=0000{address(7).upper()} nodes=3", gpus=range(7))

    assert (1,) == found.topology.gpus[7].numa_affinity


async def test_a_pci_domain_keeps_the_digits_that_it_has(node: Node) -> None:
    found = await node.read("gpu uuid=GPU-x pci=0001C00A:1B:00.0")

    assert "1c00a:1b:00.0" == found.topology.gpus[8].pci


async def test_direct_nvlinks_are_counted_per_pair(node: Node) -> None:
    """The NVLinks of a DGX-1 come out as they went in, and go with the PCIe class that NVML tells."""
    found = (await node.read(*direct_links(DGX1_VOLTA), "level 0 1 10", "level 6 7 20")).topology

    assert {(a, b): DGX1_VOLTA[a][b] for a, b in combinations(range(8), 2)} == {
        (a, b): found.link_by_pair[GPUS[a], GPUS[b]].fabric_links for a, b in combinations(range(8), 2)
    }
    assert (PcieClass.PIX, PcieClass.PXB, PcieClass.SYS) == (
        found.link_by_pair[GPUS[0], GPUS[1]].pcie,
        found.link_by_pair[GPUS[7], GPUS[6]].pcie,
        found.link_by_pair[GPUS[0], GPUS[7]].pcie,
    )
    assert {0} == {gpu.switch_links for gpu in found.gpus}


@pytest.mark.parametrize("kind", ["switch", "unknown"])
async def test_links_to_a_switch_reach_every_gpu(node: Node, kind: str) -> None:
    """As on an H100 board, also in a virtual machine where the switch does not show what it is."""
    found = (await node.read(*switch_links(8, 18, kind))).topology

    assert {18} == {gpu.switch_links for gpu in found.gpus}
    assert {"NV18"} == {found.link_by_pair[pair].label for pair in combinations(GPUS, 2)}


async def test_links_that_are_down_or_lead_to_a_cpu_are_no_nvlinks_between_gpus(node: Node) -> None:
    found = (await node.read("link 0 0 down", "link 0 1 npu", "link 1 0 npu", "link 1 1 npu")).topology

    assert {0} == {gpu.switch_links for gpu in found.gpus}
    assert {0} == {link.fabric_links for link in found.links}
    assert [1, 0, 0] == [gpu.links_down for gpu in found.gpus[:3]]


@pytest.mark.parametrize("code", [2, 3])
async def test_a_link_that_a_gpu_does_not_have_is_not_down(node: Node, code: int) -> None:
    """NVML answers "invalid argument" or "not supported" for it."""
    found = (await node.read(*switch_links(8, 18), f"fail nvmlDeviceGetNvLinkState 0 {code}")).topology

    assert {0} == {gpu.links_down for gpu in found.gpus}
    assert [0, 18] == [gpu.switch_links for gpu in found.gpus[:2]]


async def test_links_that_differ_by_end_are_reported_with_the_smaller_number(node: Node) -> None:
    """If the ends of a pair report different numbers of links, a finding says so and the smaller one is taken."""
    found = await node.read("link 0 0 gpu 1", "link 0 1 gpu 1", "link 1 0 gpu 0")

    assert 1 == found.topology.link_by_pair[GPUS[0], GPUS[1]].fabric_links
    assert 1 == len(found.findings)
    assert "GPU-0 sees 2 NVLinks to GPU-1, which sees 1" in found.findings[0]


async def test_links_are_read_once_for_as_long_as_the_gpus_are_the_same(node: Node) -> None:
    """One pass per GPU and not per pair, and no other one until another GPU is there."""
    first = await node.read(*switch_links(8, 18), *(f"field {i} 91 18" for i in range(8)))
    asked = [node.standin.calls(f"nvmlDeviceGet{f}") for f in ("NvLinkState", "NvLinkRemotePciInfo_v2")]
    levels = node.standin.calls("nvmlDeviceGetTopologyCommonAncestor")
    again = await node.driver.read()

    assert ([8 * 18, 8 * 18], 28) == (asked, levels)
    assert first == again
    assert 8 * 18 == node.standin.calls("nvmlDeviceGetNvLinkState")
    assert 28 == node.standin.calls("nvmlDeviceGetTopologyCommonAncestor")

    await node.read(*switch_links(7, 18), gpus=[0, 1, 2, 4, 5, 6, 7])
    assert 8 * 18 < node.standin.calls("nvmlDeviceGetNvLinkState")


async def test_nvlinks_that_come_up_or_go_down_later_are_seen_within_a_minute(node: Node) -> None:
    """They come up with the fabric manager, which may start after this service."""
    assert {0} == {gpu.switch_links for gpu in (await node.read()).topology.gpus}
    for links in (18, 17):
        await node.clock.advance(CONNECTIONS_SECONDS)
        found = (await node.read(*switch_links(8, links))).topology
        assert {links} == {gpu.switch_links for gpu in found.gpus}
        assert {f"NV{links}"} == {found.link_by_pair[pair].label for pair in combinations(GPUS, 2)}


async def test_a_gpu_that_fails_keeps_the_nvlinks_that_it_had(node: Node) -> None:
    before = await node.read(*switch_links(8, 18))
    await node.clock.advance(CONNECTIONS_SECONDS)
    after = await node.read(*switch_links(8, 17), "fail nvmlDeviceGetNvLinkState 3 15")
    assert before.topology == after.topology
    assert "the connections of GPU-3 cannot be read" in after.findings[0]

    whole = await node.read(*switch_links(8, 17))
    assert ({17}, ()) == ({gpu.switch_links for gpu in whole.topology.gpus}, whole.findings), "asked again at once"


async def test_a_gpu_that_comes_back_under_another_index_is_the_same_gpu(node: Node) -> None:
    before = await node.read(gpus=range(4))
    after = await node.read(gpus=[1, 2, 3, 0])

    assert [("GPU-1", 0), ("GPU-2", 1), ("GPU-3", 2), ("GPU-0", 3)] == [(g.id, g.index) for g in after.topology.gpus]
    assert before.topology.gpu_by_id[GPUS[0]].pci == after.topology.gpu_by_id[GPUS[0]].pci


@pytest.mark.parametrize(
    ("field", "value", "usable"),
    [(230, 1, False), (230, 4, False), (230, 99, False), (230, 0, True), (145, 1, False), (144, 1, True)],
)
async def test_what_the_driver_wants_repaired_is_unhealthy(node: Node, field: int, value: int, usable: bool) -> None:
    """Recovery actions and failed remapping count; rows that wait for the next reset are only reported."""
    found = await node.read(f"field 2 {field} {value}")

    assert usable == found.health[GPUS[2]].usable
    assert usable != bool(found.health[GPUS[2]].reason)
    assert (field == 144) == bool(found.findings)


async def test_of_the_recovery_actions_those_that_reset_the_gpu_are_waited_for(node: Node) -> None:
    """None, reset, reboot, drain peer-to-peer, drain and reset, recover the IMEX domain: GPU i asks for the i-th."""
    found = await node.read(*(f"field {action} 230 {action}" for action in range(6)))

    assert {GPUS[1], GPUS[2], GPUS[4]} == found.awaiting_reset
    assert {GPUS[0], GPUS[6], GPUS[7]} == {gpu for gpu in GPUS if found.health[gpu].usable}


async def test_a_grace_gpu_knows_its_own_memory_node_only_if_the_kernel_shows_it(node: Node) -> None:
    found = await node.read("gpu uuid=GPU-x pci=00000000:F9:00.0 own=1", "gpu uuid=GPU-y pci=00000000:FA:00.0 own=9")

    assert (1, None) == (found.topology.gpus[8].memory_node, found.topology.gpus[9].memory_node)


async def test_only_a_gpu_that_has_joined_a_fabric_says_so(node: Node) -> None:
    cluster = "00112233445566778899aabbccddeeff"
    found = await node.read(
        f"fabric 0 7 3 0 {cluster}",
        f"fabric 1 7 2 0 {cluster}",
        f"fabric 2 7 3 999 {cluster}",
        f"fabric 3 7 3 0 {'0' * 32}",
    )

    joined = Fabric(cluster="00112233-4455-6677-8899-aabbccddeeff", clique=7)
    assert [joined, None, None, None] == [gpu.fabric for gpu in found.topology.gpus[:4]]


@pytest.mark.parametrize(
    ("state", "status", "health", "expected"),
    [
        (0, 0, 0, ""),
        (1, 0, 0, "not-started"),
        (2, 0, 0, "in-progress"),
        (3, 999, 0, "failed"),
        (3, 0, 0, ""),
        (3, 0, 0b10_10_10_10, ""),
        (3, 0, 0b01, "degraded"),
        (3, 0, 0b01 << 4, "degraded"),
        (3, 0, 0b01 << 2 | 0b01 << 6, ""),
        (3, 0, 1 << 8, ""),
        (3, 0, 5 << 8, "degraded"),
    ],
)
async def test_a_fabric_that_is_not_in_order_has_a_state(
    node: Node, state: int, status: int, health: int, expected: str
) -> None:
    """Less bandwidth, an unhealthy route and a wrong configuration count; a recovery in progress does not."""
    found = await node.read(f"fabric 0 7 {state} {status} {'0' * 32} {health}")

    assert [expected, ""] == [gpu.fabric_state for gpu in found.topology.gpus[:2]]


@pytest.mark.parametrize("code", [13, 25])
async def test_an_older_driver_is_asked_the_older_fabric_question(node: Node, code: int) -> None:
    """A driver without the newer query for the fabric is asked the older one."""
    fabric = "fabric 0 7 3 0 00112233445566778899aabbccddeeff"
    found = await node.read(fabric, f"fail nvmlDeviceGetGpuFabricInfoV * {code}")

    assert Fabric(cluster="00112233-4455-6677-8899-aabbccddeeff", clique=7) == found.topology.gpus[0].fabric


async def test_mig_instances_are_listed_with_their_profile(node: Node) -> None:
    """By the name of the device if that tells it, else by its size, as NVIDIA words it."""
    found = await node.read(
        "gpu uuid=GPU-x pci=00000000:F9:00.0 mig=1 memory=42949672960",
        "mig 8 gi=9 ci=0 uuid=MIG-b name=NVIDIA_A100_MIG_1g.5gb+me memory=4864 slices=1 compute=1",
        "mig 8 gi=2 ci=1 uuid=MIG-a name=NVIDIA_A100 memory=19968 slices=3 compute=2",
        "gpu uuid=GPU-y pci=00000000:FA:00.0 mig=1",
    )

    a, b = DeviceID("MIG-a"), DeviceID("MIG-b")
    assert (
        MigDevice(uuid=a, profile="2c.3g.20gb", gpu_instance=2, compute_instance=1, memory=19968 << 20, index=1),
        MigDevice(uuid=b, profile="1g.5gb+me", gpu_instance=9, compute_instance=0, memory=4864 << 20, index=0),
    ) == found.topology.gpus[8].mig
    assert () == found.topology.gpus[9].mig, "enabled, and nothing in it"
    assert None is found.topology.gpus[0].mig


PROFILES = (
    "gpu uuid=GPU-x pci=00000000:F9:00.0 mig=1 memory=85899345920",
    "profile 8 id=19 kind=0 name=MIG_1g.10gb memory=9984 slices=1 sms=16 at=0:1,1:1,2:1,3:1,4:1,5:1,6:1",
    "profile 8 id=9 kind=2 name=MIG_3g.40gb memory=40448 slices=3 sms=60 at=0:4,4:4",
    "profile 8 id=0 kind=4 name=MIG_7g.80gb memory=81152 slices=7 sms=132 at=0:8",
    "profile 8 id=20 kind=7 name=MIG_1g.10gb+me memory=9984 slices=1 sms=16 at=0:1,6:1",
    "mig 8 gi=9 ci=0 uuid=MIG-b name=NVIDIA_H100_MIG_1g.10gb memory=9984 slices=1 compute=1 place=6:1",
)


async def test_profiles_of_a_gpu_in_mig_mode_say_where_instances_can_be(node: Node) -> None:
    found = await node.read(*PROFILES)

    one, three, seven, me = found.topology.gpus[8].mig_profiles
    assert ["1g.10gb", "3g.40gb", "7g.80gb", "1g.10gb+me"] == [each.name for each in (one, three, seven, me)]
    assert MigPlacement(start=4, size=4) == three.placements[1]
    assert (40448 << 20, 3, 46) == (three.memory, three.slices, three.cores)
    assert [13, 46, 100] == [each.cores for each in (one, three, seven)]
    (instance,) = found.topology.gpus[8].mig or ()
    assert MigPlacement(start=6, size=1) == instance.placement
    assert () == found.topology.gpus[0].mig_profiles


async def test_profiles_are_asked_for_once_while_nvml_is_open(node: Node) -> None:
    first = await node.read(*PROFILES)
    asked = node.standin.calls("nvmlDeviceGetGpuInstanceProfileInfoV")
    again = await node.read(*PROFILES)

    assert 18 == asked == node.standin.calls("nvmlDeviceGetGpuInstanceProfileInfoV")
    assert first.topology.gpus[8].mig_profiles == again.topology.gpus[8].mig_profiles


@pytest.mark.parametrize("code", [3, 4, 13])
async def test_without_the_right_to_know_no_place_is_told(node: Node, code: int) -> None:
    """The driver tells root alone; its instances are listed as ever."""
    calls = ("nvmlDeviceGetGpuInstancePossiblePlacements_v2", "nvmlDeviceGetGpuInstanceById")
    found = await node.read(*PROFILES, *(f"fail {call} 8 {code}" for call in calls))

    gpu = found.topology.gpus[8]
    assert () == gpu.mig_profiles
    assert [("MIG-b", None)] == [(each.uuid, each.placement) for each in gpu.mig or ()]
    assert found.health[gpu.id].usable and not found.findings


@pytest.mark.parametrize("profile", ["1g.24gb", "1g.24gb-me", "1g.24gb+me.all", "1c.2g.48gb+gfx"])
async def test_a_profile_with_or_without_media_engines_is_one_of_its_own(node: Node, profile: str) -> None:
    """An RTX PRO 6000 Blackwell has them all, and they are different resources."""
    name = f"NVIDIA_RTX_PRO_6000_Blackwell_MIG_{profile}"
    found = await node.read("gpu uuid=GPU-x pci=00000000:F9:00.0 mig=1", f"mig 8 gi=1 uuid=MIG-a name={name}")

    assert [profile] == [instance.profile for instance in found.topology.gpus[8].mig or ()]


async def test_a_mig_instance_without_rights_to_see_it_is_left_out_and_reported(node: Node) -> None:
    found = await node.read(
        "gpu uuid=GPU-x pci=00000000:F9:00.0 mig=1", "mig 8 uuid=MIG-a", "fail nvmlDeviceGetAttributes_v2 * 4"
    )

    assert (() == found.topology.gpus[8].mig) and found.health[DeviceID("GPU-x")].usable
    assert "MIG instance" in found.findings[0]


async def test_equal_machines_are_equal_readings_and_survive_json(node: Node) -> None:
    first, second = await node.read(*switch_links(8, 18)), await node.read(*switch_links(8, 18))

    assert first == second
    assert first == msgspec.json.decode(msgspec.json.encode(first), type=Inventory)

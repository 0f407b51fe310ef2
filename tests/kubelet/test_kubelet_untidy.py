"""The fake kubelet leaves its files as stale and its directories as odd as a kubelet does."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from device_allocations_support import MemoryAllocator
from kubelet_support import GIB, Node, node, offers, pod, two_nodes

from topoalign.allocator.reconciliation.pod_resources import PodResourcesClient
from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.model.decisions import Admission, Refusal
from topoalign.core.model.errors import StateFault
from topoalign.core.model.events import DeviceHealth, HealthState
from topoalign.core.model.ids import CPU, GPU, MEMORY, ContainerName, DeviceID, Namespace, PodName, ResourceName
from topoalign.core.model.requests import AdmissionRules, ContainerRequest, CpuOption, PodRequest, Policy
from topoalign.kubelet.files import cpu_checkpoint, memory_checkpoint
from topoalign.testing.fake_kubelet.admission import in_map_order
from topoalign.testing.fake_kubelet.kubelet import FakeKubelet
from topoalign.testing.manual_clock import ManualClock

pytestmark = pytest.mark.anyio
MACHINE = two_nodes()
DEFAULT = Namespace("default")
RULES = AdmissionRules(policy=Policy.RESTRICTED, reserved_cpus="0")
WHOLE_CORES = AdmissionRules(
    policy=Policy.RESTRICTED, reserved_cpus="0", cpu_options=frozenset({CpuOption.FULL_PCPUS_ONLY})
)


def untidy(rules: AdmissionRules = RULES, clock: ManualClock | None = None) -> Any:
    return node(MACHINE, allocator=MemoryAllocator(MACHINE), rules=rules, clock=clock)


def listed(root: Path) -> dict[str, set[str]]:
    """File -> the pods that it lists."""
    cpus = json.loads((root / "cpu_manager_state").read_bytes())
    memory = json.loads((root / "memory_manager_state").read_bytes())
    devices = json.loads((root / "device-plugins/kubelet_internal_checkpoint").read_bytes())
    return {
        "cpus": {*cpus.get("entries", {})},
        "memory": {*memory.get("entries", {})},
        "devices": {entry["PodUID"] for entry in devices["Data"]["PodDeviceEntries"] or ()},
    }


def directories(root: Path) -> set[str]:
    return {path.name for path in (root / "pods").iterdir()}


async def admitted(it: Node, name: str, **asked: int) -> None:
    assert isinstance(await it.kubelet.admit(pod(name, **asked)), Admission)


async def test_a_gone_pod_stays_in_all_three_files_but_its_directory_goes() -> None:
    """What a pod had stays in all three files when it goes, and its directory does not."""
    async with untidy() as it:
        await admitted(it, "train", gpus=1, cpus=2)
        running = listed(it.directory), directories(it.directory)
        await it.kubelet.remove(DEFAULT, PodName("train"))

        assert ({kind: {"default_train"} for kind in ("cpus", "memory", "devices")}, {"default_train"}) == running
        assert (running[0], set()) == (listed(it.directory), directories(it.directory))
        assert 8 == len(it.kubelet.state().ownership.free(GPU))


async def test_the_next_admission_drops_a_gone_pod_from_the_files_it_writes() -> None:
    """The next admission drops a gone pod, but from the device checkpoint only if that admission allocates devices."""
    async with untidy() as it:
        await admitted(it, "train", gpus=1, cpus=2)
        await it.kubelet.remove(DEFAULT, PodName("train"))
        await admitted(it, "plain", cpus=2)
        without_devices = listed(it.directory)
        await admitted(it, "next", gpus=1)

        kept = {"cpus": {"default_plain"}, "memory": {"default_plain"}}
        assert {**kept, "devices": {"default_train"}} == without_devices
        assert {**kept, "devices": {"default_next"}} == listed(it.directory)


async def test_under_policy_none_a_pod_refused_for_devices_drops_nothing() -> None:
    """Under the policy none, a pod that the device manager refuses drops no CPUs and no memory of gone pods."""
    async with untidy(AdmissionRules(policy=Policy.NONE, reserved_cpus="0")) as it:
        await admitted(it, "train", cpus=2)
        await it.kubelet.remove(DEFAULT, PodName("train"))
        refusal = await it.kubelet.admit(pod("large", gpus=9, cpus=2))

        assert isinstance(refusal, Refusal)
        assert ({"default_train"}, {"default_train"}) == (listed(it.directory)["cpus"], listed(it.directory)["memory"])


async def test_only_the_cpu_manager_drops_a_gone_pod_within_10_seconds() -> None:
    """The CPU manager drops a gone pod within 10 seconds, and the memory manager does not."""
    clock = ManualClock()
    async with untidy(clock=clock) as it:
        await admitted(it, "train", gpus=1, cpus=2)
        await it.kubelet.remove(DEFAULT, PodName("train"))
        await clock.advance(10)

        kept = {"default_train"}
        assert {"cpus": set(), "memory": kept, "devices": kept} == listed(it.directory)


@pytest.mark.parametrize(("asked_before", "left"), [(False, {"default_train"}), (True, set())])
async def test_a_plugin_writes_the_checkpoint_and_a_pod_resources_call_cleans_it(
    asked_before: bool, left: set[str]
) -> None:
    """
    A message of a plugin writes the device checkpoint; a call of PodResources before it removes gone pods from what is
    written.
    """
    async with untidy() as it:
        await admitted(it, "train", gpus=1)
        await it.kubelet.remove(DEFAULT, PodName("train"))
        if asked_before:
            async with PodResourcesClient(
                it.kubelet.pod_resources_dir / "kubelet.sock", it.kubelet.plugins_dir, ManualClock()
            ) as client:
                await client.listing()
        after_the_look = listed(it.directory)["devices"]
        it.allocator.judge({DeviceID("GPU-7"): DeviceHealth(state=HealthState.UNHEALTHY)})
        await it.kubelet.until(lambda kubelet: kubelet.allocatable(GPU) == 7)

        assert {"default_train"} == after_the_look
        assert left == listed(it.directory)["devices"]


async def test_a_pod_that_a_later_manager_refuses_leaves_devices_in_the_file() -> None:
    """
    A pod that a later manager refuses has its devices in the checkpoint and no directory. Three CPUs are no whole
    cores: the device manager has allocated by then, and the plugin has been told.
    """
    async with untidy(WHOLE_CORES) as it:
        refusal = await it.kubelet.admit(pod("odd", gpus=4, cpus=3))
        held, told = listed(it.directory), len(it.allocator.state.allocations)

        assert isinstance(refusal, Refusal)
        assert ("SMTAlignmentError", "cpu") == (refusal.reason, refusal.provider)
        assert {"cpus": set(), "memory": set(), "devices": {"default_odd"}} == held
        assert (1, set()) == (told, directories(it.directory))
        await admitted(it, "all", gpus=8)
        assert {"default_all"} == listed(it.directory)["devices"]


async def test_cpus_of_a_pod_refused_for_memory_stay_until_the_next_cleanup() -> None:
    """CPUs of a pod that was refused for its memory stay until the CPU manager looks for gone pods."""
    clock = ManualClock()
    async with untidy(AdmissionRules(policy=Policy.NONE, reserved_cpus="0"), clock=clock) as it:
        amounts = {CPU: 2000, MEMORY: 200 * GIB}
        greedy = PodRequest(
            name=PodName("greedy"),
            containers=(ContainerRequest(name=ContainerName("main"), requests=amounts, limits=amounts),),
        )
        refusal = await it.kubelet.admit(greedy)
        held = listed(it.directory)["cpus"]
        await clock.advance(10)

        assert isinstance(refusal, Refusal)
        assert ("memory", {"default_greedy"}, set()) == (refusal.provider, held, listed(it.directory)["cpus"])


@pytest.mark.parametrize(
    ("manager", "load"),
    [("cpus", cpu_checkpoint.load_cpu_state), ("memory", memory_checkpoint.load_memory_state)],
    ids=["cpus", "memory"],
)
async def test_a_change_is_two_writes_and_between_them_the_file_does_not_add_up(
    manager: str, load: Callable[[Path], Any]
) -> None:
    async with untidy() as it:
        seen: list[bool] = []

        def adds_up() -> bool:
            state = load(it.directory)
            try:
                if manager == "cpus":
                    cpu_checkpoint.check_cpu_state(state, MACHINE, RULES)
            except StateFault:
                return False
            return manager == "cpus" or not state.lost

        def look() -> None:
            seen.append(adds_up())

        getattr(it.kubelet.managers, manager).between = look
        await admitted(it, "train", cpus=2)
        given = adds_up()
        await it.kubelet.remove(DEFAULT, PodName("train"))
        it.kubelet.managers.drop(frozenset())

        assert [False, False] == seen
        assert (True, True) == (given, adds_up())


async def test_an_ended_pod_keeps_its_directory_until_it_is_deleted() -> None:
    """A pod that has ended keeps its directory, with its volumes torn down, until it is deleted."""
    async with untidy() as it:
        await admitted(it, "job", gpus=1)
        volumes = it.directory / "pods/default_job/volumes"
        running = [path.name for path in volumes.glob("*/*")]
        await it.kubelet.end(DEFAULT, PodName("job"))
        ended = [path.name for path in volumes.glob("*")], [path.name for path in volumes.glob("*/*")]
        free = len(it.kubelet.state().ownership.free(GPU))
        await it.kubelet.remove(DEFAULT, PodName("job"))

        assert ["kube-api-access"] == running
        assert (["kubernetes.io~projected"], []) == ended
        assert (8, set()) == (free, directories(it.directory))


async def test_a_pod_without_volumes_and_a_static_pod_have_directories_too() -> None:
    async with untidy() as it:
        await it.kubelet.admit(pod("bare", gpus=1), volumes=False)
        await it.kubelet.admit(pod("static", gpus=1), uid="8f113e8c26eb173aa88e56feb262d150")

        assert {"default_bare", "8f113e8c26eb173aa88e56feb262d150"} == directories(it.directory)
        assert [] == list((it.directory / "pods/default_bare/volumes").iterdir())
        assert directories(it.directory) == listed(it.directory)["devices"]


async def test_a_pod_made_anew_under_its_name_has_another_uid() -> None:
    async with untidy() as it:
        await admitted(it, "db-0", gpus=1)
        await it.kubelet.remove(DEFAULT, PodName("db-0"))
        await admitted(it, "db-0", cpus=2)

        assert {"default_db-0_2"} == directories(it.directory)
        assert ({"default_db-0"}, {"default_db-0_2"}) == (
            listed(it.directory)["devices"],
            listed(it.directory)["cpus"],
        )


async def test_memory_of_init_containers_is_free_once_containers_have_started() -> None:
    """Memory of init containers is free once the containers have started."""
    asked = {CPU: 1000, MEMORY: 60 * GIB}
    small = {CPU: 1000, MEMORY: GIB}
    staged = PodRequest(
        name=PodName("staged"),
        init_containers=(ContainerRequest(name=ContainerName("load"), requests=asked, limits=asked),),
        containers=(ContainerRequest(name=ContainerName("main"), requests=small, limits=small),),
    )
    async with untidy() as it:
        await it.kubelet.admit(staged, start=False)
        before = {node: use.reserved[MEMORY] for node, use in it.kubelet.state().memory.items()}
        await it.kubelet.start_containers(DEFAULT, PodName("staged"))
        after = {node: use.reserved[MEMORY] for node, use in it.kubelet.state().memory.items()}

        assert ({0: 60 * GIB}, {0: GIB}) == (before, after)


async def test_until_a_kubelet_has_settled_nothing_is_dropped() -> None:
    clock = ManualClock()
    async with untidy(clock=clock) as it:
        await admitted(it, "train", gpus=8)
        await it.kubelet.restart(settle_seconds=60)
        await it.kubelet.remove(DEFAULT, PodName("train"))
        await until_offered(it, clock)
        early = await it.kubelet.admit(pod("early", gpus=1))
        with_volume = directories(it.directory), [*(it.directory / "pods/default_early/volumes").glob("*/*")]
        await clock.advance(60)
        late = await it.kubelet.admit(pod("late", gpus=8))

        assert (Refusal, Admission) == (type(early), type(late))
        assert ({"default_early"}, []) == with_volume


async def until_offered(it: Node, clock: ManualClock) -> None:
    while not offers(MACHINE)(it.kubelet):
        await clock.advance(1)


async def test_a_kubelet_without_its_checkpoint_gives_devices_in_use_again() -> None:
    """
    A kubelet that has lost its checkpoint gives a running pod's devices again, and shows that pod without its devices.
    F21 begins so.
    """
    clock = ManualClock()
    async with untidy(clock=clock) as it:
        await admitted(it, "first", gpus=1)
        await it.kubelet.stop()
        (it.kubelet.plugins_dir / "kubelet_internal_checkpoint").unlink()
        await it.kubelet.start()
        await until_offered(it, clock)
        async with PodResourcesClient(
            it.kubelet.pod_resources_dir / "kubelet.sock", it.kubelet.plugins_dir, ManualClock()
        ) as client:
            listing = await client.listing()
        second = await it.kubelet.admit(pod("second", gpus=8))

        assert (1, ()) == (listing.pods, listing.holdings)
        assert isinstance(second, Admission)


async def test_what_an_init_container_left_is_used_again_by_chance() -> None:
    two, one = {GPU: 2}, {GPU: 1}
    staged = [
        PodRequest(
            name=PodName(f"staged-{number}"),
            init_containers=(ContainerRequest(name=ContainerName("load"), requests=two, limits=two),),
            containers=(ContainerRequest(name=ContainerName("main"), requests=one, limits=one),),
        )
        for number in range(24)
    ]
    used: set[str] = set()
    async with chancy() as it:
        for each in staged:
            decision = await it.kubelet.admit(each)
            assert isinstance(decision, Admission)
            used.update(decision.allocations[-1].devices[GPU])
            await it.kubelet.remove(DEFAULT, each.name)
            it.allocator.release_all()

    assert {"GPU-0", "GPU-1"} == used


def chancy() -> Any:
    return node(MACHINE, allocator=MemoryAllocator(MACHINE), rules=RULES, chance=Random(1))


async def test_another_kubelet_reads_back_all_that_was_given() -> None:
    async with untidy() as it:
        await admitted(it, "train", gpus=1, cpus=2)
        before = it.kubelet.state()
        await it.kubelet.stop()
        successor = FakeKubelet(it.kubelet.plugins_dir, it.kubelet.pod_resources_dir, MACHINE, RULES)
        await it.tasks.start(successor.run)

        assert (before.allocations, before.memory) == (successor.state().allocations, successor.state().memory)


def test_a_container_s_resources_are_asked_for_in_the_order_of_a_go_map() -> None:
    """Of two the second comes first from one slot of eight, of three the second and the third."""
    for names, expected in (("ab", "abaaaaaa"), ("abc", "abcaaaaa")):
        amounts = dict.fromkeys(map(ResourceName, names), 1)
        main = ContainerRequest(name=ContainerName("main"), requests=amounts, limits=amounts)
        (demand,) = read_pod(PodRequest(name=PodName("p"), containers=(main,)), RULES).containers
        orders = ["".join(in_map_order(demand, slot).devices) for slot in range(8)]

        assert expected == "".join(order[0] for order in orders)
        assert {names} == {"".join(sorted(order)) for order in orders}

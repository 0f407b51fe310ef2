"""Pods through the fake kubelet and the real front: policies, reuse, restarts, failures."""

import json
from collections.abc import Sequence
from typing import Any

import anyio
import pytest
from device_allocations_support import MemoryAllocator
from kubelet_support import node, offers, pod, two_nodes

from topoalign.allocator.device_plugin import plugin_server
from topoalign.core.model.decisions import Admission, Decision, Refusal
from topoalign.core.model.errors import InvalidField, StateFault
from topoalign.core.model.events import DeviceHealth, HealthState
from topoalign.core.model.ids import GPU, NIC, ContainerName, DeviceID, Namespace, PodName, ResourceName
from topoalign.core.model.requests import AdmissionRules, ContainerRequest, PodRequest, Policy, Scope
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.testing.fake_kubelet.kubelet import FakeKubelet
from topoalign.testing.fake_kubelet.plugins import is_extended
from topoalign.testing.manual_clock import ManualClock, all_tasks_blocked

pytestmark = pytest.mark.anyio
MACHINE = two_nodes()
DEFAULT = Namespace("default")
MAIN = ContainerName("main")


def admitted(decision: Decision) -> Admission:
    assert isinstance(decision, Admission), decision
    return decision


def refused(decision: Decision) -> Refusal:
    assert isinstance(decision, Refusal), decision
    return decision


def gpus(decision: Decision) -> tuple[str, ...]:
    return admitted(decision).allocations[-1].devices[GPU]


async def test_the_main_job_under_restricted() -> None:
    """
    Four GPUs of one NUMA node; two GPUs, eight CPUs and a NIC of the other; and then two more GPUs are free on two nodes,
    so a pod that wants both is refused with the kubelet's word for it and leaves nothing.
    """
    machine = two_nodes(gpus=8)
    async with node(machine) as it:
        first = await it.kubelet.admit(pod("four", gpus=3))
        second = await it.kubelet.admit(pod("mixed", gpus=3, cpus=8, nics=1))
        before = it.kubelet.state()
        third = refused(await it.kubelet.admit(pod("split", gpus=2)))

        assert ("GPU-0", "GPU-1", "GPU-2") == gpus(first)
        (mixed,) = admitted(second).allocations
        assert (("GPU-4", "GPU-5", "GPU-6"), ("mlx5_1",)) == (mixed.devices[GPU], mixed.devices[NIC])
        assert {1} == {cpu.node for cpu in machine.cpus if cpu.id in before.ownership.cpus_in_use and cpu.id > 15}
        assert "TopologyAffinityError" == third.reason
        assert before.allocations == it.kubelet.state().allocations
        assert [{"GPU-0", "GPU-1", "GPU-2"}, {"GPU-4", "GPU-5", "GPU-6"}, {"mlx5_1"}] == [
            set(allocation.device_ids) for allocation in it.allocator.state.allocations.values()
        ]


async def test_the_container_is_told_its_devices() -> None:
    async with node(MACHINE) as it:
        await it.kubelet.admit(pod("train", gpus=2, nics=1))

        responses = it.kubelet.running[DEFAULT, PodName("train")].responses
        assert {"NVIDIA_VISIBLE_DEVICES": "GPU-0,GPU-1"} == responses[MAIN, GPU].envs
        assert "/dev/infiniband/uverbs0" == responses[MAIN, NIC].devices[0].host_path


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (Policy.NONE, None),
        (Policy.BEST_EFFORT, None),
        (Policy.RESTRICTED, None),
        (Policy.SINGLE_NUMA_NODE, "TopologyAffinityError"),
    ],
)
async def test_six_gpus_of_two_nodes_fit_every_policy_but_single_numa_node(policy: Policy, reason: str | None) -> None:
    async with node(MACHINE, rules=AdmissionRules(policy=policy)) as it:
        decision = await it.kubelet.admit(pod("wide", gpus=6))

        assert reason == (decision.reason if isinstance(decision, Refusal) else None)


async def test_in_scope_pod_all_containers_share_one_node() -> None:
    resources = {GPU: 2}
    pair = PodRequest(
        name=PodName("pair"),
        containers=tuple(
            ContainerRequest(name=ContainerName(name), requests=resources, limits=resources) for name in ("a", "b")
        ),
    )
    async with node(MACHINE, rules=AdmissionRules(policy=Policy.SINGLE_NUMA_NODE, scope=Scope.POD)) as it:
        decision = admitted(await it.kubelet.admit(pair))

        held = {device for allocation in decision.allocations for device in allocation.device_ids}
        assert {"GPU-0", "GPU-1", "GPU-2", "GPU-3"} == held


class CountingDesk(MemoryAllocator):
    """Notes what it was asked to prefer, and prefers the last devices."""

    def __init__(self) -> None:
        super().__init__(MACHINE)
        self.asked: list[tuple[int, int]] = []

    async def prefer(
        self, resource: ResourceName, available: Sequence[DeviceID], must_include: Sequence[DeviceID], size: int
    ) -> tuple[DeviceID, ...]:
        self.asked.append((len(available), size))
        return tuple(sorted(available)[-size:])


async def test_the_plugin_is_asked_for_a_preference_only_where_there_is_a_choice() -> None:
    """Two of the four GPUs of a node are a choice; all four are none, and a kubelet does not ask."""
    allocator = CountingDesk()
    async with node(MACHINE, allocator=allocator) as it:
        two = gpus(await it.kubelet.admit(pod("two", gpus=2)))
        four = gpus(await it.kubelet.admit(pod("four", gpus=4)))

        assert ({"GPU-2", "GPU-3"}, {"GPU-4", "GPU-5", "GPU-6", "GPU-7"}) == (set(two), set(four))
        assert [(4, 2)] == allocator.asked


async def test_a_plugin_that_cannot_record_refuses_the_pod_and_nothing_is_left() -> None:
    async with node(MACHINE) as it:
        it.allocator.fault = StateFault("the journal cannot grow", "free some space")
        refusal = refused(await it.kubelet.admit(pod("train", gpus=4)))

        assert "UnexpectedAdmissionError" == refusal.reason
        assert "the journal cannot grow; free some space" in refusal.finding
        assert {} == it.kubelet.running
        assert 8 == len(it.kubelet.state().ownership.free(GPU))


async def test_an_unhealthy_gpu_is_not_given_to_anyone() -> None:
    async with node(MACHINE) as it:
        it.allocator.judge({DeviceID("GPU-1"): DeviceHealth(state=HealthState.UNHEALTHY)})
        await it.kubelet.until(lambda kubelet: kubelet.allocatable(GPU) == 7)

        assert ("GPU-0", "GPU-2") == gpus(await it.kubelet.admit(pod("train", gpus=2)))


async def test_a_removed_pod_gives_its_devices_back_to_the_kubelet() -> None:
    async with node(MACHINE) as it:
        await it.kubelet.admit(pod("train", gpus=8))
        await it.kubelet.remove(DEFAULT, PodName("train"))
        it.allocator.release_all()

        assert 8 == len(gpus(await it.kubelet.admit(pod("next", gpus=8))))


async def test_an_app_container_takes_over_the_devices_of_an_init_container() -> None:
    one = {GPU: 1}
    staged = PodRequest(
        name=PodName("staged"),
        init_containers=(ContainerRequest(name=ContainerName("warm-up"), requests=one, limits=one),),
        containers=(ContainerRequest(name=MAIN, requests=one, limits=one),),
    )
    allocator = MemoryAllocator(MACHINE)
    async with node(MACHINE, allocator=allocator) as it:
        decision = admitted(await it.kubelet.admit(staged))

        assert [("GPU-0",), ("GPU-0",)] == [allocation.devices[GPU] for allocation in decision.allocations]


async def test_a_pod_that_comes_while_the_kubelet_is_stopped_waits_for_its_start() -> None:
    async with node(MACHINE) as it:
        await it.kubelet.stop()
        assert 0 == it.kubelet.allocatable(GPU)
        decisions: list[Decision] = []

        async def admit() -> None:
            decisions.append(await it.kubelet.admit(pod("train")))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(admit)
            await all_tasks_blocked()
            assert not decisions
            await it.kubelet.start()

    admitted(decisions[0])


async def test_a_pod_whose_kubelet_stops_while_a_plugin_is_asked_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with node(MACHINE) as it:
        decisions: list[Decision] = []
        allocate = it.allocator.allocate

        async def stopping(*asked: Any) -> Any:
            await it.kubelet.restart()
            return await allocate(*asked)

        monkeypatch.setattr(it.allocator, "allocate", stopping)
        decisions.append(await it.kubelet.admit(pod("train", gpus=1)))

    refused(decisions[0])


async def test_after_a_restart_pods_keep_their_devices_and_none_starts_without() -> None:
    """
    After a restart pods keep their devices, and no pod is admitted without devices that it asks for. Until the plugin
    is back the kubelet knows the resource and no device: a pod is refused, not started bare.
    """
    clock = ManualClock()
    async with node(MACHINE, clock=clock) as it:
        await it.kubelet.admit(pod("train", gpus=4))
        await it.kubelet.restart()
        early = refused(await it.kubelet.admit(pod("early", gpus=1)))
        await clock.advance(1)
        await clock.advance(1)
        await it.kubelet.until(offers(MACHINE))
        late = gpus(await it.kubelet.admit(pod("late", gpus=4)))

        assert "no healthy devices present" in early.finding
        assert {"GPU-4", "GPU-5", "GPU-6", "GPU-7"} == set(late)


async def test_another_kubelet_on_the_same_directory_finds_the_pods() -> None:
    """Another kubelet on the same directory finds the pods in the checkpoint."""
    clock = ManualClock()
    async with node(MACHINE, clock=clock) as it:
        await it.kubelet.admit(pod("train", gpus=2, nics=1))
        await it.kubelet.stop()
        successor = FakeKubelet(it.kubelet.plugins_dir, it.kubelet.pod_resources_dir, MACHINE, AdmissionRules())
        await it.tasks.start(successor.run)
        await clock.advance(1)
        await clock.advance(1)
        await successor.until(offers(MACHINE))
        held = successor.running[DEFAULT, PodName("train")].allocations[0]
        rest = gpus(await successor.admit(pod("rest", gpus=6)))

        assert {GPU: ("GPU-0", "GPU-1"), NIC: ("mlx5_0",)} == held.devices
        assert {"GPU-2", "GPU-3", "GPU-4", "GPU-5", "GPU-6", "GPU-7"} == set(rest)


async def test_the_checkpoint_has_the_kubelets_form() -> None:
    async with node(MACHINE) as it:
        await it.kubelet.admit(pod("train", gpus=6))

        content = json.loads((it.directory / "device-plugins" / "kubelet_internal_checkpoint").read_bytes())
        (entry,) = content["Data"]["PodDeviceEntries"]
        assert ("default_train", "main", "nvidia.com/gpu") == (
            entry["PodUID"],
            entry["ContainerName"],
            entry["ResourceName"],
        )
        assert {"0": ["GPU-0", "GPU-1", "GPU-2", "GPU-3"], "1": ["GPU-4", "GPU-5"]} == entry["DeviceIDs"]
        assert [f"GPU-{i}" for i in range(8)] == content["Data"]["RegisteredDevices"]["nvidia.com/gpu"]


async def test_containers_start_without_a_call_that_nobody_asked_for() -> None:
    async with node(MACHINE) as it:
        await it.kubelet.admit(pod("train", gpus=1, nics=1))

        assert [] == it.allocator.starting


async def test_a_plugin_that_asks_for_it_is_called_before_containers_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        plugin_server, "plugin_options", lambda **_: v1beta1.DevicePluginOptions(pre_start_required=True)
    )
    async with node(MACHINE) as it:
        await it.kubelet.admit(pod("train", gpus=1, nics=1))

        assert [("GPU-0",), ("mlx5_0",)] == sorted(it.allocator.starting)


async def test_a_pod_that_cannot_be_meant_is_refused_by_its_field() -> None:
    bad = PodRequest(name=PodName("bad"), containers=(ContainerRequest(name=MAIN, limits={GPU: -1}),))
    async with node(MACHINE) as it:
        with pytest.raises(InvalidField, match=r"pod\.containers\[0\]"):
            await it.kubelet.admit(bad)


async def test_names_that_are_kubernetes_own_cannot_be_registered() -> None:
    assert [True, True] == [is_extended(GPU), is_extended(NIC)]
    assert not any(
        map(is_extended, ["cpu", "gpu", "kubernetes.io/gpu", "a.kubernetes.io/b", "requests.x/y", "x/", "/y"])
    )

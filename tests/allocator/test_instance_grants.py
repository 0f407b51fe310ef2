"""Slots that become MIG instances, over the kubelet's protocol."""

from collections.abc import Collection
from functools import partial
from pathlib import Path
from random import Random

import anyio
import msgspec
import pytest
from containers_support import Host
from instance_support import GIB, place
from share_support import DEFAULT, PLAIN
from slot_node_support import INSTANCE_SLOTS, Ask, InstanceNode

from topoalign.allocator.mig.calls import SEEN_SECONDS
from topoalign.allocator.mig.instance_log import AWAY_SECONDS
from topoalign.allocator.mig.instances import (
    COLLECT_SECONDS,
    PROBE_SECONDS,
    InstanceInUse,
    InstancesNeedKubelet,
    check_no_instances,
    collect_unused_instances,
    lost_note,
    report_fault,
)
from topoalign.allocator.ports import Poll
from topoalign.cli.gpu_partitioning import holder_text, partitioning_document
from topoalign.core import wire
from topoalign.core.model.allocations import Displaced, Owner
from topoalign.core.model.decisions import Admission, Decision, Refusal
from topoalign.core.model.errors import DeviceInUse, DriverFault
from topoalign.core.model.events import DeviceHealth
from topoalign.core.model.holdings import Amount, base_of
from topoalign.core.model.ids import GPU, ContainerName, DeviceID, PodName
from topoalign.core.model.maintenance import DevicesRequest
from topoalign.core.ports import Endpoint
from topoalign.core.state.gpu_partitioning import partitioning_by_gpu
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.replies import answer_with

pytestmark = pytest.mark.anyio


def check_instances(node: InstanceNode, names: Collection[str]) -> None:
    """Each pod received the instances of its record. No other instance exists, and no two pods share one."""
    recorded = [uuid for name in names for each in node.records(name) for uuid in each.instances.values()]
    told = [uuid for name in names for one in node.told(name) for uuid in one.split(",")]
    assert sorted(recorded) == sorted(told)
    assert len({*recorded}) == len(recorded)
    assert {*recorded} == node.there()


async def test_a_slot_becomes_an_instance_and_the_container_is_told_of_it() -> None:
    async with InstanceNode.running() as (it, _):
        pod = it.asking("a", Ask(2, memory=6_000, cores=1))
        it.reserve(pod)

        assert isinstance(await it.admit_pod(pod), Admission)
        assert isinstance(await it.admit_pod(it.asking("b", Ask(1))), Admission)
        await it.allocations.reconcile()

        check_instances(it, ["a", "b"])
        assert [Amount(cores=29, memory=10 * GIB)] * 2 == [*it.held("a").values()]
        assert [Amount(cores=15, memory=5 * GIB)] == [*it.held("b").values()]


async def test_an_instance_goes_with_its_container() -> None:
    async with InstanceNode.running() as (it, _):
        assert isinstance(await it.admit_pod(it.asking("a", Ask(1))), Admission)
        assert isinstance(await it.admit_pod(it.asking("b", Ask(1))), Admission)
        await it.remove("a")

        await it.sweep()

        check_instances(it, ["b"])


async def test_what_a_driver_refuses_is_refused_and_leaves_nothing() -> None:
    async with InstanceNode.running() as (it, _):

        def fail(step: str) -> None:
            if step == "compute instance":
                raise DriverFault("NVML: no permission", "be root")

        it.played.before_step = fail
        refusal = await it.admit_pod(it.asking("a", Ask(1)))

        assert isinstance(refusal, Refusal)
        assert "no permission" in refusal.finding
        assert set() == it.there()
        it.played.before_step = lambda step: None
        assert isinstance(await it.admit_pod(it.asking("b", Ask(1))), Admission)
        await it.allocations.reconcile()
        check_instances(it, ["b"])


async def test_a_gpu_without_a_place_is_refused() -> None:
    async with InstanceNode.running() as (it, _):
        for number in range(4):
            pod = it.asking(f"large-{number}", Ask(1, percentage=100))
            it.reserve(pod)
            assert isinstance(await it.admit_pod(pod), Admission)

        assert isinstance(await it.admit_pod(it.asking("b", Ask(1))), Refusal)
        assert 4 == len(it.there())


async def test_an_agent_that_starts_anew_knows_its_instances() -> None:
    async with InstanceNode.running() as (it, tasks):
        assert isinstance(await it.admit_pod(it.asking("a", Ask(1))), Admission)
        await it.allocations.reconcile()
        await it.start_agent(tasks)
        await it.sweep()

        check_instances(it, ["a"])
        await it.remove("a")
        await it.sweep()
        assert set() == it.there()


async def test_the_instance_of_a_displaced_container_stays_as_long_as_it_may_run() -> None:
    """The kubelet has lost its checkpoint and gives the slot to another container, which needs a larger instance."""
    async with InstanceNode.running() as (it, _):
        assert isinstance(await it.admit_pod(it.asking("a", Ask(1))), Admission)
        await it.allocations.reconcile()
        ((name, former),) = it.ledger.state.allocations.items()
        owner = Owner(namespace=DEFAULT, pod=PodName("a"), container=ContainerName("c"))
        displaced = Displaced(allocation=name, owner=owner, devices=dict(former.devices))
        other = msgspec.structs.replace(
            former, id=it.ledger.next_id(), displaced=(displaced,), instances=dict.fromkeys(former.instances, "MIG-new")
        )
        it.ledger.grant([other], instead_of=[name])
        await it.sweep()
        assert {*former.instances.values()} == it.there()

        it.ledger.grant([msgspec.structs.replace(other, id=it.ledger.next_id(), displaced=())], instead_of=[other.id])
        await it.sweep()
        assert set() == it.there()


async def test_nothing_is_destroyed_before_the_kubelet_has_told_what_runs() -> None:
    """The journal is an old copy, which lacks the container."""
    async with InstanceNode.running() as (it, tasks):
        assert isinstance(await it.admit_pod(it.asking("a", Ask(1))), Admission)
        it.ledger.release([*it.ledger.state.allocations], "gone")
        assert it.instances is not None
        compared: list[bool] = []

        def polled() -> Poll | None:
            return it.allocations.polled if compared else None

        tasks.start_soon(collect_unused_instances, it.instances, it.ledger, it.clock, polled)
        await it.clock.advance(3 * COLLECT_SECONDS)
        await it.settle()
        assert 1 == len(it.there())

        await it.allocations.reconcile()
        compared.append(True)
        await it.clock.advance(3 * COLLECT_SECONDS)
        await it.settle()
        assert 1 == len(it.there())
        await it.remove("a")
        await it.clock.advance(3 * COLLECT_SECONDS)
        await it.settle()
        assert set() == it.there()


async def test_an_instance_made_where_ours_was_destroyed_is_left_alone() -> None:
    """The driver makes id and uuid of the place, so it looks like ours."""
    async with InstanceNode.running() as (it, tasks):
        assert it.instances is not None
        tasks.start_soon(collect_unused_instances, it.instances, it.ledger, it.clock, lambda: it.allocations.polled)
        assert isinstance(await it.admit_pod(it.asking("a", Ask(1))), Admission)
        await it.allocations.reconcile()
        was = dict(it.played.instances)
        it.played.instances.clear()
        it.played.changed()
        await it.clock.advance(2 * COLLECT_SECONDS)
        it.played.instances.update(was)
        it.played.changed()

        await it.remove("a")
        await it.settle()
        await it.clock.advance(2 * COLLECT_SECONDS)

        assert {} == it.ledger.state.allocations
        assert was == it.played.instances


@pytest.mark.parametrize(("away", "left"), [(AWAY_SECONDS - 1, 0), (AWAY_SECONDS + 1, 1)])
async def test_what_ended_while_no_agent_ran_for_long_is_left_alone(away: float, left: int) -> None:
    """Who runs on is ours as before."""
    async with InstanceNode.running() as (it, tasks):
        for name in "ab":
            assert isinstance(await it.admit_pod(it.asking(name, Ask(1))), Admission)
        await it.allocations.reconcile()
        await it.drop("a")
        await it.clock.advance(away)

        await it.start_agent(tasks)
        assert it.instances is not None
        tasks.start_soon(collect_unused_instances, it.instances, it.ledger, it.clock, lambda: it.allocations.polled)
        await it.settle()
        await it.clock.advance(2 * COLLECT_SECONDS)
        assert 1 + left == len(it.there())
        await it.remove("b")
        await it.settle()
        await it.clock.advance(2 * COLLECT_SECONDS)
        assert left == len(it.there())


async def test_a_uuid_that_a_container_was_told_is_made_for_no_other() -> None:
    """After a reboot the instance is gone, and the kubelet starts its container again without asking."""
    async with InstanceNode.running() as (it, tasks):
        it.played.uuids_of_places = True
        for name in "ab":
            assert isinstance(await it.admit_pod(it.asking(name, Ask(1))), Admission)
        await it.allocations.reconcile()
        await it.remove("a")
        it.played.instances.clear()
        it.see()
        it.boot = "b2"
        await it.start_agent(tasks)

        for name in "cd":
            assert isinstance(await it.admit_pod(it.asking(name, Ask(1))), Admission)
        await it.allocations.reconcile()

        assert it.told("b").isdisjoint(it.there())
        assert it.there() == it.told("c") | it.told("d") and 2 == len(it.there())
        (gpu,) = {base_of(device) for name in "bcd" for each in it.records(name) for device in each.device_ids}
        divided = partitioning_by_gpu(it.ledger.state)[gpu]
        shown = {each.owner.pod: each.lost for each in divided.held if each.owner is not None}
        assert {"b": (*it.told("b"),), "c": (), "d": ()} == shown
        assert "containers whose MIG instances are gone: default/b c0; delete their pods" == lost_note(it.ledger.state)
        assert [True, False, False] == ["instance is gone" in holder_text(each) for each in divided.held]
        assert {"lost": (*it.told("b"),)}.items() <= partitioning_document(divided)["held"][0].items()  # type: ignore[index]  # a list


async def test_a_kubelet_that_repeats_itself_gets_no_instance_of_anothers_making() -> None:
    """After a reboot the instance is made anew, unless somebody has made one in its place, which has its uuid."""
    for is_taken in (False, True):
        async with InstanceNode.running() as (it, tasks):
            it.played.uuids_of_places = True
            assert isinstance(await it.admit_pod(it.asking("a", Ask(1))), Admission)
            await it.allocations.reconcile()
            was, (record,) = dict(it.played.instances), it.records("a")
            it.played.instances.clear()
            it.see()
            it.boot = "b2"
            await it.start_agent(tasks)
            it.played.instances.update(was if is_taken else {})
            it.see()

            if is_taken:
                with pytest.raises(DeviceInUse):
                    await it.allocations.allocate(GPU, [[*record.device_ids]])
            else:
                (again,) = await it.allocations.allocate(GPU, [[*record.device_ids]])
                assert record == again
            await it.sweep()
            assert was == it.played.instances


async def test_an_app_container_has_the_instance_of_its_init_container() -> None:
    async with InstanceNode.running() as (it, _):
        pod = it.asking("a", Ask(1, memory=3_000), init=[Ask(1, memory=9_000)])
        it.reserve(pod)

        assert isinstance(await it.admit_pod(pod), Admission)
        await it.allocations.reconcile()

        assert 1 == len(it.there())
        assert it.there() == it.told("a")
        assert [Amount(cores=29, memory=10 * GIB)] == [*it.held("a", "c1").values()]


async def test_slots_that_become_instances_are_for_a_kubelet_alone() -> None:
    """Over the bus nobody would make the instance."""
    async with InstanceNode.running() as (it, _):
        (decision,) = it.reserve(it.asking("a", Ask(1)))
        assert isinstance(decision, Admission)

        with pytest.raises(InstancesNeedKubelet, match="created only for a kubelet"):
            check_no_instances(it.machine, decision.allocations)
        check_no_instances(PLAIN, decision.allocations)


async def test_a_foreign_instance_takes_its_place() -> None:
    async with InstanceNode.running() as (it, _):
        for number, gpu in enumerate(it.machine.gpus):
            it.played.add(gpu.id, place(0, 8), DeviceID(f"MIG-theirs-{number}"))
        it.played.changed()

        assert isinstance(await it.admit_pod(it.asking("a", Ask(1))), Refusal)
        assert 4 == len(it.there())


async def test_a_gpu_whose_driver_fails_is_listed_as_unhealthy_until_it_works() -> None:
    async with InstanceNode.running() as (it, tasks):
        assert it.instances is not None
        tasks.start_soon(collect_unused_instances, it.instances, it.ledger, it.clock, lambda: it.allocations.polled)

        def fail(step: str) -> None:
            if step == "gpu instance":
                raise DriverFault("NVML has not answered within 10 s", "look at the kernel log")

        it.played.before_step = fail
        assert isinstance(await it.admit_pod(it.asking("a", Ask(1))), Refusal)
        ((_, why),) = it.allocations.faults.items()
        await it.kubelet.until(lambda kubelet: 3 * INSTANCE_SLOTS == len({*kubelet.state().healthy(GPU)}))
        assert "10 s" in why

        it.played.before_step = lambda step: None
        await it.clock.advance(PROBE_SECONDS + COLLECT_SECONDS)
        await it.kubelet.until(lambda kubelet: 4 * INSTANCE_SLOTS == len({*kubelet.state().healthy(GPU)}))
        assert {} == it.allocations.faults


async def test_an_instance_in_use_beside_one_that_fails_changes_nothing() -> None:
    """The driver fails with one and refuses the other, as long as both are to go: it is tried once in five seconds."""
    async with InstanceNode.running() as (it, tasks):
        assert it.instances is not None
        tasks.start_soon(collect_unused_instances, it.instances, it.ledger, it.clock, lambda: it.allocations.polled)
        gpu, tries = it.machine.gpus[0].id, list[int]()
        for number in range(2):
            (record,) = await it.allocations.allocate(GPU, [[DeviceID(f"{gpu}::{number}")]])
            it.ledger.release([record.id], "gone")

        async def fail(gpu: DeviceID, instance: int) -> None:
            tries.append(instance)
            assert len(tries) < 20, "it is tried again and again"
            if instance == 1:
                raise DriverFault("no", "look")
            raise InstanceInUse("processes use it", "look")

        it.played.destroy = fail  # type: ignore[method-assign]  # the driver fails at times
        for _ in range(3):
            await it.clock.advance(COLLECT_SECONDS)
            for _ in range(100):
                await anyio.lowlevel.checkpoint()

        assert 2 * [1, 2] <= tries <= 5 * [1, 2]
        assert {gpu: "no"} == it.allocations.faults


async def test_a_gpu_whose_driver_fails_is_reported_to_discovery() -> None:
    """Once for each fault, and again while it lasts; nobody has to answer."""
    async with InstanceNode.running() as (it, tasks):
        assert it.instances is not None
        bus, told = MemoryBus(), list[DevicesRequest]()

        async def hear(request: DevicesRequest) -> dict[DeviceID, DeviceHealth]:
            told.append(request)
            return {}

        def fail(step: str) -> None:
            if step in ("there", "gpu instance"):
                raise DriverFault("no permission", "be root")

        report, node = partial(report_fault, bus, it.ledger.node), it.ledger.node
        tasks.start_soon(
            collect_unused_instances, it.instances, it.ledger, it.clock, lambda: it.allocations.polled, report
        )
        it.played.before_step = fail
        assert isinstance(await it.admit_pod(it.asking("a", Ask(1))), Refusal)
        await it.clock.advance(PROBE_SECONDS + COLLECT_SECONDS)
        endpoint = Endpoint(
            name="report", subject=wire.devices_subject(node, "report"), answer=answer_with(DevicesRequest, hear)
        )
        async with bus.serve("discovery", [endpoint]):
            await it.clock.advance(PROBE_SECONDS + COLLECT_SECONDS)
            for _ in range(1_000):
                await anyio.lowlevel.checkpoint()

        (gpu,) = it.allocations.faults
        assert [
            DevicesRequest(node=node, devices=(gpu,), reason="its MIG instances cannot be changed: no permission")
        ] == told


async def test_what_is_reserved_keeps_its_place() -> None:
    """
    1g goes to the highest start, which is in the half that 3g needs: it takes the other half instead. A pod for one GPU
    is never taken for one that waits with two.
    """
    async with InstanceNode.running() as (it, _):
        pods = [it.asking(f"large-{number}", Ask(2, memory=15_000)) for number in range(3)]
        it.reserve(*pods, beside=True)
        gpus = [each.containers[0].devices[GPU][0].partition("::")[0] for each in it.reserved.reservations]
        for number in range(4):
            assert isinstance(await it.admit_pod(it.asking(f"small-{number}", Ask(1))), Admission)

        assert all([isinstance(await it.admit_pod(pod), Admission) for pod in pods]), gpus


async def test_an_instance_that_discovery_does_not_see_is_destroyed() -> None:
    async with InstanceNode.running() as (it, tasks):
        it.played.changed = lambda: None
        found: list[Decision] = []

        async def admit() -> None:
            found.append(await it.admit_pod(it.asking("a", Ask(1))))

        tasks.start_soon(admit)
        while not it.there():
            await anyio.lowlevel.checkpoint()
        await it.clock.advance(SEEN_SECONDS + 1)
        while not found:
            await it.clock.advance(0.1)

        assert isinstance(found[0], Refusal) and "discovery does not see" in found[0].finding
        await it.sweep()
        assert set() == it.there()


async def test_a_container_gets_the_device_nodes_of_an_instance_made_for_it(tmp_path: Path) -> None:
    host = Host(tmp_path)
    minors = "gpu{0}/gi1/access {1}\ngpu{0}/gi1/ci0/access {2}\n"
    (host.proc / "driver/nvidia-caps/mig-minors").write_text(
        "".join(minors.format(number, 10 * number, 10 * number + 1) for number in range(4))
    )
    async with InstanceNode.running(
        host.containers(host.configuration("envvar", plugin={"passDeviceSpecs": True}))
    ) as (
        it,
        _,
    ):
        assert isinstance(await it.admit_pod(it.asking("a", Ask(1))), Admission)

        (answer,) = it.answers("a").values()
        paths = [each.container_path for each in answer.devices]
        assert 2 == sum(path.startswith("/dev/nvidia-caps/nvidia-cap") for path in paths), paths
        assert it.there() == {answer.envs["NVIDIA_VISIBLE_DEVICES"]}


async def test_pods_that_come_and_go_beside_a_failing_driver_leave_nothing_over() -> None:
    """A driver that fails at random steps, agents that start anew, and pods of all sizes: by three seeds."""
    for seed in range(3):
        chance = Random(seed)
        async with InstanceNode.running() as (it, tasks):

            def fail(step: str, chance: Random = chance) -> None:
                if chance.random() < 0.15:
                    raise DriverFault(f"{step} fails", "look")

            it.played.before_step = fail
            running: list[str] = []
            for number in range(10):
                if running and chance.random() < 0.4:
                    await it.remove(gone := running.pop(chance.randrange(len(running))))
                    assert gone not in running
                else:
                    pod = it.asking(name := f"p{number}", Ask(1, memory=chance.choice([1_000, 9_000, 15_000, 40_000])))
                    it.reserve(pod)
                    if isinstance(await it.admit_pod(pod), Admission):
                        running.append(name)
                if chance.random() < 0.15:
                    await it.start_agent(tasks)
                await it.settle()
                await it.sweep()
            it.played.before_step = lambda step: None
            await it.settle()
            await it.sweep()
            check_instances(it, running)

"""Units that are spread over several GPUs, over the kubelet's protocol: given as they are reserved, or not at all."""

import pytest
from share_support import DEFAULT, NAMES, OTHER_ORDER, ShareNode
from unit_support import CORES, MEMORY, spread

from topoalign.core.model.decisions import Admission, Decision, Refusal
from topoalign.core.model.ids import DeviceID, PodName, ResourceName
from topoalign.core.model.requests import PodRequest, Policy
from topoalign.core.sharing.share_refusals import ShareSplit

pytestmark = pytest.mark.anyio

ORDERS = pytest.mark.parametrize("names", [NAMES, OTHER_ORDER], ids=["cores-first", "memory-first"])
Names = tuple[ResourceName, ResourceName]


def half_of_two(it: ShareNode, name: str) -> PodRequest:
    """A pod that asks for 30 units of computing time and 4 blocks of each of two GPUs."""
    return spread(it.pod(name, (60, 8)), 2)


async def admit(it: ShareNode, pod: PodRequest) -> Decision:
    return await it.kubelet.admit(pod, f"uid-{pod.name}")


def units(it: ShareNode, cores: int, memory: int, *gpus: int) -> dict[ResourceName, list[DeviceID]]:
    """The first units of each of these GPUs."""
    found = [it.units(gpu, cores, memory) for gpu in gpus]
    return {name: [unit for each in found for unit in each.get(name, ())] for name in it.names}


def told(it: ShareNode, name: str) -> set[str]:
    """The GPUs that the container of a pod is told, by each of its answers."""
    answers = it.answers(name).values()
    return {answer.envs["NVIDIA_VISIBLE_DEVICES"] for answer in answers}


async def shown(it: ShareNode, name: str) -> set[DeviceID]:
    """What PodResources shows of the pod."""
    return {
        each for one in (await it.pod_resources.listing()).holdings if one.owner.pod == name for each in one.devices
    }


@ORDERS
async def test_a_reserved_share_of_two_gpus_is_given_as_it_is_reserved(names: Names) -> None:
    """What the container is told, what PodResources shows, the record and the reservation are the same."""
    async with ShareNode.running(names=names) as (it, tasks):
        (predicted,) = it.reserve(half_of_two(it, "p"))
        assert isinstance(predicted, Admission)

        assert isinstance(await admit(it, half_of_two(it, "p")), Admission)

        await it.allocations.reconcile()
        (reserved,) = predicted.allocations
        gpus, live = sorted(reserved.amounts), it.ledger.state.allocations.values()
        expected = {name: dict.fromkeys(gpus, amount) for name, amount in zip(names, (30, 4), strict=True)}
        assert {"c0": expected} == it.gpus("p")
        assert {",".join(gpus)} == told(it, "p")
        assert reserved.device_ids == await shown(it, "p") == {unit for each in live for unit in each.device_ids}
        assert [("p", "uid-p")] * 2 == [(each.owner and each.owner.pod, each.pod_uid) for each in live]
        await it.start_agent(tasks)
        await it.kubelet.start_containers(DEFAULT, PodName("p"))


async def test_pods_with_equal_spread_shares_have_one_each() -> None:
    async with ShareNode.running() as (it, _):
        it.keep(p=units(it, 30, 4, 0, 1), q=units(it, 30, 4, 2, 3))

        for name in ("q", "p"):
            assert isinstance(await admit(it, half_of_two(it, name)), Admission)

        assert {"GPU-0,GPU-1", "GPU-2,GPU-3"} == told(it, "p") | told(it, "q")
        assert 1 == len(told(it, "p"))


async def test_a_kubelet_that_is_told_of_no_reservation_spreads_nothing() -> None:
    """It knows no annotations, and nothing is guessed: the share is of one GPU, as its limits say."""
    async with ShareNode.running() as (it, _):
        assert isinstance(await admit(it, half_of_two(it, "p")), Admission)

        assert {1} == {len(gpus) for gpus in it.gpus("p")["c0"].values()}
        await it.check(["p"])


@pytest.mark.parametrize("init", [((0, 2), (0, 4)), ((0, 4), (0, 4)), ((0, 2), (0, 4), (0, 6))], ids=str)
async def test_init_containers_take_over_equal_parts_and_get_more(init: tuple[tuple[int, int], ...]) -> None:
    """Seed 266 of the random admissions: each container has what is reserved for it, and then nobody waits for anything."""
    async with ShareNode.running() as (it, _):
        asked = spread(it.pod("p", (0, 8), init=init), 2)
        (predicted,) = it.reserve(asked)
        assert isinstance(predicted, Admission)

        assert isinstance(await admit(it, asked), Admission)

        parts = it.kubelet.running[DEFAULT, PodName("p")].parts()
        reserved = {each.owner.container: each.device_ids for each in predicted.allocations if each.owner is not None}
        assert reserved == {container: {*devices} for container, _, devices in parts}
        await it.allocations.reconcile()
        assert () == it.observed().held(it.clock.monotonic())
        assert isinstance(await it.admit("q", (0, 4)), Admission)
        await it.check(["p", "q"])


async def test_equal_parts_that_nobody_reserved_are_refused() -> None:
    async with ShareNode.running() as (it, _):
        it.keep(p=units(it, 30, 4, 0, 1))

        for gpus in ((0, 2), (2, 3), (0, 1, 2)):
            with pytest.raises(ShareSplit, match=f"units are of {len(gpus)} GPUs"):
                await it.allocations.allocate(CORES, [units(it, 30, 0, *gpus)[CORES]])
        assert {} == it.ledger.state.allocations


@pytest.mark.parametrize(("names", "half"), [(NAMES, 0), (NAMES, 1), (OTHER_ORDER, 1)])
async def test_no_half_of_one_gpu_is_given_instead(names: Names, half: int) -> None:
    """The kubelet takes as many units of one GPU, or of others: the container would have another share than was meant."""
    async with ShareNode.running(names=names) as (it, _):
        for gpus in ((0,), (2,)):
            it.keep(p=units(it, 30, 4, 0, 1))
            it.forced = {names[half]: it.units(gpus[0], 60, 8)[names[half]]}

            refusal = await admit(it, half_of_two(it, "p"))

            assert isinstance(refusal, Refusal)
            assert "needs them in equal parts of 'GPU-0', 'GPU-1'" in refusal.finding
            await it.remove("p")


async def test_a_kubelet_that_aligns_elsewhere_is_refused() -> None:
    """GPU-0 and GPU-2 are on two NUMA nodes, and the kubelet offers units of one node."""
    async with ShareNode.running(policy=Policy.SINGLE_NUMA_NODE) as (it, _):
        it.keep(p=units(it, 30, 4, 0, 2))

        refusal = await admit(it, half_of_two(it, "p"))

        assert isinstance(refusal, Refusal)
        assert "needs them in equal parts of 'GPU-0', 'GPU-2'" in refusal.finding
        assert () == await it.allocations.prefer(CORES, it.units(0, 60)[CORES], [], 60)


async def test_memory_of_one_of_the_gpus_does_not_go_with_time_of_both() -> None:
    """The reservation is over when the kubelet asks for the second half, and takes that of GPU-0 alone."""
    async with ShareNode.running() as (it, _):
        it.keep(p=units(it, 30, 4, 0, 1))
        await it.allocations.allocate(CORES, [units(it, 30, 0, 0, 1)[CORES]])
        it.keep()

        with pytest.raises(ShareSplit, match="computing time of GPU-0 and GPU-1"):
            await it.allocations.allocate(MEMORY, [it.units(0, 0, 8)[MEMORY]])


@pytest.mark.parametrize("memory", [[(0, 4), (2, 4)], [(0, 5), (1, 3)]], ids=["other", "unequal"])
async def test_a_container_with_other_halves_does_not_start(memory: list[tuple[int, int]]) -> None:
    async with ShareNode.running() as (it, _):
        blocks = [unit for gpu, amount in memory for unit in it.units(gpu, 0, amount)[MEMORY]]
        it.keep(p={**units(it, 30, 4, 0, 1), MEMORY: blocks})
        shares = it.allocations._units
        for check in ("check", "check_half", "check_spread"):
            setattr(shares, check, lambda *_: None)  # broken on purpose
        it.forced = {CORES: units(it, 30, 0, 0, 1)[CORES], MEMORY: blocks}

        decision = await it.admit("p", (60, 8))

        assert isinstance(decision, Refusal)
        assert [("c0", "ShareSplit")] == it.refusals("p")

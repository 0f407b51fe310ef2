"""Random pods with slots of GPUs, limited in each way, over real sockets, while the kubelet and the agent come and go."""

from collections.abc import Mapping
from hashlib import blake2s
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from faults_support import THOROUGH
from slot_node_support import EACH, SLOTS, Ask, HamiCoreNode, LimitedSlotNode, SlotNode, own
from slot_support import CORES, MEMORY, MIB, PERCENTAGE, WITH_NUMA_NODES

from topoalign.core.admission.admit import admit
from topoalign.core.model.decisions import Admission, Refusal
from topoalign.core.model.holdings import Amount, base_of
from topoalign.core.model.ids import GPU, ContainerName, DeviceID, PodName
from topoalign.core.model.requests import ContainerRequest, PodRequest, Policy
from topoalign.core.state.share_amounts import equal_part
from topoalign.kubelet.grpc.api import v1beta1

Part = tuple[int, int]
"""Cores and MiB."""
EQUAL: Part = (100 // SLOTS, EACH // SLOTS)
"""What a slot is of which nothing is reserved."""
CACHE, SHARED_FILE = "/usr/local/vgpu", "CUDA_DEVICE_MEMORY_SHARED_CACHE"


class ServedNode(LimitedSlotNode):
    """Its daemon of MPS is ready."""

    def __init__(self, directory: Path, *options: Any) -> None:
        super().__init__(directory, *options)
        self.mps.announcement.publish(self.mps.serves)


LIMITED_NODES: tuple[type[SlotNode], ...] = (HamiCoreNode, ServedNode, SlotNode)


def asked_of_each(container: ContainerRequest) -> Part:
    limits = container.limits
    return limits.get(CORES, 0), limits.get(MEMORY, 0) or EACH * limits.get(PERCENTAGE, 100) // 100


def parts_of(it: SlotNode, pod: PodRequest, is_reserved: bool) -> dict[str, dict[str, Part]]:
    """
    Container -> GPU -> what it is limited to of that. Without a reservation each slot is an equal part; a slot that an init
    container leaves to later ones has the larger amount of each kind for all of them.
    """
    slots = it.slots_of(str(pod.name))
    of_slot: dict[str, Part] = {}
    for container in (*pod.init_containers, *pod.containers):
        asked = asked_of_each(container) if is_reserved else EQUAL
        for slot in slots.get(str(container.name), []):
            cores, memory = of_slot.get(slot, (0, 0))
            of_slot[slot] = max(cores, asked[0]), max(memory, asked[1])
    return {
        container: {slot.split("::")[0]: of_slot[slot] for slot in some} for container, some in sorted(slots.items())
    }


def told_by_hami_core(parts: Mapping[str, Part]) -> dict[str, str]:
    """The variables of GPUs in the order of NVML, which is that of their names here."""
    told = {}
    limited = [cores if 0 < cores < 100 else 0 for _, (cores, _) in sorted(parts.items())]
    for place, (_, (_, memory)) in enumerate(sorted(parts.items())):
        told[f"CUDA_DEVICE_MEMORY_LIMIT_{place}"] = f"{memory}m"
        if limited[place] and len({*limited}) > 1:
            told[f"CUDA_DEVICE_SM_LIMIT_{place}"] = f"{limited[place]}"
    if limited[0] and len({*limited}) == 1:
        told["CUDA_DEVICE_SM_LIMIT"] = f"{limited[0]}"
    return told


def told_by_mps(parts: Mapping[str, Part]) -> dict[str, str]:
    limited = [cores for cores, _ in parts.values() if 0 < cores < 100]
    listed = ",".join(f"{place}={memory}M" for place, (_, (_, memory)) in enumerate(sorted(parts.items())))
    threads = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{min(limited)}"} if limited else {}
    return {**threads, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": listed}


def check_told(it: SlotNode, reserved: Mapping[str, tuple[PodRequest, bool]]) -> None:
    """
    The answers that the kubelet passes on to containers, and the record, have what each pod asks for, and the answers have
    nothing else. `reserved`: pod that runs -> what it asks for, and whether that was reserved.
    """
    files: list[str] = []
    for name, (pod, is_reserved) in reserved.items():
        apps = {str(each.name) for each in pod.containers}
        for container, parts in parts_of(it, pod, is_reserved).items():
            answer = it.answers(name)[ContainerName(container), GPU]
            if isinstance(it, HamiCoreNode):
                files.append(answer.envs[SHARED_FILE])
                told = {**told_by_hami_core(parts), SHARED_FILE: files[-1]}
                check_directory(it, name, container, answer, container in apps)
            elif isinstance(it, LimitedSlotNode):
                assert told_by_mps(parts) == (found := own(answer, it.mps)), (name, container, parts, found)
                told = {**told_by_mps(parts), **it.mps.everywhere[0]}
            else:
                told = {}
                assert [] == answer.mounts
            told["NVIDIA_VISIBLE_DEVICES"] = ",".join(sorted(parts))
            assert told == dict(answer.envs), (name, container, parts, dict(answer.envs))
            if container in apps:
                held = it.held(name, container)
                recorded = {gpu: (each.cores, each.memory // MIB) for gpu, each in held.items()}
                assert parts == recorded, (name, container, parts, recorded)
    assert len(files) == len({*files})


def check_directory(
    it: HamiCoreNode, name: str, container: str, answer: v1beta1.ContainerAllocateResponse, is_app: bool
) -> None:
    """It is named after the slots that the kubelet has given, is there, and says which record it is for."""
    slots = sorted(it.slots_of(name)[container])
    called = "slots-" + blake2s("\0".join([GPU, *slots]).encode(), digest_size=16).hexdigest()
    cache = it.root / called / "cache"
    mounts = {each.container_path: each.host_path for each in answer.mounts}
    assert {
        CACHE: str(cache),
        f"{CACHE}/libvgpu.so": str(it.root / "libvgpu.so"),
        "/tmp/vgpulock": str(it.root / "vgpulock"),  # where the library locks
        "/etc/ld.so.preload": str(it.root / "ld.so.preload"),
    } == mounts, (name, container)
    assert answer.envs[SHARED_FILE].startswith(f"{CACHE}/")
    assert cache.is_dir(), (name, container)
    if is_app:
        (record,) = it.records(name, container)
        assert record.id == (cache.parent / "of").read_text().split("\n")[0], (name, container)


pytestmark = pytest.mark.anyio

UNWANTED, POLICY = "nvidia.com/nouse-gpuuuid", "hami.io/gpu-scheduler-policy"
POLICIES = ("binpack", "spread", "mutex", "topology-aware")
ADMISSIONS = 25
"""Of each seed."""


def ask(chance: Random) -> Ask:
    gpus = chance.choice([1, 1, 1, 2, 2, 3])
    match chance.random():
        case low if low < 0.1:
            return Ask(gpus, cores=100)
        case low if low < 0.3:
            return Ask(gpus, percentage=chance.choice([10, 25, 50]), cores=chance.choice([0, 10, 40]))
        case _:
            return Ask(gpus, chance.randint(1, EACH // 2), chance.choice([0, 5, 30, 60]))


def made_of(it: SlotNode, name: str, chance: Random, says: Random) -> tuple[PodRequest, Mapping[str, Ask]]:
    """A pod, which says something about its GPUs by another chance, and what its app containers ask for."""
    asked = [ask(chance) for _ in range(chance.choice([1, 1, 1, 2]))]
    init = [ask(chance) for _ in range(chance.choice([0, 0, 0, 1]))]
    annotations = says.choice([{}, {}, {UNWANTED: f"GPU-{says.randrange(4)}"}, {POLICY: says.choice(POLICIES)}])
    return it.asking(name, *asked, init=init, annotations=annotations), {
        f"c{len(init) + place}": each for place, each in enumerate(asked)
    }


Running = dict[str, tuple[PodRequest, bool]]
"""Pod -> what it asks for, and whether that was reserved."""


async def end_some(it: SlotNode, running: Running, chance: Random) -> None:
    if running and chance.random() < 0.45:
        gone = chance.choice([*running])
        del running[gone]
        await (it.remove(gone) if chance.random() < 0.6 else it.drop(gone))


def check_held(it: SlotNode, name: str, asked: Mapping[str, Ask], unwanted: str = "") -> None:
    """
    Each container holds as much of each GPU as it asked for; more only of what its init container left. It has no `unwanted`
    GPU.
    """
    left = it.slots_of(name).get("c0", []) if "c0" not in asked else []
    for container, ask in asked.items():
        (record,) = it.records(name, container)
        memory = ask.memory or EACH * (ask.percentage or 100) // 100
        wanted = Amount(cores=ask.cores, memory=memory * MIB)  # by HAMi's rules
        assert DeviceID(unwanted) not in map(base_of, record.device_ids), (name, container)
        for slot, amount in record.slots.items():
            if slot in left:
                assert amount.cores >= wanted.cores, (name, container)
                assert amount.memory >= wanted.memory, (name, container)
            else:
                assert wanted == amount, (name, container)
        assert record.slots.keys() == record.device_ids


async def come_past(it: SlotNode, name: str, like: PodRequest, chance: Random) -> None:
    """
    A pod for which nothing is reserved comes and asks for as many slots as a container of one that waits. If it starts, it
    has equal parts. It goes again before the other one comes.
    """
    gpus = chance.choice([*like.init_containers, *like.containers]).limits[GPU]
    pod = it.asking(name, Ask(gpus, chance.randint(1, 1_000), 1))
    decision = await it.admit_pod(pod)
    if isinstance(decision, Admission):
        await it.allocations.reconcile()
        assert all(amount == equal_part(it.ledger.state.hardware, gpu) for gpu, amount in it.held(name).items())
        check_told(it, {name: (pod, False)})
    else:
        assert isinstance(decision, Refusal) and decision.code
    await it.kubelet.remove(pod.namespace, pod.name)
    await it.settle()


@pytest.mark.parametrize("seed", range(80 if THOROUGH else 2))
async def test_no_container_has_the_slot_or_the_amounts_of_another(seed: int) -> None:
    """
    0 containers have another's slot, amounts or limits, 0 GPUs are held above what they have, and PodResources, the record
    and what containers are told agree with what their pods ask for. What was reserved is admitted, and whatever is refused
    has a reason.
    """
    chance, says = Random(seed), Random(seed + 1)
    policy = chance.choice([Policy.NONE, Policy.BEST_EFFORT, Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE])
    async with LIMITED_NODES[seed % 3].running(policy, Random(seed)) as (it, tasks):
        running: Running = {}
        admitted = 0
        for number in range(ADMISSIONS):
            await end_some(it, running, chance)
            match chance.random():
                case low if low < 0.04:
                    await it.restart_kubelet()
                case low if low < 0.08:
                    await it.start_agent(tasks)
            pod, asked = made_of(it, f"p{number}", chance, says)
            is_reserved = is_certain = False
            if chance.random() < 0.6:
                (predicted,) = it.reserve(pod)
                is_reserved = isinstance(predicted, Admission)
                is_certain = is_reserved and it.is_whole(running)  # the record is not behind the kubelet
                if says.random() < 0.2:
                    await come_past(it, f"past-{number}", pod, says)
                    is_certain = False  # the kubelet may still have what that one had
            decision = await it.admit_pod(pod)
            if isinstance(decision, Admission):
                running[str(pod.name)] = pod, is_reserved
                admitted += 1
            else:
                assert isinstance(decision, Refusal) and decision.code and decision.finding and decision.remedy
                assert not is_certain, (number, pod, decision.finding)
                await it.kubelet.remove(pod.namespace, PodName(pod.name))
                await it.settle()
            await it.check([*running])
            check_told(it, running)
            if is_reserved and isinstance(decision, Admission):
                check_held(it, str(pod.name), asked, pod.annotations.get(UNWANTED, ""))
        assert admitted


@pytest.mark.parametrize("seed", range(40 if THOROUGH else 1))
async def test_pods_that_wait_together_hold_what_each_asked_for(seed: int) -> None:
    """
    Several reserved pods come in any order. A registry binds no pods beside one another that a kubelet could mix up: those
    that ask for as many slots ask for the same amounts of each. What fills two GPUs may end before they come: then the
    kubelet aligns them to others than was predicted.
    """
    chance = Random(1000 + seed)
    policy = chance.choice([Policy.NONE, Policy.BEST_EFFORT])
    async with LIMITED_NODES[seed % 3].running(policy, Random(seed)) as (it, tasks):
        for round_number in range(8 if THOROUGH else 4):
            by_count = {gpus: Ask(gpus, chance.randint(1, 2_500), chance.choice([0, 5, 15])) for gpus in (1, 2)}
            pods = {
                f"r{round_number}-{place}": [by_count[chance.randint(1, 2)] for _ in range(chance.randint(1, 2))]
                for place in range(3)
            }
            full = it.asking(f"full-{round_number}", Ask(2, cores=100))
            it.reserve(full)
            assert isinstance(await it.admit_pod(full), Admission)
            await it.check([full.name])
            check_told(it, {str(full.name): (full, True)})
            waiting = [it.asking(name, *asked) for name, asked in pods.items()]
            decisions = it.reserve(*waiting, beside=True)
            assert all(isinstance(each, Admission) for each in decisions), decisions
            await it.remove(full.name)
            chance.shuffle(waiting)
            for pod in waiting:
                if chance.random() < 0.2:
                    await it.start_agent(tasks)
                assert isinstance(await it.admit_pod(pod), Admission)
            await it.check([*pods])
            check_told(it, {str(pod.name): (pod, True) for pod in waiting})
            for name, asked in pods.items():
                check_held(it, name, {f"c{place}": each for place, each in enumerate(asked)})
            for name in pods:
                await it.remove(name)


@pytest.mark.parametrize("policy", [Policy.BEST_EFFORT, Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE])
async def test_a_pod_that_fills_the_gpus_of_its_next_container_is_foreseen(policy: Policy) -> None:
    """The kubelet counts the free slots of NUMA node 0, of whose GPUs the first container has all, by its reservation."""
    async with SlotNode.running(policy, terms=WITH_NUMA_NODES) as (it, _):
        pod, rules = it.asking("p", Ask(2, cores=100), Ask(1, 1_000, 30)), it.rules
        it.rules = msgspec.structs.replace(rules, policy=Policy.NONE)
        assert isinstance(it.reserve(pod)[0], Admission)

        foreseen, decision = admit(it.ledger.state, pod, rules), await it.admit_pod(pod)

        assert isinstance(foreseen, Refusal) and isinstance(decision, Refusal)
        assert ("ShareSplit", "c1") == (foreseen.code, foreseen.container)
        assert "NotEnoughShareCores" in decision.finding or "ShareSplit" in decision.finding

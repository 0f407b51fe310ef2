"""
What containers with slots are to be told of their limits, from what their pod asks for alone: nothing of how the agent
computes it is used.
"""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from hashlib import blake2s
from pathlib import Path
from random import Random
from typing import Literal

from anyio.abc import TaskGroup
from hami_core_support import HamiCoreNode
from mps_limits_support import LimitedSlotNode, own
from share_support import DEFAULT, running
from slot_node_support import EACH, SLOTS, SlotNode, slot_node
from slot_support import CORES, MEMORY, MIB, PERCENTAGE

from topoalign.core.model.ids import GPU, ContainerName, PodName
from topoalign.core.model.requests import ContainerRequest, PodRequest, Policy
from topoalign.kubelet.grpc.api import v1beta1

Limiter = Literal["hami-core", "mps", "none"]
LIMITERS: tuple[Limiter, ...] = ("hami-core", "mps", "none")
Part = tuple[int, int]
"""Cores and MiB."""
EQUAL: Part = (100 // SLOTS, EACH // SLOTS)
"""What a slot is of which nothing is reserved."""
CACHE, SHARED_FILE = "/usr/local/vgpu", "CUDA_DEVICE_MEMORY_SHARED_CACHE"


def limited_node(
    limiter: Limiter, policy: Policy, chance: Random
) -> AbstractAsyncContextManager[tuple[SlotNode, TaskGroup]]:
    """The node, with its kubelet and agent running, and all that the limiter needs."""

    def by_mps(directory: Path) -> SlotNode:
        node = LimitedSlotNode(directory, policy, chance)
        node.mps.announcement.publish(node.mps.serves)
        return node

    match limiter:
        case "hami-core":
            return running(lambda directory: HamiCoreNode(directory, policy=policy, chance=chance))
        case "mps":
            return running(by_mps)
    return slot_node(policy, chance)


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
            answer = it.kubelet.running[DEFAULT, PodName(name)].responses[ContainerName(container), GPU]
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

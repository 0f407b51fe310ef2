"""
Adds HAMi-core to Allocate's answers: the limits as variables, the library and the preload list, a directory for the
container, and the directory of locks shared by all containers of the node.

- The library counts GPUs as NVML does in the container, which is the order of the host: the limits are in that order, and
  not in the order of the slots.
- A limit of 0 means no limit, so the memory limit is at least one MiB. Cores are limited if a container has some, and not
  all, of a GPU's cores. If the limit is the same on all GPUs, one variable sets it; else each limited GPU has its own
  variable, because the common variable would apply to GPUs without a limit.
- The limits are those of the first process that opens the shared file. The file has an unpredictable new name in each
answer,
  so a container never gets the limits of an init container that had its slots.

A pod can set these variables itself, and the kubelet passes on the pod's values, so these limits do not stop a malicious
pod. The priority of a pod is in its own environment, where the webhook writes it; Allocate does not know it.

Source: HAMi-core 8f3a89c, how it reads its environment; HAMi 4707fb02, what its device plugin mounts.
"""

import secrets
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from topoalign.allocator.containers.hami_core.slot_directories import (
    CACHE,
    LOCKS,
    DirectoryOwner,
    make_locks,
    prepare_slots_directory,
    slots_directory_name,
)
from topoalign.allocator.containers.host_files import ContainerUnready
from topoalign.allocator.containers.limiter_files import amount_of_slot
from topoalign.allocator.containers.responses import ContainerDevices, EditProvider, VisibleDevice
from topoalign.core.demand.device_lists import has_gpus
from topoalign.core.model.errors import StateFault, clean
from topoalign.core.model.holdings import Amount, base_of
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.device_offers import CORES
from topoalign.core.model.topology.model import Topology
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.plugin_config.configuration import Flags
from topoalign.plugin_config.hook_files import (
    CONTAINER_LIBRARY,
    CONTAINER_PRELOAD,
    CONTAINER_ROOT,
    LIBRARY,
    PRELOAD,
    find_missing_file,
)

MEMORY_LIMIT = "CUDA_DEVICE_MEMORY_LIMIT"
CORE_LIMIT = "CUDA_DEVICE_SM_LIMIT"
SHARED_FILE = "CUDA_DEVICE_MEMORY_SHARED_CACHE"
CONTAINER_LOCKS = "/tmp/vgpulock"  # noqa: S108  # where the library locks
MOST_GPUS = 16
"""The largest number of GPUs of a container that the library supports."""
MIB = 1024 * 1024


class HamiCoreEdits(EditProvider, frozen=True):
    """Adds what one resource needs of the limiter to answers to Allocate."""

    root: str
    """`flags.hamiRoot`, on the host."""

    def check(self, hardware: Topology, gpus: Sequence[VisibleDevice]) -> None:
        """Raises ContainerUnready for a container with more GPUs than the library supports."""
        if len(gpus) > MOST_GPUS:
            finding = f"the limiter hami-core limits {MOST_GPUS} GPUs of a container, and this one has {len(gpus)}"
            raise ContainerUnready(finding, f"let the container ask for at most {MOST_GPUS}")

    def edit(self, response: v1beta1.ContainerAllocateResponse, devices: ContainerDevices) -> None:
        """Adds variables and mounts for the container, and creates its directory. Raises StateFault."""
        resource = devices.resource
        allocation = devices.allocation
        hardware = devices.hardware
        # The container also sees the GPUs that it has by other resources.
        named = devices.named.items()
        others = [base_of(each) for name, ids in named if name != resource and has_gpus(hardware, name) for each in ids]
        slots = allocation.from_kubelet[resource]
        name = slots_directory_name(resource, slots)
        try:
            prepare_slots_directory(Path(self.root), name, DirectoryOwner(allocation.id, allocation.pod_uid))
        except OSError as error:
            finding = f"the directory of a container cannot be created below {clean(self.root)}: {error.strerror}"
            raise StateFault(finding, "make room there, and see that it belongs to the agent's user") from error
        file = f"{CONTAINER_ROOT}/{secrets.token_hex(16)}.cache"
        limits = {**limit_variables(held_in_order(slots, allocation.slots, hardware, others)), SHARED_FILE: file}
        response.envs.update(limits)
        response.mounts += [
            mount(CONTAINER_ROOT, f"{self.root}/{name}/{CACHE}"),
            mount(CONTAINER_LIBRARY, f"{self.root}/{LIBRARY}", read_only=True),
            mount(CONTAINER_LOCKS, f"{self.root}/{LOCKS}"),
            mount(CONTAINER_PRELOAD, f"{self.root}/{PRELOAD}", read_only=True),
        ]


def mount(at: str, host_path: str, *, read_only: bool = False) -> v1beta1.Mount:
    """A mount at this path of the container."""
    return v1beta1.Mount(container_path=at, host_path=host_path, read_only=read_only)


def held_in_order(
    slots: Collection[DeviceID],
    amounts: Mapping[DeviceID, Amount],
    hardware: Topology,
    others: Collection[DeviceID] = (),
) -> list[Amount | None]:
    """
    Returns the amount of each GPU that a container sees, in NVML's order; None: it has the GPU by another resource.
    Raises ContainerUnready for a GPU that is no longer in slots.
    """
    found: dict[int, Amount | None] = {hardware.gpu_by_id[hardware.card_of(each)].index: None for each in others}
    for slot in slots:
        gpu = hardware.card_of(base_of(slot))
        amount = amount_of_slot(slot, gpu, amounts, hardware)
        found[hardware.gpu_by_id[gpu].index] = amount
    return [found[index] for index in sorted(found)]


def limit_variables(held: Sequence[Amount | None]) -> dict[str, str]:
    """The variables that limit a container to these amounts of the GPUs that it sees, in their order; None: no limit."""
    response = {f"{MEMORY_LIMIT}_{place}": f"{max(1, each.memory // MIB)}m" for place, each in enumerate(held) if each}
    cores = [each.cores if each is not None and each.cores < CORES else 0 for each in held]
    if any(cores) and len({*cores}) == 1:
        response[CORE_LIMIT] = str(cores[0])
    else:
        response.update({f"{CORE_LIMIT}_{place}": str(each) for place, each in enumerate(cores) if each})
    return response


def hami_core_edits(flags: Flags) -> HamiCoreEdits:
    """Returns the current edits of the limiter. Raises ContainerUnready if it could not work for any container."""
    root = flags.hami_root.rstrip("/")
    if not root:
        finding = "the limiter hami-core has no directory (flags.hamiRoot)"
        raise ContainerUnready(finding, "give discovery and allocator the same configuration file")
    if lacking := find_missing_file(Path(root)):
        finding = f"the limiter hami-core has no usable {lacking} in {clean(root)}"
        raise ContainerUnready(
            finding,
            f"run on the node: topoalign hook install --library libvgpu.so --to {clean(root)}; "
            "the directory has to belong to the agent's user",
        )
    try:
        make_locks(Path(root))
    except OSError as error:
        finding = f"the limiter hami-core cannot create its directories: {error.strerror}"
        raise ContainerUnready(finding, "see that flags.hamiRoot is a directory that the agent may write") from error
    return HamiCoreEdits(root)

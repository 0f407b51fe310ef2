"""
Manages the directories of HAMi-core's shared files, one per slot allocation, and adds them to Allocate responses.

The name of a directory is a digest of the resource and the slots. So the mount that the kubelet reuses each time a
container starts stays valid even if the journal is lost, and a missing directory can be created again.

    <root>/slots-2f1c…          of this process' user, mode 0755: a container cannot change what is in it
        of                      the id of its allocation and, once known, the UID of its pod
        cache/                  mode 0777, mounted read-write at /usr/local/vgpu
    <root>/vgpulock/            mode 0777, mounted at /tmp/vgpulock of all containers

Other users of the host cannot access the root (mode 0700), because root in a container can place setuid programs there.
"""

import os
import re
import secrets
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from anyio import to_thread

from topoalign.allocator.allocate.service import DeviceAllocations
from topoalign.allocator.containers import limiter_files
from topoalign.allocator.containers.host_files import ContainerUnready
from topoalign.allocator.containers.limiter_files import (
    MODE,
    amount_of_slot,
    digest_of,
    discard,
    is_pod_present,
    live_entries,
    make_root,
    open_directory,
    put_aside,
    read_file,
    with_checkpoint,
)
from topoalign.allocator.containers.responses import ContainerDevices, EditProvider, VisibleDevice
from topoalign.allocator.ports import Poll
from topoalign.core.demand.device_lists import has_gpus
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.byte_sizes import MIB
from topoalign.core.model.errors import StateFault, clean
from topoalign.core.model.holdings import Amount, base_of, unit_kind
from topoalign.core.model.ids import AllocationID, DeviceID, ResourceName
from topoalign.core.model.topology.device_offers import CORES
from topoalign.core.model.topology.model import Topology
from topoalign.core.ports import Clock
from topoalign.core.state.fold import NodeState
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
from topoalign.runtime.whole_files import replace_file

NAME = re.compile(r"slots-[0-9a-f]{32}")
OWNER = "of"
CACHE = "cache"
LOCKS = "vgpulock"
OPEN = 0o777
"""Mode of directories that users of all containers can write to."""


class DirectoryOwner(NamedTuple):
    """The owner of a directory."""

    allocation: AllocationID
    pod_uid: str = ""
    """Empty: unknown."""


def slots_directory_name(resource: ResourceName, slots: Collection[DeviceID]) -> str:
    """Returns the directory name of these slots, in any order."""
    return f"slots-{digest_of(resource, frozenset(slots))}"


def read_directory_owner(root: Path, name: str) -> DirectoryOwner | None:
    """Reads the owner of a directory; None if none is recorded."""
    try:
        with open_directory(root) as at, open_directory(name, at) as directory:
            allocation, _, pod_uid = read_file(directory, OWNER).decode("utf-8", "replace").partition("\n")
    except OSError:
        return None
    return DirectoryOwner(AllocationID(allocation), pod_uid.strip()) if allocation else None


def make_locks(root: Path) -> None:
    """Creates the root, accessible only to this process's user, and the directory of locks. Raises OSError."""
    make_root(root)
    with open_directory(root) as at:
        with suppress(FileNotFoundError):
            found = os.stat(LOCKS, dir_fd=at, follow_symlinks=False)
            # A container may have given it to another user, who then controls its mode.
            if stat.S_ISDIR(found.st_mode) and found.st_uid != os.geteuid():
                put_aside(at, LOCKS, at)
        make_open(at, LOCKS)


def prepare_slots_directory(root: Path, name: str, owner: DirectoryOwner) -> None:
    """Prepares the directory of an allocation, empty unless it already belonged to this allocation. Raises OSError."""
    with open_directory(root) as at:
        former = read_directory_owner(root, name)
        if former is not None and former.allocation == owner.allocation:
            with open_directory(name, at) as directory:
                make_open(directory, CACHE)
            return
        discard(at, name)
        os.mkdir(name, MODE, dir_fd=at)
        with open_directory(name, at) as directory:
            os.fchmod(directory, MODE)
            make_open(directory, CACHE)
            replace_file(OWNER, "\n".join(owner).encode(), directory=directory)


def make_open(at: int, name: str) -> None:
    """Creates a directory that all users can write to, or restores its mode after its container. Raises OSError."""
    with suppress(FileExistsError):
        os.mkdir(name, OPEN, dir_fd=at)
    with open_directory(name, at, os.O_PATH) as directory:
        if stat.S_IMODE(os.fstat(directory).st_mode) != OPEN:
            os.chmod(f"/proc/self/fd/{directory}", OPEN)


# The cleanup runs every few seconds and after the start of the agent.
#
# A directory is kept if its slots are in the record or in the kubelet's checkpoint, or if its pod exists. A missing
# directory for slots in the record or the checkpoint is created again. Any other directory is renamed, and its content
# is removed in small batches in a thread, because a file system can take seconds to free a large file. Nothing is
# removed if the kubelet does not answer or its checkpoint cannot be read.


NOBODY = DirectoryOwner(AllocationID(""))
"""Owner of slots that are only in the checkpoint: those of an init container, which can run again."""

Held = tuple[ResourceName, frozenset[DeviceID]]


class DirectoryCleanup:
    """Restores and removes directories below one root."""

    def __init__(self, root: Callable[[], str]) -> None:
        """`root` returns `flags.hamiRoot` of the current configuration; empty: there is none."""
        self._root = root
        self._owners: dict[str, DirectoryOwner | None] = {}
        """Directory -> its recorded owner. Cached, because reading 160 directories blocks the event loop for 5 ms."""

    async def run(self, allocations: DeviceAllocations, clock: Clock) -> None:
        """Cleans up every `COLLECT_SECONDS` until cancelled. Logs a failure once."""

        async def sweep() -> None:
            try:
                self.clean_up(allocations.state, allocations.polled)
            finally:
                if self._root():
                    await to_thread.run_sync(self.remove_leftovers)

        await limiter_files.keep_directories(sweep, clock, limiter_files.COLLECT_SECONDS)

    def clean_up(self, state: NodeState, poll: Poll | None) -> None:
        """Restores and removes directories once. Raises OSError after all other work is done."""
        if not (configured := self._root().rstrip("/")):
            return
        poll = with_checkpoint(poll)
        root = Path(configured)
        failure = None
        held = self._held(state)
        entries = live_entries(poll.listing) if poll is not None else ()
        in_checkpoint = {(each.resource, each.devices) for each in entries if are_slots(each.devices)}
        places = in_checkpoint.union(pair for _, pair in held_slots(state))
        limited = {slots_directory_name(*each) for each in places if is_limited(state, each[0])}
        entered = {slots_directory_name(*each) for each in in_checkpoint}
        present = limiter_files.list_own_directories(root, NAME)
        self._owners = {name: self._owners.get(name) or read_directory_owner(root, name) for name in present}
        for name in present:
            owner = self._owners[name]
            try:
                if name in held:
                    if (now := held[name]) is not None and now != owner:
                        with open_directory(root) as at, open_directory(name, at) as directory:
                            replace_file(OWNER, "\n".join(now).encode(), directory=directory)
                        self._owners[name] = now
                elif (
                    poll is not None
                    and name not in entered
                    and not is_pod_present(owner.pod_uid if owner else "", poll)
                ):
                    limiter_files.remove_own_directory(root, name)
            except OSError as error:
                failure = error
        try:
            for name in limited - self._owners.keys():
                if (owner := held.get(name, NOBODY)) is not None:
                    make_locks(root)
                    prepare_slots_directory(root, name, owner)
        except OSError as error:
            failure = error
        if failure is not None:
            raise failure

    def remove_leftovers(self) -> None:
        """Removes the content of renamed directories. Raises OSError if some of it cannot be removed."""
        if configured := self._root().rstrip("/"):
            limiter_files.remove_leftovers(Path(configured))

    def _held(self, state: NodeState) -> dict[str, DirectoryOwner | None]:
        return {
            slots_directory_name(*pair): DirectoryOwner(each.id, each.pod_uid) if each is not None else None
            for each, pair in held_slots(state)
        }


def is_limited(state: NodeState, resource: ResourceName) -> bool:
    """Whether slots of this resource are limited by HAMi-core now."""
    return any(each.limiter == "hami-core" for each in state.hardware.offers_of.get(resource, ()))


def held_slots(state: NodeState) -> Iterator[tuple[Allocation | None, Held]]:
    """Yields the slots of each allocation of the record. The allocation is None for a displaced container."""
    for each in state.allocations.values():
        for former in each.displaced:
            yield from ((None, (name, frozenset(ids))) for name, ids in former.devices.items() if are_slots(ids))
    for each in state.allocations.values():
        yield from ((each, (name, frozenset(ids))) for name, ids in each.from_kubelet.items() if are_slots(ids))


def are_slots(devices: Collection[DeviceID]) -> bool:
    """Whether these can be slots, including those of a former configuration: device ids followed by a number."""
    return any(base_of(each) != each and unit_kind(each) is None for each in devices)


# The edits of a container in Allocate responses: limits as variables, the library and the preload list, and its
# directories.
#
# - The library numbers GPUs as NVML does in the container, in the same order as on the host. The limits are in that
#   order.
# - A limit of 0 means no limit, so the memory limit is at least one MiB. If the core limit is the same on all GPUs, one
#   variable sets it. Otherwise each limited GPU has its own variable, because the common one would also apply to GPUs
#   without a limit.
# - The first process that opens the shared file sets the limits. The file has a new random name in each response, so a
#   container never gets the limits of an init container that had its slots.
#
# A pod can set these variables itself, so these limits do not stop a malicious pod. The priority of a pod is in its own
# environment, where the webhook writes it.
#
# Sources: HAMi-core 8f3a89c (how it reads its environment); HAMi 4707fb02 (what its device plugin mounts).


MEMORY_LIMIT = "CUDA_DEVICE_MEMORY_LIMIT"
CORE_LIMIT = "CUDA_DEVICE_SM_LIMIT"
SHARED_FILE = "CUDA_DEVICE_MEMORY_SHARED_CACHE"
CONTAINER_LOCKS = "/tmp/vgpulock"  # noqa: S108  # where the library locks
MOST_GPUS = 16
"""Maximum number of GPUs per container that the library supports."""


class HamiCoreEdits(EditProvider, frozen=True):
    """Adds the limiter's edits for one resource to Allocate responses."""

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
        # The container also sees the GPUs that it has from other resources.
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
    """A mount at this path in the container."""
    return v1beta1.Mount(container_path=at, host_path=host_path, read_only=read_only)


def held_in_order(
    slots: Collection[DeviceID],
    amounts: Mapping[DeviceID, Amount],
    hardware: Topology,
    others: Collection[DeviceID] = (),
) -> list[Amount | None]:
    """Returns the amount of each visible GPU in NVML's order; None: from another resource. Raises ContainerUnready."""
    found: dict[int, Amount | None] = {hardware.gpu_by_id[hardware.parent_of(each)].index: None for each in others}
    for slot in slots:
        gpu = hardware.parent_of(base_of(slot))
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
    """Returns the current edits of the limiter. Raises ContainerUnready if it cannot work for any container."""
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

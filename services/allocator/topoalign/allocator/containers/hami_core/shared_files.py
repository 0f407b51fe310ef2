"""
Reads the files that HAMi-core shares between the processes of each container, to report GPU usage.

A container can replace or truncate its file at any time. So only a regular file is opened, its size is checked through
the descriptor, and it is read in blocks and never memory-mapped. An error in a file affects only its container's entry.

Files are read in a thread, at most once a second. While a disk hangs, readings report this, and no new read starts.
"""

import os
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from re import compile as pattern
from struct import Struct
from typing import NamedTuple

import structlog
from anyio import Lock

from topoalign.allocator.containers.hami_core.slot_directories import (
    CACHE,
    held_slots,
    is_limited,
    read_directory_owner,
    slots_directory_name,
)
from topoalign.allocator.containers.limiter_files import list_entries, open_directory, open_regular
from topoalign.core import wire
from topoalign.core.model.errors import InvalidField, clean
from topoalign.core.model.holdings import base_of
from topoalign.core.model.ids import AllocationID, DeviceID
from topoalign.core.model.processes import LibraryCount, LibraryReading, LibraryUse
from topoalign.core.model.requests import NodeRequest
from topoalign.core.ports import Clock, Endpoint
from topoalign.core.state.fold import NodeState
from topoalign.runtime.metrics import ServiceMetric
from topoalign.runtime.replies import answer_with
from topoalign.runtime.thread_reader import ThreadReader

# The layout of the file that HAMi-core shares between the processes of a container.
#
# Two layouts are supported. This is the layout of versions 1.1 (HAMi v2.4.1 to v2.8.0) and 1.2 (from HAMi v2.8.2 on),
# for 16 GPUs and 1,024 processes, little-endian, as on a 64-bit machine with glibc:
#
#     at          bytes
#     0           4       19920718 when the rest can be read
#     4, 8        4 each  the version: 1, and 1 or 2
#     12, 16, 24          a flag, the process that has the lock (8 bytes), a semaphore (32 bytes)
#     56          8       GPUs
#     64          16*96   uuid of each GPU, ended by a zero; empty: not written yet
#     1600        16*8    limit of memory of each, bytes; 0: none
#     1728        16*8    limit of cores of each; 0 and from 100 on: none
#     1856        1024*   processes, 1960 bytes each:
#                            0   its id in the container and on the host, 4 bytes each
#                            8   for each GPU 64: bytes of contexts, programs, buffers, one unused, all; 24 unused
#                         1032   for each GPU 8: unused here
#                         1160   for each GPU 48: percent of decoder, encoder, kernels, 8 bytes each; 24 unused
#                         1928   4: 0 when it has ended
#                         1936   a lock and unused
#     2008896     4       processes that are written, from the first
#     2008900     4       whether cores are limited (1) or not (0)
#     2008904     4       2 at each launch of a kernel, counted down by the monitor; -1: launches wait
#     2008908     4       priority: 0 high, 1 low
#     2008912     8       wall seconds of the newest kernel
#     2008920     32      a semaphore (1.1: unused)
#
# HAMi v2.8.1 writes version 1.1 with the second semaphore at 56: the number of GPUs and all following fields are 32
# bytes later. In each process the lock is at 8, so the fields that are between the ids and the lock above are 8 bytes
# later. The file size distinguishes it from the other layout of version 1.1. A file has one byte more than its region:
# 2,008,953 bytes, or 2,008,985 for v2.8.1.
#
# Files of HAMi v2.4.0 and earlier have no version and another layout (1,197,896 bytes), which is not supported.
#
# Source: the public header of the shared region, compiled: HAMi-core 8f3a89c, and the commits that HAMi v2.4.0, v2.4.1,
# v2.8.0, v2.8.1, v2.8.2 and v2.9.0 name.


MAGIC = 19920718
GPUS = 16
PROCESSES = 1_024

VERSION = Struct("<3i")
"""Magic and version, at the beginning."""
GPU_COUNT = Struct("<Q")
UUID_SIZE = 96
PROCESS_SIZE = 1_960
USE_AT = 8
USE_SIZE = 64
USES = (0, 8, 16, 32)
"""
Memory use of a process: its offset, the size per GPU, and in that the offsets of contexts, programs, buffers and total.
"""
TIME_AT = 1_160 + 16
TIME_SIZE = 48
STATUS_AT = 1_928
"""In a process: the offset of the first GPU's kernel percentage, the distance to the next, and the status offset."""
TAIL = Struct("<4iQ")
RECENT_KERNEL = Struct("<i")
RECENT_KERNEL_AT = 8
"""Offset in the tail."""

LARGEST = 2**53
"""The largest plausible count. If the library subtracts more than it added, the number is near 2**64."""
PERCENT = 100


class Unusable(Exception):
    """Raised for a file that is not a shared region, or has invalid values. The message states the reason."""


class Tail(NamedTuple):
    """The fields after the processes."""

    processes: int
    limits_cores: int
    recent_kernel: int
    priority: int
    last_kernel: int


def tail_of(tail: bytes) -> Tail:
    """Decodes the fields after the processes. Raises Unusable."""
    if len(tail) < TAIL.size:
        raise Unusable("it is cut off")
    found = Tail(*TAIL.unpack(tail))
    if not 0 <= found.processes <= PROCESSES:
        raise Unusable(f"it has {found.processes} processes, and {PROCESSES} are the most")
    return found


class RegionLayout(NamedTuple):
    """The offsets in a region, and the versions with these offsets."""

    minors: tuple[int, ...]
    """The minor numbers of the versions 1.x."""

    shift: int = 0
    """Number of bytes by which the GPU count and all following fields are later than in version 1.2."""

    process_shift: int = 0
    """Number of bytes by which the counts in each process are later than in version 1.2."""

    @property
    def processes_at(self) -> int:
        """Offset of the first process. `uuids_of` needs the bytes before it."""
        return 1_856 + self.shift

    @property
    def tail_at(self) -> int:
        """Offset of the bytes for `tail_of`."""
        return 2_008_896 + self.shift

    @property
    def size(self) -> int:
        """Size of the region in bytes; the file can have one more."""
        return self.tail_at + 56

    def uuids_of(self, head: bytes) -> list[str]:
        """Decodes the uuids of the GPUs in the order of the file; empty: not written yet. Raises Unusable."""
        if len(head) < self.processes_at:
            raise Unusable("it is cut off")
        magic, major, minor = VERSION.unpack_from(head)
        if magic != MAGIC:
            raise Unusable(f"it begins with {magic} in place of {MAGIC}")
        if major != 1 or minor not in self.minors:
            read = " or ".join(f"1.{each}" for each in self.minors)
            raise Unusable(f"it has version {major}.{minor}, and of this size {read} is read")
        gpus = GPU_COUNT.unpack_from(head, 56 + self.shift)[0]
        if gpus > GPUS:
            raise Unusable(f"it has {gpus} GPUs, and {GPUS} are the most")
        first = 64 + self.shift
        found = [head[at : at + UUID_SIZE] for at in range(first, first + UUID_SIZE * gpus, UUID_SIZE)]
        texts = [each.partition(b"\0")[0].decode("ascii", "replace") for each in found]
        named = [text for text in texts if text]
        if len(named) != len({*named}):
            raise Unusable(f"it names a GPU twice: {clean(max(named, key=named.count))}")
        return texts

    def counts_of(
        self, uuids: list[str], processes: bytes, tail: Tail, gpus: Collection[DeviceID]
    ) -> Iterator[LibraryCount]:
        """Yields the counts of these GPUs over all running processes, which `processes` encodes. Raises Unusable."""
        if len(processes) != tail.processes * PROCESS_SIZE:
            raise Unusable("it is cut off")
        status_at = STATUS_AT + self.process_shift
        numbers = array("Q", processes)  # in this machine's byte order: a process on it wrote them
        running = [
            place for place, status in enumerate(array("i", processes)[status_at // 4 :: PROCESS_SIZE // 4]) if status
        ]

        def column(at: int) -> list[int]:
            """Returns the number at this offset in each running process."""
            found = numbers[at // 8 :: PROCESS_SIZE // 8]
            return [found[place] for place in running]

        for place, uuid in enumerate(uuids):
            if uuid not in gpus:
                continue
            at = USE_AT + self.process_shift + USE_SIZE * place
            context, modules, buffers, memory = (sum(column(at + offset)) for offset in USES)
            if memory > LARGEST:
                raise Unusable(f"it counts {memory} bytes of {clean(uuid)}")
            times = column(TIME_AT + self.process_shift + TIME_SIZE * place)
            yield LibraryCount(
                device=DeviceID(uuid),
                memory=memory,
                context=context if context <= memory else None,
                modules=modules if modules <= memory else None,
                buffers=buffers if buffers <= memory else None,
                utilization=sum(times) if max(times, default=0) <= PERCENT else None,
                last_kernel=tail.last_kernel if 0 < tail.last_kernel <= LARGEST else None,
            )


LAYOUTS = (RegionLayout((1, 2)), RegionLayout((1,), shift=32, process_shift=8))
"""Only HAMi v2.8.1 uses the second layout."""


FILE = pattern(r"[0-9a-f]{32}\.cache")
MOST_ENTRIES = 64
"""Maximum entries in a container's directory. The library creates one file, and the runtime the mount point."""
FRESH_SECONDS = 1.0
READ_SECONDS = 2.0
"""Timeout of a reading. A file takes milliseconds, even if its container has filled it."""

log = structlog.get_logger("topoalign.allocator.containers.hami_core")


class Limited(NamedTuple):
    """An allocation whose container has a directory."""

    allocation: AllocationID
    directory: str
    gpus: frozenset[DeviceID]


class SharedFiles:
    """Reads the files of all containers of a node."""

    def __init__(self, root: Callable[[], str], state: Callable[[], NodeState], clock: Clock) -> None:
        """`root` returns the current `flags.hamiRoot`; empty: none. `state` returns the node's current state."""
        self._root = root
        self._state = state
        self._clock = clock
        self._turn = Lock(fast_acquire=True)
        self._newest: tuple[LibraryReading, float] | None = None
        """The newest reading, and the monotonic time in seconds at which it was complete."""
        self._reader: ThreadReader[list[LibraryUse]] = ThreadReader()
        self._failing: dict[AllocationID, str] = {}
        self.refused = 0
        """Number of unusable files, summed over all readings."""

    async def read(self) -> LibraryReading:
        """Returns the content of the files, at most a second old."""
        async with self._turn:
            now = self._clock.monotonic()
            if self._newest is None or now - self._newest[1] >= FRESH_SECONDS:
                self._newest = await self._read(), self._clock.monotonic()
            return self._newest[0]

    def endpoint(self) -> Endpoint:
        """Returns the endpoint that answers NodeRequest with the libraries' counts."""
        subject = wire.admission_subject(self._state().node, "library-use")
        return Endpoint(name="library-use", subject=subject, answer=answer_with(NodeRequest, self._answer))

    async def _answer(self, request: NodeRequest) -> LibraryReading:
        if request.node != (node := self._state().node):
            raise InvalidField("node", f"{clean(request.node)!r} is not this node", f"ask {node!r} here")
        return await self.read()

    def figure(self) -> ServiceMetric:
        """Number of unusable files, for /metrics."""
        return ServiceMetric(
            "counter",
            "topoalign_allocator_hami_core_unusable_files",
            "Files of HAMi-core in containers that were unusable, counted at each reading.",
            lambda: self.refused,
        )

    async def _read(self) -> LibraryReading:
        state = self._state()
        root = self._root().rstrip("/")
        limited = [*all_limited(state)] if root else []
        if not limited:
            return LibraryReading(node=state.node)
        try:
            uses = await self._reader.read(partial(read_all, Path(root), limited), READ_SECONDS)
        except TimeoutError:
            return LibraryReading(node=state.node, finding="the disk with the files of HAMi-core does not answer")
        self._note(uses)
        return LibraryReading(node=state.node, containers=tuple(uses))

    def _note(self, found: Sequence[LibraryUse]) -> None:
        """Counts unusable files and logs each once."""
        failing = {each.allocation: each.failure for each in found if each.failure}
        self.refused += len(failing)
        for allocation in failing.keys() - self._failing.keys():
            log.warning(
                "the file that HAMi-core shares in a container cannot be used",
                allocation=allocation,
                reason=failing[allocation],
            )
        self._failing = failing


def read_all(root: Path, limited: Sequence[Limited]) -> list[LibraryUse]:
    """Reads the files of these containers."""
    found = (read_library_use(root, each) for each in limited)
    return [each for each in found if each is not None]


def all_limited(state: NodeState) -> Iterator[Limited]:
    """The allocations whose containers are limited by HAMi-core now."""
    for allocation, (resource, slots) in held_slots(state):
        if allocation is not None and is_limited(state, resource):
            yield Limited(allocation.id, slots_directory_name(resource, slots), frozenset(map(base_of, slots)))


def read_library_use(root: Path, limited: Limited) -> LibraryUse | None:
    """
    Returns the counts in a container's file, or why it is unusable. None: no file, for example before it uses CUDA.
    """
    owner = read_directory_owner(root, limited.directory)
    if owner is None or owner.allocation != limited.allocation:
        return None  # the directory belongs to a former container, and Allocate is about to create it again
    try:
        with opened_file(root, limited.directory, os.O_RDONLY) as found:
            if found is None or (region := read_region(*found)) is None:
                return None
            file, layout = found
            uuids, tail = region
            processes = os.pread(file, tail.processes * PROCESS_SIZE, layout.processes_at)
            counts = tuple(layout.counts_of(uuids, processes, tail, limited.gpus))
    except Unusable as error:
        return LibraryUse(allocation=limited.allocation, failure=str(error))
    except OSError as error:
        return LibraryUse(allocation=limited.allocation, failure=f"it cannot be read: {error.strerror}")
    return LibraryUse(allocation=limited.allocation, counts=counts)


def read_region(file: int, layout: RegionLayout) -> tuple[list[str], Tail] | None:
    """Reads the uuids of the GPUs and the end of a region; None: it is not complete yet. Raises Unusable and OSError."""
    head = os.pread(file, layout.processes_at, 0)
    if not any(head[:4]):
        return None  # the magic number is written last
    return layout.uuids_of(head), tail_of(os.pread(file, TAIL.size, layout.tail_at))


@contextmanager
def opened_file(root: Path, name: str, flags: int) -> Iterator[tuple[int, RegionLayout] | None]:
    """Yields descriptor and layout of a container's file; None if it is missing or empty. Raises Unusable, OSError."""
    with open_directory(root) as at, open_directory(name, at) as directory, open_directory(CACHE, directory) as cache:
        found = list_entries(cache, MOST_ENTRIES + 1)
        if len(found) > MOST_ENTRIES:
            raise Unusable(f"the container has written more than {MOST_ENTRIES} entries next to it")
        names = [each for each in found if FILE.fullmatch(each)]
        if len(names) > 1:
            raise Unusable(f"there are {len(names)} of them: {clean(min(names))}")
        file = open_regular(cache, names[0], flags) if names else None
    if file is None:
        yield None
        return
    try:
        size = os.fstat(file).st_size
        layout = next((each for each in LAYOUTS if size in (each.size, each.size + 1)), None)
        if size and layout is None:
            sizes = " or ".join(f"{each.size + 1}" for each in LAYOUTS)
            raise Unusable(f"it has {size} bytes, and those of HAMi v2.4.1 and later (version 1.1 or 1.2) have {sizes}")
        yield (file, layout) if layout is not None else None
    finally:
        os.close(file)

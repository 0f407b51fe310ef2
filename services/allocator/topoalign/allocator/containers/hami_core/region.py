"""
What is where in the file that HAMi-core shares between the processes of a container. Nothing here reads a disk.

Two layouts are read. That of versions 1.1 (HAMi v2.4.1 to v2.8.0) and 1.2 (from HAMi v2.8.2 on), for 16 GPUs and 1,024
processes, little endian, as a machine of 64 bits and glibc lay it out:

    at          bytes
    0           4       19920718 once the rest may be read
    4, 8        4 each  the version: 1, and 1 or 2
    12, 16, 24          a flag, the process that has the lock (8 bytes), a semaphore (32 bytes)
    56          8       GPUs
    64          16*96   uuid of each GPU, ended by a zero; empty: not written yet
    1600        16*8    limit of memory of each, bytes; 0: none
    1728        16*8    limit of cores of each; 0 and from 100 on: none
    1856        1024*   processes, 1960 bytes each:
                           0   its id in the container and on the host, 4 bytes each
                           8   for each GPU 64: bytes of contexts, programs, buffers, one unused, all; 24 unused
                        1032   for each GPU 8: unused here
                        1160   for each GPU 48: percent of decoder, encoder, kernels, 8 bytes each; 24 unused
                        1928   4: 0 when it has ended
                        1936   a lock and unused
    2008896     4       processes that are written, from the first
    2008900     4       whether cores are limited (1) or not (0)
    2008904     4       2 at each launch of a kernel, counted down by who watches; -1: launches wait
    2008908     4       priority: 0 high, 1 low
    2008912     8       wall seconds of the newest kernel
    2008920     32      a semaphore (1.1: unused)

HAMi v2.8.1 writes version 1.1 with the second semaphore at 56: the number of GPUs and all behind it are 32 bytes further
on. In each of its processes the lock is at 8, so what is between the ids and the lock above is 8 bytes further on. Its size
tells it from the other 1.1. A file has one byte more than its region: 2,008,953, and 2,008,985 of v2.8.1.

HAMi v2.4.0 and earlier have no version and another layout (1,197,896 bytes), which is not read.

Source: the public header of the shared region, compiled: HAMi-core 8f3a89c, and the commits that HAMi v2.4.0, v2.4.1,
v2.8.0, v2.8.1, v2.8.2 and v2.9.0 name.
"""

from array import array
from collections.abc import Collection, Iterator
from struct import Struct
from typing import NamedTuple

from topoalign.core.model.errors import clean
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.library_use import LibraryCount

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
"""Of a process: where its uses are, bytes of that of a GPU, and in it contexts, programs, buffers and all."""
TIME_AT = 1_160 + 16
TIME_SIZE = 48
STATUS_AT = 1_928
"""Of a process: where the percent of kernels of the first GPU is, how far that of the next; whether it runs."""
TAIL = Struct("<4iQ")
RECENT_KERNEL = Struct("<i")

LARGEST = 2**53
"""Of what is counted: a library that takes away more than it added has a number near 2**64."""
PERCENT = 100


class Unusable(Exception):
    """A file that is no shared region, or says what cannot be. Its text says why, for people."""


class Tail(NamedTuple):
    """What stands behind the processes."""

    processes: int
    limits_cores: int
    recent_kernel: int
    priority: int
    last_kernel: int


def is_written(head: bytes) -> bool:
    """Whether a process has made the region ready: until then there is a zero where the magic number will be."""
    return any(head[:4])


def tail_of(tail: bytes) -> Tail:
    """What stands behind the processes. Raises Unusable."""
    if len(tail) < TAIL.size:
        raise Unusable("it is cut off")
    found = Tail(*TAIL.unpack(tail))
    if not 0 <= found.processes <= PROCESSES:
        raise Unusable(f"it has {found.processes} processes, and {PROCESSES} are the most")
    return found


class Layout(NamedTuple):
    """Where the parts of a region are, and which versions have them there."""

    minors: tuple[int, ...]
    """The second numbers of the versions 1.x."""

    shift: int = 0
    """Bytes by which the number of GPUs, and all behind it, is further on than in version 1.2."""

    process_shift: int = 0
    """Bytes by which what is counted of a process is further on, from the beginning of that process."""

    @property
    def processes_at(self) -> int:
        """Where the first process is: so many bytes are read for `uuids_of`."""
        return 1_856 + self.shift

    @property
    def tail_at(self) -> int:
        """Where the bytes for `tail_of` are."""
        return 2_008_896 + self.shift

    @property
    def recent_kernel_at(self) -> int:
        """Where `Tail.recent_kernel` is."""
        return self.tail_at + 8

    @property
    def size(self) -> int:
        """Bytes of the region; the file may have one more."""
        return self.tail_at + 56

    def uuids_of(self, head: bytes) -> list[str]:
        """
        The uuids of a container's GPUs in the order of the file; one that is not written yet is an empty text. Raises
        Unusable.
        """
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
        """
        What is counted of these GPUs, of all processes that run; other GPUs are passed over. `processes`: the bytes of as
        many as `tail` says. Raises Unusable.
        """
        if len(processes) != tail.processes * PROCESS_SIZE:
            raise Unusable("it is cut off")
        status_at = STATUS_AT + self.process_shift
        numbers = array("Q", processes)  # of this machine, which wrote them
        running = [
            place for place, status in enumerate(array("i", processes)[status_at // 4 :: PROCESS_SIZE // 4]) if status
        ]

        def column(at: int) -> list[int]:
            """What stands there in each process that runs."""
            found = numbers[at // 8 :: PROCESS_SIZE // 8]
            return [found[place] for place in running]

        for place, uuid in enumerate(uuids):
            if uuid not in gpus:
                continue
            at = USE_AT + self.process_shift + USE_SIZE * place
            context, modules, buffers, memory = (sum(column(at + part)) for part in USES)
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


LAYOUTS = (Layout((1, 2)), Layout((1,), shift=32, process_shift=8))
"""The second is that of HAMi v2.8.1 alone."""


def layout_of(size: int) -> Layout:
    """The layout of a file of so many bytes. Raises Unusable for a size that no version read has."""
    for layout in LAYOUTS:
        if size in (layout.size, layout.size + 1):
            return layout
    sizes = " or ".join(f"{layout.size + 1}" for layout in LAYOUTS)
    raise Unusable(f"it has {size} bytes, and those of HAMi v2.4.1 and later (version 1.1 or 1.2) have {sizes}")

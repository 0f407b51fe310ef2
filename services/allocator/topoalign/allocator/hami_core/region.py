"""
What is where in the file that HAMi-core shares between the processes of a container. Nothing here reads a disk.

Version 1.2, for 16 GPUs and 1,024 processes, little endian, as a machine of 64 bits and glibc lay it out:

    at          bytes
    0           4       19920718 once the rest may be read
    4, 8        4 each  the version: 1 and 2
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
    2008920     32      a semaphore

The file has one byte more: 2,008,953. GPUs are in the order of NVML in the container.

Source: HAMi-core 8f3a89c, the public header of its shared region.
"""

from array import array
from collections.abc import Collection, Iterator
from struct import Struct
from typing import NamedTuple

from topoalign.core.model.errors import clean
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.library_use import LibraryCount

MAGIC, VERSION = 19920718, (1, 2)
GPUS, PROCESSES = 16, 1_024
SIZES = (2_008_952, 2_008_953)
"""Bytes of a file: of what is in it, and with the byte behind that by which the library makes it so long."""

HEAD = Struct("<3i4xQ32xQ")
"""Magic, version; the process with the lock; GPUs."""
UUIDS, UUID_SIZE = 64, 96
HEAD_SIZE = PROCESSES_AT = 1_856
PROCESS_SIZE = 1_960
USE_AT, USE_SIZE, USES = 8, 64, (0, 8, 16, 32)
"""Of a process: where its uses are, bytes of that of a GPU, and in it contexts, programs, buffers and all."""
TIME_AT, TIME_SIZE, STATUS_AT = 1_160 + 16, 48, 1_928
"""Of a process: where the percent of kernels of the first GPU is, how far that of the next; whether it runs."""
TAIL_AT = 2_008_896
TAIL = Struct("<4iQ")
RECENT_KERNEL_AT, RECENT_KERNEL = 2_008_904, Struct("<i")

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


def uuids_of(head: bytes) -> list[str]:
    """
    The uuids of a container's GPUs in the order of the file; one that is not written yet is an empty text. Raises Unusable.
    """
    if len(head) < HEAD_SIZE:
        raise Unusable("it is cut off")
    magic, major, minor, _, gpus = HEAD.unpack_from(head)
    if magic != MAGIC:
        raise Unusable(f"it begins with {magic} in place of {MAGIC}")
    if (major, minor) != VERSION:
        raise Unusable(f"it has version {major}.{minor}, and {VERSION[0]}.{VERSION[1]} is read")
    if gpus > GPUS:
        raise Unusable(f"it has {gpus} GPUs, and {GPUS} are the most")
    found = [head[at : at + UUID_SIZE] for at in range(UUIDS, UUIDS + UUID_SIZE * gpus, UUID_SIZE)]
    texts = [each.partition(b"\0")[0].decode("ascii", "replace") for each in found]
    named = [text for text in texts if text]
    if len(named) != len({*named}):
        raise Unusable(f"it names a GPU twice: {clean(max(named, key=named.count))}")
    return texts


def tail_of(tail: bytes) -> Tail:
    """What stands behind the processes. Raises Unusable."""
    if len(tail) < TAIL.size:
        raise Unusable("it is cut off")
    found = Tail(*TAIL.unpack(tail))
    if not 0 <= found.processes <= PROCESSES:
        raise Unusable(f"it has {found.processes} processes, and {PROCESSES} are the most")
    return found


def counts_of(uuids: list[str], processes: bytes, tail: Tail, gpus: Collection[DeviceID]) -> Iterator[LibraryCount]:
    """
    What is counted of these GPUs, of all processes that run; other GPUs are passed over. `processes`: the bytes of as many
    as `tail` says. Raises Unusable.
    """
    if len(processes) != tail.processes * PROCESS_SIZE:
        raise Unusable("it is cut off")
    numbers = array("Q", processes)  # of this machine, which wrote them
    running = [
        place for place, status in enumerate(array("i", processes)[STATUS_AT // 4 :: PROCESS_SIZE // 4]) if status
    ]

    def column(at: int) -> list[int]:
        """What stands there in each process that runs."""
        found = numbers[at // 8 :: PROCESS_SIZE // 8]
        return [found[place] for place in running]

    for place, uuid in enumerate(uuids):
        if uuid not in gpus:
            continue
        at = USE_AT + USE_SIZE * place
        context, modules, buffers, memory = (sum(column(at + part)) for part in USES)
        if memory > LARGEST:
            raise Unusable(f"it counts {memory} bytes of {clean(uuid)}")
        times = column(TIME_AT + TIME_SIZE * place)
        yield LibraryCount(
            device=DeviceID(uuid),
            memory=memory,
            context=context if context <= memory else None,
            modules=modules if modules <= memory else None,
            buffers=buffers if buffers <= memory else None,
            utilization=sum(times) if max(times, default=0) <= PERCENT else None,
            last_kernel=tail.last_kernel if 0 < tail.last_kernel <= LARGEST else None,
        )

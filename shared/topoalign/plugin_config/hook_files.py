"""
The files of HAMi-core on a node: its library, and the list with which the dynamic linker loads the library into every
program of a container (ld.so.preload).

`topoalign hook install` copies both into one directory, and the allocator mounts them into containers. The path of the
library in a container is fixed, because the library looks for itself there.

    <root>/libvgpu.so       mounted read-only at /usr/local/vgpu/libvgpu.so
    <root>/ld.so.preload    mounted read-only at /etc/ld.so.preload: one line, the path of the library in a container

Source: HAMi-core 8f3a89c (the path), the ELF specification (the header).
"""

import os
import struct
from pathlib import Path

from topoalign.core.model.errors import BadRequest, clean

LIBRARY = "libvgpu.so"
PRELOAD = "ld.so.preload"
CONTAINER_ROOT = "/usr/local/vgpu"
CONTAINER_LIBRARY = f"{CONTAINER_ROOT}/{LIBRARY}"
CONTAINER_PRELOAD = "/etc/ld.so.preload"
PRELOADED = f"{CONTAINER_LIBRARY}\n".encode()
LARGEST = 256 * 1024 * 1024
"""Maximum size of a library in bytes. HAMi-core's has less than one MiB; a much larger file is something else."""

HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
"""The header of a 64-bit ELF file: ident, type, machine, version, entry, offsets of both tables, flags, and their sizes."""
SEGMENT = struct.Struct("<IIQQQQQQ")
"""Type, flags, offset, two addresses, size in the file, size in memory, alignment."""
IDENT = b"\x7fELF\x02\x01"
"""64 bits, little endian, as on all machines with NVIDIA's driver."""
SHARED = 3
LOADED = 1
DYNAMIC = 2
INTERPRETER = 3
MACHINES = {"x86_64": 62, "aarch64": 183}


class NoLibrary(BadRequest):
    """
    Raised for a file that is no shared library of this machine.

    It would make each program of a container fail.

    Remedy: Give the path of HAMi-core's `libvgpu.so`, built for this machine.
    """

    def __init__(self, why: str) -> None:
        super().__init__(f"the file is no shared library of this machine: {why}", "name HAMi-core's libvgpu.so")


def check_library(content: bytes, machine: str) -> None:
    """Raises NoLibrary unless this is a complete ELF shared object for this machine (`x86_64`, `aarch64`)."""
    if machine not in MACHINES:
        raise NoLibrary(f"there is none for {clean(machine)}")
    if len(content) < HEADER.size or not content.startswith(IDENT):
        raise NoLibrary("it is no ELF file of 64 bits")
    _, kind, built_for, _, _, at, sections, _, _, size, count, section_size, section_count, _ = HEADER.unpack_from(
        content
    )
    if built_for != MACHINES[machine]:
        raise NoLibrary(f"it is built for machine {built_for}, and {machine} is {MACHINES[machine]}")
    if kind != SHARED or size != SEGMENT.size:
        raise NoLibrary("it is a program, an object file or a core dump")
    if max(at + size * count, sections + section_size * section_count) > len(content):
        raise NoLibrary("its end is missing")
    segments = [SEGMENT.unpack_from(content, at + size * place) for place in range(count)]
    if any(segment[2] + segment[5] > len(content) for segment in segments if segment[0] == LOADED):
        raise NoLibrary("its end is missing")
    kinds = {segment[0] for segment in segments}
    if DYNAMIC not in kinds or INTERPRETER in kinds:
        raise NoLibrary("it is a program")


def find_missing_file(root: Path) -> str | None:
    """The file that is missing or wrong below a root: `libvgpu.so` or `ld.so.preload`; None: both are correct."""
    for name in (LIBRARY, PRELOAD):
        if not os.path.isfile(root / name):  # Path.is_file raises if a parent directory is not accessible
            return name
    try:
        with open(root / PRELOAD, "rb") as file:
            return None if file.read(len(PRELOADED) + 1) == PRELOADED else PRELOAD
    except OSError:
        return PRELOAD

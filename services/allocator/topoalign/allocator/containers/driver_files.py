"""
What a container needs of the driver beside device nodes: its user-space libraries, in the version of the kernel module.

They are found as NVIDIA's own tools find them: the directory that has a file `libcuda.so.<version>`, and in it whatever
bears that version at the end of its name. Only regular files count. A link could lead to a path of another root, and the
directory that it leads to is searched anyway.

Sources: nvidia-container-toolkit v1.17 (pkg/nvcdi), of which this is the part for compute and utility.
"""

import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

from topoalign.allocator.containers.host import ContainerUnready, Root

LIBRARIES = (
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/lib64",
    "/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/lib/aarch64-linux-gnu/nvidia/current",
)
"""Where distributions install them."""

PROGRAMS = (
    "/usr/bin/nvidia-smi",
    "/usr/bin/nvidia-debugdump",
    "/usr/bin/nvidia-cuda-mps-control",
    "/usr/bin/nvidia-cuda-mps-server",
)

_CUDA = re.compile(r"libcuda\.so\.(\d+(?:\.\d+){1,2})")


class DriverFiles(NamedTuple):
    """The driver's user-space files, by their paths below the driver's root; they have the same paths in a container."""

    directory: str
    """Of the libraries."""
    version: str
    libraries: tuple[str, ...]
    programs: tuple[str, ...]


def find(root: Root) -> DriverFiles:
    """Finds the files of the one driver below the root. Raises ContainerUnready if there is none, or more than one."""
    for directory in LIBRARIES:
        here = root.below(directory)
        names = library_names(here)
        versions = [named[1] for name in names if (named := _CUDA.fullmatch(name)) and is_regular(here / name)]
        if len(versions) > 1:
            raise ContainerUnready(
                f"{root.on_host(directory)} has libraries of drivers {' and '.join(versions)}",
                "remove those of the driver that is not loaded",
            )
        if versions:
            ending = f".so.{versions[0]}"
            return DriverFiles(
                directory,
                versions[0],
                tuple(f"{directory}/{name}" for name in names if name.endswith(ending) and is_regular(here / name)),
                tuple(path for path in PROGRAMS if is_regular(root.below(path))),
            )
    raise ContainerUnready(
        f"no libcuda.so.<version> is found below {root.here}, so that a CDI specification would give containers no driver",
        "mount the driver's root into this container at containerDriverRoot, or use deviceListStrategy envvar",
    )


def library_names(directory: Path) -> list[str]:
    """
    The names in a directory, sorted; none where it cannot be read. A host has thousands there: only those of the driver
    are checked one by one.
    """
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def is_regular(path: Path) -> bool:
    """Whether a regular file is at the path; links do not count."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False

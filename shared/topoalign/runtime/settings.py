"""
Reads settings from the environment: the field `state_dir` of a service's settings is `TOPOALIGN_STATE_DIR`.

A settings class is a frozen msgspec Struct. The docstrings of its fields have the unit, the default and the reason. The
command line sets variables of the same names from its flags, so the environment is the only source.
"""

from collections.abc import Mapping
from enum import EnumType
from pathlib import Path
from typing import Annotated, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from topoalign.core.model.errors import InvalidField, clean

PREFIX = "TOPOALIGN_"
S = TypeVar("S", bound=msgspec.Struct)
P = TypeVar("P", bound=Path)


def from_environment(kind: type[S], environment: Mapping[str, str]) -> S:
    """Fills the settings class from `TOPOALIGN_<FIELD>`; others belong to other services. Raises InvalidField."""
    values = {
        field.name: environment[PREFIX + field.name.upper()]
        for field in msgspec.structs.fields(kind)
        if PREFIX + field.name.upper() in environment
    }
    try:
        return msgspec.convert(values, kind, strict=False, dec_hook=made_of_text)
    except msgspec.ValidationError as error:
        text = str(error)
        name = text.rsplit("$.", 1)[-1].rstrip("`").split("[")[0] if "$." in text else ""
        variable = PREFIX + name.upper() if name else f"{PREFIX}…"
        raise InvalidField(variable, clean(text.split(" - at")[0], 200), describe_setting_values(kind, name)) from error


def describe_setting_values(kind: type[msgspec.Struct], name: str) -> str:
    """The allowed values of a setting, as a remedy for an error."""
    hint = get_type_hints(kind).get(name)
    values: tuple[object, ...] = get_args(hint) if get_origin(hint) is Literal else ()
    if isinstance(hint, EnumType):
        values = tuple(member.value for member in hint)  # type: ignore[var-annotated]  # of any enum
    if values:
        return f"set it to one of {', '.join(map(str, values))}"
    return "set it to such a value, or leave it unset"


def made_of_text(kind: type[P], value: str) -> P:
    """Makes values of types that msgspec does not support."""
    if kind is Path:
        return kind(value)
    raise NotImplementedError(f"settings of type {kind}")


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """The files with the credentials for NATS. They are read for every connection, so that renewed files are used."""

    nats_creds: str | None = None
    """Credentials file (JWT and seed), for servers with operators and accounts."""

    nats_nkey: str | None = None
    """File with the seed of an nkey user (`SU…`)."""

    nats_tls_ca: str | None = None
    """PEM file of the CA that signed the server's certificate, if the machine does not trust it already."""

    nats_tls_cert: str | None = None
    """PEM file of the client certificate, if NATS requests one."""

    nats_tls_key: str | None = None
    """PEM file of the client certificate's key; None: the key is in the certificate's file."""


class RuntimeSettings(Access, frozen=True, kw_only=True):
    """The settings of every process, independent of its services."""

    node: str = ""
    """Name of the Kubernetes node, or of this host. Default: the host name in lower case, as the kubelet uses it."""

    nats_url: str = "nats://127.0.0.1:4222"
    """Address of NATS; separate several servers of a cluster by commas."""

    nats_wait: float | None = None
    """
    Seconds to wait for NATS at the start; after that the process fails. Default: the process starts without NATS and
    connects when it can; meanwhile, a node continues to allocate devices.
    """

    http_host: str = "127.0.0.1"
    """Address of the HTTP pages. The default is the loopback address, because the pages have no authentication."""

    http_port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] | None = None
    """HTTP port; 0 picks a free one. Default: no HTTP."""

    config: str = ""
    """The file that assigns devices to resources. Discovery and allocator read it at the start and when it changes."""

    log_format: Literal["console", "json"] = "console"
    """Format of the log on stderr."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""

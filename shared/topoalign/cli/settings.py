"""
Every setting of every installed service, with its value and the origin of the value.

A service's settings are the Struct in the module `settings` beside its entry (group `topoalign.services`). Secrets are
not shown: credentials in addresses, seeds, and values whose names contain password or token.
"""

import re
from collections.abc import Collection, Iterator, Mapping

import msgspec

from topoalign.runtime.installed import kinds
from topoalign.runtime.settings import PREFIX, RuntimeSettings, from_environment

HIDDEN = "[redacted]"

_SECRET_NAME = re.compile(r"password|passwd|secret|token", re.IGNORECASE)
_IN_ADDRESS = re.compile(r"(?:^|(?<=://))(?:(?!\w+://).)*@")
"""All that stands before a host: a user, a password with whatever it has in it, or a token by itself."""
_SEED = re.compile(r"\bS[UOANCPXV][A-Z2-7]{54,}\b")
"""An nkey's seed, where its file's name belongs."""

SHARED = frozenset(RuntimeSettings.__struct_fields__)


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One setting."""

    service: str
    name: str
    value: str
    """As text, without what is secret."""
    origin: str
    """`default`, `environment` or `flag`."""


def all_settings(environment: Mapping[str, str], said: Collection[str], flags: Collection[str]) -> Iterator[Setting]:
    """
    Of the process and of each service, in the order in which they start. `environment` holds all that the services are
    handed; `said` are the variables of it that somebody has set, `flags` those that flags stand for.

    Raises InvalidField for a setting that no service would start with.
    """
    for service, kind in kinds().items():
        found = from_environment(kind, environment)
        for field in msgspec.structs.fields(kind):
            variable = PREFIX + field.name.upper()
            if kind is not RuntimeSettings and field.name in SHARED:
                continue  # handed on by the process
            value = getattr(found, field.name)
            origin = "flag" if variable in flags else "environment" if variable in said else "default"
            yield Setting(service=service, name=variable, value=shown(variable, as_text(value)), origin=origin)


def as_text(value: object) -> str:
    """The value as it is written in an environment variable; None is empty."""
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def shown(name: str, text: str) -> str:
    """The value of a setting without what is secret in it."""
    if _SECRET_NAME.search(name) and text:
        return HIDDEN
    if name.endswith("_URL") or "://" in text:
        text = _IN_ADDRESS.sub(f"{HIDDEN}@", text)
    return _SEED.sub(HIDDEN, text)

"""
Every setting of every installed service, with its value and the origin of the value.

A service's settings are the Struct in the module `settings` beside its entry (group `topoalign.services`). Secrets are
not shown: credentials in addresses, seeds, and values whose names contain password or token.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from importlib import import_module, metadata

import msgspec

from topoalign.core.model.errors import clean
from topoalign.runtime.runner import ENTRY_POINTS, order
from topoalign.runtime.settings import PREFIX, RuntimeSettings, from_environment

EVERYWHERE = "every service"
HIDDEN = "[redacted]"

_SECRET_NAME = re.compile(r"password|passwd|secret|token", re.IGNORECASE)
_IN_ADDRESS = re.compile(r"(?:^|(?<=://))(?:(?!\w+://).)*@")
"""All that stands before a host: a user, a password with whatever it has in it, or a token by itself."""
_SEED = re.compile(r"\bS[UOANCPXV][A-Z2-7]{54,}\b")
"""An nkey's seed, where its file's name belongs."""

_OF_A_SERVICE = re.compile(r"_SERVICE_(?:HOST|PORT)(?:_\w+)?$|_PORT(?:_[0-9]+_(?:TCP|UDP|SCTP)(?:_\w+)?)?$")
"""What a kubelet sets in every container for a Service named topoalign-something."""

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


def kinds() -> dict[str, type[msgspec.Struct]]:
    """The settings Structs, by service."""
    found: dict[str, type[msgspec.Struct]] = {EVERYWHERE: RuntimeSettings}
    points = {point.name: point for point in metadata.entry_points(group=ENTRY_POINTS)}
    for name in sorted(points, key=order):
        try:
            module = import_module(points[name].module.rpartition(".")[0] + ".settings")
        except ModuleNotFoundError:  # another's service, with other habits
            continue
        found.update(
            (name, each)
            for each in vars(module).values()
            if isinstance(each, type) and issubclass(each, msgspec.Struct) and each.__module__ == module.__name__
        )
    return found


def unread(environment: Mapping[str, str]) -> Iterator[str]:
    """What to say of each variable with our prefix that is no setting: most often one that is misspelt."""
    known = {PREFIX + field.name.upper() for kind in kinds().values() for field in msgspec.structs.fields(kind)}
    for variable in sorted(environment):
        if variable.startswith(PREFIX) and variable not in known and not _OF_A_SERVICE.search(variable):
            near = get_close_matches(variable, known, n=1)
            yield f"{clean(variable)} is set but is not a setting" + (f": did you mean {near[0]}?" if near else "")


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

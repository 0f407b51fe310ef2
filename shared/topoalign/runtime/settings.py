"""
Settings from the environment: the field `state_dir` of a service's settings is `TOPOALIGN_STATE_DIR`.

A settings class is a frozen msgspec Struct whose fields carry unit, default and reason; the command line turns its flags
into the same names, so there is one way in.
"""

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from topoalign.core.errors import InvalidField, clean

PREFIX = "TOPOALIGN_"
S = TypeVar("S", bound=msgspec.Struct)


def from_environment(kind: type[S], environment: Mapping[str, str]) -> S:
    """
    Fills the settings class from `TOPOALIGN_<FIELD>`. Raises InvalidField that names the variable.

    Variables of other services are left alone: in one process all services read the same environment.
    """
    values = {
        field.name: environment[PREFIX + field.name.upper()]
        for field in msgspec.structs.fields(kind)
        if PREFIX + field.name.upper() in environment
    }
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        text = str(error)
        name = text.rsplit("$.", 1)[-1].rstrip("`").split("[")[0] if "$." in text else ""
        variable = PREFIX + name.upper() if name else f"{PREFIX}…"
        raise InvalidField(
            variable, clean(text.split(" - at")[0], 200), f"see the fields of {kind.__name__}"
        ) from error

"""
Reads and writes topoalign's own description of a machine: strict JSON, the only format with all fields of a `Topology`.

    {"kind": "topoalign.machine", "version": 1, "name": "lab-7", "source": "…", "topology": {"cpus": [{"id": 0, …}], …}}

The fields below `topology` are those of `core.model.topology.model`. A missing field has its default. An unknown field
is refused, so that no misspelt field is lost. A topology alone, as `topoalign topo --json` prints it, is accepted.
"""

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from topoalign.core.model.errors import InvalidField, InvalidMachine, clean, quoted
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.topology_checks import validate

KIND = "topoalign.machine"
VERSION = 1

T = TypeVar("T")

_REMEDY = "compare with what `topoalign topo import` writes"


class Machine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A machine that was described, not discovered."""

    name: str
    """Its name in the catalogue or in the document, otherwise that of the file."""
    topology: Topology
    source: str = ""
    """The source of the description, for people."""


class _Document(Machine, frozen=True, kw_only=True, omit_defaults=True):
    kind: str
    version: int


def encode_machine(machine: Machine) -> bytes:
    """The JSON of a machine, indented, with a newline at the end."""
    document = {"kind": KIND, "version": VERSION, **msgspec.to_builtins(machine)}
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def decode_machine(raw: bytes, name: str) -> Machine:
    """The machine of a document; `name` is for a topology alone. Raises InvalidMachine, InvalidField (with path)."""
    try:
        content = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise InvalidMachine(f"no JSON: {clean(str(error))}", _REMEDY) from error
    except RecursionError as error:
        raise InvalidMachine("no machine: the JSON is nested too deeply", _REMEDY) from error
    if not isinstance(content, dict):
        raise InvalidMachine("no machine: the JSON is not an object", _REMEDY)
    if "kind" not in content:
        machine = Machine(name=name, topology=_converted(content, Topology))
    else:
        if content["kind"] != KIND:
            raise InvalidField("kind", f"{quoted([str(content['kind'])])} is not {KIND!r}", _REMEDY)
        if content.get("version") != VERSION:
            found = quoted([str(content.get("version"))])
            raise InvalidField(
                "version", f"{found} is not {VERSION}", "use the topoalign that wrote it, or a newer one"
            )
        document = _converted(content, _Document)
        machine = Machine(name=document.name, topology=document.topology, source=document.source)
    try:
        validate(machine.topology)
    except InvalidField as error:
        raise InvalidField(f"topology.{error.field}", error.finding.partition(": ")[2], error.remedy) from error
    return machine


def _converted(content: Mapping[str, object], kind: type[T]) -> T:
    try:
        value = msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        finding, _, path = str(error).partition(" - at ")
        raise InvalidField(clean(path.strip("`$.")) or "document", clean(finding, 200), _REMEDY) from error
    _check_known_fields(content, value, "")
    return value


def _check_known_fields(content: object, value: object, path: str) -> None:
    if isinstance(value, msgspec.Struct) and isinstance(content, dict):
        for name, inner in content.items():
            if name not in value.__struct_fields__:
                finding = f"there is no field {quoted([name])}"
                raise InvalidField(f"{path}{clean(name)}", finding, f"known are {', '.join(value.__struct_fields__)}")
            _check_known_fields(inner, getattr(value, name), f"{path}{name}.")
    elif isinstance(value, tuple) and isinstance(content, list):
        for i, (inner, item) in enumerate(zip(content, value, strict=False)):
            _check_known_fields(inner, item, f"{path.removesuffix('.')}[{i}].")

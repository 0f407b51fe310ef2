"""
Reads a configuration. Precedence, lowest first: defaults, file, variables of NVIDIA's device plugin.

The whole configuration is checked before any part is used. An error names the field's path, such as `nics[0].name`, or
the variable that set it. An unknown key is an error, because a silently ignored setting is noticed too late.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from topoalign.core.model.errors import BadRequest, InvalidField
from topoalign.kubelet.files import configuration_file, documents
from topoalign.kubelet.files.configuration_file import FieldMapping
from topoalign.kubelet.files.documents import Document, InvalidDocument
from topoalign.plugin_config import nvidia_fields
from topoalign.plugin_config.checks import validate_configuration
from topoalign.plugin_config.configuration import Configuration, ConfigurationFinding

# Finds the configuration files inside a wrapper: a ConfigMap, or the values of a Helm chart.
#
# NVIDIA's charts contain several named configurations, one for each kind of node. Each value is a complete file:
#
# - `data` of a ConfigMap, also of one in a List or among several YAML documents
# - `config.map` in the values of the chart nvidia-device-plugin, and `devicePlugin.config.data` in those of
#   gpu-operator
#
# A file without these is a configuration itself.
#
# Sources: k8s-device-plugin v0.20.0 and gpu-operator v25.10, their charts.


CONFIG_MAP = "ConfigMap"
VALUES = (("config", "map"), ("devicePlugin", "config", "data"))
"""The last keys of the path of a mapping whose values are files."""


class Wrapped(NamedTuple):
    """A configuration file, and the field of the wrapper that contains it."""

    field: str
    """Its path; "" for a file that is no wrapper."""
    content: Document | BadRequest
    """Its document, or why it cannot be read."""


def configurations(raw: bytes, path: Path) -> list[Wrapped]:
    """The configurations in a file, at least one, in the order of the file. Raises InvalidDocument."""
    parts = configuration_file.mappings_in(raw, str(path))
    return files(parts, str(path)) or [Wrapped("", documents.parse_document(raw, str(path)))]


def files(parts: Sequence[FieldMapping], source: str) -> list[Wrapped]:
    """The files inside those of these mappings that are wrappers."""
    return [
        Wrapped(
            field := configuration_file.field_of((*path, str(key))),
            _content(value, f"{source}, {field}"),
        )
        for part in parts
        for path, values in [_values(part)]
        for key, value in values.items()
    ]


def _values(part: FieldMapping) -> tuple[configuration_file.Path, Mapping[object, object]]:
    """The path of a mapping whose values are files, and the mapping; empty if there is none."""
    if part.content.get("kind") == CONFIG_MAP:
        data = part.content.get("data")
        return (*part.path, "data"), data if isinstance(data, dict) else {}
    is_values = any(part.path[-len(end) :] == end for end in VALUES)
    return part.path, part.content if is_values else {}


def _content(value: object, source: str) -> Document | BadRequest:
    if isinstance(value, dict):
        return value
    try:
        return documents.parse_document(str(value).encode(), source)
    except InvalidDocument as error:
        return error


DEFAULT = "default"
FROM_FILE = "file"
REMEDY = "correct it; docs/configuration.md describes all fields and their values"


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration, and where it came from."""

    configuration: Configuration
    origins: Mapping[str, str]
    """Path of a field -> `file`, or the variable that overrides it. A field that is not listed has its default."""
    findings: tuple[ConfigurationFinding, ...]
    """Fields that have no effect."""


def read_configuration_file(path: Path) -> bytes:
    """
    Reads a configuration file. NVIDIA's config-manager links its file to /dev/null if it has none for a node: that counts as
    an empty document. Raises NotFound and InvalidDocument.
    """
    return b"{}" if os.path.realpath(path) == os.devnull else documents.read_bounded(path)


def load_plugin_config(path: Path) -> Loaded:
    """Loads a file without the environment. Raises as `read_configuration_file` and `load_content`."""
    return load_content(read_configuration_file(path), path, {})


def load_content(raw: bytes, path: Path, environment: Mapping[str, str]) -> Loaded:
    """
    The configuration in the bytes of a file, which can be a wrapper that contains one. Raises InvalidDocument, and
    InvalidField with the path of the first field that is wrong.
    """
    found = configurations(raw, path)
    if len(found) > 1:
        fields = ", ".join(one.field for one in found)
        raise InvalidField("document", f"it holds {len(found)} configurations: {fields}", "give one of them as a file")
    return load_wrapped(found[0], environment)


def load_wrapped(found: Wrapped, environment: Mapping[str, str]) -> Loaded:
    """The configuration of one file of a wrapper. Raises as `load_content`."""
    if isinstance(found.content, BadRequest):
        raise found.content
    try:
        return interpret_document(found.content, environment)
    except InvalidField as error:
        raise error if error.field in environment else configuration_file.nested_error(found.field, error) from error


def interpret_document(document: documents.Document, environment: Mapping[str, str]) -> Loaded:
    """
    The configuration from a document and the environment; {}: no file.

    Raises InvalidField with the path of the first field that is wrong or not supported, or the variable that set it.
    """
    document = nvidia_fields.rename_hook_path(document)
    origins = dict.fromkeys(flatten_document(document), FROM_FILE)
    document, variables = nvidia_fields.apply_variables(document, environment)
    try:
        document, ignored = nvidia_fields.resolve_nvidia_fields(document)
        configuration = validate_configuration(documents.convert_document(document, Configuration, REMEDY))
    except InvalidField as error:  # under the variable that the value came from
        of_field = (variables[each] for each in variables if f"{error.field}.".startswith((f"{each}.", f"{each}[")))
        finding = error.finding.removeprefix(f"{error.field}: ")
        raise InvalidField(next(of_field, error.field), finding, error.remedy) from error
    origins.update(variables)
    findings = tuple(
        ConfigurationFinding(field=variables.get(field, field), finding=f"has no effect: {why}")
        for field, why in ignored.items()
    )
    return Loaded(configuration=configuration, origins=origins, findings=findings)


def flatten_document(content: object, path: str = "") -> dict[str, object]:
    """The values of a document by their paths; a list is one value, except a list of mappings."""
    if isinstance(content, dict) and content:
        below = [(f"{path}.{key}" if path else str(key), inner) for key, inner in content.items()]
    elif isinstance(content, list | tuple) and content and all(isinstance(item, dict) for item in content):
        below = [(f"{path}[{place}]", item) for place, item in enumerate(content)]
    else:
        return {path: content} if path else {}
    return {leaf: value for place, inner in below for leaf, value in flatten_document(inner, place).items()}

"""
Finds the configuration files inside a wrapper: a ConfigMap, or the values of a Helm chart.

NVIDIA's charts carry several configurations by name, one for each kind of node. Each value is a file of its own:

- `data` of a ConfigMap, also of one in a List or among several YAML documents
- `config.map` in the values of the chart nvidia-device-plugin, and `devicePlugin.config.data` in those of gpu-operator

A file without these is a configuration itself. One that only names a ConfigMap (ClusterPolicy, `devicePlugin.config.name`)
is refused with that name.

Sources: k8s-device-plugin v0.20.0 and gpu-operator v25.10, their charts.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from topoalign.core.model.errors import BadRequest, InvalidField, clean, quoted
from topoalign.kubelet.files import documents, wrappers
from topoalign.kubelet.files.documents import Document, InvalidDocument
from topoalign.kubelet.files.wrappers import FieldMapping

CONFIG_MAP = "ConfigMap"
VALUES = (("config", "map"), ("devicePlugin", "config", "data"))
"""The last fields of a path whose values are files."""


class Wrapped(NamedTuple):
    """A configuration file, and the field of the wrapper that holds it."""

    field: str
    """Its path; "" for a file that is no wrapper."""
    content: Document | BadRequest
    """What it holds, or why it cannot be read."""


def configurations(raw: bytes, path: Path) -> list[Wrapped]:
    """
    The configurations in a file, in its order, at least one. Raises InvalidDocument for a file that cannot be read, and
    InvalidField for an object of Kubernetes that holds none.
    """
    parts = wrappers.mappings_in(raw, str(path))
    found = files(parts, str(path))
    if found:
        return found
    check_no_object(parts)
    return [Wrapped("", documents.read(raw, str(path)))]


def only(raw: bytes, path: Path) -> Wrapped:
    """The one configuration in a file. Raises as `configurations`, and InvalidField where there are several."""
    found = configurations(raw, path)
    if len(found) > 1:
        fields = ", ".join(one.field for one in found)
        raise InvalidField("document", f"it holds {len(found)} configurations: {fields}", "give one of them as a file")
    return found[0]


def files(parts: Sequence[FieldMapping], source: str) -> list[Wrapped]:
    """The files that wrappers among these mappings hold."""
    return [
        Wrapped(
            field := wrappers.field_of((*path, str(key))),
            _content(value, f"{source}, {field}", only_text=part.content.get("kind") == CONFIG_MAP),
        )
        for part in parts
        for path, values in [_values(part)]
        for key, value in values.items()
    ]


def check_no_object(parts: Sequence[FieldMapping]) -> None:
    """Raises InvalidField for an object of Kubernetes, or for the values of a chart, that have no configuration."""
    for part in parts:
        name = part.content.get("name")
        if part.path[-1:] == ("config",) and isinstance(name, str) and name:
            finding = f"names the ConfigMap {quoted([name])}, which has the configuration"
            raise InvalidField(f"{part.field}.name", finding, f"give `kubectl get configmap {clean(name)} -o yaml`")
    kind = parts[0].content.get("kind") if parts else None
    if kind is not None:
        remedy = "give the configuration file, or the ConfigMap that holds it"
        raise InvalidField("kind", f"{quoted([str(kind)])} is no configuration of a device plugin", remedy)


def _values(part: FieldMapping) -> tuple[wrappers.Path, Mapping[object, object]]:
    """The path of a mapping whose values are files, and the mapping; empty where there is none."""
    if part.content.get("kind") == CONFIG_MAP:
        data = part.content.get("data")
        return (*part.path, "data"), data if isinstance(data, dict) else {}
    is_values = any(part.path[-len(end) :] == end for end in VALUES)
    return part.path, part.content if is_values else {}


def _content(value: object, source: str, *, only_text: bool) -> Document | BadRequest:
    if isinstance(value, dict):
        finding = "is a mapping, and an API server takes only text in data of a ConfigMap"
        return InvalidDocument(source, finding, "write `|` behind the key: `NAME: |`") if only_text else value
    try:
        return documents.read(str(value).encode(), source)
    except InvalidDocument as error:
        return error

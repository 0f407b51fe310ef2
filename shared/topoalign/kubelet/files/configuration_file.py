"""
Finds the KubeletConfiguration in a file: the kubelet's `--config` file, or a file that contains it.

The configuration is an object of the kind KubeletConfiguration anywhere in the file, for example in `data.kubelet` of
kubeadm's ConfigMap, or in one of several YAML documents. It can also be `kubeletconfig`, the answer of a node's
`/configz`, which has flags and drop-in files merged. Files of distributions with a part of a configuration (Talos,
OpenShift, GKE, nodeadm, eksctl) are rejected, because no decision can be predicted from a part.

Sources: kubelet v1.36.3; kubeadm v1.36.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from topoalign.core.model.errors import InvalidField, clean
from topoalign.kubelet.files import documents
from topoalign.kubelet.files.documents import Document, InvalidDocument

# Every mapping in a file is found, with the path of the field that contains it. A value that is a string of several
# lines or of JSON is parsed, and its mappings have the path of the string. `metadata` is skipped, because kubectl keeps
# a copy of the whole object there.

DEEPEST_TEXT = 3
"""Levels of nested strings that are parsed, such as a chart's values in an object, and a file in those values."""

Path = tuple[str, ...]
"""The fields and list positions from the file to a mapping: `("items", "[0]", "data")`."""


class FieldMapping(NamedTuple):
    """A mapping in a file, and its path."""

    path: Path
    content: Document

    @property
    def field(self) -> str:
        """The path as in an error message; "" for the file itself."""
        return field_of(self.path)


def field_of(path: Path) -> str:
    """
    The path as in an error message: `items[0].data.kubelet`. In a file with several documents, it begins with
    `documents[1]`. A key that is not a plain word is in brackets: `data[config.yaml]`.
    """
    keys = [key if key[:1] == "[" or re.fullmatch(r"[\w-]+", key) else f"[{key}]" for key in path]
    return clean("".join(key if key[:1] == "[" else f".{key}" for key in keys).removeprefix("."), 300)


def nested_error(field: str, error: InvalidField) -> InvalidField:
    """Converts an error in the document in this field to an error of the whole file."""
    if not field:
        return error
    return InvalidField(f"{field}.{error.field}", error.finding.removeprefix(f"{error.field}: "), error.remedy)


def mappings_in(raw: bytes, source: str) -> list[FieldMapping]:
    """All mappings in a file, each before those inside it. Raises InvalidDocument if the file cannot be read."""
    contents = documents.documents_of(raw, source)
    several = sum(content is not None for content in contents) > 1
    found: list[FieldMapping] = []
    for place, content in enumerate(contents):
        found += _inside(("documents", f"[{place}]") if several else (), content, DEEPEST_TEXT)
    return found


def _inside(path: Path, content: object, texts: int) -> Iterator[FieldMapping]:
    if isinstance(content, dict):
        yield FieldMapping(path, content)
        for key, value in content.items():
            if key != "metadata":
                yield from _inside((*path, str(key)), value, texts)
    elif isinstance(content, list):
        for place, value in enumerate(content):
            yield from _inside((*path, f"[{place}]"), value, texts)
    elif isinstance(content, str) and texts and ("\n" in content or content.lstrip().startswith("{")):
        try:
            contents = [each for each in documents.documents_of(content.encode(), field_of(path)) if each is not None]
        except InvalidDocument:
            return  # such as a script, a certificate or a template, which the file may contain
        for place, each in enumerate(contents):
            yield from _inside((*path, f"[{place}]") if len(contents) > 1 else path, each, texts - 1)


KIND = "KubeletConfiguration"
API_VERSION = "kubelet.config.k8s.io/v1beta1"
REMEDY = (
    "give the file that the kubelet is given with --config, or the output of `kubectl get --raw "
    "/api/v1/nodes/NODE/proxy/configz`, which has the configuration of a node with everything merged"
)


def find_configuration(parts: Sequence[FieldMapping]) -> FieldMapping:
    """The one configuration among the mappings of a file. Raises InvalidField if there is none, or more than one."""
    found: list[FieldMapping] = []
    for part in parts:
        if part.path[-1:] == ("kubeletconfig",):
            part = FieldMapping(part.path, {"apiVersion": API_VERSION, "kind": KIND, **part.content})
        if part.content.get("kind") == KIND and part.content not in [same.content for same in found]:
            found.append(part)
    if len(found) > 1:
        fields = ", ".join(one.field or "the file itself" for one in found)
        raise InvalidField("document", f"it holds {len(found)} configurations: {fields}", "give one of them alone")
    if not found:
        raise documents.other_kind(parts[0].content if parts else {}, KIND, API_VERSION, REMEDY)
    return found[0]

"""
Finds the KubeletConfiguration in a file: the file that the kubelet is given with `--config`, or a wrapper of it.

Complete configurations are: an object of the kind KubeletConfiguration, wherever it stands (ConfigMap `data.kubelet` of
kubeadm, one of several YAML documents, a file in a MachineConfig); and `kubeletconfig`, the answer of a node's `/configz`,
which has the flags and drop-in files merged. Other wrappers have a part that the distribution merges with its own settings:
Talos `machine.kubelet.extraConfig`, OpenShift and GKE `kubeletConfig`, EKS nodeadm `spec.kubelet.config`, eksctl
`kubeletExtraConfig`. Such a partial configuration is taken too, with a note that it is partial.

Sources: kubelet v1.36.3; kubeadm v1.36; Talos v1.11; OpenShift 4.19 `machineconfiguration.openshift.io/v1`; nodeadm
`node.eks.aws/v1alpha1`; eksctl `eksctl.io/v1alpha5`; GKE node system configuration.
"""

import base64
import binascii
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from topoalign.core.model.errors import InvalidField, clean
from topoalign.kubelet.files import documents
from topoalign.kubelet.files.documents import Document, InvalidDocument

# Every mapping of fields in a file is found, with the path of the field that holds it. A value that is text of several
# lines, JSON, base64 or a data URL is opened, and its mappings have the path of the text. `metadata` is left out:
# kubectl keeps a copy of the whole object there.

DEEPEST_TEXT = 3
"""Levels of nested texts that are opened: a chart's values in an object, and a file in those values."""

_BASE64 = re.compile(r"(?:[A-Za-z0-9+/]{4}){6,}(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?")
_DATA_URL = re.compile(r"data:[^,]{0,200}?(;base64)?,")

Path = tuple[str, ...]
"""The fields and places from the file to a mapping: `("items", "[0]", "data")`."""


class FieldMapping(NamedTuple):
    """A mapping of fields in a file, and where it stands."""

    path: Path
    content: Document

    @property
    def field(self) -> str:
        """The path as an error writes it; "" for the file itself."""
        return field_of(self.path)


def field_of(path: Path) -> str:
    """
    The path as an error writes it: `items[0].data.kubelet`; of a file with several documents it begins with
    `documents[1]`. A key that is no plain word stands in brackets: `data[config.yaml]`.
    """
    keys = [key if key[:1] == "[" or re.fullmatch(r"[\w-]+", key) else f"[{key}]" for key in path]
    return clean("".join(key if key[:1] == "[" else f".{key}" for key in keys).removeprefix("."), 300)


def nested_error(field: str, error: InvalidField, advice: str = "") -> InvalidField:
    """An error in the document that this field holds, as an error of the whole file; `advice` follows the remedy."""
    if not field:
        return error
    return InvalidField(f"{field}.{error.field}", error.finding.removeprefix(f"{error.field}: "), error.remedy + advice)


def mappings_in(raw: bytes, source: str) -> list[FieldMapping]:
    """Every mapping in a file, an outer one before those inside it. Raises InvalidDocument where it cannot be read."""
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
    elif isinstance(content, str) and texts:
        opened = open_text(content)
        if opened is None:
            return
        try:
            contents = [each for each in documents.documents_of(opened, field_of(path)) if each is not None]
        except InvalidDocument:
            return  # a script, a certificate, a template: no document, which the whole file may contain
        for place, each in enumerate(contents):
            yield from _inside((*path, f"[{place}]") if len(contents) > 1 else path, each, texts - 1)


def open_text(text: str) -> bytes | None:
    """The bytes of a value that may be a document; None for a plain word or sentence."""
    url = _DATA_URL.match(text)
    if url is not None:
        content = unquote_to_bytes(text[url.end() :])
        return _decoded(content) if url[1] else content
    if _BASE64.fullmatch(joined := "".join(text.split())):
        return _decoded(joined.encode())
    return text.encode() if "\n" in text or text.lstrip().startswith("{") else None


def _decoded(content: bytes) -> bytes | None:
    try:
        return base64.b64decode(content, validate=True)
    except binascii.Error:
        return None


KIND = "KubeletConfiguration"
API_VERSION = "kubelet.config.k8s.io/v1beta1"

MERGED = (
    "`kubectl get --raw /api/v1/nodes/NODE/proxy/configz` prints the configuration of a node with everything merged"
)

HOLDERS: dict[tuple[str, ...], str] = {
    ("kubeletconfig",): "",
    ("machine", "kubelet", "extraConfig"): "Talos",
    ("spec", "kubelet", "config"): "nodeadm",
    ("kubeletConfig",): "OpenShift or GKE",
    ("kubeletExtraConfig",): "eksctl",
}
"""The last fields of a path -> who merges what stands there with other settings; "" for a complete configuration."""

OTHER_FORMS = {"topologyManager": "topologyManagerPolicy", "memoryManager": "memoryManagerPolicy"}
"""Fields of GKE's node system configuration that hold a mapping -> the field of a KubeletConfiguration."""

KNOWN_FIELDS = (
    "topologyManagerPolicy",
    "cpuManagerPolicy",
    "memoryManagerPolicy",
    "reservedSystemCPUs",
    "reservedMemory",
)
"""Fields that nothing but a configuration of a kubelet has."""


KNOWN_FLAGS = ("topology-manager-policy", "cpu-manager-policy", "memory-manager-policy")
"""The same as flags of the kubelet's command line: k3s `kubelet-arg`, kubeadm `kubeletExtraArgs`."""


class FoundConfiguration(NamedTuple):
    """A KubeletConfiguration, and where it stands."""

    field: str
    """Path of the field of the file; "" for the file itself."""
    document: Document
    merged_by: str
    """The program that merges it with settings outside the file; "" for none."""

    @property
    def note(self) -> str | None:
        """Which field was taken, and what may be missing there. None: the file is the configuration."""
        taken = f"the configuration of the kubelet was taken from {self.field}"
        if self.merged_by:
            return f"{taken}; {self.merged_by} merges it with settings that are not in this file: {MERGED}"
        return taken if self.field else None

    def at(self, error: InvalidField) -> InvalidField:
        """An error of the document as one of the file, with the whole path."""
        advice = f"; {self.merged_by} may set it elsewhere: {MERGED}" if self.merged_by else ""
        return nested_error(self.field, error, advice)


def find_configuration(parts: Sequence[FieldMapping]) -> FoundConfiguration:
    """The one configuration among the mappings of a file. Raises InvalidField where there is none, or more than one."""
    found = [one for part in parts if (one := _found(part)) is not None]
    different = [
        one for place, one in enumerate(found) if one.document not in [same.document for same in found[:place]]
    ]
    if len(different) > 1:
        fields = ", ".join(one.field or "the file itself" for one in different)
        raise InvalidField("document", f"it holds {len(different)} configurations: {fields}", "give one of them alone")
    if not different:
        raise _nothing(parts)
    for field, instead in OTHER_FORMS.items():
        if field in different[0].document:
            raise different[0].at(InvalidField(field, f"is no field of a {KIND}", f"write {instead}"))
    return different[0]


def _found(part: FieldMapping) -> FoundConfiguration | None:
    if part.content.get("kind") == KIND:
        return FoundConfiguration(part.field, part.content, "")
    for fields, who in HOLDERS.items():
        if part.path[-len(fields) :] == fields:
            return FoundConfiguration(part.field, {"apiVersion": API_VERSION, "kind": KIND, **part.content}, who)
    return None


def _nothing(parts: Sequence[FieldMapping]) -> InvalidField:
    """The error for a file without a configuration, with the field that looks like one if there is one."""
    for part in parts:
        # a key of this mapping, or a text in it or in its lists, may begin with a flag of the kubelet
        texts = [*part.content, *part.content.values()]
        texts += [item for value in part.content.values() if isinstance(value, list) for item in value]
        words = [text.lstrip("-") for text in texts if isinstance(text, str)]
        if flag := next((flag for flag in KNOWN_FLAGS for word in words if word.startswith(flag)), None):
            finding = f"has {flag}, a flag of the kubelet, and no object of the kind {KIND}"
            return InvalidField(
                part.field or "document", finding, f"give a file with the whole configuration: {MERGED}"
            )
        known = [field for field in KNOWN_FIELDS if field in part.content]
        if known:
            finding = f"has {known[0]} and is no object of the kind {KIND}"
            remedy = (
                f"put its fields in a file that begins with `apiVersion: {API_VERSION}` and `kind: {KIND}`; {MERGED}"
            )
            return InvalidField(part.field or "document", finding, remedy)
    remedy = f"give the file that the kubelet is given with --config; {MERGED}"
    return documents.other_kind(parts[0].content if parts else {}, KIND, API_VERSION, remedy)

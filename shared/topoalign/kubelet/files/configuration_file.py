"""
Finds the KubeletConfiguration in a file: the file that the kubelet is given with `--config`, or a wrapper of it.

Complete configurations are: an object of the kind KubeletConfiguration, wherever it stands (ConfigMap `data.kubelet` of
kubeadm, one of several YAML documents, a file in a MachineConfig); and `kubeletconfig`, the answer of a node's `/configz`,
which has the flags and drop-in files merged. Other wrappers have a part that the distribution merges with its own settings:
Talos `machine.kubelet.extraConfig`, OpenShift and GKE `kubeletConfig`, EKS nodeadm `spec.kubelet.config`, eksctl
`kubeletExtraConfig`. That part is taken too, and a note says that it is a part.

Sources: kubelet v1.36.3; kubeadm v1.36; Talos v1.11; OpenShift 4.19 `machineconfiguration.openshift.io/v1`; nodeadm
`node.eks.aws/v1alpha1`; eksctl `eksctl.io/v1alpha5`; GKE node system configuration.
"""

from collections.abc import Sequence
from typing import NamedTuple

from topoalign.core.model.errors import InvalidField
from topoalign.kubelet.files import documents, wrappers
from topoalign.kubelet.files.documents import Document
from topoalign.kubelet.files.wrappers import FieldMapping

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
    """Who merges it with settings that are not in the file; "" for nobody."""

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
        return wrappers.nested_error(self.field, error, advice)


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
        if flag := _flag(part):
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


def _flag(part: FieldMapping) -> str | None:
    """A flag of the kubelet that a key of this mapping, or a text in it or in its lists, begins with."""
    texts = [*part.content, *part.content.values()]
    texts += [item for value in part.content.values() if isinstance(value, list) for item in value]
    words = [text.lstrip("-") for text in texts if isinstance(text, str)]
    return next((flag for flag in KNOWN_FLAGS for word in words if word.startswith(flag)), None)

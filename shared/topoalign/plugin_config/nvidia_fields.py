"""
Fields of NVIDIA's device plugin without effect here, and the variables that take precedence over its file.

If only the image of a DaemonSet is replaced, its environment and its ConfigMap stay. So the variables of NVIDIA's
plugin have the same meaning here. A field of its file can have no meaning here. If the node works without the field,
the log names it once. Otherwise, the field is refused.

Source: k8s-device-plugin v0.20.0, its file of version v1 and the flags of its command.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from topoalign.core.model.errors import InvalidField
from topoalign.kubelet.files.kubelet_configuration import FALSE, TRUE

KUBELET_SOCKET = "/var/lib/kubelet/device-plugins/kubelet.sock"

FILE = "CONFIG_FILE"
"""The variable that names that plugin's configuration file."""


def parse_boolean(value: str) -> object:
    """Parses a boolean as Go's strconv.ParseBool; any other text stays text, and is refused later."""
    return True if value in TRUE else False if value in FALSE else value


def split_values(value: str) -> list[str]:
    """The values of a comma-separated variable, without spaces and empty ones."""
    return [word.strip() for word in value.split(",") if word.strip()]


def parse_numbers(value: str) -> object:
    """The numbers of a comma-separated variable. Other values stay text, which the field's type refuses."""
    return [int(word) if word.isascii() and word.isdigit() and len(word) < 10 else word for word in split_values(value)]


class NvidiaVariable(NamedTuple):
    """A variable of NVIDIA's plugin: the field that it sets, and the function that parses its text."""

    field: str
    read: Callable[[str], Any] = str


VARIABLES: Mapping[str, NvidiaVariable] = {
    "MIG_STRATEGY": NvidiaVariable("flags.migStrategy"),
    "FAIL_ON_INIT_ERROR": NvidiaVariable("flags.failOnInitError", parse_boolean),
    "MPS_ROOT": NvidiaVariable("flags.mpsRoot"),
    "NVIDIA_DRIVER_ROOT": NvidiaVariable("flags.nvidiaDriverRoot"),
    "NVIDIA_DEV_ROOT": NvidiaVariable("flags.nvidiaDevRoot"),
    "GDRCOPY_ENABLED": NvidiaVariable("flags.gdrcopyEnabled", parse_boolean),
    "GDS_ENABLED": NvidiaVariable("flags.gdsEnabled", parse_boolean),
    "MOFED_ENABLED": NvidiaVariable("flags.mofedEnabled", parse_boolean),
    "DEVICE_DISCOVERY_STRATEGY": NvidiaVariable("flags.deviceDiscoveryStrategy"),
    "PASS_DEVICE_SPECS": NvidiaVariable("flags.plugin.passDeviceSpecs", parse_boolean),
    "DEVICE_LIST_STRATEGY": NvidiaVariable("flags.plugin.deviceListStrategy", split_values),
    "DEVICE_ID_STRATEGY": NvidiaVariable("flags.plugin.deviceIDStrategy"),
    "CDI_ANNOTATION_PREFIX": NvidiaVariable("flags.plugin.cdiAnnotationPrefix"),
    "NVIDIA_CTK_PATH": NvidiaVariable("flags.plugin.nvidiaCDIHookPath"),
    "NVIDIA_CDI_HOOK_PATH": NvidiaVariable("flags.plugin.nvidiaCDIHookPath"),
    "CONTAINER_DRIVER_ROOT": NvidiaVariable("flags.plugin.containerDriverRoot"),
    "DRIVER_ROOT_CTR_PATH": NvidiaVariable("flags.plugin.containerDriverRoot"),
    "KUBELET_SOCKET": NvidiaVariable("flags.plugin.kubeletSocket"),
    "CDI_FEATURE_FLAGS": NvidiaVariable("flags.plugin.cdiFeatureFlags"),
    "CDI_DISABLE_HOOKS": NvidiaVariable("flags.plugin.cdiDisableHooks"),
    "SHARED_DEVICES_ALLOCATION_POLICY": NvidiaVariable("flags.plugin.sharedDevicesAllocationPolicy"),
    "IMEX_CHANNEL_IDS": NvidiaVariable("imex.channelIDs", parse_numbers),
    "IMEX_REQUIRED": NvidiaVariable("imex.required", parse_boolean),
}
"""The variables of that plugin. If two set one field, the later one wins, as in that plugin. An empty one is not set."""

DP_VARIABLES = ("DP_DISABLE_HEALTHCHECKS", "DP_ENABLE_HEALTHCHECKS")
"""The variables that select XIDs: they override the field `health`, and discovery reads them."""

HOOK_PATH = "flags.plugin.nvidiaCDIHookPath"
FORMER_HOOK_PATH = "flags.plugin.nvidiaCTKPath"

WITHOUT_EFFECT: Mapping[str, str] = {
    "flags.failOnInitError": "the agent starts in any case, tries again, and /readyz shows what is missing",
    "flags.useNodeFeatureAPI": "it is for gpu-feature-discovery, which labels the node and may go on running",
    "flags.gfd": "it is for gpu-feature-discovery, which labels the node and may go on running",
}
"""Field -> why the node does not need it. Its value is not read."""


class UnsupportedField(NamedTuple):
    """A field of NVIDIA's file that is not supported."""

    unless: tuple[object, ...]
    """Values that are accepted, because they request what is done anyway."""
    finding: str
    remedy: str


REFUSED: Mapping[str, UnsupportedField] = {
    "flags.deviceDiscoveryStrategy": UnsupportedField(
        ("auto", "nvml"), "devices are found through NVML only", "leave it out; leave Tegra to NVIDIA's device plugin"
    ),
    "flags.plugin.kubeletSocket": UnsupportedField(
        (KUBELET_SOCKET,), "the kubelet's directory is no part of this file", "set TOPOALIGN_KUBELET_DIR to it"
    ),
    "flags.plugin.cdiFeatureFlags": UnsupportedField(
        ("", []), "they are for NVIDIA's generator of CDI files, which is not used", "leave it out"
    ),
    "flags.plugin.cdiDisableHooks": UnsupportedField(
        ("", []), "without its two hooks a container would not find the driver's libraries", "leave it out"
    ),
}


def drop_nvidia_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without these variables: on a laptop, another program's CONFIG_FILE must not be taken for ours."""
    theirs = {*VARIABLES, *DP_VARIABLES, FILE}
    return {name: text for name, text in environment.items() if name not in theirs}


def apply_variables(document: dict[str, Any], environment: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The document with the fields of the variables set, and field -> variable for each of those."""
    origins: dict[str, str] = {}
    for name, variable in VARIABLES.items():
        if environment.get(name):
            document = with_value(document, variable.field, variable.read(environment[name]))
            origins[variable.field] = name
    return document, origins


def rename_hook_path(document: dict[str, Any]) -> dict[str, Any]:
    """The document with the path of the hook under its newest name. Raises InvalidField if both names differ in value."""
    value = value_at(document, FORMER_HOOK_PATH)
    if value is None:
        return document
    if value_at(document, HOOK_PATH) not in (None, value):
        raise InvalidField(
            FORMER_HOOK_PATH, f"another name of {HOOK_PATH}, which has another value", "keep one of them"
        )
    return with_value(drop_field(document, FORMER_HOOK_PATH), HOOK_PATH, value)


def resolve_nvidia_fields(document: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The document without NVIDIA's own fields, and why some have no effect. Raises InvalidField for a refused one."""
    strategy = value_at(document, "flags.plugin.deviceListStrategy")
    if isinstance(strategy, str):
        document = with_value(document, "flags.plugin.deviceListStrategy", [strategy])
    if value_at(document, "sharing.mps") in ({}, {"resources": []}):
        raise InvalidField("sharing.mps.resources", "is missing", "list the resources to share, or leave mps out")
    for field, refusal in REFUSED.items():
        value = value_at(document, field)
        if value is not None:
            if value not in refusal.unless:
                raise InvalidField(field, refusal.finding, refusal.remedy)
            document = drop_field(document, field)
    ignored = {}
    for field, why in WITHOUT_EFFECT.items():
        if value_at(document, field) is not None:
            document = drop_field(document, field)
            ignored[field] = why
    return document, ignored


def value_at(document: object, field: str) -> Any:
    """The value of a field; None if the field is missing or one of its parents is not a mapping."""
    for key in field.split("."):
        document = document.get(key) if isinstance(document, dict) else None
    return document


def with_value(document: dict[str, Any], field: str, value: object) -> dict[str, Any]:
    """The document with this value at a path. If a parent is no mapping, nothing changes: a later check refuses it."""
    key, _, below = field.partition(".")
    inner = document.get(key, {})
    if below and not isinstance(inner, dict):
        return document
    return {**document, key: with_value(inner, below, value) if below else value}


def drop_field(document: dict[str, Any], field: str) -> dict[str, Any]:
    """The document without this field, which it must have."""
    key, _, below = field.partition(".")
    if below:
        return {**document, key: drop_field(document[key], below)}
    return {name: value for name, value in document.items() if name != key}

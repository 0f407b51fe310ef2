"""
Reads the device annotations of a pod: hints per device type, joint allocation, and a GPU partition.

An annotation is JSON that a person writes, so every field is checked. Koordinator ignores unknown fields and values: a
misspelled field or strategy has no effect, and the pod gets other devices than intended. By default, an unknown value
is rejected, and the error names its path. With `compat`, an unknown value is ignored, field names are case-insensitive,
and later rules use the strings unchanged.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any, TypeVar, get_args, get_origin

import msgspec

from topoalign.core.deviceshare.joint_refusals import InvalidShareRequest
from topoalign.core.deviceshare.koordinator_names import (
    HINT_ANNOTATION,
    JOINT_ANNOTATION,
    LEVELS,
    PARTITION_ANNOTATION,
    DeviceType,
    Exclusive,
    JointScope,
    PartitionPolicy,
    Strategy,
)
from topoalign.core.deviceshare.labels import LabelSelector, selector_fault
from topoalign.core.model.errors import InvalidField, clean, quoted

LONGEST = 256 * 1024
"""In characters. The API server limits all annotations of an object together to this size."""

T = TypeVar("T")

_QUANTITY = re.compile(
    r"[+]?([0-9]{1,20}(?:\.[0-9]{0,20})?|\.[0-9]{1,20})(?:([numkMGTPE]|[KMGTPE]i)|[eE]([+-]?[0-9]{1,2}))?"
)
_POWERS = {"n": -3, "u": -2, "m": -1, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}
_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}


class Hint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """How to choose devices of one type: one entry of the annotation `device-allocate-hint`."""

    selector: LabelSelector | None = None
    vf_selector: LabelSelector | None = None
    """If set, virtual functions of matching groups are requested. A selector without conditions matches any group."""
    allocate_strategy: str = ""
    required_topology_scope: str = ""
    exclusive_policy: str = ""


class Joint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The device types that are allocated together. The first one that the pod requests is the primary type."""

    device_types: tuple[str, ...] = ()
    required_scope: str = ""


class PartitionSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Requests GPUs that form a partition of the node's partition table."""

    allocate_policy: str = ""
    ring_bus_bandwidth: str | int | float | None = None
    """The minimum, as a Kubernetes quantity."""


class Annotations(msgspec.Struct, frozen=True):
    """The device annotations of a pod. None: the pod does not have the annotation."""

    hints: Mapping[DeviceType, Hint]
    joint: Joint | None
    partition: PartitionSpec | None


NO_HINT = Hint()


def read_annotations(annotations: Mapping[str, str], *, compat: bool) -> Annotations:
    """Reads a pod's annotations. Raises InvalidShareRequest and, without `compat`, InvalidField for unknown values."""
    hints = _read_json_annotation(annotations, HINT_ANNOTATION, "DeviceAllocateHint", dict[str, Hint], compat) or {}
    for name, hint in hints.items():
        _check_selectors(name, hint, compat)
    joint = _read_json_annotation(annotations, JOINT_ANNOTATION, "DeviceJointAllocate", Joint, compat)
    partition = _read_json_annotation(annotations, PARTITION_ANNOTATION, "GPUPartitionSpec", PartitionSpec, compat)
    bandwidth = partition.ring_bus_bandwidth if partition is not None else None
    if bandwidth is not None and parse_quantity_exactly(bandwidth) is None:
        raise InvalidShareRequest(
            f"{device_annotation_path(PARTITION_ANNOTATION)}.ringBusBandwidth",
            f"invalid GPUPartitionSpec annotation, err: {quoted([str(bandwidth)])} is not a quantity",
            "give a quantity such as 200Gi",
        )
    if not compat:
        _check_hint_values(hints)
        _check_joint_values(joint, partition)
    known = {DeviceType(name): hint for name, hint in hints.items() if name in set(DeviceType)}
    return Annotations(known, joint, partition)


def parse_quantity_exactly(text: str | int | float) -> Fraction | None:
    """Parses a Kubernetes quantity (`200Gi`, `1.5`, `1e3`). None: the text is not a quantity."""
    found = _QUANTITY.fullmatch(str(text))
    if found is None:
        return None
    number, suffix, exponent = found.groups()
    if suffix in _BINARY:
        return Fraction(number) * (1 << 10 * _BINARY[suffix])
    power = int(exponent) if exponent else 3 * _POWERS.get(suffix, 0)
    scale: int = 10 ** abs(power)
    return Fraction(number) * scale if power >= 0 else Fraction(number) / scale


def _read_json_annotation(annotations: Mapping[str, str], key: str, name: str, kind: type[T], compat: bool) -> T | None:
    text = annotations.get(key)
    if text is None:
        return None
    try:
        if len(text) > LONGEST:
            raise ValueError(f"longer than {LONGEST} characters")
        raw = msgspec.json.decode(text)
        if key == HINT_ANNOTATION and isinstance(raw, dict) and None in raw.values():
            raise ValueError("a hint is null, which makes Koordinator's scheduler fail")
        return msgspec.convert({} if raw is None else _as_go_reads(raw, kind, compat), kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        reason = f"invalid {name} annotation, err: {clean(str(error), 200)}"
        raise InvalidShareRequest(
            device_annotation_path(key), reason, "write the JSON that Koordinator's API documents"
        ) from error


def _as_go_reads(raw: Any, kind: Any, compat: bool) -> Any:
    """
    The same JSON without null values, because Go reads them as absent fields. With `compat`, field names match in any
    case, and unknown fields are removed. A value of another type stays unchanged, so that `convert` rejects it.
    """
    inner = get_args(kind) or (Any,)
    if isinstance(raw, list):
        return [_as_go_reads(each, inner[0], compat) for each in raw]
    if not isinstance(raw, dict):
        return raw
    present = {key: value for key, value in raw.items() if value is not None}
    struct = next(
        (each for each in (kind, *inner) if isinstance(each, type) and issubclass(each, msgspec.Struct)), None
    )
    if struct is None or get_origin(kind) is dict:
        return {key: _as_go_reads(value, inner[-1], compat) for key, value in present.items()}
    spelling: Callable[[str], str] = str.casefold if compat else str
    fields = {spelling(each.encode_name): each for each in msgspec.structs.fields(struct)}
    named = {}
    for key, value in present.items():
        field = fields.get(spelling(key))
        if field is not None:
            named[field.encode_name] = _as_go_reads(value, field.type, compat)
        elif not compat:
            named[key] = value
    return named


def _check_selectors(device: str, hint: Hint, compat: bool) -> None:
    for field, selector in (("Selector", hint.selector), ("VFSelector", hint.vf_selector)):
        wrong = selector_fault(selector, compat=compat) if selector is not None else None
        if wrong is not None:
            where = f"{device_annotation_path(HINT_ANNOTATION)}.{clean(device)}.{field[0].lower()}{field[1:]}"
            reason = f"invalid {field} of DeviceHint, deviceType: {clean(device)}, err: {wrong}"
            raise InvalidShareRequest(where, reason, "write it as Kubernetes' label selectors are written")


def _check_hint_values(hints: Mapping[str, Hint]) -> None:
    """Raises InvalidField for values that would otherwise be ignored."""
    path = device_annotation_path(HINT_ANNOTATION)
    _check_known(path, hints, DeviceType)
    for device, hint in hints.items():
        where = f"{path}.{device}"
        _check_known(f"{where}.allocateStrategy", [hint.allocate_strategy], Strategy)
        _check_known(f"{where}.requiredTopologyScope", [hint.required_topology_scope], LEVELS)
        _check_known(f"{where}.exclusivePolicy", [hint.exclusive_policy], Exclusive)
        without_effect: dict[str, tuple[object, str]] = {
            "requiredTopologyScope": (hint.required_topology_scope, "leave it out, or set it for gpu"),
        }
        if device == DeviceType.GPU:
            without_effect = {
                "allocateStrategy": (hint.allocate_strategy, "ask for the number of GPUs instead"),
                "vfSelector": (hint.vf_selector, "leave it out: GPUs are not given as virtual functions"),
            }
        for name, (value, remedy) in without_effect.items():
            if value:
                raise InvalidField(f"{where}.{name}", "has no effect on this type of device", remedy)


def _check_joint_values(joint: Joint | None, partition: PartitionSpec | None) -> None:
    """Raises InvalidField for values that would otherwise be ignored."""
    if joint is not None:
        path = device_annotation_path(JOINT_ANNOTATION)
        where = f"{path}.deviceTypes"
        _check_known(where, joint.device_types, DeviceType)
        if len({*joint.device_types}) < len(joint.device_types):
            raise InvalidField(where, f"{quoted(joint.device_types)}: a type stands twice", "name each type once")
        _check_known(f"{path}.requiredScope", [joint.required_scope], JointScope)
    if partition is not None:
        path = device_annotation_path(PARTITION_ANNOTATION)
        _check_known(f"{path}.allocatePolicy", [partition.allocate_policy], PartitionPolicy)


def _check_known(where: str, values: Iterable[str], known: Iterable[str]) -> None:
    unknown = [value for value in values if value not in [*known]]
    if unknown:
        offered = ", ".join(filter(None, known))
        raise InvalidField(where, f"{quoted(unknown)} is not known", f"use {offered}; Koordinator would ignore it")


def device_annotation_path(key: str) -> str:
    """The path of a pod's annotation, for errors."""
    return f"pod.annotations[{key}]"

"""
Reads the state of a node that HAMi manages from the annotations of the node and of its pods.

HAMi writes the GPUs of a node into an annotation of the Node, and the shares of a pod into an annotation of the Pod.
The handshake of its scheduler shows whether its device plugin is alive. These three annotations determine the capacity
of each GPU, who holds how much of it, and whether HAMi still allocates the GPUs (`HamiLiveness`).

The amounts are HAMi's: slots, MiB and hundredths of the multiprocessors. Each share of a GPU is one slot. As in HAMi, a
pod's amount of a GPU is the largest amount of an init container, or the sum over the other containers if it is more.

Anyone with the permission can write the annotations, so values that no machine has are refused. InvalidAnnotation is
raised for a text of more than `LONGEST` characters, more than `MOST_REGISTERED_GPUS` GPUs, numbers out of bounds, and
names that are not printable. Source: HAMi 4707fb02.
"""

import re
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import islice

import msgspec

from topoalign.core.demand.go_text import parse_int
from topoalign.core.demand.share_annotations import (
    CORDON,
    DEVICES_ALLOCATED,
    HANDSHAKE,
    REGISTER,
    read_list_annotation,
)
from topoalign.core.sharing.hami.registration import InvalidAnnotation, RegisteredGpu, decode_register

LONGEST = 256 * 1024
"""Maximum length of an annotation in characters. API servers accept as many bytes for all annotations of an object."""
LONGEST_NAME = 200
"""Maximum length of a uuid, a model or a mode in characters."""
MOST_REGISTERED_GPUS = 64
"""Maximum number of GPUs of a node."""
MOST_SHARES = 1024
"""Maximum number of GPUs and containers together in the annotation of a pod."""
MOST_HOLDERS = 100
"""Maximum number of holders of a GPU that are shown."""
MOST_CONTAINERS = 16
"""Maximum number of containers of a holder that are shown."""
MOST_SLOTS = 10_000
MOST_MEMORY = 1 << 26
MOST_CORES = 100_000
MOST_INDEX = 4_096
"""Maximum values of a GPU; memory in MiB. Larger than on any machine, with any scaling."""
UNKNOWN_NUMA = -1
DELETED = "Deleted"
"""Prefix of the handshake if an older scheduler has given up the node."""


class HamiLiveness(StrEnum):
    """Whether HAMi's device plugin is alive on a node."""

    LIVE = "live"
    DELETED = "deleted"
    """HAMi's scheduler has given up the node."""
    TIMED_OUT = "timed-out"
    """The request of the handshake is a minute old, and the kubelet has no GPU to allocate."""


class NodeAnnotations(msgspec.Struct, frozen=True):
    """HAMi's annotations of a node. None: the annotation does not exist."""

    register: str | None = msgspec.field(name=REGISTER, default=None)
    handshake: str | None = msgspec.field(name=HANDSHAKE, default=None)
    cordon: str | None = msgspec.field(name=CORDON, default=None)


class AnnotatedShare(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one container has of one GPU."""

    gpu: str
    """Its uuid."""
    container: str
    """Empty: the number of containers in the annotation differs from that in the pod."""
    is_init: bool
    memory: int
    """MiB."""
    cores: int


class ForeignPod(msgspec.Struct, frozen=True, kw_only=True):
    """A pod to which HAMi has allocated shares."""

    namespace: str
    name: str
    uid: str
    shares: tuple[AnnotatedShare, ...]


class GpuHolder(msgspec.Struct, frozen=True, kw_only=True):
    """What one pod has of a GPU."""

    namespace: str
    pod: str
    uid: str
    containers: tuple[str, ...]
    """The first `MOST_CONTAINERS` of them."""
    slots: int
    memory: int
    """MiB."""
    cores: int


class ForeignGpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU of a node that HAMi manages."""

    uuid: str
    index: int
    type: str
    numa: int
    healthy: bool
    cordoned: bool
    mode: str
    slots: int
    memory: int
    """MiB."""
    cores: int
    used_slots: int
    used_memory: int
    used_cores: int
    holders: tuple[GpuHolder, ...]
    """By namespace and name; the first `MOST_HOLDERS`."""


def liveness_of(handshake: str | None, allocatable: int, now: datetime) -> HamiLiveness:
    """
    Whether the device plugin is alive. `handshake`: None if there is none. `allocatable`: number of GPUs that the
    kubelet can allocate. `now`: in the time zone of HAMi's scheduler, which writes local times.
    """
    if handshake is not None and handshake.startswith(DELETED):
        return HamiLiveness.DELETED
    return HamiLiveness.LIVE if is_plugin_alive(handshake, allocatable, now) else HamiLiveness.TIMED_OUT


def read_registered_gpus(text: str) -> tuple[RegisteredGpu, ...]:
    """The GPUs of a node, by index, without their MIG profiles. Raises InvalidAnnotation."""
    _check_annotation_length(REGISTER, text)
    gpus = decode_register(text)
    if len(gpus) > MOST_REGISTERED_GPUS:
        raise InvalidAnnotation(REGISTER, f"{len(gpus)} GPUs, more than {MOST_REGISTERED_GPUS}")
    if len({gpu.id for gpu in gpus}) < len(gpus):
        raise InvalidAnnotation(REGISTER, "a GPU stands twice")
    for gpu in gpus:
        _check_registered_gpu(gpu)
    known = (msgspec.structs.replace(gpu, profiles=()) for gpu in gpus)
    return tuple(sorted(known, key=lambda gpu: (gpu.index, gpu.id)))


def read_shares(text: str, init: Sequence[str], containers: Sequence[str]) -> tuple[AnnotatedShare, ...]:
    """
    The shares of a pod, container by container. `init`, `containers`: the names of its init containers and of its other
    containers. An older version of HAMi writes only the latter. Raises InvalidAnnotation.
    """
    _check_annotation_length(DEVICES_ALLOCATED, text)
    if text.count(":") + text.count(";") > MOST_SHARES:  # decoding is slow, and a pod can be annotated often
        raise InvalidAnnotation(DEVICES_ALLOCATED, f"more than {MOST_SHARES} GPUs and containers")
    groups = decode_pod(text)
    if not groups[-1]:  # the empty group after the last `;`
        groups = groups[:-1]
    if len(groups) == len(init) + len(containers):
        places = [*((name, True) for name in init), *((name, False) for name in containers)]
    elif len(groups) == len(containers):
        places = [(name, False) for name in containers]
    else:
        places = [("", False)] * len(groups)
    shares = []
    for (name, is_init), gpus in zip(places, groups, strict=True):
        for gpu in gpus:
            _check_printable_name(DEVICES_ALLOCATED, gpu.uuid)
            _check_annotation_number(DEVICES_ALLOCATED, "memory", gpu.memory, MOST_MEMORY)
            _check_annotation_number(DEVICES_ALLOCATED, "cores", gpu.cores, MOST_CORES)
            uuid = gpu.uuid.partition("[")[0]  # an older version writes `GPU-x[template-slot]` for an instance
            shares.append(AnnotatedShare(gpu=uuid, container=name, is_init=is_init, memory=gpu.memory, cores=gpu.cores))
    return tuple(shares)


def foreign_gpus(
    gpus: Iterable[RegisteredGpu], cordon: str | None, pods: Iterable[ForeignPod]
) -> tuple[ForeignGpu, ...]:
    """
    The GPUs of a node, each with at most `MOST_HOLDERS` pods that hold shares of it. The used amounts include all pods.
    `cordon`: the annotation with the cordoned GPUs of the node.
    """
    known = tuple(gpus)
    cordoned = read_list_annotation({CORDON: cordon or ""}, CORDON) or ()
    holders: dict[str, list[GpuHolder]] = {gpu.id: [] for gpu in known}
    for pod in sorted(pods, key=lambda pod: (pod.namespace, pod.name, pod.uid)):
        # only one pass over the shares: a user can write a thousand shares of a thousand GPUs
        by_gpu: dict[str, list[AnnotatedShare]] = {}
        for share in pod.shares:
            if share.gpu in holders:
                by_gpu.setdefault(share.gpu, []).append(share)
        for uuid, shares in by_gpu.items():
            holders[uuid].append(_holder_of_shares(pod, shares))
    return tuple(
        ForeignGpu(
            uuid=gpu.id,
            index=gpu.index,
            type=gpu.type,
            numa=gpu.numa,
            healthy=gpu.healthy,
            cordoned=gpu.id in cordoned,
            mode=gpu.mode,
            slots=gpu.slots,
            memory=gpu.memory,
            cores=gpu.cores,
            used_slots=sum(each.slots for each in holders[gpu.id]),
            used_memory=sum(each.memory for each in holders[gpu.id]),
            used_cores=sum(each.cores for each in holders[gpu.id]),
            holders=tuple(holders[gpu.id][:MOST_HOLDERS]),
        )
        for gpu in known
    )


def _holder_of_shares(pod: ForeignPod, shares: Sequence[AnnotatedShare]) -> GpuHolder:
    init: dict[str, list[AnnotatedShare]] = {}
    for share in shares:
        if share.is_init:
            init.setdefault(share.container, []).append(share)
    others = [share for share in shares if not share.is_init]
    named = dict.fromkeys(share.container for share in shares if share.container)
    return GpuHolder(
        namespace=pod.namespace,
        pod=pod.name,
        uid=pod.uid,
        containers=tuple(islice(named, MOST_CONTAINERS)),
        slots=max(len(some) for some in (others, *init.values())),
        memory=max(sum(share.memory for share in some) for some in (others, *init.values())),
        cores=max(sum(share.cores for share in some) for some in (others, *init.values())),
    )


def _check_registered_gpu(gpu: RegisteredGpu) -> None:
    for text in (gpu.id, gpu.type, gpu.mode):
        _check_printable_name(REGISTER, text)
    if not gpu.id:
        raise InvalidAnnotation(REGISTER, "a GPU without a uuid")
    for name, number, most in (
        ("index", gpu.index, MOST_INDEX),
        ("numa", gpu.numa + 1, MOST_INDEX),
        ("count", gpu.slots, MOST_SLOTS),
        ("devmem", gpu.memory, MOST_MEMORY),
        ("devcore", gpu.cores, MOST_CORES),
    ):
        _check_annotation_number(REGISTER, name, number, most)


def _check_annotation_length(key: str, text: str) -> None:
    if len(text) > LONGEST:
        raise InvalidAnnotation(key, f"more than {LONGEST} characters")


def _check_printable_name(key: str, text: str) -> None:
    if len(text) > LONGEST_NAME or not text.isprintable():
        raise InvalidAnnotation(key, f"a name that is longer than {LONGEST_NAME} characters or cannot be printed")


def _check_annotation_number(key: str, name: str, number: int, most: int) -> None:
    if not 0 <= number <= most:
        raise InvalidAnnotation(key, f"{name} is not between 0 and {most}")


# Whether HAMi's device plugin on a node is alive.
#
# If the annotation has any other value, the scheduler writes `Requesting_<time>` and reads the node's GPUs again. No
# component answers this request any more. Instead, the node counts as healthy while the kubelet has GPUs to allocate,
# which it has until the plugin's stream ends. The node is unhealthy only if the kubelet has no GPUs and the request is
# a minute old. The scheduler then removes the node's GPUs and the annotation.
#
# Times are local times of the scheduler, without a time zone, in whole seconds. Source: HAMi 4707fb02, CheckHealth.


REQUESTING = "Requesting"
PATIENCE = timedelta(seconds=60)
"""While the request is younger than this, the node counts as healthy."""
_TIME = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2}) ([0-9]{1,2}):([0-9]{2}:[0-9]{2}(?:[.,][0-9]+)?)")


def is_plugin_alive(handshake: str | None, allocatable: int, now: datetime) -> bool:
    """Whether the plugin is alive. `handshake`: None if missing. `allocatable`: GPUs that the kubelet can allocate."""
    if handshake is None or REQUESTING not in handshake:
        return True
    asked = _time_of(handshake)
    return asked is None or now - asked < PATIENCE or allocatable > 0


def _time_of(handshake: str) -> datetime | None:
    """The time of the request; None: it cannot be parsed."""
    found = _TIME.fullmatch(handshake.partition("_")[2])
    if found is None:
        return None
    try:
        return datetime.fromisoformat(f"{found[1]} {int(found[2]):02}:{found[3]}")
    except ValueError:
        return None


# The GPUs of a pod in HAMi's annotations: what the scheduler decides, and what its device plugin then allocates.
#
# A GPU is written as `uuid,type,memory,cores:`, a container as its GPUs and `;`. Init containers are first. A container
# without GPUs is only `;`. So decoding finds an additional empty container after the last `;`.
#
# Source: HAMi 4707fb02.


_FIELDS = 4


class PodGpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU of a container, as in the annotation."""

    uuid: str
    type: str
    """The vendor, not the model: `NVIDIA`."""
    memory: int
    """MiB."""
    cores: int


PodGpus = tuple[tuple[PodGpu, ...], ...]
"""The GPUs of each container, init containers first."""


def decode_pod(text: str, key: str = DEVICES_ALLOCATED) -> PodGpus:
    """The GPUs of each container, and an additional empty container after the last `;`. Raises InvalidAnnotation."""
    try:
        return tuple(
            tuple(_read_pod_gpu(part.split(",")) for part in container.split(":") if "," in part)
            for container in text.split(";")
        )
    except ValueError as error:
        raise InvalidAnnotation(key, str(error)) from error


def _read_pod_gpu(fields: list[str]) -> PodGpu:
    if len(fields) < _FIELDS:
        raise ValueError("pod annotation format error, missing fields, do not use nodeName in task spec")
    numbers = []
    for field, text in zip(("memory", "core"), fields[2:4], strict=True):
        try:
            numbers.append(parse_int(text))
        except ValueError as error:
            raise ValueError(f"invalid {field} field: {error}") from error
    return PodGpu(uuid=fields[0], type=fields[1], memory=numbers[0], cores=numbers[1])

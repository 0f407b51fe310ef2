"""
What becomes of a new pod with shares before it is stored: what its containers leave out is filled in, what cannot be
is refused.

A container that asks for memory or cores only asks for the default number of cards. One that says nothing of memory,
or asks for all of it, and nothing of cores, asks for whole cards: 100 cores. A pod with shares may not have a
privileged container, which sees all cards, may not name its node, and must fit the quota of its namespace, in which
only memory in MiB counts, not a percentage.

Source: HAMi 4707fb02, its admission webhook.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import ceil

import msgspec

from topoalign.core.demand.hami_names import DEFAULT_NAMES, ResourceNames
from topoalign.core.deviceshare.annotations import quantity
from topoalign.core.model.errors import BadRequest, InvalidField, quoted
from topoalign.core.model.ids import ResourceName
from topoalign.core.sharing.cards import WHOLE_CARD
from topoalign.core.sharing.hami.quota import NamespaceQuota
from topoalign.core.sharing.hami.requests import NO_DEFAULTS, Amounts, CardRequest, Defaults, read_request

PRIORITY = "CUDA_TASK_PRIORITY"
CORE_POLICY = "GPU_CORE_UTILIZATION_POLICY"
VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"
"""Environment variables that are set."""

_ALL_MEMORY = 100


class Container(msgspec.Struct, frozen=True, kw_only=True):
    """What of a container counts."""

    path: str
    """Where it is in the pod: `spec.containers[0]`."""
    limits: Amounts = {}
    requests: Amounts = {}
    privileged: bool = False


class Pod(msgspec.Struct, frozen=True, kw_only=True):
    """What of a pod counts."""

    init_containers: tuple[Container, ...] = ()
    containers: tuple[Container, ...]
    node: str = ""
    """`spec.nodeName`."""


class AdmissionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a cluster can say of new pods."""

    names: ResourceNames = DEFAULT_NAMES
    cards: int = 1
    """Of a container that asks for memory or cores only. 0: it gets none."""
    core_policy: str = "default"
    """`force` or `disable`: the limiter always or never limits cores. `default`: it is not told."""
    hide_cards: bool = False
    """Whether containers that ask for no card are told to see none."""


class QuotaExceeded(BadRequest):
    """Raised when a pod asks for more than its namespace may still hold."""

    code = "QuotaExceeded"

    def __init__(self, memory: int, cores: int) -> None:
        super().__init__(
            f"the namespace's ResourceQuota does not allow {memory} MiB and {cores} cores of cards more",
            "ask for less, or raise the limits.<resource> of the ResourceQuota",
        )


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """What is added to a container."""

    limits: Mapping[ResourceName, int] = {}
    env: Mapping[str, str] = {}
    asks: bool = False
    """Whether it asks for cards."""


class AdmittedPod(msgspec.Struct, frozen=True, kw_only=True):
    """What is added to the containers of a pod, in their order."""

    init_containers: tuple[Changes, ...]
    containers: tuple[Changes, ...]

    @property
    def asks(self) -> bool:
        """Whether the pod asks for cards, and is to be scheduled accordingly."""
        return any(each.asks for each in (*self.init_containers, *self.containers))


NO_SETTINGS = AdmissionSettings()


def admit_pod(
    pod: Pod,
    quota: NamespaceQuota | None = None,
    settings: AdmissionSettings = NO_SETTINGS,
    defaults: Defaults = NO_DEFAULTS,
) -> AdmittedPod:
    """
    What is added to a pod. `quota` is that of its namespace, `defaults` are those by which its shares are then decided.

    Raises InvalidField for what it may not ask for, QuotaExceeded for more than its namespace may hold.
    """
    admitted = AdmittedPod(
        init_containers=tuple(changes_to(each, settings) for each in pod.init_containers),
        containers=tuple(changes_to(each, settings) for each in pod.containers),
    )
    if not admitted.asks:
        return admitted
    for container in (*pod.init_containers, *pod.containers):
        if container.privileged:
            raise InvalidField(
                f"{container.path}.securityContext.privileged",
                "a privileged container sees all cards, and no limit of a share holds for it",
                "take away `privileged`, or ask for no share in this pod",
            )
    if pod.node:
        raise InvalidField(
            "spec.nodeName", f"names {quoted([pod.node])}, so no scheduler decides on cards", "take it away"
        )
    check_quota(pod, admitted, quota, settings.names, defaults)
    return admitted


def changes_to(container: Container, settings: AdmissionSettings = NO_SETTINGS) -> Changes:
    """What is added to one container. Raises InvalidField for a percentage that is none."""
    names, amounts = settings.names, {**container.requests, **container.limits}
    percentage = _percentage(container, amounts, names)
    limits: dict[ResourceName, int] = {}
    if names.count not in amounts:
        wants_some = any(name in amounts for name in (names.cores, names.memory, names.percentage))
        if not wants_some or settings.cards <= 0:
            return Changes(env={VISIBLE_DEVICES: "none"} if settings.hide_cards else {})
        limits[names.count] = settings.cards
    whole = names.memory not in amounts if percentage is None else percentage == _ALL_MEMORY
    if whole and names.cores not in amounts:
        limits[names.cores] = WHOLE_CARD
    return Changes(limits=limits, env=_environment(container, settings), asks=True)


def check_quota(
    pod: Pod, admitted: AdmittedPod, quota: NamespaceQuota | None, names: ResourceNames, defaults: Defaults
) -> None:
    """Raises QuotaExceeded where its init peak, or the sum of its other containers, is more than the namespace may hold."""
    if quota is None:
        return
    first = _asked(pod.init_containers, admitted.init_containers, names, defaults)
    others = _asked(pod.containers, admitted.containers, names, defaults)
    memory = max(*(each.memory * each.count for each in first), sum(each.memory * each.count for each in others), 0)
    cores = max(*(each.cores * each.count for each in first), sum(each.cores * each.count for each in others), 0)
    if not quota.admits(memory, cores):
        raise QuotaExceeded(memory, cores)


def _asked(
    containers: Sequence[Container], changes: Sequence[Changes], names: ResourceNames, defaults: Defaults
) -> list[CardRequest]:
    return [
        read_request({**container.limits, **added.limits}, container.requests, defaults, names)
        for container, added in zip(containers, changes, strict=True)
    ]


def _percentage(container: Container, amounts: Amounts, names: ResourceNames) -> int | None:
    """Hundredths of a card's memory, rounded up; None where the container does not say. Raises InvalidField."""
    if names.percentage not in amounts:
        return None
    value = _whole(amounts[names.percentage])
    if value is None or not 0 <= value <= _ALL_MEMORY:
        found = quoted([str(amounts[names.percentage])])
        raise InvalidField(
            f"{container.path}.resources.limits[{names.percentage}]",
            f"{found} is not a percentage of a card's memory",
            "write an integer from 0 to 100",
        )
    return value


def _environment(container: Container, settings: AdmissionSettings) -> dict[str, str]:
    environment = {}
    priority = _whole(container.limits.get(settings.names.priority, ""))
    if priority is not None:
        environment[PRIORITY] = str(priority)
    if settings.core_policy not in ("", "default"):
        environment[CORE_POLICY] = settings.core_policy
    return environment


def _whole(amount: int | str) -> int | None:
    """A quantity rounded up to an integer, None if it is none. Source: k8s.io/apimachinery, Quantity.Value."""
    text = str(amount)
    value: Fraction | None = quantity(text.removeprefix("-"))
    if value is None:
        return None
    return ceil(-value if text.startswith("-") else value)

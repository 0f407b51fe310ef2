"""
Reads HAMi's annotations that determine which shared GPUs a pod can get.

    hami.io/gpu-scheduler-policy: spread                    binpack, spread, mutex or topology-aware
    hami.io/device-scoring-weights: slot=1,core=1,memory=3  weights of a GPU's fullness, for binpack and spread
    nvidia.com/use-gputype: A100,h100                       substrings of model names; nouse-gputype excludes models
    nvidia.com/use-gpuuuid: GPU-5f0c…                       uuids; nouse-gpuuuid excludes uuids
    nvidia.com/vgpu-mode: mig                               isolation of the containers: hami-core, mig or mps
    nvidia.com/numa-bind: "true"                            all GPUs of a container on one NUMA node

`read_gpu_rules` reads them as HAMi does. `check_gpu_annotations` refuses values that HAMi ignores: an unknown policy,
an empty list, or an invalid uuid. If HAMi's rules choose the GPUs, the policy can be a comma-separated list, which can
include `numa`. The annotations apply only to GPUs in slots. If a pod requests no slots, their values are not checked.

Source: HAMi 4707fb02, CheckType, CheckUUID and the scheduler's policies.
"""

import re
from collections.abc import Callable, Mapping
from enum import StrEnum

import msgspec

from topoalign.core.demand.gangs import annotation_path
from topoalign.core.demand.go_text import is_bool, is_true
from topoalign.core.model.errors import NoFit, quoted
from topoalign.core.model.ids import DeviceID

# HAMi's fixed names. The names of resources are configurable (`Slots`).
VENDOR = "NVIDIA"
"""The device type in a request for NVIDIA GPUs. The type of each NVIDIA GPU contains it."""

USE_TYPE = "nvidia.com/use-gputype"
NO_USE_TYPE = "nvidia.com/nouse-gputype"
USE_UUID = "nvidia.com/use-gpuuuid"
NO_USE_UUID = "nvidia.com/nouse-gpuuuid"
VGPU_MODE = "nvidia.com/vgpu-mode"
MIG = "mig"
MODES = ("hami-core", MIG, "mps")
"""How containers on a GPU are isolated: by HAMi-core, by MIG instances that are created for them, or by NVIDIA MPS."""
NUMA_BIND = "nvidia.com/numa-bind"
GPU_POLICY = "hami.io/gpu-scheduler-policy"
NODE_POLICY = "hami.io/node-scheduler-policy"
SCORING_WEIGHTS = "hami.io/device-scoring-weights"
CHOOSING = (GPU_POLICY, SCORING_WEIGHTS, USE_TYPE, NO_USE_TYPE, USE_UUID, NO_USE_UUID, VGPU_MODE, NUMA_BIND)
"""Pod annotations that affect the choice of the pod's GPUs."""
OF_PODS = (*CHOOSING, NODE_POLICY)
"""All pod annotations about GPUs."""

CORDON = "hami.io/device-cordon"
REGISTER = "hami.io/node-nvidia-register"
HANDSHAKE = "hami.io/node-handshake"
"""Node annotations: the cordoned GPUs, all GPUs, and whether the device plugin is alive."""

DEVICES_ALLOCATED = "hami.io/vgpu-devices-allocated"
"""Pod annotation: the pod's GPUs."""


class Weights(msgspec.Struct, frozen=True):
    """The weights of slots, cores and memory in a GPU's score."""

    slot: int = 1
    core: int = 1
    memory: int = 1


EQUAL_WEIGHTS = Weights()


class Selection(msgspec.Struct, frozen=True):
    """
    A list of accepted entries and a list of excluded entries. None: there is no list. A model matches if its product
    name contains an entry, ignoring case: `h100` matches `NVIDIA H100 80GB HBM3`. A uuid must match exactly.
    """

    wanted: tuple[str, ...] | None = None
    unwanted: tuple[str, ...] | None = None

    def takes_uuid(self, uuid: str) -> bool:
        """Whether a GPU with this uuid is accepted."""
        return self._takes(uuid.__eq__)

    def takes_type(self, model: str) -> bool:
        """Whether a GPU of this model is accepted."""
        name = model.upper()
        return self._takes(lambda each: each.upper() in name)

    def _takes(self, matches: Callable[[str], bool]) -> bool:
        is_wanted = self.wanted is None or any(map(matches, self.wanted))
        return is_wanted and not any(map(matches, self.unwanted or ()))


ANY = Selection()


class GpuOrder(StrEnum):
    """The order of preference of the GPUs that have enough."""

    BEST_FIT = "best-fit"
    """The GPU with the least free capacity. For several GPUs, links decide first, and then the least free capacity."""
    BINPACK = "binpack"
    """The GPU that is fullest with the share."""
    SPREAD = "spread"
    """The GPU that is emptiest with the share."""
    TOPOLOGY_AWARE = "topology-aware"
    """The best connected GPUs. For a single GPU, the one that cuts the fewest links between unused GPUs."""


OTHER_TYPE = f"of another type ({USE_TYPE}, {NO_USE_TYPE})"
OTHER_UUID = f"not among the uuids ({USE_UUID}, {NO_USE_UUID})"
OTHER_MODE = f"in another mode ({VGPU_MODE})"
"""Reasons why annotations exclude a GPU."""


class GpuRules(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of a container, its node and the configuration for the GPUs that the container can get."""

    types: Selection = Selection()
    """Substrings of model names."""
    uuids: Selection = Selection()
    mode: str | None = None
    """The accepted modes. The text must contain the mode of the GPU. None: all modes."""
    mutex: bool = False
    """Only GPUs that no container uses."""
    numa_bind: bool = False
    """All GPUs of the container on one NUMA node."""
    order: GpuOrder = GpuOrder.BEST_FIT
    weights: Weights = EQUAL_WEIGHTS
    """The weights in the fullness of a GPU, for `binpack` and `spread`."""
    hami: str = ""
    """HAMi's policy or comma-separated policies if HAMi's rules choose the GPUs instead of `order`. Otherwise empty."""

    @property
    def limits(self) -> bool:
        """Whether the rules can exclude GPUs that have enough free capacity."""
        return self.types != ANY or self.uuids != ANY or self.mutex or self.numa_bind

    def exclusion(self, uuid: DeviceID, model: str, mode: str) -> str | None:
        """Why a GPU is excluded; None: it is not. `mode`: the isolation of its containers; empty: none with a name."""
        if not self.types.takes_type(model):
            return OTHER_TYPE
        if self.mode is not None and (mode == "" or mode not in self.mode):
            return OTHER_MODE
        return None if self.uuids.takes_uuid(uuid) else OTHER_UUID


ANY_GPU = GpuRules()


class InvalidShare(NoFit):
    """
    Raised for invalid amounts of a GPU.

    Remedy: Correct the amounts as the message says.
    """


MOST_LISTED = 256
"""Maximum number of entries in a list. They are compared with each GPU of each node."""
LONGEST_ENTRY = 100
UUID = re.compile(r"GPU-[0-9A-Za-z-]+")
"""The format of GPU ids: NVIDIA's uuids, and `GPU-<index>` on a described machine."""
WEIGHT = re.compile(r"(slot|core|memory) *= *([0-9]{1,18})")
MUTEX = "mutex"
NUMA = "numa"
ORDERS = (GpuOrder.BINPACK, GpuOrder.SPREAD, GpuOrder.TOPOLOGY_AWARE)
POLICIES = (*ORDERS[:2], MUTEX, GpuOrder.TOPOLOGY_AWARE)


def read_gpu_rules(annotations: Mapping[str, str], *, as_hami: bool = False) -> GpuRules:
    """
    The rules for the choice of a pod's GPUs. `as_hami`: HAMi's rules choose them. These accept a list of policies, and
    their default is `spread`. Invalid values are read as in HAMi. `check_gpu_annotations` refuses them.
    """
    rules = read_as_hami(annotations)
    if as_hami:
        return rules
    policy = annotations.get(GPU_POLICY)
    order = GpuOrder(policy) if policy in ORDERS else GpuOrder.BEST_FIT
    return msgspec.structs.replace(rules, order=order, hami="")


def read_as_hami(annotations: Mapping[str, str], policy: str = GpuOrder.SPREAD.value) -> GpuRules:
    """The rules as HAMi reads them. `policy`: the default."""
    policy = annotations.get(GPU_POLICY, policy)
    return GpuRules(
        types=type_selection(annotations),
        uuids=uuid_selection(annotations),
        mode=annotations.get(VGPU_MODE),
        mutex=MUTEX in split_list(policy),
        numa_bind=is_true(annotations.get(NUMA_BIND)),
        weights=read_weights(annotations.get(SCORING_WEIGHTS, "")) or EQUAL_WEIGHTS,
        hami=policy,
    )


def check_gpu_annotations(annotations: Mapping[str, str], *, as_hami: bool = False) -> None:
    """Raises InvalidShare for an invalid annotation of a pod that requests slots. `as_hami`: as in `read_gpu_rules`."""
    if (policy := annotations.get(GPU_POLICY)) is not None:
        known = (*POLICIES, NUMA) if as_hami else POLICIES
        named = split_list(policy) if as_hami else (policy,)
        if wrong := [each for each in named if each not in known]:  # HAMi reads these as `spread`
            number = "some" if as_hami else "one"
            remedy = f"write {number} of {', '.join(known)}, or leave it out"
            raise annotation_error(GPU_POLICY, f"{quoted(wrong[:3])} is no policy", remedy)
    for key in (USE_TYPE, NO_USE_TYPE):
        _check_entries(annotations, key, "parts of the names of models, with commas in between: A100,H100")
    for key in (USE_UUID, NO_USE_UUID):
        remedy = "uuids of GPUs as `topoalign gpu list` shows them, with commas in between"
        _check_entries(annotations, key, remedy)
        if wrong := [each for each in read_list_annotation(annotations, key) or () if not UUID.fullmatch(each)]:
            raise annotation_error(key, f"{quoted(wrong[:3])}: no uuid of a GPU", f"write {remedy}")
    mode = annotations.get(VGPU_MODE)
    if mode is not None and not any(each in mode for each in MODES):
        remedy = f"write one of {', '.join(MODES)}, or leave it out"
        raise annotation_error(VGPU_MODE, f"{quoted([mode])} is no mode", remedy)
    numa_bind = annotations.get(NUMA_BIND)
    if numa_bind is not None and not is_bool(numa_bind):
        raise annotation_error(NUMA_BIND, f"{quoted([numa_bind])} is neither true nor false", 'write "true" or "false"')
    weights = annotations.get(SCORING_WEIGHTS)
    if weights is not None and read_weights(weights) is None:
        raise annotation_error(
            SCORING_WEIGHTS,
            "not weights of slots, cores and memory",
            "write all three as integers, one of them above 0: slot=1,core=1,memory=3",
        )


def _check_entries(found: Mapping[str, str], key: str, remedy: str) -> None:
    if key not in found:
        return
    several = split_list(found[key])
    if not all(several):
        empty = "an empty list" if not any(several) else "an entry of the list is empty"
        raise annotation_error(key, empty, f"leave it out, or write {remedy}")
    if len(several) > MOST_LISTED or max(map(len, several)) > LONGEST_ENTRY:
        limit = f"more than {MOST_LISTED} entries, or one of more than {LONGEST_ENTRY} characters"
        raise annotation_error(key, limit, f"write {remedy}")


def annotation_error(key: str, finding: str, remedy: str) -> InvalidShare:
    """The error for an invalid annotation."""
    return InvalidShare(f"{annotation_path(key)}: {finding}", remedy)


def type_selection(annotations: Mapping[str, str]) -> Selection:
    """Which models a pod accepts, as HAMi reads it."""
    return Selection(read_list_annotation(annotations, USE_TYPE), read_list_annotation(annotations, NO_USE_TYPE))


def uuid_selection(annotations: Mapping[str, str]) -> Selection:
    """Which uuids a pod accepts, as HAMi reads it."""
    return Selection(read_list_annotation(annotations, USE_UUID), read_list_annotation(annotations, NO_USE_UUID))


def read_list_annotation(annotations: Mapping[str, str], key: str) -> tuple[str, ...] | None:
    """A list as HAMi reads it. None: missing or blank. A list of only commas has no entries and matches nothing."""
    text = annotations.get(key, "")
    return tuple(filter(None, split_list(text))) if text.strip() else None


def split_list(text: str) -> tuple[str, ...]:
    """The entries of a comma-separated list, without surrounding whitespace."""
    return tuple(each.strip() for each in text.split(","))


def read_weights(text: str) -> Weights | None:
    """
    The weights in an annotation, such as `slot=1,core=1,memory=3`. Each of the three must be present once, in any
    order, and at least one must be above 0. None: the annotation is invalid.
    """
    parts = [WEIGHT.fullmatch(part) for part in split_list(text)]
    found = {part[1]: int(part[2]) for part in parts if part is not None}
    is_complete = len(parts) == len(found) == len(Weights.__struct_fields__)
    return Weights(**found) if is_complete and any(found.values()) else None

"""
Reads the annotations, under HAMi's names, that restrict which shared GPUs a pod may get.

    hami.io/gpu-scheduler-policy: spread                    binpack, spread, mutex or topology-aware
    hami.io/device-scoring-weights: slot=1,core=1,memory=3  what makes a GPU full, for these two
    nvidia.com/use-gputype: A100,h100                       parts of the names of models; nouse-gputype: not these
    nvidia.com/use-gpuuuid: GPU-5f0c…                       uuids; nouse-gpuuuid: not these
    nvidia.com/vgpu-mode: mig                               GPUs whose containers are kept apart so: hami-core, mig, mps
    nvidia.com/numa-bind: "true"                            all GPUs of a container on one NUMA node

`read_gpu_rules` reads them, as HAMi does. `check_gpu_annotations` refuses values that HAMi ignores: an unknown policy, an
empty list, a text that is no uuid. Where HAMi's rules choose the GPUs, several policies may be given, separated by commas,
`numa` among them. The annotations are about GPUs in slots only. For a pod that asks for none, their values do not matter.

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

# HAMi's fixed names. Those of resources can be changed (`Slots`).
VENDOR = "NVIDIA"
"""The type of a request for NVIDIA's GPUs, which is contained in the type of each such GPU."""

USE_TYPE = "nvidia.com/use-gputype"
NO_USE_TYPE = "nvidia.com/nouse-gputype"
USE_UUID = "nvidia.com/use-gpuuuid"
NO_USE_UUID = "nvidia.com/nouse-gpuuuid"
VGPU_MODE = "nvidia.com/vgpu-mode"
MIG = "mig"
MODES = ("hami-core", MIG, "mps")
"""What keeps containers on a GPU apart: HAMi-core, MIG instances that are created for them, NVIDIA's MPS."""
NUMA_BIND = "nvidia.com/numa-bind"
GPU_POLICY = "hami.io/gpu-scheduler-policy"
NODE_POLICY = "hami.io/node-scheduler-policy"
SCORING_WEIGHTS = "hami.io/device-scoring-weights"
CHOOSING = (GPU_POLICY, SCORING_WEIGHTS, USE_TYPE, NO_USE_TYPE, USE_UUID, NO_USE_UUID, VGPU_MODE, NUMA_BIND)
"""The annotations of a pod that choose its GPUs."""
OF_PODS = (*CHOOSING, NODE_POLICY)
"""The annotations of a pod about its GPUs."""

CORDON = "hami.io/device-cordon"
REGISTER = "hami.io/node-nvidia-register"
HANDSHAKE = "hami.io/node-handshake"
"""Of a node: GPUs that are cordoned, the GPUs, and whether the device plugin is alive."""

DEVICES_ALLOCATED = "hami.io/vgpu-devices-allocated"
"""Of a pod: its GPUs."""


class Weights(msgspec.Struct, frozen=True):
    """The weights of slots, cores and memory in a GPU's score."""

    slot: int = 1
    core: int = 1
    memory: int = 1


EQUAL_WEIGHTS = Weights()


class Selection(msgspec.Struct, frozen=True):
    """
    A list of what is accepted and a list of what is excluded. None: no such list. A model matches if the product's name
    contains it, without regard to case: `h100` takes `NVIDIA H100 80GB HBM3`. A uuid is matched exactly.
    """

    wanted: tuple[str, ...] | None = None
    unwanted: tuple[str, ...] | None = None

    def takes_uuid(self, uuid: str) -> bool:
        """Whether a GPU of this uuid is accepted."""
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
    """Which of the GPUs that have enough come first."""

    BEST_FIT = "best-fit"
    """The one that has the least left; several GPUs by their links, and by what they leave."""
    BINPACK = "binpack"
    """The one that is fullest with the share on it."""
    SPREAD = "spread"
    """The one that is emptiest with the share on it."""
    TOPOLOGY_AWARE = "topology-aware"
    """The best connected ones; a single one whose loss breaks the least of what the unused ones can be split into."""


OTHER_TYPE = f"of another type ({USE_TYPE}, {NO_USE_TYPE})"
OTHER_UUID = f"not among the uuids ({USE_UUID}, {NO_USE_UUID})"
OTHER_MODE = f"in another mode ({VGPU_MODE})"
"""Why the annotations exclude a GPU."""


class GpuRules(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of a container, its node and the configuration about the GPUs that it may get."""

    types: Selection = Selection()
    """Parts of the names of models."""
    uuids: Selection = Selection()
    mode: str | None = None
    """Modes that are accepted, of which a GPU's must be a part; None: all."""
    mutex: bool = False
    """Only GPUs of which nobody holds anything."""
    numa_bind: bool = False
    """All GPUs of the container on one NUMA node."""
    order: GpuOrder = GpuOrder.BEST_FIT
    weights: Weights = EQUAL_WEIGHTS
    """The weights for `binpack` and `spread`, where the fullness of a GPU matters."""
    hami: str = ""
    """HAMi's policy, or several with commas in between, where its rules choose the GPUs instead of `order`; else empty."""

    @property
    def limits(self) -> bool:
        """Whether the rules exclude some GPUs, whatever is left of them and wherever the others are."""
        return self.types != ANY or self.uuids != ANY or self.mutex or self.numa_bind

    def exclusion(self, uuid: DeviceID, model: str, mode: str) -> str | None:
        """Why a GPU is excluded; None: it is accepted. `mode`: how its parts are kept apart; empty: in none with a name."""
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
"""Entries of a list, which are compared with each GPU of each node."""
LONGEST_ENTRY = 100
UUID = re.compile(r"GPU-[0-9A-Za-z-]+")
"""The form of a GPU's id: as NVIDIA writes them, and `GPU-<index>` of a described machine."""
WEIGHT = re.compile(r"(slot|core|memory) *= *([0-9]{1,18})")
MUTEX = "mutex"
NUMA = "numa"
ORDERS = (GpuOrder.BINPACK, GpuOrder.SPREAD, GpuOrder.TOPOLOGY_AWARE)
POLICIES = (*ORDERS[:2], MUTEX, GpuOrder.TOPOLOGY_AWARE)


def read_gpu_rules(annotations: Mapping[str, str], *, as_hami: bool = False) -> GpuRules:
    """
    The rules by which a pod gets its GPUs. `as_hami`: HAMi's rules choose them, which accept lists of policies, and spread
    where none is named. Invalid values are read as HAMi reads them (`check_gpu_annotations` refuses them).
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
    """Raises InvalidShare for the annotation of a pod with slots that is invalid. `as_hami`: as of `read_gpu_rules`."""
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
    """The refusal of an annotation."""
    return InvalidShare(f"{annotation_path(key)}: {finding}", remedy)


def type_selection(annotations: Mapping[str, str]) -> Selection:
    """Which models a pod accepts, as HAMi reads it."""
    return Selection(read_list_annotation(annotations, USE_TYPE), read_list_annotation(annotations, NO_USE_TYPE))


def uuid_selection(annotations: Mapping[str, str]) -> Selection:
    """Which uuids a pod accepts, as HAMi reads it."""
    return Selection(read_list_annotation(annotations, USE_UUID), read_list_annotation(annotations, NO_USE_UUID))


def read_list_annotation(annotations: Mapping[str, str], key: str) -> tuple[str, ...] | None:
    """A list as HAMi reads it: one that is empty or blank is none, and one that has only commas matches nothing."""
    text = annotations.get(key, "")
    return tuple(filter(None, split_list(text))) if text.strip() else None


def split_list(text: str) -> tuple[str, ...]:
    """The entries of a list with commas, without blanks around them."""
    return tuple(each.strip() for each in text.split(","))


def read_weights(text: str) -> Weights | None:
    """
    The weights in an annotation, such as `slot=1,core=1,memory=3`: all three once, in any order, and not all 0. None: they
    are invalid.
    """
    parts = [WEIGHT.fullmatch(part) for part in split_list(text)]
    found = {part[1]: int(part[2]) for part in parts if part is not None}
    is_complete = len(parts) == len(found) == len(Weights.__struct_fields__)
    return Weights(**found) if is_complete and any(found.values()) else None

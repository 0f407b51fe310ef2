"""
Checks which GPUs of a node can serve one container.

GPUs are tried in their order until enough GPUs fit. Each GPU is checked in this order, and the first check that fails
is the reason why it does not fit: health, cordon, type and mode, uuid, a free slot, no other container (`mutex`),
memory, cores, no other container if 100 cores are requested, a free core for a share without cores, a placement for a
MIG instance. With `topology-aware`, all GPUs that fit are collected, and `gpu_links` chooses among them. Upstream
checks the quota of the namespace after `mutex`. Here, it is checked before, for whole pods
(`core.sharing.quota_amounts`).

If the pod binds to one NUMA node, the collected GPUs are discarded whenever a GPU is on another node than the previous
one. A GPU in mode `mig` is tried again while it fits, because a container can have several instances of it. They are
placed one after another: on an empty 40 GB A100, two shares of 4000 MiB become instances `1g.5gb` at slices 6 and 5.

These known faults of upstream are kept: 100 cores mean a whole GPU only if the GPU has 100 cores (not if cores are
scaled); `numa-bind` compares only GPUs; with `topology-aware`, there is no reason for discarded GPUs.

Source: HAMi 4707fb02, NvidiaGPUDevices.Fit.
"""

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from topoalign.core.demand.share_annotations import VENDOR, GpuOrder, GpuRules, split_list
from topoalign.core.demand.shares import HamiRequest
from topoalign.core.model.byte_sizes import MIB
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.device_offers import CORES
from topoalign.core.model.topology.mig import MigPlacement
from topoalign.core.sharing.hami.gpu_links import pick_best_connected
from topoalign.core.sharing.hami.registration import PairScores
from topoalign.core.sharing.shared_gpus import SharedGpu
from topoalign.core.state.share_amounts import find_instances


class HamiShare(msgspec.Struct, frozen=True, kw_only=True):
    """What one container has of one GPU."""

    uuid: DeviceID
    memory: int
    """MiB."""
    cores: int
    profile: str = ""
    """Name of the MIG profile. Empty: the GPU is not in mode `mig`, or the instance is not chosen yet."""
    placement: MigPlacement | None = None


Shares = tuple[HamiShare, ...]


class HamiReason(StrEnum):
    """Why a GPU is not taken, in HAMi's words."""

    NOT_HEALTHY = "CardNotHealth"
    CORDONED = "CardCordoned"
    TYPE = "CardTypeMismatch"
    NUMA = "NumaNotFit"
    UUID = "CardUuidMismatch"
    SLOTS = "CardTimeSlicingExhausted"
    EXCLUSIVE = "ExclusiveDeviceAllocateConflict"
    MEMORY = "CardInsufficientMemory"
    CORES = "CardInsufficientCore"
    NO_CORES = "CardComputeUnitsExhausted"
    MIG = "CardMigTopologyInfeasible"
    TOO_FEW = "AllocatedCardsInsufficientRequest"
    """The GPU fits, but too few others do."""


class Unfit(msgspec.Struct, frozen=True):
    """Why a node cannot serve a container: `1/2 CardNotHealth, 1/2 CardTypeMismatch`."""

    reason: str


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """The data on which the choice depends in addition to the GPUs."""

    rules: GpuRules = GpuRules()
    """Its field `hami` has the policies. The default order of the GPUs is `spread`."""
    cordoned: frozenset[str] = frozenset()
    """Uuids."""
    spent: frozenset[str] = frozenset()
    """Uuids of GPUs of which nothing is free for reasons other than the held amounts."""
    scores: PairScores = {}


def fit(gpus: Sequence[SharedGpu], request: HamiRequest, around: Surroundings) -> Shares | Unfit:
    """The shares of one container, or why the node cannot serve it. `gpus`: tried in this order. Raises TooMuchWork."""
    if request.count <= 0:
        return ()
    walk = _Walk(request, around)
    for gpu in gpus:
        while walk.take(gpu):
            if walk.complete:
                return tuple(walk.gathered)
            if gpu.mode != MIG_MODE:
                break
    if walk.topology_aware and len(walk.gathered) >= request.count:
        positions = pick_best_connected([share.uuid for share in walk.gathered], request.count, around.scores)
        return tuple(walk.gathered[position] for position in positions)
    return Unfit(walk.reason(len(gpus)))


class _Walk:
    """The shares that were collected so far, and the reasons why GPUs were not taken."""

    def __init__(self, request: HamiRequest, around: Surroundings) -> None:
        self.request = request
        self.around = around
        self.rules = around.rules
        self.cores = min(request.cores, CORES)
        self.topology_aware = is_topology_aware(around.rules)
        self.gathered: list[HamiShare] = []
        self.reasons: Counter[HamiReason] = Counter()
        self.numa: int | None = None

    @property
    def complete(self) -> bool:
        """Whether no other GPU is needed."""
        return not self.topology_aware and len(self.gathered) >= self.request.count

    def take(self, gpu: SharedGpu) -> bool:
        """Collects a share of this GPU and returns True, or counts the reason and returns False."""
        memory = self.request.memory_of(memory_in_mib(gpu))
        reason = self._unselected(gpu) or self._used_up(gpu, memory)
        if reason is not None:
            self.reasons[reason] += 1
            return False
        self.gathered.append(HamiShare(uuid=gpu.device, memory=memory, cores=self.cores))
        return True

    def reason(self, gpus: int) -> str:
        """All reasons with their counts, sorted as text."""
        if self.gathered:
            self.reasons[HamiReason.TOO_FEW] = len(self.gathered)
        return ", ".join(sorted(f"{count}/{gpus} {reason}" for reason, count in self.reasons.items()))

    def _unselected(self, gpu: SharedGpu) -> HamiReason | None:
        """Why the pod does not accept the GPU, or why the GPU is not available. None: there is no reason."""
        rules = self.rules
        if not gpu.usable:
            return HamiReason.NOT_HEALTHY
        if gpu.device in self.around.cordoned:
            return HamiReason.CORDONED
        takes_mode = rules.mode is None or gpu.mode in rules.mode  # a GPU without a mode matches
        if not (rules.types.takes_type(gpu.model) and takes_mode and self.request.vendor == VENDOR):
            return HamiReason.TYPE
        # a GPU of an accepted type changes the current NUMA node, even if its uuid is not accepted
        if rules.numa_bind and self.numa != known_numa_node(gpu):
            if self.gathered and not self.topology_aware:
                self.reasons[HamiReason.NUMA] += len(self.gathered)
            self.gathered = []
            self.numa = known_numa_node(gpu)
        return None if rules.uuids.takes_uuid(gpu.device) else HamiReason.UUID

    def _used_up(self, gpu: SharedGpu, memory: int) -> HamiReason | None:
        """Why the GPU does not have enough free capacity. None: it has enough."""
        cores = gpu.offered.cores
        if gpu.sharers >= gpu.all_slots or gpu.device in self.around.spent:
            return HamiReason.SLOTS
        if self.rules.mutex and gpu.sharers > 0:
            return HamiReason.EXCLUSIVE
        if memory_in_mib(gpu) - held_memory_in_mib(gpu) < memory:
            return HamiReason.MEMORY
        if cores - gpu.held.cores < self.cores:
            return HamiReason.CORES
        if cores == CORES == self.cores and gpu.sharers > 0:
            return HamiReason.EXCLUSIVE
        if self.cores == 0 and gpu.held.cores == cores != 0:
            return HamiReason.NO_CORES
        if gpu.mode == MIG_MODE:
            here = [*(share.memory for share in self.gathered if share.uuid == gpu.device), memory]
            if find_instances(gpu.profiles, gpu.taken or (), (each * MIB for each in here)) is None:
                return HamiReason.MIG
        return None


def memory_in_mib(gpu: SharedGpu) -> int:
    """The offered memory of a GPU in MiB, as HAMi counts it: rounded down."""
    return gpu.offered.memory // MIB


def held_memory_in_mib(gpu: SharedGpu) -> int:
    """The held memory of a GPU in MiB, as HAMi counts it: rounded up."""
    return -(-gpu.held.memory // MIB)


def known_numa_node(gpu: SharedGpu) -> int:
    """The NUMA node of a GPU. HAMi registers an unknown one as node 0."""
    return gpu.numa_node or 0


def is_topology_aware(rules: GpuRules) -> bool:
    """Whether the best connected GPUs are chosen."""
    return GpuOrder.TOPOLOGY_AWARE in split_list(rules.hami)


MIG_MODE = "mig"

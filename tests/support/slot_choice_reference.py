"""A naive reference of which GPUs in slots a container gets by its pod's annotations: a look at all sets of five GPUs."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import combinations

import msgspec
from decision_support import machine
from slot_support import MIB, PLAIN, in_slots

from topoalign.core.model.topology.device_offers import Slots
from topoalign.core.model.topology.model import Topology

POLICY, WEIGHTS, BIND = "hami.io/gpu-scheduler-policy", "hami.io/device-scoring-weights", "nvidia.com/numa-bind"
USE_TYPE, NO_TYPE = "nvidia.com/use-gputype", "nvidia.com/nouse-gputype"
USE_UUID, NO_UUID = "nvidia.com/use-gpuuuid", "nvidia.com/nouse-gpuuuid"
NODES = (0, 0, 1, 1, None)
NAMES = (
    "NVIDIA A100-SXM4-40GB",
    "NVIDIA H100 80GB HBM3",
    "NVIDIA A100-SXM4-40GB",
    "NVIDIA H100 80GB HBM3",
    "NVIDIA L4",
)
SIZES = (40_000, 80_000, 40_000, 80_000, 20_000)
"""MiB."""
SLOTS = 4

Used = Mapping[int, Sequence[tuple[int, int]]]
"""GPU's index -> cores and MiB of each container on it."""


def mixed(terms: Slots = PLAIN) -> Topology:
    """Five GPUs of three models; of the last one no NUMA node is known."""
    plain = machine(gpus=NODES)
    sized = [
        msgspec.structs.replace(gpu, name=name, memory=size * MIB)
        for gpu, name, size in zip(plain.gpus, NAMES, SIZES, strict=True)
    ]
    return in_slots(msgspec.structs.replace(plain, gpus=tuple(sized)), SLOTS, scaling=terms)


class Reference:
    """The rules, one after the other; all sets of GPUs."""

    def __init__(self, used: Used, asked: tuple[int, int, int, int], says: Mapping[str, str]) -> None:
        """`asked`: GPUs, cores, MiB, percentage."""
        self.used, self.says = used, says
        self.count, self.cores, self.memory, self.percentage = asked
        self.weights = [int(each.partition("=")[2]) for each in says.get(WEIGHTS, "slot=1,core=1,memory=1").split(",")]

    def memory_of(self, gpu: int) -> int:
        return self.memory or SIZES[gpu] * (self.percentage or 100) // 100

    def accepts(self, gpu: int) -> bool:
        model, uuid = NAMES[gpu].casefold(), f"GPU-{gpu}"

        def is_listed(key: str) -> bool:
            parts = self.says[key].split(",")
            return uuid in parts if key in (USE_UUID, NO_UUID) else any(part.casefold() in model for part in parts)

        return all(key not in self.says or is_listed(key) for key in (USE_TYPE, USE_UUID)) and not any(
            key in self.says and is_listed(key) for key in (NO_TYPE, NO_UUID)
        )

    def has_enough(self, gpu: int) -> bool:
        held = self.used.get(gpu, ())
        if held and (self.cores == 100 or self.says.get(POLICY) == "mutex"):
            return False
        cores, memory = sum(cores for cores, _ in held), sum(mib for _, mib in held)
        return len(held) < SLOTS and 100 - cores >= max(1, self.cores) and SIZES[gpu] - memory >= self.memory_of(gpu)

    def sets(self) -> list[tuple[int, ...]]:
        ones = [gpu for gpu in range(len(NAMES)) if self.accepts(gpu) and self.has_enough(gpu)]
        return [each for each in combinations(ones, self.count) if self.count == 1 or self.may_be_together(each)]

    def may_be_together(self, gpus: Sequence[int]) -> bool:
        nodes = {NODES[gpu] for gpu in gpus}
        return self.says.get(BIND) != "true" or (len(nodes) == 1 and None not in nodes)

    def fullness(self, gpus: Sequence[int]) -> Fraction:
        total = Fraction(0)
        for gpu in gpus:
            held = self.used.get(gpu, ())
            slot, core, memory = self.weights
            total += slot * Fraction(len(held) + 1, SLOTS)
            total += core * Fraction(sum(cores for cores, _ in held) + self.cores, 100)
            total += memory * Fraction(sum(mib for _, mib in held) + self.memory_of(gpu), SIZES[gpu])
        return total

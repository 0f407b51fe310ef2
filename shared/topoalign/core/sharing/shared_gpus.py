"""
What is known of a GPU that is shared.

Cores are hundredths of a GPU, memory is in bytes. If somebody holds a GPU whole, nothing of it is left, whatever else
is counted as held. Where more is held than is offered, as after a change of the configuration, nothing is left.
"""

import msgspec

from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import DeviceID
from topoalign.core.state.share_amounts import NONE_HELD, ShareLeft

WHOLE_GPU_CORES = 100
"""Cores of one whole GPU."""


class SharedGpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU that is offered in shares: what it has, and what of it is held."""

    device: DeviceID
    """Its uuid."""
    index: int
    """NVML's index."""
    minor: int
    """The number of /dev/nvidia<minor>. Not always the index."""
    numa_node: int | None = None
    """None: unknown."""
    model: str = ""
    """As NVIDIA names the product: `NVIDIA H100 80GB HBM3`. Empty: unknown."""
    mode: str = ""
    """HAMi's name for what keeps its containers apart: `hami-core`, `mig` or `mps`. Empty: there is none."""
    healthy: bool = True
    cores: int = WHOLE_GPU_CORES
    """Cores offered: 100, or more where they are scaled."""
    memory: int
    """Bytes offered, scaled where that is configured."""
    slots: int = 0
    """Slots offered. 0: the GPU is not offered in slots."""
    cores_held: int = 0
    memory_held: int = 0
    """Bytes."""
    slots_held: int = 0
    processes: int = 0
    """Compute processes that NVML shows on the GPU."""
    exclusive: bool = False
    """Whether somebody holds the GPU whole."""

    @property
    def cores_left(self) -> int:
        """Cores that nobody holds."""
        return 0 if self.exclusive else max(0, self.cores - self.cores_held)

    @property
    def memory_left(self) -> int:
        """Bytes that nobody holds."""
        return 0 if self.exclusive else max(0, self.memory - self.memory_held)

    @property
    def slots_left(self) -> int:
        """Slots that nobody holds."""
        return 0 if self.exclusive else max(0, self.slots - self.slots_held)

    def has_left(self, cores: int, memory: int) -> bool:
        """Whether it is healthy, and so many cores and bytes of it are held by nobody."""
        return self.healthy and self.cores_left >= cores and self.memory_left >= memory

    @property
    def unused(self) -> bool:
        """Whether nobody holds anything of the GPU."""
        return not (self.exclusive or self.cores_held or self.memory_held or self.slots_held)

    @property
    def share_left(self) -> ShareLeft:
        """What is offered of it and what of that is held."""
        held = Amount(cores=self.cores_held, memory=self.memory_held)
        return ShareLeft(
            offered=Amount(cores=self.cores, memory=self.memory),
            held=held,
            sharers=self.slots_held or int(held != NONE_HELD),
            usable=self.healthy and not self.exclusive,
            all_slots=self.slots,
        )

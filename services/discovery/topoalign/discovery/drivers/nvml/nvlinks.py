"""
NVLinks: each GPU reports where its end leads, and pairs are made of two ends.

An end leads to another GPU, whose PCI address it reports, or to an NVSwitch, behind which every other GPU on the switch
is reached. The number of NVLinks of a pair is that of its direct links if it has any, else the smaller of both GPUs'
links to the switch, which is what `nvidia-smi topo -m` prints. Example: GPUs with 12 and 11 links to the switch are a
pair with NV11. In a virtual machine the switch may be hidden, so an end that leads to an unknown device counts as a
switch (both rules: HAMi, as in its pull request 2103).

Reading is one pass per GPU and not per pair; on a slow driver the difference is half a second.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

from msgspec.structs import replace

from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.model import Gpu
from topoalign.discovery.drivers.nvml.library import MOST_NVLINKS, NVLINK_COUNT, Handle, Library

GPU_KIND = 0
NPU_KIND = 1
SWITCH_KIND = 2
"""nvmlIntNvLinkDeviceType_t."""


class End(NamedTuple):
    """Where an NVLink leads."""

    address: str | None
    """PCI address. None: not reported."""
    kind: int | None
    """GPU_KIND, NPU_KIND, SWITCH_KIND, or another number. None: not reported."""
    up: bool = True
    """False: the GPU has the link, but it is not enabled; where it leads is not read."""


DOWN = End(None, None, up=False)


@dataclass(frozen=True)
class NvLinks:
    """The NVLinks of a machine."""

    pairs: Mapping[tuple[DeviceID, DeviceID], int]
    """Of each pair that has any, in the order of the GPUs."""
    to_switch: Mapping[DeviceID, int]
    findings: tuple[str, ...]
    down: Mapping[DeviceID, int] = field(default_factory=dict)
    """GPU -> its links that are not up."""

    def counted(self, gpu: Gpu) -> Gpu:
        """The GPU with the numbers of its NVLinks."""
        return replace(gpu, nvswitch_links=self.to_switch.get(gpu.id, 0), nvlinks_down=self.down.get(gpu.id, 0))


def read_ends(nvml: Library, device: Handle) -> list[End]:
    """
    The NVLinks of a GPU. Raises CallFailed.

    NVML answers "invalid argument" or "not supported" for a link that the GPU does not have, so such a link is not down.
    """
    count = nvml.fields(device, (NVLINK_COUNT,)).get(NVLINK_COUNT, MOST_NVLINKS)
    ends = []
    for link in range(min(count, MOST_NVLINKS)):
        if (enabled := nvml.nvlink_enabled(device, link)) is not None:
            up = enabled and End(nvml.nvlink_remote(device, link), nvml.nvlink_remote_kind(device, link))
            ends.append(up or DOWN)
    return ends


def paired(ends: Mapping[DeviceID, Sequence[End]], addresses: Mapping[DeviceID, str]) -> NvLinks:
    """The NVLinks of GPUs, from what each of them says, and their PCI addresses as far as known."""
    at = {address: gpu for gpu, address in addresses.items()}
    direct: Counter[tuple[DeviceID, DeviceID]] = Counter()
    to_switch: Counter[DeviceID] = Counter()
    down = {gpu: sum(not end.up for end in own) for gpu, own in ends.items()}
    for gpu, own in ends.items():
        for end in own:
            peer = at.get(end.address) if end.address is not None else None
            if peer is not None and peer != gpu:
                direct[gpu, peer] += 1
            elif end.up and end.kind not in (GPU_KIND, NPU_KIND):
                to_switch[gpu] += 1
    pairs = {}
    findings = []
    for a, b in combinations(ends, 2):
        there = direct[a, b]
        back = direct[b, a]
        if there != back:
            findings.append(f"{a} sees {there} NVLinks to {b}, which sees {back}: the smaller number is used")
        count = min(there, back) if there or back else min(to_switch[a], to_switch[b])
        if count:
            pairs[a, b] = count
    return NvLinks(pairs=pairs, to_switch=dict(to_switch), findings=tuple(findings), down=down)

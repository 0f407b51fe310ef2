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
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from topoalign.core.model.ids import DeviceID
from topoalign.discovery.drivers.nvml.library import MOST_NVLINKS, NVLINK_COUNT, Handle, Library

GPU_KIND, NPU_KIND, SWITCH_KIND = 0, 1, 2
"""nvmlIntNvLinkDeviceType_t."""


class End(NamedTuple):
    """Where an NVLink that is enabled leads."""

    address: str | None
    """PCI address. None: not told."""
    kind: int | None
    """GPU_KIND, NPU_KIND, SWITCH_KIND, or another number. None: not told."""


@dataclass(frozen=True)
class NvLinks:
    """The NVLinks of a machine."""

    pairs: Mapping[tuple[DeviceID, DeviceID], int]
    """Of each pair that has any, in the order of the GPUs."""
    to_switch: Mapping[DeviceID, int]
    findings: tuple[str, ...]


def read_ends(nvml: Library, device: Handle) -> list[End]:
    """The enabled NVLinks of a GPU. Raises CallFailed."""
    count = nvml.fields(device, (NVLINK_COUNT,)).get(NVLINK_COUNT, MOST_NVLINKS)
    ends = []
    for link in range(min(count, MOST_NVLINKS)):
        if nvml.nvlink_enabled(device, link):
            ends.append(End(nvml.nvlink_remote(device, link), nvml.nvlink_remote_kind(device, link)))
    return ends


def paired(ends: Mapping[DeviceID, Sequence[End]], addresses: Mapping[DeviceID, str]) -> NvLinks:
    """The NVLinks of GPUs, from what each of them says, and their PCI addresses as far as known."""
    at = {address: gpu for gpu, address in addresses.items()}
    direct: Counter[tuple[DeviceID, DeviceID]] = Counter()
    to_switch: Counter[DeviceID] = Counter()
    for gpu, own in ends.items():
        for end in own:
            peer = at.get(end.address) if end.address is not None else None
            if peer is not None and peer != gpu:
                direct[gpu, peer] += 1
            elif end.kind not in (GPU_KIND, NPU_KIND):
                to_switch[gpu] += 1
    pairs, findings = {}, []
    for a, b in combinations(ends, 2):
        there, back = direct[a, b], direct[b, a]
        if there != back:
            findings.append(f"{a} sees {there} NVLinks to {b}, which sees {back}: the smaller number is used")
        count = min(there, back) if there or back else min(to_switch[a], to_switch[b])
        if count:
            pairs[a, b] = count
    return NvLinks(pairs=pairs, to_switch=dict(to_switch), findings=tuple(findings))

"""
Groups NVLinks so that the drawing stays readable.

GPUs on an NVSwitch are connected to one bar. So are four or more GPUs that are all linked to one another with equally
many links: a pasted matrix shows an NVSwitch, or a small machine without one, in this way. Every other link is an arc
between two GPUs.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations

from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.model import Topology

Pair = tuple[DeviceID, DeviceID, int]
"""Two GPUs, the one with the lower index first, and the number of NVLinks between them."""

LEAST_ON_A_BAR = 4
"""GPUs that are all linked to one another; three of them are drawn as a triangle."""


@dataclass(frozen=True)
class Bar:
    """What several GPUs hang on."""

    title: str
    links: dict[DeviceID, int]
    """GPU -> its NVLinks to the bar. On a bar of direct links: those to each of the others."""


@dataclass(frozen=True)
class NvLinks:
    """The NVLinks of a machine as they are drawn: bars for groups of GPUs, pairs for all other links."""

    bars: tuple[Bar, ...]
    pairs: tuple[Pair, ...]
    """What is on no bar, by the indexes of the GPUs."""

    def pair_lines(self, names: Mapping[DeviceID, str]) -> tuple[str, ...]:
        """The pairs in words, a line for each first GPU: `NVLinks of GPU0: GPU1 NV2, GPU3 NV1`."""
        lines: dict[str, list[str]] = {}
        for a, b, count in self.pairs:
            lines.setdefault(names[a], []).append(f"{names[b]} NV{count}")
        return tuple(f"NVLinks of {first}: {', '.join(others)}" for first, others in lines.items())


def nvlinks_of(topology: Topology) -> NvLinks:
    """All NVLinks of a machine."""
    on_switch = {gpu.id: gpu.nvswitch_links for gpu in topology.gpus if gpu.nvswitch_links > 0}
    position = {gpu.id: i for i, gpu in enumerate(topology.gpus)}
    direct = {
        tuple(sorted((link.a, link.b), key=position.__getitem__)): link.nvlinks
        for link in topology.links
        if link.nvlinks > 0
        and link.a in position
        and link.b in position
        and not (link.a in on_switch and link.b in on_switch)
    }
    bars = [Bar(switch_title(on_switch.values()), on_switch)] if on_switch else []
    for members in islands(direct):
        pairs = [tuple(sorted(pair, key=position.__getitem__)) for pair in combinations(members, 2)]
        counts = {direct.get(pair, 0) for pair in pairs}
        if len(members) >= LEAST_ON_A_BAR and len(counts) == 1:
            (count,) = counts
            bars.append(
                Bar(f"NVLink: NV{count} all to all", dict.fromkeys(sorted(members, key=position.__getitem__), count))
            )
            direct = {pair: links for pair, links in direct.items() if pair not in pairs}
    ordered = sorted(direct.items(), key=lambda item: [position[end] for end in item[0]])
    return NvLinks(tuple(bars), tuple((a, b, count) for (a, b), count in ordered))


def switch_title(counts: Iterable[int]) -> str:
    """The title of a bar with these numbers of NVLinks per GPU: `NVSwitch: 12 NVLinks per GPU`."""
    least = min(counts)
    most = max(counts)
    if least == most:
        return f"NVSwitch: {most} NVLink{'s' if most > 1 else ''} per GPU"
    return f"NVSwitch: {least} to {most} NVLinks per GPU"


def islands(pairs: Iterable[tuple[DeviceID, ...]]) -> list[set[DeviceID]]:
    """The GPUs that reach one another over these links."""
    found: list[set[DeviceID]] = []
    for pair in pairs:
        touched = [island for island in found if not island.isdisjoint(pair)]
        found = [island for island in found if island.isdisjoint(pair)] + [set(pair).union(*touched)]
    return found

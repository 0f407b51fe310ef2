"""
Finds degraded GPUs: they work, but with fewer links to other GPUs (NVLink, xGMI) than their peers, or on an
NVLink fabric that is not fully working.

A GPU's peers are the node's GPUs of the same model. Its number of links is compared with the largest number of a peer:

- On an NVSwitch, the links to the switch are counted (`links_to_switch`). A GPU that has fewer is degraded.
- Without a switch, the links of all pairs with the GPU are counted. Fewer links can be normal: on a board without a
  bridge, or in a virtual machine with four GPUs of a mesh of eight. So a GPU is degraded only if some of its links are
  up and some are down, and all links of a peer are up. A GPU whose links are all down is degraded only if the GPUs with
  some links down have at least as many links down together, because these can be the other ends of its links.

    8 B200 on an NVSwitch, one with 9 links, the others with 18          "9 of 18 NVLinks are up"
    4 A100 PCIe, a bridge on one pair, the 12 links of the others down   none is degraded
    DGX-1, one link between GPU 0 and GPU 1 down                         both: "5 of 6 NVLinks are up"

Links of a GPU in MIG mode are not checked: MIG instances do not communicate with other GPUs, so links may be off.
"""

from collections.abc import Iterator, Mapping, Sequence

from topoalign.core.model.errors import clean
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.derived_tables import computed_once
from topoalign.core.model.topology.device_links import link_name
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.core.model.topology.queries import links_of_pairs, links_to_switch

FABRIC_FINDINGS = {
    "not-started": "its NVLink fabric is not started",
    "in-progress": "its NVLink fabric is being set up",
    "failed": "its NVLink fabric could not be set up",
    "degraded": "its NVLink fabric is degraded",
}
"""`Gpu.fabric_state` -> the finding."""


@computed_once
def degraded_gpus(topology: Topology) -> Mapping[DeviceID, str]:
    """GPU -> the finding, a sentence for people, for each degraded GPU in the order of `gpus`."""
    models: dict[str, list[Gpu]] = {}
    for gpu in topology.gpus:
        if gpu.mig is None:
            models.setdefault(gpu.name, []).append(gpu)
    fewer = {gpu: finding for peers in models.values() for gpu, finding in _fewer_links(topology, peers)}
    findings = {}
    for gpu in topology.gpus:
        found = [fewer[gpu.id]] if gpu.id in fewer else []
        if gpu.fabric_state:  # a later version may publish an unknown state
            unknown = f"the state of its NVLink fabric is {clean(gpu.fabric_state, 40)}"
            found.append(FABRIC_FINDINGS.get(gpu.fabric_state, unknown))
        if found:
            findings[gpu.id] = ", and ".join(found)
    return findings


def _fewer_links(topology: Topology, peers: Sequence[Gpu]) -> Iterator[tuple[DeviceID, str]]:
    # `peers`: all GPUs of one model
    up = {gpu.id: links_to_switch(topology)[gpu.id] for gpu in peers}
    if any(up.values()):
        degraded = {gpu for gpu, count in up.items() if count < max(up.values())}
    else:
        pairs = links_of_pairs(topology)
        up = {gpu.id: sum(pairs[gpu.id]) for gpu in peers}
        degraded = _lost_direct_links(peers, up)
    most = max(up.values())
    for gpu, count in up.items():
        if gpu in degraded:
            name = link_name(peers[0].name)
            yield gpu, f"{count} of {most} {name}s are up" if count else f"it has no {name}, its peers have {most}"


def _lost_direct_links(peers: Sequence[Gpu], up: Mapping[DeviceID, int]) -> set[DeviceID]:
    # without a switch; `up`: GPU -> number of its links that are up
    if not any(up[gpu.id] and not gpu.links_down for gpu in peers):
        return set()
    partly = [gpu for gpu in peers if 0 < up[gpu.id] < max(up.values()) and gpu.links_down]
    other_ends = sum(gpu.links_down for gpu in partly)
    wholly = [gpu for gpu in peers if not up[gpu.id] and 0 < gpu.links_down <= other_ends]
    return {gpu.id for gpu in (*partly, *wholly)}

"""Functions about a node's hardware that several packages of the core use."""

from collections.abc import Mapping
from itertools import combinations

from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.derived_tables import computed_once
from topoalign.core.model.topology.device_links import NVLINK_SCORE, PCIE_SCORE, PcieClass
from topoalign.core.model.topology.device_offers import Offer
from topoalign.core.model.topology.model import Gpu, Topology


def pcie_class(topology: Topology, a: DeviceID, b: DeviceID) -> PcieClass:
    """The class of the PCIe path between two devices. An unknown path is NODE if they share a NUMA node, else SYS."""
    link = topology.link_by_pair.get((a, b))
    if link is not None and link.pcie is not None:
        return link.pcie
    return PcieClass.NODE if share_node(topology, a, b) else PcieClass.SYS


def share_node(topology: Topology, a: DeviceID, b: DeviceID) -> bool:
    """Whether both devices are known to be near a common NUMA node."""
    return bool(set(affinity(topology, a)) & set(affinity(topology, b)))


def affinity(topology: Topology, device: DeviceID) -> tuple[int, ...]:
    """The NUMA nodes near a GPU or NIC; empty if they are unknown or the device is neither."""
    found = topology.gpu_by_id.get(device) or topology.nic_by_id.get(device)
    return found.numa_affinity if found is not None else ()


def connection_score(topology: Topology, a: DeviceID, b: DeviceID) -> int:
    """The score of a connection, as in go-gpuallocator. Fabric links between cliques or clusters do not count."""
    link = topology.link_by_pair.get((a, b))
    if link is None:
        return PCIE_SCORE[pcie_class(topology, a, b)]
    score = PCIE_SCORE[link.pcie or pcie_class(topology, a, b)]
    return score if kept_apart(topology, a, b) else score + NVLINK_SCORE * link.fabric_links


MOST_LINKS_OF_A_GPU = 18
"""Number of NVLinks of an H100 or a B200."""


@computed_once
def links_to_switch(topology: Topology) -> Mapping[DeviceID, int]:
    """
    GPU -> number of its links that end at a switch. A pasted matrix does not show the switch. Then the GPUs are assumed
    to be on a switch if two conditions are met. First, the links of a GPU to all peers together are more than any GPU
    has. Second, each pair has as many links as the smaller of the two GPUs' largest numbers of links to one peer.
    """
    pairs = links_of_pairs(topology)
    unnamed = not any(gpu.switch_links for gpu in topology.gpus)
    if unnamed and max(map(sum, pairs.values()), default=0) > MOST_LINKS_OF_A_GPU:
        most = {gpu: max(counts, default=0) for gpu, counts in pairs.items()}
        links = topology.link_by_pair
        if all(
            min(most[a], most[b]) == (links[a, b].fabric_links if (a, b) in links else 0)
            for a, b in combinations(most, 2)
        ):
            return most
    return {gpu.id: gpu.switch_links for gpu in topology.gpus}


def links_of_pairs(topology: Topology) -> dict[DeviceID, list[int]]:
    """GPU -> the number of fabric links of each pair that it belongs to."""
    pairs: dict[DeviceID, list[int]] = {gpu.id: [] for gpu in topology.gpus}
    for link in topology.links:
        for device in (link.a, link.b):
            if link.fabric_links and device in pairs:
                pairs[device].append(link.fabric_links)
    return pairs


def kept_apart(topology: Topology, a: DeviceID, b: DeviceID) -> bool:
    """Whether both GPUs are known to belong to fabrics beyond the node, but to different ones."""
    fabrics = [gpu.fabric for gpu in (topology.gpu_by_id.get(a), topology.gpu_by_id.get(b)) if gpu is not None]
    return len(fabrics) == 2 and None not in fabrics and fabrics[0] != fabrics[1]


@computed_once
def offers_in_slots(topology: Topology) -> Mapping[DeviceID, Offer]:
    """GPU or MIG instance that is offered in slots -> its offer, in the hardware's order."""
    found = {base: offer for offer in topology.offered if offer.slots and offer.replicas > 1 for base in offer.devices}
    bases = (base for gpu in topology.gpus for base in (gpu.id, *(each.uuid for each in gpu.mig or ())))
    return {base: found[base] for base in bases if base in found} if found else {}


def gpu_of(topology: Topology, base: DeviceID) -> Gpu:
    """The GPU with this id, or the GPU of the MIG instance with this id."""
    return topology.gpu_by_id[topology.parent_of(base)]


@computed_once
def is_by_amounts(topology: Topology) -> bool:
    """Whether any GPU or MIG instance is offered in units or in slots."""
    return any(offer.unit is not None for offer in topology.offered) or bool(offers_in_slots(topology))

"""Machines whose GPUs are divided, configurations as text, and what a node offers by them."""

from collections.abc import Iterable, Sequence

from fact_support import mig_device

from topoalign.core.model.holdings import handed_out
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.device_offers import Offer
from topoalign.core.model.topology.model import Gpu, Nic, NumaNode, Topology, VirtualFunction
from topoalign.kubelet.files import documents
from topoalign.plugin_config.configuration import Configuration
from topoalign.plugin_config.file import interpret_document
from topoalign.plugin_config.resource_offers import ResourceOffers, offer_resources

A100, L4 = "NVIDIA A100-SXM4-80GB", "NVIDIA L4"


def configured(text: str = "{}", **environment: str) -> Configuration:
    """The configuration of a file that holds this."""
    return interpret_document(documents.parse_document(text.encode(), "topoalign.yaml"), environment).configuration


def gpu(index: int, profiles: Sequence[str] | None = None, name: str = A100) -> Gpu:
    """
    A GPU `GPU-<index>` with MIG instances `MIG-<index>-<place>` of these profiles; None: not in MIG mode. NVML counts the
    instances from the other end, as it does where they were not made in this order.
    """
    mig = tuple(
        mig_device(f"MIG-{index}-{place}", place, profile=profile, index=len(profiles or ()) - 1 - place)
        for place, profile in enumerate(profiles or ())
    )
    divided = mig if profiles is not None else None
    return Gpu(id=DeviceID(f"GPU-{index}"), index=index, name=name, mig=divided, numa_affinity=(0,))


def nic(index: int, functions: int = 0) -> Nic:
    """A NIC `mlx5_<index>` at 0000:<index>:00.0 with so many virtual functions."""
    address = f"0000:{index:02x}:00"
    virtual = tuple(VirtualFunction(pci=f"{address}.{n + 1}") for n in range(functions))
    return Nic(id=DeviceID(f"mlx5_{index}"), index=index, pci=f"{address}.0", virtual_functions=virtual)


def machine(gpus: Iterable[Gpu] = (), nics: Iterable[Nic] = ()) -> Topology:
    return Topology(nodes=(NumaNode(id=0),), gpus=tuple(gpus), nics=tuple(nics))


def made(topology: Topology, text: str = "{}", before: Sequence[Offer] = ()) -> ResourceOffers:
    return offer_resources(topology, configured(text), before)


def listed(offering: ResourceOffers) -> dict[str, list[str]]:
    """Resource -> the ids handed out of it."""
    found: dict[str, list[str]] = {}
    for offer in offering.offers:
        for base in offer.devices:
            found.setdefault(offer.resource, []).extend(handed_out(base, offer.replicas))
    return found


def said(offering: ResourceOffers) -> list[str]:
    return [str(finding) for finding in offering.findings]

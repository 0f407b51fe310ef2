"""
What each MPS daemon of a node serves and which limits it sets, from the GPUs and the configuration.

The rule is that of NVIDIA's device plugin v0.20.0 (cmd/mps-control-daemon/mps): with n replicas a client may use 1/n of the
GPU's memory in whole MiB, and 100/n per cent of its threads, rounded down. Example: 80 GiB and 3 replicas are 27306 MiB and
33 per cent. A GPU older than compute capability 7.5 serves 16 clients, any other 48; that plugin takes 7.5 for Volta, which
is 7.0, so a V100 is refused more than 16 here as well.

Where MPS limits units or slots, the daemon sets no limits: each container has its own, which Allocate tells it. The two
resources of GPUs in units have one daemon, which is called after that of computing time.
"""

from collections.abc import Sequence

import msgspec

from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.plugin_config.configuration import Configuration
from topoalign.plugin_config.mps_files import Serves
from topoalign.plugin_config.offers import offers

MIB = 1 << 20
MANY_CLIENTS = 48
FEW_CLIENTS = 16
SINCE_MANY = (7, 5)
"""The first compute capability with `MANY_CLIENTS`."""


class MpsGpu(msgspec.Struct, frozen=True, kw_only=True):
    """What NVML says of a GPU."""

    id: DeviceID
    index: int
    name: str
    memory: int | None
    """Bytes; None: not told."""
    in_mig_mode: bool
    capability: tuple[int, int]
    """Compute capability, major and minor."""


class MpsShare(msgspec.Struct, frozen=True, kw_only=True):
    """What one daemon serves."""

    resource: ResourceName
    replicas: int
    """Of each GPU; 0: it is in units, and as many containers use it as have some."""
    own_limits: bool = False
    """Whether the clients have limits of their own: the daemon has no defaults."""
    cards: tuple[MpsGpu, ...]
    """In NVML's order; never empty."""

    @property
    def devices(self) -> tuple[DeviceID, ...]:
        """The uuids of its GPUs."""
        return tuple(card.id for card in self.cards)

    @property
    def serves(self) -> Serves:
        """What the allocator is told of it."""
        return Serves(devices=frozenset(self.devices), replicas=0 if self.own_limits else self.replicas)

    @property
    def thread_percentage(self) -> int:
        """Of a GPU's threads, for one client."""
        return 100 // self.replicas

    @property
    def memory_limits(self) -> dict[DeviceID, str]:
        """GPU -> memory for one client, `27306M`; without GPUs whose memory is not told."""
        return {card.id: f"{card.memory // self.replicas // MIB}M" for card in self.cards if card.memory}

    @property
    def with_too_few_clients(self) -> tuple[MpsGpu, ...]:
        """The GPUs that serve fewer clients than there are replicas."""
        return tuple(card for card in self.cards if self.replicas > most_clients(card))


def most_clients(card: MpsGpu) -> int:
    """How many clients an MPS server has on a GPU."""
    return MANY_CLIENTS if card.capability >= SINCE_MANY else FEW_CLIENTS


def mps_shares(cards: Sequence[MpsGpu], configuration: Configuration) -> dict[ResourceName, MpsShare]:
    """Resource -> what its daemon serves, for the resources that the configuration shares by MPS on this node."""
    gpus = (
        Gpu(id=card.id, index=card.index, name=card.name, mig=() if card.in_mig_mode else None, memory=card.memory)
        for card in cards
    )
    by_id = {card.id: card for card in cards}
    return {
        offer.resource: MpsShare(
            resource=offer.resource,
            replicas=0 if offer.unit else offer.replicas,
            own_limits=offer.by_amounts,
            cards=tuple(by_id[device] for device in offer.devices),
        )
        for offer in offers(Topology(gpus=tuple(gpus)), configuration).offers
        if offer.sharing == "mps" and offer.unit != "memory"
    }

"""What the parts of HAMi on a node write into its annotations: its device plugin its cards, its scheduler the handshake."""

from collections.abc import Sequence
from datetime import datetime

import msgspec

from topoalign.core.sharing.hami.node_annotations import REQUESTING
from topoalign.core.sharing.hami.registration import RegisteredGpu


def encode_register(cards: Sequence[RegisteredGpu]) -> str:
    """The annotation for these cards, as HAMi's Go writes it: what is zero is left out."""
    return msgspec.json.encode(cards).decode()


def requesting(now: datetime) -> str:
    """The handshake that the scheduler writes."""
    return f"{REQUESTING}_{now:%Y-%m-%d %H:%M:%S}"

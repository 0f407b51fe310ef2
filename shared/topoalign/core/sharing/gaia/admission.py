"""
Which node and which cards gpu-admission promises a pod, before gpu-manager chooses again.

Nodes are tried with the most loaded first: fewest cores left, then least memory left, then by name. The first that has room
for every container of the pod gets it; all others are out, so the scheduler is left without a choice. On a node, containers
are placed in the order of the pod's spec:

- below 100 cores on the first card with enough of both, by cores left, memory left, the least first, and index;
- else on whole cards in that order: of 150 cores one card, since they are divided and rounded down.

It knows no tree, no processes and no minor numbers. A card whose cores nobody holds counts as whole even if memory of it is
held; taking it whole then fails, and the node with it.

Source: gpu-admission 47d56ae, predicate (deviceFilter), algorithm and device.
"""

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from topoalign.core.model.ids import DeviceID, NodeName
from topoalign.core.sharing.cards import WHOLE_CARD, SharedCard, ShareRequest
from topoalign.core.sharing.gaia import BLOCK

INDEX = re.compile(r"[+-]?[0-9]+")


class Mismatch(StrEnum):
    """Why a node does not get a pod."""

    NO_GPU = "no GPU device"
    NO_ROOM = "does not match with this node"
    OTHER_NODE = "already matched to another node"


class AdmissionNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node with its cards as they are held now."""

    name: NodeName
    cards: tuple[SharedCard, ...] = ()
    """By index. Empty: no node with GPUs."""
    rest: int = 0
    """Bytes that the node has beyond its cards: what is left over where its memory is divided by their number."""

    @property
    def load(self) -> tuple[int, int, NodeName]:
        """The key that sorts nodes in the order in which they are tried."""
        return (
            sum(card.cores_left for card in self.cards),  # the fewest cores left,
            sum(card.memory_left for card in self.cards) + self.rest,  # then the least memory,
            self.name,
        )


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """A container that has a promise on a node."""

    cores: int
    memory: int
    """Bytes."""
    cards: str
    """Its cards as the annotation `tencent.com/predicate-gpu-idx-<container>` has them: `0` or `0,1`."""


class Promise(msgspec.Struct, frozen=True, kw_only=True):
    """The answer for one pod."""

    node: NodeName | None
    """None: it fits on no node."""
    cards: Mapping[int, tuple[int, ...]]
    """Position of a container in the pod's spec -> indexes of its cards. Containers without GPUs are absent."""
    failed: Mapping[NodeName, Mismatch]
    """Why each other node does not get it."""
    tried: tuple[NodeName, ...]
    """Nodes with GPUs in the order in which they are tried."""


def asks_for_gpu(cores: int, memory: int) -> bool:
    """Whether these amounts are a GPU to GaiaGPU: a share needs memory beside its cores, whole cards do not."""
    return cores >= WHOLE_CARD or (cores > 0 and memory > 0)


def promise(nodes: Sequence[AdmissionNode], containers: Sequence[ShareRequest]) -> Promise | None:
    """
    The node and the cards of a pod. None: the pod as a whole asks for no GPU, and any node will do.

    A pod asks for GPUs by the sums over its containers, so one whose containers each lack an amount may be promised a node
    without cards.
    """
    if not asks_for_gpu(sum(each.cores for each in containers), sum(each.memory for each in containers)):
        return None
    failed = {node.name: Mismatch.NO_GPU for node in nodes if not node.cards}
    ordered = sorted((node for node in nodes if node.cards), key=lambda node: node.load)
    chosen: NodeName | None = None
    cards: Mapping[int, tuple[int, ...]] = {}
    for node in ordered:
        if chosen is not None:
            failed[node.name] = Mismatch.OTHER_NODE
        elif (found := place(node.cards, containers)) is not None:
            chosen, cards = node.name, found
        else:
            failed[node.name] = Mismatch.NO_ROOM
    return Promise(node=chosen, cards=cards, failed=failed, tried=tuple(node.name for node in ordered))


def place(cards: Sequence[SharedCard], containers: Sequence[ShareRequest]) -> dict[int, tuple[int, ...]] | None:
    """Position of each container with a GPU -> indexes of its cards; None if one of them finds no room."""
    left = list(cards)
    placed: dict[int, tuple[int, ...]] = {}
    for position, asked in enumerate(containers):
        if not asks_for_gpu(asked.cores, asked.memory):
            continue
        chosen = choose(left, asked)
        for index in chosen:
            taken = take(left[index], asked.cores, asked.memory)
            if taken is None:
                return None
            left[index] = taken
        if not chosen:
            return None
        placed[position] = chosen
    return placed


def choose(cards: Sequence[SharedCard], asked: ShareRequest) -> tuple[int, ...]:
    """The indexes of the cards of one container; () if there are not enough."""
    healthy = [index for index, card in enumerate(cards) if card.healthy]
    order = sorted(healthy, key=lambda index: (cards[index].cores_left, cards[index].memory_left, index))
    if asked.cores < WHOLE_CARD:
        fitting = [i for i in order if cards[i].cores_left >= asked.cores and cards[i].memory_left >= asked.memory]
        return tuple(fitting[:1])
    count = asked.cores // WHOLE_CARD
    whole = [index for index in order if cards[index].cores_left == WHOLE_CARD]
    return tuple(whole[:count]) if len(whole) >= count else ()


def take(card: SharedCard, cores: int, memory: int) -> SharedCard | None:
    """The card with these amounts held, from 100 cores on whole; None if it has not as much left."""
    if cores >= WHOLE_CARD:
        cores, memory = WHOLE_CARD, card.memory
    if cores > card.cores_left or memory > card.memory_left:
        return None
    return msgspec.structs.replace(card, cores_held=card.cores_held + cores, memory_held=card.memory_held + memory)


def promised(name: NodeName, cores: int, blocks: int, containers: Sequence[Placed]) -> AdmissionNode:
    """
    A node as gpu-admission reads it: its capacity in cores and in blocks of 256 MiB, and the promises of its pods.

    Memory is divided by the number of cards in whole blocks. A promise counts nothing on a card that the node does not have,
    or that has not as much left.
    """
    count = cores // WHOLE_CARD
    if count <= 0:
        return AdmissionNode(name=name)
    each = blocks // count * BLOCK
    cards = [SharedCard(device=DeviceID(str(i)), index=i, minor=i, memory=each) for i in range(count)]
    for container in containers:
        for index in indexes(container.cards):
            if 0 <= index < count:
                cards[index] = take(cards[index], container.cores, container.memory) or cards[index]
    return AdmissionNode(name=name, cards=tuple(cards), rest=blocks * BLOCK - each * count)


def indexes(annotation: str) -> tuple[int, ...]:
    """The indexes of cards in an annotation: `0,1`. Empty if one of them is no number."""
    texts = annotation.split(",")
    return tuple(map(int, texts)) if all(map(INDEX.fullmatch, texts)) else ()

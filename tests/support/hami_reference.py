"""
HAMi's decisions on shares once more, from their rules alone: lists sorted by comparison and walked from the end, cards as
mutable records, sets of slices, every combination. Slow, and for a handful of cards.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cmp_to_key
from itertools import combinations

from topoalign.core.demand.shares import HamiRequest
from topoalign.core.model.topology.mig import MigProfile

Annotations = Mapping[str, str]


@dataclass
class Card:
    uuid: str
    index: int = 0
    numa: int = 0
    type: str = "NVIDIA"
    mode: str = ""
    healthy: bool = True
    slots: int = 4
    used_slots: int = 0
    memory: int = 1024
    used_memory: int = 0
    cores: int = 100
    used_cores: int = 0
    profiles: tuple[MigProfile, ...] = ()
    slices: frozenset[int] = frozenset()
    score: Fraction = Fraction(0)


def memory_of(request: HamiRequest, total: int) -> int:
    if request.memory:
        return request.memory
    return 0 if request.percent == 101 else total * request.percent // 100


@dataclass
class Node:
    cards: list[Card]
    cordoned: set[str] = field(default_factory=set)
    scores: dict[str, dict[str, int]] = field(default_factory=dict)


Given = list[tuple[str, int, int]]
"""Of one container: uuid, memory, cores of each card."""
Answer = tuple[bool, Given, str]


def is_true(text: str | None) -> bool:
    return text in ("1", "t", "T", "true", "TRUE", "True")


def comes_first(a: Card, b: Card, policy: str, numa_bind: bool) -> bool:
    """Whether `a` sorts before `b` in the list that is walked from its end; None of both where they are equal."""
    names = [name.strip() for name in policy.split(",")]
    keys: list[tuple[Fraction, Fraction]] = []
    by: dict[str, tuple[Fraction, Fraction]] = {
        "binpack": (a.score, b.score),
        "spread": (-a.score, -b.score),
        "numa": (Fraction(a.numa), Fraction(b.numa)),
    }
    if len(names) > 1 or policy == "numa":
        wanted = [name for i, name in enumerate(names) if name in by and name not in names[:i]] or ["spread"]
        if numa_bind:
            wanted = ["numa"] + [name for name in wanted if name != "numa"]
        keys = [by[name] for name in wanted]
    elif policy == "mutex":
        keys = [(Fraction(-a.used_slots), Fraction(-b.used_slots)), by["numa"]]
    elif policy == "binpack":
        keys = [(Fraction(-a.numa), Fraction(-b.numa)), by["binpack"]] if numa_bind else [by["binpack"], by["numa"]]
    else:
        keys = [by["numa"], by["spread"]] if numa_bind else [by["spread"], by["numa"]]
    for left, right in keys:
        if left != right:
            return left < right
    return (a.index, a.uuid) < (b.index, b.uuid)


def sorted_list(cards: list[Card], policy: str, numa_bind: bool) -> list[Card]:
    def compare(a: Card, b: Card) -> int:
        return -1 if comes_first(a, b, policy, numa_bind) else int(comes_first(b, a, policy, numa_bind))

    return sorted(cards, key=cmp_to_key(compare))


def score(card: Card, requests: list[HamiRequest], weights: tuple[int, int, int]) -> Fraction:
    if 0 in (card.slots, card.cores, card.memory):
        return Fraction(0)
    same = [request for request in requests if request.vendor == card.type]
    slots = card.used_slots + len(same)
    cores = card.used_cores + sum(request.cores for request in same)
    memory = card.used_memory
    for request in same:
        memory += request.memory if request.percent in (0, 101) else card.memory * request.percent // 100
    parts = (Fraction(slots, card.slots), Fraction(cores, card.cores), Fraction(memory, card.memory))
    return 10 * sum((weight * part for weight, part in zip(weights, parts, strict=True)), Fraction(0))


def node_score(cards: list[Card]) -> Fraction:
    totals = [sum(c.slots for c in cards), sum(c.cores for c in cards), sum(c.memory for c in cards)]
    if 0 in totals:
        return Fraction(0)
    used = [sum(c.used_slots for c in cards), sum(c.used_cores for c in cards), sum(c.used_memory for c in cards)]
    return 10 * sum((Fraction(u, t) for u, t in zip(used, totals, strict=True)), Fraction(0))


def listed(annotations: Annotations, key: str) -> list[str] | None:
    text = annotations.get(key, "")
    return [name.strip() for name in text.split(",")] if text.strip() else None


def type_selected(annotations: Annotations, model: str) -> bool:
    def names(some: list[str]) -> bool:
        return any(name and name.upper() in model.upper() for name in some)

    use, nouse = listed(annotations, "nvidia.com/use-gputype"), listed(annotations, "nvidia.com/nouse-gputype")
    return (use is None or names(use)) and not (nouse is not None and names(nouse))


def uuid_selected(annotations: Annotations, uuid: str) -> bool:
    use, nouse = listed(annotations, "nvidia.com/use-gpuuuid"), listed(annotations, "nvidia.com/nouse-gpuuuid")
    return (use is None or uuid in use) and not (nouse is not None and uuid in nouse)


def place_instance(
    profiles: tuple[MigProfile, ...], taken: frozenset[int], memory: int
) -> tuple[MigProfile, int, int] | None:
    """Profile, start and size of the instance for so many MiB."""
    for profile in sorted(profiles, key=lambda each: (each.memory, each.slices)):
        high = profile.name[:3] in ("1g.", "3g.")
        places = [(at.start, at.size) for at in profile.placements]
        for start, size in sorted(places, key=lambda each: -each[0] if high else each[0]):
            if profile.memory >= memory << 20 and not taken & set(range(start, start + size)):
                return profile, start, size
    return None


def fit(
    cards: list[Card],
    request: HamiRequest,
    annotations: Annotations,
    default_policy: str,
    node: Node,
) -> Answer:
    """`cards` is the list that is walked from its end."""
    policies = [name.strip() for name in annotations.get("hami.io/gpu-scheduler-policy", default_policy).split(",")]
    numa_bind, mode = is_true(annotations.get("nvidia.com/numa-bind")), annotations.get("nvidia.com/vgpu-mode")
    topology = "topology-aware" in policies
    got: Given = []
    reasons: dict[str, int] = {}
    numa: int | None = None
    at = len(cards) - 1
    while at >= 0:
        card, cores = cards[at], min(request.cores, 100)
        at -= 1
        memory = memory_of(request, card.memory)

        def no(reason: str, times: int = 1) -> None:
            reasons[reason] = reasons.get(reason, 0) + times

        if not card.healthy:
            no("CardNotHealth")
            continue
        if card.uuid in node.cordoned:
            no("CardCordoned")
            continue
        if not type_selected(annotations, card.type) or (mode is not None and card.mode not in mode):
            no("CardTypeMismatch")
            continue
        if numa_bind and numa != card.numa:
            if got and not topology:
                no("NumaNotFit", len(got))
            got, numa = [], card.numa
        if not uuid_selected(annotations, card.uuid):
            no("CardUuidMismatch")
        elif not card.used_slots < card.slots:
            no("CardTimeSlicingExhausted")
        elif "mutex" in policies and card.used_slots:
            no("ExclusiveDeviceAllocateConflict")
        elif card.used_memory + memory > card.memory:
            no("CardInsufficientMemory")
        elif card.used_cores + cores > card.cores:
            no("CardInsufficientCore")
        elif card.cores == 100 and cores == 100 and card.used_slots:
            no("ExclusiveDeviceAllocateConflict")
        elif cores == 0 and card.cores and card.used_cores == card.cores:
            no("CardComputeUnitsExhausted")
        elif card.mode == "mig" and not has_place(card, [m for u, m, _ in got if u == card.uuid] + [memory]):
            no("CardMigTopologyInfeasible")
        else:
            got.append((card.uuid, memory, cores))
            if len(got) == request.count and not topology:
                return True, got, ""
            if card.mode == "mig":
                at += 1
    if topology and len(got) >= request.count:
        return True, picked(got, request.count, node.scores), ""
    if got:
        reasons["AllocatedCardsInsufficientRequest"] = len(got)
    return False, [], ", ".join(sorted(f"{n}/{len(cards)} {reason}" for reason, n in reasons.items()))


def has_place(card: Card, memories: list[int]) -> bool:
    taken = card.slices
    for memory in memories:
        found = place_instance(card.profiles, taken, memory)
        if found is None:
            return False
        taken |= frozenset(range(found[1], found[1] + found[2]))
    return True


def picked(got: Given, count: int, scores: dict[str, dict[str, int]]) -> Given:
    def between(a: str, b: str) -> int:
        return scores.get(a, {}).get(b, 0)

    if count == len(got):
        return got
    if count == 1:
        sums = [sum(between(a[0], b[0]) for b in got if b[0] != a[0]) for a in got]
        return [got[sums.index(min(sums))]]
    sets = list(combinations(got, count))
    sums = [sum(between(a[0], b[0]) for a, b in combinations(each, 2)) for each in sets]
    return list(sets[sums.index(max(sums))])


def place(
    node: Node,
    containers: list[list[HamiRequest]],
    init: int,
    annotations: Annotations,
    weights: tuple[int, int, int] = (1, 1, 1),
) -> tuple[list[Given], list[Card]] | str:
    """What each container gets, and the cards as the containers after the init containers leave them; or why not."""
    policy = annotations.get("hami.io/gpu-scheduler-policy", "spread")
    numa_bind = is_true(annotations.get("nvidia.com/numa-bind"))
    given: list[Given] = []
    cards = [replace(card) for card in node.cards]
    for number, requests in enumerate(containers):
        mine = [replace(card) for card in node.cards] if number < init else cards
        for card in mine:
            card.score = score(card, requests, weights)
        got: Given = []
        for request in requests:
            order = [card for card in sorted_list(mine, policy, numa_bind) if "nvidia" in card.type.lower()]
            mig = any(card.mode == "mig" for card in order) and "mig" in annotations.get("nvidia.com/vgpu-mode", "mig")
            if request.count > len(order) and not mig:
                return "NodeInsufficientDevice"
            fits, found, reason = fit(order, request, annotations, "spread", node)
            if not fits:
                return reason
            got += [use(next(card for card in mine if card.uuid == uuid), m, c) for uuid, m, c in found]
        given.append(got)
    return given, cards


def use(card: Card, memory: int, cores: int) -> tuple[str, int, int]:
    """Takes a share of a card, of one in mode `mig` an instance, and says what it is."""
    if card.mode == "mig":
        found = place_instance(card.profiles, card.slices, memory)
        assert found is not None
        memory, cores = found[0].memory >> 20, found[0].cores
        card.slices |= frozenset(range(found[1], found[1] + found[2]))
    card.used_slots += 1
    card.used_memory += memory
    card.used_cores += cores
    return card.uuid, memory, cores

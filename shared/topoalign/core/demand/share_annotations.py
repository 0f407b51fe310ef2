"""
What a pod's annotations say about the shared GPUs that it may get, under HAMi's names.

    hami.io/gpu-scheduler-policy: spread                    binpack, spread, mutex or topology-aware
    hami.io/device-scoring-weights: slot=1,core=1,memory=3  what makes a GPU full, for these two
    nvidia.com/use-gputype: A100,h100                       parts of the names of models; nouse-gputype: not these
    nvidia.com/use-gpuuuid: GPU-5f0c…                       uuids; nouse-gpuuuid: not these
    nvidia.com/vgpu-mode: mig                               GPUs whose containers are kept apart so: hami-core, mig, mps
    nvidia.com/numa-bind: "true"                            all GPUs of a container on one NUMA node

`card_rules` is what topoalign reads in them, and refuses what would have no effect or another one than was meant: a word
that is no policy, a list with nothing in it, a uuid that is none. Where HAMi's rules choose the GPUs, several policies may
stand with commas in between, `numa` among them. HAMi's own reading passes over these (`read_as_hami`);
of what is not refused both make the same. They are about GPUs in slots alone, so a pod that asks for none may say there
what it likes.

Source: HAMi 4707fb02, CheckType, CheckUUID and the scheduler's policies (spec hami.md 2.3 to 2.6).
"""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache

import msgspec

from topoalign.core.demand.card_rules import EQUAL_WEIGHTS, CardOrder, CardRules, Selection, Weights
from topoalign.core.demand.field_paths import in_manifest
from topoalign.core.demand.gangs import path
from topoalign.core.demand.go_text import is_true, parse_bool, parse_int
from topoalign.core.demand.hami_names import (
    GPU_POLICY,
    MODES,
    NO_USE_TYPE,
    NO_USE_UUID,
    NUMA_BIND,
    SCORING_WEIGHTS,
    USE_TYPE,
    USE_UUID,
    VGPU_MODE,
)
from topoalign.core.deviceshare import annotations as joint
from topoalign.core.model.errors import InvalidField, NoFit, quoted


class InvalidShare(NoFit):
    """Raised for amounts of a GPU that cannot be meant."""

    code = "InvalidShare"


CHOOSING = (GPU_POLICY, SCORING_WEIGHTS, USE_TYPE, NO_USE_TYPE, USE_UUID, NO_USE_UUID, VGPU_MODE, NUMA_BIND)
"""The annotations that `card_rules` reads."""
MOST_LISTED = 256
"""Entries of a list, which are compared with each GPU of each node."""
LONGEST_ENTRY = 100
UUID = re.compile(r"GPU-[0-9A-Za-z-]+")
"""The form of a GPU's id: as NVIDIA writes them, and `GPU-<index>` of a described machine."""
MUTEX, NUMA = "mutex", "numa"
ORDERS = (CardOrder.BINPACK, CardOrder.SPREAD)
"""Those for which it matters how full a card is."""
POLICIES = (*ORDERS, MUTEX, CardOrder.TOPOLOGY_AWARE)

Said = tuple[tuple[str, str], ...]
"""The annotations of a pod that choose its cards, unread, in the order of `CHOOSING`."""


def said_of_cards(annotations: Mapping[str, str]) -> Said:
    """What a pod says about its cards."""
    return tuple((key, annotations[key]) for key in CHOOSING if key in annotations)


def lists_said(said: Said, *keys: str) -> str:
    """The paths of those of these annotations that a pod has."""
    return " and ".join(path(key) for key, _ in said if key in keys)


@lru_cache(maxsize=256)
def card_rules(said: Said, *, as_hami: bool = False) -> CardRules:
    """
    The rules by which a pod gets its cards; without annotations ANY_CARD. `as_hami`: HAMi's rules choose them, which know
    lists of policies as well, and spread where none is named. Raises InvalidShare for what cannot be meant, with the path of
    the annotation.
    """
    found = dict(said)
    policy = found.get(GPU_POLICY)
    several = hami_policies(policy) if as_hami else lone_policy(policy)
    order = CardOrder.BEST_FIT
    if policy is not None and policy != MUTEX and not as_hami:
        order = CardOrder(policy)
    check_lists(found)
    check_mode(found)
    check_numa_bind(found)
    check_weights(found, weighs=is_weighed(several) if as_hami else order in ORDERS)
    rules = read_as_hami(found)
    return msgspec.structs.replace(rules, order=order, hami=rules.hami if as_hami else "")


def read_as_hami(annotations: Mapping[str, str], policy: str = CardOrder.SPREAD.value) -> CardRules:
    """
    The rules in annotations as HAMi reads them, which refuses nothing but weights that are none, by InvalidField. `policy`:
    what counts where they name none.
    """
    policy, weights = annotations.get(GPU_POLICY, policy), annotations.get(SCORING_WEIGHTS)
    return CardRules(
        types=type_selection(annotations),
        uuids=uuid_selection(annotations),
        mode=annotations.get(VGPU_MODE),
        mutex=MUTEX in words(policy),
        numa_bind=is_true(annotations.get(NUMA_BIND)),
        weights=EQUAL_WEIGHTS if weights is None else read_weights(weights),
        hami=policy,
    )


def lone_policy(policy: str | None) -> tuple[str, ...]:
    """The policy that is named, if one is. Raises InvalidShare for a word that is none."""
    if policy is not None and policy not in POLICIES:
        raise invalid(
            GPU_POLICY, f"{quoted([policy])} is no policy", f"write one of {', '.join(POLICIES)}, or leave it out"
        )
    return () if policy is None else (policy,)


def hami_policies(policy: str | None) -> tuple[str, ...]:
    """The policies that are named with commas in between. Raises InvalidShare for words that HAMi reads as `spread`."""
    several = () if policy is None else words(policy)
    if wrong := [each for each in several if each not in (*POLICIES, NUMA)]:
        known = ", ".join((*POLICIES, NUMA))
        raise invalid(GPU_POLICY, f"{quoted(wrong[:3])}: no policy", f"write some of {known}, or leave it out")
    return several


def is_weighed(policies: tuple[str, ...]) -> bool:
    """Whether HAMi looks at how full a card is: not where it goes by NUMA nodes, or by what is unused, alone."""
    named = {*policies}
    return not named.isdisjoint(ORDERS) or (NUMA not in named and named != {MUTEX})


def check_mode(found: Mapping[str, str]) -> None:
    """Raises InvalidShare for a text that names no mode."""
    text = found.get(VGPU_MODE)
    if text is not None and not any(mode in text for mode in MODES):
        raise invalid(VGPU_MODE, f"{quoted([text])} is no mode", f"write one of {', '.join(MODES)}, or leave it out")


def check_numa_bind(found: Mapping[str, str]) -> None:
    """Raises InvalidShare for what is no truth value."""
    text = found.get(NUMA_BIND)
    if text is not None:
        try:
            parse_bool(text)
        except ValueError as error:
            raise invalid(
                NUMA_BIND, f"{quoted([text])} is neither true nor false", 'write "true" or "false"'
            ) from error


def check_weights(found: Mapping[str, str], *, weighs: bool) -> None:
    """Raises InvalidShare for weights that are none, and where they do not matter. `weighs`: whether they do."""
    if (text := found.get(SCORING_WEIGHTS)) is None:
        return
    weights_meant(text)
    if not weighs:
        raise invalid(
            SCORING_WEIGHTS,
            f"has an effect with {' and '.join(ORDERS)} alone",
            f"add {GPU_POLICY}: {CardOrder.BINPACK}, or leave it out",
        )


def weights_meant(text: str) -> Weights:
    """`read_weights`; raises InvalidShare."""
    try:
        return read_weights(text)
    except InvalidField as error:
        told = in_manifest(error)
        raise InvalidShare(told.finding, told.remedy) from error


def check_lists(found: Mapping[str, str]) -> None:
    """Raises InvalidShare for lists with entries that are none, and for those of which one leaves nothing of the other."""
    for key in (USE_TYPE, NO_USE_TYPE):
        check_entries(found, key, "parts of the names of models, with commas in between: A100,H100")
    for key in (USE_UUID, NO_USE_UUID):
        check_uuids(found, key)
    check_something_is_left(USE_TYPE, type_selection(found), lambda part, model: part.upper() in model.upper())
    check_something_is_left(USE_UUID, uuid_selection(found), str.__eq__)


def check_uuids(found: Mapping[str, str], key: str) -> None:
    """Raises InvalidShare for entries of a list that are no uuids."""
    remedy = "uuids of GPUs as `topoalign gpu list` shows them, with commas in between"
    check_entries(found, key, remedy)
    if wrong := [each for each in listed(found, key) or () if not UUID.fullmatch(each)]:
        raise invalid(key, f"{quoted(wrong[:3])}: no uuid of a GPU", f"write {remedy}")


def check_entries(found: Mapping[str, str], key: str, remedy: str) -> None:
    """Raises InvalidShare where an entry of a list is empty, or they are too many."""
    if key not in found:
        return
    several = words(found[key])
    if not all(several):
        empty = "an empty list" if not any(several) else "an entry of the list is empty"
        raise invalid(key, empty, f"leave it out, or write {remedy}")
    if len(several) > MOST_LISTED or max(map(len, several)) > LONGEST_ENTRY:
        limit = f"more than {MOST_LISTED} entries, or one of more than {LONGEST_ENTRY} characters"
        raise invalid(key, limit, f"write {remedy}")


def check_something_is_left(key: str, selection: Selection, excludes: Callable[[str, str], bool]) -> None:
    """Raises InvalidShare where all that is wanted is unwanted, too. `excludes`: whether the first keeps off the second."""
    wanted, unwanted = selection.wanted or (), selection.unwanted or ()
    if wanted and all(any(excludes(no, yes) for no in unwanted) for yes in wanted):
        opposite = NO_USE_TYPE if key == USE_TYPE else NO_USE_UUID
        raise invalid(key, f"{opposite} leaves nothing of it", "take what is wanted out of one of the two")


def invalid(key: str, finding: str, remedy: str) -> InvalidShare:
    """The refusal of an annotation."""
    return InvalidShare(f"{path(key)}: {finding}", remedy)


def type_selection(annotations: Mapping[str, str]) -> Selection:
    """Which models a pod accepts, as HAMi reads it."""
    return Selection(listed(annotations, USE_TYPE), listed(annotations, NO_USE_TYPE))


def uuid_selection(annotations: Mapping[str, str]) -> Selection:
    """Which uuids a pod accepts, as HAMi reads it."""
    return Selection(listed(annotations, USE_UUID), listed(annotations, NO_USE_UUID))


def listed(annotations: Mapping[str, str], key: str) -> tuple[str, ...] | None:
    """A list as HAMi reads it: one that is empty or blank is none, and one that has only commas matches nothing."""
    text = annotations.get(key, "")
    return tuple(filter(None, words(text))) if text.strip() else None


def words(text: str) -> tuple[str, ...]:
    """The entries of a list with commas, without blanks around them."""
    return tuple(each.strip() for each in text.split(","))


def read_weights(text: str) -> Weights:
    """
    The weights in an annotation, such as `slot=1,core=1,memory=3`: all three once, in any order, not negative and not
    all 0.

    Raises InvalidField.
    """
    found: dict[str, int] = {}
    for part in words(text):
        name, equals, number = (each.strip() for each in part.partition("="))
        if not equals or name not in Weights.__struct_fields__ or name in found:
            raise invalid_weights()
        try:
            found[name] = parse_int(number, bits=64)
        except ValueError as error:
            raise invalid_weights() from error
    if len(found) != len(Weights.__struct_fields__) or min(found.values()) < 0 or not any(found.values()):
        raise invalid_weights()
    return Weights(**found)


def invalid_weights() -> InvalidField:
    """The refusal of weights."""
    return InvalidField(
        joint.path(SCORING_WEIGHTS),
        "not weights of slots, cores and memory",
        "write all three as integers, one of them above 0: slot=1,core=1,memory=3",
    )

"""
How HAMi reads a container's amounts as text, for its case files; services read manifests, and refuse what cannot be meant.

HAMi takes only what Kubernetes keeps as a plain integer. Where that fails for the number of cards or their memory, or where
there is too much memory, it takes the container for one that asks for nothing: `nvidia.com/gpu: 1` with
`nvidia.com/gpumem: 16.0Gi` is no request.

Source: HAMi 4707fb02, GenerateResourceRequests; k8s.io/apimachinery, Quantity.AsInt64.
"""

import re
from collections.abc import Mapping

from topoalign.core.demand.card_requests import NO_DEFAULTS, CardRequest, Defaults, card_request
from topoalign.core.model.ids import GPU, ResourceName
from topoalign.core.model.topology.offers import Slots
from topoalign.kubelet.files.quantities import exact

Amounts = Mapping[ResourceName, int | str]
"""Quantities as in a manifest."""

NAMES = Slots()
LARGEST_MEMORY = (1 << 31) - 1
"""MiB."""
FORM = re.compile(r"[+-]?[0-9]*(?:\.(?P<places>[0-9]*))?(?:[eE](?P<exponent>[+-]?[0-9]+)|(?P<suffix>.*))")
DECIMAL_PLACES = {"": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}


def read_request(limits: Amounts, requests: Amounts, defaults: Defaults = NO_DEFAULTS) -> CardRequest:
    """What HAMi takes a container to ask for. Other amounts that are no plain integers count as not said."""
    read = [{name: plain_integer(said) for name, said in each.items()} for each in (limits, requests)]
    first = {**read[1], **read[0]}
    memory = first.get(NAMES.memory, 0)
    if first.get(GPU) is None or memory is None:
        return CardRequest()
    if not 0 <= memory <= LARGEST_MEMORY // max(defaults.memory_factor, 1):
        return CardRequest()
    said, asked = (
        {name: value for name, value in each.items() if value is not None and first[name] is not None} for each in read
    )
    return card_request(GPU, NAMES, said, asked, defaults)


def plain_integer(amount: int | str) -> int | None:
    """
    The value of a quantity that Kubernetes keeps as a plain integer; None for every other.

    `64Gi`, `2k` and `1.5k` are plain. `16.0Gi` is not, for it has a point before a binary suffix, and neither are
    `2000m` and `2.0`, whose last place is below one.
    """
    if isinstance(amount, int):
        return amount
    value, form = exact(amount.lstrip("+-")), FORM.fullmatch(amount)
    if value is None or form is None or value.denominator != 1:
        return None
    places, suffix = len(form["places"] or ""), form["suffix"] or ""
    shift = int(form["exponent"] or 0) or DECIMAL_PLACES.get(suffix, 0 if suffix.endswith("i") else -1)
    if shift < places:
        return None
    return -int(value) if amount.startswith("-") else int(value)

"""
Over how many GPUs the units of a container are spread, by an annotation of its pod.

    topoalign.io/cards: "2"

It holds for every container of the pod that asks for units: 60 of computing time and 40 blocks are then 30 and 20 of each of
two GPUs. It is about units alone. How many GPUs a container has slots of, it says by their number, and whole GPUs by 100 of
computing time each. Amounts that are no equal parts are refused, and not rounded.
"""

import re
from collections.abc import Mapping

from topoalign.core.demand.gangs import path
from topoalign.core.demand.share_annotations import InvalidShare
from topoalign.core.demand.units import Share, UnitFields
from topoalign.core.model.errors import InvalidField, quoted
from topoalign.core.model.requests import CARDS

NUMBER = re.compile(r"[1-9][0-9]{0,2}")


def cards_said(annotations: Mapping[str, str]) -> int | None:
    """Over how many GPUs, from 1 on; None: nothing is said. Raises InvalidField for what is no such number."""
    text = annotations.get(CARDS)
    if text is None:
        return None
    if not NUMBER.fullmatch(text):
        raise InvalidField(
            path(CARDS),
            f"{quoted([text])} is not a number of GPUs",
            "write over how many GPUs the units of each container are spread, 1 to 999",
        )
    return int(text)


def check_cards(share: Share, fields: UnitFields) -> None:
    """
    Raises InvalidShare for a share that is said to be spread over so many GPUs and cannot be: it is of whole ones, or does
    not divide evenly.
    """
    if share.whole:
        raise InvalidShare(
            f"{path(CARDS)}: beside {fields.cores}: {share.cores}, which says already how many GPUs it is, whole ones",
            "leave it out, or ask for less than 100 of computing time, which is spread",
        )
    for field, amount in ((fields.cores, share.cores), (fields.memory, share.blocks)):
        if amount % share.cards:
            raise InvalidShare(
                f"{field}: {amount} units do not divide into {share.cards} equal parts, as {path(CARDS)} says",
                f"ask for a multiple of {share.cards}, or for another number of GPUs",
            )

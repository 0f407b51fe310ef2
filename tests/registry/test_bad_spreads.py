"""Units that cannot be spread as a pod says are refused in the same words by webhook, filter and what-if, with the field."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from bad_share_support import (
    MOST,
    RULES,
    SECOND,
    cluster,
    filtered,
    pod,
    said,
    units,
    what_if,
)
from decision_support import container, machine, node
from decision_support import pod as request
from scheduling_support import serving
from slot_support import in_slots
from unit_support import CORES, DGX, MEMORY, admitted, in_units, refused, spread
from view_support import Says, tell_all

from topoalign.core.model.ids import ResourceName
from topoalign.core.model.requests import GPU_COUNT
from topoalign.core.sharing.pod_checks import check_pod
from topoalign.registry.scheduling.webhook.reviews import Webhook

pytestmark = pytest.mark.anyio

GOOD = units("20", "16")
ANNOTATION = f"metadata.annotations[{GPU_COUNT}]"
NO_NUMBER = "is not a number of GPUs; write over how many GPUs the units of each container are spread, 1 to 999"
WHOLE = "leave it out, or ask for less than 100 of computing time, which is spread"
NO_UNITS = (
    f"{ANNOTATION}: spreads units of GPUs, and no container asks for any; leave it out, or ask for {CORES} and {MEMORY}; "
    "the number of whole GPUs or of slots is already the number of GPUs"
)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"{text} GPUs": (pod(GOOD, {GPU_COUNT: text}), f"{ANNOTATION}: '{text}' {NO_NUMBER}")
        for text in ("0", "-1", "1.5", "x", "", "1000", '{"main": 2}')
    },
    "more GPUs than a node has": (
        pod(units("90", "90"), {GPU_COUNT: "9"}),
        f"{ANNOTATION}: 9 GPUs are asked for, and 8 of the node may be chosen; ask for fewer GPUs, or choose a node "
        "that has more",
    ),
    "computing time that does not divide": (
        pod(units("61", "40"), {GPU_COUNT: "2"}),
        f"{SECOND}[{CORES}]: 61 units do not divide into 2 equal parts, as {ANNOTATION} asks; ask for a multiple of 2, or "
        "for another number of GPUs",
    ),
    "memory that does not divide": (
        pod(units("60", "40"), {GPU_COUNT: "3"}, "initContainers"),
        f"spec.initContainers[0].resources.limits[{MEMORY}]: 40 units do not divide into 3 equal parts, as {ANNOTATION} "
        "asks; ask for a multiple of 3, or for another number of GPUs",
    ),
    **{
        f"{cores} cores over {cards}": (
            pod(units(cores), {GPU_COUNT: cards}),
            f"{ANNOTATION} is given with {SECOND}[{CORES}]: {cores}, which already means whole GPUs; {WHOLE}",
        )
        for cores, cards in (("100", "1"), ("100", "2"), ("200", "2"))
    },
    "memory of one of two": (
        pod(units("60", f"{2 * MOST + 2}"), {GPU_COUNT: "2"}),
        f"{SECOND}[{MEMORY}]: {MOST + 1} blocks of memory are asked for of one GPU, and a GPU has "
        f"{MOST} blocks of memory; "
        "ask for less memory, for memory of several GPUs, or choose a node with larger GPUs",
    ),
    "whole GPUs": (pod({"nvidia.com/gpu": "2"}, {GPU_COUNT: "2"}), NO_UNITS),
    "slots": (pod({"nvidia.com/gpu": "2", "nvidia.com/gpumem": "9"}, {GPU_COUNT: "2"}), NO_UNITS),
}


async def test_three_entries_refuse_a_spread_in_the_same_words(tmp_path: Path) -> None:
    both = cluster()
    slots = Says("slots", in_slots(DGX), RULES)
    tell_all(both.cluster, slots.all())
    both.view.renew()
    webhook = Webhook("", lambda resource: resource in both.view.offers.names, both.scheduler.checks.check)
    async with (
        serving(both.scheduler, more=webhook.routes()) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        for name, (given, text) in BAD.items():
            assert text == await said(http, given, "/webhook"), name
            assert {text} == await filtered(http, given), name
            assert text == what_if(both, given, tmp_path), name
        good = pod(GOOD, {GPU_COUNT: "2"})
        assert "" == await said(http, good, "/webhook") == what_if(both, good, tmp_path)


def test_where_nodes_are_not_known_units_may_have_any_name() -> None:
    """As for the command, which then asks a node."""
    limits = {ResourceName("example.com/time"): 20, ResourceName("example.com/bytes"): 16}
    named = request(container(others={str(name): amount for name, amount in limits.items()}))

    check_pod(spread(named, 2))
    admitted(node(in_units(DGX, 8, *limits)), spread(named, 2), RULES)
    assert "InvalidShare" == refused(node(machine()), spread(request(container(gpus=1)), 2), RULES).code

"""Koordinator's annotations on a pod with units alone are refused in the same words by webhook, filter and what-if."""

from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from bad_share_support import cluster, filtered, pod, requested, said, units, what_if
from scheduling_support import serving

from topoalign.core.deviceshare.koordinator_names import (
    ANNOTATIONS,
    HINT_ANNOTATION,
    JOINT_ANNOTATION,
    PARTITION_ANNOTATION,
)
from topoalign.core.model.errors import InvalidField
from topoalign.registry.scheduling.webhook.reviews import Webhook

pytestmark = pytest.mark.anyio

GOOD = units("20", "16")
TEXTS = {
    "no JSON": (HINT_ANNOTATION, "{"),
    "an unknown scope": (HINT_ANNOTATION, '{"gpu": {"requiredTopologyScope": "Moon"}}'),
    "a scope": (HINT_ANNOTATION, '{"gpu": {"requiredTopologyScope": "PCIe"}}'),
    "nothing": (HINT_ANNOTATION, "{}"),
    "two types": (JOINT_ANNOTATION, '{"deviceTypes": ["gpu", "rdma"], "requiredScope": "SamePCIe"}'),
    "a partition": (PARTITION_ANNOTATION, '{"allocatePolicy": "Restricted"}'),
}
REFUSED = (
    "metadata.annotations[{}]: has no effect on units of GPUs, which go where least is left; leave it out; it is about "
    "whole GPUs (nvidia.com/gpu) and NICs (topoalign.io/nic), and no container asks for any"
)


def beside(text: str, **asked: str) -> dict[str, Any]:
    """A pod with units in its second container, whose first one asks for something else as well."""
    given = pod(GOOD, {HINT_ANNOTATION: text})
    given["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "0", **asked}}
    return given


async def test_three_entries_refuse_annotations_that_units_have_no_use_for(tmp_path: Path) -> None:
    """Whatever they say, and in init containers as well; none of no GPUs is none."""
    it = cluster()
    webhook = Webhook("", lambda resource: resource in it.view.offers.names, it.scheduler.checks.check)
    pods = {
        **{name: (key, pod(GOOD, {key: text})) for name, (key, text) in TEXTS.items()},
        "an init container": (HINT_ANNOTATION, pod(GOOD, {HINT_ANNOTATION: "{}"}, "initContainers")),
        "no GPU beside": (HINT_ANNOTATION, beside("{}")),
    }
    async with (
        serving(it.scheduler, more=webhook.routes()) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        for name, (key, given) in pods.items():
            text = REFUSED.format(key)
            for entry in ("/webhook", "/webhook/validate"):
                assert text == await said(http, given, entry), name
            assert {text} == await filtered(http, given), name
            assert text == what_if(it, given, tmp_path), name

    assert {*ANNOTATIONS} == {key for key, _ in pods.values()}


def test_beside_what_they_are_about_their_content_is_checked(tmp_path: Path) -> None:
    """A NIC of another container is chosen by them."""
    check = cluster().scheduler.checks.check
    good = requested(beside('{"rdma": {}}', **{"topoalign.io/nic": "1"}), tmp_path)
    check(good)
    bad = msgspec.structs.replace(good, annotations={HINT_ANNOTATION: '{"gpu": {"requiredTopologyScope": "Moon"}}'})

    with pytest.raises(
        InvalidField, match=r"^metadata\.annotations\[.*\]\.gpu\.requiredTopologyScope: 'Moon' is not known"
    ):
        check(bad)

"""Koordinator's annotations on a pod with units are checked as on any other pod."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from bad_share_support import cluster, pod, requested, units

from topoalign.core.deviceshare.koordinator_names import (
    HINT_ANNOTATION,
)
from topoalign.core.model.errors import InvalidField

pytestmark = pytest.mark.anyio

GOOD = units("20", "16")


def beside(text: str, **asked: str) -> dict[str, Any]:
    """A pod with units in its second container, whose first one asks for something else as well."""
    given = pod(GOOD, {HINT_ANNOTATION: text})
    given["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "0", **asked}}
    return given


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

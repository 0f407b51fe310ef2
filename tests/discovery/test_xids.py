"""Which XIDs matter, as the configuration and NVIDIA's variables have it."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from topoalign.core.model.errors import InvalidField
from topoalign.discovery.xids import (
    IGNORED_XIDS,
    XID_CATALOG,
    Action,
    Severity,
    XidRules,
    describe_xid,
    xid_rules,
)
from topoalign.plugin_config.configuration import Health

DOC = Path(__file__).parents[2] / "docs" / "health.md"


def rules(**environment: str) -> XidRules:
    return xid_rules(Health().ignored_xids, environment)


def numbers(text: str) -> list[int]:
    """`8 39-41` is 8, 39, 40, 41."""
    parts = [part.partition("-") for part in text.split()]
    return [xid for first, _, last in parts for xid in range(int(first), int(last or first) + 1)]


RESTART_APP = numbers("8 11 13 25 31 32 39-41 60 68-72 75-77 80 82-86 88 89 94 96-105 126-135 139")
IGNORE = numbers("14 37 38 43 44 63 66 67 92 93 106-108 121 137 141 152 153 157 160 161")
RESET = numbers("46 48 62 64 74 95 109 110 119 120 136 140 143 155 156 158")
DRIVER_REPORTS = numbers("144-150 154 159")
"""XIDs by the immediate action of NVIDIA's catalogue; the last ones are linked to XID 154."""
NVIDIAS_PLUGIN = [13, 31, 43, 45, 68, 109]
"""What NVIDIA's device plugin v0.20.0 ignores."""


def severities(xids: Iterable[int], **environment: str) -> set[Severity]:
    return {rules(**environment).severity(xid) for xid in xids}


def test_each_xid_has_the_effect_that_nvidias_catalogue_asks_for() -> None:
    """An application that is restarted leaves its GPU healthy; what needs a reset, a reboot or the vendor lasts."""
    assert {Severity.IGNORED} == severities([*RESTART_APP, *IGNORE, 45, 162, 163, 164, 165])
    assert {Severity.LASTING} == severities([*RESET, 79, 151, 54, 78, 142])
    assert {Severity.READ} == severities([*DRIVER_REPORTS, 171, 172])


def test_no_xid_of_the_catalogue_is_without_a_class() -> None:
    """The others have no action there: `unused`, or nothing is said. They pass, as those that are not known."""
    known = {*RESTART_APP, *IGNORE, *RESET, *DRIVER_REPORTS, 45, 54, 78, 79, 142, 151, *range(162, 166), 171, 172}

    assert known == XID_CATALOG.keys()
    assert {Severity.PASSING} == severities({*range(1, 173)} - known)
    assert {Severity.PASSING} == severities([0, 173, 999, 4_000_000])


def test_of_the_xids_that_nvidias_plugin_ignores_one_needs_a_reset() -> None:
    assert {109} == {*NVIDIAS_PLUGIN} - IGNORED_XIDS
    assert {Severity.IGNORED} == severities([109], DP_DISABLE_HEALTHCHECKS="109")


def test_an_xid_that_is_not_ignored_any_more_has_the_effect_of_its_class() -> None:
    """One of a program takes the GPU out of use for a while."""
    configured = xid_rules((79,), {})

    assert [Severity.PASSING] * 2 == [configured.severity(xid) for xid in (13, 94)]
    assert [Severity.IGNORED, Severity.LASTING] == [configured.severity(xid) for xid in (79, 109)]


@pytest.mark.parametrize(
    ("disable", "enable", "ignored"),
    [
        ("", "", {13}),
        ("79, 999", "", {13, 79, 999}),
        ("all", "", {13, 48, 79, 999}),
        ("XIDS", "", {13, 48, 79, 999}),
        ("all", "79", {13, 48, 999}),
        ("", "13", set()),
        ("999", "999,13", set()),
        ("all", "all", {13}),
    ],
)
def test_nvidias_variables_add_xids_to_ignore_and_xids_to_heed(disable: str, enable: str, ignored: set[int]) -> None:
    """k8s-device-plugin v0.20.0: what is enabled goes before what is disabled, listed or not."""
    asked = rules(DP_DISABLE_HEALTHCHECKS=disable, DP_ENABLE_HEALTHCHECKS=enable)

    assert ignored == {xid for xid in (13, 48, 79, 999) if asked.severity(xid) is Severity.IGNORED}


@pytest.mark.parametrize("text", ["ecc", "13;31", "-1", "1e3", "٣", "\x1b[31m"])
def test_a_variable_that_is_no_list_of_xids_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidField, match="DP_DISABLE_HEALTHCHECKS") as caught:
        rules(DP_DISABLE_HEALTHCHECKS=text)
    assert caught.value.finding.isprintable()


def test_the_page_on_health_lists_what_the_code_has() -> None:
    """Each row of its table has a meaning, XIDs (`99-105` is a range) and an action, in the words of the code."""
    rows = [line.strip("| ").split(" | ") for line in DOC.read_text().splitlines() if line.startswith("| ")]
    actions = {each.value for each in Action}
    listed = {
        xid: (meaning, Action(action))
        for meaning, xids, action, *_ in (row for row in rows if len(row) > 2 and row[2] in actions)
        for xid in numbers(xids.replace(",", ""))
    }

    assert dict(XID_CATALOG) == listed


def test_a_known_xid_is_shown_with_its_meaning_and_what_to_do() -> None:
    assert ("XID 79 (the GPU has fallen off the bus: reboot the node)", "XID 777") == (
        describe_xid(79),
        describe_xid(777),
    )

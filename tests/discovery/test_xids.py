"""Which XIDs matter, as the configuration and NVIDIA's variables have it."""

from pathlib import Path

import pytest

from topoalign.core.model.errors import InvalidField
from topoalign.discovery.xids import APPLICATION_XIDS, LASTING_XIDS, Gravity, XidRules, worded, xid_rules
from topoalign.plugin_config.configuration import Health

DOC = Path(__file__).parents[2] / "docs" / "health.md"


def rules(**environment: str) -> XidRules:
    return xid_rules(Health().ignored_xids, environment)


def test_program_errors_are_ignored_and_are_those_of_nvidias_plugin() -> None:
    """XIDs of programs are ignored by default, and are those that NVIDIA's plugin ignores."""
    assert (13, 31, 43, 45, 68, 109) == APPLICATION_XIDS == Health().ignored_xids
    assert {Gravity.IGNORED} == {rules().gravity(xid) for xid in APPLICATION_XIDS}


def test_what_takes_a_reset_lasts_and_everything_else_passes() -> None:
    assert {Gravity.LASTING} == {rules().gravity(xid) for xid in LASTING_XIDS}
    assert {48, 74, 79, 95} <= LASTING_XIDS.keys()
    assert [Gravity.PASSING] * 4 == [rules().gravity(xid) for xid in (63, 94, 999, 4_000_000)]
    assert Gravity.LOOK == rules().gravity(154)


@pytest.mark.parametrize(
    ("disable", "enable", "ignored"),
    [
        ("", "", {13}),
        ("79, 94", "", {13, 79, 94}),
        ("all", "", {13, 48, 79, 94}),
        ("XIDS", "", {13, 48, 79, 94}),
        ("all", "79", {13, 48, 94}),
        ("", "13", set()),
        ("94", "94,13", set()),
        ("all", "all", {13}),
    ],
)
def test_nvidias_variables_add_xids_to_ignore_and_xids_to_heed(disable: str, enable: str, ignored: set[int]) -> None:
    """k8s-device-plugin v0.20.0: what is enabled goes before what is disabled, listed or not."""
    asked = rules(DP_DISABLE_HEALTHCHECKS=disable, DP_ENABLE_HEALTHCHECKS=enable)

    assert ignored == {xid for xid in (13, 48, 79, 94) if asked.gravity(xid) is Gravity.IGNORED}


@pytest.mark.parametrize("text", ["ecc", "13;31", "-1", "1e3", "٣", "\x1b[31m"])
def test_a_variable_that_is_no_list_of_xids_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidField, match="DP_DISABLE_HEALTHCHECKS") as caught:
        rules(DP_DISABLE_HEALTHCHECKS=text)
    assert caught.value.finding.isprintable()


def test_the_page_on_health_lists_what_the_code_has() -> None:
    rows = [line.split(" | ") for line in DOC.read_text().splitlines() if line.startswith("| ")]
    lasting = {int(row[0].strip("| ")): row[1] for row in rows if row[-1].startswith("out of use until a reset")}
    ignored = next(row[0].strip("| ") for row in rows if row[-1].startswith("nothing, it is as good"))

    assert LASTING_XIDS == lasting
    assert ", ".join(map(str, APPLICATION_XIDS)) == ignored


def test_an_xid_is_shown_with_its_meaning_where_that_is_known() -> None:
    assert ("XID 79 (the GPU has fallen off the bus)", "XID 777") == (worded(79), worded(777))

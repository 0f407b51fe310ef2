"""Limits of wall time end what hangs, and no test that lives by a clock of its own has one."""

import pytest
from conftest import lives_by_virtual_time


def limit(item: pytest.Item) -> float:
    """Seconds that pytest-timeout gives this test; 0: no limit."""
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0] if marker is not None else item.config.getini("timeout"))


def test_only_tests_of_wall_time_have_a_limit_and_no_short_one(
    request: pytest.FixtureRequest,
) -> None:
    """No test of virtual time has a limit of wall time, and no other test a short one."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    virtual = [item for item in items if lives_by_virtual_time(item)]

    assert {0.0} >= {limit(item) for item in virtual}
    assert [] == [item.nodeid for item in items if item not in virtual and 0 < limit(item) < 300]

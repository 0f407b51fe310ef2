"""The one back-off: a wait that doubles with each failure, up to the longest, for any number of failures."""

import pytest

from topoalign.runtime.clock import backoff_seconds


@pytest.mark.parametrize(
    ("failures", "first", "longest", "seconds"),
    [
        (0, 1.0, 16.0, 1.0),  # nothing has failed yet
        (1, 1.0, 16.0, 1.0),
        (2, 1.0, 16.0, 2.0),
        (4, 1.0, 16.0, 8.0),
        (5, 1.0, 16.0, 16.0),
        (6, 1.0, 16.0, 16.0),
        (5, 0.2, 5.0, 3.2),
        (6, 0.2, 5.0, 5.0),
        (1, 7.0, 5.0, 5.0),  # the longest bounds the first as well
        (9, 0.0, 5.0, 0.0),
        (1, 300.0, 3600.0, 300.0),
        (3, 300.0, 3600.0, 1200.0),
        (1_000_000, 0.02, 2.0, 2.0),  # a power of two that is no float any more
    ],
)
def test_the_wait_doubles_up_to_the_longest(failures: int, first: float, longest: float, seconds: float) -> None:
    """The wait after so many failures in a row is the first one, doubled with each further failure, up to the longest."""
    assert seconds == pytest.approx(backoff_seconds(failures, first, longest))

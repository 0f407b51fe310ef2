"""
How long to wait after failures in a row: a first pause that doubles with each failure, up to a longest one.

With a first pause of 0.2 s and a longest of 5 s the waits are 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5 ... seconds. The caller counts
its failures and sleeps on its own clock. One that spreads its tries, so that many nodes do not try at the same moment,
multiplies the seconds by a random factor of its own.
"""

MOST_DOUBLINGS = 64
"""More make no wait longer, and beyond 1,023 the power of two is no float any more."""


def backoff_seconds(failures: int, first: float, longest: float) -> float:
    """
    Seconds to wait after this many failures in a row; after none as after one.

    `first` and `longest` are seconds as well, `longest` bounds every wait, also the first.
    """
    doublings = min(max(failures - 1, 0), MOST_DOUBLINGS)
    return min(longest, first * 2.0**doublings)

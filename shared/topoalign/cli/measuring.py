"""Measures the duration of a call, for benchmarks."""

import time
from collections.abc import Callable, Sequence
from statistics import quantiles


def measure_calls(case: str, call: Callable[[], object], n: int = 300, warm: int = 5) -> dict[str, object]:
    """Calls `n` times after a few calls that do not count, and says how long half and 99 of 100 calls take at most."""
    for _ in range(warm):
        call()
    milliseconds = []
    for _ in range(n):
        began = time.perf_counter()
        call()
        milliseconds.append((time.perf_counter() - began) * 1000)
    return summarize_times(case, milliseconds)


def summarize_times(case: str, milliseconds: Sequence[float]) -> dict[str, object]:
    """How long half of these took at most, and 99 of 100. At least two."""
    cuts = quantiles(milliseconds, n=100, method="inclusive")
    return {"case": case, "n": len(milliseconds), "p50_ms": round(cuts[49], 4), "p99_ms": round(cuts[98], 4)}

"""Measures the duration of a call, for benchmarks."""

import time
from collections.abc import Callable, Sequence
from statistics import quantiles


def measure_calls(case: str, call: Callable[[], object], n: int = 300, warm: int = 5) -> dict[str, object]:
    """Calls `n` times after some calls to warm up. Returns the median and the 99th percentile of the times."""
    for _ in range(warm):
        call()
    milliseconds = []
    for _ in range(n):
        began = time.perf_counter()
        call()
        milliseconds.append((time.perf_counter() - began) * 1000)
    return summarize_times(case, milliseconds)


def summarize_times(case: str, milliseconds: Sequence[float]) -> dict[str, object]:
    """The median and the 99th percentile of at least two times."""
    cuts = quantiles(milliseconds, n=100, method="inclusive")
    return {"case": case, "n": len(milliseconds), "p50_ms": round(cuts[49], 4), "p99_ms": round(cuts[98], 4)}

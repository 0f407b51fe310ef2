"""
The time of reading a machine, and of refusing ten megabytes of several kinds of noise.

Every kind runs in a process of its own, whose peak memory is that of the case, interpreter included.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

NOISE = 10_000_000
"""Characters."""
REPETITIONS = 5

KINDS: dict[str, Callable[[], str]] = {
    "one-line": lambda: "x" * NOISE,
    "short-lines": lambda: "ab\n" * (NOISE // 3),
    "tabs": lambda: "\t" * NOISE,
    "digits": lambda: "0123456789-,\n" * (NOISE // 13),
    "labels": lambda: "GPU0\t" * (NOISE // 5),
    "label-lines": lambda: "GPU0 is lost\n" * (NOISE // 13),
    "headers": lambda: "\tGPU0\tGPU1\tlost\n" * (NOISE // 16),
    "prefixed-headers": lambda: "".join(f"{chr(97 + i % 26)}{i} \tGPU0\tGPU1\n" for i in range(NOISE // 17)),
    "dotted-prefixes": lambda: (
        f"{'.'.join(['1.1'] * 40)}x GPU0\tGPU1\n" + f"{'.'.join('1' * 60)}y GPU0\t X \tNV1\n" * (NOISE // 135)
    ),
    "blanks-of-a-page": lambda: "<pre>" + " " * NOISE,
    "rows-only": lambda: "GPU0\t X \tSYS\t0-63\t0\n" * (NOISE // 20),
    "after-a-header": lambda: "\tGPU0\tGPU1\n" + "ab\n" * (NOISE // 3),
    "after-a-matrix": lambda: "\tGPU0\nGPU0\t X\n" + "GPU1 ab\n" * (NOISE // 8),
    "terminal-codes": lambda: "\x1b[4m\x1b[0m" * (NOISE // 8),
    "wide-header": lambda: "\t" + "\t".join(f"GPU{i}" for i in range(5000)) + "\n",
}


def cases() -> Iterator[dict[str, object]]:
    """Each kind of noise: milliseconds until it is refused, and the peak memory in MB of the process that did it."""
    for kind in KINDS:
        program = f"from topoalign.tools.bench import parse; parse.measure({kind!r})"
        done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=120)
        p50, p99, peak = (float(word) for word in done.stdout.split())
        case = "nvidia-smi-wide" if kind == "wide-header" else f"nvidia-smi-noise-10mb-{kind}"
        yield {"case": case, "n": REPETITIONS, "p50_ms": p50, "p99_ms": p99, "peak_mb": peak}


def measure(kind: str) -> None:
    """Prints the median and the longest time in milliseconds, and the peak memory of this process in MB."""
    import resource
    from time import perf_counter

    from topoalign.core.model.errors import InvalidMachine
    from topoalign.tools.machine_formats.nvidia_smi import read_pasted_matrix

    text = KINDS[kind]()
    times = []
    for _ in range(REPETITIONS):
        start = perf_counter()
        with suppress(InvalidMachine):
            read_pasted_matrix(text)
        times.append((perf_counter() - start) * 1000)
    times.sort()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(times[len(times) // 2], times[-1], peak)

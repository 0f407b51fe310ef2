"""
`python -m …observed COMMAND`: runs `topoalign COMMAND` and reports the longest callback of its event loop.

Every callback of asyncio is timed by wrapping the one method that runs them. At SIGUSR1 the longest since the last
signal is printed, in milliseconds.
"""

import asyncio
import signal
import time

from topoalign.cli import main

longest = 0.0
run = asyncio.Handle._run


def timed(handle: asyncio.Handle) -> None:
    """Run a callback of the event loop, and keep its duration if it is the longest."""
    global longest
    began = time.perf_counter()
    run(handle)
    longest = max(longest, time.perf_counter() - began)


def tell(*_: object) -> None:
    """Print the longest duration in milliseconds, and start again at zero. A signal handler."""
    global longest
    print(f"{longest * 1000:.3f}", flush=True)
    longest = 0.0


if __name__ == "__main__":
    asyncio.Handle._run = timed  # type: ignore[method-assign,assignment]  # asyncio has no other place to look from
    signal.signal(signal.SIGUSR1, tell)
    main()

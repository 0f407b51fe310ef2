"""A program that hears its signals once ends in order at the first of them."""

import os
import signal

import anyio
import pytest

from topoalign.core.model.errors import BusUnavailable
from topoalign.runtime.shutdown import run_until_signal
from topoalign.testing.manual_clock import all_tasks_blocked


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_what_runs_in_order(number: signal.Signals) -> None:
    ended = []
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup

    async def main() -> None:
        os.kill(os.getpid(), number)
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("main")

    try:
        assert not run_until_signal(main)
        assert ["main"] == ended
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_that_is_ignored_ends_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)

    async def main() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        await all_tasks_blocked()

    try:
        assert run_until_signal(main)
        assert signal.SIG_IGN == signal.getsignal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_error_ends_a_program_as_itself() -> None:
    async def main() -> None:
        raise BusUnavailable("nobody there")

    with pytest.raises(BusUnavailable):
        run_until_signal(main)

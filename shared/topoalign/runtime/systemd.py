"""Notifies systemd, if it requests that, that the process is ready, that it stops, and that its event loop is alive."""

import socket
from collections.abc import Mapping
from contextlib import suppress

import anyio


def notify(environment: Mapping[str, str], state: str) -> None:
    """Sends a state such as `READY=1` to $NOTIFY_SOCKET (sd_notify(3)). Does nothing without it or a listener."""
    address = environment.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.setblocking(False)
        sender.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)


async def keep_watchdog(environment: Mapping[str, str]) -> None:
    """Sends `WATCHDOG=1` twice per $WATCHDOG_USEC: a loop that hangs sends nothing, and systemd restarts the process."""
    microseconds = environment.get("WATCHDOG_USEC", "")
    if not microseconds.isdigit() or int(microseconds) == 0:
        return
    while True:
        notify(environment, "WATCHDOG=1")
        await anyio.sleep(int(microseconds) / 2_000_000)

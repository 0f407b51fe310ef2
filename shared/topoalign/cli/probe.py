"""
`topoalign health` as health checks call it: `health`, `health --live`, `health URL`.

The `topoalign` script calls `quick` before it imports the command line, because a check that runs every few seconds must
be cheap. So this module imports no library, and `topoalign.core.model.errors` only if a check fails. All other forms (help,
mistakes, --json) are left to `topoalign.cli.health`, which gives the same answers.
"""

import os
import sys
from collections.abc import Mapping

from topoalign.runtime.probe import ask

SECONDS = 2.0
"""How long the answer may take. A loaded machine takes tenths of a second; an event loop that is stuck never answers."""
READY = "/readyz"
LIVE = "/livez"
UNAVAILABLE = 69
"""The exit code for a service that is not there, as in `topoalign.cli.errors`, which would import the command line."""
URL_PREFIX = "http://"

Page = tuple[str, int, str]
"""Host, port and path of what is asked."""


def quick(arguments: list[str]) -> int | None:
    """The exit code of a health check; None for any other command line, nothing has been printed then."""
    match arguments:
        case ["health"]:
            page = page_of(os.environ, READY)
        case ["health", "--live"]:
            page = page_of(os.environ, LIVE)
        case ["health", url]:
            page = page_at(url, READY)
        case _:
            return None
    if page is None:
        return None
    ready, lines = check(page)
    print(*lines, sep="\n", file=sys.stdout if ready else sys.stderr, flush=True)
    return 0 if ready else UNAVAILABLE


def page_of(environment: Mapping[str, str], path: str) -> Page | None:
    """The page of the service that these settings configure; None where they name no port."""
    port = port_of(environment.get("TOPOALIGN_HTTP_PORT", ""))
    return None if port is None else (environment.get("TOPOALIGN_HTTP_HOST") or "127.0.0.1", port, path)


def page_at(url: str, path: str) -> Page | None:
    """The page of a URL such as `http://127.0.0.1:8222/healthz`, by default `path`; None for anything else."""
    address, slash, rest = url.removeprefix(URL_PREFIX).partition("/")
    host, _, digits = address.rpartition(":")
    port = port_of(digits)
    if not url.startswith(URL_PREFIX) or not host or port is None or not (url.isascii() and url.isprintable()):
        return None
    return None if " " in url else (host.strip("[]"), port, slash + rest if slash else path)


def port_of(text: str) -> int | None:
    """A port from 1 to 65535; None for any other text."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 and 0 < int(text) < 65_536 else None


def check(page: Page) -> tuple[bool, list[str]]:
    """Whether the page says ready, and what it says in lines that are safe to print."""
    host, port, path = page
    try:
        ready, text = ask(host, port, path, SECONDS)
    except (OSError, ValueError) as error:
        ready = False
        text = str(error)
    if ready and text.isascii() and text.strip().isprintable():  # the usual `ok`
        return True, [text.strip()]
    from topoalign.core.model.errors import clean  # only now: a good answer needs no more than the lines above

    lines = [clean(line, 400) for line in text.splitlines() if line.strip()]
    return ready, lines if ready else [f"http://{host}:{port}{path}: {line}" for line in lines]

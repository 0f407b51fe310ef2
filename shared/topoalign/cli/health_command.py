"""`topoalign health` with all its options. `topoalign.cli.health_check` answers the common forms faster."""

import os

import click

from topoalign.cli import options, output
from topoalign.cli.health_check import LIVE, READY, check_page, find_configured_page, page_at
from topoalign.core.model.errors import InvalidField, Unavailable


class NotReady(Unavailable):
    """
    Raised when a process does not answer, or answers that it is not ready.

    Remedy: Check that the process runs, and read its log.
    """

    def __init__(self, lines: list[str]) -> None:
        super().__init__("; ".join(lines), "check that the process runs, and see its log for the checks that fail")


@click.command()
@click.argument("url", required=False)
@click.option("--live", is_flag=True, help="Check only that the process is alive, not NATS and the kubelet.")
@options.JSON
def health(url: str | None, live: bool, as_json: bool) -> None:
    """
    Check whether a process is ready: the health check of containers.

    The request goes to the service that TOPOALIGN_HTTP_HOST and TOPOALIGN_HTTP_PORT configure, or to an HTTP URL. If the
    answer is not status 200 within two seconds, the exit code is 69, and the checks that fail are printed.

    \b
    Examples:
      topoalign health
      topoalign health --live
      topoalign health http://127.0.0.1:8222/healthz
    """
    path = LIVE if live else READY
    page = page_at(url, path) if url is not None else find_configured_page(os.environ, path)
    if page is None and url is not None:
        raise InvalidField("URL", "it is not http://HOST:PORT/PATH", "give host and port; the path is optional")
    if page is None:
        raise InvalidField(
            "TOPOALIGN_HTTP_PORT", "it is not a port", "set it to the port of the service, or give http://HOST:PORT"
        )
    ready, lines = check_page(page)
    if not ready:
        raise NotReady(lines)
    output.print_json({"ready": True, "lines": lines}) if as_json else output.print_line("\n".join(lines))

"""`topoalign health` with all its options. The common forms are answered faster by `topoalign.cli.probe`."""

import os

import click

from topoalign.cli import output
from topoalign.cli.probe import LIVE, READY, check, page_at, page_of
from topoalign.core.model.errors import InvalidField, Unavailable


class NotReady(Unavailable):
    """A process does not answer, or answers that it is not ready."""

    code = "NotReady"

    def __init__(self, lines: list[str]) -> None:
        super().__init__("; ".join(lines), "check that the process runs, and see its log for the checks that fail")


@click.command()
@click.argument("url", required=False)
@click.option("--live", is_flag=True, help="Check only that the process is alive, not NATS and the kubelet.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
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
    page = page_at(url, path) if url is not None else page_of(os.environ, path)
    if page is None and url is not None:
        raise InvalidField("URL", "it is not http://HOST:PORT/PATH", "give host and port; the path is optional")
    if page is None:
        raise InvalidField(
            "TOPOALIGN_HTTP_PORT", "it is not a port", "set it to the port of the service, or give http://HOST:PORT"
        )
    ready, lines = check(page)
    if not ready:
        raise NotReady(lines)
    output.document({"ready": True, "lines": lines}) if as_json else output.say("\n".join(lines))

"""Runs the server that a kube-scheduler and an API server call: its address, certificates and handlers."""

import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import anyio
import structlog
from anyio import to_thread
from anyio.abc import TaskStatus
from prometheus_client import CollectorRegistry, Histogram

from topoalign.core.model.errors import InvalidField, clean
from topoalign.core.ports import Clock
from topoalign.registry.scheduling.extender.handlers import Extender, make_application
from topoalign.registry.scheduling.filter.scheduler import Scheduler
from topoalign.registry.scheduling.scheduling_api import Bind
from topoalign.registry.scheduling.webhook.reviews import Webhook
from topoalign.registry.settings import RegistrySettings
from topoalign.runtime.context import Context
from topoalign.runtime.http_server import listen_on_port, serve_application

VARIABLE = "TOPOALIGN_SCHEDULER_TLS_DIR"
POLL_SECONDS = 10.0
"""Time between two checks. A kubelet needs up to a minute to update a changed Secret on the node."""
CERTIFICATE = "tls.crt"
KEY = "tls.key"
AUTHORITY = "client-ca.crt"

UTC_TIME = 0x17
DER_VERSION = 0xA0
"""DER tags: a time with a two-digit year, and the optional version of a certificate."""

Files = dict[str, bytes]

log = structlog.get_logger("topoalign.registry.certificates")


class Certificates:
    """
    The certificates of the server: `tls.crt`, `tls.key`, and `client-ca.crt` if clients must present a certificate, too.
    A `ca.crt` is not read: a Secret of cert-manager has one for clients of this address.

    They are read again every few seconds and compared by content, because a Secret is updated by swapping a symbolic link.
    The next handshake uses new files. If new files do not fit together, the old ones stay in use, and readiness reports
    this. An expired certificate stays in use, and readiness reports its date.
    """

    def __init__(self, directory: Path, clock: Clock) -> None:
        """Reads the certificates. Raises InvalidField if they cannot be used."""
        self._directory = directory
        self._clock = clock
        self._trouble: str | None = None
        self.context = context_of(directory, read_files(directory))
        """The TLS context of the server. Each handshake uses the current certificates."""
        self.context.sni_callback = self._choose
        self._use(read_files(directory))

    def trouble(self) -> str | None:
        """Readiness: why clients may refuse the certificate."""
        if self._trouble is not None:
            return self._trouble
        if self._clock.wall() >= self._valid_until.timestamp():
            return f"the certificate in {self._directory} expired on {self._valid_until:%Y-%m-%d %H:%M:%S} UTC"
        return None

    async def keep_up(self) -> None:
        """Checks for changes until cancelled."""
        while True:
            await self._clock.sleep(POLL_SECONDS)
            await to_thread.run_sync(self.look)

    def look(self) -> None:
        """Switches to the current files if they have changed and fit together."""
        try:
            files = read_files(self._directory)
            if files != self._files:
                self._use(files)
                log.info(
                    "certificate changed", directory=str(self._directory), valid_until=self._valid_until.isoformat()
                )
            self._trouble = None
        except InvalidField as error:
            trouble = f"not in use: {error.finding}"
            if trouble != self._trouble:
                log.warning("the new certificate was refused, and the old one stays in use", finding=error.finding)
            self._trouble = trouble

    def _use(self, files: Files) -> None:
        current = context_of(self._directory, files)
        self._valid_until = not_after(files[CERTIFICATE])
        self._files = files
        self._current = current
        self.context.verify_mode = current.verify_mode
        self.context.minimum_version = current.minimum_version

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._current


def read_files(directory: Path) -> Files:
    """The files by name. Raises InvalidField if one is missing or cannot be read."""
    try:
        files = {name: (directory / name).read_bytes() for name in (CERTIFICATE, KEY)}
        authority = directory / AUTHORITY
        return files | ({AUTHORITY: authority.read_bytes()} if authority.exists() else {})
    except OSError as error:
        finding = clean(f"{error.filename}: {error.strerror}", 300)
        raise InvalidField(VARIABLE, finding, f"put {CERTIFICATE} and {KEY} into this directory") from error


def context_of(directory: Path, files: Files) -> ssl.SSLContext:
    """A server's TLS context. Raises InvalidField for files that do not fit together."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.num_tickets = 0
    try:
        context.load_cert_chain(directory / CERTIFICATE, directory / KEY, password=lambda: b"")
        if AUTHORITY in files:
            # Disable session resumption, because a client that resumes a session presents no certificate. TLS 1.3 can
            # resume only with tickets, of which there are none.
            context.load_verify_locations(cadata=files[AUTHORITY].decode())
            context.verify_mode = ssl.CERT_REQUIRED
            context.minimum_version = ssl.TLSVersion.TLSv1_3
    except (ssl.SSLError, ValueError, OSError) as error:
        finding = f"the files do not fit together: {clean(str(error), 200)}"
        raise InvalidField(
            VARIABLE, finding, f"put a PEM certificate into {CERTIFICATE} and its key into {KEY}"
        ) from error
    return context


def not_after(certificate: bytes) -> datetime:
    """When the first certificate of a PEM file, the server's own, expires (RFC 5280, 4.1). Raises InvalidField."""
    try:
        text = certificate.decode()
        first = text[text.index(ssl.PEM_HEADER) : text.index(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)]
        body = ssl.PEM_cert_to_DER_cert(first)
        fields = elements(elements(elements(body)[0][1])[0][1])
        validity = fields[4 if fields[0][0] == DER_VERSION else 3][1]
        kind, time = elements(validity)[1]
        years = "%y" if kind == UTC_TIME else "%Y"
        found = datetime.strptime(time.decode(), f"{years}%m%d%H%M%SZ").replace(tzinfo=UTC)
    except (ValueError, IndexError) as error:
        finding = f"{CERTIFICATE} has no certificate with a validity period"
        raise InvalidField(VARIABLE, finding, "put a PEM certificate into it") from error
    return found.replace(year=found.year - 100) if kind == UTC_TIME and found.year >= 2050 else found


def elements(body: bytes) -> list[tuple[int, bytes]]:
    """Tag and content of each element of a sequence in DER. Raises IndexError and ValueError for invalid data."""
    found = []
    at = 0
    while at < len(body):
        tag = body[at]
        length = body[at + 1]
        at = at + 2
        if length & 0x80:
            count = length & 0x7F
            length = int.from_bytes(body[at : at + count])
            at = at + count
        if at + length > len(body):
            raise ValueError("cut short")
        found.append((tag, body[at : at + length]))
        at += length
    return found


IDLE_SECONDS = 120
"""
An idle connection is closed after this time. It is longer than the 90 s of Go's client, so that the client closes the
connection first. Otherwise its next call could fail.
"""

OLDEST = (1, 36)
"""The version of Kubernetes that is assumed while it is unknown. Later versions accept answers for it, too."""

READINESS = "scheduler"
"""The Service of extender and webhook, whose readiness page is /readyz/scheduler."""

DRAIN_SECONDS = 5.0
"""How long calls are answered after SIGTERM: longer than the 4 s of a bind."""

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0)
"""Histogram buckets. A scheduler waits for an answer for at most five seconds."""


def call_seconds(registry: CollectorRegistry) -> Histogram:
    """The metric of the time that calls take."""
    meaning = "Time of a call of the scheduler, from the end of the request to the answer."
    return Histogram("topoalign_scheduler_call_seconds", meaning, ["call"], buckets=SECONDS, registry=registry)


async def serve_scheduler(
    context: Context,
    settings: RegistrySettings,
    scheduling: Scheduler,
    bind: Bind,
    webhook: Webhook,
    kubernetes: Callable[[], tuple[int, int] | None] = lambda: None,
    *,
    task_status: TaskStatus[str] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """
    Serves extender and webhook until cancelled, and `DRAIN_SECONDS` longer after SIGTERM. Reports as started, with its
    URL, once it listens. The settings must have a port. `kubernetes`: the version of the API server, which is assumed
    to be the scheduler's, too; None: still unknown.

    Raises InvalidField for certificates that cannot be used, and AddressInUse.
    """
    assert settings.scheduler_port is not None, "there is a port"
    context.drain.seconds = DRAIN_SECONDS
    seconds = call_seconds(context.metrics)
    extender = Extender(
        scheduling, bind, lambda: kubernetes() or OLDEST, timing=lambda call: seconds.labels(call).time()
    )
    certificates = None
    if settings.scheduler_tls_dir:
        certificates = Certificates(Path(settings.scheduler_tls_dir), context.clock)
        context.checks["scheduler certificate"] = certificates.trouble
        context.readiness.setdefault(READINESS, {})["certificate"] = certificates.trouble
    listener = listen_on_port(settings.scheduler_host, settings.scheduler_port, "TOPOALIGN_SCHEDULER")
    async with anyio.create_task_group() as tasks:
        if certificates is not None:
            tasks.start_soon(certificates.keep_up)
        await serve_application(
            make_application([*extender.routes(), *webhook.routes()]),
            listener,
            turns=context.turns,
            idle_seconds=IDLE_SECONDS,
            tls=None if certificates is None else certificates.context,
            draining=context.drain.begun,
            task_status=task_status,
        )

"""The server that a kube-scheduler and an API server call: its address, its certificates, and what is behind them."""

import re
from collections.abc import Callable
from pathlib import Path

import anyio
from anyio.abc import TaskStatus
from prometheus_client import Histogram

from topoalign.core.model.errors import InvalidField, quoted
from topoalign.registry.scheduling.extender.certificates import Certificates
from topoalign.registry.scheduling.extender.connection import IDLE_SECONDS, SchedulerConnection
from topoalign.registry.scheduling.extender.pages import Extender, application
from topoalign.registry.scheduling.model import Scheduling
from topoalign.registry.scheduling.webhook.reviews import Webhook
from topoalign.registry.settings import RegistrySettings
from topoalign.runtime.context import Context
from topoalign.runtime.http_server import listen, serve_application

VERSION = re.compile(r"v?(\d{1,3})\.(\d{1,3})([.+-].*)?")
OLDEST = (1, 36)
"""Taken where no version is known: what is said to this one harms no later one."""

READINESS = "scheduler"
"""The Service of extender and webhook, whose readiness page is /readyz/scheduler."""

DRAIN_SECONDS = 5.0
"""For which calls are answered after SIGTERM: more than the 4 s after which a bind is given up."""

HELP = "How long calls of the scheduler took, from the end of the question to its answer."
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0)
"""A scheduler waits for five."""


async def serve_scheduler(
    context: Context,
    settings: RegistrySettings,
    scheduling: Scheduling,
    webhook: Webhook,
    kubernetes: Callable[[], tuple[int, int] | None] = lambda: None,
    *,
    task_status: TaskStatus[str] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """
    Serves until cancelled, after SIGTERM for `DRAIN_SECONDS`; has started, with its URL, once it listens. Expects that the
    settings have a port. The webhook is served at the same address. `kubernetes`: the version of the API server, which
    counts as the scheduler's where the settings have none.

    Raises InvalidField for a version or certificates that cannot be used, and AddressInUse.
    """
    assert settings.scheduler_port is not None, "there is a port"
    context.drain.seconds = DRAIN_SECONDS
    version = version_of(settings.scheduler_kubernetes)
    seconds = Histogram("topoalign_scheduler_call_seconds", HELP, ["call"], buckets=SECONDS, registry=context.metrics)
    extender = Extender(
        scheduling, lambda: version or kubernetes() or OLDEST, timing=lambda call: seconds.labels(call).time()
    )
    certificates = None
    if settings.scheduler_tls_dir:
        certificates = Certificates(Path(settings.scheduler_tls_dir), context.clock)
        context.checks["scheduler certificate"] = certificates.trouble
        context.readiness.setdefault(READINESS, {})["certificate"] = certificates.trouble
    listener = listen(settings.scheduler_host, settings.scheduler_port, "TOPOALIGN_SCHEDULER")
    async with anyio.create_task_group() as tasks:
        if certificates is not None:
            tasks.start_soon(certificates.keep_up)
        await serve_application(
            application([*extender.routes(), *webhook.routes()]),
            listener,
            protocol=SchedulerConnection,
            turns=context.turns,
            idle_seconds=IDLE_SECONDS,
            tls=None if certificates is None else certificates.context,
            draining=context.drain.begun,
            task_status=task_status,
        )


def version_of(text: str) -> tuple[int, int] | None:
    """Major and minor of a version of Kubernetes: `1.36`, `v1.38.2`. None for no text. Raises InvalidField."""
    if not text:
        return None
    found = VERSION.fullmatch(text)
    if found is None:
        finding = f"{quoted([text])} is not a version"
        raise InvalidField("TOPOALIGN_SCHEDULER_KUBERNETES", finding, "write it as 1.36")
    return int(found[1]), int(found[2])

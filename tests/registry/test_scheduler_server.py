"""The scheduler's address has certificates that change without a restart, and says in good time when they do not serve."""

import socket
import ssl
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import anyio
import httpx
import pytest
from anyio import to_thread
from certificate_support import Authority
from scheduling_support import FULL, RawClient, RecordedScheduling, go_json, parsed, request_bytes, serving
from structlog.testing import capture_logs

from topoalign.core.model.errors import InvalidField
from topoalign.registry.scheduling.extender import extender_server
from topoalign.registry.scheduling.extender.extender_server import IDLE_SECONDS, POLL_SECONDS, Certificates, not_after
from topoalign.registry.scheduling.webhook.reviews import Webhook
from topoalign.registry.settings import RegistrySettings
from topoalign.runtime import connections
from topoalign.runtime.context import Context
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.testing.manual_clock import ManualClock, all_tasks_blocked

pytestmark = pytest.mark.anyio

NOW = datetime(2049, 11, 22, tzinfo=UTC)
SOON = datetime(2049, 11, 23, 4, 5, 6, tzinfo=UTC)
"""By the clocks of these tests; the handshakes go by the real one."""
LATER = datetime(2061, 1, 2, 3, 4, 5, tzinfo=UTC)
NO_WEBHOOK = Webhook("", lambda resource: False)
BODY = {"Pod": None, "NodeNames": ["a"]}


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
def served(tmp_path: Path, authority: Authority) -> Path:
    authority.issue(tmp_path / "served", "first", SOON)
    return tmp_path / "served"


def trusting(authority: Authority, client: Path | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.certificate))
    if client is not None:
        context.load_cert_chain(client / "tls.crt", client / "tls.key")
    return context


async def shown(url: str, context: ssl.SSLContext) -> str:
    """The serial number of the certificate that a new connection is shown; its call is answered."""
    async with (
        httpx.AsyncClient(verify=context) as http,
        http.stream("POST", f"{url}/scheduler/filter", json=BODY) as got,
    ):
        assert 200 == got.status_code
        found = got.extensions["network_stream"].get_extra_info("ssl_object").getpeercert()
        return str(found["serialNumber"])


async def test_a_changed_certificate_is_shown_without_a_restart(authority: Authority, served: Path) -> None:
    """Also while the files do not fit together for a moment: those before stay in use, and readiness says so."""
    certificates = Certificates(served, ManualClock(NOW.timestamp()))
    async with serving(RecordedScheduling(), tls=certificates.context) as url:
        first = await shown(url, trusting(authority))
        (served / "tls.crt").write_bytes(authority.certificate.read_bytes())
        certificates.look()
        between, trouble = await shown(url, trusting(authority)), certificates.trouble()
        authority.issue(served, "second", LATER)
        certificates.look()
        after = await shown(url, trusting(authority))

    assert first == between != after
    assert trouble is not None and "do not fit together" in trouble
    assert certificates.trouble() is None


def test_the_files_in_use_end_the_trouble_when_they_are_put_back(authority: Authority, served: Path) -> None:
    certificates = Certificates(served, ManualClock(NOW.timestamp()))
    first = (served / "tls.crt").read_bytes()
    (served / "tls.crt").write_bytes(authority.certificate.read_bytes())
    certificates.look()
    trouble = certificates.trouble()
    (served / "tls.crt").write_bytes(first)
    certificates.look()

    assert trouble is not None
    assert certificates.trouble() is None


def test_files_that_do_not_fit_together_are_logged_once(authority: Authority, served: Path) -> None:
    """And again once they are others, or cannot be read."""
    certificates = Certificates(served, ManualClock(NOW.timestamp()))
    with capture_logs() as logs:
        for text in (b"no certificate", authority.certificate.read_bytes()):
            (served / "tls.crt").write_bytes(text)
            certificates.look()
            certificates.look()
        (served / "tls.crt").unlink()
        certificates.look()
        certificates.look()

    assert 3 == len([each for each in logs if each["log_level"] == "warning"])


async def test_an_expired_certificate_is_named_with_its_date(authority: Authority, served: Path) -> None:
    clock = ManualClock(SOON.timestamp() - 1)
    certificates = Certificates(served, clock)
    before = certificates.trouble()
    await clock.advance(1)
    expired = certificates.trouble()
    authority.issue(served, "second", LATER)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(certificates.keep_up)
        await clock.advance(POLL_SECONDS)
        while certificates.trouble() is not None:
            await all_tasks_blocked()
        tasks.cancel_scope.cancel()

    assert before is None
    assert f"the certificate in {served} expired on 2049-11-23 04:05:06 UTC" == expired


async def test_clients_show_certificates_where_there_is_an_authority(
    tmp_path: Path, authority: Authority, served: Path
) -> None:
    """`client-ca.crt` may come, change and go while the server runs, and counts for the next connection."""
    other = Authority(tmp_path / "other")
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    authority.issue(mine, "scheduler", LATER)
    other.issue(theirs, "scheduler", LATER)
    certificates = Certificates(served, ManualClock(NOW.timestamp()))

    async def admitted(url: str) -> list[bool]:
        found = []
        for client in (None, mine, theirs):
            try:
                found.append(bool(await shown(url, trusting(authority, client))))
            except httpx.TransportError:
                found.append(False)
        return found

    found = []
    async with serving(RecordedScheduling(), tls=certificates.context) as url:
        for trusted in (None, authority, other, None):
            (served / "client-ca.crt").unlink(missing_ok=True)
            if trusted is not None:
                (served / "client-ca.crt").write_bytes(trusted.certificate.read_bytes())
            certificates.look()
            found.append(await admitted(url))

    assert [[True] * 3, [False, True, False], [False, False, True], [True] * 3] == found


async def test_no_session_of_a_client_with_a_certificate_is_resumed(authority: Authority, served: Path) -> None:
    """A resumed one would be admitted by a certificate that was shown before the authority changed."""
    (served / "client-ca.crt").write_bytes(authority.certificate.read_bytes())
    certificates = Certificates(served, ManualClock(NOW.timestamp()))

    def resumed(url: str, version: ssl.TLSVersion) -> list[bool | None]:
        context, found, session = trusting(authority, served), list[bool | None](), None
        context.maximum_version = version
        host, port = url.removeprefix("https://").split(":")
        for _ in range(2):
            with (
                socket.create_connection((host, int(port))) as plain,
                context.wrap_socket(plain, server_hostname=host, session=session) as protected,
            ):
                protected.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                while protected.recv(1 << 16):
                    pass
                found.append(protected.session_reused)
                session = protected.session
        return found

    async with serving(RecordedScheduling(), tls=certificates.context) as url:
        assert [False, False] == await to_thread.run_sync(resumed, url, ssl.TLSVersion.TLSv1_3)
        with pytest.raises(ssl.SSLError):  # it keeps sessions without tickets
            await to_thread.run_sync(resumed, url, ssl.TLSVersion.TLSv1_2)
        (served / "client-ca.crt").unlink()
        certificates.look()
        assert 2 == len(await to_thread.run_sync(resumed, url, ssl.TLSVersion.TLSv1_2))


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"], ids=["nothing", "a part", "no TLS"])
async def test_connections_without_a_handshake_keep_nobody_out(
    authority: Authority, served: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """T05: they have places as other connections have, and end after 4 s where there is room."""
    monkeypatch.setattr(connections, "MOST", 4)
    certificates = Certificates(served, ManualClock(NOW.timestamp()))
    found = []
    async with serving(RecordedScheduling(), tls=certificates.context) as url:
        address = (url.removeprefix("https://").split(":")[0], int(url.rpartition(":")[2]))
        with ExitStack() as opened:
            for _ in range(12):
                hostile = opened.enter_context(socket.create_connection(address, source_address=("127.0.0.2", 0)))
                hostile.sendall(sent)
                await all_tasks_blocked()
            found = [await shown(url, trusting(authority)) for _ in range(3)]
            with monkeypatch.context() as patch:
                patch.setattr(connections.Handshake, "within", 0.05)
                silent = opened.enter_context(socket.create_connection(address))
                closed = await to_thread.run_sync(silent.recv, 1)

    assert 3 == len(found)
    assert b"" == closed


async def test_a_connection_has_one_place_during_its_handshake_and_after_it(
    monkeypatch: pytest.MonkeyPatch, authority: Authority, served: Path
) -> None:
    places: list[int] = []
    monkeypatch.setattr(connections, "make_room", lambda held: places.append(len(held)))
    certificates = Certificates(served, ManualClock(NOW.timestamp()))
    async with serving(RecordedScheduling(), tls=certificates.context) as url:
        await shown(url, trusting(authority))

    assert [1, 1] == places


async def test_a_request_that_comes_with_the_end_of_the_handshake_is_answered(
    authority: Authority, served: Path
) -> None:
    """A client may send both in one segment."""
    certificates = Certificates(served, ManualClock(NOW.timestamp()))
    async with serving(RecordedScheduling(), tls=certificates.context) as url:
        host, port = url.removeprefix("https://").split(":")
        answer = await to_thread.run_sync(ask_at_once, (host, int(port)), trusting(authority))

    assert answer.startswith(b"HTTP/1.1 200 ")


def ask_at_once(address: tuple[str, int], context: ssl.SSLContext) -> bytes:
    """The beginning of the answer to a request that is sent with the end of the handshake."""
    received = ssl.MemoryBIO()
    to_send = ssl.MemoryBIO()
    tls = context.wrap_bio(received, to_send, server_hostname=address[0])
    with socket.create_connection(address, timeout=60) as connected:
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                connected.sendall(to_send.read())
                received.write(connected.recv(1 << 16))
        tls.write(request_bytes("/scheduler/filter", go_json(BODY)))
        connected.sendall(to_send.read())
        while True:
            try:
                return tls.read()
            except ssl.SSLWantReadError:
                received.write(connected.recv(1 << 16))


async def test_no_certificate_is_no_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match=r"tls\.crt: No such file"):
        Certificates(tmp_path, ManualClock())
    (tmp_path / "tls.crt").write_text("no certificate")
    (tmp_path / "tls.key").write_text("no key")
    with pytest.raises(InvalidField, match="do not fit together"):
        Certificates(tmp_path, ManualClock())


def test_the_time_of_validity_is_read_from_a_chain(tmp_path: Path, authority: Authority, served: Path) -> None:
    """Of the first certificate, with two digits of the year and with four; text before it does not matter."""
    chain = b"some text\n" + (served / "tls.crt").read_bytes() + authority.certificate.read_bytes()
    authority.issue(tmp_path / "long", "long", LATER)

    assert SOON == not_after(chain)
    assert LATER == not_after((tmp_path / "long" / "tls.crt").read_bytes())
    for cut in (b"", chain[:100], chain.replace(b"M", b"?")):
        with pytest.raises(InvalidField):
            not_after(cut)


async def test_readiness_has_the_check_of_the_certificate(authority: Authority, served: Path) -> None:
    """That of the process, and that of the Service (S02)."""
    clock = ManualClock(LATER.timestamp())
    context = Context(bus=MemoryBus(), clock=clock, environment={})
    settings = RegistrySettings(scheduler_port=0, scheduler_tls_dir=str(served))
    recorded = RecordedScheduling()

    async with anyio.create_task_group() as tasks:
        url = await tasks.start(extender_server.serve_scheduler, context, settings, recorded, recorded.bind, NO_WEBHOOK)
        reason = context.checks["scheduler certificate"]()
        of_service = context.readiness[extender_server.READINESS]["certificate"]()
        tasks.cancel_scope.cancel()

    assert url.startswith("https://127.0.0.1:")
    assert reason is not None and "expired on 2049-11-23" in reason
    assert reason == of_service


@pytest.mark.parametrize(("found", "failed"), [(None, []), ((1, 38), ["a"])])
async def test_the_version_of_the_api_server_counts(found: tuple[int, int] | None, failed: list[str]) -> None:
    context = Context(bus=MemoryBus(), clock=ManualClock(), environment={})
    settings = RegistrySettings(scheduler_port=0)
    full = RecordedScheduling(lambda node: FULL)
    pod = {"metadata": {"uid": "u"}, "spec": {"containers": [{"name": "c"}]}}

    async with anyio.create_task_group() as tasks, httpx.AsyncClient() as http:
        url = await tasks.start(
            extender_server.serve_scheduler, context, settings, full, full.bind, NO_WEBHOOK, lambda: found
        )
        answer = await http.post(f"{url}/scheduler/filter", json={"Pod": pod, "NodeNames": ["a"]})
        tasks.cancel_scope.cancel()

    assert failed == list(answer.json()["FailedNodes"])
    assert 1 == context.metrics.get_sample_value("topoalign_scheduler_call_seconds_count", {"call": "filter"})


async def test_an_idle_connection_is_kept_longer_than_the_scheduler_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """It closes one after 90 s; where the registry did so first, a call could meet a closed connection."""
    assert IDLE_SECONDS > 90
    monkeypatch.setattr(extender_server, "IDLE_SECONDS", 0)
    context = Context(bus=MemoryBus(), clock=ManualClock(), environment={})
    settings, scheduling = RegistrySettings(scheduler_port=0), RecordedScheduling()

    async with anyio.create_task_group() as tasks:
        url = await tasks.start(
            extender_server.serve_scheduler, context, settings, scheduling, scheduling.bind, NO_WEBHOOK
        )
        with RawClient(url) as client:
            answer = await client.rest(request_bytes("/scheduler/filter", go_json(BODY)))
        tasks.cancel_scope.cancel()

    assert 200 == parsed(answer)[0], "answered, then closed"

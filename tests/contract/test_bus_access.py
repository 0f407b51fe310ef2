"""Who may do what on a real nats-server, how that is told, and that no secret is told with it."""

import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path

import anyio
import nkeys
import pytest
from bus_support import GRANTED, KillableServer, killable, said, stored
from certificate_support import Authority
from structlog.testing import capture_logs

from topoalign.core.model.errors import BusRefused, BusUnavailable, IdTaken, InvalidField
from topoalign.core.ports import Stream
from topoalign.runtime.fact_publisher import FactPublisher
from topoalign.runtime.nats_bus import apply_stores, connect_bus, follower
from topoalign.runtime.settings import Access

pytestmark = pytest.mark.anyio
ALL = "topoalign.v1.>"
ADMIN = "{ user: admin, password: admin }"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[KillableServer]:
    async with killable(tmp_path / "nats") as running:
        yield running


def users(*rules: str) -> str:
    return f"authorization {{ users: [ {', '.join(rules)} ] }}\n"


async def test_publishing_without_permission_is_refused_with_the_subject(tmp_path: Path) -> None:
    """C40: the broker tells the publisher only by silence, and the reason beside it."""
    alice = '{ user: alice, password: canary, permissions: { publish: { allow: ["$JS.API.>"] } } }'
    async with killable(tmp_path, users(alice, ADMIN), administrator="admin:admin") as server:
        url = server.url.replace("nats://", "nats://alice:canary@")
        with anyio.fail_after(30):
            async with connect_bus(url) as bus:
                with pytest.raises(BusRefused, match=f"no permission on {GRANTED}"):
                    await bus.publish(said(1))
            with pytest.raises(BusRefused, match=f"no permission on {GRANTED}"):
                async with connect_bus(url, publishes=[GRANTED]):
                    raise AssertionError


async def test_a_writer_that_may_not_read_takes_a_repeated_id_for_taken(tmp_path: Path) -> None:
    """What the store has under the id cannot be compared: stored twice is borne, not stored is not."""
    rule = 'permissions: { publish: { deny: ["$JS.API.DIRECT.GET.TOPOALIGN_ALLOCATIONS"] } }'
    async with (
        killable(tmp_path, users(f"{{ user: writer, password: x, {rule} }}"), administrator="writer:x") as server,
        connect_bus(server.url.replace("nats://", "nats://writer:x@")) as bus,
    ):
        await bus.publish(said(1))
        with pytest.raises(IdTaken, match=r"cannot be read: no permission on \$JS\.API\.DIRECT\.GET\.TOPOALIGN_"):
            await bus.publish(said(1))

        assert 2 == await FactPublisher(bus).publish(said(1))


async def test_a_subscriber_may_be_allowed_to_do_no_more_than_read(tmp_path: Path) -> None:
    reader = """{ user: reader, password: canary, permissions: {
        publish: { allow: ["$JS.API.DIRECT.GET.*"] }
        subscribe: { allow: ["_INBOX_reader.>", "topoalign.v1.stored.>"] } } }"""
    async with killable(
        tmp_path, users("{ user: admin, password: admin }", reader), administrator="admin:admin"
    ) as server:
        async with connect_bus(server.url.replace("nats://", "nats://admin:admin@")) as admin:
            await admin.publish(said(1))
        async with (
            connect_bus(server.url.replace("nats://", "nats://reader:canary@"), name="reader") as bus,
            bus.follow(Stream.ALLOCATIONS, ALL) as messages,
        ):
            assert said(1) == (await anext(messages)).message
            with pytest.raises(BusRefused):
                await bus.publish(said(2))


async def test_a_missing_permission_to_follow_is_logged_once_until_granted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node agent follows for itself, beside the kubelet's requests: the hub must not be able to end it."""
    monkeypatch.setattr(follower, "REFUSED_PAUSE", 0.02)
    forbidden = 'permissions: { publish: { deny: ["$JS.API.DIRECT.GET.TOPOALIGN_ALLOCATIONS"] } }'
    async with killable(
        tmp_path, users(f"{{ user: writer, password: x, {forbidden} }}"), administrator="writer:x"
    ) as server:
        url = server.url.replace("nats://", "nats://writer:x@")
        async with connect_bus(url) as bus, bus.follow(Stream.ALLOCATIONS, ALL) as messages:
            await bus.publish(said(1))
            with capture_logs() as logs:
                with anyio.move_on_after(0.5):
                    await anext(messages)
                    raise AssertionError
                server.kill()
                server.more = users("{ user: writer, password: x }")
                await server.start()
                with anyio.fail_after(30):
                    assert said(1) == (await anext(messages)).message

    refusals = [line["finding"] for line in logs if line["event"] == "cannot follow"]
    assert 1 == len(refusals)
    assert "no permission on $JS.API.DIRECT.GET.TOPOALIGN_ALLOCATIONS" in refusals[0]
    beside = [line["finding"] for line in logs if line["event"] == "nats refuses"]
    assert sorted(set(beside)) == sorted(beside)


async def test_an_nkey_is_accepted_and_a_wrong_one_refused_without_its_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The right nkey is accepted; a wrong one is refused, and its text is not printed."""
    seeds = {name: bytes(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)) for name in ("right", "wrong")}
    for name, seed in seeds.items():
        (tmp_path / name).write_bytes(seed + b"\n")
    public = nkeys.from_seed(bytearray(seeds["right"])).public_key.decode()
    async with killable(
        tmp_path / "nats", users(f"{{ nkey: {public} }}", ADMIN), administrator="admin:admin"
    ) as server:
        async with connect_bus(server.url, access=Access(nats_nkey=str(tmp_path / "right"))) as bus:
            await bus.publish(said(1))
        with pytest.raises(BusRefused, match="refuses our credentials") as caught:
            async with connect_bus(server.url, access=Access(nats_nkey=str(tmp_path / "wrong"))):
                raise AssertionError

    assert seeds["wrong"].decode() not in f"{caught.value} {caplog.text}"


async def test_files_and_addresses_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "not-a-seed").write_text("hello")
    cases = {
        "TOPOALIGN_NATS_NKEY: '.*absent'": ("nats://127.0.0.1:9", Access(nats_nkey=str(tmp_path / "absent"))),
        "TOPOALIGN_NATS_NKEY: not the seed": ("nats://127.0.0.1:9", Access(nats_nkey=str(tmp_path / "not-a-seed"))),
        "TOPOALIGN_NATS_CREDS: not a cred": ("nats://127.0.0.1:9", Access(nats_creds=str(tmp_path / "not-a-seed"))),
        "TOPOALIGN_NATS_TLS_CA": ("nats://127.0.0.1:9", Access(nats_tls_ca=str(tmp_path / "not-a-seed"))),
        "TOPOALIGN_NATS_URL: 'http://a'": ("http://a", Access()),
        "TOPOALIGN_NATS_URL: 'nats://a:99999'": ("nats://u:canary@a:99999", Access()),
        "TOPOALIGN_NATS_URL: empty": (" ", Access()),
    }
    for finding, (url, access) in cases.items():
        with pytest.raises(InvalidField, match=finding) as caught:
            async with connect_bus(url, access=access):
                raise AssertionError
        assert "canary" not in str(caught.value)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1 that is its own authority."""
    folder = tmp_path_factory.mktemp("tls")
    try:
        subprocess.run(
            [
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "rsa:2048",
                "-nodes",
                "-days",
                "2",
                "-subj",
                "/CN=topoalign test",
                "-addext",
                "subjectAltName=IP:127.0.0.1",
                "-keyout",
                folder / "key.pem",
                "-out",
                folder / "cert.pem",
            ],
            check=True,
            capture_output=True,
        )
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return folder


async def test_a_protected_connection_needs_the_right_authority(tmp_path: Path, certificates: Path) -> None:
    tls = f'tls {{ cert_file: "{certificates}/cert.pem", key_file: "{certificates}/key.pem" }}\n'
    async with killable(tmp_path, tls, administrator=None) as server:
        access = Access(nats_tls_ca=str(certificates / "cert.pem"))
        await apply_stores(server.url, access)
        async with connect_bus(server.url, access=access) as bus:
            await bus.publish(said(1))
        with pytest.raises(BusUnavailable, match="certificate"):
            async with connect_bus(server.url.replace("nats://", "tls://"), wait=0.5):
                raise AssertionError


async def test_replaced_certificates_of_a_hub_are_taken_up(tmp_path: Path) -> None:
    """C60: after a loss the files are read anew. While the server's is expired, readiness has that for its reason."""
    valid, over = datetime(2061, 1, 1, tzinfo=UTC), datetime(2021, 1, 1, tzinfo=UTC)
    first, second = Authority(tmp_path / "first"), Authority(tmp_path / "second")
    trusted, served = tmp_path / "trusted.pem", tmp_path / "served"
    trusted.write_bytes(first.certificate.read_bytes())
    first.issue(served, "nats", valid)
    tls = f'tls {{ cert_file: "{served}/tls.crt", key_file: "{served}/tls.key" }}\n'
    access = Access(nats_tls_ca=str(trusted))
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(killable(tmp_path, tls, administrator=None))
        await apply_stores(server.url, access)
        bus = await stack.enter_async_context(connect_bus(server.url, access=access))
        await stored(bus, said(1))
        trusted.write_bytes(second.certificate.read_bytes())
        second.issue(served, "expired", over)
        server.kill()
        await server.start()
        while "expired" not in (bus.reason_not_connected or ""):
            await anyio.lowlevel.checkpoint()
        assert not bus.connected
        second.issue(served, "nats", valid)
        server.kill()
        await server.start()
        with anyio.fail_after(60):
            await stored(bus, said(2))


async def test_a_server_without_the_requested_protection_is_refused(server: KillableServer) -> None:
    """A server without TLS is refused if TLS is requested."""
    with pytest.raises(BusRefused, match="does not offer TLS"):
        async with connect_bus(server.url.replace("nats://", "tls://")):
            raise AssertionError

"""
The accounts that `topoalign nats-config` writes, on a real nats-server: everybody can do what they have to, and nobody can
publish, request, read answers or manage anything in the name of another.
"""

import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import anyio
import msgspec
import nats
import nats.errors
import pytest
from bus_support import KillableServer, granted, killable, said
from click.testing import CliRunner
from e2e_support import answering, environment, in_one_process
from nats.aio.client import Client
from nats.aio.msg import Msg
from structlog.testing import capture_logs

from topoalign.cli.nats_config import nats_config
from topoalign.core import wire
from topoalign.core.model.errors import BusRefused, BusUnavailable
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Endpoint, Stream
from topoalign.runtime import event_stores
from topoalign.runtime.nats_accounts import (
    ADMIN,
    EVERY_NODE,
    OF_ADMIN,
    OF_REGISTRY,
    PURGE,
    STORES,
    account_of,
    format_accounts,
)
from topoalign.runtime.nats_bus import apply_stores, connect_bus
from topoalign.runtime.settings import Access

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]
NODE, VICTIM = NodeName("node-1"), NodeName("node-2")
SEEDS = {"node": f"node-{NODE}", "victim": f"node-{VICTIM}"}
"""Files of seeds by who uses them, where they have other names."""


class Hub(NamedTuple):
    """A server with the accounts of two nodes."""

    server: KillableServer
    keys: Path

    def access(self, who: str) -> Access:
        return Access(nats_nkey=str(self.keys / f"{SEEDS.get(who, who)}.nk"))

    async def client(self, who: str) -> Client:
        """A connection on which anything can be tried."""

        async def ignore(error: Exception) -> None:
            pass

        seed = str(self.keys / f"{SEEDS.get(who, who)}.nk")
        return await nats.connect(self.server.url, nkeys_seed=seed, error_cb=ignore, allow_reconnect=False)


def configured(directory: Path, *nodes: str) -> Path:
    """What `topoalign nats-config` writes for these nodes."""
    result = CliRunner().invoke(
        nats_config, ["--nodes", "-", "--out", str(directory)], input="\n".join(nodes), catch_exceptions=False
    )
    assert 0 == result.exit_code
    return directory


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[Hub]:
    keys = configured(tmp_path / "keys", NODE, VICTIM)
    async with killable(tmp_path / "nats", (keys / "accounts.conf").read_text(), administrator=None) as server:
        running = Hub(server, keys)
        await apply_stores(server.url, running.access("stores"))
        yield running


@pytest.mark.parametrize("names", [[str(NODE), str(VICTIM)], ["*"]])
async def test_each_role_can_do_what_it_has_to(tmp_path: Path, names: list[str]) -> None:
    """A node agent and a registry meet no refusal, readers read, and the administrator reaches the node."""
    keys = configured(tmp_path / "keys", *names)
    SEED = {"discovery": "nodes.nk" if names == ["*"] else f"node-{NODE}.nk", "registry": "registry.nk"}
    async with AsyncExitStack() as stack:
        more = (keys / "accounts.conf").read_text()
        server = await stack.enter_async_context(killable(tmp_path / "nats", more, administrator=None))
        admin_access = Access(nats_nkey=str(keys / "admin.nk"))
        await apply_stores(server.url, Access(nats_nkey=str(keys / "stores.nk")))
        with capture_logs() as logs:
            for services in ("discovery", "hinting", "allocator"), ("registry",):
                settings = environment(NODE, server.url, tmp_path)
                del settings["TOPOALIGN_KUBELET_DIR"]
                settings["TOPOALIGN_NATS_NKEY"] = str(keys / SEED[services[0]])
                await stack.enter_async_context(in_one_process(None, settings, services))
            admin = await stack.enter_async_context(connect_bus(server.url, access=admin_access))
            await answering(admin, NODE)
            answer = await admin.ask(wire.admission_subject(NODE, "alive"), b"{}", 60)
        reader_access = Access(nats_nkey=str(keys / "reader.nk"))
        reader = await stack.enter_async_context(connect_bus(server.url, name="reader", access=reader_access))
        async with reader.follow(Stream.ALLOCATIONS, wire.allocation_subjects(NODE)) as messages:
            snapshot = (await anext(messages)).message
        await stack.aclose()

    assert wire.is_service_answer(answer)
    assert NODE == getattr(wire.decode_event(snapshot), "node", None)
    warnings = [line for line in logs if line["log_level"] in ("warning", "error") and "nats" in str(line).lower()]
    assert [] == [line for line in warnings if line["event"] != "bus lost"]


async def test_a_registry_reaches_a_node_and_reserves_on_it(hub: Hub) -> None:
    """Every request that a registry may send is answered, and reservations are stored alone and in a batch."""
    verbs = [
        pattern.format(node=VICTIM).replace("*", verb) for pattern in OF_REGISTRY for verb in ("alive", "announce")
    ]

    async def answer(body: bytes) -> bytes:
        return wire.encode_answer("yes")

    endpoints = [Endpoint(name=f"e{n}", subject=f"{wire.PREFIX}.{verb}", answer=answer) for n, verb in enumerate(verbs)]
    async with (
        connect_bus(hub.server.url, access=hub.access("victim"), node=VICTIM) as node,
        node.serve("topoalign", endpoints),
        connect_bus(hub.server.url, access=hub.access("registry"), name="topoalign-registry") as registry,
        node.follow(Stream.RESERVATIONS, wire.reservation_subject(VICTIM)) as messages,
    ):
        answers = {await registry.ask(endpoint.subject, b"{}", 60) for endpoint in endpoints}
        first = await registry.publish(said(1, wire.reservation_subject(VICTIM)), 0)
        batch = [(said(2, wire.reservation_subject(VICTIM)), first), (said(3, wire.reservation_subject(NODE)), 0)]
        await registry.publish_batch(batch)
        received = [(await anext(messages)).message for _ in range(2)]

    assert {wire.encode_answer("yes")} == answers
    assert [said(n).body for n in (1, 2)] == [message.body for message in received]


@pytest.mark.parametrize("role", ["node", "reader"])
async def test_a_role_is_refused_what_is_anothers(hub: Hub, role: str) -> None:
    async with connect_bus(hub.server.url, access=hub.access(role)) as bus:
        for message in (
            granted(VICTIM, 1),
            said(2, wire.reservation_subject(NODE)),
            said(3, f"{wire.PREFIX}.health.node-2"),
        ):
            with pytest.raises((BusRefused, BusUnavailable), match=r"no store took|no permission"):
                await bus.publish(message)
        with pytest.raises(BusRefused):
            await bus.forget(Stream.ALLOCATIONS, wire.allocation_subjects(NODE))


OWN = {
    "node": f"{wire.PREFIX}.allocation.{NODE}.granted",
    "registry": f"{wire.PREFIX}.deadletter.registry",
    "reader": f"{wire.PREFIX}.allocator.{NODE}.alive",
}
"""A subject on which a role may publish."""
TARGETS = [
    *(
        pattern.format(node=VICTIM).replace("*", verb)
        for pattern in OF_ADMIN + OF_REGISTRY
        for verb in ("allocate", "release", "cordon")
    ),
    *(f"{kind}.{VICTIM}" for kind in ("topology", "health", "usage", "stored.topology")),
    *(f"{kind}.{VICTIM}.granted" for kind in ("allocation", "stored.allocation")),
]
"""Subjects of the victim, without the prefix, on which nobody else may publish anything."""
FORGED = b'{"node":"node-2","forged":true}'


def managing(target: str) -> list[tuple[str, object]]:
    """Requests with which JetStream would publish on this subject, or take what others publish there."""
    consumer = {"deliver_subject": target, "ack_policy": "none", "deliver_policy": "all"}
    created = [
        {"name": "EVIL", "subjects": ["evil.>"], "republish": {"src": "evil.>", "dest": target}},
        {"name": "EVIL", "subjects": [target], "storage": "memory"},
        {"name": "EVIL", "subjects": ["_INBOX.>", "_INBOX_topoalign.>"], "storage": "memory"},
        {"name": "EVIL", "mirror": {"name": "TOPOALIGN_ALLOCATIONS"}},
        {
            "name": "EVIL",
            "sources": [{"name": "TOPOALIGN_NODES", "subject_transforms": [{"src": ">", "dest": target}]}],
        },
        {"name": "EVIL", "subjects": ["evil.>"], "subject_transform": {"src": "evil.>", "dest": target}},
    ]
    return [
        *(("STREAM.CREATE.EVIL", each) for each in created),
        ("STREAM.UPDATE.TOPOALIGN_NODES", {"name": "TOPOALIGN_NODES", "subjects": ["topoalign.v1.>"]}),
        ("STREAM.DELETE.TOPOALIGN_NODES", None),
        ("STREAM.PURGE.TOPOALIGN_ALLOCATIONS", None),
        ("STREAM.MSG.DELETE.TOPOALIGN_ALLOCATIONS", {"seq": 1}),
        ("STREAM.SNAPSHOT.TOPOALIGN_ALLOCATIONS", {"deliver_subject": target}),
        ("STREAM.RESTORE.EVIL", {"config": created[0], "state": {}}),
        ("STREAM.LEADER.STEPDOWN.TOPOALIGN_NODES", None),
        ("META.LEADER.STEPDOWN", None),
        ("ACCOUNT.PURGE.TOPOALIGN", None),
        ("CONSUMER.CREATE.TOPOALIGN_ALLOCATIONS", {"stream_name": "TOPOALIGN_ALLOCATIONS", "config": consumer}),
        (
            "CONSUMER.CREATE.TOPOALIGN_ALLOCATIONS.evil",
            {"stream_name": "TOPOALIGN_ALLOCATIONS", "config": {**consumer, "name": "evil"}},
        ),
        (
            "CONSUMER.DURABLE.CREATE.TOPOALIGN_NODES.evil",
            {"stream_name": "TOPOALIGN_NODES", "config": {**consumer, "durable_name": "evil"}},
        ),
        ("CONSUMER.MSG.NEXT.TOPOALIGN_NODES.evil", {"batch": 10}),
    ]


def reading() -> list[tuple[str, object]]:
    """Requests that a role may send, whose answers it could have sent to any subject of its account."""
    return [
        ("STREAM.INFO.TOPOALIGN_ALLOCATIONS", None),
        ("STREAM.MSG.GET.TOPOALIGN_ALLOCATIONS", {"seq": 1}),
        ("DIRECT.GET.TOPOALIGN_ALLOCATIONS", {"seq": 1}),
        ("DIRECT.GET.TOPOALIGN_ALLOCATIONS", {"seq": 1, "batch": 100, "next_by_subj": ">"}),
        ("DIRECT.GET.TOPOALIGN_DEADLETTERS", {"seq": 1, "batch": 100, "next_by_subj": ">"}),
        ("INFO", None),
        ("STREAM.NAMES", None),
        ("STREAM.LIST", None),
    ]


def headers(target: str) -> list[dict[str, str]]:
    """Headers of a message with which the server would publish elsewhere, or delete."""
    return [
        {},
        {"Nats-Trace-Dest": target},
        {"Nats-Trace-Dest": target, "Nats-Trace-Only": "true"},
        {"Nats-Rollup": "all"},
        {"Nats-Schedule": "@at 2020-01-01T00:00:00Z", "Nats-Schedule-Target": target},
        {"Nats-Schedule": "@every 1s", "Nats-Schedule-Target": target},
        {"Nats-Batch-Id": "evil", "Nats-Batch-Sequence": "1", "Nats-Batch-Commit": "1"},
        {"Nats-TTL": "1s"},
        {
            "Nats-Stream": "TOPOALIGN_ALLOCATIONS",
            "Nats-Sequence": "9",
            "Nats-Subject": target,
            "Nats-Last-Sequence": "0",
        },
    ]


async def attack(client: Client, role: str) -> None:
    """Everything that one with these credentials can try to publish in the name of the victim."""
    for own in headers("evil.x"):
        await client.publish(OWN[role], FORGED, headers=own or None)
    for short in TARGETS:
        target = f"{wire.PREFIX}.{short}"
        await client.publish(target, FORGED)
        await client.publish(target, FORGED, reply=target)
        for verb, body in [*managing(target), *reading()]:
            encoded = b"" if body is None else msgspec.json.encode(body)
            await client.publish(f"$JS.API.{verb}", encoded, reply=target)
        for own in headers(target):
            await client.publish(OWN[role], FORGED, reply=target, headers=own or None)
        for system in (
            "$SYS.REQ.USER.INFO",
            "$SYS.REQ.SERVER.PING",
            "$SYS.REQ.ACCOUNT.PING.CONNZ",
            "$SRV.PING",
            "$SRV.INFO",
        ):
            await client.publish(system, b"", reply=target)
        await client.publish("$JS.ACK.TOPOALIGN_ALLOCATIONS.evil.1.1.1.1.0", b"+NXT", reply=target)
    await client.flush()


async def everything(client: Client) -> list[tuple[str, bytes]]:
    """The messages that this client receives from now on, whatever their subjects are."""
    received: list[tuple[str, bytes]] = []

    async def note(message: Msg) -> None:
        received.append((message.subject, message.data))

    await client.subscribe(">", cb=note)
    await client.flush()
    return received


@pytest.mark.parametrize("role", ["node", "reader", "registry"])
async def test_nobody_publishes_or_requests_in_the_name_of_a_node(hub: Hub, role: str) -> None:
    """T01 to T04. The victim and the stores are as before, whatever was tried."""
    attacker, victim, admin = [await hub.client(who) for who in (role, "victim", "stores")]
    own = await hub.client("node")
    await own.request(OWN["node"], FORGED, timeout=60)  # what a store could be made to send elsewhere
    received = await everything(victim)
    before = [await event_stores.stream_info(requester(admin), store.name) for store in event_stores.STORES]
    names = (await admin.request("$JS.API.STREAM.NAMES", b"")).data

    await attack(attacker, role)
    await settled(admin)
    await victim.flush()
    infos = [await event_stores.stream_info(requester(admin), store.name) for store in event_stores.STORES]
    forged = [
        subject
        for store in event_stores.STORES
        for subject in await subjects_in(admin, store.name)
        if VICTIM in subject
    ]

    # A registry sends these; an answer that it has sent there keeps the subject that the server made for it.
    sent = (*(f"{wire.PREFIX}.{kind}.{VICTIM}." for kind in ("allocator", "discovery")), "_R_.")
    allowed = sent if role == "registry" else ()
    assert [] == [subject for subject, _ in received if not subject.startswith(allowed)]
    assert [] == forged
    assert [each.config for each in before] == [each.config for each in infos]
    assert names == (await admin.request("$JS.API.STREAM.NAMES", b"")).data
    assert [each.state.first_seq for each in before if each.state.messages] == [
        after.state.first_seq for first, after in zip(before, infos, strict=True) if first.state.messages
    ]
    for client in (attacker, victim, admin, own):
        await client.close()


async def test_what_is_tried_is_real(hub: Hub) -> None:
    """The administrator reaches the victim in these ways, and whoever has the key of the stores reaches the stores."""
    admin, owner, victim = [await hub.client(who) for who in ("admin", "stores", "victim")]
    received = await everything(victim)
    await attack(admin, "node")
    await attack(owner, "node")
    await settled(owner)
    await victim.flush()
    forged = {name for store in event_stores.STORES for name in await subjects_in(owner, store.name) if VICTIM in name}
    for client in (admin, owner, victim):
        await client.close()

    assert {f"{wire.PREFIX}.admission.{VICTIM}.{verb}" for verb in ("allocate", "release")} <= {
        each for each, _ in received
    }
    assert f"{wire.PREFIX}.allocation.{VICTIM}.granted" in forged


async def test_the_administrator_forgets_a_node(hub: Hub) -> None:
    async with connect_bus(hub.server.url, access=hub.access("node"), node=NODE) as node:
        await node.publish(granted(NODE, 1))
        async with connect_bus(hub.server.url, access=hub.access("admin")) as admin:
            before = await admin.last_position(Stream.ALLOCATIONS)
            await admin.forget(Stream.ALLOCATIONS, wire.allocation_subjects(NODE))

            assert (1, 0) == (before, await admin.last_position(Stream.ALLOCATIONS))


@pytest.mark.parametrize("role", ["node", "reader"])
async def test_nobody_reads_requests_and_answers_of_another(hub: Hub, role: str) -> None:
    """Inboxes and requests of other accounts do not exist for it, under whatever subject it subscribes."""

    async def answer(body: bytes) -> bytes:
        return wire.encode_answer("secret")

    subject = wire.admission_subject(VICTIM, "alive")
    eavesdropper = await hub.client(role)
    received = await everything(eavesdropper)
    for more in ("_INBOX.>", "_INBOX_topoalign-registry.>", f"_INBOX_topoalign.{VICTIM}.>", "_R_.>", "$SRV.>", subject):
        await eavesdropper.subscribe(more)
    await eavesdropper.flush()
    async with (
        connect_bus(hub.server.url, access=hub.access("victim"), node=VICTIM) as node,
        node.serve("topoalign", [Endpoint(name="alive", subject=subject, answer=answer)]),
        connect_bus(hub.server.url, access=hub.access("registry"), name="topoalign-registry") as registry,
    ):
        answers = {await registry.ask(subject, b"{}", 60) for _ in range(20)}
        await node.publish(granted(VICTIM, 1))
    await eavesdropper.flush()
    await eavesdropper.close()

    assert {wire.encode_answer("secret")} == answers
    assert [] == [each for each in received if not each[0].startswith(event_stores.NEWS)]
    assert role == "reader" or [] == received


async def test_a_stolen_key_opens_no_other_account_and_no_leaf(hub: Hub, tmp_path: Path) -> None:
    """A server of the attacker cannot join as a leaf node or as a member of the cluster: nothing listens for these."""
    unknown = configured(tmp_path / "other", NODE) / f"node-{NODE}.nk"
    for access in (Access(nats_nkey=str(unknown)), Access()):
        with pytest.raises(BusRefused, match="refuses our credentials"):
            async with connect_bus(hub.server.url, access=access):
                raise AssertionError

    assert not {"leafnodes", "gateway", "cluster"} & {*format_accounts({NODE: "U"}, "U", "U", "U", "U").split()}


def test_keys_are_kept_and_private(tmp_path: Path) -> None:
    """A second run adds nodes: whoever has a key keeps it. Seeds are readable by their owner alone."""
    keys = configured(tmp_path / "keys", NODE)
    first = {file.name: file.read_bytes() for file in keys.glob("*.nk")}
    (keys / "accounts.conf").unlink()
    configured(keys, NODE, VICTIM)
    second = {file.name: file.read_bytes() for file in keys.glob("*.nk")}

    assert first.items() <= second.items()
    assert {f"node-{VICTIM}.nk"} == {*second} - {*first}
    assert {0o600} == {file.stat().st_mode & 0o777 for file in keys.glob("*.nk")}
    assert 0o700 == keys.stat().st_mode & 0o777


@pytest.mark.parametrize(
    ("lines", "finding"),
    [
        pytest.param("", "names no node", id="empty"),
        pytest.param("# only a comment\n", "names no node", id="comment"),
        pytest.param("node 1\n", "'node 1' is no name of a node", id="two words"),
        pytest.param("node/node-1\n", "'node/node-1' is no name of a node", id="kubectl's own form"),
        pytest.param("*\nnode-1\n", "there are names in addition to `\\*`", id="both forms"),
    ],
)
def test_a_file_of_nodes_that_cannot_be_meant_is_refused(tmp_path: Path, lines: str, finding: str) -> None:
    with pytest.raises(Exception, match=finding):
        CliRunner().invoke(
            nats_config, ["--nodes", "-", "--out", str(tmp_path / "keys")], input=lines, catch_exceptions=False
        )
    assert not (tmp_path / "keys").exists()


def block_of(account: str, text: str) -> list[str]:
    """The lines of an account."""
    lines = [line.strip() for line in text.splitlines()]
    start = lines.index(f'"{account}": {{')
    return lines[start : lines.index("}", start)]


def test_a_node_receives_the_news_of_itself_alone() -> None:
    """Those of all nodes would be megabytes for each of thousands, and their containers are none of its business."""
    block = block_of(account_of(NODE), format_accounts({NODE: "UN", VICTIM: "UV"}, "UR", "UE", "UA", "US"))
    news = {line.partition(f"{event_stores.NEWS}.")[2].partition('"')[0] for line in block if event_stores.NEWS in line}

    assert {f"{kind}.{NODE}" for kind in (*wire.READINGS, "reservation")} == news


def test_deletions_are_exported_to_the_administrator_alone() -> None:
    block = block_of(STORES, format_accounts({NODE: "UN"}, "UR", "UE", "UA", "US"))

    assert [f'{{ service: "{PURGE}", accounts: ["{ADMIN}"] }}'] == [line for line in block if PURGE in line]


def test_nodes_may_share_one_account(tmp_path: Path) -> None:
    """For installations without an identity of each node."""
    keys = configured(tmp_path / "keys", EVERY_NODE)

    assert {"nodes.nk", "registry.nk", "reader.nk", "admin.nk", "stores.nk", "accounts.conf"} == {
        each.name for each in keys.iterdir()
    }
    shutil.rmtree(keys)


def requester(client: Client) -> event_stores.Request:
    async def request(subject: str, body: bytes) -> bytes:
        return bytes((await client.request(subject, body, timeout=60)).data)

    return request


async def subjects_in(client: Client, name: str) -> list[str]:
    answer = await client.request(f"$JS.API.STREAM.INFO.{name}", b'{"subjects_filter":">"}', timeout=60)
    return [*msgspec.json.decode(answer.data).get("state", {}).get("subjects", {})]


async def settled(admin: Client) -> None:
    """Until the server has dealt with all that was sent: what is stored does not change any more."""
    last: object = None
    while True:
        await admin.flush()
        now = [(await event_stores.stream_info(requester(admin), store.name)).state for store in event_stores.STORES]
        if now == last:
            return
        last = now
        await anyio.lowlevel.checkpoint()

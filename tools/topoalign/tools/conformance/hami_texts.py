"""The suites `hami/…` about what HAMi's parts write and read: requests, selections, annotations and the handshake."""

from datetime import datetime

import msgspec

from topoalign.core.demand.share_annotations import type_selection, uuid_selection
from topoalign.core.sharing.hami.node_annotations import REQUESTING, PodGpu, decode_pod, encode_pod, is_plugin_alive
from topoalign.core.sharing.hami.registration import InvalidAnnotation, decode_old_register
from topoalign.tools.conformance.hami_cases import Case, Request, suite
from topoalign.tools.conformance.hami_quantities import Amounts, Defaults, read_request
from topoalign.tools.conformance.suite import Suite


class ParseDefaults(msgspec.Struct, frozen=True):
    """What a container gets that does not say. Memory in MiB."""

    default_memory: int = 0
    default_cores: int = 0
    memory_factor: int = 1


class ParseInput(msgspec.Struct, frozen=True):
    """The resources of a container."""

    limits: Amounts
    requests: Amounts
    defaults: ParseDefaults


class SelectInput(msgspec.Struct, frozen=True):
    """A pod's annotations, and the model or the uuid of a card."""

    annotations: dict[str, str]
    device_type: str = ""
    uuid: str = ""


class Selected(msgspec.Struct, frozen=True):
    """Whether the pod accepts the card."""

    selected: bool


class AnnotatedCard(msgspec.Struct, frozen=True):
    """A card in a pod's annotation."""

    uuid: str
    type: str
    mem_mb: int
    cores: int


class CodecInput(msgspec.Struct, frozen=True):
    """The cards of a pod's containers."""

    containers: list[list[AnnotatedCard]]


class CodecExpected(msgspec.Struct, frozen=True):
    """The annotation, and what is read of it."""

    encoded: str
    decoded: list[list[AnnotatedCard]]


class TextInput(msgspec.Struct, frozen=True):
    """An annotation."""

    text: str


class OldCard(msgspec.Struct, frozen=True):
    """A card that is read of it."""

    id: str
    count: int
    devmem: int
    devcore: int
    type: str
    numa: int
    health: bool
    index: int
    mode: str


class OldExpected(msgspec.Struct, frozen=True):
    """The cards, or why the annotation cannot be read."""

    devices: list[OldCard]
    error: str


class HandshakeInput(msgspec.Struct, frozen=True):
    """What a node shows."""

    now: str
    handshake: str | None = None
    allocatable: int = 0


class HandshakeExpected(msgspec.Struct, frozen=True):
    """What follows for it."""

    healthy: bool
    refresh_devices: bool


def request_parse(case: ParseInput, _: Request) -> Request:
    """What a container asks for."""
    given = case.defaults
    defaults = Defaults(memory=given.default_memory, cores=given.default_cores, memory_factor=given.memory_factor)
    read = read_request(case.limits, case.requests, defaults)
    return Request(count=read.count, vendor=read.vendor, mem_mb=read.memory, mem_percent=read.percent, cores=read.cores)


def type_select(case: SelectInput, _: Selected) -> Selected:
    """Whether a pod accepts a model."""
    return Selected(type_selection(case.annotations).takes_type(case.device_type))


def uuid_select(case: SelectInput, _: Selected) -> Selected:
    """Whether a pod accepts a uuid."""
    return Selected(uuid_selection(case.annotations).takes_uuid(case.uuid))


def pod_annotation_codec(case: CodecInput, _: CodecExpected) -> CodecExpected:
    """The annotation of a pod, and what is read of it."""
    encoded = encode_pod(
        [
            [PodGpu(uuid=each.uuid, type=each.type, memory=each.mem_mb, cores=each.cores) for each in cards]
            for cards in case.containers
        ]
    )
    decoded = decode_pod(encoded)
    return CodecExpected(
        encoded, [[AnnotatedCard(card.uuid, card.type, card.memory, card.cores) for card in cards] for cards in decoded]
    )


def node_annotation_decode_legacy(case: TextInput, _: OldExpected) -> OldExpected:
    """The cards in an annotation of the old form."""
    try:
        cards = decode_old_register(case.text)
    except InvalidAnnotation as error:
        return OldExpected([], error.reason)
    return OldExpected(
        [
            OldCard(
                id=card.id,
                count=card.slots,
                devmem=card.memory,
                devcore=card.cores,
                type=card.type,
                numa=card.numa,
                health=card.healthy,
                index=card.index,
                mode=card.mode,
            )
            for card in cards
        ],
        "",
    )


def handshake(case: HandshakeInput, _: HandshakeExpected) -> HandshakeExpected:
    """Whether a node is healthy, and its cards are to be read anew."""
    healthy = is_plugin_alive(case.handshake, case.allocatable, datetime.fromisoformat(case.now))
    # HAMi reads the cards anew, and writes a new request, where no request is open
    return HandshakeExpected(healthy, case.handshake is None or REQUESTING not in case.handshake)


SUITES: dict[str, Suite] = {
    "hami/handshake": suite(Case[HandshakeInput, HandshakeExpected], handshake),
    "hami/node_annotation_decode_legacy": suite(Case[TextInput, OldExpected], node_annotation_decode_legacy),
    "hami/pod_annotation_codec": suite(Case[CodecInput, CodecExpected], pod_annotation_codec),
    "hami/request_parse": suite(Case[ParseInput, Request], request_parse),
    "hami/type_select": suite(Case[SelectInput, Selected], type_select),
    "hami/uuid_select": suite(Case[SelectInput, Selected], uuid_select),
}

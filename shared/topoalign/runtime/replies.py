"""Makes functions that `Bus.serve` accepts from functions with typed requests, and encodes their replies."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from topoalign.core import wire
from topoalign.core.model.errors import TopoalignError, Unavailable, Undecodable
from topoalign.core.model.strict_json import AmbiguousJson, load_strict_json
from topoalign.core.ports import Answer, Endpoint

Q = TypeVar("Q")

log = structlog.get_logger("topoalign.runtime.replies")


def answer_with(kind: type[Q], handle: Callable[[Q], Awaitable[object]]) -> Answer:
    """Makes an endpoint's function: it decodes the request, calls `handle` and encodes the result."""

    async def answer(body: bytes) -> bytes:
        refuse_ambiguous(body)
        return wire.encode_answer(await handle(wire.decode_request(body, kind)))

    return answer


def refuse_ambiguous(body: bytes) -> None:
    """Raises Undecodable for JSON with more than one meaning. The decoder of the body reports other errors."""
    if len(body) > wire.LARGEST_BODY:
        return
    try:
        load_strict_json(body.decode())
    except AmbiguousJson as error:
        raise Undecodable("the request", str(error)) from error
    except (ValueError, RecursionError):
        return


async def reply_to(endpoint: Endpoint, body: bytes) -> bytes:
    """
    The reply of an endpoint; every error becomes a failure that the client can decode. An unexpected exception is
    logged with its traceback; the client does not receive its text, because that can contain anything.
    """
    try:
        reply = await endpoint.answer(body)
    except TopoalignError as error:
        return wire.encode_error(error)
    except Exception:  # a defect must neither end the service nor leave the client waiting
        log.exception("question failed", endpoint=endpoint.name)
        return wire.encode_error(Unavailable("the service met a defect of its own", "its log has the details"))
    if len(reply) > wire.LARGEST_BODY:
        return wire.encode_error(
            Unavailable(f"the answer of {len(reply)} bytes is more than {wire.LARGEST_BODY}", "ask for less at once")
        )
    return reply

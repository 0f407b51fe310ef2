"""Questions and answers as bytes: a function that answers a typed request, as `Bus.serve` expects it, and its reply."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from topoalign.core import wire
from topoalign.core.model.errors import TopoalignError, Unavailable
from topoalign.core.ports import Answer, Endpoint
from topoalign.runtime.strict_json import refuse_malformed

Q = TypeVar("Q")

log = structlog.get_logger("topoalign.runtime.answers")


def answering(kind: type[Q], handle: Callable[[Q], Awaitable[object]]) -> Answer:
    """Decodes the question and encodes the result."""

    async def answer(body: bytes) -> bytes:
        refuse_malformed(body)
        return wire.encode_answer(await handle(wire.decode_request(body, kind)))

    return answer


async def reply_to(endpoint: Endpoint, body: bytes) -> bytes:
    """
    An endpoint's answer as it may be sent; every error is a failure that the asker can read.

    A defect is logged whole here and told to the asker without its text, which may hold anything.
    """
    try:
        reply = await endpoint.answer(body)
    except TopoalignError as error:
        return wire.encode_error(error)
    except Exception:  # a defect must neither end the service nor leave the asker waiting
        log.exception("question failed", endpoint=endpoint.name)
        return wire.encode_error(Unavailable("the service met a defect of its own", "its log has the details"))
    if len(reply) > wire.LARGEST_BODY:
        return wire.encode_error(
            Unavailable(f"the answer of {len(reply)} bytes is more than {wire.LARGEST_BODY}", "ask for less at once")
        )
    return reply

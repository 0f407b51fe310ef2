"""
What this allocator stands by, for whoever asks whether it is there.

A listener cannot tell a forged fact from a true one by its number. The writer can: it answers with the numbers and the
digest of what it has said last, and the listener compares.
"""

from collections.abc import Sequence

from topoalign.allocator.hardware_watch import HardwareWatch
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.reconciliation.usage import UsageTeller
from topoalign.core import wire
from topoalign.core.model.errors import InvalidField, clean
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import AliveRequest, AnnounceRequest, Standing
from topoalign.core.ports import Endpoint
from topoalign.runtime.answers import answering


class Standings:
    """Answers `alive` with the `Standing` of the node, and `announce` by having its usage published again."""

    def __init__(self, ledger: Ledger, hardware_watch: HardwareWatch, usage: UsageTeller) -> None:
        self._ledger = ledger
        self._hardware_watch = hardware_watch
        self._usage = usage

    def endpoints(self) -> Sequence[Endpoint]:
        """The endpoints `alive` and `announce`, to serve on the bus."""
        node = self._ledger.node
        answers = {"alive": answering(AliveRequest, self.alive), "announce": answering(AnnounceRequest, self.announce)}
        return [
            Endpoint(name=verb, subject=wire.admission_subject(node, verb), answer=a) for verb, a in answers.items()
        ]

    async def alive(self, request: AliveRequest) -> Standing:
        """The numbers and the digest of what the allocator published last. Raises InvalidField for another node."""
        self._own(request.node)
        state = self._ledger.state
        readings = {**self._hardware_watch.newest, **self._usage_place()}
        return Standing(epoch=state.epoch, seq=state.seq, digest=state.digest, readings=readings)

    async def announce(self, request: AnnounceRequest) -> dict[str, tuple[int, int]]:
        """
        Has the usage published under a new epoch; returns its epoch and revision. Raises InvalidField for another node.
        """
        self._own(request.node)
        self._usage.announce()
        return self._usage_place()

    def _usage_place(self) -> dict[str, tuple[int, int]]:
        """Nothing before it was said: nobody can have heard it."""
        usage = self._ledger.state.usage
        return {"usage": (usage.epoch, usage.revision)} if usage is not None and self._usage.has_said else {}

    def _own(self, node: NodeName) -> None:
        if node != self._ledger.node:
            raise InvalidField("node", f"{clean(node)!r} is not this node", f"ask {self._ledger.node!r} here")
